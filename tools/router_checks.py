"""What must hold behind a router: the acceptance points that any router can be asked for. Each is a coroutine over a fleet.

Owns: the points and their bars; an AssertionError says which one does not hold. Each returns what it measured, and leaves the fleet whole or
to be made whole by `Fleet.restore`. Never: starts a fleet. Used by check_routers.py and by tests/e2e/routers.

No bar is a maximum of a time: a promise in seconds is waited for five times as long.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from router_client import Streams, Told, ask, ask_all, question, questions, session
from router_fleet import HEALTH_S, Fleet, Instance, cpu_s, get, rss_bytes, until

Row = dict[str, Any]
Check = Callable[[Fleet], Awaitable[Row]]

NUM_STREAMS: Final = 64
NUM_TOKENS: Final = 100
NUM_HURT: Final = 32
NUM_COST_STREAMS: Final = 128
NUM_COST_TOKENS: Final = 300
NUM_LONG_TOKENS: Final = 250
NUM_DRAINED_TOKENS: Final = 900  # 18 s: a drain is watched for three probes and 2 s
LEAST_READS_PER_FRAME: Final = 0.5
"""A router that gathers frames reads ten at a time; a client on a busy machine finds two together now and then."""
BACK_S: Final = 5 * (3 * HEALTH_S + 2.0)


async def in_thread(condition: Callable[[], Any], what: str, patience_s: float = 60.0) -> Any:
    """`until`, while the streams of this loop go on."""
    return await asyncio.to_thread(until, condition, what, patience_s)


def _split(told: list[Told]) -> tuple[list[Told], list[Told]]:
    return [t for t in told if t.is_complete], [t for t in told if not t.is_complete]


async def many_streams(fleet: Fleet) -> Row:
    """2. Full texts, each frame alone, both instances used, and every text that of a direct run with the same seeds."""
    bodies = questions(NUM_STREAMS, NUM_TOKENS)
    direct = await ask_all(fleet.a.url, bodies)
    assert all(each.is_complete for each in direct), "the direct run is not whole"
    await asyncio.to_thread(fleet.settle)
    before = [each.num_requests() for each in (fleet.a, fleet.b)]
    routed = await ask_all(fleet.url, bodies)
    statuses = {each.status for each in routed}
    assert statuses == {200}, f"statuses {statuses}"
    _, broken = _split(routed)
    assert not broken, f"{len(broken)} of {NUM_STREAMS} streams are not whole: {broken[0]}"
    wrong = [i for i in range(NUM_STREAMS) if routed[i].text != direct[i].text]
    assert not wrong, f"streams {wrong} say other than a direct run"
    after = [each.num_requests() for each in (fleet.a, fleet.b)]
    counts = [b - a for a, b in zip(before, after, strict=True)]
    assert min(counts) > 0 and sum(counts) == NUM_STREAMS, f"requests of a and b: {counts}"
    frames = [each.num_frames / direct[i].num_frames for i, each in enumerate(routed)]
    assert min(frames) > 0.9, f"events were merged: {min(frames):.2f} of those of a direct run"
    reads = statistics.median(each.num_reads / each.num_frames for each in routed)
    of_direct = statistics.median(each.num_reads / each.num_frames for each in direct)
    assert reads > LEAST_READS_PER_FRAME * of_direct, (
        f"{reads:.2f} reads a frame: they come in lumps"
    )
    return {"requests_a_b": counts, "reads_per_frame": round(reads, 2)}


async def _serves(fleet: Fleet, instance: Instance) -> None:
    """Ask until a request reaches `instance`."""
    before = instance.num_requests()
    for number in range(1000):
        told = await ask_all(fleet.url, questions(8, 2))
        assert all(each.status == 200 for each in told), {each.status for each in told}
        if instance.num_requests() > before:
            return
        assert number < 999, f"{instance.name} gets nothing"
        await asyncio.sleep(0.2)


async def worker_killed(fleet: Fleet) -> Row:
    """3. SIGKILL of a's worker process: its streams end with shmserve's own error and [DONE], new requests are served."""
    async with Streams(fleet.url, questions(NUM_HURT, NUM_LONG_TOKENS)) as streams:
        num_of_a = await asyncio.to_thread(fleet.a.num_running)
        await asyncio.to_thread(fleet.a.kill_worker)
        new = await ask_all(fleet.url, questions(8, 2))
        complete, hurt = _split(await streams.told())
    assert 0 < num_of_a < NUM_HURT, f"{num_of_a} of {NUM_HURT} streams were a's"
    assert len(hurt) == num_of_a, f"{len(hurt)} streams are cut, and {num_of_a} were a's"
    assert {each.code for each in hurt} == {"worker_died"}, {each.code for each in hurt}
    assert all(each.has_done and each.is_whole for each in hurt), "a stream has no end"
    assert {each.status for each in new} == {200}, [(each.status, each.body) for each in new]
    return {"cut": len(hurt), "whole": len(complete)}


async def host_killed(fleet: Fleet) -> Row:
    """4. SIGKILL of all of a: its streams end, the others do not notice, new ones are served; a on its port again gets traffic again."""
    async with Streams(fleet.url, questions(NUM_HURT, NUM_LONG_TOKENS)) as streams:
        num_of_a = await asyncio.to_thread(fleet.a.num_running)
        await asyncio.to_thread(fleet.a.kill)
        new = await ask_all(fleet.url, questions(40, 2))
        complete, hurt = _split(await streams.told())
    assert 0 < num_of_a < NUM_HURT, f"{num_of_a} of {NUM_HURT} streams were a's"
    assert len(hurt) == num_of_a, f"{len(hurt)} streams are cut, and {num_of_a} were a's"
    if fleet.router.kind.has_error_frame:
        assert all(each.error and each.has_done and each.is_whole for each in hurt), hurt[0]
    statuses = sorted({each.status for each in new})
    assert statuses == [200], f"new requests while a is gone: {statuses}"
    fleet.a.start()
    await asyncio.to_thread(fleet.a.wait_ready)
    started = time.monotonic()
    async with asyncio.timeout(BACK_S):
        await _serves(fleet, fleet.a)
    return {
        "cut": len(hurt),
        "with_error_frame": sum(bool(each.error) for each in hurt),
        "whole": len(complete),
        "back_s": round(time.monotonic() - started, 1),
    }


async def drained(fleet: Fleet) -> Row:
    """5. Drain of a: 503 at once, running streams complete, no new request after three probes, exit code 0."""
    async with Streams(fleet.url, questions(NUM_HURT, NUM_DRAINED_TOKENS)) as streams:
        num_of_a = await asyncio.to_thread(fleet.a.num_running)
        assert 0 < num_of_a < NUM_HURT, f"{num_of_a} of {NUM_HURT} streams are a's"
        begun = time.monotonic()
        drain = fleet.a.drain()
        await in_thread(lambda: _status(fleet.a) == 503, "/health of a that drains is 503")
        # Whoever is sent to a in the meantime is refused before any byte, and the router tries b.
        early = await ask_all(fleet.url, questions(8, 2))
        await asyncio.sleep(max(0.0, begun + 3 * HEALTH_S + 2.0 - time.monotonic()))
        before = await asyncio.to_thread(fleet.a.num_refused)
        late = await ask_all(fleet.url, questions(16, 2))
        still_running = await asyncio.to_thread(fleet.a.num_running)
        after = await asyncio.to_thread(fleet.a.num_refused)
        told = await streams.told()
    assert still_running > 0, "a had ended before it could be asked"
    assert {each.status for each in early + late} == {200}, {e.status for e in early + late}
    asked = after - before
    if fleet.router.kind.name != "nginx":  # it has no health checks: a 503 is how it finds out
        assert asked == 0, f"{asked} new requests at a that drains"
    assert all(each.is_complete for each in told), "a running stream was cut"
    code = await asyncio.to_thread(fleet.a.process.wait, 60)
    assert code == 0, f"a ended with {code}"
    assert await asyncio.to_thread(drain.wait, 60) == 0
    return {"streams_of_a": num_of_a, "asked_while_draining": asked}


def _status(instance: Instance) -> int:
    return get(f"{instance.url}/health")[0]


async def registered(fleet: Fleet) -> Row:
    """1. The router has both, and says so."""
    async with session() as client:
        told = await ask(client, fleet.url, question(0, 2))
    assert told.is_complete, told
    await _serves(fleet, fleet.a)
    await _serves(fleet, fleet.b)
    return {}


async def frame_cost(fleet: Fleet) -> Row:
    """What the router pays for a frame, in us of CPU: 128 streams of 50 frames a second. No bar: it is what sizing needs."""
    pid = fleet.router.process.pid
    before = cpu_s(pid)
    told = await ask_all(fleet.url, questions(NUM_COST_STREAMS, NUM_COST_TOKENS))
    after = cpu_s(pid)
    assert all(each.is_complete for each in told), "a stream was cut"
    num_frames = sum(each.num_frames for each in told)
    return {
        "router_us_per_frame": round((after - before) * 1e6 / num_frames, 1),
        "num_frames": num_frames,
        "router_rss_mib": rss_bytes(pid) >> 20,
    }


POINTS: Final[dict[str, Check]] = {
    "1 registered": registered,
    "2 many streams": many_streams,
    "4 host killed": host_killed,
    "5 drained": drained,
    "cost of a frame": frame_cost,
}
"""What every router is asked for."""
