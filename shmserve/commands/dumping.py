"""`shmserve dump`: the rings as a flight recorder.

Owns: where a recording comes from: a file, a living instance, or what a killed one left. Never: decodes. Commands only.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from shmserve.commands.instances import instance_options

if TYPE_CHECKING:
    from shmserve.recording import Recording


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@instance_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--last",
    type=click.IntRange(0),
    default=16,
    show_default=True,
    help="Records of each ring; 0: all that it still holds.",
)
@click.option(
    "--text", is_flag=True, help="Also the text of tokens, and of prompts where they are there."
)
@click.option(
    "--model", default="", help="With --text: whose tokens they are, where that is not known."
)
def dump(
    file: str | None,
    instance: str,
    port: int | None,
    as_json: bool,
    last: int,
    text: bool,
    model: str,
) -> None:
    """Show the last records of each ring, and which requests were in flight.

    Of a running instance, of one that was killed and has left its rings, or of FILE, the dump that was written when a worker or
    front end died. Ids and times; text only with --text.
    """
    from shmserve.dump_output import TokenText, to_json, to_text

    recording = _recording(file, instance, port, with_model=text)
    token_text = TokenText(_folder_of(recording, model)) if text else None
    if as_json:
        click.echo(json.dumps(to_json(recording, last, token_text), indent=2))
    else:
        click.echo(to_text(recording, last, token_text))


def _recording(file: str | None, instance: str, port: int | None, *, with_model: bool) -> Recording:
    from shmserve.crash_dump import read_dump

    if file is not None:
        if instance or port is not None:
            raise click.UsageError("FILE and --instance or --port exclude each other")
        return read_dump(file)
    from shmserve.recording import take
    from shmserve.rings.segment import SegmentError

    name = _name_of(instance, port)
    asked = _model_of(name, instance, port) if with_model else ("", "")
    try:
        return take(name, model=asked[0], model_folder=asked[1])
    except SegmentError as error:
        raise SegmentError(f"{error}{_hint(name)}") from None


def _name_of(instance: str, port: int | None) -> str:
    """The instance that is meant: a running one, or the only one that has left something."""
    from shmserve.commands.find import find, running
    from shmserve.instance_socket import InstanceError
    from shmserve.recording import instances_in_memory

    if instance:
        return instance
    try:
        return find(instance, port).name
    except InstanceError:
        left = [] if running() else instances_in_memory()
        if len(left) != 1:
            raise
        return left[0]


def _model_of(name: str, instance: str, port: int | None) -> tuple[str, str]:
    """(model, its prepared folder) of a running instance, by its own word."""
    from shmserve.commands.ending import ANSWER_TIMEOUT_S
    from shmserve.commands.find import find
    from shmserve.instance_socket import InstanceError, ask

    try:
        found = find(instance or name, port)
        answer = ask(found.directory, found.name, {"type": "status"}, ANSWER_TIMEOUT_S)
    except InstanceError:
        return "", ""  # a killed one: --model says it
    return answer["model"], answer.get("model_folder", "")


def _folder_of(recording: Recording, model: str) -> str:
    from shmserve.crash_dump import DumpError
    from shmserve.models import prepare

    if model:
        return str(prepare(model).folder)
    if not recording.model_folder:
        raise DumpError("--text needs --model: nobody is there to say whose tokens they are")
    return recording.model_folder


def _hint(name: str) -> str:
    from shmserve.crash_dump import dumps_in
    from shmserve.log_file import LogError, state_path

    try:
        found = dumps_in(os.path.join(state_path(os.environ), name))
    except LogError:
        return ""  # without a home nothing was written
    return f"; its newest crash dump is {found[-1]}" if found else ""
