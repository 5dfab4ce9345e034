"""What the tests of the worker's own half share: a toy vocabulary, and an engine between two real ends of real rings."""

from __future__ import annotations

import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve.boards import WORKER_BOARD
from shmserve.config import RingConfig
from shmserve.request import FinishReason, SamplingParams
from shmserve.rings.board import Board
from shmserve.rings.channel import Channel, RingShape
from shmserve.rings.segment import names, unlink
from shmserve.token_bytes import TokenBytes
from shmserve.wire.finish import FinishRecord, unpack_finish, unpack_message
from shmserve.wire.logprobs import FLAG_RUN, TOP_DTYPE
from shmserve.wire.submit import Submit, pack_submit
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES, SubmitKind, pack_control
from shmserve.wire.tokens import (
    FLAG_LAST_IS_STOP,
    TOKEN_SLOT_BYTES,
    TOKENS_DTYPE,
    TokenKind,
    token_key,
)
from shmserve.worker.emission_log import EmissionLog
from shmserve.worker.engine import Engine
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.simulated_runner import SimulatedRunner
from shmserve.worker.stopping import StopConditions

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:  # checkpoints.py
    sys.path.insert(0, HERE)

EOS = 1
SPECIAL_IDS = (0, 1, 2)
VOCAB_SIZE = 29
TOY_BYTES = TokenBytes.from_list(
    [b"<unk>", b"<eos>", b"<pad>"] + [bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz"]
)
_numbers = itertools.count()


class FrontEnd:
    """The other side of one channel. It reads what it likes, when it likes, and holds the worker to the laws of the wire."""

    def __init__(self, channel: Channel) -> None:
        self.http = channel.http
        self.channel = channel
        self.submit_ring = channel.submit.producer()
        self.token_ring = channel.tokens.consumer()
        self.is_ready = False
        self.submitted: list[int] = []
        self.started: dict[int, FinishRecord] = {}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.times_ns: dict[int, list[int]] = defaultdict(list)
        self.messages: dict[int, str] = defaultdict(str)
        self.finished: dict[int, FinishRecord] = {}
        self.last_is_stop: set[int] = set()
        self.top: dict[tuple[int, int], list[int]] = {}
        self.prompt: dict[int, list[tuple[list[int], list[float]]]] = {}
        self.num_slots = 0
        self.kinds: list[TokenKind] = []

    def submit(self, req_id: int, prompt=(3, 4, 5), **params) -> int:
        """Write a SUBMIT; the test fails if the ring has no room for it."""
        params.setdefault("max_tokens", 4)
        params.setdefault("seed", req_id)
        request = Submit(req_id, np.array(prompt, np.int32), SamplingParams(**params))
        assert self.submit_ring.try_write(*pack_submit(request))
        self.submitted.append(req_id)
        return req_id

    def control(self, kind: SubmitKind, req_id: int) -> None:
        assert self.submit_ring.try_write(pack_control(kind, req_id, time_ns=1), 1)

    def send_raw(self, slots: bytes) -> None:
        assert self.submit_ring.try_write(slots, len(slots) // SUBMIT_SLOT_BYTES)

    def read(self, most: int = 1 << 30) -> int:
        """Handle up to `most` announced token slots; how many there were."""
        count = min(self.token_ring.poll(), most)
        for _ in range(count):
            self._handle(bytes(self.token_ring.peek(0)))
            self.token_ring.release(1)
        self.num_slots += count
        return count

    def _handle(self, slot: bytes) -> None:
        req_id, kind = token_key(slot), TokenKind(slot[20])
        self.kinds.append(kind)
        if kind is TokenKind.READY:
            assert not self.is_ready
            self.is_ready = True
            return
        assert self.is_ready, "a record before READY"
        assert req_id not in self.finished, f"{kind.name} behind the FINISH of {req_id:x}"
        if kind is TokenKind.STARTED:
            assert req_id not in self.started
            self.started[req_id] = unpack_finish(slot)
        elif kind is TokenKind.TOKENS:
            self._take_tokens(req_id, np.frombuffer(slot, TOKENS_DTYPE)[0])
        elif kind is TokenKind.TOP_LOGPROBS:
            record = np.frombuffer(slot, TOP_DTYPE)[0]
            assert record["index"] >= len(self.tokens[req_id]), "they stand before their TOKENS"
            top = self.top.setdefault((req_id, int(record["index"])), [])
            top += record["token_ids"][: record["count"]].tolist()
        elif kind is TokenKind.PROMPT_LOGPROBS:
            self._take_prompt(req_id, np.frombuffer(slot, TOP_DTYPE)[0])
        elif kind is TokenKind.MESSAGE:
            self.messages[req_id] += unpack_message(slot)
        else:
            assert kind is TokenKind.FINISH
            record = self.finished[req_id] = unpack_finish(slot)
            is_error = record.finish == FinishReason.ERROR
            assert is_error == (req_id in self.messages), (
                "an error, and only an error, is explained"
            )
            assert is_error or record.completion_tokens == len(self.tokens[req_id])

    def _take_prompt(self, req_id: int, record: np.void) -> None:
        """`prompt[req_id][i]` becomes (ids, logprobs) of token i + 1 of the prompt: its own, then the most likely."""
        assert req_id in self.started and not self.tokens[req_id], "not between STARTED and tokens"
        said, count = self.prompt.setdefault(req_id, []), int(record["count"])
        pairs = record["token_ids"][:count].tolist(), record["logprobs"][:count].tolist()
        if record["flags"] & FLAG_RUN:
            assert record["index"] == len(said) + 1, "a hole"
            said += [([token], [value]) for token, value in zip(*pairs, strict=True)]
        elif record["index"] == len(said) + 1:
            said.append(pairs)
        else:
            assert record["index"] == len(said), "a hole"
            for ours, more in zip(said[-1], pairs, strict=True):
                ours += more

    def _take_tokens(self, req_id: int, record: np.void) -> None:
        assert req_id in self.started, "tokens before STARTED"
        assert req_id not in self.last_is_stop, "tokens behind the one that ended it"
        assert record["index"] == len(self.tokens[req_id]), "a hole"
        assert record["count"]
        self.tokens[req_id] += record["token_ids"][: record["count"]].tolist()
        later_us = [0, *record["dt_us"][1 : record["count"]].tolist()]
        self.times_ns[req_id] += [int(record["time_ns"]) + 1000 * dt for dt in later_us]
        if record["flags"] & FLAG_LAST_IS_STOP:
            self.last_is_stop.add(req_id)


class LateRunner:
    """The rig's runner as one whose steps are launched ahead: it computes a step when it is collected, and holds the engine to
    the law that until then nobody else has its rows."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.info = rig.runner.info
        self._flights: list[tuple] = []

    def can_carry(self, rows, sampling) -> bool:
        return not sampling.is_edited(rows).any()

    def launch(self, batch, sampling, carried=None) -> None:
        assert len(self._flights) < 2
        owners = [self._rig.scheduler.by_row[row] for row in batch.rows.tolist()]
        blocks = [list(owner.blocks) for owner in owners]
        self._flights.append((batch, sampling, owners, blocks))

    def collect(self):
        batch, sampling, owners, blocks = self._flights.pop(0)
        assert owners == [self._rig.scheduler.by_row[row] for row in batch.rows.tolist()]
        assert all(len(o.blocks) >= len(b) for o, b in zip(owners, blocks, strict=True))
        return self._rig.runner.run(batch, sampling)

    def close(self) -> None:
        self._rig.runner.close()


class Rig:
    """An engine with a simulated runner that does not sleep, and a front end for each of its channels.

    `under_forward` runs once, inside the next forward pass. `made` is what the runner made: (req_id, index) -> (token, time).
    """

    def __init__(
        self,
        instance: str,
        *,
        num_http: int = 1,
        token_slots: int = 64,
        submit_slots: int = 64,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        num_blocks: int = 33,
        block_size: int = 4,
        max_model_len: int = 64,
        script: dict[int, list[list[int]]] | None = None,
        log_path: Path | None = None,
        is_overlapped: bool = False,
        **rings,
    ) -> None:
        self.instance = instance
        self.under_forward: Callable[[], None] | None = None
        self.made: dict[tuple[int, int], tuple[int, int]] = {}
        self.runner = SimulatedRunner(
            TOY_BYTES,
            SPECIAL_IDS,
            EOS,
            step_ms=0.001,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            script=script,
            wait_until=self._wait_until,
        )
        self.scheduler = Scheduler(
            self.runner.info,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_ids=(EOS,),
        )
        self._run, self.runner.run = self.runner.run, self._run_and_note
        self.board = Board.create(Board.name(instance, 1, "worker", 0), WORKER_BOARD, 1)
        self.engine = Engine(
            LateRunner(self) if is_overlapped else self.runner,
            self.scheduler,
            StopConditions(TOY_BYTES, SPECIAL_IDS),
            RingConfig(token_slots=token_slots, submit_slots=submit_slots, **rings),
            self.board,
            EmissionLog(str(log_path)) if log_path else None,
        )
        self._shapes = (
            RingShape(SUBMIT_SLOT_BYTES, submit_slots),
            RingShape(TOKEN_SLOT_BYTES, token_slots),
        )
        self.fronts = [self.open(http) for http in range(num_http)]

    @property
    def front(self) -> FrontEnd:
        return self.fronts[0]

    def open(self, http: int, epoch: int = 1) -> FrontEnd:
        """A channel between a new front end `http` and the engine."""
        ours = Channel.create(self.instance, epoch, http, 0, *self._shapes)
        fds = [os.dup(fd) for fd in ours.fds()]
        self.engine.open_channel(Channel.from_fds(self.instance, epoch, http, 0, fds))
        return FrontEnd(ours)

    def _wait_until(self, due_ns: int) -> None:
        hook, self.under_forward = self.under_forward, None
        if hook is not None:
            hook()

    def _run_and_note(self, batch, sampling):
        output = self._run(batch, sampling)
        for i, index in enumerate(batch.sample_seqs.tolist()):
            row = int(batch.rows[index])
            at = int(sampling.position[row])
            count = 1 if output.counts is None else int(output.counts[i])
            for k in range(count):
                key = (int(self.scheduler.columns.req_id[row]), at + k)
                self.made[key] = (int(output.token_ids[i, k]), output.time_ns)
        return output

    def step(self) -> bool:
        """One iteration of the engine, and all conservation laws of the scheduler after it."""
        has_computed = self.engine.step()
        self.scheduler.check()
        return has_computed

    def run_dry(self, most: int = 2000) -> None:
        """Step and read until nothing happens any more."""
        for _ in range(most):
            has_computed = self.step()
            num_read = sum(front.read() for front in self.fronts)
            if not has_computed and not num_read:
                return
        raise AssertionError(f"still not dry after {most} steps")

    def expected(self, req_id: int, count: int) -> list[int]:
        """The first `count` tokens that the runner made for `req_id`."""
        return [self.made[req_id, index][0] for index in range(count)]

    def assert_idle(self) -> None:
        """Nothing of any request is left in the worker."""
        assert self.scheduler.blocks.num_used == 0
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.scheduler.columns.num_free_rows == self.scheduler.max_num_seqs

    def close(self) -> None:
        for front in self.fronts:
            self.engine.close_channel(front.http)
            front.channel.unlink()
            front.channel.close()
        self.board.segment.unlink()
        self.board.close()
        self.engine.close()


@pytest.fixture(scope="session")
def new_rig() -> Callable[..., Rig]:
    """Makes a Rig under a name of its own; the caller closes it. For hypothesis, whose examples outlive a fixture."""

    def make(**options) -> Rig:
        return Rig(f"test{os.getpid()}-engine{next(_numbers)}", **options)

    return make


@pytest.fixture
def rig(new_rig: Callable[..., Rig]) -> Iterator[Callable[..., Rig]]:
    """Makes Rigs that are closed at the end of the test, which fails if one leaves a segment behind."""
    made: list[Rig] = []

    def make(**options) -> Rig:
        made.append(new_rig(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()
    left = [name for each in made for name in names(f"shmserve.{each.instance}")]
    for name in left:
        unlink(name)
    assert left == []
