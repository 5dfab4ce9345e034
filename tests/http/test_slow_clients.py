"""The second boundary: a client that does not read. What waits for it is bounded, and nobody else notices."""

import json

import pytest
from serving import until

# About 120 KB of frames: several times what the kernel holds for a small receive buffer.
NUM_TOKENS = 600
RECEIVE_BUFFER = 4096


def body(seed, num_tokens=NUM_TOKENS, **more):
    return {"prompt": "Hi", "stream": True, "max_tokens": num_tokens, "seed": seed, **more}


def text_of(data):
    """The text of a chunked SSE response as it came over the wire."""
    text = ""
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["text"]
    return text


@pytest.fixture(scope="module")
def coalescing(start_server):
    return start_server("--step-ms=1", "--slow-client-bytes=4096")


def test_a_client_past_the_bound_is_closed_and_its_request_aborted_F3(coalescing, wire):
    before = coalescing.words("http")["num_slow_clients"]
    stuck = wire(coalescing, RECEIVE_BUFFER)
    stuck.send("/v1/completions", body(1, 8000))
    until(lambda: coalescing.words("http")["num_slow_clients"] == before + 1, "it is closed")
    coalescing.wait_idle()
    assert coalescing.words("worker")["num_aborted"] == 1
    until(lambda: not coalescing.words("http")["mailbox_bytes"], "its mailbox is gone")
    # The bound is on text, and one record of one more token may pass it.
    assert 0 < coalescing.words("http")["mailbox_high_water_bytes"] <= 4096 + 256
    assert b"[DONE]" not in stuck.read_all()


def test_others_keep_going_while_a_client_is_stuck_F3(coalescing, wire):
    stuck = wire(coalescing, RECEIVE_BUFFER)
    stuck.send("/v1/completions", body(2, 8000))
    reads = coalescing.stream(**body(3, 300))
    plain = coalescing.text(prompt="Hi", max_tokens=300, seed=3)
    assert "".join(chunk["choices"][0]["text"] for chunk in reads.objects()) == plain
    stuck.close()
    coalescing.wait_idle()


def test_a_reader_that_resumes_before_the_bound_gets_every_byte_F3(server, wire):
    expected = server.text(prompt="Hi", max_tokens=NUM_TOKENS, seed=4)
    slow = wire(server, RECEIVE_BUFFER)
    closed = server.words("http")["num_slow_clients"]
    slow.send("/v1/completions", body(4))
    until(lambda: server.words("http")["mailbox_bytes"] > 500, "text waits")
    data = slow.read_until(b"\r\n0\r\n\r\n")
    assert text_of(data) == expected
    assert data.count(b"data: [DONE]") == 1
    # Fewer events than tokens: what waited became one.
    assert data.count(b"data: {") < NUM_TOKENS
    assert server.words("http")["num_slow_clients"] == closed
    server.wait_idle()
    assert server.words("http")["mailbox_bytes"] == 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_reader_that_stops_again_and_again_gets_every_byte(server, wire, n):
    expected = server.complete(prompt="Hi", max_tokens=450 // n, seed=5, n=n)
    slow = wire(server, RECEIVE_BUFFER)
    slow.send("/v1/completions", body(5, 450 // n, n=n))
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        until(
            lambda: (
                server.words("http")["mailbox_bytes"] > 500
                or server.words("worker")["running"] == 0
            ),
            "text waits",
        )
        for _ in range(20):
            data += slow.sock.recv(4096)
            if data.endswith(b"\r\n0\r\n\r\n"):
                break
    texts = [""] * n
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in expected["choices"]]
    server.wait_idle()


def test_a_slow_reader_of_generate_gets_the_whole_answer(server, wire):
    """Cumulative frames: the last one has everything, whatever was merged before it."""
    sampling = {"max_new_tokens": 300, "sampling_seed": 6}
    whole = server.post("/generate", {"text": "Hi", "sampling_params": sampling}).json()
    slow = wire(server, RECEIVE_BUFFER)
    slow.send("/generate", {"text": "Hi", "sampling_params": sampling, "stream": True})
    until(lambda: server.words("http")["mailbox_bytes"] > 100, "text waits")
    frames = [
        json.loads(line[6:])
        for line in slow.read_until(b"\r\n0\r\n\r\n").split(b"\n")
        if line.startswith(b"data: {")
    ]
    assert frames[-1]["text"] == whole["text"]
    assert frames[-1]["output_ids"] == whole["output_ids"]
    counts = [frame["meta_info"]["completion_tokens"] for frame in frames]
    assert counts == sorted(counts) and counts[-1] == 300
    server.wait_idle()


def test_the_policy_block_pauses_that_one_sequence_and_resumes_it(start_server, wire):
    server = start_server("--step-ms=1", "--slow-client=block")
    expected = server.text(prompt="Hi", max_tokens=NUM_TOKENS, seed=7)
    slow = wire(server, RECEIVE_BUFFER)
    slow.send("/v1/completions", body(7))
    until(lambda: server.words("worker")["paused"] == 1, "its sequence is paused")
    at = server.words("worker")["generation_tokens"]
    beside = server.complete(prompt="Hi", max_tokens=100, seed=8)
    assert beside["usage"]["completion_tokens"] == 100
    assert server.words("worker")["paused"] == 1
    # Paused: it made no token while 100 others were made.
    assert server.words("worker")["generation_tokens"] - at == 100
    assert text_of(slow.read_until(b"\r\n0\r\n\r\n")) == expected
    server.wait_idle()
    stuck = wire(server, RECEIVE_BUFFER)
    stuck.send("/v1/completions", body(7))
    until(lambda: server.words("worker")["paused"] == 1, "its sequence is paused")
    stuck.close()
    server.wait_idle()


def test_the_policy_drop_closes_at_once(start_server, wire):
    server = start_server("--step-ms=1", "--slow-client=drop")
    stuck = wire(server, RECEIVE_BUFFER)
    stuck.send("/v1/completions", body(9))
    until(lambda: server.words("http")["num_slow_clients"] == 1, "it is closed")
    server.wait_idle()
    assert server.words("http")["mailbox_high_water_bytes"] == 0
    assert server.text(max_tokens=3)


def test_a_client_that_is_stuck_too_long_is_closed_F3(start_server, wire):
    server = start_server("--step-ms=1", "--slow-client-seconds=0.3", "--slow-client-bytes=1M")
    stuck = wire(server, RECEIVE_BUFFER)
    stuck.send("/v1/completions", body(10))
    until(lambda: server.words("http")["num_slow_clients"] == 1, "it is closed")
    server.wait_idle()
    # Slow is not stuck: this one reads a little at a time, and is served to the end.
    slow = wire(server, RECEIVE_BUFFER)
    slow.send("/v1/completions", body(11, 300))
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        more = slow.sock.recv(2048)
        assert more, "closed although it read"
        data += more
    assert text_of(data) == server.text(prompt="Hi", max_tokens=300, seed=11)
