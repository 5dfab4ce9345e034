"""The second boundary: a client that does not read. What waits for it is bounded, by its policy, and nobody else notices."""

import json
import time

import pytest
from serving import until

# About 90 KB of frames: twice what the kernel holds for a small receive buffer.
NUM_TOKENS = 450
RECEIVE_BUFFER = 4096
LAST_CHUNK = b"\r\n0\r\n\r\n"


def body(seed, num_tokens=NUM_TOKENS, **more):
    return {"prompt": "Hi", "stream": True, "max_tokens": num_tokens, "seed": seed, **more}


def objects_of(data):
    """The events of an SSE response as it came over the wire, [DONE] left out."""
    return [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]


def text_of(data):
    """The text of such a response."""
    return "".join(choice["text"] for each in objects_of(data) for choice in each["choices"])


def http_words(server):
    return server.words("http")


class Counts:
    """How far the front end's counters have come since this was made: the server is everybody's."""

    def __init__(self, server):
        self._server = server
        self._before = server.words("http")

    def __getitem__(self, name):
        return self._server.words("http")[name] - self._before[name]


@pytest.fixture
def counts(server):
    return Counts(server)


def congested(server):
    return server.words("http")["clients_congested"]


def assert_cut(data, expected):
    """It ended in the middle, and says so: every event whole, no text left out before the end, an error, a proper end."""
    *chunks, last = objects_of(data)
    assert last["error"]["code"] == "slow_client" and "too slowly" in last["error"]["message"]
    text = "".join(choice["text"] for each in chunks for choice in each["choices"])
    assert text and expected.startswith(text) and text != expected
    assert data.endswith(LAST_CHUNK) and data.count(b"data: [DONE]") == 1


def test_a_client_past_the_bound_on_bytes_is_cut_with_an_error_that_it_can_read_F3(
    server, counts, wire
):
    aborted = server.words("worker")["num_aborted"]
    expected = server.text(prompt="Hi", max_tokens=NUM_TOKENS * 2, seed=1)
    stuck = wire(server, RECEIVE_BUFFER)
    stuck.send("/v1/completions", body(1, 8000, slow_client_bytes=2048))
    until(lambda: counts["num_slow_clients"] == 1, "it is cut")
    server.wait_idle()  # long before it reads
    assert server.words("worker")["num_aborted"] == aborted + 1
    until(lambda: http_words(server)["mailbox_bytes"] == 0, "what waited is thrown away")
    assert congested(server) == 1
    assert_cut(stuck.read_until(LAST_CHUNK), expected)
    until(lambda: congested(server) == 0, "nobody is congested")


def test_others_keep_going_while_a_client_is_stuck_F3(server, wire):
    stuck = wire(server, RECEIVE_BUFFER)
    stuck.send("/v1/completions", body(2, 8000))
    until(lambda: congested(server), "it is stuck")
    reads = server.stream(**body(3, 100))
    plain = server.text(prompt="Hi", max_tokens=100, seed=3)
    assert "".join(chunk["choices"][0]["text"] for chunk in reads.objects()) == plain
    stuck.close()
    server.wait_idle()
    until(lambda: congested(server) == 0, "nobody is congested")


def test_a_reader_that_resumes_before_the_bound_gets_every_byte_F3(server, counts, wire):
    expected = server.text(prompt="Hi", max_tokens=NUM_TOKENS, seed=4)
    slow = wire(server, RECEIVE_BUFFER)
    slow.send("/v1/completions", body(4))
    until(lambda: http_words(server)["mailbox_bytes"] > 500, "text waits")
    data = slow.read_until(LAST_CHUNK)
    assert text_of(data) == expected
    assert data.count(b"data: [DONE]") == 1
    # Fewer events than tokens: what waited became one.
    assert data.count(b"data: {") < NUM_TOKENS
    assert counts["num_slow_clients"] == 0 and counts["num_client_coalesced_tokens"] > 20
    server.wait_idle()
    until(lambda: http_words(server)["mailbox_bytes"] == 0, "nothing waits")


@pytest.mark.parametrize(
    ("n", "policy"),
    [
        (1, "coalesce"),
        (3, "block"),
        pytest.param(1, "block", marks=pytest.mark.slow),
        pytest.param(3, "coalesce", marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_stops_again_and_again_gets_every_byte(server, wire, n, policy):
    expected = server.complete(prompt="Hi", max_tokens=450 // n, seed=5, n=n)
    slow = wire(server, RECEIVE_BUFFER)
    slow.send("/v1/completions", body(5, 450 // n, n=n, on_slow_client=policy))
    data = b""
    while not data.endswith(LAST_CHUNK):
        until(
            lambda: congested(server) or server.words("worker")["running"] == 0,
            "it is congested",
        )
        for _ in range(20):
            data += slow.sock.recv(4096)
            if data.endswith(LAST_CHUNK):
                break
    texts = [""] * n
    for each in objects_of(data):
        for choice in each["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in expected["choices"]]
    server.wait_idle()


def test_a_slow_reader_of_generate_gets_the_whole_answer(server, wire):
    """Cumulative frames: the last one has everything, whatever was merged before it."""
    sampling = {"max_new_tokens": 300, "sampling_seed": 6}
    whole = server.post("/generate", {"text": "Hi", "sampling_params": sampling}).json()
    slow = wire(server, RECEIVE_BUFFER)
    slow.send("/generate", {"text": "Hi", "sampling_params": sampling, "stream": True})
    until(lambda: http_words(server)["mailbox_bytes"] > 100, "text waits")
    frames = objects_of(slow.read_until(LAST_CHUNK))
    assert frames[-1]["text"] == whole["text"]
    assert frames[-1]["output_ids"] == whole["output_ids"]
    tokens = [frame["meta_info"]["completion_tokens"] for frame in frames]
    assert tokens == sorted(tokens) and tokens[-1] == 300
    server.wait_idle()


def test_the_policy_block_pauses_that_one_sequence_and_resumes_it(server, counts, wire):
    expected = server.text(prompt="Hi", max_tokens=NUM_TOKENS, seed=7)
    slow = wire(server, RECEIVE_BUFFER)
    slow.send("/v1/completions", body(7, on_slow_client="block"))
    until(lambda: server.words("worker")["paused"] == 1, "its sequence is paused")
    assert counts["num_clients_paused"] == 1
    at = server.words("worker")["generation_tokens"]
    beside = server.complete(prompt="Hi", max_tokens=100, seed=8)
    assert beside["usage"]["completion_tokens"] == 100
    assert server.words("worker")["paused"] == 1
    # Paused: it made no token while 100 others were made.
    until(lambda: server.words("worker")["generation_tokens"] - at >= 100, "they are counted")
    assert server.words("worker")["generation_tokens"] - at == 100
    assert text_of(slow.read_until(LAST_CHUNK)) == expected
    server.wait_idle()


@pytest.mark.parametrize("how", ["close", "half-close", "abort"])
def test_whoever_ends_a_paused_request_frees_its_sequence(server, wire, how):
    stuck = wire(server, RECEIVE_BUFFER)
    stuck.send("/v1/completions", body(7, 8000, on_slow_client="block", request_id="paused"))
    until(lambda: server.words("worker")["paused"] == 1, "its sequence is paused")
    if how == "close":
        stuck.close()
    elif how == "half-close":
        stuck.sock.shutdown(1)
    else:
        assert server.post("/abort_request", {"rid": "paused"}).status == 200
    server.wait_idle()
    if how == "abort":
        assert b'"aborted"' in stuck.read_until(LAST_CHUNK)
    until(lambda: congested(server) == 0, "nobody is congested")


ENDPOINTS = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3000},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 3000}, "incremental": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3000},
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_policy_drop_ends_a_stream_with_an_error_on_every_endpoint(server, counts, wire, path):
    high_water = http_words(server)["mailbox_high_water_bytes"]
    stuck = wire(server, RECEIVE_BUFFER)
    stuck.send(path, ENDPOINTS[path] | {"stream": True, "on_slow_client": "drop"})
    until(lambda: counts["num_clients_dropped"] == 1, "it is cut")
    server.wait_idle()
    until(lambda: counts["num_slow_clients"] == 1, "it is counted")
    assert http_words(server)["mailbox_high_water_bytes"] == high_water, "nothing ever waited"
    data = stuck.read_until(LAST_CHUNK)
    events = objects_of(data)
    assert "too slowly" in json.dumps(events[-1]), events[-1]
    assert "too slowly" not in json.dumps(events[:-1])


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("on_slow_client", "wait"),
        ("slow_client_bytes", 16385),
        ("slow_client_bytes", 1023),
        ("slow_client_seconds", 60.5),
        ("slow_client_seconds", 0),
    ],
)
def test_a_bound_above_the_servers_is_refused_by_name(server, path, field, value):
    answer = server.post(path, ENDPOINTS[path] | {field: value})
    error = answer.json()["error"]
    assert answer.status == 400 and field in error["message"]
    if path != "/v1/messages":
        assert error["param"] == field


def test_a_client_that_is_stuck_too_long_is_closed_F3(server, counts, wire):
    stuck = wire(server, RECEIVE_BUFFER)
    stuck.send("/v1/completions", body(10, on_slow_client="block", slow_client_seconds=0.3))
    until(lambda: counts["num_slow_clients"] == 1, "it is closed")
    server.wait_idle()
    assert b"[DONE]" not in stuck.read_all()


def test_a_slow_one_that_reads_on_is_served_to_the_end_F3(server, counts, wire):
    """In a second and more, with 0.7 s for one that reads nothing."""
    slow = wire(server, RECEIVE_BUFFER)
    slow.send("/v1/completions", body(11, 300, on_slow_client="block", slow_client_seconds=0.7))
    data = b""
    while not data.endswith(LAST_CHUNK):
        time.sleep(0.04)
        more = slow.sock.recv(2048)
        assert more, "closed although it read"
        data += more
    assert text_of(data) == server.text(prompt="Hi", max_tokens=300, seed=11)
    assert counts["num_slow_clients"] == 0


def test_the_metrics_show_what_slow_clients_cost(server, wire):
    stuck = wire(server, RECEIVE_BUFFER)
    stuck.send("/v1/completions", body(12, 2000))
    until(lambda: http_words(server)["client_backlog_bytes"] > 4096, "it was looked at")
    metrics = server.metrics()
    found = {name: value for (name, process), value in metrics.items() if process == "http0"}
    assert found["shmserve_clients_congested"] == 1
    assert found["shmserve_client_backlog_bytes"] > 4096
    assert found["shmserve_client_backlog_high_water_bytes"] > 4096
    for name in ("congestions", "client_coalesced_tokens", "clients_paused", "clients_dropped"):
        assert f"shmserve_{name}_total" in found
    stuck.close()
    server.wait_idle()
    until(lambda: not http_words(server)["client_backlog_bytes"], "the gauge is down again")


@pytest.mark.slow
def test_when_all_who_run_are_paused_those_who_wait_run_and_each_gets_every_byte(
    start_server, wire
):
    server = start_server("--step-ms=1", "--max-num-seqs=2", "--slow-client=block")
    expected = [server.text(prompt="Hi", max_tokens=NUM_TOKENS, seed=seed) for seed in (20, 21)]
    stuck = [wire(server, RECEIVE_BUFFER) for _ in expected]
    for seed, each in zip((20, 21), stuck, strict=True):
        each.send("/v1/completions", body(seed))
    until(lambda: server.words("worker")["paused"] == 2, "both rows are held by paused ones")
    for seed in (22, 23, 24):
        assert server.text(prompt="Hi", max_tokens=20, seed=seed)
    assert server.words("worker")["num_preempted"] >= 1
    assert server.words("worker")["paused"] == 2
    for each, text in zip(stuck, expected, strict=True):
        assert text_of(each.read_until(LAST_CHUNK)) == text
    server.wait_idle()
