"""Minutes of everything at once, and then nothing: what a server holds, says and leaves behind after traffic of every kind and every fault.

    python tools/soak.py --minutes 20 --runner simulated|cpu [--seed N] [--json FILE]

Rounds of seeded traffic: streams and plain requests, clients that leave in every phase, that get stuck, that have deadlines, that are
aborted by their id, that ask nonsense; bursts of three times what the server holds; the worker, the front end and the supervisor stopped
and continued; workers and front ends killed, faulted (SIGSEGV) and hung, in the first part of the run only, so that the second shows long
lives. Every answer must be the beginning of what an idle server gave to the same request; every end that is not a whole answer must be
what a fault of that moment, or its own client, explains. After each round the traffic stops, and the server must hold nothing, as at its
start; every sixth round is calm, and its counters must add up exactly. At the end SIGTERM, and nothing may be left.

Exit code 1 if anything was found. Two minutes are the least that injects everything but the hangs.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

import click
from bench_common import (
    NoiseWatch,
    Row,
    as_written,
    end_on_sigterm,
    noise_sentence,
    print_table,
    write_json,
)
from soak_run import DEADLY_PART, FLAGS, Soak
from soak_traffic import PROFILES
from soak_watch import SoakServer

from shmserve.instance_socket import InstanceError

MOST_PRINTED: Final = 40


@click.command(help=as_written(__doc__))
@click.option("--minutes", type=click.FloatRange(min=0), default=20.0, show_default=True)
@click.option("--runner", type=click.Choice(list(PROFILES)), default="simulated", show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option(
    "--deadly-part",
    type=click.FloatRange(0, 1),
    default=DEADLY_PART,
    show_default=True,
    help="Share of the run, from its beginning, in which processes die.",
)
@click.option("--keep-log", type=click.Path(dir_okay=False), help="Copy the server's log there.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False))
def main(
    minutes: float,
    runner: str,
    seed: int,
    deadly_part: float,
    keep_log: str | None,
    json_path: str | None,
) -> None:
    end_on_sigterm()
    profile = PROFILES[runner]
    noise = NoiseWatch()
    with (
        tempfile.TemporaryDirectory() as folder,
        SoakServer(Path(folder), (*profile.flags, *FLAGS)) as server,
    ):
        soak = Soak(server, profile, seed, deadly_part)
        rows: list[Row] = []
        try:
            try:
                asyncio.run(soak.run(minutes))
                rows = soak.judge_run(minutes)
            except* InstanceError as errors:
                soak.findings.append(f"the supervisor does not answer: {errors.exceptions[0]}")
            soak.findings += server.end()
        finally:
            if keep_log:
                Path(keep_log).write_text(server.output())
        soak.findings += [f"log: {line}" for line in server.alarms()]
    print_table(rows)
    num_requests = soak.ends.total()
    print(f"{num_requests} requests in {len(soak.looks) - 1} rounds, {soak.num_calm} of them calm")
    print(f"ends: {dict(soak.ends.most_common())}")
    print(f"faults: {dict(soak.faults.most_common())}")
    print(noise_sentence([noise.cores()]))
    for finding in soak.findings[:MOST_PRINTED]:
        print(f"FOUND  {finding}")
    if len(soak.findings) > MOST_PRINTED:
        print(f"FOUND  and {len(soak.findings) - MOST_PRINTED} more")
    if not soak.findings:
        print("nothing found")
    summary = {
        "minutes": minutes,
        "runner": runner,
        "seed": seed,
        "ends": dict(soak.ends),
        "faults": dict(soak.faults),
        "findings": soak.findings,
    }
    write_json(json_path, [summary, *rows])
    sys.exit(bool(soak.findings))


if __name__ == "__main__":
    main()
