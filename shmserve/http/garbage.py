"""When the front end looks for garbage among all of its objects: while nobody streams, or once a minute.

Owns: the interpreter's garbage collector of this process. A full collection takes 20 ms with 256 requests in flight, and held every
stream for as long, once in a few hundred requests; those of young objects go on by themselves. What waits
for a full one is at most what a minute's requests leave in cycles. Event loop's thread only.
"""

from __future__ import annotations

import gc
import time
from typing import Final

MOST_WAIT_S: Final = 60.0
YOUNG: Final = 700
"""Objects after which the young ones are looked at: 0.1 ms."""
MIDDLES: Final = 3
"""And so many times that, those that were left of them: under 2 ms. Python's own 10 took up to 9."""
_NEVER: Final = 1 << 30


class Garbage:
    """Made when all is loaded: what lives then lives until the end, and no collection looks at it again."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, MIDDLES, _NEVER)
        self._done_s = time.monotonic()

    def look(self, is_idle: bool) -> None:
        """Collect all if nobody is held up by it, or if it has waited for a minute. Called on the heartbeat."""
        if not gc.get_count()[
            2
        ]:  # no young collection has passed anything on since the last full one
            return
        now = time.monotonic()
        if is_idle or now - self._done_s >= MOST_WAIT_S:
            gc.collect()
            self._done_s = now
