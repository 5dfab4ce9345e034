"""The options of `shmserve bench`: the load, the limits, the files.

Owns: names, defaults, and the way from their text to values. Never: sends anything. Commands only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

T = TypeVar("T")


def _parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T | None]:
    """An option's callback: None for "", a wrong command line for what cannot be parsed."""

    def callback(_: click.Context, __: click.Parameter, value: str) -> T | None:
        try:
            return parse(value) if value else None
        except ValueError as error:
            raise click.BadParameter(f"{value!r}: {error}") from None

    return callback


def _lengths(text: str) -> Any:
    from shmserve.load_spec import Lengths

    return Lengths.parse(text)


def _objectives(text: str) -> Any:
    from shmserve.load_report import Objectives

    return Objectives.parse(text)


def _each(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """What is between the commas."""
    return lambda text: tuple(kind(part) for part in text.split(","))


def _object(text: str) -> dict[str, Any]:
    parsed = json.loads(text)
    if not isinstance(parsed, dict):
        raise ValueError("it is not a JSON object")
    return parsed


_OPTIONS = (
    click.option(
        "--endpoint",
        type=click.Choice(("chat", "completions")),
        default="chat",
        show_default=True,
        help="Which path of /v1 is asked.",
    ),
    click.option(
        "--rate",
        "rates",
        default="",
        callback=_parsed(_each(float)),
        help="Requests per second, arriving at random (Poisson), whatever comes back. 1,2,4: a sweep.",
    ),
    click.option(
        "--concurrency",
        "sizes",
        default="",
        callback=_parsed(_each(int)),
        help="Clients, each sends its next request when its last has ended. 1,8,64: a sweep.",
    ),
    click.option(
        "--num-requests",
        type=click.IntRange(1),
        help="For each load; 100 unless --duration is given.",
    ),
    click.option(
        "--duration",
        type=click.FloatRange(0, min_open=True),
        help="Seconds of each load, then its end.",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0),
        default=1,
        show_default=True,
        help="Requests of each load that are sent first, like the others, and not counted.",
    ),
    click.option(
        "--prompt-words",
        default="64",
        show_default=True,
        callback=_parsed(_lengths),
        help="Of random prompts. 16,64: in turn; 16-256: drawn.",
    ),
    click.option(
        "--prompts-file",
        type=click.Path(exists=True, dir_okay=False),
        help="One prompt, or JSON string, a line.",
    ),
    click.option(
        "--max-tokens",
        "--output-tokens",
        default="128",
        show_default=True,
        callback=_parsed(_lengths),
        help="Of answers. 16,64: in turn; 16-256: drawn.",
    ),
    click.option(
        "--ignore-eos", is_flag=True, help="Every answer is --max-tokens long (no OpenAI field)."
    ),
    click.option(
        "--extra", default="", callback=_parsed(_object), help="JSON object merged into every body."
    ),
    click.option(
        "--slo",
        "objectives",
        default="",
        callback=_parsed(_objectives),
        help="Limits in ms of a good request, for goodput: ttft=200,itl=50 (its longest gap),tpot=30,e2e=9000.",
    ),
    click.option(
        "--timing-every",
        type=click.IntRange(0),
        default=8,
        show_default=True,
        help="One request in so many asks the server when it made its tokens, for lag. 0 for servers that refuse that.",
    ),
    click.option(
        "--seed", default=0, show_default=True, help="Of arrivals, prompts and drawn lengths."
    ),
    click.option(
        "--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds for one request."
    ),
    click.option(
        "--json", "json_path", default="", help="Write figures and every request to this file."
    ),
    click.option("--plot", "plot_path", default="", help="Draw them: FILE.png, .svg or .pdf."),
)


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all of them, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
