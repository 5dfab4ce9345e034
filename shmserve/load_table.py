"""The figures of a load as text: what `shmserve bench` prints of each load and of a sweep, and `shmserve demo` of its one stream.

Owns: columns, units and rounding. Never: computes a figure, or colours one. Clients only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmserve.load_report import PERCENTILES, SERIES

TITLES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "end to end",
    "lag": "lag",
    "lateness": "lateness",
}
STATISTICS = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
SWEEP = (
    ("load", "load"),
    ("ok", "ok"),
    ("requests/s", "requests_per_s"),
    ("tokens/s", "tokens_per_s"),
    ("TTFT p50", "ttft_p50_ms"),
    ("p99", "ttft_p99_ms"),
    ("ITL p50", "itl_p50_ms"),
    ("p99", "itl_p99_ms"),
    ("e2e p50", "e2e_p50_ms"),
    ("p99", "e2e_p99_ms"),
    ("lag p50", "lag_p50_ms"),
    ("p99", "lag_p99_ms"),
    ("good/s", "goodput_per_s"),
    ("errors", "errors"),
)


def number(value: object) -> str:
    """A figure with three digits that count; "-" where there is none."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns with two blanks between them: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    )


def latency_table(row: Mapping[str, Any], series: Sequence[str] = SERIES) -> str:
    """One line a series, in ms; a series of which there is nothing is left out."""
    rows = [
        [TITLES[name], *(number(row[f"{name}_{statistic}_ms"]) for statistic in STATISTICS)]
        for name in series
        if row[f"{name}_max_ms"] is not None
    ]
    return text_table(["ms", *STATISTICS], rows)


def load_text(row: Mapping[str, Any]) -> str:
    """All that is said of one load."""
    parts = [
        f"{number(row['requests_per_s'])} requests/s",
        f"{number(row['tokens_per_s'])} output tokens/s",
    ]
    if row["prompt_tokens_mean"] is not None:
        parts.append(f"{number(row['prompt_tokens_mean'])} prompt tokens each")
    if "good" in row:
        share = 100 * row["good"] / row["requests"] if row["requests"] else 0.0
        parts.append(f"goodput {number(row['goodput_per_s'])} requests/s ({share:.0f} %)")
    lines = [
        f"{row['load']}: {row['ok']} of {row['requests']} requests whole, in {number(row['wall_s'])} s",
        ", ".join(parts),
    ]
    if row["ok"]:
        lines.append(latency_table(row))
    lines += [
        f"error: {count} x {kind}" + (f": {message}" if message else "")
        for kind, count, message in row["error_rows"]
    ]
    return "\n".join(lines)


def sweep_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a load; latencies in ms. A column that is empty for all of them is left out."""
    columns = [column for column in SWEEP if any(row.get(column[1]) is not None for row in rows)]
    cells = []
    for row in rows:
        shown = dict(row) | {"errors": sum(row["errors"].values())}
        cells.append([number(shown[key]) for _, key in columns])
    return text_table([title for title, _ in columns], cells)
