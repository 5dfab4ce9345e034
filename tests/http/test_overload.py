"""More than the server can take: refused at once, with a status that a client can retry, before any byte of a response."""

import json
import threading
import time

import pytest


def burst(server, bodies):
    """Send all of `bodies` at once, each on a connection of its own; [(status, headers, body)]."""
    connections = [server.connect() for _ in bodies]
    for connection in connections:
        connection.connect()
    start = threading.Barrier(4)
    answers = [None] * len(bodies)

    def send(part):
        start.wait()
        for i in part:
            connections[i].request("POST", "/v1/completions", json.dumps(bodies[i]))

    threads = [threading.Thread(target=send, args=(range(k, len(bodies), 4),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, connection in enumerate(connections):
        response = connection.getresponse()
        answers[i] = (response.status, response.headers, response.read())
        connection.close()
    return answers


@pytest.fixture(scope="module")
def tight(start_server):
    """One sequence at a time, four may wait."""
    return start_server("--step-ms=2", "--max-num-seqs=1", "--max-queued-requests=4")


def test_one_runs_four_wait_and_the_rest_is_refused_F1(tight):
    server = tight
    refused_before = server.words("http")["num_refused"]
    # Long enough that none ends before all have asked.
    bodies = [
        {"prompt": "Hi", "max_tokens": 100, "ignore_eos": True, "stream": i % 2 == 0}
        for i in range(64)
    ]
    answers = burst(server, bodies)
    served = [answer for answer in answers if answer[0] == 200]
    refused = [answer for answer in answers if answer[0] == 503]
    assert (len(served), len(refused)) == (5, 59)
    for _, headers, body in refused:
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("queue_full", "overloaded_error")
        assert int(headers["Retry-After"]) >= 1
        assert headers["Content-Type"].startswith("application/json")
    assert server.words("http")["num_refused"] - refused_before == 59
    server.wait_idle()
    assert server.text(max_tokens=2)


def test_health_and_models_answer_while_the_queue_is_full_F1(tight):
    running = tight.stream(max_tokens=2000, ignore_eos=True, n=5)
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


def test_every_request_of_an_overload_gets_its_answer_F2(start_server):
    server = start_server("--step-ms=2", "--max-num-seqs=4", "--max-queued-requests=8")
    counts = {200: 0, 503: 0}
    lock = threading.Lock()
    end = time.monotonic() + 1.0

    def client(number):
        while time.monotonic() < end:
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


@pytest.mark.parametrize("policy", ["block", "drop"])
def test_a_full_submit_ring_refuses_under_drop_and_waits_under_block(start_server, policy):
    """A ring of 8 slots, 32 requests at once: under drop some may be refused with a 503, under block none is."""
    server = start_server("--step-ms=2", "--submit-ring-slots=8", f"--submit-policy={policy}")
    for status, headers, body in burst(server, [{"prompt": [19556] * 900, "max_tokens": 1}] * 32):
        assert status == 200 or (status == 503 and policy == "drop"), body
        if status == 503:
            assert json.loads(body)["error"]["code"] == "submit_ring_full"
            assert headers["Retry-After"] == "1"
    # What takes more than half the ring would never go together with anything else: both numbers are told.
    answer = server.post("/v1/completions", {"prompt": [19556] * 6000, "max_tokens": 1})
    assert (answer.status, answer.error()["code"]) == (413, "request_too_large")
    assert str(6 * 4096) in answer.error()["message"] and str(4 * 4096) in answer.error()["message"]
    assert server.complete(prompt=[19556] * 3500, max_tokens=1)["usage"]["prompt_tokens"] == 3500
    server.wait_idle()
