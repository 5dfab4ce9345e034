"""/generate, and the endpoints that generate nothing."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import GENERATING, until

from shmserve import __version__


def test_models_lists_the_one_model_with_its_context(asker):
    whole = asker.get("/v1/models").json()
    assert whole["object"] == "list"
    (model,) = whole["data"]
    assert model["id"] == "SmolLM2-135M-Instruct"
    assert model["max_model_len"] == 8192
    assert model["object"] == "model" and isinstance(model["created"], int)
    assert asker.get("/v1/models/SmolLM2-135M-Instruct").json() == model


def test_health_and_version_answer_while_serving(asker):
    for path in ("/live", "/health", "/ready"):
        answer = asker.get(path)
        assert (answer.status, answer.body) == (200, b"")
        assert asker.request("HEAD", path).status == 200
    assert asker.get("/version").json() == {"version": __version__}
    head = asker.request("HEAD", "/v1/models")
    assert (head.status, head.body) == (200, b"")


@pytest.mark.slow
def test_health_says_that_a_stopped_worker_does_not_serve_and_live_that_the_loop_turns(
    start_server,
):
    import os
    import signal

    server = start_server("--step-ms=2")
    os.kill(server.worker_pid, signal.SIGSTOP)
    try:
        answer = until(lambda: (a := server.get("/health")).status == 503 and a, "unhealthy")
        told = answer.json()
        assert told["status"] == "unavailable"
        assert told["workers"][0]["worker"] == 0
        assert int(answer.headers["retry-after"]) >= 1
        assert server.get("/live").status == 200
        refused = server.post("/v1/completions", {"prompt": "Hi", "stream": True})
        assert refused.status == 503 and refused.error()["code"] == "no_worker"
        assert int(refused.headers["retry-after"]) >= 1
    finally:
        os.kill(server.worker_pid, signal.SIGCONT)
    until(lambda: server.get("/health").status == 200, "healthy again")
    assert server.text(max_tokens=2)


def test_generate_answers_with_meta_info(asker):
    body = {"text": "Hello world", "sampling_params": {"max_new_tokens": 3}, "rid": "mine"}
    answer = asker.post("/generate", body).json()
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert len(answer["output_ids"]) == 3
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 3, 0)
    assert 0 <= meta["queue_time"] <= meta["first_token_latency"] <= meta["e2e_latency"]


def test_generate_takes_ids_and_lists_and_numbers_what_it_answers(asker):
    sampling = {"max_new_tokens": 2, "temperature": 0, "logit_bias": {"905": 100}}
    one = asker.post("/generate", {"input_ids": [19556], "sampling_params": sampling}).json()
    assert (one["text"], one["output_ids"]) == (" world world", [905, 905])
    body = {"text": ["Hello world", "Hi"], "sampling_params": sampling}
    two = asker.post("/generate", body).json()
    assert [answer["index"] for answer in two] == [0, 1]
    assert [answer["meta_info"]["prompt_tokens"] for answer in two] == [2, 1]
    each = {**body, "sampling_params": [sampling, sampling | {"max_new_tokens": 4}]}
    two = asker.post("/generate", each).json()
    assert [len(answer["output_ids"]) for answer in two] == [2, 4]
    answer = asker.post("/generate", body | {"sampling_params": [sampling]})
    assert answer.status == 400 and answer.error()["param"] == "sampling_params"
    several = asker.post("/generate", {"text": "Hi", "sampling_params": sampling | {"n": 3}}).json()
    assert [answer["index"] for answer in several] == [0, 1, 2]


def test_generate_streams_cumulatively_or_in_steps(asker):
    sampling = {"max_new_tokens": 4, "temperature": 0, "logit_bias": {"905": 100}}
    body = {"text": "Hi", "sampling_params": sampling}
    frames = asker.stream("/generate", **body).objects()
    assert [frame["text"] for frame in frames][:-1] == [" world" * i for i in range(1, 5)]
    assert [frame["output_ids"] for frame in frames][:-1] == [[905] * i for i in range(1, 5)]
    assert frames[-1]["text"] == " world" * 4
    ends = [frame["meta_info"]["finish_reason"] for frame in frames]
    assert ends == [None] * 4 + [{"type": "length", "length": 4}]
    counts = [frame["meta_info"]["completion_tokens"] for frame in frames]
    assert counts == [1, 2, 3, 4, 4]
    assert {frame["meta_info"]["prompt_tokens"] for frame in frames} == {1}
    steps = asker.stream("/generate", **body, incremental=True).objects()
    assert [frame["text"] for frame in steps] == [" world"] * 4 + [""]
    assert [frame["output_ids"] for frame in steps] == [[905]] * 4 + [[]]


def test_generate_tells_tokens_whose_text_is_held(asker, force):
    """A token that releases no text is an event all the same: its id is there."""
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": 3, "stop": ["gX"], **force(2767)}}
    frames = asker.stream("/generate", **body, incremental=True).objects()
    assert [frame["output_ids"] for frame in frames] == [[2767], [2767], [2767], []]
    assert "".join(frame["text"] for frame in frames) == " dog dog dog"


def test_generate_may_be_put(asker):
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}
    assert asker.request("PUT", "/generate", body).status == 200


def test_metrics_parse_and_the_counters_move_with_what_was_served(asker):
    def counters():
        told = asker.metrics()
        return {
            name: told[name, process]
            for name, process in (
                ("shmserve_requests_total", "http0"),
                ("shmserve_errors_total", "http0"),
                ("shmserve_frames_total", "http0"),
                ("shmserve_tokens_total", "http0"),
                ("shmserve_generation_tokens_total", "worker0"),
                ("shmserve_prompt_tokens_total", "worker0"),
                ("shmserve_finished_total", "worker0"),
                ("shmserve_e2e_seconds_count", "http0"),
                ("shmserve_queue_seconds_count", "http0"),
            )
        }

    before = counters()
    asker.complete(prompt="Hello world", max_tokens=7)
    asker.stream(prompt="Hello world", max_tokens=5, seed=3).objects()
    assert asker.post("/v1/completions", {"prompt": ""}).status == 400
    wanted = {
        "shmserve_requests_total": 3,
        "shmserve_errors_total": 1,
        "shmserve_frames_total": 6,  # five tokens and the end
        "shmserve_tokens_total": 12,
        "shmserve_generation_tokens_total": 12,
        "shmserve_prompt_tokens_total": 4,
        "shmserve_finished_total": 2,
        "shmserve_e2e_seconds_count": 2,
        "shmserve_queue_seconds_count": 2,
    }
    asker.wait_idle()
    assert {name: value - before[name] for name, value in counters().items()} == wanted


def test_metrics_have_the_names_that_routers_read(asker):
    told = asker.metrics()
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
    ):
        assert told[name, "SmolLM2-135M-Instruct"] == 0


def test_metrics_show_what_runs(asker):
    streams = [asker.stream(max_tokens=8000) for _ in range(3)]
    try:
        until(
            lambda: asker.metrics()["vllm:num_requests_running", "SmolLM2-135M-Instruct"] == 3,
            "3 run",
        )
        told = asker.metrics()
        assert told["shmserve_running", "worker0"] == 3
        assert 0 < told["vllm:kv_cache_usage_perc", "SmolLM2-135M-Instruct"] < 1
        until(lambda: asker.metrics()["shmserve_connections", "http0"] >= 3, "connections")
        rings = {label for name, label in told if name == "shmserve_ring_capacity"}
        assert len(rings) == 2
    finally:
        for stream in streams:
            stream.leave()


def test_histograms_of_the_metrics_are_cumulative(asker):
    asker.stream(max_tokens=5).objects()
    families = text_string_to_metric_families(asker.get("/metrics").body.decode())
    histograms = [family for family in families if family.type == "histogram"]
    assert histograms
    for family in histograms:
        by_process: dict[str, list[float]] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                process = sample.labels.get("process", "")  # none: of all
                by_process.setdefault(process, []).append(sample.value)
        for counts in by_process.values():
            assert counts == sorted(counts)


@pytest.mark.parametrize("path", GENERATING)
def test_the_answer_is_json_of_one_line_with_its_length(asker, path):
    body = {
        "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
        "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 1}},
    }[path]
    answer = asker.post(path, body)
    assert answer.headers["content-type"].startswith("application/json")
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert json.loads(answer.body)
