"""Whether shmserve works behind each router: acceptance points 1, 2, 4 and 5 on this machine, over two simulated instances.

    python tools/check_routers.py --router nginx --router haproxy
    python tools/check_routers.py --router vllm-router --program vllm-router=/path/to/venv/bin/vllm-router

sglang-router, vllm-router and smg are wheels on PyPI; the first brings a command `smg` of its own, so give each a venv. What is not installed is
skipped and said to be. Exit code 1 if a point does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from bench_common import end_on_sigterm
from router_checks import POINTS, Row
from router_fleet import KINDS, Kind, fleet

FLAGS = ("--step-ms=20", "--queue-full-status=429", "--drain-timeout=60")


def program_of(kind: Kind, named: dict[str, str]) -> str | None:
    """Its program: what was named, or beside this python, or on PATH."""
    here = str(Path(sys.executable).parent / kind.program)
    return (
        shutil.which(named.get(kind.name, "")) or shutil.which(here) or shutil.which(kind.program)
    )


def check(kind: Kind, program: str, points: list[str]) -> list[Row]:
    """Every point on one fleet, made whole between them."""
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="shmserve-router-") as folder,
        fleet(kind, Path(folder), program, FLAGS) as standing,
    ):
        for point in points:
            row: Row = {"router": kind.name, "point": point, "holds": True}
            started = time.monotonic()
            try:
                standing.restore()
                row |= asyncio.run(POINTS[point](standing))
            except (AssertionError, TimeoutError) as error:
                row |= {"holds": False, "why": str(error)[:500] or type(error).__name__}
            row["took_s"] = round(time.monotonic() - started, 1)
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", action="append", choices=list(KINDS), help="all by default")
    parser.add_argument("--point", action="append", choices=list(POINTS), help="all by default")
    parser.add_argument("--program", action="append", default=[], metavar="ROUTER=FILE")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    asked = parser.parse_args(argv)
    end_on_sigterm()
    named = dict(each.split("=", 1) for each in asked.program)
    rows: list[Row] = []
    for name in asked.router or list(KINDS):
        program = program_of(KINDS[name], named)
        if program is None:
            print(f"{name}: not installed, skipped", flush=True)
            continue
        rows += check(KINDS[name], program, asked.point or list(POINTS))
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows and all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
