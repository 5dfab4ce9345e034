"""What every bench of this folder shares: CPU clocks, the watch on other processes, tables and the JSON file.

Owns: how a bench reads CPU time, how it notices that the machine was not its own, and how it prints. Never: measures anything
of shmserve itself.

    noise = (wall time * cores - idle time - CPU of our own process tree) / wall time         in cores, stolen time included

CPU of a process is the sum over its threads of the first number of /proc/PID/task/TID/schedstat: nanoseconds on a core, exact,
where the ticks of /proc/PID/stat are 10 ms wide. Nothing in shmserve imports this.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(
        0, str(ROOT)
    )  # the benches run from a checkout whose package is not installed too

NOISE_LIMIT_CORES = 0.2
Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------- CPU clocks


def task_ids(pid: int) -> list[int]:
    """The threads of a process; empty once it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return []


def process_cpu_ns(pid: int) -> int:
    """CPU time of all live threads of a process, in ns."""
    total = 0
    for tid in task_ids(pid):
        try:
            total += int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended between the listing and the read
    return total


def command_line(pid: int) -> str:
    """The arguments of a live process, joined by blanks; empty once it has ended."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def children_of(pid: int) -> dict[int, str]:
    """Every live descendant of a process, with its command line (arguments joined by blanks)."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry)] = int(stat.rsplit(")", 1)[1].split()[1])
    found: dict[int, str] = {}
    wave = {pid}
    while wave:
        wave = {child for child, parent in parents.items() if parent in wave}
        found |= {child: cmdline for child in wave if (cmdline := command_line(child))}
    return found


def pin(pid: int, core: int) -> None:
    """Every thread of the process runs on this core from now on; threads that it starts later inherit that."""
    for tid in task_ids(pid):
        os.sched_setaffinity(tid, {core})


def two_cores() -> tuple[int, int]:
    """The core that the measured process gets, and the core for all else."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise SystemExit("this bench needs two cores: one for what it measures, one for all else")
    return allowed[0], allowed[1]


# ------------------------------------------------------------------------------------------------------ the watch on others


def _host_idle_s() -> tuple[float, int]:
    lines = Path("/proc/stat").read_text().splitlines()
    fields = [int(x) for x in lines[0].split()[1:]]
    cores = sum(line.startswith("cpu") for line in lines) - 1
    return (fields[3] + fields[4]) / os.sysconf("SC_CLK_TCK"), cores


def _own_tree_cpu_s() -> float:
    live = sum(process_cpu_ns(pid) for pid in [os.getpid(), *children_of(os.getpid())])
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return live / 1e9 + reaped.ru_utime + reaped.ru_stime


class NoiseWatch:
    """Measures how many cores other processes used between its start and `cores()`.

    Idle time is what the kernel counts exactly (it stops the tick when idle), busy time is only sampled; so the work of
    others is what is neither idle nor ours. Short windows are soft: /proc/stat is 10 ms wide.
    """

    def __init__(self) -> None:
        self._own_s = _own_tree_cpu_s()
        self._idle_s, self._num_cores = _host_idle_s()
        self._start_s = time.monotonic()

    def cores(self) -> float:
        wall_s = time.monotonic() - self._start_s
        idle_s = _host_idle_s()[0] - self._idle_s
        own_s = _own_tree_cpu_s() - self._own_s
        return max(0.0, wall_s * self._num_cores - idle_s - own_s) / wall_s


def wait_until_quiet(patience_s: float, limit_cores: float = NOISE_LIMIT_CORES) -> bool:
    """Waits until others use less than the limit over half a second; False once patience has run out."""
    deadline = time.monotonic() + patience_s
    while True:
        watch = NoiseWatch()
        time.sleep(0.5)
        if watch.cores() < limit_cores:
            return True
        if time.monotonic() >= deadline:
            return False


def noise_sentence(cores: Iterable[float]) -> str:
    """One line that says whether the machine was ours while the rows were measured."""
    worst = max(cores, default=0.0)
    if worst > NOISE_LIMIT_CORES:
        return (
            f"NOISY: other processes used up to {worst:.2f} cores meanwhile (limit {NOISE_LIMIT_CORES}); "
            "these figures are not to be trusted"
        )
    return f"quiet: other processes used at most {worst:.2f} cores meanwhile"


# -------------------------------------------------------------------------------------------------------- numbers and output


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the nearest ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Iterable[float | None]) -> float | None:
    """The median of those that are not None; None if none is."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 100 else f"{value:.1f}"


def as_written(text: str | None) -> str:
    """A module's docstring as the help of its command, with the lines of its tables as they stand: click would flow them together."""
    return (text or "").replace("\n\n    ", "\n\n\b\n    ")


def print_table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> None:
    """One table: the header is the keys, as they stand in the JSON file."""
    if not rows:
        print("(no rows)")
        return
    names = list(columns or rows[0])
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    left = [isinstance(rows[0].get(name), str) for name in names]
    for line in [names, ["-" * width for width in widths], *cells]:
        padded = zip(line, widths, left, strict=True)
        print("  ".join(c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in padded).rstrip())


def write_json(path: str | None, rows: Sequence[Row]) -> None:
    """Writes the rows as one JSON list; a None path means that nobody asked."""
    if path is not None:
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Bar:
    """One promise of the product as a comparison: `value` against `limit`."""

    name: str
    value: float | None
    limit: float
    at_most: bool = True

    @property
    def holds(self) -> bool:
        if self.value is None:
            return False
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def line(self) -> str:
        word, sign = ("PASS" if self.holds else "FAIL"), ("<=" if self.at_most else ">=")
        return f"{word}  {self.name}: {_cell(self.value)} {sign} {_cell(float(self.limit))}"


def print_bars(bars: Sequence[Bar]) -> bool:
    """Prints PASS or FAIL for each; True if all hold."""
    for bar in bars:
        print(bar.line())
    return all(bar.holds for bar in bars)


# --------------------------------------------------------------------------------------------------------------- C and waits


def compile_c(source: Path, folder: Path) -> Path:
    """Compiles one C file with the system's compiler; the program lies in `folder`."""
    program = folder / source.stem
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SystemExit("no C compiler: install one that answers to `cc`") from error
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return program


def wait_for(is_ready: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits until the predicate holds; after the timeout ends the bench and names what it waited for."""
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        if time.monotonic() >= deadline:
            raise SystemExit(f"waited {timeout_s:.0f} s in vain for {what}")
        time.sleep(0.05)


def end_on_sigterm() -> None:
    """SIGTERM ends this process as an exit does: what it started and made is stopped and removed on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def stop_process(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM, then SIGKILL to the process itself once the grace is over. Returns when it has been reaped."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            print(f"pid {process.pid} did not end within {grace_s:.0f} s of SIGTERM: killed")
            process.kill()
    process.wait()
