"""What the server refuses, how it says so, and that it goes on afterwards. Errors have one shape everywhere."""

import json

import pytest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": CHAT | {"max_tokens": 2},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
}
LIMITS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/generate": ("max_new_tokens",),
}
VOCAB = 49152


def with_sampling(path, **fields):
    """The body of `path` with sampling fields where it has them."""
    if path == "/generate":
        return {"text": "Hi", "sampling_params": {"max_new_tokens": 2} | fields}
    return BODIES[path] | fields


def refused(asker, path, body, status=400):
    """The error of a request that must be refused: plain, and as a stream before any 200."""
    error = None
    streams = [{}, {"stream": True}] if isinstance(body, dict) else [None]
    for more in streams:
        answer = asker.post(path, body if more is None else body | more)
        assert answer.status == status, answer.body
        error = answer.error()
        assert error["type"] == "invalid_request_error"
    return error


@pytest.fixture(autouse=True)
def goes_on(asker):
    """After every refusal a normal request works."""
    yield
    assert len(asker.text(prompt="Hi", max_tokens=2)) > 0


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in LIMITS.items() for name in names]
)
@pytest.mark.parametrize("value", [0, -5, "10", True, 1.5, [], 10**30])
def test_a_token_limit_that_is_none_is_refused_and_named_D1(asker, path, name, value):
    error = refused(asker, path, with_sampling(path, **{name: value}))
    assert name in error["param"]
    if isinstance(value, int) and not isinstance(value, bool):
        assert str(value) in error["message"]


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in LIMITS.items() for name in names]
)
def test_a_token_limit_of_null_is_the_default_and_a_huge_one_is_cut_D1(asker, path, name):
    body = with_sampling(path, **{name: 10**9}, temperature=0, logit_bias={"2": 100})
    answer = asker.post(path, body)
    assert answer.status == 200  # it ends at the first token: only that it is taken counts
    if path != "/v1/chat/completions":
        body = with_sampling(path, **{name: None})
        answer = asker.post(path, body).json()
        got = (
            answer["meta_info"]["completion_tokens"]
            if path == "/generate"
            else answer["usage"]["completion_tokens"]
        )
        assert got == (128 if path == "/generate" else 16)


def test_a_chat_without_a_limit_runs_to_the_contexts_end_D1(start_short):
    answer = start_short.post("/v1/chat/completions", CHAT).json()
    assert answer["usage"]["total_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("temperature", word)
        for word in (
            "NaN",
            "Infinity",
            "-Infinity",
            "1e999",
            '"NaN"',
            "-0.1",
            "true",
            "10000000",
            "[]",
        )
    ]
    + [("top_p", word) for word in ("NaN", "1.5", "-0.1", "1e999", "true")]
    + [("top_k", word) for word in ("-2", "1.5", "99999999999", '"1"')]
    + [("min_p", word) for word in ("-0.1", "1.1", "NaN")]
    + [("presence_penalty", "NaN"), ("presence_penalty", "10"), ("repetition_penalty", "0")]
    + [("frequency_penalty", "-2.1"), ("repetition_penalty", "-1"), ("repetition_penalty", "NaN")]
    + [("seed", "1.5"), ("seed", '"x"'), ("n", "0"), ("n", "-1"), ("n", "1000000"), ("n", "true")],
)
def test_a_number_that_is_none_or_out_of_range_is_refused_D2(asker, path, name, word):
    body = json.dumps(with_sampling(path, **{name: "HOLE"})).replace('"HOLE"', word)
    answer = asker.post(path, body.encode())
    assert answer.status == 400
    answer.error()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e6},
        {"temperature": 1e-12},
        {"temperature": 0},
        {"top_p": 0},
        {"top_k": -1},
        {"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 1e-6},
    ],
)
def test_numbers_at_the_edges_are_served_D2(asker, fields):
    assert asker.complete(max_tokens=2, **fields)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([19556, VOCAB], "49152"),
        ([-1], "-1"),
        ([5279552648203111001], "5279552648203111001"),
        ([19556 + 2**32], str(19556 + 2**32)),
        ([10**25], ""),
        ([True], ""),
        ([1.5], ""),
        ([[19556], [VOCAB]], "49152"),
        ([], ""),
        ([[]], ""),
        (["Hi", [1]], None),
        ([1, "Hi"], ""),
        (7, ""),
        ({}, ""),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_and_named_D3(asker, prompt, named):
    bodies = [("/v1/completions", "prompt", {"prompt": prompt, "max_tokens": 2})]
    bodies.append(
        ("/generate", "input_ids", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}})
    )
    for path, name, body in bodies:
        if named is None:
            assert asker.post(path, body).status in (200, 400)  # strings and ids in one list
            continue
        error = refused(asker, path, body)
        assert error["param"].startswith(name)
        assert named in error["message"]


def test_the_last_id_of_the_vocabulary_is_one_D3(asker):
    assert asker.complete(prompt=[19556, VOCAB - 1], max_tokens=1)["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "bias",
    ['{"49152":-100}', '{"-1":1}', '{"abc":1}', '{"12":"x"}', '{"12":NaN}', '{"12":101}', '{"12":null}', "[]",
     '{"\uff11\uff12":1}', '{"12":1,"012":2}', '{" 12":1}', '{"":1}'],
)  # fmt: skip
def test_a_bad_logit_bias_is_refused_D4(asker, path, bias):
    body = json.dumps(with_sampling(path, logit_bias="HOLE")).replace('"HOLE"', bias)
    answer = asker.post(path, body.encode())
    assert answer.status == 400
    assert answer.error()["code"] != "internal_error"


def test_a_logit_bias_counts_for_every_choice_and_no_other_request_D4(asker):
    forced = asker.stream(prompt="Hi", n=3, max_tokens=30, logit_bias={"2767": 100})
    free = asker.text(prompt="Hi", max_tokens=30, seed=1)
    texts = ["", "", ""]
    for chunk in forced.objects():
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [" dog" * 30] * 3
    assert free == asker.text(prompt="Hi", max_tokens=30, seed=1)
    assert " dog dog" not in free


@pytest.mark.parametrize("depth", [100, 900, 1000, 20_000, 200_000])
def test_deeply_nested_json_is_refused_or_ignored_D5(asker, depth):
    nest = "[" * depth + "]" * depth
    for path, body in BODIES.items():
        for field in ('"x":@', '"metadata":@', '"tools":[{"type":"function","function":{"parameters":@}}]',
                      '"chat_template_kwargs":{"a":@}'):  # fmt: skip
            text = json.dumps(body)[:-1] + "," + field.replace("@", nest) + "}"
            answer = asker.post(path, text.encode())
            assert answer.status in (200, 400), answer.body
            if answer.status == 400:
                answer.error()
    message = json.dumps(
        {"messages": [{"role": "user", "content": "Hi", "x": "@"}], "max_tokens": 1}
    )
    answer = asker.post("/v1/chat/completions", message.replace('"@"', nest).encode())
    assert answer.status in (200, 400)


def test_a_body_larger_than_a_megabyte_is_read_D6(asker):
    body = CHAT | {"messages": [{"role": "user", "content": "long " * 300_000}]}
    error = refused(asker, "/v1/chat/completions", body)
    assert error["code"] == "context_length_exceeded"


def test_a_body_over_the_limit_is_413_and_not_kept_D6(server, wire):
    """The limit of this server is 4 MiB; the refusal comes by the header, before the body."""
    told = wire(server)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    told.sock.sendall(head.encode() + b'{"prompt":')
    answer = told.read_until(b"}}")
    assert answer.startswith(b"HTTP/1.1 413")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "body_too_large" and "4194304" in error["message"]
    assert server.words("http")["in_flight"] == 0


def test_a_chunked_body_over_the_limit_is_413_too_D6(server, wire):
    told = wire(server)
    told.sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    block = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    try:
        for _ in range(80):
            told.sock.sendall(block)
    except (ConnectionResetError, BrokenPipeError):
        pytest.fail("reset before the answer could be read")
    assert told.read_until(b"}}").startswith(b"HTTP/1.1 413")


def test_content_may_be_a_list_of_text_parts_D7(asker):
    def tokens(content, role="user"):
        messages = [{"role": role, "content": content}, {"role": "user", "content": "x"}]
        answer = asker.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer.status == 200, answer.body
        return answer.json()["usage"]["prompt_tokens"]

    parts = [{"type": "text", "text": "Hello wor"}, {"type": "text", "text": "ld and more"}]
    for role in ("system", "user", "assistant"):
        assert tokens(parts, role) == tokens("Hello world and more", role)


@pytest.mark.parametrize(
    "content",
    [
        [],
        [{"type": "text"}],
        ["x"],
        [{"type": "image_url", "image_url": {"url": "data:,"}}],
        [{"type": "text", "text": 1}],
        7,
        {"text": "x"},
    ],
)
def test_content_that_is_no_text_is_refused_and_named_D7(asker, content):
    error = refused(
        asker, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
    )
    assert error["param"].startswith("messages[0].content")


@pytest.mark.parametrize(
    "messages", [[{}], [{"content": "Hi"}], [{"role": 1, "content": "Hi"}], ["Hi"], "Hi", {}]
)
def test_messages_of_another_shape_are_refused(asker, messages):
    assert "messages" in refused(asker, "/v1/chat/completions", {"messages": messages})["param"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": [""]}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": ["Hi", ""]}),
        ("/v1/completions", {"prompt": None}),
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {}),
        ("/generate", {"text": ""}),
        ("/generate", {"text": [""]}),
        ("/generate", {"input_ids": []}),
        ("/generate", {}),
        ("/generate", {"text": "Hi", "input_ids": [1]}),
    ],
)
def test_an_empty_prompt_is_refused_D8(asker, path, body):
    refused(asker, path, body)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers_D9(asker):
    for path, body in (
        ("/v1/completions", {"prompt": [19556] * 9000}),
        ("/generate", {"input_ids": [19556] * 9000}),
    ):
        error = refused(asker, path, body)
        assert error["code"] == "context_length_exceeded"
        assert "9000" in error["message"] and "8192" in error["message"]
    assert refused(asker, "/v1/completions", {"prompt": [19556] * 8192})["code"] == (
        "context_length_exceeded"
    )


def test_an_answer_is_cut_where_the_context_ends_D9(start_short):
    answer = start_short.complete(prompt=[19556] * 60, max_tokens=500)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"
    assert start_short.complete(prompt=[19556] * 63)["usage"]["completion_tokens"] == 1


@pytest.fixture(scope="module")
def start_short(start_server):
    """A server with a context of 64 tokens."""
    return start_server("--step-ms=1", "--max-model-len=64")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body",
    [b'{"a":1,}', b"", b"[]", b'"x"', b"null", b"\xff\xfe", b"{", b'{"prompt":"\\ud800"}', b"7"],
)
def test_bad_json_is_refused_D10(asker, path, body):
    answer = asker.post(path, body)
    assert answer.status == 400
    assert answer.error()["code"] == "invalid_json"


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/json; charset=latin-1"])
def test_the_content_type_does_not_matter_D10(asker, content_type):
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    answer = asker.request("POST", "/v1/completions", body, {"Content-Type": content_type})
    assert answer.status == 200


def test_unknown_models_paths_and_methods_have_the_one_error_shape_D10(asker):
    for path, body in BODIES.items():
        answer = asker.post(path, body | {"model": "nobody"})
        assert (answer.status, answer.error()["code"]) == (404, "model_not_found")
        assert answer.error()["param"] == "model"
        for method in ("GET", "DELETE", "OPTIONS"):
            answer = asker.request(method, path)
            assert (answer.status, answer.error()["code"]) == (405, "method_not_allowed")
            assert "POST" in answer.headers["allow"]
        assert asker.request("HEAD", path).status == 405
    answer = asker.get("/no/such/path")
    assert (answer.status, answer.error()["code"]) == (404, "not_found")
    answer = asker.get("/v1/models/nobody")
    assert (answer.status, answer.error()["code"]) == (404, "model_not_found")
    answer = asker.post("/v1/models", {})
    assert answer.status == 405 and answer.error()


def test_the_model_may_be_named_or_not(asker):
    name = asker.get("/v1/models").json()["data"][0]["id"]
    assert asker.complete(model=name, max_tokens=1)["model"] == name
    assert asker.complete(model=None, max_tokens=1)["model"] == name


def test_of_a_key_that_stands_twice_the_last_one_is_checked_and_used_D10(asker):
    answer = asker.post("/v1/completions", b'{"prompt":"Hi","max_tokens":-1,"max_tokens":3}')
    assert answer.json()["usage"]["completion_tokens"] == 3
    answer = asker.post("/v1/completions", b'{"prompt":"Hi","max_tokens":3,"max_tokens":-1}')
    assert answer.status == 400


UNSUPPORTED = {
    "/v1/completions": {"suffix": "x", "best_of": 2},
    "/v1/chat/completions": {"audio": {}, "modalities": ["audio"], "use_beam_search": True},
}


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_a_field_that_is_not_honoured_yet_is_refused_by_name(asker, path):
    for name, value in UNSUPPORTED[path].items():
        error = refused(asker, path, BODIES[path] | {name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert name in error["message"]


def test_a_field_of_generate_that_is_not_honoured_yet_is_refused_by_name(asker):
    for name, value in {
        "lora_path": "x",
        "image_data": "x",
    }.items():
        error = refused(asker, "/generate", BODIES["/generate"] | {name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    for name, value in {}.items():
        error = refused(asker, "/generate", with_sampling("/generate", **{name: value}))
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize("path", BODIES)
def test_values_that_ask_for_nothing_are_taken(asker, path):
    harmless = {
        "/v1/completions": {"echo": False, "logprobs": None, "suffix": None, "best_of": 1},
        "/v1/chat/completions": {
            "logprobs": False,
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "top_logprobs": 0,
        },
        "/generate": {"return_logprob": False, "priority": 0, "top_logprobs_num": 0},
    }[path]
    penalties = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1}
    body = BODIES[path] | harmless
    if path == "/generate":
        body["sampling_params"] = body["sampling_params"] | penalties
    else:
        body |= penalties
    answer = asker.post(path, body)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_nobody_knows_are_ignored_and_named_in_a_header(asker, path):
    answer = asker.post(path, BODIES[path] | {"zebra": 1, "aardvark": None, "é\n": 1})
    assert answer.status == 200
    assert answer.headers["x-shmserve-ignored"] == "aardvark, zebra"
    assert "x-shmserve-ignored" not in asker.post(path, BODIES[path]).headers
    stream = asker.stream(path, **BODIES[path], zebra=1)
    assert stream.response.headers["X-Shmserve-Ignored"] == "zebra"
    assert stream.objects()


@pytest.mark.parametrize("path", BODIES)
def test_the_request_id_is_taken_and_given_back(asker, path):
    for more in ({}, {"stream": True}):
        answer = asker.request("POST", path, BODIES[path] | more, {"X-Request-Id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
    name = "rid" if path == "/generate" else "request_id"
    answer = asker.post(path, BODIES[path] | {name: "from-the-body"})
    assert answer.headers["x-request-id"] == "from-the-body"
    bad = asker.post(path, BODIES[path] | {name: "a\r\nSet-Cookie: b"})
    assert bad.status == 200 and "set-cookie" not in bad.headers
    # The same id twice is a retry, not a fault.
    assert asker.request("POST", path, BODIES[path], {"X-Request-Id": "abc-1"}).status == 200


def test_a_refusal_carries_the_request_id_too(asker):
    answer = asker.request("POST", "/v1/completions", {"prompt": ""}, {"X-Request-Id": "abc-2"})
    assert answer.status == 400
    assert answer.headers["x-request-id"] == "abc-2"


def test_logprobs_beyond_the_limit_are_refused_with_both_numbers(asker):
    for path, name, more in (
        ("/v1/completions", "logprobs", {}),
        ("/v1/chat/completions", "top_logprobs", {"logprobs": True}),
        ("/generate", "top_logprobs_num", {"return_logprob": True}),
    ):
        for value in (21, -1):
            error = refused(asker, path, BODIES[path] | more | {name: value})
            assert error["param"] == name
            assert "20" in error["message"] and str(value) in error["message"]


def test_top_logprobs_without_logprobs_is_refused_in_vllms_words(asker):
    error = refused(
        asker, "/v1/chat/completions", BODIES["/v1/chat/completions"] | {"top_logprobs": 2}
    )
    assert error["message"] == "when using `top_logprobs`, `logprobs` must be set to true."
