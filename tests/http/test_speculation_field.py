"""num_speculative_tokens at every endpoint: it is checked, it saves steps, and it changes nothing that a client reads."""

import re

import pytest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
WORLD = 905


def body_of(path: str, count: int, force, **sampling) -> dict:
    if path == "/generate":
        return {"text": "Hi", "sampling_params": {"max_new_tokens": count, **force(WORLD), **sampling}}  # fmt: skip
    prompt = CHAT if path == "/v1/chat/completions" else {"prompt": "Hi"}
    return prompt | {"max_tokens": count, **force(WORLD), **sampling}


@pytest.fixture(scope="module")
def asker(start_server):
    """A server without a script: its simulated runner verifies guesses."""
    return start_server("--step-ms=1")


PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")


def counters(asker) -> tuple[int, int]:
    """(tokens guessed, of them right)."""
    page = asker.get("/metrics").body.decode()
    names = ("num_draft_tokens", "num_accepted_tokens")
    found = [
        re.search(rf"^vllm:spec_decode_{name}_total{{.*}} (\S+)$", page, re.M) for name in names
    ]
    return tuple(int(float(match[1])) for match in found)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [-1, 16, 10**30])
def test_a_number_out_of_range_is_refused_with_its_name_and_limit(asker, path, value, force):
    answer = asker.post(path, body_of(path, 3, force, num_speculative_tokens=value))
    assert answer.status == 400
    error = answer.error()
    assert error["param"] == "num_speculative_tokens"
    assert error["message"] == f"num_speculative_tokens must be 0 to 15, got {value}"


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_the_same_with_guesses_and_without(asker, path, force):
    def text_and_count(**sampling):
        answer = asker.post(path, body_of(path, 40, force, **sampling)).json()
        if path == "/generate":
            return answer["text"], answer["meta_info"]["completion_tokens"]
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return text, answer["usage"]["completion_tokens"], choice["finish_reason"]

    before = counters(asker)
    plain = text_and_count()
    assert counters(asker) == before, "nobody guesses who is not asked to"
    assert plain[:2] == (" world" * 40, 40)
    assert text_and_count(num_speculative_tokens=7) == plain
    guessed, right = (now - then for now, then in zip(counters(asker), before, strict=True))
    assert 25 <= right <= guessed <= 40


def test_a_stream_and_its_logprobs_are_the_same_with_guesses(asker, force):
    def deltas(**more):
        stream = asker.stream(prompt="Hi", max_tokens=30, logprobs=2, **force(WORLD), **more)
        choices = [choice for part in stream.objects() for choice in part["choices"]]
        tokens = [token for c in choices if c["logprobs"] for token in c["logprobs"]["tokens"]]
        top = [one for c in choices if c["logprobs"] for one in c["logprobs"]["top_logprobs"]]
        return "".join(choice["text"] for choice in choices), tokens, top

    text, tokens, top = deltas()
    assert text == " world" * 30 and len(tokens) == len(top) == 30
    assert deltas(num_speculative_tokens=15) == (text, tokens, top)


@pytest.mark.slow
def test_the_servers_default_is_for_who_does_not_say_it(start_server, force):
    eager = start_server("--step-ms=1", "--num-speculative-tokens=5")
    assert eager.text(max_tokens=30, num_speculative_tokens=0, **force(WORLD)) == " world" * 30
    assert counters(eager) == (0, 0)
    for post in (
        lambda: eager.text(max_tokens=30, **force(WORLD)),
        lambda: eager.post("/v1/messages", CHAT | {"max_tokens": 30} | force(WORLD)),
        lambda: eager.post(
            "/v1/responses", {"input": "Hi", "max_output_tokens": 30} | force(WORLD)
        ),
    ):
        before = counters(eager)[1]
        post()
        assert counters(eager)[1] > before + 15
    eager.wait_idle()


def test_meta_info_says_how_the_guesses_did_and_agrees_with_the_counters(asker, force):
    before = counters(asker)
    body = body_of("/generate", 40, force, num_speculative_tokens=4)
    meta = asker.post("/generate", body).json()["meta_info"]
    asker.wait_idle()
    drafts, accepted = (now - then for now, then in zip(counters(asker), before, strict=True))
    assert 0 < meta["spec_num_correct_drafts"] <= meta["spec_num_proposed_drafts"]
    assert (meta["spec_num_proposed_drafts"], meta["spec_num_correct_drafts"]) == (drafts, accepted)
    assert meta["spec_accept_rate"] == accepted / drafts
    assert meta["spec_accept_length"] == 1 + accepted / meta["spec_verify_ct"]
    plain = asker.post("/generate", body_of("/generate", 40, force)).json()["meta_info"]
    assert not [key for key in plain if key.startswith("spec_")]
