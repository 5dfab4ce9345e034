"""The pictures and figures of docs/tuning.md: each policy where its queue is full, rings of two sizes, frames of several tokens.

    python tools/plot_tuning.py                             # all of them, into docs/images
    python tools/plot_tuning.py --only token-ring --folder /tmp

Owns: how they look, and the tables. What is measured, and how, `tuning_run.py` says. Needs matplotlib, the extra `plot`. Each scenario takes
a few seconds and disturbs one thing for a known time, so what is to be seen is long beside what a busy machine adds; compare figures of one
run with each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from bench_common import (
    NoiseWatch,
    as_written,
    end_on_sigterm,
    noise_sentence,
    print_table,
    write_json,
)
from tuning_run import (
    DEFAULT_RING,
    INTERVALS,
    NUM_STREAMS,
    SMALL_RING,
    Seen,
    Token,
    slow_client,
    stream_interval,
    submit_ring,
    token_ring,
)

from shmserve.load_plot import FAINT, INK, STYLE

MADE, READ, REFUSED = "#c8553d", "#3b6fb6", "#7a5195"
DISTURBED = "#eceff2"
DPI = 100
WIDE = 3.3
HIGH = 2.9


def _grid(num_panels: int, is_shared: bool) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDE * num_panels, HIGH), layout="constrained")
    return figure, figure.subplots(
        1, num_panels, sharex=is_shared, sharey=is_shared, squeeze=False
    )[0]


def _shade(axis: Any, seen: Seen, what: str, height: float) -> None:
    begin, end = seen.disturbed_s
    axis.axvspan(begin, end, color=DISTURBED, linewidth=0, zorder=0)
    axis.text((begin + end) / 2, height, what, transform=axis.get_xaxis_transform(), ha="center", color=FAINT, fontsize=8)  # fmt: skip


def _draw_stream(axis: Any, tokens: Sequence[Token]) -> None:
    numbers = range(1, len(tokens) + 1)
    axis.step([t.made_s for t in tokens], numbers, where="post", color=MADE, linewidth=1.6, label="made")  # fmt: skip
    axis.step([t.read_s for t in tokens], numbers, where="post", color=READ, linewidth=1.6, label="read")  # fmt: skip


def draw_streams(axes: Sequence[Any], found: Sequence[Seen], what: str) -> None:
    """One stream of each scenario: how many of its tokens were made, and read, by when."""
    for axis, seen in zip(axes, found, strict=True):
        axis.set_title(seen.name)
        _shade(axis, seen, what, 0.02)
        _draw_stream(axis, seen.streams[0])
        code = seen.row["error"]
        if code != "-" and seen.streams[0]:
            last = seen.streams[0][-1]
            axis.plot([last.read_s], [len(seen.streams[0])], "x", color=INK, markersize=7)
            axis.annotate(code, (last.read_s, len(seen.streams[0])), xytext=(6, -3), textcoords="offset points", fontsize=8)  # fmt: skip
        axis.set_xlabel("s")
    # When all is drawn: a limit that is set is no longer widened, and the panels share it.
    axes[0].set_xlim(left=0)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("tokens of one stream")
    axes[0].legend(loc="upper left")


def draw_answers(axes: Sequence[Any], found: Sequence[Seen], what: str) -> None:
    """Every request: when it was sent, and how long its first byte took."""
    for axis, seen in zip(axes, found, strict=True):
        axis.set_title(f"--submit-policy {seen.name}")
        _shade(axis, seen, what, 0.42)
        for status, colour, label in ((200, READ, "answered"), (503, REFUSED, "503")):
            dots = [(sent, took) for sent, took, got in seen.answers if got == status]
            if dots:
                axis.scatter(*zip(*dots, strict=True), s=10, color=colour, linewidths=0, label=label)  # fmt: skip
        axis.set_xlabel("s, when it was sent")
    axes[0].set_xlim(left=0)
    axes[0].set_ylim(bottom=-0.1)
    axes[0].set_ylabel("s to the first byte")
    axes[-1].legend(loc="upper right", ncols=2)


def draw_intervals(axes: Sequence[Any], found: Sequence[Seen], what: str) -> None:
    """What a token costs, and the gaps between frames."""
    names = [seen.name for seen in found]
    costs = [seen.row["cpu_us_per_token"] for seen in found]
    axes[0].bar(names, costs, color=READ, width=0.6)
    axes[0].set_title("front end, CPU us a token")
    for key, style, label in (("gap_p50_ms", "o-", "p50"), ("gap_p99_ms", "o:", "p99")):
        axes[1].plot(names, [seen.row[key] for seen in found], style, color=MADE, markersize=4, label=label)  # fmt: skip
    axes[1].set_title("between frames, ms")
    axes[1].set_ylim(bottom=0)
    axes[1].legend(loc="upper left")
    for axis in axes:
        axis.set_xlabel(what)


async def measure_token_ring() -> list[Seen]:
    small = [await token_ring(policy, SMALL_RING) for policy in ("coalesce", "block", "drop")]
    return [*small, await token_ring("coalesce", DEFAULT_RING)]


async def measure_slow_client() -> list[Seen]:
    return [await slow_client(policy) for policy in ("coalesce", "block", "drop")]


async def measure_submit_ring() -> list[Seen]:
    return [await submit_ring(policy) for policy in ("block", "coalesce", "drop")]


async def measure_intervals() -> list[Seen]:
    return [await stream_interval(size, 4 * NUM_STREAMS, 500) for size in INTERVALS]


Draw = Callable[[Any, Sequence[Seen], str], None]
PICTURES: dict[str, tuple[Callable[[], Any], Draw, str, bool]] = {
    "token-ring": (measure_token_ring, draw_streams, "front end stopped", True),
    "slow-client": (measure_slow_client, draw_streams, "client reads nothing", True),
    "submit-ring": (measure_submit_ring, draw_answers, "one step of the worker", True),
    "stream-interval": (measure_intervals, draw_intervals, "stream_interval, tokens", False),
}


def draw(path: Path, name: str, found: Sequence[Seen]) -> None:
    """One picture."""
    from matplotlib import rc_context

    _, draw_it, what, is_shared = PICTURES[name]
    with rc_context(STYLE):
        figure, axes = _grid(len(found) if is_shared else 2, is_shared)
        draw_it(axes, found, what)
        figure.savefig(path, dpi=DPI)


@click.command(help=as_written(__doc__))
@click.option("--only", "names", type=click.Choice(tuple(PICTURES)), multiple=True, default=tuple(PICTURES))  # fmt: skip
@click.option("--folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path(__file__).resolve().parent.parent / "docs" / "images", help="Where the pictures go. docs/images by default.")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures here as well.")  # fmt: skip
def main(names: tuple[str, ...], folder: Path, json_path: str | None) -> None:
    end_on_sigterm()
    rows, noise = [], []
    for name in names:
        watch = NoiseWatch()
        found = asyncio.run(PICTURES[name][0]())
        noise.append(watch.cores())
        draw(folder / f"tuning-{name}.png", name, found)
        print(f"\n{name}")
        print_table([seen.row for seen in found])
        rows += [{"scenario": name, **seen.row} for seen in found]
    print(noise_sentence(noise))
    write_json(json_path, rows)


if __name__ == "__main__":
    main()
