"""`shmserve top`: looks, shows, and waits for the next turn.

Owns: the loop and how it ends. Never: computes (`top.py` does), or draws (`top_screen.py` does). Commands only.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING

import click

from shmserve.commands.instances import instance_options

if TYPE_CHECKING:
    from shmserve.top import Report
    from shmserve.watch import Watch


@click.command()
@instance_options
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Show one interval, and end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for each interval.")
def top(instance: str, port: int | None, interval: float, once: bool, as_json: bool) -> None:
    """Watch a running instance: rings, processes, hops of tokens, slow clients.

    Reads its shared memory only: it needs no HTTP, and works while a front end or worker is stopped. Ends with Ctrl-C, or when the
    instance does. Where stdout is no terminal, it prints one screen, as with --once.
    """
    from shmserve.commands.find import find
    from shmserve.watch import EndedError, Watch

    watch = Watch(find(instance, port).name)
    signal.signal(signal.SIGTERM, _leave)  # so that the terminal is given back
    try:
        _show(watch, interval, once, as_json)
    except EndedError as ended:
        click.echo(f"shmserve: {ended}", err=True)
    except KeyboardInterrupt:
        return  # how it is meant to be left
    finally:
        watch.close()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _show(watch: Watch, interval_s: float, once: bool, as_json: bool) -> None:
    """Raises EndedError when the instance has ended, InstanceError if it is not there at the first look."""
    reports = _reports(watch, interval_s)
    first = next(reports)  # of a single look
    if as_json:
        for report in reports:
            click.echo(json.dumps(asdict(report)))
            sys.stdout.flush()
            if once:
                return
    elif once or not sys.stdout.isatty():
        _print(next(reports))
    else:
        _draw(first, reports)


def _reports(watch: Watch, interval_s: float) -> Iterator[Report]:
    """One of the first look alone, then one for each interval."""
    from shmserve.instance_socket import InstanceError
    from shmserve.top import report
    from shmserve.watch import EndedError

    try:
        before = watch.look()
    except EndedError:
        raise InstanceError(
            f"nothing of instance {watch.instance!r} is in /dev/shm: it has ended, or still prepares its model"
        ) from None
    yield report(watch.instance, None, before)
    while True:
        time.sleep(interval_s)
        now = watch.look()
        yield report(watch.instance, before, now)
        before = now


def _print(report: Report) -> None:
    from rich.console import Console

    from shmserve.top_screen import render

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100, height=200)  # a file has room
    console.print(render(report, console))


def _draw(first: Report, reports: Iterator[Report]) -> None:
    from rich.console import Console
    from rich.live import Live

    from shmserve.top_screen import render

    console = Console(highlight=False)
    with Live(
        render(first, console), console=console, screen=True, auto_refresh=False, transient=True
    ) as live:
        for report in reports:
            live.update(render(report, console), refresh=True)
