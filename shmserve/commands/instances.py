"""The commands that speak to running instances: status, stop, drain, restart; and sweep, for what killed ones left.

Owns: what is shown, and in which order a restart ends and starts. Never: imports what serves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from shmserve.commands.find import Instance


def instance_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --instance and --port."""
    command = click.option("--port", type=int, help="The instance that serves this port.")(command)
    return click.option("--instance", default="", help="The instance of this name.")(command)


@click.command()
@instance_options
@click.option("--all", "is_for_all", is_flag=True, help="Every instance that runs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --all a list of them.")
def status(instance: str, port: int | None, is_for_all: bool, as_json: bool) -> None:
    """Show processes, phases, queue and rings of a running instance."""
    from shmserve.commands.find import find, running
    from shmserve.instance_socket import InstanceError, NotListeningError

    if is_for_all:
        answers: list[dict[str, Any]] = []
        silent: list[InstanceError] = []
        for each in running():
            try:
                answers.append(_status_of(each))
            except NotListeningError:
                continue  # it has ended since
            except InstanceError as error:
                silent.append(error)  # one that was stopped: the others are shown all the same
        if as_json:
            click.echo(json.dumps(answers, indent=2))
        else:
            text = "\n\n".join(_text_of(answer) for answer in answers)
            click.echo(text or ("" if silent else "no instance runs"))
        if silent:
            raise InstanceError("; ".join(map(str, silent)))
        return
    answer = _status_of(find(instance, port))
    click.echo(json.dumps(answer, indent=2) if as_json else _text_of(answer))


def _status_of(instance: Instance) -> dict[str, Any]:
    from shmserve.commands.ending import ANSWER_TIMEOUT_S
    from shmserve.instance_socket import NotListeningError, ask, record_of

    try:
        answer = ask(instance.directory, instance.name, {"type": "status"}, ANSWER_TIMEOUT_S)
    except NotListeningError:
        record = record_of(instance.directory, instance.name)
        if not record.pid:
            raise
        return {
            "type": "status",
            "instance": instance.name,
            "pid": record.pid,
            "state": "preparing",
            "url": record.url,
        }
    answer["rings"] = _ring_rows(instance.name)
    return answer


def _text_of(answer: dict[str, Any]) -> str:
    name = answer["instance"]
    if answer["state"] == "preparing":
        return f"instance {name}: prepares its model for {answer['url']}, pid {answer['pid']}"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(answer["since"]))
    queue = answer["queue"]
    lines = [
        f"instance {name}: {answer['state']} since {since}, pid {answer['pid']}",
        f"serving {answer['model']} on {answer['url']}",
        f"queue: {queue['in_flight']} in flight, {queue['running']} of {queue['max_running']} run, "
        f"{queue['waiting']} wait; {queue['requests']} requests so far, {queue['refused']} refused",
    ]
    if answer["log_file"]:
        lines.append(f"log: {answer['log_file']}")
    for child in answer["children"]:
        details = [f"pid {child['pid'] or '-'}", child["state"]]
        if child.get("rank_pids"):
            details.append(f"other ranks {', '.join(map(str, child['rank_pids']))}")
        if child.get("phase"):
            age = f" for {child['phase_age_s']:.1f} s" if child["phase_age_s"] else ""
            is_loading = child["state"] == "loading" and child["fraction"]
            done = f" {100 * child['fraction']:.0f} %" if is_loading else ""
            details.append(f"{child['phase']}{done}{age}")
        details += [child["reason"]] if child["reason"] else []
        causes = ", ".join(f"{cause} {num}" for cause, num in child["causes"].items())
        details += [f"{child['deaths']} died before ({causes})"] if child["deaths"] else []
        lines.append(f"{child['role']} {child['index']}: {', '.join(details)}")
    for row in answer["rings"]:
        ends = [] if row["has_producer"] else ["no producer"]
        ends += [] if row["has_consumer"] else ["no consumer"]
        depth = f"depth {row['depth']} of {row['capacity']}, high water {row['high_water']}"
        lines.append(f"ring {row['name']}: {', '.join([depth, *ends])}")
    return "\n".join(lines)


def _ring_rows(instance: str) -> list[dict[str, Any]]:
    from shmserve.rings.observe import RingView, rings_of
    from shmserve.rings.segment import SegmentError

    rows = []
    for name in rings_of(instance):
        try:
            view = RingView(name)
        except SegmentError:
            continue  # its channel was closed since we listed it
        stats = view.stats()
        view.close()
        rows.append(
            {
                "name": name,
                "depth": stats.depth,
                "capacity": stats.capacity,
                "high_water": stats.producer["high_water"],
                "has_producer": stats.has_producer,
                "has_consumer": stats.has_consumer,
            }
        )
    return rows


def _end(instance: str, port: int | None, how: str) -> None:
    from shmserve.commands.ending import end
    from shmserve.commands.find import find

    found = find(instance, port)
    _say_ended(found, end(found, how))


def _say_ended(instance: Instance, pid: int) -> None:
    click.echo(f"shmserve: instance {instance.name} (pid {pid}) has ended", err=True)


@click.command()
@instance_options
def stop(instance: str, port: int | None) -> None:
    """End an instance now; requests in flight get an error. Returns when it has ended."""
    _end(instance, port, "stop")


@click.command()
@instance_options
def drain(instance: str, port: int | None) -> None:
    """End an instance when its requests in flight have finished. Returns when it has ended."""
    _end(instance, port, "drain")


@click.command()
@instance_options
@click.option("--now", is_flag=True, help="Do not wait for requests in flight: they get an error.")
def restart(instance: str, port: int | None, now: bool) -> None:
    """Drain an instance and start it anew, in the background.

    With its command line, directory and variables; a --config file is read anew. Returns when the new one is ready.
    """
    from shmserve.commands.ending import end
    from shmserve.commands.find import find
    from shmserve.commands.restarting import again, origin_of

    found = find(instance, port)
    origin = origin_of(found)
    _say_ended(found, end(found, "stop" if now else "drain"))
    click.echo(again(origin, found.name, sys.stderr))


@click.command()
def sweep() -> None:
    """Remove what killed instances left behind; print its names."""
    from shmserve.instance_socket import runtime_dir, sweep_stale, system_runtime_dirs
    from shmserve.rings.segment import sweep as sweep_segments

    for name in sweep_segments("shmserve."):
        click.echo(f"/dev/shm{name}")
    for directory in dict.fromkeys((runtime_dir(os.environ), *system_runtime_dirs())):
        for name in sweep_stale(directory):
            click.echo(f"instance {name}")


COMMANDS = (status, stop, drain, restart, sweep)
