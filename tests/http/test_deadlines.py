"""Requests whose time is over: in the queue a status before any byte, while they run what they have, and nobody else notices."""

import asyncio
import json
import threading
import time

import pytest
from puppet import Puppet, events_of, finish_record, read_answer, started_record, tokens_record

from shmserve.config import HttpConfig, RingConfig
from shmserve.wire.submit_slots import SubmitKind

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4000, "ignore_eos": True},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4000, "ignore_eos": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}},
}


@pytest.fixture(scope="module")
def server(start_server):
    """One sequence at a time; who waits for a second is refused."""
    return start_server("--step-ms=2", "--max-num-seqs=1", "--waiting-timeout=1")


@pytest.fixture
def busy(server):
    """A stream that has the one slot until the test is over."""
    stream = server.stream(max_tokens=8000, ignore_eos=True)
    stream.take(1)
    yield stream
    stream.leave()
    server.wait_idle()


def at_once(server, requests):
    """Answers to (path, body, headers), all sent at the same time, and how long each took."""
    answers = [None] * len(requests)

    def ask(index, path, body, headers):
        begin = time.monotonic()
        answer = server.request("POST", path, body, headers)
        answers[index] = (answer, time.monotonic() - begin)

    threads = [
        threading.Thread(target=ask, args=(index, *each)) for index, each in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_who_waits_longer_than_the_bound_is_refused_before_any_200_F4(server, busy):
    before = server.words("http")
    timed_out = server.words("worker")["num_timed_out"]
    body = BODIES["/v1/completions"]
    requests = [("/v1/completions", body | {"stream": i == 2}, None) for i in range(3)]
    for answer, took_s in at_once(server, requests):
        error = answer.error()
        assert (answer.status, error["code"]) == (503, "waiting_timeout")
        assert error["type"] == "overloaded_error"
        assert error["message"] == "Request waiting timeout reached."
        assert int(answer.headers["retry-after"]) >= 1
        assert took_s >= 1.0
    after = server.words("http")
    assert after["num_refused_waiting_timeout"] - before["num_refused_waiting_timeout"] == 3
    worker = server.words("worker")
    assert worker["running"] == 1
    assert worker["num_timed_out"] - timed_out == 3, "by the worker, not by the front end's timer"
    assert len(busy.take(20)) == 20, "the one that runs goes on"


def test_a_deadline_in_the_queue_is_a_504_on_every_endpoint(server, busy):
    before = server.words("worker")["prompt_tokens"]
    requests = [
        (path, body | {"timeout_ms": 200, "stream": is_streamed}, None)
        for path, body in BODIES.items()
        for is_streamed in (False, True)
    ]
    requests.append(("/v1/completions", BODIES["/v1/completions"], {"X-Request-Timeout-Ms": "200"}))
    for answer, took_s in at_once(server, requests):
        assert (answer.status, took_s >= 0.2) == (504, True), answer
        assert "deadline" in answer.json()["error"]["message"]
    assert server.words("worker")["prompt_tokens"] == before, "none of them was computed"


def test_a_deadline_while_it_runs_gives_what_there_is_on_every_endpoint(server):
    def run(path):
        for timeout_ms in (250, 1000, 5000):  # it must have begun by then, on a slow machine, too
            answer = server.post(path, BODIES[path] | {"timeout_ms": timeout_ms})
            if answer.status != 504:
                break
        assert answer.status == 200, answer
        return answer.json()

    whole = run("/v1/completions")
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
    assert 0 < whole["usage"]["completion_tokens"] < 4000 and choice["text"]
    (choice,) = run("/v1/chat/completions")["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
    native = run("/generate")
    length = native["meta_info"]["completion_tokens"]
    finish = {"type": "length", "length": length, "stop_reason": "timeout"}
    assert native["meta_info"]["finish_reason"] == finish and native["text"]
    assert run("/v1/messages")["stop_reason"] == "max_tokens"
    assert run("/v1/responses")["status"] == "incomplete"
    *deltas, last = server.stream(timeout_ms=600, max_tokens=4000, ignore_eos=True).objects()
    assert deltas
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == (
        "length",
        "timeout",
    )
    # The header and the body may both say it: the nearer one counts.
    begin = time.monotonic()
    body = BODIES["/v1/completions"] | {"timeout_ms": 600}
    headers = {"X-Request-Timeout-Ms": "80000"}
    answer = server.request("POST", "/v1/completions", body, headers)
    assert answer.json()["choices"][0]["stop_reason"] == "timeout"
    assert time.monotonic() - begin >= 0.6
    server.wait_idle()


def test_a_timeout_that_is_none_is_refused_by_name(server):
    for value in (0, -5, 10**12, "soon", 1.5):
        answer = server.post("/v1/completions", {"prompt": "Hi", "timeout_ms": value})
        assert (answer.status, answer.error()["param"]) == (400, "timeout_ms")
    for value in ("0", "-5", "soon", "1.5", "9" * 13, ""):
        headers = {"X-Request-Timeout-Ms": value}
        answer = server.request("POST", "/v1/completions", {"prompt": "Hi"}, headers)
        assert (answer.status, answer.error()["param"]) == (400, "X-Request-Timeout-Ms")


# -- a worker that does not do its part --------------------------------------------------------------------------------------


def with_puppet(scenario, model, token_slots=64):
    async def whole():
        rings = RingConfig(token_slots=token_slots, submit_slots=16)
        async with Puppet(model, HttpConfig(), rings) as puppet, asyncio.timeout(40):
            await scenario(puppet)
            await asyncio.sleep(0)
            line = puppet.front.admission.line
            assert (line.num_places, line.num_waiting, line.num_tokens) == (0, 0, 0)

    asyncio.run(whole())


def test_a_silent_worker_does_not_hold_a_deadline_up(default_model):
    async def scenario(puppet):
        reader, _ = await puppet.ask(timeout_ms=500)
        submit = await puppet.submitted()
        assert submit.deadline_ns - submit.arrival_ns == 500_000_000
        status, body = await read_answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
        ((kind, req_id, _),) = puppet.take()
        assert (kind, req_id) == (SubmitKind.ABORT, submit.req_id)
        assert puppet.front.admission.line.num_places == 1, "until the worker lets it go"
        puppet.put(finish_record(req_id))
        while puppet.client.in_flight:
            await asyncio.sleep(0.001)

    with_puppet(scenario, default_model)


def test_a_stream_of_a_worker_that_went_silent_ends_with_an_error_event(default_model):
    async def scenario(puppet):
        reader, _ = await puppet.ask(timeout_ms=500, stream=True)
        req_id = (await puppet.submitted()).req_id
        puppet.put(started_record(req_id), tokens_record(req_id, [905]))
        status, body = await read_answer(reader)
        *_, error, done = events_of(body)
        assert (status, error["error"]["code"], done) == (200, "deadline_exceeded", "[DONE]")
        puppet.put(finish_record(req_id))
        while puppet.client.in_flight:
            await asyncio.sleep(0.001)

    with_puppet(scenario, default_model)


def test_a_deadline_that_passed_before_the_submit_submits_nothing(default_model):
    async def scenario(puppet):
        _, writer = await puppet.ask()  # one that is there, and has no deadline
        req_id = (await puppet.submitted()).req_id
        encode = puppet.front.tokenizer.encode

        async def slow(*args, **more):
            await asyncio.sleep(0.02)
            return await encode(*args, **more)

        puppet.front.tokenizer.encode = slow
        reader, _ = await puppet.ask(timeout_ms=5)
        status, body = await read_answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
        assert puppet.take() == []
        puppet.put(finish_record(req_id))
        while puppet.client.in_flight:
            await asyncio.sleep(0.001)
        writer.close()

    with_puppet(scenario, default_model)


@pytest.mark.slow
def test_the_operators_bound_on_running_ends_with_what_there_is(start_server):
    server = start_server("--step-ms=2", "--running-timeout=0.5")
    begin = time.monotonic()
    (choice,) = server.complete(max_tokens=4000, ignore_eos=True)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
    assert time.monotonic() - begin >= 0.5
    assert server.complete(max_tokens=5, ignore_eos=True)["choices"][0]["stop_reason"] is None
    server.wait_idle()


def test_an_end_that_was_there_is_told_though_this_process_stood_still(default_model):
    """It lies behind more than the pump reads in one turn of the loop, and the timer was due in that turn."""

    async def scenario(puppet):
        other, _ = await puppet.ask(stream=True)
        running = (await puppet.submitted()).req_id
        reader, _ = await puppet.ask(timeout_ms=1000)
        req_id = (await puppet.submitted()).req_id
        puppet.put(started_record(running), started_record(req_id))
        puppet.put(*(tokens_record(running, [905], i) for i in range(600)))
        puppet.put(tokens_record(req_id, [905]), finish_record(req_id))
        time.sleep(1.4)
        status, body = await read_answer(reader)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, " world")
        puppet.put(finish_record(running))
        await read_answer(other)

    with_puppet(scenario, default_model, token_slots=1024)
