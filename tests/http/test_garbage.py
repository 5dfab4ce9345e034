"""Full collections of the front end: never of themselves, at once when nobody streams. In a process of its own: the collector is one."""

import subprocess
import sys

SCRIPT = """
import gc, weakref
from shmserve.http.garbage import Garbage

class Node:
    pass

def old_cycle():
    node = Node()
    node.itself = node
    gc.collect(0)
    gc.collect(1)  # both pass it on
    return weakref.ref(node)

garbage = Garbage()
assert gc.get_freeze_count() > 0
found = old_cycle()
kept = [[at] for at in range(200_000)]
assert found() is not None, "a full collection came of itself"
garbage.look(is_idle=False)
assert found() is not None, "streams were held up"
garbage.look(is_idle=True)
assert found() is None, "nobody streamed, and it stayed"
found = old_cycle()
garbage._done_s -= 61
garbage.look(is_idle=False)
assert found() is None, "it stayed for over a minute"
"""


def test_full_collections_wait_until_nobody_streams_or_a_minute_is_over() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
