"""What a client sees of the prefix cache: cached tokens in every answer, salts, and how it is flushed and switched off."""

import itertools

import pytest

_numbers = itertools.count()
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture
def prompt() -> str:
    """At least 64 tokens that no other test has sent."""
    return f"{next(_numbers)} bottles of beer stand on the wall; " * 8


def cached(asker, prompt: str, **fields) -> tuple[int, int]:
    """(prompt tokens, those of them that were cached)."""
    usage = asker.complete(prompt=prompt, max_tokens=1, **fields)["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def full_blocks(num_tokens: int) -> int:
    """Tokens that a second request finds: full blocks of 16, and never the last token."""
    return (num_tokens - 1) // 16 * 16


def test_cached_tokens_are_told_alike_in_every_kind_of_answer_G6(asker, prompt):
    num_prompt, first = cached(asker, prompt)
    assert first == 0
    wanted = full_blocks(num_prompt)
    assert wanted >= 64
    assert cached(asker, prompt) == (num_prompt, wanted)
    stream = asker.stream(prompt=prompt, max_tokens=2, stream_options={"include_usage": True})
    usage = stream.objects()[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == wanted
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 2}}
    assert asker.post("/generate", body).json()["meta_info"]["cached_tokens"] == wanted


def test_the_answer_of_an_earlier_turn_is_found(asker, force):
    def chat(*turns):
        roles = itertools.cycle(("user", "assistant"))
        messages = [
            {"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)
        ]
        body = {"messages": messages, "max_tokens": 40, "seed": 5, **force(905)}
        return asker.post("/v1/chat/completions", body).json()

    question = f"Question {next(_numbers)}: what?"
    first = chat(question)
    answer = first["choices"][0]["message"]["content"]
    assert answer == " world" * 40
    usage = chat(question, answer, "And then?")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] + 16


def test_choices_of_one_prompt_share_it_and_usage_counts_it_once_G6(asker, prompt):
    usage = asker.complete(prompt=prompt, max_tokens=1, n=4)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"] - 1
    asked, hit = (
        asker.metrics()[f"vllm:prefix_cache_{what}_total", MODEL] for what in ("queries", "hits")
    )
    assert asked >= 4 * usage["prompt_tokens"]
    assert hit >= 3 * full_blocks(usage["prompt_tokens"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_requests_with_different_salts_share_nothing(asker, prompt, path):
    def hit(**salt):
        body = {
            "/v1/completions": {"prompt": prompt, "max_tokens": 1},
            "/v1/chat/completions": {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 1,
            },
            "/generate": {"text": prompt, "sampling_params": {"max_new_tokens": 1}},
        }[path]
        answer = asker.post(path, body | salt).json()
        if path == "/generate":
            return answer["meta_info"]["cached_tokens"]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    # A chat's template begins alike for all: what is before the prompt is found without a salt, and less than two blocks.
    assert hit(cache_salt="mine") == 0 or path == "/v1/chat/completions"
    assert hit(cache_salt="yours") < 48
    assert hit() < 48
    assert hit(cache_salt="mine") >= 64
    assert hit(cache_salt="") >= 64


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_salt_that_is_too_long_is_refused(asker, path):
    body = {"prompt": "Hi"} if path == "/v1/completions" else {"text": "Hi"}
    answer = asker.post(path, body | {"cache_salt": "x" * 129})
    assert answer.status == 400
    assert answer.error()["param"] == "cache_salt"
    assert asker.post(path, body | {"cache_salt": "x" * 128}).status == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flushed_cache_finds_nothing(asker, prompt, method):
    cached(asker, prompt)
    answer = asker.request(method, "/flush_cache")
    assert (answer.status, answer.body) == (200, b"Cache flushed.\n")
    assert cached(asker, prompt)[1] == 0
    assert cached(asker, prompt)[1] > 0


def test_a_flush_harms_no_stream_that_runs(asker, prompt):
    stream = asker.stream(prompt=prompt, max_tokens=300, seed=7, ignore_eos=True)
    stream.take(3)
    assert asker.get("/flush_cache").status == 200
    rest = stream.objects()
    assert rest[-1]["choices"][0]["finish_reason"] == "length"


def test_what_is_kept_is_not_counted_as_used(asker, prompt):
    cached(asker, prompt)
    asker.wait_idle()
    assert asker.metrics()["vllm:kv_cache_usage_perc", MODEL] == 0


@pytest.mark.slow
def test_the_cache_can_be_switched_off(start_server, prompt):
    server = start_server("--step-ms=1", "--no-prefix-cache")
    cached(server, prompt)
    assert cached(server, prompt)[1] == 0
    assert server.get("/flush_cache").status == 200
