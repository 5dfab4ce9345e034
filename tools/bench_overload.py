"""Offers shmserve ten times what it can do, and shows that nothing of it is lost, late, or kept.

The possible rate is by construction: the simulated runner makes a token for each of --max-num-seqs sequences every --step-ms. Each of the
--requests must be answered; refusals must be fast; the memory of front end and worker must stay within what `--print-limits` says, and
not grow while the load goes on.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import click
import mortal
from bench_common import (
    ROOT,
    Bar,
    NoiseWatch,
    Row,
    end_on_sigterm,
    noise_sentence,
    percentile,
    print_bars,
    print_table,
    stop_process,
    wait_for,
    write_json,
)
from overload_run import Load, Outcome, RssWatch, rss_bytes, run

from shmserve.config import Config, HttpConfig, WorkerConfig
from shmserve.memory_bounds import bounds_of, total_of

CONTEXT = 2_048
MOST_REFUSAL_MS = 100.0
MOST_GROWTH_BYTES = 8 << 20


def config_of(max_num_seqs: int, queued: int) -> Config:
    """What the bench's server is started with, as the formula wants it."""
    return Config(
        worker=WorkerConfig(runner="simulated", max_num_seqs=max_num_seqs),
        http=HttpConfig(max_queued_requests=queued),
    )


def limit_bytes(process: str, config: Config) -> int:
    blocks = 1 + -(-CONTEXT // config.worker.block_size) * config.worker.max_num_seqs
    bounds = bounds_of(config, CONTEXT, kv_bytes=0, num_kv_blocks=blocks)
    return total_of(bounds, process)


class OverloadedServer:
    """A simulated server, and the pids of its two children."""

    def __init__(self, folder: Path, step_ms: float, max_num_seqs: int, queued: int) -> None:
        self._log = folder / "log"
        argv = [sys.executable, "-m", "shmserve", "start", "--runner=simulated", "--port=0"]
        argv += [f"--instance=overload-{os.getpid()}", f"--step-ms={step_ms}"]
        argv += [f"--max-num-seqs={max_num_seqs}", f"--max-queued-requests={queued}"]
        argv += [f"--max-model-len={CONTEXT}"]
        environ = os.environ | {"XDG_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT)}
        with open(self._log, "wb") as log:
            self._process = mortal.start(argv, env=environ, stdout=log, stderr=log)

    def __enter__(self) -> OverloadedServer:
        try:
            wait_for(lambda: "ready:" in self._log.read_text(), 60, "the server to be ready")
        except BaseException:
            print(self._log.read_text(), file=sys.stderr)
            self.__exit__()
            raise
        match = re.search(r":(\d+) serves .*http 0 (\d+), worker 0 (\d+)", self._log.read_text())
        assert match is not None, self._log.read_text()
        self.port = int(match[1])
        self.pids = {"http": int(match[2]), "worker": int(match[3])}
        return self

    def __exit__(self, *_: object) -> None:
        stop_process(self._process, 15)


def bars_of(
    outcome: Outcome, num_requests: int, used: dict[str, tuple[int, int]], growth: dict[str, int]
) -> list[Bar]:
    """The promises. `used` has for each process what it took beyond its start, and what it may."""
    lost = num_requests - outcome.num_answered
    refused = percentile(outcome.refused_ms, 99)
    bars = [
        Bar("requests without an answer", float(lost), 0.0),
        Bar("refusals p99, ms", refused, MOST_REFUSAL_MS),
    ]
    for process, (taken, limit) in used.items():
        bars.append(Bar(f"{process}: MiB beyond its start", taken / 2**20, limit / 2**20))
        bars.append(Bar(f"{process}: MiB grown, 2nd to last quarter", growth[process] / 2**20, 8.0))
    return bars


@click.command(help=__doc__)
@click.option("--requests", default=20_000, show_default=True)
@click.option("--times", default=10.0, show_default=True, help="Times the possible rate.")
@click.option("--step-ms", default=20.0, show_default=True)
@click.option("--max-num-seqs", default=16, show_default=True)
@click.option("--queued", default=32, show_default=True)
@click.option("--max-tokens", default=16, show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False))
def main(
    requests: int,
    times: float,
    step_ms: float,
    max_num_seqs: int,
    queued: int,
    max_tokens: int,
    json_path: str | None,
) -> None:
    end_on_sigterm()
    possible = max_num_seqs * 1000 / step_ms / max_tokens
    config = config_of(max_num_seqs, queued)
    with (
        tempfile.TemporaryDirectory() as folder,
        OverloadedServer(Path(folder), step_ms, max_num_seqs, queued) as server,
    ):
        run(Load(server.port, 100, possible / 2, max_tokens=max_tokens))  # warm
        ready = {name: rss_bytes(pid) for name, pid in server.pids.items()}
        noise = NoiseWatch()
        with RssWatch(server.pids) as watch:
            outcome = run(Load(server.port, requests, times * possible, max_tokens=max_tokens))
        cores = noise.cores()
    used = {
        name: (watch.most(name) - ready[name], limit_bytes(name, config)) for name in server.pids
    }
    growth = {name: watch.growth(name) for name in server.pids}
    row: Row = {
        "requests": requests,
        "offered/s": requests / outcome.took_s,
        "possible/s": possible,
        "ok": outcome.statuses[200],
        "refused": len(outcome.refused_ms),
        "broken": outcome.num_broken,
        "open": outcome.num_unanswered,
        "refused p50 ms": percentile(outcome.refused_ms, 50),
        "refused p99 ms": percentile(outcome.refused_ms, 99),
        "refused max ms": max(outcome.refused_ms, default=0.0),
        "ok p50 ms": percentile(outcome.ok_ms, 50),
        "ok p99 ms": percentile(outcome.ok_ms, 99),
        "sent late max ms": outcome.worst_late_ms,
        "connections": outcome.num_connections,
        "http start MiB": ready["http"] / 2**20,
        "http most MiB": watch.most("http") / 2**20,
        "worker start MiB": ready["worker"] / 2**20,
        "worker most MiB": watch.most("worker") / 2**20,
    }
    print_table([{"what": name, "value": value} for name, value in row.items()])
    print(f"codes: {dict(outcome.codes)}")
    print(noise_sentence([cores]))
    write_json(json_path, [row])
    if not print_bars(bars_of(outcome, requests, used, growth)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
