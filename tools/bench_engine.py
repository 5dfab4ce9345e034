"""The engine under HTTP: shmserve beside other OpenAI-compatible servers on this machine, in pairs.

Owns: the order of the runs, the ratios and the bars. Never: measures by itself (engine_servers.py does), or knows a server's
inside.

    pair     one run against ours and one against a peer with the same prompts, in turn first; ratios are taken within a pair,
             because the machine's speed drifts between them, and a row's figure is the median over its pairs
    idle     all servers run all the time; one that computes nothing takes nothing (the noise sentence would tell)
    prompts  equal text; whether all servers counted equally many tokens is checked, and a difference ends the bench
    bars     by the peer's name: llama.cpp, transformers, vllm; another peer gets ratios and no bar

    python tools/bench_engine.py --peer llama.cpp http://127.0.0.1:8090 \\
        "llama-server -m MODEL.gguf --port 8090 -fa off -t 2 -np 32 -c 24576"
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from bench_common import (
    Bar,
    NoiseWatch,
    Row,
    as_written,
    end_on_sigterm,
    median,
    noise_sentence,
    print_bars,
    print_table,
    write_json,
)
from engine_servers import IGNORE_EOS, Load, Server, our_server, run

BATCHES = "1:7,4:1,8:5,16:5,32:1"
FIGURES = "tokens_per_s ttft_p50_ms tpot_p50_ms decode_tokens_per_s"
COLUMNS = f"server batch runs {FIGURES} prompt_tokens noise_cores"
RATIO_COLUMNS = "peer batch pairs tokens_per_s ttft decode"
MOST_SLOWED = 2.5
WARM_UP_TOKENS = 8

# (peer, batch): figure, limit, whether the limit is the most; a ratio is ours / the peer's
BARS = {
    ("llama.cpp", 1): (("decode", 1.0, False), ("ttft", 0.6, True)),
    ("llama.cpp", 8): (("tokens_per_s", 3.0, False),),
    ("llama.cpp", 16): (("tokens_per_s", 3.0, False),),
    ("transformers", 8): (("tokens_per_s", 5.0, False),),
    ("vllm", 8): (("tokens_per_s", 2.0, False),),
}


def batches(_: click.Context, __: click.Parameter, value: str) -> tuple[tuple[int, int], ...]:
    """ "8:5,16" is five pairs of eight requests and one of sixteen."""
    try:
        parts = [part.partition(":") for part in value.split(",")]
        found = tuple((int(batch), int(pairs or 1)) for batch, _, pairs in parts)
    except ValueError as error:
        raise click.BadParameter("BATCH or BATCH:PAIRS, with commas") from error
    if any(batch < 1 or pairs < 1 for batch, pairs in found):
        raise click.BadParameter("batches and pairs are at least 1")
    return found


def ratios_of(ours: Row, theirs: Row) -> Row:
    """Ours over theirs; above 1 is faster for rates, slower for ttft."""
    names = (
        ("tokens_per_s", "tokens_per_s"),
        ("ttft", "ttft_p50_ms"),
        ("decode", "decode_tokens_per_s"),
    )
    return {
        name: ours[key] / theirs[key] if ours[key] and theirs[key] else None for name, key in names
    }


def bars_of(ratios: Sequence[Row]) -> list[Bar]:
    """The promises that the measured rows are about."""
    return [
        Bar(f"{name} of {row['peer']} at B={row['batch']}", row[name], limit, at_most)
        for row in ratios
        for name, limit, at_most in BARS.get((row["peer"], row["batch"]), ())
    ]


def check_prompts(ours: Row, theirs: Row, peer: str) -> None:
    """A server that read other tokens did other work."""
    if ours["prompt_tokens"] is None or ours["prompt_tokens"] != theirs["prompt_tokens"]:
        raise SystemExit(
            f"the prompts are {ours['prompt_tokens']} tokens for shmserve and "
            f"{theirs['prompt_tokens']} for {peer}: they cannot be compared"
        )


def measured(server: Server, load: Load) -> Row:
    watch = NoiseWatch()
    row = run(server, load)
    return {**row, "noise_cores": watch.cores()}


def summary(server: Server, batch: int, runs: Sequence[Row]) -> Row:
    """One row: medians over the runs."""
    counted = {row["prompt_tokens"] for row in runs}
    return {
        "server": server.name,
        "batch": batch,
        "runs": len(runs),
        **{name: median([row[name] for row in runs]) for name in FIGURES.split()},
        "prompt_tokens": counted.pop() if len(counted) == 1 else None,
        "noise_cores": max(row["noise_cores"] for row in runs),
    }


def measure_pairs(
    ours: Server, peer: Server, load: Load, num_pairs: int
) -> tuple[list[Row], list[Row], Row]:
    """Runs of ours, runs of the peer, and the medians of their ratios."""
    own: list[Row] = []
    others: list[Row] = []
    for pair in range(num_pairs):
        once = Load(load.batch, load.num_prompt_tokens, load.num_tokens, load.seed + pair)
        for server, rows in ((ours, own), (peer, others))[:: 1 if pair % 2 == 0 else -1]:
            rows.append(measured(server, once))
        check_prompts(own[-1], others[-1], peer.name)
        print(".", end="", file=sys.stderr, flush=True)
    pairs = [ratios_of(mine, other) for mine, other in zip(own, others, strict=True)]
    ratios = {name: median([row[name] for row in pairs]) for name in pairs[0]}
    return own, others, {"peer": peer.name, "batch": load.batch, "pairs": num_pairs, **ratios}


@contextlib.contextmanager
def busy_neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing but use one core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def measure_neighbour(ours: Server, load: Load, num_pairs: int) -> Row:
    """How much longer a step of one request takes beside a busy process: the median over pairs."""
    factors = []
    for pair in range(num_pairs):
        once = Load(1, load.num_prompt_tokens, load.num_tokens, load.seed + pair)
        quiet = measured(ours, once)
        with busy_neighbour():
            busy = measured(ours, Load(1, once.num_prompt_tokens, once.num_tokens, once.seed + 100))
        factors.append(busy["tpot_p50_ms"] / quiet["tpot_p50_ms"])
    return {"peer": "busy neighbour", "batch": 1, "pairs": num_pairs, "step": median(factors)}


@click.command(help=as_written(__doc__))
@click.option("--model", default="", help="of shmserve; the default model if empty")
@click.option("--threads", default=2, show_default=True, help="of shmserve, as --threads")
@click.option("--our-options", default="", help="more words for `shmserve start`")
@click.option(
    "--our-url", default="", help="a shmserve that runs already, instead of one started here"
)
@click.option(
    "--peer",
    "peers",
    nargs=3,
    multiple=True,
    metavar="NAME URL COMMAND",
    help="a server to compare with; an empty COMMAND: it runs already. Several are possible",
)
@click.option(
    "--peer-model", default="", help="name for the peers' bodies; the first they list if empty"
)
@click.option(
    "--peer-extra",
    default=json.dumps(IGNORE_EOS),
    show_default=True,
    help="JSON merged into the peers' bodies; {} for one that refuses ignore_eos (its model must not end by itself)",
)
@click.option(
    "--batches", "grid", callback=batches, default=BATCHES, show_default=True, help="BATCH:PAIRS"
)
@click.option("--prompt-tokens", default=512, show_default=True)
@click.option("--num-tokens", default=128, show_default=True, help="of each answer")
@click.option("--neighbour-pairs", default=0, show_default=True, help="runs beside a busy process")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="write the rows to this file"
)
def main(
    model: str,
    threads: int,
    our_options: str,
    our_url: str,
    peers: tuple[tuple[str, str, str], ...],
    peer_model: str,
    peer_extra: str,
    grid: tuple[tuple[int, int], ...],
    prompt_tokens: int,
    num_tokens: int,
    neighbour_pairs: int,
    seed: int,
    json_path: str | None,
) -> None:
    end_on_sigterm()
    try:
        extra: dict[str, Any] = json.loads(peer_extra)
    except ValueError as error:
        raise click.BadParameter(f"--peer-extra is no JSON: {error}") from error
    most = max(batch for batch, _ in grid)
    rows: list[Row] = []
    ratios: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="shmserve-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        own = (
            Server("shmserve", our_url, (), folder)
            if our_url
            else our_server(folder, model, threads, most, our_options)
        )
        ours = stack.enter_context(own)
        others = [
            stack.enter_context(Server(*peer[:2], shlex.split(peer[2]), folder, peer_model, extra))
            for peer in peers
        ]
        for server in (ours, *others):
            run(server, Load(1, prompt_tokens, WARM_UP_TOKENS, seed - 1))
        for at, (batch, num_pairs) in enumerate(grid):
            load = Load(batch, prompt_tokens, num_tokens, seed + 1_000 * at)
            if not others:
                runs = [
                    measured(ours, Load(batch, prompt_tokens, num_tokens, load.seed + index))
                    for index in range(num_pairs)
                ]
                rows.append(summary(ours, batch, runs))
            for index, peer in enumerate(others):
                paired = Load(batch, prompt_tokens, num_tokens, load.seed + 100 * index)
                mine, theirs, ratio = measure_pairs(ours, peer, paired, num_pairs)
                rows += [summary(ours, batch, mine), summary(peer, batch, theirs)]
                ratios.append(ratio)
        bars = bars_of(ratios)
        if neighbour_pairs:
            load = Load(1, prompt_tokens, num_tokens, seed + 500_000)
            beside = measure_neighbour(ours, load, neighbour_pairs)
            bars.append(Bar("step beside a busy process", beside["step"], MOST_SLOWED))
            ratios.append(beside)
    print(file=sys.stderr)
    print_table(rows, COLUMNS.split())
    if others:
        print("\nshmserve / peer, medians over pairs")
        print_table([row for row in ratios if "step" not in row], RATIO_COLUMNS.split())
    write_json(json_path, rows + ratios)
    print(noise_sentence(row["noise_cores"] for row in rows))
    if not print_bars(bars):
        sys.exit(1)


if __name__ == "__main__":
    main()
