"""The hot path: token records from one channel's ring to sockets.

Owns: the token ring's reading end. Never: wakes a task for a token of a stream that keeps up, builds an object per token, or
runs more than K = 256 records (about 2 ms) without giving the event loop a turn.

A plain token (one whole-character token that touches no stop string of its stream, whose transport has nothing buffered) becomes a
frame by one join and is sent from here, with its logprobs by `logprob_send.py`, in a frame that its format makes by `made_send.py`;
everything else goes the slow way, through `InFlight.on_tokens`.
Times are collected in arrays (`hop_times.py`), which go into the board's histograms a few thousand tokens at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shmserve.http.direct import DirectTable
from shmserve.http.errors import ApiError
from shmserve.http.hop_times import HopTimes
from shmserve.http.in_flight import InFlight
from shmserve.http.logprob_send import LogprobSender
from shmserve.http.made_send import MadeSender
from shmserve.http.record_checks import (
    MOST_MESSAGE_CHARACTERS,
    check_finish,
    check_pairs,
    tokens_of,
)
from shmserve.http.step_send import StepSender
from shmserve.request import FinishReason
from shmserve.rings.board import Board
from shmserve.rings.channel import Ring
from shmserve.rings.layout import W_WRITE_CURSOR
from shmserve.rings.spsc import RingProtocolError
from shmserve.wire.errors import WireError
from shmserve.wire.finish import unpack_finish, unpack_message
from shmserve.wire.tokens import (
    FLAG_LAST_IS_STOP,
    ONE_TOKEN,
    TOKEN_SLOT_BYTES,
    TokenKind,
    token_key,
)

log = logging.getLogger(__name__)

RECORDS_PER_TURN: Final = 256
MOST_BAD_RECORDS: Final = 16
"""A worker of which so many records of one channel could not be read is started anew."""

# kind, count, finish and flags as one number, so that one comparison tells a plain token. An id below 0 is one far above the
# vocabulary.
_COLUMNS: Final = np.dtype(
    {
        "names": ["req_id", "time_ns", "meta", "token_id", "delay_us"],
        "formats": ["<u8", "<u8", "<u4", "<u4", "<u4"],
        "offsets": [0, 8, 20, 32, 64],
        "itemsize": TOKEN_SLOT_BYTES,
    }
)


class Pump:
    """Reads one token ring. `entries` is the front end's table by req_id, `table` its columns by place; `on_finish` forgets an entry."""

    def __init__(
        self,
        ring: Ring,
        entries: dict[int, InFlight],
        table: DirectTable,
        board: Board,
        times: HopTimes,
        on_finish: Callable[[InFlight], None],
        on_broken: Callable[[str], None],
        vocab_size: int,
        step_sender: StepSender | None = None,
    ) -> None:
        self.num_stale = 0
        self.num_bad = 0
        self._ring = ring
        self._consumer = ring.consumer()
        self._words = ring.segment.words()
        self._entries = entries
        self._table = table
        self._board = board
        self._on_finish = on_finish
        self._on_broken = on_broken
        self._vocab_size = vocab_size
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False
        self._is_broken = False  # the counter lied: what it announced may be anything
        self._messages: dict[int, str] = {}
        self._times = times
        self._step_sender = step_sender
        self._logprob_sender = LogprobSender(table, times)
        self._made_sender = MadeSender(table, self._give_up)
        self._popped_ns = 0  # when the batch was read that is handled now
        self._w_frames = board.cell("frames")
        self._w_tokens = board.cell("tokens")
        self._loop.add_reader(ring.data.fd, self._on_readable)

    def close(self) -> None:
        """Handle every announced record, then let go of the ring's counter. The segment is the channel's to close."""
        self._loop.remove_reader(self._ring.data.fd)
        try:
            if not self._is_broken:
                self._consumer.poll()
                while self._consumer.owed:
                    self._take(RECORDS_PER_TURN)
            self._times.fold()
        except RingProtocolError as error:
            log.error("token ring %s: %s", self._ring.segment.name, error)
        except Exception as error:  # a fault of ours: whoever waits is told all the same
            self._note_fault(error, "could not be read to its end")
        self._is_scheduled = False

    @property
    def is_behind(self) -> bool:
        """True while records are in the ring. An indication (it reads the cursor for observers), and enough to give way."""
        return self._words[W_WRITE_CURSOR] != self._consumer.read_cursor

    def _on_readable(self) -> None:
        try:
            self._consumer.poll()
        except RingProtocolError as error:
            self._break_off(error)
            return
        if not self._is_scheduled:
            self._turn()

    def _break_off(self, error: Exception) -> None:
        self._is_broken = True
        self._is_scheduled = False
        self._loop.remove_reader(self._ring.data.fd)
        self._on_broken(str(error))

    def _turn(self) -> None:
        self._is_scheduled = False
        try:
            self._take(RECORDS_PER_TURN)
        except RingProtocolError as error:
            self._break_off(error)
            return
        except Exception as error:  # a fault of ours: better an end than streams that wait for ever
            self._note_fault(error, "could not be read on")
            self._break_off(error)
            return
        if self._consumer.owed and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn_again)

    def _note_fault(self, error: Exception, what: str) -> None:
        log.exception("token ring %s %s", self._ring.segment.name, what)
        traceback.clear_frames(error.__traceback__)  # they hold views of the segment
        self._times.drop()

    def _turn_again(self) -> None:
        if self._is_scheduled:
            self._turn()

    def _take(self, most: int) -> None:
        consumer = self._consumer
        view = consumer.view(most)
        count = len(view) // TOKEN_SLOT_BYTES
        if not count:
            return
        self._popped_ns = popped = time.monotonic_ns()
        records = np.frombuffer(view, _COLUMNS)
        table = self._table
        ids = records["req_id"]
        slots = ids & table.mask
        # Plain tokens of requests that are in the table under this very id; all else is looked at one by one.
        is_plain = (records["meta"] == ONE_TOKEN) & (table.owner[slots] == ids)
        together = self._step_sender.count_together(slots) if self._step_sender is not None else 0
        if together:
            count = together  # the rest is the next step's
            records, slots, is_plain = records[:count], slots[:count], is_plain[:count]
        # A copy: a traceback that somebody keeps would keep a view, and the channel could not be closed.
        token_ids = records["token_id"].copy()
        written: list[int] = []  # indices, in the order of their frames
        left: Sequence[int] = range(count)
        if together and self._step_sender is not None:
            sent, left = self._step_sender.send(slots, is_plain, token_ids)
            written = sent.tolist()
        if table.num_logprob_paths:
            sent_alone, left = self._logprob_sender.send(view, slots, ids[:count], left)
            written += sent_alone
        made: list[int] = []
        words = self._board.words
        if table.num_made_paths:
            made, num_made, left = self._made_sender.send(view, slots, ids[:count], left, popped)
            words[self._w_frames] += num_made
        skipped, slow_tokens = self._one_by_one(view, left, slots, is_plain, token_ids, written)
        if made:
            skipped += made
            slow_tokens += len(made)
        num_direct = len(written)
        words[self._w_tokens] += num_direct + slow_tokens
        if num_direct:
            words[self._w_frames] += num_direct
            # In the order of their frames, which is not the ring's where they were written in two ways.
            if num_direct < count or 0 < len(left) < count or table.num_logprob_paths:
                records, slots = records[written], slots[written]
            places = slots if self._times.intervals is not None else None
            self._times.note_turn(
                records["time_ns"].copy(), records["delay_us"].copy(), popped, num_direct, places
            )
        if slow_tokens:
            self._times.note_slots(view, skipped, popped)
        del records, ids
        view.release()
        consumer.release(count)

    def _one_by_one(
        self,
        view: memoryview,
        chosen: Sequence[int],
        slots: npt.NDArray[np.uint64],
        is_plain: npt.NDArray[np.bool_],
        token_ids: npt.NDArray[np.uint32],
        written: list[int],
    ) -> tuple[list[int], int]:
        """Handle the chosen records; `written` gets those that were plain. (The others, how many tokens were in them.)"""
        now = time.monotonic_ns
        paths, written_ns = self._table.paths, self._table.written_ns
        add_written, add_itl = self._times.written.append, self._times.itl_wire.append
        skipped: list[int] = []
        slow_tokens = 0
        if not chosen:
            return skipped, slow_tokens
        if len(chosen) < len(slots):
            slots, is_plain, token_ids = slots[chosen], is_plain[chosen], token_ids[chosen]
        for i, slot, plain, token_id in zip(
            chosen, slots.tolist(), is_plain.tolist(), token_ids.tolist(), strict=True
        ):
            if plain and (path := paths[slot]) is not None:
                lines, fixed, front, back, pieces, send, spill, _ = path
                try:
                    piece = pieces[token_id]
                except IndexError:  # no token of ours: refused below
                    piece = b""
                if piece:
                    frame = b"".join((lines[fixed + len(piece)], front, piece, back))
                    try:
                        sent = send(frame)
                    except BlockingIOError:
                        sent = 0
                    except OSError:
                        sent = -1
                    at = now()
                    add_written(at)
                    add_itl(at - written_ns[slot])
                    written_ns[slot] = at
                    written.append(i)
                    if sent != len(frame):
                        spill(frame, sent)
                    continue
            slow_tokens += self._guarded(
                view[i * TOKEN_SLOT_BYTES : (i + 1) * TOKEN_SLOT_BYTES].tobytes()  # a copy, too
            )
            skipped.append(i)
        return skipped, slow_tokens

    def _guarded(self, slot: bytes) -> int:
        """`_slow` for the request of a record, if there is one, and whatever goes wrong in it ends this request only."""
        req_id = token_key(slot)
        entry = self._entries.get(req_id)
        if entry is None:
            self.num_stale += req_id != 0  # READY has no request
            return 0
        try:
            return self._slow(entry, slot)
        except WireError as error:
            log.error("request %016x: a record of it cannot be: %s", entry.req_id, error)
            self._count_bad()
        except Exception:  # the fault may be ours
            log.exception("request %016x: its record could not be handled", entry.req_id)
        self._give_up(entry)
        if slot[20] == TokenKind.FINISH:  # no other will come
            self._messages.pop(req_id, None)
            self._on_finish(entry)
        return 0

    def _give_up(self, entry: InFlight) -> None:
        entry.link.abort(entry)
        entry.fail(ApiError(500, "The server could not handle the model's output."))

    def _slow(self, entry: InFlight, slot: bytes) -> int:
        """Any record that is not a plain token on a stream that keeps up; the number of tokens in it."""
        kind = slot[20]
        if kind == TokenKind.TOKENS:
            ids = tokens_of(slot, self._vocab_size)
            is_first = not entry.has_tokens
            entry.popped_ns = self._popped_ns
            if is_first:
                entry.has_tokens = True
                entry.first_popped_ns = self._popped_ns
            entry.token_ids += ids
            entry.was_stop_token = bool(slot[23] & FLAG_LAST_IS_STOP)
            if entry.logprobs is not None:
                entry.logprobs.add_tokens(slot)
            if entry.timing is not None:
                entry.timing.came(slot, len(ids), self._popped_ns)
            if entry.passed is not None:
                entry.passed.came(slot, len(ids))
            if entry.on_tokens is not None:
                entry.on_tokens(entry)
            elif is_first:
                entry.signal.set()
            return len(ids)
        if kind == TokenKind.STARTED:
            started = unpack_finish(slot)
            check_finish(started, time.monotonic_ns())
            entry.started = started  # wakes nobody: see SseStream._first_word
            entry.link.started(entry)
        elif kind == TokenKind.TOP_LOGPROBS and entry.logprobs is not None:
            check_pairs(slot, self._vocab_size)
            entry.logprobs.add_top(slot)
        elif kind == TokenKind.PROMPT_LOGPROBS and entry.logprobs is not None:
            check_pairs(slot, self._vocab_size)
            entry.logprobs.add_prompt(slot)
        elif kind == TokenKind.MESSAGE:
            message = self._messages.get(entry.req_id, "") + unpack_message(slot)
            self._messages[entry.req_id] = message[:MOST_MESSAGE_CHARACTERS]
        elif kind == TokenKind.FINISH:
            entry.direct = None
            record_ = unpack_finish(slot)
            check_finish(record_, time.monotonic_ns())
            message = self._messages.pop(entry.req_id, "")
            if record_.finish == FinishReason.ERROR:
                entry.error = ApiError(
                    500, message or "The worker ended the request.", code="engine_error"
                )
            entry.finish = record_
            self._on_finish(entry)
            entry.signal.set()
        else:
            raise WireError(f"a record of kind {kind}")
        return 0

    def _count_bad(self) -> None:
        self.num_bad += 1
        self._board.add("num_bad_records")
        if self.num_bad == MOST_BAD_RECORDS:
            self._on_broken(f"{self.num_bad} of its records could not be read")
