"""One run of the C client, and what its streams say about lag and rate.

Owns: the client's command line, its output, the emission log and how arrivals are laid beside it. Never: starts a server.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ID_HEX_DIGITS = 16


class Target(Protocol):
    """A server that the client can be sent to."""

    @property
    def client_address(self) -> list[str]: ...
    @property
    def measured_pids(self) -> Sequence[int]: ...
    @property
    def body_file(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class Stream:
    """One response as the client saw it; times are CLOCK_MONOTONIC ns."""

    req_id: str
    status: int
    has_ended: bool
    start_ns: int
    num_bytes: int
    arrivals_ns: list[int]

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.has_ended and bool(self.arrivals_ns)

    def lags_ns(self, emitted_ns: list[int]) -> list[int]:
        """Arrival minus emission of each token.

        With fewer frames than tokens nobody outside can say which frame carried which token: then only the first token, which
        was in the first frame, and the last, which was in the last one, are certain, and only they count.
        """
        if len(emitted_ns) == len(self.arrivals_ns):
            return [
                arrival - emitted
                for arrival, emitted in zip(self.arrivals_ns, emitted_ns, strict=True)
            ]
        return [self.arrivals_ns[0] - emitted_ns[0], self.arrivals_ns[-1] - emitted_ns[-1]]


@dataclass(frozen=True, slots=True)
class Window:
    """The time in which all streams decode: from the client's first mark to its second."""

    open_ns: int
    close_ns: int
    num_frames: int
    server_cpu_ns: int

    @property
    def length_ns(self) -> int:
        return self.close_ns - self.open_ns


@dataclass(frozen=True, slots=True)
class StreamRun:
    """All streams of one run. `window` is None if they were never all decoding at once."""

    streams: list[Stream]
    window: Window | None
    client_cpu_ns: int

    @property
    def length_s(self) -> float:
        last = max(stream.arrivals_ns[-1] for stream in self.streams)
        return (last - min(stream.start_ns for stream in self.streams)) / 1e9


def parse_client_output(text: str) -> StreamRun:
    """The JSON lines of `sse_client`."""
    head, *lines = (json.loads(line) for line in text.splitlines())
    opened, closed = head["open"], head["close"]
    window = None
    if opened and closed and closed["frames"] > opened["frames"]:
        cpu_ns = sum(closed["cpu_ns"]) - sum(opened["cpu_ns"])
        window = Window(
            opened["at_ns"], closed["at_ns"], closed["frames"] - opened["frames"], cpu_ns
        )
    streams = [
        Stream(
            line["id"][-ID_HEX_DIGITS:],
            line["status"],
            line["ended"],
            line["start_ns"],
            line["bytes"],
            line["arrivals_ns"],
        )
        for line in lines
    ]
    return StreamRun(streams, window, head["client_cpu_ns"])


def run_client(
    program: Path, target: Target, batch: int, num_tokens: int, timeout_s: int = 120
) -> StreamRun:
    """B streams at once, to their end. The client inherits this process's core."""
    with tempfile.NamedTemporaryFile(prefix="sse-client-", suffix=".jsonl") as out:
        command = [
            str(program),
            *target.client_address,
            "-b",
            str(target.body_file),
            "-n",
            str(batch),
            "-o",
            out.name,
        ]
        command += ["-k", str(num_tokens), "-t", str(timeout_s), "-P"]
        command += [",".join(map(str, target.measured_pids))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = Path(out.name).read_text()
    if not text:
        raise SystemExit(f"sse_client ended with {done.returncode}: {done.stderr.strip()}")
    return parse_client_output(text)


def tokens_per_s(run: StreamRun, step_ms: float) -> float:
    """Content frames received in the steady window, over its length cut to whole steps.

    Tokens come in bursts of B on the grid, so a window that ends between two steps would count a burst too many or too few.
    """
    assert run.window is not None, "a run without a steady window has no rate"
    step_ns = step_ms * 1e6
    length_ns = max(1, int(run.window.length_ns // step_ns)) * step_ns
    end_ns = run.window.open_ns + length_ns
    received = sum(
        run.window.open_ns < at <= end_ns for stream in run.streams for at in stream.arrivals_ns
    )
    return received / length_ns * 1e9


class EmissionLog:
    """A growing file of steps, read from where the last read ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._times_ns: dict[str, list[int]] = {}

    def _read_on(self) -> None:
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._offset += len(whole)  # ASCII: characters are bytes
        for line in whole.splitlines():
            step = json.loads(line)
            counts = step.get("counts") or [1] * len(step["req_ids"])
            for req_id, index, count in zip(step["req_ids"], step["indices"], counts, strict=True):
                times = self._times_ns.setdefault(req_id, [])
                if index != len(times):
                    raise SystemExit(
                        f"emission log: request {req_id} goes from token {len(times) - 1} to {index}"
                    )
                times += [step["time_ns"]] * count

    def emission_times(
        self, req_ids: set[str], num_tokens: int, timeout_s: float = 10.0
    ) -> dict[str, list[int]]:
        """Emission times of every token of these requests, waiting until the log holds them all; then forgets everything."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._read_on()
            missing = [
                req_id for req_id in req_ids if len(self._times_ns.get(req_id, ())) < num_tokens
            ]
            if not missing:
                found = {req_id: self._times_ns[req_id] for req_id in req_ids}
                self._times_ns.clear()
                return found
            if time.monotonic() > deadline:
                have = len(self._times_ns.get(missing[0], ()))
                raise SystemExit(
                    f"emission log {self._path}: {len(missing)} of {len(req_ids)} requests are not there in full; "
                    f"{missing[0]} has {have} of {num_tokens} tokens"
                )
            time.sleep(0.05)
