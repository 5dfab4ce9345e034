"""The supervisor's rounds: is every child well, once a second, and at once when the kernel says that one was stopped or goes on.

Owns: when it looked last, and what follows from a verdict of health.py: who is killed, what the operator is told, the state of the post.
Never: buries or replaces anybody (crew.py does). Supervisor only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

from shmserve.children import Child
from shmserve.health import examine
from shmserve.loop import Loop
from shmserve.posts import Post
from shmserve.progress import Reporter

EVERY_S: Final = 1.0
AGAIN_S: Final = 0.6
"""So long behind the first look at one who is silent comes the second: who is alive has beaten by then (boards.IDLE_HEARTBEAT_S)."""
_OVERSLEPT_NS: Final = 3_000_000_000


class SetState(Protocol):
    """Notes the state of a post, and tells whoever must know."""

    def __call__(self, post: Post, state: str, reason: str = "") -> None: ...


class HealthRounds:
    """Over `posts`. `keep_watch` begins."""

    def __init__(
        self,
        posts: Sequence[Post],
        hang_timeout_s: float,
        *,
        loop: Loop,
        reporter: Reporter,
        set_state: SetState,
    ) -> None:
        self._posts = posts
        self._hang_timeout_s = hang_timeout_s
        self._loop = loop
        self._report = reporter
        self._set_state = set_state
        self._last_ns = time.monotonic_ns()

    def keep_watch(self) -> None:
        """Look at everybody, now and every second from now on."""
        now = time.monotonic_ns()
        if now - self._last_ns > _OVERSLEPT_NS:
            # This process was stopped itself, perhaps with all the others (Ctrl-Z): their ages mean nothing.
            for post in self._posts:
                if post.child is not None:
                    post.child.grace_ns = now
        self._last_ns = now
        for post in self._posts:
            if post.child is not None:
                self.judge(post, post.child)
        self._loop.after(EVERY_S, self.keep_watch)

    def judge(self, post: Post, child: Child) -> None:
        """Look at one."""
        now = time.monotonic_ns()
        verdict = examine(child.vitals(), now, self._hang_timeout_s)
        if verdict.is_silence and not self._is_confirmed(post, child, now):
            return
        if not verdict.is_silence:
            child.silent_since_ns = 0
        if verdict.must_end:
            child.kill(verdict.reason, verdict.state)
        if verdict.state == "ok":
            if post.state in ("stopped", "hung"):
                self._report.say(f"{child.name} (pid {child.pid}) goes on", is_warning=True)
            self._set_state(post, "ready" if child.is_ready else "loading")
            return
        if post.state != verdict.state:
            news = f"{child.name} (pid {child.pid}) is {verdict.state}: {verdict.reason}"
            self._report.say(news, is_warning=True)
        self._set_state(post, verdict.state, verdict.reason)

    def _is_confirmed(self, post: Post, child: Child, now_ns: int) -> bool:
        """Whether one who is silent now was so at a look before. At the first, the second is arranged."""
        if not child.silent_since_ns:
            child.silent_since_ns = now_ns
            self._loop.after(AGAIN_S, lambda: self._look_again(post, child))
        return now_ns - child.silent_since_ns >= AGAIN_S * 1e9

    def _look_again(self, post: Post, child: Child) -> None:
        if post.child is child:
            self.judge(post, child)
