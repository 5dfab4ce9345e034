"""More than the server can take: refused at once, with a status that a client can retry, before any byte of a response."""

import json
import threading
import time

from serving import until


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


def test_one_runs_four_wait_and_the_rest_is_refused_F1(start_server):
    server = start_server("--step-ms=2", "--max-num-seqs=1", "--max-queued-requests=4")
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
    assert server.words("http")["num_refused"] == 59
    server.wait_idle()
    assert server.text(max_tokens=2)


def test_health_and_models_answer_while_the_queue_is_full_F1(start_server):
    server = start_server("--step-ms=2", "--max-num-seqs=1", "--max-queued-requests=0")
    running = server.stream(max_tokens=2000, ignore_eos=True)
    running.take(1)
    for _ in range(3):
        refused = server.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "stream": True},
        )
        assert (refused.status, refused.error()["code"]) == (503, "queue_full")
        assert server.get("/health").status == 200
        assert server.get("/v1/models").status == 200
    refused = server.post("/generate", {"text": "Hi"})
    assert (refused.status, refused.error()["code"]) == (503, "queue_full")
    # More choices than there will ever be room for is the client's fault, not the queue's.
    refused = server.post("/v1/completions", {"prompt": "Hi", "n": 2})
    assert (refused.status, refused.error()["param"]) == (400, "n")
    running.leave()
    server.wait_idle()
    assert server.text(max_tokens=2)


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


def test_a_request_larger_than_half_the_submit_ring_is_413_with_both_numbers(start_server):
    server = start_server("--step-ms=2", "--submit-ring-slots=8")
    answer = server.post("/v1/completions", {"prompt": [19556] * 6000, "max_tokens": 1})
    assert answer.status == 413
    error = answer.error()
    assert error["code"] == "request_too_large"
    assert str(6 * 4096) in error["message"] and str(4 * 4096) in error["message"]
    assert server.complete(prompt=[19556] * 3500, max_tokens=1)["usage"]["prompt_tokens"] == 3500


def test_a_full_submit_ring_under_drop_refuses_and_under_block_waits(start_server):
    """A ring of 8 slots, 32 requests at once: under drop some may be refused with a 503, under block none is."""
    for policy in ("drop", "block"):
        server = start_server("--step-ms=2", "--submit-ring-slots=8", f"--submit-policy={policy}")
        answers = burst(server, [{"prompt": [19556] * 900, "max_tokens": 1}] * 32)
        for status, headers, body in answers:
            assert status == 200 or (status == 503 and policy == "drop"), body
            if status == 503:
                assert json.loads(body)["error"]["code"] == "submit_ring_full"
                assert headers["Retry-After"] == "1"
        server.wait_idle()
        until(lambda server=server: server.text(max_tokens=2), "it serves")
