"""What a router in front relies on: paths, bodies and their types, headers, refusals. Needs no router; tests/e2e/routers has one.

Each claim is one that smg, sglang-router, vllm-router, an endpoint picker or a load balancer was seen to need.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import pytest
from keyed import KEY, QUEUE_SLOTS, RUN_SLOTS
from prometheus_client.parser import text_string_to_metric_families
from serving import GENERATING, until

from shmserve.config import HttpConfig

MODEL = "SmolLM2-135M-Instruct"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
PROMPTS = {
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
}

# Fields that the routers put into bodies themselves, with the values they were seen to send.
SGLANG_ROUTER_ADDS = {
    "max_completion_tokens": 2,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "logprobs": False,
}
VLLM_ROUTER_ADDS = {k: v for k, v in SGLANG_ROUTER_ADDS.items() if k != "max_completion_tokens"}
VLLM_ROUTER_ADDS |= {"max_tokens": 2, "include_reasoning": True}
SMG_ADDS_TO_GENERATE = {
    "model": "unknown",
    "log_metrics": False,
    "return_bytes": False,
    "return_entropy": False,
    "background": False,
    "no_logs": False,
}


def types_of(told):
    return {name: type(value) for name, value in told.items()}


@contextmanager
def streams_until_full(server) -> Iterator[None]:
    """Every run slot and every place of the queue is taken, by streams that last for the length of the block."""
    held = []
    body = json.dumps({"prompt": "Hi", "max_tokens": 8000, "ignore_eos": True, "stream": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    try:
        for _ in range(RUN_SLOTS + QUEUE_SLOTS):
            held.append(socket.create_connection(("127.0.0.1", server.port)))
            held[-1].sendall(head.encode())
        until(lambda: server.words("worker")["waiting"] == QUEUE_SLOTS, "the queue is full")
        yield
    finally:
        for each in held:
            each.close()
        server.wait_idle()


@pytest.mark.parametrize("path", ["/health", "/ready", "/live"])
def test_probes_need_no_key_and_answer_with_an_empty_body(behind, path):
    answer = behind.without_key(path)
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/loads", "/server_info", "/metrics"])
def test_whatever_tells_more_than_a_probe_needs_the_key(behind, path):
    assert behind.without_key(path).status == 401
    assert behind.get(path).status == 200


def test_models_says_of_whom_it_is_so_that_smg_need_not_guess(behind):
    told = behind.get("/v1/models").json()
    assert told["object"] == "list"
    (model,) = told["data"]
    wanted = {"id": str, "object": str, "owned_by": str, "root": str, "max_model_len": int}
    assert wanted.items() <= types_of(model).items()
    assert (model["id"], model["owned_by"], model["max_model_len"]) == (MODEL, "sglang", 8192)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_has_the_names_that_sglang_router_reads(behind, path):
    told = behind.get(path).json()
    texts = ("model_path", "served_model_name", "tokenizer_path", "version")
    numbers = ("tp_size", "dp_size", "max_running_requests", "max_total_tokens", "context_length")
    assert {**dict.fromkeys(texts, str), **dict.fromkeys(numbers, int)}.items() <= types_of(
        told
    ).items()
    assert told["served_model_name"] == MODEL
    assert min(told[name] for name in numbers) >= 1


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_says_that_it_generates(behind, path):
    told = behind.get(path).json()
    wanted = {"model_path": str, "tokenizer_path": str, "is_generation": bool, "model_type": str}
    assert (wanted | {"architectures": list}).items() <= types_of(told).items()
    assert told["is_generation"] is True
    assert told["architectures"] and all(isinstance(each, str) for each in told["architectures"])


@pytest.mark.parametrize("query", ["", "?include=core,disagg,queues,memory", "?include=core"])
def test_loads_has_a_timestamp_of_text_and_an_entry_for_each_worker(behind, query):
    told = behind.get(f"/v1/loads{query}").json()
    # smg falls back to /metrics, and says nothing, over a number here.
    assert isinstance(told["timestamp"], str)
    assert datetime.fromisoformat(told["timestamp"]).tzinfo is not None
    assert isinstance(told["version"], str)
    assert (
        told["dp_rank_count"] == len(told["loads"]) == behind.get("/server_info").json()["dp_size"]
    )
    counts = ("dp_rank", "num_running_reqs", "num_waiting_reqs", "num_total_reqs")
    counts += ("num_used_tokens", "max_total_num_tokens", "max_running_requests")
    shares = ("token_usage", "gen_throughput", "cache_hit_rate", "utilization")
    for rank, load in enumerate(told["loads"]):
        assert {**dict.fromkeys(counts, int), **dict.fromkeys(shares, float)} == types_of(load)
        assert load["dp_rank"] == rank
        assert 0.0 <= load["token_usage"] <= 1.0 and load["max_total_num_tokens"] > 0


def test_a_rate_of_tokens_is_told_to_who_polls(behind):
    with streams_until_full(behind):
        behind.get("/v1/loads")
        until(
            lambda: behind.get("/v1/loads").json()["loads"][0]["gen_throughput"] > 0,
            "a rate, which takes two looks a second apart",
        )
    idle = behind.get("/v1/loads").json()["loads"][0]
    # smg divides by it: what is left of a rate makes an idle host look slow, and the other ones get all.
    assert (idle["num_total_reqs"], idle["gen_throughput"]) == (0, 0.0)


def test_get_load_is_the_array_that_sglang_router_sums(behind):
    told = behind.get("/get_load").json()
    assert isinstance(told, list) and len(told) == behind.get("/server_info").json()["dp_size"]
    names = ("dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens")
    assert all(types_of(each) == dict.fromkeys(names, int) for each in told)


def metrics_of(server):
    text = server.get("/metrics").body.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_gauges_of_endpoint_pickers_are_gauges_by_their_names(behind):
    families = metrics_of(behind)
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "vllm:cache_config_info",
    ):
        assert families[name].type == "gauge", name
        assert len(families[name].samples) == 1, name
    (config,) = families["vllm:cache_config_info"].samples
    assert int(config.labels["block_size"]) > 0 and int(config.labels["num_gpu_blocks"]) > 0
    (model,) = families["vllm:num_requests_running"].samples
    assert model.labels["model_name"] == MODEL


def test_a_warm_prefix_cache_is_no_load(behind):
    prompt = {"prompt": list(range(100, 612)), "max_tokens": 1}
    for _ in range(2):
        assert behind.post("/v1/completions", prompt).status == 200
    behind.wait_idle()
    (load,) = behind.get("/v1/loads").json()["loads"]
    assert load["cache_hit_rate"] > 0.0
    assert (load["token_usage"], load["num_used_tokens"]) == (0.0, 0)
    (usage,) = metrics_of(behind)["vllm:kv_cache_usage_perc"].samples
    assert usage.value == 0.0


def test_load_is_told_the_same_everywhere_and_at_once(behind):
    with streams_until_full(behind):
        (load,) = behind.get("/v1/loads").json()["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (RUN_SLOTS, QUEUE_SLOTS)
        assert load["num_total_reqs"] == RUN_SLOTS + QUEUE_SLOTS
        (old,) = behind.get("/get_load").json()
        assert (old["num_reqs"], old["num_waiting_reqs"]) == (RUN_SLOTS + QUEUE_SLOTS, QUEUE_SLOTS)
        families = metrics_of(behind)
        for prefix in ("vllm:num_requests_waiting", "sglang:num_queue_reqs"):
            assert families[prefix].samples[0].value == QUEUE_SLOTS
        for prefix in ("vllm:num_requests_running", "sglang:num_running_reqs"):
            assert families[prefix].samples[0].value == RUN_SLOTS


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429_with_retry_after_before_any_stream(behind, path, stream):
    with streams_until_full(behind):
        answer = behind.post(path, PROMPTS[path] | {"stream": stream})
        assert answer.status == 429, answer
        assert answer.error()["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        # A queue that is full is no reason to leave the rotation: its router would open a breaker over it.
        assert behind.without_key("/health").status == 200


@pytest.mark.parametrize("adds", [SGLANG_ROUTER_ADDS, VLLM_ROUTER_ADDS], ids=["sglang", "vllm"])
def test_what_routers_add_to_a_chat_body_is_no_error(behind, adds):
    answer = behind.post(CHAT, {"messages": MESSAGES} | adds)
    assert answer.status == 200, answer
    assert answer.json()["usage"]["completion_tokens"] <= 2


@pytest.mark.parametrize("model", ["unknown", None])
def test_generate_takes_the_model_that_smg_writes_for_lack_of_one(behind, model):
    body = PROMPTS["/generate"] | SMG_ADDS_TO_GENERATE | {"model": model}
    assert behind.post("/generate", body).status == 200


@pytest.mark.parametrize("path", GENERATING)
def test_a_field_that_nobody_knows_is_ignored_and_named(behind, path):
    answer = behind.post(path, PROMPTS[path] | {"added_by_a_router": True})
    assert answer.status == 200
    assert "added_by_a_router" in answer.headers["x-shmserve-ignored"]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("priority", "high"),
        ("timeout_ms", 0),
        ("cache_salt", "x" * 10_000),
        ("on_slow_client", "wait"),
        ("data_parallel_rank", 99),
    ],
)
def test_every_option_of_ours_is_a_field_of_the_body_since_headers_are_lost(behind, name, bad):
    answer = behind.post(CHAT, PROMPTS[CHAT] | {name: bad})
    assert answer.status == 400, answer
    assert answer.error()["param"] == name


def test_the_times_of_a_stream_can_be_asked_for_in_stream_options(behind):
    stream = behind.stream(
        CHAT,
        {"Authorization": f"Bearer {KEY}"},
        **PROMPTS[CHAT],
        stream_options={"include_timing": True},
    )
    assert any("timing" in json.dumps(event) for event in stream.objects())


def test_a_rank_can_be_pinned_by_field_and_by_header(behind):
    body = PROMPTS["/v1/completions"]
    assert behind.post("/v1/completions", body | {"data_parallel_rank": 0}).status == 200
    for rank, status in (("0", 200), ("99", 400)):
        headers = {"X-data-parallel-rank": rank}
        assert behind.request("POST", "/v1/completions", body, headers).status == status


def test_a_retry_comes_with_the_same_request_id_and_is_served_like_any(behind):
    for _ in range(5):
        headers = {"X-Request-Id": "one-and-the-same"}
        answer = behind.request("POST", "/v1/completions", PROMPTS["/v1/completions"], headers)
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "one-and-the-same"


@pytest.mark.parametrize("path", GENERATING)
def test_a_stream_is_not_to_be_buffered_and_each_frame_is_a_chunk(behind, path):
    body = json.dumps(PROMPTS[path] | {"stream": True})
    with socket.create_connection(("127.0.0.1", behind.port), timeout=30) as sock:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            more = sock.recv(65536)
            assert more, data
            data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    headers = http.client.parse_headers(io.BytesIO(head.partition(b"\r\n")[2]))
    assert headers["Content-Type"].startswith("text/event-stream")
    assert (headers["Cache-Control"], headers["X-Accel-Buffering"]) == ("no-cache", "no")
    assert headers["Transfer-Encoding"] == "chunked" and headers["Content-Length"] is None
    chunks = []
    while rest != b"0\r\n\r\n":
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    frames = [frame for chunk in chunks for frame in chunk.split(b"\n\n")[:-1]]
    assert all(chunk.endswith(b"\n\n") for chunk in chunks), "a frame is cut between chunks"
    tokens = [frame for frame in frames if b"data: {" in frame]
    assert len(tokens) >= 2 and frames[-1] == b"data: [DONE]"


def test_idle_connections_outlive_the_pools_of_routers():
    assert HttpConfig().idle_timeout_s > 5.0  # smg drops its own after 3 s


def test_streams_are_never_silent_for_longer_than_a_balancer_waits():
    config = HttpConfig()
    assert 0 < config.keep_alive_s <= 15.0
    assert 0 < config.headers_after_s <= 15.0


def test_the_probe_answers_while_every_place_is_taken_and_says_when_it_was_asked(behind):
    with streams_until_full(behind):
        for _ in range(20):
            asked = time.time()
            assert behind.without_key("/health").status == 200
            told = datetime.fromisoformat(behind.get("/v1/loads").json()["timestamp"]).timestamp()
            assert asked - 1.0 <= told <= time.time() + 1.0
