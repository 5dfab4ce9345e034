"""Keys of clients and of the operator, as digests: nobody but the one that reads a flag ever holds a key.

Owns: the way from a key, or a file of keys, to SHA-256 digests, and the comparison. Never: keeps or shows a key. Digests are what
travels over the control link and what lies in the children's memory; a key of 128 random bits cannot be found from one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from shmserve.config import ConfigError

MOST_KEY_CHARACTERS = 512


def digest_of_key(flag: str, key: str) -> str:
    """The digest as hex. Raises ConfigError for what no header could carry; the text does not hold the key."""
    if not 1 <= len(key) <= MOST_KEY_CHARACTERS or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"{flag} must be 1 to {MOST_KEY_CHARACTERS} visible ASCII characters (its value is not shown)"
        )
    if " " in key:
        raise ConfigError(f"{flag} must not contain blanks (its value is not shown)")
    return hashlib.sha256(key.encode()).hexdigest()


def digests_of_file(flag: str, path: str) -> tuple[str, ...]:
    """The digests of the keys in a file, one a line; empty lines and those that begin with # are none. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{flag} {path}: {reason}") from None
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"{flag} {path}: it holds no key")
    return tuple(digest_of_key(f"a key in {flag} {path}", key) for key in keys)


def is_among(candidate: bytes, digests: Sequence[bytes]) -> bool:
    """True if `candidate` is a key of one of `digests` (raw). Takes as long whichever it is, and whether it is one or none."""
    digest = hashlib.sha256(candidate).digest()
    found = False
    for each in digests:
        found |= hmac.compare_digest(each, digest)
    return found
