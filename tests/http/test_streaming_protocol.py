"""The events of a stream: their order, their fields, their end; and that a stream tells what a plain answer tells."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import every_way

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PATHS = {"/v1/completions": {"prompt": "Hi"}, "/v1/chat/completions": CHAT}

ENDINGS = {
    "length": {"max_tokens": 3},
    "stop string": {
        "max_tokens": 9,
        "stop": ["og d"],
        "temperature": 0,
        "logit_bias": {"2767": 100},
    },
    "stop at the first token": {"max_tokens": 9, "temperature": 0, "logit_bias": {"2": 100}},
    "three choices": {"max_tokens": 3, "n": 3},
    "usage": {"max_tokens": 3, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_done_comes_last_and_once_and_then_the_body_ends_C1(asker, path, ending):
    connection = asker.connect()
    body = json.dumps({"stream": True} | PATHS[path] | ENDINGS[ending])
    connection.request("POST", path, body)
    response = connection.getresponse()
    assert response.headers["Transfer-Encoding"] == "chunked"
    data = response.read()  # to the last chunk: raises if the body is cut off
    assert data.endswith(b"\n\ndata: [DONE]\n\n") and data.count(b"[DONE]") == 1
    # The connection lives: the next request goes over it.
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize("path", PATHS)
def test_usage_is_an_event_of_its_own_and_only_when_asked_for_C2(asker, path):
    silent = asker.stream(path, **PATHS[path], max_tokens=3).objects()
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in silent)
    for options in ({}, {"include_usage": False}, None):
        told = asker.stream(path, **PATHS[path], max_tokens=3, stream_options=options).objects()
        assert all(chunk["choices"] and chunk.get("usage") is None for chunk in told)
    told = asker.stream(
        path, **PATHS[path], max_tokens=3, stream_options={"include_usage": True}
    ).objects()
    *chunks, last = told
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in chunks)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 3
    answer = asker.post(path, PATHS[path] | {"stream_options": {"include_usage": True}})
    assert answer.status == 400 and answer.error()["param"] == "stream_options"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_finish_reason_is_null_until_the_end_and_told_once_a_choice_C3(asker, path, ending):
    ends: dict[int, list[str]] = {}
    for chunk in asker.stream(path, **PATHS[path] | ENDINGS[ending]).objects():
        for choice in chunk["choices"]:
            assert choice["finish_reason"] in (None, "stop", "length")
            ends.setdefault(choice["index"], []).append(choice["finish_reason"])
    assert sorted(ends) == list(range(ENDINGS[ending].get("n", 1)))
    for reasons in ends.values():
        assert [r for r in reasons if r is not None] == [reasons[-1]]


@pytest.mark.parametrize("n", [1, 2])
def test_the_first_event_of_a_choice_has_the_role_and_no_later_one_C4(asker, n):
    deltas: dict[int, list[dict]] = {}
    for chunk in asker.stream("/v1/chat/completions", **CHAT, max_tokens=4, n=n).objects():
        for choice in chunk["choices"]:
            deltas.setdefault(choice["index"], []).append(choice["delta"])
    for first, *later in deltas.values():
        assert first["role"] == "assistant" and first["content"] == ""
        assert all("role" not in delta for delta in later)
        assert all(isinstance(delta.get("content", ""), str) for delta in later)


@pytest.mark.parametrize("path", PATHS)
def test_all_events_of_a_response_carry_its_id_model_and_object_name(asker, path):
    chunks = asker.stream(path, **PATHS[path], max_tokens=3).objects()
    plain = asker.post(path, PATHS[path] | {"max_tokens": 3}).json()
    is_chat = "chat" in path
    assert {c["object"] for c in chunks} == {
        "chat.completion.chunk" if is_chat else "text_completion"
    }
    assert plain["object"] == ("chat.completion" if is_chat else "text_completion")
    (stream_id,) = {c["id"] for c in chunks}
    for response_id in (stream_id, plain["id"]):
        prefix, _, number = response_id.rpartition("-")
        assert prefix == ("chatcmpl" if is_chat else "cmpl")
        assert len(number) == 16 and int(number, 16)
    assert stream_id != plain["id"]
    model = asker.get("/v1/models").json()["data"][0]["id"]
    assert {c["model"] for c in chunks} == {plain["model"]} == {model}
    (created,) = {c["created"] for c in chunks}
    assert 0 <= plain["created"] - created <= 60


def test_several_choices_keep_their_texts_apart_C7(asker):
    fields = {"n": 3, "max_tokens": 5, "temperature": 1}
    for seed in range(50):
        stream = asker.stream(**fields, seed=seed, stream_options={"include_usage": True})
        *chunks, last = stream.objects()
        texts = ["", "", ""]
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        plain = asker.complete(**fields, seed=seed)
        assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2]
        assert [choice["text"] for choice in plain["choices"]] == texts
        assert len(set(texts)) == 3
        assert last["usage"] == plain["usage"]
        assert plain["usage"]["completion_tokens"] == 15


@settings(
    max_examples=settings.default.max_examples * 2 // 5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    # "Say": a prompt of nothing but control characters that the vocabulary has no token for is refused.
    prompt=st.text(
        st.characters(blacklist_categories=["Cs"], blacklist_characters="\x00"), max_size=40
    ).map("Say {}".format),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 40),
    stop=st.lists(st.text("aeinorst ", min_size=1, max_size=3), max_size=4),
    min_tokens=st.integers(0, 6),
    include_stop=st.booleans(),
)
def test_a_stream_tells_what_a_plain_answer_and_generate_tell(
    server, prompt, seed, max_tokens, stop, min_tokens, include_stop
):
    told = every_way(
        server,
        prompt=prompt,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop,
        min_tokens=min_tokens,
        include_stop_str_in_output=include_stop,
    )
    assert told.num_tokens <= max_tokens
    if told.finish == "length":
        assert told.num_tokens == max_tokens
    elif told.matched in stop:
        assert told.text.endswith(told.matched) == include_stop or include_stop is False


def test_usage_counts_a_prompt_once_and_kept_tokens_over_all_choices_G5(asker, seed_of, force):
    assert asker.complete(prompt="Hello world", max_tokens=4)["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    usage = asker.complete(prompt=["Hello world", "Hi"], n=3, max_tokens=4)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 24)
    *_, last = asker.stream(
        prompt=["Hello world", "Hi"],
        n=3,
        max_tokens=4,
        stream_options={"include_usage": True},
    ).objects()
    assert last["usage"] == usage
    several = asker.complete(seed=seed_of("twenty_at_once"), max_tokens=20)["usage"]
    assert several["completion_tokens"] == 20
    stopped = asker.complete(stop=["og d"], max_tokens=9, **force(2767))["usage"]
    assert stopped["completion_tokens"] == 2
    chat = asker.post("/v1/chat/completions", CHAT | {"max_tokens": 1}).json()["usage"]
    assert chat["prompt_tokens"] == 31


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 7},
        {"max_tokens": 7, "n": 3},
        {"max_tokens": 5, "prompt": ["Hello world", "Hi"]},
        {"max_tokens": 20, "script": "twenty_at_once"},
        {"max_tokens": 3, "script": "one_two_three_four_at_once"},
        {"max_tokens": 9, "script": "dog_then_eos"},
        {"max_tokens": 9, "stop": ["og d"], "logit_bias": {"2767": 100}},
        {"max_tokens": 9, "echo": True},
    ],
)
def test_usage_is_the_same_streamed_and_plain_and_adds_up_G5(asker, seed_of, fields):
    script = fields.get("script")
    body = {"prompt": "Hello world", "seed": seed_of(script) if script else 3, **fields}
    body.pop("script", None)
    whole = asker.complete(**body, return_token_ids=True)
    usage = whole["usage"]
    kept = [token for choice in whole["choices"] for token in choice["token_ids"]]
    assert usage["completion_tokens"] == len(kept)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    events = asker.stream(**body, stream_options={"include_usage": True}).objects()
    assert events[-1]["usage"] == usage and not events[-1]["choices"]
    told = {"include_usage": True, "continuous_usage_stats": True}
    if len(whole["choices"]) == 1:
        counts = [e["usage"]["completion_tokens"] for e in asker.stream(**body, stream_options=told).objects()]  # fmt: skip
        assert counts == sorted(counts) and counts[-1] == usage["completion_tokens"]


def test_an_aborted_stream_has_counted_what_it_sent_G5(asker):
    stream = asker.stream(
        prompt="Hello world",
        max_tokens=5_000,
        ignore_eos=True,
        request_id="g5",
        return_token_ids=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    early = stream.take(3)
    assert asker.post("/abort_request", {"rid": "g5"}).json() == {"num_aborted": 1}
    *late, aborted, done = [*early, *stream.events()]
    stream.leave()
    assert done == "[DONE]" and "aborted" in aborted
    num_tokens = 0
    for event in map(json.loads, late):
        if event["choices"]:
            num_tokens += len(event["choices"][0].get("token_ids") or ())
        assert event["usage"]["completion_tokens"] == num_tokens
        assert event["usage"]["total_tokens"] == 2 + num_tokens
    assert num_tokens >= 2


def test_a_request_asked_for_over_http_1_0_streams_without_chunks_and_closes(server, wire):
    told = wire(server)
    told.send("/v1/completions", {"prompt": "Hi", "stream": True, "max_tokens": 3}, version="1.0")
    head, _, body = told.read_all().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200") and b"chunked" not in head.lower()
    events = [part for part in body.split(b"\n\n") if part]
    assert all(event.startswith(b"data: ") for event in events)
    assert events[-1] == b"data: [DONE]"
    assert len(events) == 5  # three tokens, the end, [DONE]


def test_an_http_1_0_plain_answer_closes_the_connection(server, wire):
    told = wire(server)
    told.send("/v1/completions", {"prompt": "Hi", "max_tokens": 3}, version="1.0")
    head, _, body = told.read_all().partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert json.loads(body)["usage"]["completion_tokens"] == 3


def test_a_second_request_behind_a_running_stream_is_answered_after_it(server, wire):
    """Pipelined: the answers come in order and whole, or the connection is closed behind the first."""
    told = wire(server)
    told.send("/v1/completions", {"prompt": "Hi", "stream": True, "max_tokens": 20})
    told.send("/v1/models", method="GET")
    first = told.read_until(b"0\r\n\r\n")
    assert first.count(b"data: [DONE]") == 1
    rest = first.partition(b"\r\n0\r\n\r\n")[2] or told.sock.recv(65536)
    assert rest == b"" or rest.startswith(b"HTTP/1.1 200 OK")


def test_requests_reuse_a_connection(server):
    connection = server.connect()
    for i in range(5):
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({"prompt": "Hi", "max_tokens": 2, "stream": bool(i % 2)}),
        )
        response = connection.getresponse()
        assert response.status == 200
        assert response.read()
        if i == 0:
            port = connection.sock.getsockname()[1]
        assert connection.sock.getsockname()[1] == port
    connection.close()


def test_bytes_that_are_no_http_are_answered_with_400_and_no_traceback(server, asker, wire):
    connection = wire(server)
    connection.sock.sendall(b"NOT/HTTP \x00\xff\r\n\r\n")
    assert connection.read_all().startswith(b"HTTP/1.0 400")
    assert "Traceback" not in server.output()
