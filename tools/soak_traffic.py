"""What the soak asks: a fixed book of songs, whose texts an idle server sang first, and from it a seeded stream of requests of every kind.

Owns: the mix. Each request asks for a song of the book, streamed or plain, to its end or not; whatever comes of its text must be the
beginning of what the idle server gave, so a token of another request, a lost or a doubled one is seen. Never: sends anything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Final

from soak_client import LEAVING_WAYS, Plan

WORDS: Final = (
    *("Once", "upon", "a", "time", "there", "was", "small", "town", "by", "the", "sea"),
    *("where", "nobody", "had", "ever", "seen", "clock"),
)
BAD_BODIES: Final = (
    ({"prompt": "Hi", "max_tokens": -1}, "invalid_value"),
    ({"prompt": ""}, "empty_prompt"),
    ({"prompt": "Hi", "temperature": "hot"}, "invalid_type"),
    ({"prompt": "Hi", "model": "no-such-model"}, "model_not_found"),
    ({"prompt": [1] * 5_000, "max_tokens": 1}, "context_length_exceeded"),
)


@dataclass(frozen=True, slots=True)
class Profile:
    """How much a runner can take."""

    flags: tuple[str, ...]
    num_places: int  # what runs and what waits, together
    num_at_once: int  # of the traffic that is no burst: never enough to fill the server
    rate: float  # requests a second
    lengths: tuple[int, ...]  # tokens of answers
    prompt_words: tuple[int, ...]
    stuck_tokens: int  # enough for a client that reads nothing to become congested
    num_songs: int
    token_s: float  # about, of one request among others
    wide_fields: dict[
        str, Any
    ]  # that make the events of a stuck client so large that they fill its socket
    least_minutes: float  # of a run in which everything that is expected happens


SIMULATED: Final = Profile(
    flags=("--runner=simulated", "--step-ms=5", "--max-num-seqs=32", "--max-queued-requests=32"),
    num_places=64,
    num_at_once=24,
    rate=20.0,
    lengths=(1, 3, 20, 60, 200),
    prompt_words=(1, 5, 50, 700),
    stuck_tokens=800,
    num_songs=48,
    token_s=0.01,
    wide_fields={},
    least_minutes=2.0,
)
CPU: Final = Profile(
    flags=(
        *("--runner=cpu", "--max-num-seqs=8", "--max-queued-requests=16"),
        "--kv-cache-bytes=128M",  # all of it touched within a minute: memory that is new is not new for long
    ),
    num_places=24,
    num_at_once=7,
    rate=2.0,
    lengths=(1, 3, 8, 16, 32),
    prompt_words=(1, 5, 20, 60),
    stuck_tokens=200,
    num_songs=24,
    token_s=0.2,
    wide_fields={"logprobs": 5},
    least_minutes=10.0,
)
PROFILES: Final = {"simulated": SIMULATED, "cpu": CPU}


@dataclass(slots=True)
class Song:
    """One request body without its manners, and the whole text of its answer once it is known."""

    path: str
    body: dict[str, Any]
    text: str = ""
    num_tokens: int = 0


def book(profile: Profile, seed: int) -> list[Song]:
    """The songs, the long ones for clients that get stuck at the end."""
    pick = random.Random(seed)
    songs = []
    for i in range(profile.num_songs):
        is_long = i >= profile.num_songs - 4
        words = [pick.choice(WORDS) for _ in range(pick.choice(profile.prompt_words))]
        length = profile.stuck_tokens if is_long else pick.choice(profile.lengths)
        fields: dict[str, Any] = {"max_tokens": length, "seed": i, "ignore_eos": True}
        fields["temperature"] = pick.choice((0.0, 0.8))
        if pick.random() < 0.2:
            fields["num_speculative_tokens"] = 3
        if pick.random() < 0.3 and not is_long:
            message = {"role": "user", "content": " ".join(words)}
            songs.append(Song("/v1/chat/completions", fields | {"messages": [message]}))
        else:
            songs.append(Song("/v1/completions", fields | {"prompt": " ".join(words)}))
    return songs


class Mix:
    """Draws requests. One `random.Random` of the seed decides everything: the same seed plans the same."""

    def __init__(self, profile: Profile, songs: list[Song], pick: random.Random) -> None:
        self._profile = profile
        self._songs = songs
        self._long_songs = songs[-4:]
        self._pick = pick
        self._num_named = 0

    def plain_or_streamed(self) -> Plan:
        """A request whose client stays to the end."""
        pick = self._pick
        song = pick.choice(self._songs[:-4])
        body = dict(song.body)
        if pick.random() < 0.6:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            if pick.random() < 0.2:
                body["stream_interval"] = pick.randint(2, 10)
        if pick.random() < 0.2:
            body["priority"] = pick.choice((-1, 1))
        return Plan(song.path, body, song.text)

    def any(self) -> Plan:
        """A request of any kind."""
        kinds = {"stays": 10, "leaves": 6, "late": 2, "aborted": 2, "stuck": 2, "bad": 1}
        kind = self._pick.choices(list(kinds), list(kinds.values()))[0]
        drawn: Plan = getattr(self, f"_{kind}")()
        return drawn

    def _stays(self) -> Plan:
        return self.plain_or_streamed()

    def _leaves(self) -> Plan:
        pick = self._pick
        return replace(
            self.plain_or_streamed(),
            way=pick.choice(LEAVING_WAYS),
            soon_s=pick.random() * 50 * self._profile.token_s,
            is_reset=pick.random() < 0.5,
        )

    def _late(self) -> Plan:
        plan = self._long()
        limit_ms = self._pick.choice((1, 50, 300, 1_000))
        return replace(plan, body=plan.body | {"timeout_ms": limit_ms})

    def _aborted(self) -> Plan:
        plan = self._long()
        self._num_named += 1
        after_s = 0.01 + self._pick.random() * 60 * self._profile.token_s
        name = f"soak-{self._num_named}"
        return replace(plan, body=plan.body | {"request_id": name}, aborted_after_s=after_s)

    def _stuck(self) -> Plan:
        pick = self._pick
        plan = self._long()
        rules: dict[str, Any] = {
            "stream": True,
            "on_slow_client": pick.choice(("coalesce", "block", "drop")),
        }
        if pick.random() < 0.3:
            rules["slow_client_bytes"] = 2_048
        return replace(
            plan,
            body=plan.body
            | rules
            | self._profile.wide_fields
            | {"stream_options": {"include_usage": True}},
            way=pick.choice(("stuck", "stuck", "read head only")),
            stuck_s=pick.choice((0.5, 2.0, 6.0)),
        )

    def _long(self) -> Plan:
        song = self._pick.choice(self._long_songs)
        body = dict(song.body)
        if self._pick.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Plan(song.path, body, song.text)

    def _bad(self) -> Plan:
        body, code = self._pick.choice(BAD_BODIES)
        return Plan("/v1/completions", dict(body), expected_code=code)

    def burst(self) -> list[Plan]:
        """Three times what the server holds, at once, and long enough that it is full before the first has ended."""
        least = self._profile.lengths[-2]
        plans: list[Plan] = []
        while len(plans) < 3 * self._profile.num_places:
            plan = self.plain_or_streamed()
            if plan.body["max_tokens"] >= least:
                rank = {"priority": self._pick.choice((0, 1, 2))}
                plans.append(replace(plan, body=plan.body | rank))
        return plans

    def full_house(self) -> list[Plan]:
        """Exactly what the server holds, at once: every one must be answered."""
        return [self.plain_or_streamed() for _ in range(self._profile.num_places)]
