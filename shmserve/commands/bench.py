"""`shmserve bench`: load a server, print what its clients felt, write it down and draw it.

Owns: the options, the progress line, the JSON file. The load is loadgen.py's, the figures load_report.py's, the text load_table.py's,
the picture load_plot.py's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shmserve.commands.bench_options import load_options
from shmserve.commands.client_options import target_of, target_options

if TYPE_CHECKING:
    from shmserve.load_report import LoadReport, Objectives, RequestResult
    from shmserve.load_spec import LoadSpec
    from shmserve.target import Target

MOST_PROMPTS = 4096
LATE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Plan:
    """What all loads of a command share."""

    target: Target
    model: str
    prompts: tuple[str, ...]
    max_tokens: tuple[int, ...]
    objectives: Objectives | None
    fields: dict[str, Any]

    def spec(self, load: dict[str, Any]) -> LoadSpec:
        from shmserve.load_spec import LoadSpec

        return LoadSpec(
            base_url=self.target.base_url,
            uds=self.target.uds,
            api_key=self.target.api_key,
            ca_file=self.target.ca_file,
            model=self.model,
            prompts=self.prompts,
            max_tokens=self.max_tokens,
            **self.fields,
            **load,
        )


@click.command()
@target_options
@load_options
def bench(
    url: str, uds: str, instance: str, port: int | None, api_key: str, ca_file: str, model: str,
    json_path: str, plot_path: str, **options: Any,
) -> int:  # fmt: skip
    """Load a server and show what its clients felt: TTFT, ITL, TPOT, end to end, lag, goodput, errors.

    Works with any OpenAI-compatible server. With several rates or concurrencies --plot draws latency against throughput, with
    one the latencies over time and their distributions.
    """
    from shmserve import load_file
    from shmserve.load_table import sweep_text

    _check_outputs(json_path, plot_path)
    loads = _loads(options["rates"], options["sizes"])
    target = target_of(url, uds, instance, port, api_key, ca_file)
    plan = _plan(target, model or _model_of(target), options, loads)
    rows: list[dict[str, Any]] = []
    reports: list[LoadReport] = []
    is_stopped = False
    try:  # all of them first: the last must not cost what was measured of the others
        specs = [(name, plan.spec(load)) for name, load in loads]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    for name, spec in specs:
        report, is_stopped = _measure(name, spec)
        if report.results:
            rows.append(_row(name, report, plan.objectives))
            reports.append(report)
            _show(rows[-1])
        if is_stopped:
            break
    if len(rows) > 1:
        click.echo(sweep_text(rows))
    if rows and json_path:
        loads_done = list(zip(rows, reports, strict=True))
        load_file.write(json_path, target.name, plan.model, options, loads_done)
    if rows and plot_path:
        _plot(plot_path, rows, reports)
    return 130 if is_stopped else 0 if rows and all(row["ok"] for row in rows) else 1


def _loads(
    rates: tuple[float, ...] | None, sizes: tuple[int, ...] | None
) -> list[tuple[str, dict[str, Any]]]:
    loads: list[tuple[str, dict[str, Any]]] = [
        (f"rate {rate:g}/s", {"rate": rate}) for rate in rates or ()
    ]
    loads += [(f"{size} client{'s' * (size != 1)}", {"concurrency": size}) for size in sizes or ()]
    if not loads:
        raise click.UsageError("give --rate or --concurrency")
    return loads


def _check_outputs(json_path: str, plot_path: str) -> None:
    """A file that cannot be written is found before the load, not behind it."""
    from shmserve import load_file, load_plot

    if json_path:
        load_file.check(json_path)
    if plot_path:
        load_plot.check(plot_path)


def _model_of(target: Target) -> str:
    import asyncio

    from shmserve.target import PROBE_TIMEOUT_S, served_model

    async def ask() -> str:
        async with target.session(PROBE_TIMEOUT_S) as session:
            return await served_model(target, session)

    return asyncio.run(ask())


def _plan(
    target: Target, model: str, options: dict[str, Any], loads: Sequence[tuple[str, dict[str, Any]]]
) -> Plan:
    from shmserve.load_spec import CHAT_PATH, COMPLETIONS_PATH, random_prompts

    num_requests, duration_s = options["num_requests"], options["duration"]
    if num_requests is None and duration_s is None:
        num_requests = 100
    seed = options["seed"]
    count = MOST_PROMPTS  # of a load that only time bounds: then they begin again
    if num_requests is not None:
        count = min(count, num_requests + options["warmup"])
    if options["prompts_file"]:
        prompts = _read_prompts(options["prompts_file"])
    else:
        prompts = random_prompts(options["prompt_words"].draw(count, seed), seed)
    extra = dict(options["extra"] or {})
    if options["ignore_eos"]:
        extra = {"ignore_eos": True} | extra
    fields = {
        "num_requests": num_requests,
        "duration_s": duration_s,
        "num_warmup": options["warmup"],
        "path": CHAT_PATH if options["endpoint"] == "chat" else COMPLETIONS_PATH,
        "seed": seed,
        "timeout_s": options["timeout_s"],
        "timing_every": options["timing_every"],
        "extra": extra,
    }
    max_tokens = options["max_tokens"].draw(count, seed + 1)
    return Plan(target, model, prompts, max_tokens, options["objectives"], fields)


def _read_prompts(path: str) -> tuple[str, ...]:
    """One prompt a line; a line that is a JSON string is decoded, so that prompts may hold line ends."""
    try:
        # Not splitlines: JSON strings, and prompts, may hold other line ends than \n.
        lines = [line for line in Path(path).read_text("utf-8").split("\n") if line.strip()]
        prompts = tuple(json.loads(line) if line.startswith('"') else line for line in lines)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--prompts-file {path}: {error}") from None
    if not prompts:
        raise click.ClickException(f"--prompts-file {path}: it holds no prompt")
    return prompts


def _measure(name: str, spec: LoadSpec) -> tuple[LoadReport, bool]:
    """The report, and whether Ctrl-C ended the load: then it is of the requests that had ended."""
    import asyncio

    from shmserve.load_report import LoadReport
    from shmserve.loadgen import run_load

    results: list[RequestResult] = []
    progress = Progress(name, spec.num_requests)

    def show(result: RequestResult) -> None:
        results.append(result)
        progress.tell(len(results), result.error is not None)

    try:
        return asyncio.run(run_load(spec, show)), False
    except KeyboardInterrupt:
        return LoadReport.of(results), True
    finally:
        progress.finish()


class Progress:
    """One line on a terminal's stderr, rewritten; nothing elsewhere."""

    def __init__(self, name: str, num_requests: int | None) -> None:
        self._name = name
        self._of = f" of {num_requests}" if num_requests is not None else ""
        self._num_errors = 0
        self._is_shown = sys.stderr.isatty()

    def tell(self, num_ended: int, is_error: bool) -> None:
        self._num_errors += is_error
        if self._is_shown:
            errors = f", {self._num_errors} with an error" if self._num_errors else ""
            click.echo(f"\r{self._name}: {num_ended}{self._of}{errors}\x1b[K", err=True, nl=False)

    def finish(self) -> None:
        if self._is_shown:
            click.echo("\r\x1b[K", err=True, nl=False)


def _row(name: str, report: LoadReport, objectives: Objectives | None) -> dict[str, Any]:
    row = {"load": name, **report.summary(objectives)}
    first_message: dict[str, str] = {}
    for result in report.results:
        if result.error is not None and not first_message.get(result.error):
            first_message[result.error] = result.message
    row["error_rows"] = [
        (kind, count, first_message[kind]) for kind, count in sorted(row["errors"].items())
    ]
    return row


def _show(row: dict[str, Any]) -> None:
    from shmserve.load_table import load_text

    click.echo(load_text(row) + "\n")
    late_ms, ttft_ms = row["lateness_p99_ms"], row["ttft_p50_ms"]
    if ttft_ms is not None and late_ms > 5.0 and late_ms > LATE_SHARE * ttft_ms:
        click.echo(
            f"shmserve: warning: the generator itself was late by up to {late_ms:.1f} ms (p99), which counts as the server's "
            "TTFT: give it a core of its own, or a smaller load",
            err=True,
        )


def _plot(path: str, rows: list[dict[str, Any]], reports: list[LoadReport]) -> None:
    from shmserve.load_plot import plot_load, plot_sweep

    if len(rows) > 1:
        plot_sweep(path, rows)
    else:
        plot_load(path, rows[0]["load"], reports[0], rows[0])
    click.echo(f"shmserve: drew {path}", err=True)
