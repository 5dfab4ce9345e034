"""The real worker over the simulated runner, which does on demand what no healthy one does: for tests of deaths and hangs.

    strange_worker.py FOLDER --control fd:N

While FOLDER/hold-loading is there it does not finish loading, while FOLDER/hold-prefill is there no step with a prompt. A request's
seed (see SEEDS) asks for the rest, at its first decode step. FOLDER/token-ms says what a token of a step costs, in ms. Where
there is FOLDER/checks, the scheduler's laws are checked whenever there is nothing to compute, and the file says how often.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from shmserve.rings.policy import RingWriter
from shmserve.worker import __main__ as program
from shmserve.worker.batch import Batch, StepOutput
from shmserve.worker.runner import Progress
from shmserve.worker.sampling_state import SamplingState

SEEDS = {
    "hangs": 7_000_001,  # one step never ends; the heartbeat goes on
    "hangs_holding_the_interpreter": 7_000_002,  # and the heartbeat does not
    "raises": 7_000_003,
    "lies_about_tokens": 7_000_011,  # announces token slots that are not there
    "lies_about_submit_credits": 7_000_012,  # gives back slots that it was never sent
    "is_lied_to": 7_000_013,  # as if the front end had announced what is not there
    "writes_nonsense": 7_000_014,  # records of a kind that is not one
    "dies_inside_a_publish": 7_000_021,  # SIGKILL with half of the next batch copied
}
NAMES = {seed: name for name, seed in SEEDS.items()}
A_LOT = 1 << 40


class DeadlySlots:
    """The slot area of a ring: whoever copies into it dies in the middle of that."""

    def __init__(self, slots: memoryview) -> None:
        self._slots = slots

    def __setitem__(self, where: slice, data: bytes) -> None:
        half = len(data) // 2
        self._slots[where.start : where.start + half] = data[:half]
        os.kill(os.getpid(), signal.SIGKILL)


class StrangeRunner:
    """Passes everything on to the runner that it has, but for what was asked."""

    def __init__(self, runner: Any, worker: program.Worker, folder: Path) -> None:
        self._runner = runner
        self._worker = worker
        self._folder = folder
        cost = folder / "token-ms"
        self._token_s = float(cost.read_text()) / 1e3 if cost.exists() else 0.0
        self._done: set[int] = set()
        self.info = runner.info

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        output: StepOutput = self._runner.run(batch, sampling)
        time.sleep(self._token_s * batch.num_tokens)
        if batch.num_tokens > batch.num_seqs and self._worker.channels:
            while (self._folder / "hold-prefill").exists():
                time.sleep(0.01)
        elif batch.is_decode:
            for row in batch.rows.tolist():
                seed = int(sampling.seed[row])
                if seed in NAMES and seed not in self._done:
                    self._done.add(seed)
                    getattr(self, NAMES[seed])()
        return output

    def hangs(self) -> None:
        time.sleep(1_000)

    def hangs_holding_the_interpreter(self) -> None:
        ctypes.PyDLL(None).sleep(1_000)

    def raises(self) -> None:
        raise RuntimeError("the device is on fire")

    def lies_about_tokens(self) -> None:
        self._worker.channels[0].tokens.data.add(A_LOT)

    def lies_about_submit_credits(self) -> None:
        self._worker.channels[0].submit.credits.add(A_LOT)

    def is_lied_to(self) -> None:
        self._worker.channels[0].submit.data.add(A_LOT)

    def writes_nonsense(self) -> None:
        writer: RingWriter = self._worker.engine_for_tests.channels.emitters[0].writer
        (req_id,) = self._worker.engine_for_tests._by_id
        slot = bytearray(writer.producer.slot_size)
        slot[:8] = req_id.to_bytes(8, "little")
        slot[20] = 99
        writer.producer.try_write(bytes(slot) * 16, 16)

    def dies_inside_a_publish(self) -> None:
        producer = self._worker.engine_for_tests.channels.emitters[0].writer.producer
        producer._slots = DeadlySlots(producer._slots)

    def close(self) -> None:
        self._runner.close()


def main() -> int:
    folder = Path(sys.argv[1])
    build = program.build_runner
    load = program.Worker.load

    def load_and_remember(worker: program.Worker) -> Any:
        def build_strange(joined: Any, model: Any, progress: Progress) -> tuple[Any, Any]:
            progress("weights", 0.5)
            while (folder / "hold-loading").exists():
                time.sleep(0.01)
            runner, ranks = build(joined, model, progress)
            return StrangeRunner(runner, worker, folder), ranks

        program.build_runner = build_strange
        engine = worker.engine_for_tests = load(worker)
        if (folder / "checks").exists():
            show_idle, num_checks = engine.show_idle, itertools.count(1)

            def check() -> None:
                engine.scheduler.check()
                show_idle()
                (folder / "checks").write_text(str(next(num_checks)))

            engine.show_idle = check
        return engine

    program.Worker.load = load_and_remember
    return program.main(sys.argv[2:])


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
