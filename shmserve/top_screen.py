"""How `shmserve top` looks: one screen of the terminal's size, from 80 x 24 on.

Owns: columns, words and colours. Never: reads shared memory (`top.py` does). Where there is no room for all rings or slow clients, the
deepest are shown and the number of the others is said. Commands only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shmserve.top import LATENCIES, LatencyRow, ProcessRow, Report, RingRow

WIDE: Final = 120
_DIM: Final = "bright_black"
_HEAD: Final = "bold"


@dataclass(frozen=True, slots=True)
class _Glyphs:
    full: str
    empty: str
    mark: str
    arrow: str


_UNICODE: Final = _Glyphs("█", "·", "│", "→")
_ASCII: Final = _Glyphs("#", ".", "|", "->")


def render(report: Report, console: Console) -> RenderableType:
    """The whole screen, no higher and no wider than the console from 80 x 24 on."""
    width, height = console.size
    glyphs = _ASCII if console.options.ascii_only else _UNICODE
    is_wide = width >= WIDE
    num_fixed = 1 + 3 + 1 + 1 + len(_shown(report))  # the first line, blanks, headings, latencies
    num_free = max(5, height - num_fixed - (0 if is_wide else 1))
    num_slow = min(len(report.slow_clients), 3)
    num_processes = max(2, (num_free - num_slow) // 2)
    processes = _most_telling(report.processes, num_processes)
    num_free -= len(processes)
    rings = _deepest(report.rings, max(2, num_free - (0 if is_wide else num_slow)))
    num_free -= len(rings)
    ring_table = _ring_table(rings, len(report.rings) - len(rings), glyphs, width)
    latencies = _latency_table(report, glyphs)
    slow = _slow_table(report, len(_shown(report)) if is_wide else max(1, num_free))
    num_hidden = sum(row.role != "supervisor" for row in report.processes) - len(processes)
    parts: list[RenderableType] = [_head(report, num_hidden, width)]
    parts += [_process_line(row, width) for row in processes]
    parts += ["", ring_table, ""]
    if is_wide:
        both = Table.grid(padding=(0, 6))
        both.add_row(latencies, slow)
        parts.append(both)
    else:
        parts += [latencies, "", slow]
    return Group(*parts)


def _most_telling(rows: Sequence[ProcessRow], most: int) -> list[ProcessRow]:
    """At most `most` workers and front ends, those first that are not well, in the order of all."""
    rows = [row for row in rows if row.role != "supervisor"]
    kept = sorted(rows, key=lambda row: _is_well(row) and not row.is_silent)[:most]
    return [row for row in rows if row in kept]


class _Line:
    """One line of parts; what does not fit any more is left out, with all behind it."""

    def __init__(self, width: int) -> None:
        self.text = Text(no_wrap=True, overflow="crop")
        self._num_left = width

    def add(self, part: str, style: str = "") -> None:
        self._num_left -= len(part)
        if self._num_left >= 0:
            self.text.append(part, style=style)


def _head(report: Report, num_hidden: int, width: int) -> Text:
    line = _Line(width)
    line.add(f"shmserve {report.instance}", style="bold")
    line.add(f"  {time.strftime('%H:%M:%S', time.localtime(report.at))}", style=_DIM)
    supervisor = next((row for row in report.processes if row.role == "supervisor"), None)
    if supervisor is None:
        line.add("  no supervisor", style="red")
    else:
        words = supervisor.words
        line.add(f"  supervisor {words.get('pid', 0)} {supervisor.state}")
        deaths = [
            f"{words[f'{role}_restarts']} {role} restarts"
            for role in ("worker", "http")
            if words.get(f"{role}_restarts")
        ]
        line.add("  " + ", ".join(deaths) if deaths else "", style="yellow")
        if supervisor.is_silent:
            line.add(
                f"  supervisor silent for {supervisor.heartbeat_age_s:.1f} s", style="bold red"
            )
    if num_hidden:
        line.add(f"  + {num_hidden} processes not shown", style=_DIM)
    return line.text


def _process_line(row: ProcessRow, width: int) -> Text:
    line = _Line(width)
    line.add(f"{row.role} {row.index}".ljust(9), style="bold")
    if row.is_silent:
        line.add(f"silent for {row.heartbeat_age_s:.1f} s ".ljust(11), style="bold red")
    else:
        line.add(row.state.ljust(11), style="green" if _is_well(row) else "yellow")
    words, per_s = row.words, row.per_s
    if row.role == "worker":
        total = words.get("kv_blocks_total", 0)
        usage = 100 * words.get("kv_blocks_used", 0) / total if total else 0.0
        line.add(f"{_short(per_s.get('step', 0.0)):>5} steps/s")
        if row.step_p50_us:
            line.add(f" of {_time(row.step_p50_us)}")
            line.add(f", p99 {_time(row.step_p99_us)}" if width >= 100 else "")
        line.add(f"  run {words.get('running', 0)}/{words.get('max_num_seqs', 0)}")
        waiting = words.get("waiting", 0)
        line.add(f" wait {waiting}", style="yellow" if waiting else "")
        line.add(f" kv {usage:.0f}%", style="yellow" if usage > 90 else "")
        if width >= 100:
            line.add(f"  {_short(per_s.get('generation_tokens', 0.0))} tok/s")
            line.add(f"  {_short(words.get('num_preempted', 0))} preempted")
    else:
        line.add(f"{words.get('connections', 0):>5} conn")
        line.add(f"  {words.get('in_flight', 0)} in flight")
        line.add(f"  {_short(per_s.get('tokens', 0.0))} tok/s")
        lag_us = words.get("loop_lag_ns", 0) / 1e3
        line.add(f"  lag {_time(lag_us)}", style="yellow" if lag_us > 20_000 else "")
        refused, congested = words.get("num_refused", 0), words.get("clients_congested", 0)
        if congested:
            line.add(f"  {congested} slow", style="yellow")
        if refused:
            is_now = bool(per_s.get("num_refused"))
            line.add(f"  {_short(refused)} refused", style="yellow" if is_now else "")
        line.add(f"  {_short(per_s.get('num_requests', 0.0))} req/s")
    return line.text


def _is_well(row: ProcessRow) -> bool:
    return row.state in ("idle", "prefill", "decode", "serving")


def _deepest(rings: Sequence[RingRow], most: int) -> list[RingRow]:
    """The `most` fullest rings, in the order of all."""
    if len(rings) <= most:
        return list(rings)
    fullest = sorted(rings, key=lambda r: (-r.depth / r.capacity, -r.high_water / r.capacity))
    kept = {id(ring) for ring in fullest[:most]}
    return [ring for ring in rings if id(ring) in kept]


def _ring_table(rings: Sequence[RingRow], num_more: int, glyphs: _Glyphs, width: int) -> Table:
    is_wide = width >= WIDE
    table = _table()
    table.add_column(
        f"rings {len(rings)}/{len(rings) + num_more}" if num_more else "ring", no_wrap=True
    )
    num_cells = min(48, width - 76) if is_wide else 12
    table.add_column("depth", width=num_cells)
    for name in ("", "high", "in/s", "merged", "drop", "refuse", "wait", "block"):
        table.add_column(name, justify="right", no_wrap=True)
    for ring in rings:
        table.add_row(
            f"{ring.http}-{ring.worker} {ring.kind}",
            _ends(ring) or _bar(ring, glyphs, num_cells),
            f"{ring.depth}/{_short(ring.capacity)}",
            _short(ring.high_water),
            _short(ring.per_s),
            _count(ring.coalesced),
            _count(ring.dropped),
            _count(ring.refused),
            _count(ring.pending),
            f"{100 * ring.blocked_share:.0f}%" if ring.blocked_share >= 0.005 else Text("-", _DIM),
        )
    return table


def _ends(ring: RingRow) -> Text | None:
    """Who is missing: more important than how full it is, which the number beside it says too."""
    if ring.has_producer and ring.has_consumer:
        return None
    there = ring.has_producer or ring.has_consumer
    return Text(("no reader" if ring.has_producer else "no writer") if there else "nobody", "red")


def _bar(ring: RingRow, glyphs: _Glyphs, num_cells: int) -> Text:
    share = ring.depth / ring.capacity
    style = "red" if share >= 0.8 else "yellow" if share >= 0.5 else "green"
    num_full = min(num_cells, -(-ring.depth * num_cells // ring.capacity))  # a slot is seen
    bar = Text(no_wrap=True)
    bar.append(glyphs.full * num_full, style=style)
    bar.append(glyphs.empty * (num_cells - num_full), style=_DIM)
    if ring.high_water:
        at = min(num_cells - 1, ring.high_water * num_cells // ring.capacity)
        if at >= num_full:
            bar = bar[:at] + Text(glyphs.mark, style="yellow") + bar[at + 1 :]
    return bar


def _shown(report: Report) -> list[LatencyRow]:
    return [row for row in report.latencies if row.name in LATENCIES]


def _latency_table(report: Report, glyphs: _Glyphs) -> Table:
    since = f"last {report.seconds:.1f} s" if report.seconds else "since the start"
    table = _table()
    table.add_column(f"latency, {since}", no_wrap=True, min_width=26)
    for name in ("p50", "p99", "mean", "per s"):
        table.add_column(name, justify="right", no_wrap=True, min_width=9)
    for row in _shown(report):
        label = LATENCIES[row.name].replace("->", glyphs.arrow)
        is_old = not row.interval.count  # nothing in the interval: what there was since the start
        spread = row.total if is_old else row.interval
        if not spread.count:
            table.add_row(Text(label, style=_DIM), *(Text("-", style=_DIM) for _ in range(4)))
            continue
        times = [
            ("> " if us >= spread.most_us else "") + _time(us)
            for us in (spread.p50_us, spread.p99_us)
        ]
        times.append(_time(spread.mean_us))
        rate = "earlier" if is_old else _short(row.per_s) if report.seconds else ""
        table.add_row(label, *times, rate, style=_DIM if is_old else "")
    return table


def _slow_table(report: Report, num_rows: int) -> RenderableType:
    if not report.slow_clients:
        return Text("no slow clients", style=_DIM)
    table = _table()
    num_all, num_rows = len(report.slow_clients), max(1, num_rows)
    which = f" {num_rows} of {num_all}" if num_rows < num_all else ""
    table.add_column(f"slowest clients{which}", no_wrap=True, min_width=22)
    for name in ("waits", "as text", "since", "front end"):
        table.add_column(name, justify="right", no_wrap=True, min_width=9)
    for row in report.slow_clients[:num_rows]:
        table.add_row(
            row.id or "(an answer)",
            _bytes(row.num_bytes),
            _bytes(row.text_bytes),
            f"{row.age_s:.1f} s",
            str(row.http),
        )
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), header_style=_HEAD, pad_edge=False)


# --- numbers


def _count(value: int) -> Text:
    """A counter that should be 0."""
    return Text(_short(value), style="yellow") if value else Text("-", style=_DIM)


def _short(value: float) -> str:
    """Three digits or four characters: 12, 1.4k, 38k, 2.1M."""
    return _scaled(
        value,
        1000,
        ("", "k", "M", "G", "T"),
        lambda v: f"{v:.0f}" if v >= 1 or not v else f"{v:.1f}",
    )


def _bytes(value: int) -> str:
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB"), lambda v: f"{v:.0f}")


def _scaled(value: float, base: int, units: Sequence[str], plain: Callable[[float], str]) -> str:
    if value < base:
        return plain(value) + units[0]
    power = 0
    while value >= base and power < len(units) - 1:
        value /= base
        power += 1
    return f"{value:.1f}{units[power]}" if value < 9.95 else f"{value:.0f}{units[power]}"


def _time(us: float) -> str:
    if us < 995:
        return f"{us:.0f} us"
    if us < 9_995:
        return f"{us / 1e3:.2f} ms"
    if us < 999_500:
        return f"{us / 1e3:.0f} ms"
    return f"{us / 1e6:.1f} s"
