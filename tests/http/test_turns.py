"""Small things that wake tasks: Signal and Turnstile; and who gives others a turn."""

import asyncio
import contextlib
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from shmserve.config import Config
from shmserve.http import native
from shmserve.http.deadlines import ARRIVAL
from shmserve.http.generation import PER_TURN, Generation, Wanted
from shmserve.http.in_flight import Signal
from shmserve.http.turnstile import MOST_WAIT_S, TOKENS_PER_TURN, Turnstile
from shmserve.request import SamplingParams


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


def test_waits_one_after_another_each_end_at_their_own_time_and_leave_no_timer():
    async def scenario():
        signal, loop = Signal(), asyncio.get_running_loop()
        signal.set()
        await signal.wait(20)
        for seconds in (0.05, 0.02, 0.1):
            loop.call_later(0.005, signal.set)
            assert await signal.wait(0.05) is True  # its timer is still there in the next one
            began = loop.time()
            assert await signal.wait(seconds) is False
            assert loop.time() - began >= seconds - 0.005
        waiter = asyncio.create_task(signal.wait(1000))
        await asyncio.sleep(0)
        signal.set()
        assert await waiter is True
        signal.close()
        assert signal._timer is None

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


def test_eight_who_have_tokens_share_a_turn_of_the_loop_and_none_with_a_request():
    async def scenario():
        turnstile, order, turn = Turnstile(lambda: False), [], 0

        async def handler(name, has_tokens):
            await turnstile.turn(has_tokens=has_tokens)
            order.append((name, turn))

        tasks = [asyncio.create_task(handler("t", True)) for _ in range(20)]
        tasks += [asyncio.create_task(handler("r", False)) for _ in range(2)]
        for turn in range(30):  # noqa: B007  # read by the handlers
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        in_turn = Counter(turn for _, turn in order)
        of_requests = {turn for name, turn in order if name == "r"}
        assert max(in_turn.values()) == TOKENS_PER_TURN
        assert len(in_turn) == 5  # 8 at once, 8, 4, and the requests
        assert len(of_requests) == 2 and all(in_turn[turn] == 1 for turn in of_requests)
        assert turnstile.num_waiting == 0

    asyncio.run(scenario())


def test_a_connection_is_taken_at_once_by_a_loop_that_does_nothing_else():
    async def scenario():
        turnstile, order = Turnstile(lambda: False), []
        turnstile.begin(lambda: order.append("first"))
        assert order == ["first"]
        turnstile.begin(lambda: order.append("second"))
        assert order == ["first"]
        while turnstile.num_waiting:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ["first", "second"]

    asyncio.run(scenario())


def test_connections_take_turns_with_requests_however_many_of_these_wait():
    async def scenario():
        turnstile, order = Turnstile(lambda: False), []

        async def handler(name):
            await turnstile.turn(has_tokens=False)
            order.append(name)

        tasks = [asyncio.create_task(handler(f"r{i}")) for i in range(6)]
        await asyncio.sleep(0)
        for i in range(2):
            turnstile.begin(lambda i=i: order.append(f"c{i}"))
        await asyncio.gather(*tasks)
        assert order[1:5] in (["r1", "c0", "r2", "c1"], ["c0", "r1", "c1", "r2"])
        assert order[5:] == ["r3", "r4", "r5"]
        assert turnstile.num_waiting == 0

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


@contextlib.contextmanager
def counted_turns():
    """A list that grows by one with each turn of the loop, while a task beside it gets one."""
    turns = []

    async def count():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    yield turns
    counting.cancel()


def test_a_request_of_many_sequences_gives_running_streams_a_turn_between_them():
    """400 prompts in one body are no less of a burst than 400 requests, which go one a turn."""

    async def submit(*args, **more):
        return SimpleNamespace(finish=None, error=None, place=0)

    def nothing(*args, **more):
        return None

    front = SimpleNamespace(
        admission=SimpleNamespace(
            enter=lambda n: SimpleNamespace(error=None), settle=nothing, close=nothing
        ),
        client=SimpleNamespace(submit=submit, abort=nothing),
        config=SimpleNamespace(worker=SimpleNamespace(waiting_timeout_s=0)),
        board=SimpleNamespace(histograms={}),
        book=None,
    )
    many = [Wanted(np.array([1], np.int32), SamplingParams(max_tokens=1))] * (4 * PER_TURN)

    async def scenario():
        with counted_turns() as turns:
            async with Generation(front, {ARRIVAL: 1}, many) as generation:
                assert len(generation.entries) == len(many)
        assert len(turns) >= 4

    asyncio.run(scenario())


def test_many_prompts_of_ids_are_made_ready_in_several_turns(monkeypatch):
    """Nothing has to be waited for then: 1,024 of them would hold the streams up for a tenth of a second."""

    class AllReady(Exception):
        pass

    def ready(front, request, wanted, external_id):
        raise AllReady(len(wanted))

    async def no_grammar(sampling):
        return ""

    def nothing(*args, **more):
        return None

    front = SimpleNamespace(
        config=Config(),
        tokenizer=SimpleNamespace(vocab_size=10, least_tokens=nothing),
        grammars=SimpleNamespace(wanted_by=no_grammar),
        check_model=nothing,
        admit=nothing,
        room_for=lambda num_tokens, name: 10,
    )
    monkeypatch.setattr(native, "Generation", ready)
    body = json.dumps({"input_ids": [[1]] * (4 * PER_TURN)}).encode()

    async def scenario():
        with counted_turns() as turns, pytest.raises(AllReady, match=str(4 * PER_TURN)):
            await native.generate(front, SimpleNamespace(headers={}), body)
        assert len(turns) >= 4

    asyncio.run(scenario())
