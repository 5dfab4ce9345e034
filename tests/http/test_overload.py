"""More than the server can take: refused at once, with a status that a client can retry, before any byte of a response."""

import json
import select
import threading
import time

import pytest
from serving import PATIENCE_S, until


class Burst:
    """Requests sent all at once, each on a connection of its own."""

    def __init__(self, server, bodies):
        self._open = [server.connect() for _ in bodies]
        for connection in self._open:
            connection.connect()
        start = threading.Barrier(4)

        def send(number):
            start.wait()
            for connection, body in list(zip(self._open, bodies, strict=True))[number::4]:
                connection.request("POST", "/v1/completions", json.dumps(body))

        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def take(self, count):
        """The first `count` answers of those that are left: (status, headers, body)."""
        answers = []
        while len(answers) < count:
            sockets = {connection.sock: connection for connection in self._open}
            readable, _, _ = select.select(list(sockets), [], [], 30)
            assert readable, f"no answer any more, {len(answers)} came"
            for sock in readable:
                connection = sockets[sock]
                self._open.remove(connection)
                response = connection.getresponse()
                answers.append((response.status, response.headers, response.read()))
                connection.close()
        return answers


@pytest.fixture(scope="module")
def tight(start_server):
    """One sequence at a time, four may wait."""
    return start_server("--step-ms=2", "--max-num-seqs=1", "--max-queued-requests=4")


def test_one_runs_four_wait_and_the_rest_is_refused_F1(tight):
    before = tight.words("http")["num_refused"]
    running = tight.stream(max_tokens=8000, ignore_eos=True)
    running.take(1)
    burst = Burst(
        tight, [{"prompt": "Hi", "max_tokens": 5, "stream": i % 2 == 0} for i in range(63)]
    )
    for status, headers, body in burst.take(
        59
    ):  # while one runs: nobody else gets an answer, and none a 200
        error = json.loads(body)["error"]
        assert (status, error["code"], error["type"]) == (503, "queue_full", "overloaded_error")
        assert int(headers["Retry-After"]) >= 1
        assert headers["Content-Type"].startswith("application/json")
    assert tight.words("http")["num_refused"] - before == 59
    until(lambda: tight.words("worker")["waiting"] == 4, "four wait")
    running.leave()
    assert [status for status, *_ in burst.take(4)] == [200] * 4
    tight.wait_idle()


def test_health_and_models_answer_while_the_queue_is_full_F1(tight):
    running = tight.stream(max_tokens=8000, ignore_eos=True, n=5)
    running.take(1)
    bodies = {
        "/v1/completions": {"prompt": "Hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/generate": {"text": "Hi"},
    }
    for path, body in bodies.items():
        for more in ({}, {"stream": True}):
            refused = tight.post(path, body | more)
            assert (refused.status, refused.error()["code"]) == (503, "queue_full")
        assert tight.get("/health").status == 200
        assert tight.get("/v1/models").status == 200
    # More choices than there will ever be room for is the client's fault, not the queue's.
    refused = tight.post("/v1/completions", {"prompt": "Hi", "n": 6})
    assert (refused.status, refused.error()["param"]) == (400, "n")
    running.leave()
    tight.wait_idle()
    assert tight.text(max_tokens=2)


def test_when_all_that_wait_leave_at_once_the_gauges_say_that_nobody_waits(tight):
    running = tight.stream(max_tokens=8000, ignore_eos=True, n=5)
    until(lambda: tight.words("http")["waiting"] == 4, "four wait")
    running.leave()
    tight.wait_idle()
    until(lambda: not tight.words("http")["waiting"], "none waits", patience_s=5)
    assert tight.words("http")["waiting_tokens"] == 0


def test_every_request_of_an_overload_gets_its_answer_F2(start_server):
    server = start_server("--step-ms=2", "--max-num-seqs=4", "--max-queued-requests=8")
    counts = {200: 0, 503: 0}
    lock = threading.Lock()
    begin = time.monotonic()

    def goes_on():
        """For a second; longer where so many threads need longer to fill the queue."""
        return time.monotonic() < begin + (1.0 if min(counts.values()) else PATIENCE_S)

    def client(number):
        while goes_on():
            answer = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 5 + number % 5})
            with lock:
                counts[answer.status] += 1

    threads = [threading.Thread(target=client, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.wait_idle()
    assert counts[200] > 0 and counts[503] > 0
    assert server.words("http")["num_requests"] == sum(counts.values())
    assert server.words("http")["num_refused"] == counts[503]
    assert server.words("worker")["num_finished"] == counts[200]


@pytest.mark.parametrize(
    "policy",
    [pytest.param(each, marks=pytest.mark.slow) for each in ("drop", "block", "coalesce")],
)
def test_a_full_submit_ring_refuses_under_drop_only(start_server, policy):
    """A ring of 8 slots, 32 requests at once: under drop some may be refused with a 503, else none is."""
    server = start_server("--step-ms=2", "--submit-ring-slots=8", f"--submit-policy={policy}")
    burst = Burst(server, [{"prompt": [19556] * 900, "max_tokens": 1}] * 32)
    num_refused = 0
    for status, headers, body in burst.take(32):
        assert status == 200 or (status == 503 and policy == "drop"), body
        if status == 503:
            num_refused += 1
            assert json.loads(body)["error"]["code"] == "submit_ring_full"
            assert headers["Retry-After"] == "1"
    assert server.words("http")["num_refused_submit_ring"] == num_refused
    # What takes more than half the ring would never go together with anything else: both numbers are told.
    answer = server.post("/v1/completions", {"prompt": [19556] * 6000, "max_tokens": 1})
    assert (answer.status, answer.error()["code"]) == (413, "request_too_large")
    assert str(6 * 4096) in answer.error()["message"] and str(4 * 4096) in answer.error()["message"]
    assert server.complete(prompt=[19556] * 3500, max_tokens=1)["usage"]["prompt_tokens"] == 3500
    server.wait_idle()
