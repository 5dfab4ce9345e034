"""Many streams at once, as a step of a large batch has them: all of their tokens in one system call, or each in its own."""

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import until

from shmserve.http.uring import SendRing

NUM_STREAMS = 36


@pytest.fixture(
    scope="module", params=["--io-uring", pytest.param("--no-io-uring", marks=pytest.mark.slow)]
)
def many(start_server, request):
    if request.param == "--io-uring":
        try:
            SendRing().close()
        except OSError as error:
            pytest.skip(f"no io_uring here: {error}")
    server = start_server("--step-ms=3", "--max-num-seqs=64", request.param)
    server.has_ring = request.param == "--io-uring"
    return server


def fields_of(i):
    """Streams of all kinds, most of them plain."""
    fields = {"seed": 1000 + i, "max_tokens": 30 + i % 5, "ignore_eos": True, "temperature": 1.0}
    if i % 9 == 4:
        fields["n"] = 2
    if i % 9 == 7:
        fields["stop"] = ["never in it"]
    if i % 9 == 8:
        fields["skip_special_tokens"] = False
    return fields


def streamed(server, i):
    """The text of each choice, out of a stream."""
    texts = {}
    for event in server.stream(**fields_of(i)).objects():
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


def test_each_of_many_streams_says_what_it_says_alone(many):
    def plain(i):
        return [choice["text"] for choice in many.complete(**fields_of(i))["choices"]]

    with ThreadPoolExecutor(8) as pool:  # too few for a call of their own
        alone = list(pool.map(plain, range(NUM_STREAMS)))
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        for _ in range(2):
            together = list(pool.map(lambda i: streamed(many, i), range(NUM_STREAMS)))
            assert together == alone
    many.wait_idle()


def test_one_over_http_1_0_among_many_gets_no_chunk_sizes(many, wire):
    old = wire(many)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        others = [pool.submit(streamed, many, i) for i in range(NUM_STREAMS)]
        body = {"prompt": "Hi", "stream": True} | fields_of(0)
        old.send("/v1/completions", body, version="1.0")
        events = old.read_all().partition(b"\r\n\r\n")[2].decode().split("\n\n")
        assert all(other.result() for other in others)
    assert events[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]]
    assert "".join(texts) == streamed(many, 0)[0]


def test_the_front_end_has_an_io_uring_unless_told_not_to(many):
    folder = f"/proc/{many.words('http')['pid']}/fd"
    targets = []
    for fd in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # a connection that has just closed
            targets.append(os.readlink(f"{folder}/{fd}"))
    assert ("anon_inode:[io_uring]" in targets) == many.has_ring
    until(lambda: many.words("http")["io_uring"] == many.has_ring, "its heartbeat says so")
    assert many.get("/server_info").json()["io_uring"] is many.has_ring
    line = f'shmserve_io_uring{{process="http0"}} {float(many.has_ring)}'
    assert line in many.get("/metrics").body.decode().splitlines()
