"""What lies between host and device: memory that copies can read while the host goes on, copies, and marks in their stream.

Owns: the protocol `Link`, and the two that there are: `CudaLink` (pinned memory, events of the current stream) and `HostLink` (the
CPU as the device, in tests and dry runs). Never: knows what is copied. Worker's main thread only.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in the stream."""

    def wait(self) -> None:
        """Return when the stream has come to it."""


class Link(Protocol):
    """What lies between host and device."""

    @property
    def device(self) -> torch.device: ...

    def host_words(self, count: int) -> Tensor:
        """Zeroed int32 memory that copies read and write without the host's help."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Put a copy into the stream."""

    def mark(self) -> Mark: ...


class Passed:
    """A mark that the stream has come to already."""

    def wait(self) -> None:
        """All is over."""


class HostLink:
    """The CPU as the device: everything is done at once."""

    device = torch.device("cpu")

    def host_words(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return Passed()


class _Event:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaLink:
    """Pinned memory and events of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_words(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return _Event()
