"""What the control group of this process leaves it: memory and processor time, which in a container are less than the machine has.

Owns: the reading of cgroup version 2 and 1. Never: sets a limit, or fails: what cannot be read limits nothing. Any process; no torch.

A process is bound by its own group and by all above it. In a container its path in /proc/self/cgroup may be the host's, while what is
mounted begins with its own group: so directories of the path that are not there are passed over.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def free_memory_bytes(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """What may still be taken before a limit is met; what only caches files counts as free. None without a limit."""
    found = []
    for group in _groups("memory", mount, membership):
        stat = dict(
            line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line
        )
        if os.path.exists(group / "memory.max"):
            limit, used = _number(group / "memory.max"), _number(group / "memory.current")
            prefix = ""
        else:
            limit = _number(group / "memory.limit_in_bytes")
            used, prefix = _number(group / "memory.usage_in_bytes"), "total_"
        if limit is None or used is None:
            continue
        cached = [stat.get(f"{prefix}{kind}_file", "") for kind in ("inactive", "active")]
        used -= sum(int(number) for number in cached if number.isdecimal())
        found.append(max(0, limit - max(0, used)))
    return min(found, default=None)


def cores_of_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """So many cores' time the process may have, rounded up: threads beyond that would be stopped in turn. None without a limit."""
    found = []
    for group in _groups("cpu", mount, membership):
        words = _text(group / "cpu.max").split()
        if not words:
            words = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            found.append(max(1, math.ceil(int(words[0]) / int(words[1]))))
    return min(found, default=None)


def _groups(controller: str, mount: Path, membership: Path) -> Iterator[Path]:
    """The directories that bind this process, its own first."""
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            top = mount
        elif controller in controllers.split(","):
            top = mount / controller
        else:
            continue
        own = top / path.strip("/")
        for group in (own, *own.parents):
            if os.path.isdir(group):
                yield group
            if group == top:
                break


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""  # another version of the interface, or none
