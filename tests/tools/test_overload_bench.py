"""bench_overload.py: its client, its arithmetic, and (slow) the promise itself: 20,000 requests at ten times the possible rate."""

import json
import re
import socket
import threading
import time
import urllib.request

import pytest
from bench_common import percentile
from bench_overload import MOST_REFUSAL_MS, OverloadedServer, bars_of, config_of, limit_bytes
from overload_run import Load, Outcome, RssWatch, rss_bytes, run

QUEUE_FULL = json.dumps({"error": {"code": "queue_full"}}).encode()


class Answering:
    """A server of the test's own: `answers[i % n]` is what the i-th request gets; b"" closes the connection."""

    def __init__(self, answers):
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_requests = 0
        self._turn = threading.Lock()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection):
        with connection:
            while request := connection.recv(65536):
                assert request.startswith(b"POST /v1/completions HTTP/1.1\r\n")
                with self._turn:
                    answer = self._answers[self.num_requests % len(self._answers)]
                    self.num_requests += 1
                if not answer:
                    return
                for part in (answer[:20], answer[20:]):  # never whole at once
                    connection.sendall(part)
                    time.sleep(0.001)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


def plain(status, body=b"{}"):
    head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ndata\r\n0\r\n\r\n"


def test_the_client_counts_every_request_once_whatever_it_gets():
    server = Answering([plain(200), CHUNKED, plain(503, QUEUE_FULL), b""])
    outcome = run(Load(server.port, 40, 400.0, max_connections=4))
    server.close()
    assert server.num_requests == 40
    assert outcome.statuses == {200: 20, 503: 10} and outcome.codes == {"queue_full": 10}
    assert (outcome.num_broken, outcome.num_unanswered) == (10, 0)
    assert (len(outcome.ok_ms), len(outcome.refused_ms)) == (20, 10)
    assert min(outcome.ok_ms + outcome.refused_ms) >= 1.0
    assert outcome.num_connections <= 4 + 10  # they are used again


def test_a_lost_request_and_a_late_refusal_fail_their_bars():
    good = Outcome(refused_ms=[1.0] * 100)
    good.statuses[503] = 100
    used, growth = {"http": (1 << 20, 2 << 20)}, {"http": 0}
    assert all(bar.holds for bar in bars_of(good, 100, used, growth))
    assert [bar.holds for bar in bars_of(good, 101, used, growth)] == [False, True, True, True]
    slow = Outcome(refused_ms=[1.0] * 90 + [101.0] * 10)
    slow.statuses[503] = 100
    assert [bar.holds for bar in bars_of(slow, 100, used, growth)] == [True, False, True, True]
    used, growth = {"http": (3 << 20, 2 << 20)}, {"http": 9 << 20}
    assert [bar.holds for bar in bars_of(good, 100, used, growth)] == [True, True, False, False]


def gauge(port, name):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        m[1]: float(m[2]) for m in re.finditer(rf'^{name}{{process="(\w+)"}} (\S+)$', text, re.M)
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_thousand_requests_at_ten_times_the_rate_are_answered_within_the_memory(
    default_model, tmp_path
):
    config = config_of(16, 32)
    with OverloadedServer(tmp_path, 20.0, 16, 32) as server:
        run(Load(server.port, 100, 25.0))
        ready = {name: rss_bytes(pid) for name, pid in server.pids.items()}
        with RssWatch(server.pids) as watch:
            outcome = run(Load(server.port, 20_000, 500.0))
        assert outcome.statuses.keys() == {200, 503}
        assert outcome.statuses[200] + outcome.statuses[503] == 20_000
        assert outcome.codes == {"queue_full": outcome.statuses[503]}
        assert (outcome.num_broken, outcome.num_unanswered) == (0, 0)
        deadline = time.monotonic() + 30
        # The one connection is that of the question.
        while gauge(server.port, "shmserve_connections") != {"http0": 1.0}:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert gauge(server.port, "shmserve_in_flight") == {"http0": 0.0}
        for name in server.pids:
            assert watch.most(name) - ready[name] <= limit_bytes(name, config)
            assert watch.growth(name) <= 16 << 20, "it grows with time, not with load"
    refused_ms = percentile(outcome.refused_ms, 99)
    print(f"refusals p99: {refused_ms:.1f} ms (promised: {MOST_REFUSAL_MS:.0f})")
    assert refused_ms <= 5 * MOST_REFUSAL_MS
