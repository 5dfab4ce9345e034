"""One request of the soak: sent over a bare socket, read, left or forgotten as its plan says, and told of as one Outcome.

Owns: the ways in which a client behaves, good and bad ones. Never: retries, or judges whether an end was deserved (`soak_faults.py` does). One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Final

from soak_answer import Answer, BadAnswerError

PATIENCE_S: Final = 90.0
"""Longer than anything may take: who has no answer by then has none."""
RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: the close is a reset
NARROW_BYTES: Final = 4_096  # the receive buffer of a client that will be stuck
READ_BYTES: Final = 65_536
ABORT: Final = "/abort_request"

# How a client leaves before its answer is whole; in the first two ways the server has no request to count.
SILENT_WAYS: Final = ("connect", "half a head")
LEAVING_WAYS: Final = (*SILENT_WAYS, "head", "at once", "soon", "first bytes", "half closed")
STAYING_WAYS: Final = ("read", "stuck", "read head only")


@dataclass(frozen=True, slots=True)
class Plan:
    """One request: what it asks, how its client behaves, and what the whole text of its answer is."""

    path: str
    body: dict[str, Any]
    text: str = ""
    way: str = "read"
    soon_s: float = 0.0  # when it leaves
    stuck_s: float = 0.0  # how long it reads nothing, from the first bytes on
    is_reset: bool = False  # it leaves by a reset
    aborted_after_s: float = 0.0  # when somebody aborts it by its id; 0: nobody does
    expected_code: str = ""  # of the error that must be its answer

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_completion(self) -> bool:
        return self.path != ABORT

    @property
    def is_counted(self) -> bool:
        """The server takes it for a request."""
        return self.way not in SILENT_WAYS

    def request(self) -> bytes:
        body = json.dumps(self.body).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(slots=True)
class Outcome:
    """How one request ended.

    end        whole     a 200, to its end, and its text is right
               error     a 200 whose last event says why it could not go on
               refused   another status
               broken    the connection ended before the answer did
               left      its client went, as planned
               late      nothing for PATIENCE_S
               wrong     an answer that no client could read, or a text that is another's; `fault` says what
    """

    plan: Plan
    begin_s: float
    end: str = ""
    end_s: float = 0.0
    status: int = 0
    code: str = ""
    fault: str = ""
    num_tokens: int = 0
    num_events: int = 0  # that carry a choice: all but usage, errors and [DONE]
    stop_reason: str = ""
    ttft_s: float = 0.0


async def ask(port: int, plan: Plan) -> Outcome:
    """Send and read one request as planned. Raises nothing: whatever happens is an Outcome."""
    outcome = Outcome(plan, time.monotonic())
    answer = Answer()
    sock = socket.socket()
    sock.setblocking(False)
    if plan.way in ("stuck", "read head only"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BYTES)
    try:
        async with asyncio.timeout(PATIENCE_S):
            has_left = await _exchange(port, plan, sock, answer, outcome)
        _judge(outcome, answer, has_left)
    except TimeoutError:
        outcome.end = "late"
    except ConnectionRefusedError:
        outcome.end, outcome.fault = "wrong", "the port refused a connection"
    except ConnectionError:
        outcome.end = "left" if plan.way in LEAVING_WAYS else "broken"
        _judge_text(outcome, answer)
    except BadAnswerError as error:
        outcome.end, outcome.fault = "wrong", str(error)
    finally:
        if plan.is_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        sock.close()
        outcome.end_s = time.monotonic()
        outcome.status = answer.status
    return outcome


async def _exchange(
    port: int, plan: Plan, sock: socket.socket, answer: Answer, outcome: Outcome
) -> bool:
    """The connection, up to the planned moment; True if the client leaves there."""
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    request = plan.request()
    if plan.way == "connect":
        return True
    if plan.way == "half a head":
        await loop.sock_sendall(sock, request[:40])
        return True
    if plan.way == "head":
        await loop.sock_sendall(sock, request[: request.index(b"\r\n\r\n") + 4])
        return True
    await loop.sock_sendall(sock, request)
    if plan.way == "half closed":
        await asyncio.sleep(plan.soon_s)
        with contextlib.suppress(OSError):  # the server has died, and its reset came first
            sock.shutdown(socket.SHUT_WR)
        return True
    if plan.way in ("at once", "soon"):
        await asyncio.sleep(plan.soon_s if plan.way == "soon" else 0)
        return True
    while not answer.is_over:
        data = await loop.sock_recv(sock, NARROW_BYTES if plan.stuck_s else READ_BYTES)
        if not data:
            raise ConnectionResetError("closed by the server")
        if not outcome.ttft_s:
            outcome.ttft_s = time.monotonic() - outcome.begin_s
            answer.feed(data)
            if plan.way in ("stuck", "read head only"):
                await asyncio.sleep(plan.stuck_s)
            if plan.way == "read head only":
                return True
            if plan.way == "first bytes":
                await asyncio.sleep(plan.soon_s)
                return True
            continue
        answer.feed(data)
    return False


def _judge(outcome: Outcome, answer: Answer, has_left: bool) -> None:
    error = {} if has_left else answer.error()
    outcome.code = str(error.get("code") or "")
    if has_left:
        outcome.end = "left"
    elif answer.status != 200:
        outcome.end = "refused"
        is_retriable = answer.status == 503 and outcome.code != "aborted"
        if is_retriable and not answer.headers.get("retry-after", "").isdecimal():
            raise BadAnswerError(f"a 503 ({outcome.code}) without Retry-After")
    else:
        outcome.end = "error" if error else "whole"
    _judge_text(outcome, answer)


def _judge_text(outcome: Outcome, answer: Answer) -> None:
    """Whatever came is the beginning of the right text, and a whole answer is all of it, or was ended by its time."""
    if answer.status != 200 or not outcome.plan.is_completion:
        return
    text, end, usage = answer.result()
    plan = outcome.plan
    outcome.num_events = sum(bool(event.get("choices")) for event in answer.events)
    outcome.num_tokens = int(usage.get("completion_tokens", 0))
    outcome.stop_reason = str(end.get("stop_reason") or "")
    is_cut = outcome.end != "whole" or outcome.stop_reason == "timeout"
    # The end of a text that is cut within a character is that mark.
    is_right = plan.text.startswith(text.rstrip("\ufffd")) if is_cut else text == plan.text
    if not is_right:
        at = next((i for i, (a, b) in enumerate(zip(text, plan.text, strict=False)) if a != b), -1)
        outcome.end = "wrong"
        outcome.fault = f"{len(text)} characters, {len(plan.text)} are right; they differ at {at}"
    elif outcome.end == "whole" and not end.get("finish_reason"):
        outcome.end, outcome.fault = "wrong", "no finish_reason"


async def get(port: int, path: str, timeout_s: float = PATIENCE_S) -> Answer:
    """The answer to a GET. Raises ConnectionError, TimeoutError and BadAnswerError."""
    return await _whole(port, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode(), timeout_s)


async def first_answer(port: int, plan: Plan) -> Answer:
    """The answer to a request whose text nobody knows yet. Raises as `get` does."""
    return await _whole(port, plan.request(), PATIENCE_S)


async def _whole(port: int, request: bytes, timeout_s: float) -> Answer:
    answer = Answer()
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, request)
            while not answer.is_over:
                data = await loop.sock_recv(sock, READ_BYTES)
                if not data:
                    raise ConnectionResetError("closed by the server")
                answer.feed(data)
    return answer


async def abort(port: int, name: str, after_s: float) -> Outcome:
    """End the request that its client called so. An abort is a request of its own."""
    await asyncio.sleep(after_s)
    return await ask(port, Plan(ABORT, {"rid": name}))
