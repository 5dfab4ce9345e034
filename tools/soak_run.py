"""The rounds of the soak: traffic and faults side by side, then rest, and what was found.

Owns: when what happens, and the list of findings. Never: decides what is right (soak_laws.py, soak_faults.py) or what is asked (soak_traffic.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from bench_common import Row
from soak_client import Outcome, Plan, abort, ask, first_answer, get
from soak_faults import (
    BURST,
    DEATHS,
    FLOOD,
    HANG_TIMEOUT_S,
    SLOW_CLIENT_S,
    STOPPED_S,
    STOPS,
    WAITING_TIMEOUT_S,
    Fault,
    Windows,
    finding_of,
)
from soak_laws import (
    ROLES,
    broken_by_counts,
    broken_by_deaths,
    broken_by_growth,
    broken_by_idle,
    life_of,
    row_of,
)
from soak_traffic import Mix, Profile, Song, book
from soak_watch import Look, Process, SoakServer

from shmserve.boards import IDLE_HEARTBEAT_S
from shmserve.instance_socket import InstanceError

ROUND_S: Final = 8.0
CALM_EVERY: Final = 6
DEADLY_PART: Final = 0.4  # of the run: deaths in it, none behind it
TOGETHER: Final = 0.3  # of the rounds: both faults at once
MOST_DEATHS: Final = (
    3  # of one role within the supervisor's five minutes: the fifth would end the server
)
DEATHS_WINDOW_S: Final = 310.0
MOST_CONNECTIONS: Final = 256
FLOOD_BEYOND: Final = 30
FLOOD_S: Final = 1.0
REPAIR_S: Final = 120.0
IDLE_S: Final = 60.0
FLAGS: Final = (
    "--max-model-len=2048",
    "--token-ring-slots=256",
    "--submit-ring-slots=256",
    f"--max-concurrent-connections={MOST_CONNECTIONS}",
    f"--hang-timeout={HANG_TIMEOUT_S}",
    f"--slow-client-seconds={SLOW_CLIENT_S}",
    f"--waiting-timeout={WAITING_TIMEOUT_S}",
)
EXPECTED: Final = ("whole", "left", "queue_full", "slow_client", "deadline_exceeded", "aborted")
"""What must have happened: a soak in which it does not has shown nothing of it."""


@dataclass(slots=True)
class Soak:
    """One run; `findings` is what it is for."""

    server: SoakServer
    profile: Profile
    seed: int
    deadly_part: float = DEADLY_PART
    windows: Windows = field(default_factory=Windows)
    looks: list[Look] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    num_calm: int = 0
    _firsts: dict[tuple[int, int], Process] = field(default_factory=dict)  # by life
    _bag: list[Fault] = field(default_factory=list)
    _pick: random.Random = field(default_factory=random.Random)

    async def run(self, minutes: float) -> None:
        """The rounds. The server is as it was at their end."""
        self._pick.seed(self.seed)
        songs = book(self.profile, self.seed)
        await self._sing(songs)
        mix = Mix(self.profile, songs, self._pick)
        for plan in [mix.plain_or_streamed() for _ in range(10)]:  # what is opened once is open now
            await ask(self.server.port, plan)
        await self._rest("the start")
        begin = time.monotonic()
        end = begin + minutes * 60
        for number in itertools.count(1):
            if time.monotonic() >= end:
                break
            is_calm = number % CALM_EVERY == 0
            is_deadly = time.monotonic() < begin + self.deadly_part * (end - begin)
            await self._round(mix, number, [] if is_calm else self._draw(is_deadly), is_calm)
        await self._house(mix)

    async def _sing(self, songs: list[Song]) -> None:
        """Each song alone in the server but for its like: the texts that all answers are measured by."""
        at_once = asyncio.Semaphore(4)

        async def one(song: Song) -> None:
            async with at_once:
                answer = await first_answer(self.server.port, Plan(song.path, song.body))
                if answer.status != 200:
                    raise SystemExit(f"an idle server did not answer: {answer.error()}")
                song.text, _, _ = answer.result()

        await asyncio.gather(*map(one, songs))

    def _draw(self, is_deadly: bool) -> list[Fault]:
        """Two faults for a round, of different processes, from a bag in which every one is once."""
        drawn: list[Fault] = []
        for _ in range(2):
            if not self._bag:
                # Hangs take long: they come last, and the shortest runs do not reach them.
                deaths = list(DEATHS[:4]), list(DEATHS[4:])
                first = [BURST, FLOOD, *STOPS, *deaths[0]]
                self._pick.shuffle(first)
                self._bag = [*deaths[1], *first]
            fault = self._bag.pop()
            taken = {other.role for other in drawn if other.role}
            is_too_much = fault.is_death and (
                not is_deadly
                or self.windows.recent_deaths(fault.role, DEATHS_WINDOW_S) >= MOST_DEATHS
            )
            if is_too_much or fault.role in taken:
                mild = [each for each in (BURST, FLOOD, *STOPS) if each.role not in taken]
                fault = self._pick.choice(mild)
            drawn.append(fault)
        return drawn

    async def _round(self, mix: Mix, number: int, faults: list[Fault], is_calm: bool) -> None:
        """Traffic for ROUND_S, or until the last fault is over; then nothing."""
        outcomes: list[Outcome] = []
        before = self.looks[-1]
        async with asyncio.TaskGroup() as group:
            hurting = group.create_task(self._hurt(faults, mix, outcomes))
            group.create_task(self._traffic(mix, is_calm, outcomes, hurting))
        name = f"round {number} ({'calm' if is_calm else ', '.join(f.name for f in faults)})"
        self._note(name, outcomes)
        after = await self._rest(name)
        if after is not None:
            self.findings += [f"{name}: {x}" for x in broken_by_counts(before, after, outcomes)]
        self.num_calm += is_calm

    async def _traffic(
        self, mix: Mix, is_calm: bool, outcomes: list[Outcome], hurting: asyncio.Task[None]
    ) -> None:
        """Requests at random moments, never more at once than the profile says; all have ended when this returns."""
        end = time.monotonic() + ROUND_S
        at_once = asyncio.Semaphore(self.profile.num_at_once)
        async with asyncio.TaskGroup() as group:

            async def one(plan: Plan) -> None:
                try:
                    outcomes.append(await ask(self.server.port, plan))
                finally:
                    at_once.release()

            async def one_abort(plan: Plan) -> None:
                name = plan.body["request_id"]
                outcomes.append(await abort(self.server.port, name, plan.aborted_after_s))

            while time.monotonic() < end or not hurting.done():
                await at_once.acquire()
                plan = mix.plain_or_streamed() if is_calm else mix.any()
                group.create_task(one(plan))
                if plan.aborted_after_s:
                    group.create_task(one_abort(plan))
                await asyncio.sleep(self._pick.expovariate(self.profile.rate))

    async def _hurt(self, faults: list[Fault], mix: Mix, outcomes: list[Outcome]) -> None:
        """One fault after the other, each until it is over; or both at once."""
        if len(faults) > 1 and self._pick.random() < TOGETHER:
            hurts = [self._hurt([fault], mix, outcomes) for fault in faults]
            await asyncio.gather(*hurts)
            return
        for fault in faults:
            await asyncio.sleep(self._pick.uniform(0.3, 1.5))
            self.faults[fault.name] += 1
            window = self.windows.open(fault)
            if fault is BURST:
                plans = mix.burst()
                outcomes += await asyncio.gather(*(ask(self.server.port, p) for p in plans))
            elif fault is FLOOD:
                await self._flood()
            else:
                await self._signal(fault)
            await self._repaired(fault)
            self.windows.close(window)

    async def _flood(self) -> None:
        """More connections than the server takes, for a moment."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            for _ in range(MOST_CONNECTIONS + FLOOD_BEYOND):
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", self.server.port))
            await asyncio.sleep(FLOOD_S)

    async def _signal(self, fault: Fault) -> None:
        """Stop a process and let it go on; or end it, and wait until the supervisor has noticed."""
        pid = self.server.processes_by_board()[fault.role]
        os.kill(pid, fault.signal)
        if fault in STOPS:
            await asyncio.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            return
        deadline = time.monotonic() + REPAIR_S
        while time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            with contextlib.suppress(InstanceError):  # the supervisor may be stopped meanwhile
                if (await asyncio.to_thread(self.server.pids))[fault.role] != pid:
                    return

    async def _repaired(self, fault: Fault) -> None:
        """Every process is ready, and new requests would be served."""
        deadline = time.monotonic() + REPAIR_S
        while time.monotonic() < deadline:
            try:
                answer = await get(self.server.port, "/health", 5.0)
                if answer.status == 200 and await asyncio.to_thread(self.server.is_whole):
                    return
            except (ConnectionError, TimeoutError):
                await asyncio.sleep(0.05)  # a front end that comes or goes
            await asyncio.sleep(0.05)
        self.findings.append(f"{fault.name}: not whole again in {REPAIR_S:g} s")

    def _note(self, name: str, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self.ends[outcome.code or outcome.end] += 1
            finding = finding_of(outcome, self.windows.of(outcome))
            if finding:
                self.findings.append(f"{name}: {finding}")

    async def _rest(self, name: str) -> Look | None:
        """Nothing is asked: wait until nothing is held, and look. What is still held after IDLE_S is a finding."""
        deadline = time.monotonic() + IDLE_S
        former = None
        while True:
            look = self.server.look()
            first = self.looks[0] if self.looks else look
            firsts = {
                role: self._firsts.get(life_of(look, role), process)
                for role, process in look.processes.items()
            }
            broken = broken_by_idle(first, look, firsts)
            # Gauges are as old as a heartbeat: a connection may still be closing when they say that there is none.
            if not broken and former is not None and look.has_same_descriptors(former):
                self.looks.append(look)
                self._firsts |= {life_of(look, role): firsts[role] for role in firsts}
                return look
            if time.monotonic() > deadline:
                broken = broken or ["its descriptors do not come to rest"]
                self.findings += [f"{name}, {IDLE_S:g} s later: {each}" for each in broken]
                self.looks.append(look)
                return None
            former = look
            await asyncio.sleep(2 * IDLE_HEARTBEAT_S)

    async def _house(self, mix: Mix) -> None:
        """Every place of the server can be taken at once: none was lost on the way."""
        before, plans = self.looks[-1], mix.full_house()
        outcomes = await asyncio.gather(*(ask(self.server.port, plan) for plan in plans))
        name = "the full house"
        self._note(name, outcomes)
        after = await self._rest(name)
        if after is not None:
            self.findings += [f"{name}: {x}" for x in broken_by_counts(before, after, outcomes)]

    def judge_run(self, minutes: float) -> list[Row]:
        """The table, and the findings of the run as a whole."""
        rows: list[Row] = []
        words = self.looks[-1].words["supervisor"]
        self.findings += broken_by_deaths(words, self.faults)
        for role in ROLES:
            rows.append(row_of(self.looks, role))
            self.findings += broken_by_growth(rows[-1])
            if minutes >= 5 * self.profile.least_minutes and rows[-1]["grown_mib"] is None:
                self.findings.append(f"{role}: too few looks at its last life to tell a leak")
        if minutes >= self.profile.least_minutes:
            self.findings += [f"never seen: {end}" for end in EXPECTED if not self.ends[end]]
        return rows
