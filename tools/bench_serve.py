"""Loads any OpenAI-compatible server and prints what its clients felt: TTFT, ITL, TPOT, tokens/s, errors.

With --rate arrivals are Poisson and never wait for completions (open loop); with --concurrency a fixed number of clients
send one request after another (closed loop). Several values, with commas, make several rows.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import click
from bench_common import NoiseWatch, Row, noise_sentence, print_table, write_json

from shmserve.loadgen import CHAT_PATH, COMPLETIONS_PATH, LoadSpec, RequestResult, run_load

WORDS = (
    "anchor basalt cedar delta ember fjord granite harvest island juniper kettle lantern "
    "meadow needle orchard pebble quarry river saddle timber umbrella valley willow yarrow "
    "zephyr"
)
COLUMNS = (
    "load requests ok errors requests_per_s tokens_per_s ttft_p50_ms ttft_p99_ms itl_p50_ms "
    "itl_p99_ms itl_max_ms tpot_p50_ms e2e_p50_ms e2e_p99_ms lateness_p99_ms noise_cores"
)


def make_prompts(num_prompts: int, num_words: int, seed: int) -> tuple[str, ...]:
    """Random words, each prompt different from its first word on, so that no prefix cache helps."""
    draw = random.Random(seed)
    return tuple(" ".join(draw.choices(WORDS.split(), k=num_words)) for _ in range(num_prompts))


def read_prompts(path: str) -> tuple[str, ...]:
    """One prompt a line; a line that is a JSON string is decoded, so that prompts may hold line ends."""
    lines = [line for line in Path(path).read_text().splitlines() if line.strip()]
    if not lines:
        raise click.BadParameter(f"{path} holds no prompt")
    return tuple(json.loads(line) if line.startswith('"') else line for line in lines)


def ints(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter("whole numbers with commas") from error


def floats(_: click.Context, __: click.Parameter, value: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in value.split(",")) if value else ()
    except ValueError as error:
        raise click.BadParameter("numbers with commas") from error


def json_object(_: click.Context, __: click.Parameter, value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise click.BadParameter("not a JSON object")
    return parsed


@click.command(help=__doc__)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True)
@click.option("--model", default="default", show_default=True)
@click.option(
    "--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True
)
@click.option(
    "--rate",
    "rates",
    callback=floats,
    help="requests per second, open loop; with commas for several rows",
)
@click.option(
    "--concurrency",
    "sizes",
    callback=floats,
    help="clients, closed loop; with commas for several rows",
)
@click.option(
    "--num-requests", type=click.IntRange(min=1), default=100, show_default=True, help="per row"
)
@click.option(
    "--prompts-file", type=click.Path(exists=True, dir_okay=False), help="one prompt a line"
)
@click.option(
    "--prompt-words",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="of random prompts",
)
@click.option(
    "--max-tokens",
    callback=ints,
    default="128",
    show_default=True,
    help="with commas: taken in turn",
)
@click.option(
    "--ignore-eos",
    is_flag=True,
    help="every answer is max-tokens long (vLLM, SGLang and shmserve know it)",
)
@click.option(
    "--extra", callback=json_object, default="{}", help="JSON object merged into every body"
)
@click.option("--api-key", envvar="OPENAI_API_KEY")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--timeout", "timeout_s", default=600.0, show_default=True, help="seconds per request"
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="write the rows to this file"
)
def main(
    url: str,
    model: str,
    endpoint: str,
    rates: tuple[float, ...],
    sizes: tuple[float, ...],
    num_requests: int,
    prompts_file: str | None,
    prompt_words: int,
    max_tokens: tuple[int, ...],
    ignore_eos: bool,
    extra: dict[str, Any],
    api_key: str | None,
    seed: int,
    timeout_s: float,
    json_path: str | None,
) -> None:
    if not rates and not sizes:
        raise click.UsageError("give --rate or --concurrency")
    prompts = (
        read_prompts(prompts_file)
        if prompts_file
        else make_prompts(num_requests, prompt_words, seed)
    )
    loads: list[tuple[str, dict[str, Any]]] = [
        (f"rate {rate:g}/s", {"rate": rate}) for rate in rates
    ]
    loads += [(f"{int(size)} clients", {"concurrency": int(size)}) for size in sizes]
    rows: list[Row] = []
    for name, load in loads:
        try:
            spec = LoadSpec(
                base_url=url,
                model=model,
                prompts=prompts,
                max_tokens=max_tokens,
                num_requests=num_requests,
                path=CHAT_PATH if endpoint == "chat" else COMPLETIONS_PATH,
                seed=seed,
                timeout_s=timeout_s,
                api_key=api_key,
                extra={"ignore_eos": True, **extra} if ignore_eos else extra,
                **load,
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        rows.append(measure(name, spec))
    print_table([{**row, "errors": spell_errors(row["errors"])} for row in rows], COLUMNS.split())
    write_json(json_path, rows)
    print(
        noise_sentence(row["noise_cores"] for row in rows)
        + " (a server on this machine counts as another)"
    )
    if not all(row["ok"] for row in rows):
        sys.exit(1)


def measure(name: str, spec: LoadSpec) -> Row:
    """One row, with progress on stderr."""
    num_ended = 0

    def show(result: RequestResult) -> None:
        nonlocal num_ended
        num_ended += 1
        if sys.stderr.isatty():
            click.echo(
                f"\r{name}: {num_ended}/{spec.num_requests}",
                err=True,
                nl=num_ended == spec.num_requests,
            )

    watch = NoiseWatch()
    report = asyncio.run(run_load(spec, show))
    return {"load": name, **report.summary(), "noise_cores": watch.cores()}


def spell_errors(errors: dict[str, int]) -> str:
    return ", ".join(f"{count} x {error}" for error, count in sorted(errors.items())) or "none"


if __name__ == "__main__":
    main()
