"""bench_engine.py: its prompts, figures, ratios, bars, and the servers that it starts and stops."""

import sys
from pathlib import Path

import pytest
from bench_common import command_line
from bench_engine import (
    Bar,
    bars_of,
    batches,
    busy_neighbour,
    check_prompts,
    measure_neighbour,
    measure_pairs,
    ratios_of,
)
from click import BadParameter
from engine_servers import Load, Server, figures, is_whole, make_prompts, our_server, run
from frontend_servers import free_port

from shmserve.load_report import RequestResult

pytestmark = pytest.mark.slow

FAKE = Path(__file__).with_name("fake_completions.py")


def server_at(folder: Path, *options: str, name: str = "fake") -> Server:
    port = free_port()
    command = [sys.executable, str(FAKE), str(port), *options]
    return Server(name, f"http://127.0.0.1:{port}/", command, folder)


def test_prompts_have_as_many_words_as_asked_and_no_two_begin_alike():
    first, second = make_prompts(16, 512, 0), make_prompts(16, 512, 1)
    assert {len(prompt.split()) for prompt in (*first, *second)} == {512}
    assert len({" ".join(prompt.split()[:8]) for prompt in (*first, *second)}) == 32
    assert make_prompts(16, 512, 0) == first


def result(first_ms: int, last_ms: int, num_tokens: int, **fields) -> RequestResult:
    values = {"index": 0, "due_ns": 0, "sent_ns": 0, "end_ns": last_ms * 10**6, "status": 200}
    values |= {"error": None, "arrivals_ns": (first_ms * 10**6, last_ms * 10**6)}
    values |= {"num_tokens": num_tokens, "num_prompt_tokens": 512, "finish_reason": "length"}
    return RequestResult(**(values | fields))


def test_figures_count_the_whole_run_and_the_time_per_token_after_the_first():
    row = figures([result(100, 600, 51), result(300, 2000, 101)])
    assert row["tokens_per_s"] == pytest.approx(152 / 2.0)
    assert row["ttft_p50_ms"] == pytest.approx(200)
    assert row["tpot_p50_ms"] == pytest.approx((10 + 17) / 2)
    assert row["decode_tokens_per_s"] == pytest.approx(2 * 1000 / 13.5)
    assert row["prompt_tokens"] == 512
    assert (
        figures([result(1, 2, 2), result(1, 2, 2, num_prompt_tokens=511)])["prompt_tokens"] is None
    )


@pytest.mark.parametrize(
    ("fields", "is_good"),
    [
        ({}, True),
        ({"error": "broken stream"}, True),  # no [DONE], but a finish reason: transformers serve
        ({"error": "broken stream", "finish_reason": None}, False),
        ({"error": "503"}, False),
        ({"arrivals_ns": ()}, False),
    ],
)
def test_a_stream_is_whole_if_it_says_how_it_ended(fields, is_good):
    assert is_whole(result(1, 2, 2, **fields)) is is_good


def test_a_run_asks_for_the_lengths_and_counts_what_came(tmp_path):
    with server_at(tmp_path) as server:
        assert server.model == "fake-model"
        row = run(server, Load(4, 24, 8, 0))
        pid = server._process.pid
    assert (row["prompt_tokens"], row["output_tokens"]) == (24, 32)
    assert row["tokens_per_s"] > 0 and row["ttft_p50_ms"] > 0 and row["decode_tokens_per_s"] > 0
    assert command_line(pid) == ""


def test_a_server_that_runs_already_is_neither_started_nor_stopped(tmp_path):
    with server_at(tmp_path) as started:
        with Server("again", started.url, (), tmp_path) as again:
            assert run(again, Load(1, 4, 3, 0))["output_tokens"] == 3
        assert run(started, Load(1, 4, 2, 0))["output_tokens"] == 2


def test_a_server_that_ends_at_its_start_is_an_error_with_its_words(tmp_path):
    with pytest.raises(SystemExit, match=r"fake ended with 3:\n(.|\n)*no such option"):
        server_at(tmp_path, "--unknown").__enter__()
    with pytest.raises(SystemExit, match=r"gone: /no/such/program: No such file"):
        Server("gone", "http://127.0.0.1:1", ["/no/such/program"], tmp_path).__enter__()


def test_a_request_that_fails_ends_the_bench(tmp_path):
    with (
        server_at(tmp_path, "--refuse") as server,
        pytest.raises(SystemExit, match="fake: 2 of 2 requests failed: 503"),
    ):
        run(server, Load(2, 4, 4, 0))


def test_a_pair_takes_the_same_prompts_and_tells_the_slower_by_its_ratios(tmp_path):
    with server_at(tmp_path) as ours, server_at(tmp_path, "--slow", name="slow") as peer:
        own, others, ratios = measure_pairs(ours, peer, Load(2, 8, 6, 0), 2)
    assert [len(own), len(others), ratios["peer"], ratios["pairs"]] == [2, 2, "slow", 2]
    assert ratios["tokens_per_s"] > 1 and ratios["ttft"] < 1 and ratios["decode"] > 1


def test_servers_that_count_other_tokens_are_not_compared(tmp_path):
    with (
        server_at(tmp_path) as ours,
        server_at(tmp_path, "--one-more", name="other") as peer,
        pytest.raises(SystemExit, match="8 tokens for shmserve and 9 for other"),
    ):
        measure_pairs(ours, peer, Load(1, 8, 2, 0), 1)
    with pytest.raises(SystemExit, match="None tokens for shmserve"):
        check_prompts({"prompt_tokens": None}, {"prompt_tokens": None}, "other")


def test_ratios_of_nothing_are_nothing():
    row = {"tokens_per_s": 6.0, "ttft_p50_ms": 1.0, "decode_tokens_per_s": None}
    other = {"tokens_per_s": 2.0, "ttft_p50_ms": 4.0, "decode_tokens_per_s": 1.0}
    assert ratios_of(row, other) == {"tokens_per_s": 3.0, "ttft": 0.25, "decode": None}


def test_bars_know_their_peers_and_batches():
    def row(peer: str, batch: int, **values: float) -> dict[str, object]:
        good = {"tokens_per_s": 9.0, "ttft": 0.1, "decode": 9.0}
        return {"peer": peer, "batch": batch, **good, **values}

    rows = [row("llama.cpp", 1, decode=0.9), row("llama.cpp", 1, ttft=0.7)]
    rows += [row("llama.cpp", 8, tokens_per_s=3.0), row("llama.cpp", 16, tokens_per_s=2.9)]
    rows += [row("llama.cpp", 4), row("transformers", 8, tokens_per_s=4.9), row("vllm", 8)]
    rows += [row("another", 8, tokens_per_s=0.1)]
    holds = [bar.holds for bar in bars_of(rows)]
    assert holds == [False, True, True, False, True, False, False, True]
    assert bars_of([row("llama.cpp", 8)])[0] == Bar(
        "tokens_per_s of llama.cpp at B=8", 9.0, 3.0, False
    )


@pytest.mark.parametrize("text", ["8:x", "", "0", "8:0", "1:2:3"])
def test_batches_that_are_none_are_refused(text):
    with pytest.raises(BadParameter):
        batches(None, None, text)


def test_batches_have_pairs():
    assert batches(None, None, "1:7,8") == ((1, 7), (8, 1))


def test_a_neighbour_is_busy_while_it_is_there_and_the_slowdown_is_a_ratio(tmp_path):
    with server_at(tmp_path) as server:
        row = measure_neighbour(server, Load(1, 4, 4, 0), 1)
    assert row["step"] > 0
    with busy_neighbour() as process:
        assert process.poll() is None
    assert process.poll() is not None


def test_our_server_is_an_instance_of_its_own_on_a_free_port(tmp_path):
    words = our_server(tmp_path, "m.gguf", 2, 16, "--block-size 32")._command
    assert words[1:4] == ["-m", "shmserve", "start"]
    said = dict(zip(words[4::2], words[5::2], strict=True))
    assert said["--instance"] == f"bench-{said['--port']}"
    assert said["--threads"] == "2" and said["--max-num-seqs"] == "16"
    assert said["--model"] == "m.gguf" and said["--block-size"] == "32"
