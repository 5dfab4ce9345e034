"""Small things that wake tasks: Signal and Turnstile; and the verdict on who comes in."""

import asyncio
from types import SimpleNamespace

import pytest

from shmserve.http.admission import Admission
from shmserve.http.errors import ApiError
from shmserve.http.in_flight import Signal
from shmserve.http.turnstile import MOST_WAIT_S, Turnstile


def test_a_signal_set_before_the_wait_is_not_lost():
    async def scenario():
        signal = Signal()
        signal.set()
        assert await signal.wait() is True
        assert await signal.wait(0.01) is False  # it was taken

    asyncio.run(scenario())


def test_a_signal_wakes_its_waiter_and_sets_that_nobody_saw_count_once():
    async def scenario():
        signal = Signal()
        waiter = asyncio.create_task(signal.wait(20))
        await asyncio.sleep(0)
        signal.set()
        signal.set()
        assert await waiter is True
        assert await signal.wait(0.01) is False

    asyncio.run(scenario())


def test_a_wait_that_is_cancelled_loses_no_signal():
    async def scenario():
        signal = Signal()
        waiter = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        signal.set()
        waiter.cancel()
        await asyncio.wait([waiter])
        assert await signal.wait(0.01) is True

    asyncio.run(scenario())


def test_one_request_begins_per_turn_first_come_first_served():
    async def scenario():
        turnstile, order, turn = Turnstile(lambda: False), [], 0

        async def handler(name):
            await turnstile.turn(has_tokens=False)
            order.append((name, turn))

        tasks = [asyncio.create_task(handler(name)) for name in range(6)]
        for turn in range(30):  # noqa: B007  # read by the handlers
            await asyncio.sleep(0)
        assert [name for name, _ in order] == list(range(6))
        assert len({turn for _, turn in order}) == 6
        assert turnstile.num_waiting == 0
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_who_has_tokens_goes_before_who_begins():
    async def scenario():
        turnstile, order = Turnstile(lambda: False), []

        async def handler(name, has_tokens):
            await turnstile.turn(has_tokens=has_tokens)
            order.append(name)

        tasks = [asyncio.create_task(handler(f"r{i}", False)) for i in range(3)]
        tasks += [asyncio.create_task(handler(f"t{i}", True)) for i in range(3)]
        await asyncio.gather(*tasks)
        assert order[0] == "r0"  # it came to an empty turnstile
        assert order[1:] == ["t0", "t1", "t2", "r1", "r2"]

    asyncio.run(scenario())


def test_while_the_pump_is_behind_requests_begin_at_the_slow_rate_and_then_at_once():
    async def scenario():
        behind = True
        turnstile, done = Turnstile(lambda: behind), []
        loop = asyncio.get_running_loop()

        async def handler():
            await turnstile.turn(has_tokens=False)
            done.append(loop.time())

        tasks = [asyncio.create_task(handler()) for _ in range(6)]
        await asyncio.wait_for(asyncio.gather(*tasks[:3]), 20)
        assert done[1] - done[0] >= 0.9 * MOST_WAIT_S and done[2] - done[1] >= 0.9 * MOST_WAIT_S
        assert len(done) == 3
        behind = False
        await asyncio.wait_for(asyncio.gather(*tasks), 20)

    asyncio.run(scenario())


def test_while_the_pump_is_behind_who_has_tokens_does_not_wait_for_it():
    async def scenario():
        turnstile = Turnstile(lambda: True)
        for _ in range(20):
            await asyncio.wait_for(turnstile.turn(has_tokens=True), 20)
        assert turnstile.num_waiting == 0

    asyncio.run(scenario())


def test_a_handler_that_is_cancelled_in_line_takes_nobodys_turn():
    async def scenario():
        turnstile, done = Turnstile(lambda: False), []

        async def handler(name):
            await turnstile.turn(has_tokens=False)
            done.append(name)

        tasks = [asyncio.create_task(handler(i)) for i in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[2].cancel()
        await asyncio.wait(tasks)
        assert done == [0, 3] and turnstile.num_waiting == 0

    asyncio.run(scenario())


class FakeClient:
    """What Admission asks a WorkerClient."""

    def __init__(self):
        self.in_flight = {}
        self.num_waiting = 0
        self.link = SimpleNamespace(worker=0, state="ready", phase="", fraction=0.0)
        self.links = {0: self.link}
        self.refused = 0
        self.board = SimpleNamespace(add=self._count)

    def _count(self, name):
        assert name == "num_refused"
        self.refused += 1

    def serving(self):
        return self.link if self.link.state == "ready" else None


def refusal(admission, count=1):
    with pytest.raises(ApiError) as refused:
        admission.admit(count)
    return refused.value


def test_run_slots_and_the_queue_are_what_may_be_in_flight():
    client = FakeClient()
    admission = Admission(client, 2, 3)
    for number in range(5):
        admission.admit(1)
        client.in_flight[number] = None
    error = refusal(admission)
    assert (error.status, error.code, error.type) == (503, "queue_full", "overloaded_error")
    assert error.retry_after_s >= 1 and client.refused == 1
    del client.in_flight[0]
    admission.admit(1)
    assert refusal(admission, 2).code == "queue_full"
    assert refusal(admission, 6).status == 400


def test_draining_comes_before_everything_and_can_be_retried():
    client = FakeClient()
    admission = Admission(client, 2, 3)
    admission.is_draining = True
    error = refusal(admission)
    assert (error.status, error.code, error.retry_after_s) == (503, "draining", 1)


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [("loading", "loading", "40%"), ("dead", "no_worker", "dead"), ("hung", "no_worker", "hung")],
)
def test_without_a_worker_the_refusal_says_what_it_does_instead(state, code, words):
    client = FakeClient()
    client.link.state, client.link.phase, client.link.fraction = state, "reading weights", 0.4
    error = refusal(Admission(client, 2, 3))
    assert (error.status, error.code, error.retry_after_s) == (503, code, 1)
    assert words in error.message


def test_retry_after_follows_the_rate_of_finishes():
    client = FakeClient()
    admission = Admission(client, 1, 4)
    assert admission.retry_after_s() == 1
    client.num_waiting = 4
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shmserve.http.admission.time.monotonic", lambda: now[0])
        for second in range(0, 50, 10):
            now[0] = float(second)
            admission.note_finish()
        assert admission.retry_after_s() == 8  # five in 40 s, one place too few
        now[0] = 10_000.0
        assert admission.retry_after_s() == 60
