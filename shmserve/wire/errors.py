"""What both rings' readers raise."""

from __future__ import annotations


class WireError(ValueError):
    """A record from the other side that cannot be: counted, and the request or the channel ends."""
