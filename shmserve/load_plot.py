"""Pictures of a load: latencies over time with their distributions; and of a sweep: latency against throughput.

Owns: how they look. Never: computes a figure of the table, or opens a window: it writes files. Needs matplotlib, the extra `plot`.
Clients only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shmserve.load_report import PERCENTILES, LoadReport
from shmserve.load_table import number

FORMATS = (".png", ".svg", ".pdf")
COLOURS = {"ttft": "#3b6fb6", "itl": "#c8553d", "lag": "#2e8b6f", "e2e": "#7a5195"}
MOST_DOTS = 20_000  # more would be a blot, and an SVG of many megabytes
MANY = 400
LOG_FROM = 50
NUM_SLICES = 48
PANELS = (
    ("ttft", "TTFT", "a request, by when it was due"),
    ("itl", "ITL", "a gap between frames, by when it ended"),
    ("lag", "Lag", "a token, from made to read, by when it was read"),
)
INK, FAINT = "#22262b", "#8a9099"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e4e7ea",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "svg.fonttype": "path",
}


Values = npt.NDArray[np.float64]


class PlotError(RuntimeError):
    """No picture can be made; the text is one line that says why."""


@dataclass(frozen=True, slots=True)
class Dots:
    """One series of a load: when, in s since its start, and how much, in ms."""

    at_s: Values
    ms: Values


def check(path: str) -> None:
    """Raises PlotError if no picture could be written there later: before a load of an hour, not behind it."""
    if Path(path).suffix.lower() not in FORMATS:
        raise PlotError(f"--plot {path}: its name must end in {', '.join(FORMATS)}")
    if not Path(path).absolute().parent.is_dir():
        raise PlotError(f"--plot {path}: there is no such folder")
    _figure_class()


def plot_load(path: str, name: str, report: LoadReport, row: dict[str, Any]) -> None:
    """TTFT, ITL and lag: on the left over the time at which they were seen, on the right how they are distributed.

    A series of which there is nothing has no panel: lag, of a server that does not say when it made its tokens.
    """
    found = [(*panel, _dots(report, panel[0])) for panel in PANELS]
    panels = [panel for panel in found if len(panel[3].ms)]
    if not panels:
        raise PlotError(f"--plot {path}: there is nothing to draw: no response was whole")
    with _style():
        figure, axes = _grid(len(panels), 2, 2.9, width_ratios=(2.2, 1.0))
        _say_above(figure, name, _headline(row))
        for (over_time, distribution), panel in zip(axes, panels, strict=True):
            series, title, what, dots = panel
            over_time.set_title(f"{title}, ms")
            over_time.set_title(what, loc="right", fontsize=8, fontweight="normal", color=FAINT)
            distribution.set_title("share below")
            _draw_over_time(over_time, dots, COLOURS[series])
            _draw_distribution(distribution, dots.ms, COLOURS[series])
            over_time.set_xlim(0, max(report.wall_s, 1e-3))
        axes[-1][0].set_xlabel("s since the start")
        axes[-1][1].set_xlabel("ms")
        _save(figure, path)


def plot_sweep(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """TTFT, ITL and end to end against tokens per second, one dot a load; and how many requests were served of each load."""
    rows = [row for row in rows if row["ok"]]
    if not rows:
        raise PlotError(f"--plot {path}: there is nothing to draw: no response was whole")
    with _style():
        figure, axes = _grid(2, 2, 3.7)
        _say_above(figure, "Latency against throughput", f"{len(rows)} loads")
        flat = [axis for line in axes for axis in line]
        panels = (("ttft", "TTFT, ms"), ("itl", "ITL, ms"), ("e2e", "End to end, ms"))
        for axis, (series, title) in zip(flat, panels, strict=False):
            axis.set_title(title)
            _draw_against_throughput(axis, rows, series)
        _draw_rates(flat[3], rows)
        _save(figure, path)


def _draw_against_throughput(axis: Any, rows: Sequence[dict[str, Any]], series: str) -> None:
    axis.set_xlabel("output tokens/s")
    rows = [row for row in rows if row[f"{series}_max_ms"] is not None]
    if not rows:  # answers of one token have no gaps
        place = {"ha": "center", "va": "center", "transform": axis.transAxes}
        axis.text(0.5, 0.5, "nothing to draw", color=FAINT, **place)
        return
    tokens = [row["tokens_per_s"] for row in rows]
    colour = COLOURS[series]
    for percent, style, alpha in (("p50", "-", 1.0), ("p90", "--", 0.7), ("p99", ":", 0.7)):
        values = [row[f"{series}_{percent}_ms"] for row in rows]
        line = {"marker": "o", "markersize": 4, "color": colour, "alpha": alpha}
        axis.plot(tokens, values, style, label=percent, **line)
    for x, row in zip(tokens, rows, strict=True):
        place = {"textcoords": "offset points", "xytext": (-4, 4), "ha": "right"}
        axis.annotate(
            _short(row["load"]), (x, row[f"{series}_p99_ms"]), fontsize=7.5, color=FAINT, **place
        )
    axis.margins(x=0.08, y=0.12)
    axis.set_xlim(left=0)
    least = min(row[f"{series}_p50_ms"] for row in rows)
    if least > 0 and max(row[f"{series}_p99_ms"] for row in rows) > LOG_FROM * least:
        _draw_logarithmic(axis)
    else:
        axis.set_ylim(bottom=0)
    _legend(axis)


def _draw_logarithmic(axis: Any) -> None:
    """A server past its limit is slower by powers of ten: on a plain scale all that it did before would be a line on the ground."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(LogLocator(subs=()))


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError(
            "--plot needs matplotlib: install it, or shmserve with its extra: pip install 'shmserve[plot]'"
        ) from None
    return Figure


def _style() -> Any:
    from matplotlib import rc_context

    return rc_context(STYLE)


def _grid(num_rows: int, num_columns: int, row_inches: float, **ratios: Any) -> Any:
    # Figure itself, not pyplot: no window, no global state.
    figure = _figure_class()(figsize=(11.0, row_inches * num_rows + 0.3), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.09, w_pad=0.09, hspace=0.03)
    return figure, figure.subplots(num_rows, num_columns, squeeze=False, gridspec_kw=ratios or None)


def _say_above(figure: Any, title: str, detail: str) -> None:
    text = f"{title}   \N{MIDDLE DOT}   {detail}"
    figure.suptitle(text, x=0.012, ha="left", fontsize=11.5, fontweight="bold")


def _legend(axis: Any) -> None:
    """Above the axis, where no line can be behind it."""
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.99), "borderaxespad": 0.2}
    axis.legend(ncols=3, handlelength=1.8, columnspacing=1.2, **place)


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise PlotError(f"--plot {path}: {error.strerror or error}") from None


def _dots(report: LoadReport, series: str) -> Dots:
    at_ns: list[int] = []
    ms: list[float] = []
    for result in report.whole:
        ms += result.values_of(series)
        if series == "ttft":
            at_ns += [result.due_ns] if result.arrivals_ns else []
        elif series == "itl":
            at_ns += result.arrivals_ns[1:]
        else:
            at_ns += [at for at, _ in result.lags]
    return Dots((np.array(at_ns, np.float64) - report.begin_ns) / 1e9, np.array(ms, np.float64))


def _draw_over_time(axis: Any, dots: Dots, colour: str) -> None:
    step = -(-len(dots.ms) // MOST_DOTS)
    many = len(dots.ms) > MANY
    look = {"s": 5, "alpha": 0.25} if many else {"s": 16, "alpha": 0.75}
    # As pixels in an SVG too: thousands of circles would make it slow.
    axis.scatter(
        dots.at_s[::step], dots.ms[::step], color=colour, linewidths=0, rasterized=True, **look
    )
    if many:
        _draw_bands(axis, dots)
    top = _top(dots.ms)
    axis.set_ylim(0, top)
    num_above = int((dots.ms > top).sum())
    if num_above:
        text = f"{num_above} above, up to {number(float(dots.ms.max()))} ms"
        axis.text(0.01, 0.97, text, transform=axis.transAxes, va="top", fontsize=8, color=FAINT)


def _draw_bands(axis: Any, dots: Dots) -> None:
    """The median and the 99th percentile of each slice of time."""
    edges = np.linspace(0, dots.at_s.max() + 1e-9, NUM_SLICES + 1)
    where = np.digitize(dots.at_s, edges)
    middles = (edges[:-1] + edges[1:]) / 2
    for percent, style in ((50, "-"), (99, ":")):
        line = [
            np.percentile(inside, percent) if len(inside := dots.ms[where == i]) else np.nan
            for i in range(1, NUM_SLICES + 1)
        ]
        axis.plot(middles, line, style, color=INK, linewidth=1.2, label=f"p{percent}")
    axis.legend(loc="upper right", ncols=2)


def _draw_distribution(axis: Any, ms: Values, colour: str) -> None:
    ordered = np.sort(ms)
    share = np.arange(1, len(ordered) + 1) / len(ordered)
    axis.step(ordered, share, where="post", color=colour, linewidth=1.6)
    marks = [(percent, float(np.percentile(ms, percent))) for percent in PERCENTILES]
    for percent, value in marks:
        axis.plot([value], [percent / 100], "o", color=INK, markersize=3.5)
    text = "\n".join(f"p{percent}  {number(value)} ms" for percent, value in marks)
    axis.text(0.97, 0.08, text, transform=axis.transAxes, ha="right", va="bottom", fontsize=8)
    axis.set_xlim(0, _top(ms))
    axis.set_ylim(0, 1.02)


def _top(ms: Values) -> float:
    """Where an axis ends: a few values far out must not flatten all others, and are told in the table."""
    return float(min(ms.max() * 1.08, np.percentile(ms, 99.5) * 1.6)) or 1.0


def _draw_rates(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    axis.set_title("Requests/s that were")
    places = np.arange(len(rows))
    series = [("requests_per_s", "whole", "#3b6fb6")]
    if rows and "goodput_per_s" in rows[0]:
        series.append(("goodput_per_s", "within the objectives", "#2e8b6f"))
    width = 0.7 / len(series)
    for i, (key, label, colour) in enumerate(series):
        offset = (i - (len(series) - 1) / 2) * width
        axis.bar(
            places + offset, [row[key] for row in rows], width * 0.94, color=colour, label=label
        )
    axis.set_xticks(places, [_short(row["load"]) for row in rows])
    axis.grid(False, axis="x")
    axis.set_xlabel("load")
    _legend(axis)


def _short(load: str) -> str:
    return load.removeprefix("rate ")


def _headline(row: dict[str, Any]) -> str:
    return (
        f"{row['ok']} of {row['requests']} requests, {number(row['requests_per_s'])} requests/s, "
        f"{number(row['tokens_per_s'])} tokens/s"
    )
