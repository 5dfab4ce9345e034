"""The acceptance test of two instances behind smg: each test is a point of it, by number."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
import router_checks
from router_client import Streams, ask, ask_all, question, questions, session
from router_fleet import get, rss_bytes, samples_of, until

from shmserve import __version__

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
BREAKER_S = 5.0  # --cb-timeout-duration-secs of deploy/smg/start.sh


async def ask_one(url, body, path="/v1/chat/completions"):
    async with session() as client:
        return await ask(client, url, body, path=path)


def test_1_both_are_registered_as_what_they_are_and_their_load_is_polled(behind_smg):
    listed = behind_smg.router.workers()
    assert {each["url"] for each in listed} == {behind_smg.a.url, behind_smg.b.url}
    assert {each["model_id"] for each in listed} == {MODEL}
    assert {each["runtime_type"] for each in listed} == {"sglang"}

    def polled():
        loads = [each.get("engine_load") or {} for each in behind_smg.router.workers()]
        # Only /v1/loads tells smg a version: where it has fallen back to /metrics there is none.
        return all(load.get("version") == __version__ for load in loads)

    until(polled, "smg has read /v1/loads of both")
    name = "smg_engine_load_polls_total"
    first = samples_of(behind_smg.router.metrics_url)[name]
    until(lambda: samples_of(behind_smg.router.metrics_url)[name] > first, "it goes on polling")
    asyncio.run(router_checks.registered(behind_smg))


def test_2_streams_are_whole_unmerged_and_what_a_direct_run_says(behind_smg):
    asyncio.run(router_checks.many_streams(behind_smg))


def test_3_a_killed_worker_ends_its_streams_with_our_own_error(behind_smg):
    asyncio.run(router_checks.worker_killed(behind_smg))


def test_4_a_killed_host_is_felt_by_its_own_streams_only_and_comes_back(behind_smg):
    asyncio.run(router_checks.host_killed(behind_smg))


def test_5_a_drained_host_finishes_its_streams_and_gets_no_others(behind_smg):
    asyncio.run(router_checks.drained(behind_smg))


async def fill(fleet):
    """Every place of both instances is taken, past the router. The streams, entered."""
    held = []
    for each in (fleet.a, fleet.b):
        streams = Streams(each.url, questions(2, 7000))
        held.append(await streams.__aenter__())
        waiting = asyncio.gather(*(ask_one(each.url, question(9, 7000)) for _ in range(2)))
        held.append(waiting)
        await router_checks.in_thread(
            lambda each=each: each.load()["num_waiting_reqs"] == 2, "the queue is full"
        )
    return held


async def release(fleet, held):
    for each in held:
        if isinstance(each, Streams):
            await each.__aexit__()
        else:
            each.cancel()
            await asyncio.gather(each, return_exceptions=True)
    for each in (fleet.a, fleet.b):
        await router_checks.in_thread(
            lambda each=each: not each.load()["num_total_reqs"], "all are gone"
        )


def test_6_a_full_fleet_says_429_with_retry_after_and_serves_the_next_when_it_has_room(small_fleet):
    fleet = small_fleet("--queue-full-status=429")

    async def run():
        held = await fill(fleet)
        refused = [await ask_one(fleet.url, question(i, 4)) for i in range(12)]
        await release(fleet, held)
        return refused, await ask_one(fleet.url, question(1, 4))

    refused, after = asyncio.run(run())
    assert {each.status for each in refused} == {429}
    for each in refused:
        assert int(each.headers["retry-after"]) >= 1
        assert json.loads(each.body)["error"]["code"] == "queue_full"
    assert after.is_complete, (
        "429 has opened smg's breaker: it did not in the version that is pinned"
    )


def test_6_with_503_the_breaker_opens_and_that_is_why_the_setting_is_429(small_fleet):
    fleet = small_fleet("--queue-full-status=503")

    async def run():
        held = await fill(fleet)
        refused = [await ask_one(fleet.url, question(i, 4)) for i in range(12)]
        await release(fleet, held)
        after = await ask_one(fleet.url, question(1, 4))
        began = time.monotonic()
        while (later := await ask_one(fleet.url, question(2, 4))).status != 200:
            assert time.monotonic() - began < 5 * BREAKER_S, later
            await asyncio.sleep(0.2)
        return refused, after

    refused, after = asyncio.run(run())
    assert {each.status for each in refused} == {503}
    assert after.status == 503, "503 no longer opens smg's breaker: say so in docs/scaling.md"


def test_7_an_instance_whose_queue_is_long_gets_nothing_while_the_other_has_room(behind_smg):
    a, b = behind_smg.a, behind_smg.b

    def of(instance):
        listed = {each["url"]: each for each in behind_smg.router.workers()}
        loads = (listed[instance.url].get("engine_load") or {}).get("loads") or [{}]
        return loads[0].get("num_waiting_reqs")

    async def run():
        async with Streams(a.url, questions(40, 4000)):
            waiting = asyncio.gather(*(ask_one(a.url, question(9, 4000)) for _ in range(9)))
            await router_checks.in_thread(lambda: a.load()["num_waiting_reqs"] == 9, "a has 9")
            await router_checks.in_thread(lambda: of(a) == 9, "smg has seen it")
            before = a.num_requests(), b.num_requests()
            told = await ask_all(behind_smg.url, questions(20, 4))
            after = a.num_requests(), b.num_requests()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        return told, before, after

    told, before, after = asyncio.run(run())
    assert all(each.is_complete for each in told)
    assert (after[0] - before[0], after[1] - before[1]) == (0, 20)


def stop_reading(port, policy):
    """A client that asks for a stream through the router, reads its beginning and no more."""
    body = {
        "text": "Hi",
        "sampling_params": {"max_new_tokens": 7000, "ignore_eos": True},
        "stream": True,  # cumulative: its frames grow, so that the kernel's buffers are soon full
        "on_slow_client": policy,
        "slow_client_seconds": 3.0,
    }
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    assert sock.recv(1024).startswith(b"HTTP/1.1 200")
    return sock


def test_8_a_client_that_stops_reading_is_seen_and_ended_by_us_and_not_stored_by_the_router(
    small_fleet,
):
    fleet = small_fleet()
    before = most = rss_bytes(fleet.router.process.pid)
    backlogs = {"drop": 0.0, "block": 0.0}
    for number, policy in enumerate(backlogs, 1):
        with stop_reading(fleet.router.port, policy):

            def ended(number=number, policy=policy):
                nonlocal most
                most = max(most, rss_bytes(fleet.router.process.pid))
                looks = [each.metrics() for each in (fleet.a, fleet.b)]
                sizes = [look["shmserve_client_backlog_bytes"] for look in looks]
                backlogs[policy] = max(backlogs[policy], *sizes)
                return sum(look["shmserve_slow_clients_total"] for look in looks) == number

            until(ended, f"shmserve has ended it by {policy}", 120.0)
    # By drop it is ended at once; who blocks is shown for as long as it may be stuck.
    assert backlogs["block"] > 0, "the backlog was never shown"
    assert most - before < 20 << 20, f"the router has grown by {(most - before) >> 20} MiB"


def test_9_a_client_that_leaves_through_the_router_frees_its_blocks(behind_smg):
    async def run():
        async with Streams(behind_smg.url, questions(16, 4000)) as streams:
            busy = sum(each.load()["num_used_tokens"] for each in (behind_smg.a, behind_smg.b))
            await streams.leave()
            return busy

    assert asyncio.run(run()) > 0
    for each in (behind_smg.a, behind_smg.b):
        until(lambda each=each: each.load()["num_used_tokens"] == 0, "its blocks are free")
        assert each.load()["num_total_reqs"] == 0


def test_10_a_deadline_and_the_wish_for_times_reach_us_through_the_router(behind_smg):
    body = question(3, 4000, timeout_ms=400, stream_options={"include_timing": True})
    told = asyncio.run(ask_one(behind_smg.url, body))
    assert told.is_complete and told.has_timing
    assert told.finish == "length" and 0 < len(told.texts) < 1000


@pytest.mark.parametrize(
    ("name", "bad"), [("priority", 2**40), ("cache_salt", "x" * 10_000), ("data_parallel_rank", 99)]
)
def test_10_options_of_ours_survive_for_we_refuse_bad_ones_by_name(behind_smg, name, bad):
    told = asyncio.run(ask_one(behind_smg.url, question(4, 2, **{name: bad})))
    assert told.status == 400
    assert json.loads(told.body)["error"]["param"] == name


def test_10_stop_regex_inside_sampling_params_is_lost_as_documented(behind_smg):
    sampling = {"max_new_tokens": 20, "ignore_eos": True, "stop_regex": "."}
    body = {"text": "Hi", "sampling_params": sampling}
    counts = []
    for url in (behind_smg.a.url, behind_smg.url):
        told = asyncio.run(ask_one(url, body, "/generate"))
        assert told.status == 200, told.body
        counts.append(json.loads(told.body)["meta_info"]["completion_tokens"])
    direct, routed = counts
    assert direct < 20, "stop_regex stops nothing even without the router"
    assert routed == 20, "smg passes stop_regex on now: say so in docs/scaling.md"


def test_a_request_id_reaches_us_and_its_client(behind_smg):
    async def run():
        async with session() as client:
            return await ask(
                client, behind_smg.url, question(5, 2), headers={"X-Request-Id": "mine-1"}
            )

    told = asyncio.run(run())
    assert told.headers["x-request-id"] == "mine-1"
    assert get(f"{behind_smg.url}/v1/models")[0] == 200
