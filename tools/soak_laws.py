"""What must hold of a server after each round of the soak, and over all of them: pure functions of looks and outcomes.

Owns: the laws, each as a sentence that is given back if it is broken. Never: asks the server.

    a round      nothing is held, no stranger, the same segments and descriptors as at the beginning of each process's life;
                 requests the server counted = those that had an answer, and of those that left at most all
                 if every answer was whole: tokens computed = tokens read = tokens answered; frames written = events read
    the run      who died was killed by us;
                 memory and threads do not grow between the second and the last quarter of a process's last life
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from bench_common import Row
from soak_client import Outcome
from soak_faults import DEATHS
from soak_watch import Look, Process

from shmserve.boards import DEATH_CAUSES

ROLES: Final = ("supervisor", "http", "worker")
MOST_GROWTH_MIB: Final = {"supervisor": 2.0, "http": 6.0, "worker": 6.0}
LEAST_LOOKS: Final = 8
"""Fewer are no series."""
REFUSED_AS: Final = {
    "queue_full": ("num_refused_queue_full", "num_refused_evicted", "num_refused_tokens"),
    "submit_ring_full": ("num_refused_submit_ring",),
    "no_worker": ("num_refused_no_worker",),
    "loading": ("num_refused_loading",),
}
"""By the code of an answer: the words of the board, one of which counts it."""


def life_of(look: Look, role: str) -> tuple[int, int]:
    process = look.processes.get(role)
    return (process.pid, process.life) if process is not None else (0, 0)


def broken_by_idle(first: Look, look: Look, firsts: Mapping[str, Process]) -> list[str]:
    """A server of which nothing is asked. `firsts` has each process as it was first seen."""
    broken = [*look.strangers, *look.busy_words()]
    broken += [f"no {role}" for role in ROLES if role not in look.processes]
    if look.segments != first.segments:
        broken.append(f"segments: {sorted(set(first.segments) ^ set(look.segments))} differ")
    for role, process in look.processes.items():
        if process.descriptors != firsts[role].descriptors:
            then, now = dict(firsts[role].descriptors), dict(process.descriptors)
            changed = sorted(kind for kind in then | now if then.get(kind) != now.get(kind))
            news = ", ".join(f"{k}: {then.get(k, 0)} -> {now.get(k, 0)}" for k in changed)
            broken.append(f"{role}: descriptors: {news}")
    return broken


def _so_far(look: Look, role: str, word: str) -> int:
    """A counter over all lives: the board of the one that serves, and what the supervisor kept of those before it."""
    return look.words[role][word] + look.words["supervisor"][f"past_{role}_{word}"]


def broken_by_counts(before: Look, after: Look, outcomes: Sequence[Outcome]) -> list[str]:
    """What the server counted in a round, processes that died in it included, against what its clients saw.

    Who is killed may not have counted its last tokens, so these are compared where nobody died.
    """
    broken = []

    def more(role: str, word: str) -> int:
        return _so_far(after, role, word) - _so_far(before, role, word)

    counted = [
        outcome
        for outcome in outcomes
        if outcome.plan.is_counted and outcome.code != "too_many_connections"
    ]
    unsure = sum(outcome.end in ("left", "broken", "late") for outcome in counted)
    sure = len(counted) - unsure
    requests = more("http", "num_requests")
    if not sure <= requests <= sure + unsure:
        broken.append(f"{requests} requests counted, {sure} answered and {unsure} left")
    codes = Counter(outcome.code for outcome in outcomes if outcome.end == "refused")
    for code, words in REFUSED_AS.items():
        refused = sum(more("http", word) for word in words)
        if not codes[code] <= refused <= codes[code] + unsure:
            broken.append(f"{refused} refusals counted as {code}, {codes[code]} answered so")
    if any(life_of(before, role) != life_of(after, role) for role in ROLES):
        return broken
    computed, read = more("worker", "generation_tokens"), more("http", "tokens")
    answered = sum(outcome.num_tokens for outcome in outcomes)
    is_calm = all(outcome.end == "whole" and not outcome.stop_reason for outcome in outcomes)
    if computed < answered or (is_calm and not computed == read == answered):
        broken.append(f"tokens: {computed} computed, {read} read, {answered} answered")
    frames = more("http", "frames")
    events = sum(outcome.num_events for outcome in outcomes)
    if frames < events or (is_calm and frames != events):
        broken.append(f"{frames} frames written, {events} events read")
    return broken


def broken_by_deaths(words: Mapping[str, int], faults: Mapping[str, int]) -> list[str]:
    """The deaths that the supervisor's board counts, by cause, against those that were caused."""
    caused: Counter[str] = Counter()
    for fault in DEATHS:
        cause = "stopped" if fault.signal == signal.SIGSTOP else "signal"
        caused[f"{fault.role}_restarts_{cause}"] += faults.get(fault.name, 0)
    words_of_deaths = [f"{role}_restarts_{cause}" for role in ROLES[1:] for cause in DEATH_CAUSES]
    return [
        f"{word}: {words[word]}, caused were {caused[word]}"
        for word in words_of_deaths
        if words[word] != caused[word]
    ]


def last_life(looks: Sequence[Look], role: str) -> list[tuple[float, Process]]:
    """(time, process) of all looks at the process that serves as `role` at the end."""
    last = life_of(looks[-1], role)
    return [(look.at_s, look.processes[role]) for look in looks if life_of(look, role) == last]


def growth(series: Sequence[float]) -> float | None:
    """By how much the greatest of the last quarter is above the greatest of the second; None of what is too short."""
    if len(series) < LEAST_LOOKS:
        return None
    quarter = len(series) // 4
    return max(series[-quarter:]) - max(series[quarter : 2 * quarter])


def slope(times: Sequence[float], values: Sequence[float]) -> float | None:
    """Of the straight line through them, per second; None of fewer than two moments."""
    mean_t, mean_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    if not spread:
        return None
    pairs = zip(times, values, strict=True)
    return sum((t - mean_t) * (v - mean_v) for t, v in pairs) / spread


def row_of(looks: Sequence[Look], role: str) -> Row:
    """The last life of one process, as a row of the table."""
    series = last_life(looks, role)
    times = [at for at, _ in series]
    mib = [process.rss / 2**20 for _, process in series]
    per_s = slope(times, mib)
    return {
        "process": role,
        "looks": len(series),
        "life_min": (times[-1] - times[0]) / 60,
        "rss_first_mib": mib[0],
        "rss_last_mib": mib[-1],
        "mib_per_min": None if per_s is None else per_s * 60,
        "grown_mib": growth(mib),
        "threads": series[-1][1].num_threads,
        "grown_threads": growth([float(process.num_threads) for _, process in series]),
        "descriptors": sum(count for _, count in series[-1][1].descriptors),
    }


def broken_by_growth(row: Row) -> list[str]:
    """Of a process whose life was long enough to tell."""
    broken = []
    role, mib, threads = row["process"], row["grown_mib"], row["grown_threads"]
    if mib is not None and mib > MOST_GROWTH_MIB[role]:
        broken.append(f"{role}: {mib:.1f} MiB grown, 2nd to last quarter")
    if threads is not None and threads > 0:
        broken.append(f"{role}: {threads:g} threads more, 2nd to last quarter")
    return broken
