"""What n-gram speculation gains on the CPU: tokens/s of one stream that copies from its prompt, with guesses and without, in pairs.

Owns: the prompts, the order of the runs, the ratio and its bar. Never: goes through a socket: the engine's parts are driven here,
as the worker drives them, so that the figure is the model's and the scheduler's alone.

    pair    one run with each number of guesses and one without, one after the other, of the same greedy answer: that the tokens
            are the same is checked, and a difference ends the bench; ratios are taken within a pair, a figure is their median
    prompt  one whose answer copies it, for the bar; and one whose answer only resembles it: what guesses cost that are often wrong
    rows    milliseconds of a step that computes so many rows of one sequence: what a guess costs
    noise   cores that other processes used meanwhile

    python tools/bench_speculation.py --guesses 3,7,15
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence as Listing

import click
import numpy as np
from bench_common import (
    Bar,
    NoiseWatch,
    Row,
    as_written,
    median,
    print_bars,
    print_table,
    write_json,
)

from shmserve.models import DEFAULT_MODEL, PreparedModel, prepare
from shmserve.request import SamplingParams
from shmserve.worker.batch import Batch
from shmserve.worker.commit import Committer
from shmserve.worker.cpu.runner import CpuRunner
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.sequence import Sequence
from shmserve.worker.stopping import StopConditions

LEAST_GAIN = 1.5
MAX_MODEL_LEN = 1024
MOST_ROWS = 16
TEXT = """\
def parse_line(line: str) -> tuple[str, int]:
    name, _, count = line.partition(":")
    if not name:
        raise ValueError("a line must begin with a name")
    return name.strip(), int(count)


def read_counts(path: str) -> dict[str, int]:
    counts = {}
    with open(path) as file:
        for line in file:
            name, count = parse_line(line)
            counts[name] = counts.get(name, 0) + count
    return counts
"""
PROMPTS = {
    "copies": f"# a.py\n{TEXT}\n# b.py\n{TEXT}\n# c.py\n",
    "resembles": f"This is the file:\n\n{TEXT}\nThis is the same file once more:\n\ndef parse_line",
}


class Stream:
    """A scheduler and a committer over one runner, which computes one request at a time."""

    def __init__(self, runner: CpuRunner, model: PreparedModel) -> None:
        self._runner = runner
        self._scheduler = Scheduler(
            runner.info,
            max_num_seqs=1,
            max_num_batched_tokens=512,
            eos_ids=(),
            caches_prefixes=False,
        )
        conditions = StopConditions(model.token_bytes(), model.special_token_ids)
        self._committer = Committer(self._scheduler, conditions)

    def run(
        self, prompt: Listing[int], num_tokens: int, num_guesses: int
    ) -> tuple[list[int], float, int]:
        """The greedy answer, the seconds from its first token to its last, and the steps they took."""
        params = SamplingParams(
            num_tokens, temperature=0.0, ignore_eos=True, num_speculative_tokens=num_guesses
        )
        sequence = Sequence(1, 0, params, np.array(prompt, np.int32), 1, 1)
        scheduler = self._scheduler
        scheduler.add(sequence)
        first_ns = now_ns = num_steps = 0
        while True:
            batch, _ = scheduler.schedule(num_steps, time.monotonic_ns())
            assert batch is not None
            output = self._runner.run(batch, scheduler.sampling)
            scheduler.advance(batch, output.time_ns, output.failed)
            committed = self._committer.commit(batch, output, time.monotonic_ns())
            now_ns = output.time_ns
            if len(batch.sample_seqs):
                first_ns = first_ns or now_ns
                num_steps += 1
            if committed.endings:
                break
        row, columns = sequence.row, scheduler.columns
        answer = columns.token_ids[row, len(prompt) : columns.num_tokens[row]].tolist()
        scheduler.remove(sequence)
        return answer, (now_ns - first_ns) / 1e9, num_steps - 1


def cost_of_rows(runner: CpuRunner, num_before: int, num_steps: int) -> list[Row]:
    """Milliseconds of a step with 1 to MOST_ROWS rows of one sequence behind `num_before` tokens; all numbers in turn."""
    state = SamplingState(1)
    state.temperature[:] = 0.0
    counts = (1, 2, 4, 8, MOST_ROWS)
    taken: dict[int, list[float]] = {count: [] for count in counts}
    table = np.arange(1, 1 + (num_before + MOST_ROWS) // 16 + 1, dtype=np.int32)
    for _ in range(num_steps):
        for count in counts:
            positions = np.arange(num_before, num_before + count, dtype=np.int32)
            batch = Batch(
                step=0,
                rows=np.zeros(1, np.int32),
                token_ids=np.full(count, 504, np.int32),
                positions=positions,
                kv_slots=table[positions // 16] * 16 + positions % 16,
                cu_seqlens=np.array([0, count], np.int32),
                block_table=table[None],
                kv_lens=np.array([num_before + count], np.int32),
                sample_seqs=np.zeros(1, np.int32),
                is_decode=count == 1,
                num_drafts=np.array([count - 1], np.int32) if count > 1 else None,
            )
            begin_ns = time.monotonic_ns()
            runner.run(batch, state)
            taken[count].append((time.monotonic_ns() - begin_ns) / 1e6)
    medians = {count: float(np.median(ms)) for count, ms in taken.items()}
    return [
        {"rows": count, "step_ms": ms, "of_one_row": ms / medians[1]}
        for count, ms in medians.items()
    ]


def measured(
    stream: Stream, name: str, prompt: Listing[int], numbers: Listing[int], pairs: int, tokens: int
) -> list[Row]:
    """A row for each number of guesses; the first is 0. Ends the bench if an answer is another one."""
    rates: dict[int, list[float]] = {number: [] for number in numbers}
    steps: dict[int, int] = {}
    for _ in range(pairs):
        answers = {}
        for number in numbers:
            answers[number], seconds, steps[number] = stream.run(prompt, tokens, number)
            rates[number].append((tokens - 1) / seconds)
            if answers[number] != answers[0]:
                raise SystemExit(f"{name}: the answer with {number} guesses is another one")
    return [
        {
            "prompt": name,
            "guesses": number,
            "pairs": pairs,
            "tokens_per_s": median(rates[number]),
            "tokens_per_step": (tokens - 1) / steps[number],
            "gain": median([a / b for a, b in zip(rates[number], rates[0], strict=True)]),
        }
        for number in numbers
    ]


@click.command(help=as_written(__doc__), context_settings={"max_content_width": 120})
@click.option(
    "--guesses", default="3,7,15", show_default=True, help="Numbers of guesses to compare."
)
@click.option("--pairs", default=5, show_default=True, type=click.IntRange(1))
@click.option(
    "--tokens",
    default=160,
    show_default=True,
    type=click.IntRange(2, 512),
    help="Tokens of an answer.",
)
@click.option("--threads", default=None, type=int, help="Threads of the model; by the cores.")
@click.option("--model", "spec", default="", help="As for `shmserve start`.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), default=None)
def main(
    guesses: str, pairs: int, tokens: int, threads: int | None, spec: str, json_path: str | None
) -> None:
    numbers = [int(number) for number in guesses.split(",")]
    model = prepare(spec or DEFAULT_MODEL)
    runner = CpuRunner(
        model,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_bytes=128 << 20,
        num_threads=threads,
        progress=lambda what, share: None,
    )
    tokenizer = model.tokenizer()
    prompts = {
        name: tokenizer.encode(text, add_special_tokens=False).ids for name, text in PROMPTS.items()
    }
    stream = Stream(runner, model)
    stream.run(prompts["copies"], 8, 0)
    watch = NoiseWatch()
    rows: list[Row] = []
    for name, prompt in prompts.items():
        rows += measured(stream, name, prompt, (0, *numbers), pairs, tokens)
    noise = watch.cores()
    costs = cost_of_rows(runner, len(prompts["copies"]) + tokens, 20)
    runner.close()
    print_table(rows, ["prompt", "guesses", "pairs", "tokens_per_s", "tokens_per_step", "gain"])
    print_table(costs, ["rows", "step_ms", "of_one_row"])
    print(f"noise: {noise:.2f} cores")
    write_json(json_path, [*rows, *costs, {"noise_cores": noise}])
    best = max(row["gain"] for row in rows if row["prompt"] == "copies" and row["guesses"])
    if not print_bars([Bar("best gain of speculation at B=1", best, LEAST_GAIN, at_most=False)]):
        sys.exit(1)


if __name__ == "__main__":
    main()
