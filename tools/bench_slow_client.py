"""Clients that stop reading beside clients that read: what the readers feel of it, what it costs in memory, and whether anything is lost.

For each policy, on the simulated runner: --readers streams alone (the base), then --stuck streams whose clients read nothing, until all
of them are congested, and the same readers beside them. Then the stuck ones read on: by coalesce and block each must get all of its text, by
drop a part of it and an error. The figures to look at are the readers' ITL with and without, as a ratio within one run.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from bench_common import (
    Bar,
    NoiseWatch,
    Row,
    end_on_sigterm,
    noise_sentence,
    percentile,
    print_bars,
    print_table,
    two_cores,
    write_json,
)
from frontend_servers import OurServer
from overload_run import rss_bytes

POLICIES = ("coalesce", "block", "drop")
COUNTERS = {
    "coalesce": "client_coalesced_tokens",
    "block": "clients_paused",
    "drop": "clients_dropped",
}
MOST_ITL_RATIO = 1.5
MOST_BYTES_PER_STUCK = 256 * 1024
RECEIVE_BUFFER = 4096
LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class Client:
    """One streamed completion over a bare socket. `came` are the times at which text came, in seconds."""

    port: int
    seed: int
    num_tokens: int
    policy: str
    sock: socket.socket = field(default_factory=socket.socket)
    data: bytearray = field(default_factory=bytearray)
    came: list[float] = field(default_factory=list)

    async def send(self, receive_buffer: int = 0) -> None:
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.sock, ("127.0.0.1", self.port))
        await loop.sock_sendall(self.sock, request(self.seed, self.num_tokens, self.policy, True))

    async def read(self) -> None:
        """To the end of the body."""
        loop = asyncio.get_running_loop()
        while not self.data.endswith(LAST_CHUNK):
            part = await loop.sock_recv(self.sock, 65536)
            if not part:
                raise SystemExit(f"the stream with seed {self.seed} was broken off")
            self.data += part
            if b"data: {" in part:
                self.came.append(time.perf_counter())
        self.sock.close()

    def events(self) -> list[dict[str, Any]]:
        lines = bytes(self.data).split(b"\n")
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]

    def text(self) -> str:
        events = self.events()
        return "".join(c["text"] for event in events for c in event.get("choices", ()))

    def error(self) -> str:
        return str(self.events()[-1].get("error", {}).get("code", ""))

    def intervals_ms(self) -> list[float]:
        return [(b - a) * 1000 for a, b in zip(self.came, self.came[1:], strict=False)]


def request(seed: int, num_tokens: int, policy: str, is_streamed: bool) -> bytes:
    fields = {"prompt": "Hi", "seed": seed, "max_tokens": num_tokens, "ignore_eos": True}
    body = json.dumps(fields | {"stream": is_streamed, "on_slow_client": policy}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def metrics(port: int) -> dict[str, float]:
    """The front end's words by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = re.findall(
        r'^shmserve_(\w+?)(?:_total)?\{process="(?:http0|worker0)"\} (\S+)', text, re.M
    )
    return {name: float(value) for name, value in found}


async def read_all(clients: list[Client]) -> list[float]:
    """Start and read these clients to their ends; their intervals in ms."""
    await asyncio.gather(*(client.send() for client in clients))
    await asyncio.gather(*(client.read() for client in clients))
    return [each for client in clients for each in client.intervals_ms()]


async def until(port: int, name: str, value: float, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while (now := (await asyncio.to_thread(metrics, port)).get(name, 0)) < value:
        if time.monotonic() >= deadline:
            raise SystemExit(f"waited {patience_s:g} s in vain for {name} {value:g}, it is {now:g}")
        await asyncio.sleep(0.2)


async def measure(
    server: OurServer, policy: str, num_stuck: int, num_readers: int, num_tokens: int
) -> Row:
    """One policy."""
    port = server.port

    def readers(first: int) -> list[Client]:
        return [Client(port, first + i, num_tokens, policy) for i in range(num_readers)]

    await read_all(readers(0))  # warm
    watch = NoiseWatch()
    base = await read_all(readers(100))
    before, rss_before = metrics(port), rss_bytes(server.measured_pid)
    stuck = [Client(port, 1000 + i, num_tokens, policy) for i in range(num_stuck)]
    for client in stuck:
        await client.send(RECEIVE_BUFFER)
    # Whoever is cut is congested still: it has not read its error.
    await until(port, "clients_congested", num_stuck, 120)
    beside_readers = readers(200)
    beside = await read_all(beside_readers)
    rss_stuck, during = rss_bytes(server.measured_pid), metrics(port)
    await asyncio.gather(*(client.read() for client in stuck))
    whole = {c.seed: c for c in (Client(port, c.seed, num_tokens, "coalesce") for c in stuck)}
    await read_all(list(whole.values()))
    num_whole = sum(c.text() == whole[c.seed].text() and not c.error() for c in stuck)
    num_cut = sum(
        c.error() == "slow_client" and whole[c.seed].text().startswith(c.text()) for c in stuck
    )
    base_p99, beside_p99 = percentile(base, 99), percentile(beside, 99)
    assert base_p99 and beside_p99
    counter = COUNTERS[policy]
    return {
        "policy": policy,
        "stuck": num_stuck,
        "readers": num_readers,
        "itl_p50_ms": percentile(base, 50),
        "itl_p50_beside_ms": percentile(beside, 50),
        "itl_p99_ms": base_p99,
        "itl_p99_beside_ms": beside_p99,
        "itl_p99_ratio": beside_p99 / base_p99,
        "kib_per_stuck": max(0, rss_stuck - rss_before) / 1024 / max(1, num_stuck),
        "counter": during[counter] - before.get(counter, 0),
        "paused": during["paused"],
        "num_whole": num_whole,
        "num_cut": num_cut,
        "noise_cores": watch.cores(),
    }


def bars_of(row: Row) -> list[Bar]:
    """The promises of one policy."""
    policy, num_stuck = row["policy"], row["stuck"]
    told = row["num_cut"] if policy == "drop" else row["num_whole"]
    return [
        Bar(f"{policy}: ITL p99 beside stuck clients", row["itl_p99_ratio"], MOST_ITL_RATIO),
        Bar(
            f"{policy}: KiB for one stuck client",
            row["kib_per_stuck"],
            MOST_BYTES_PER_STUCK / 1024,
        ),
        Bar(f"{policy}: its counter moved", row["counter"], num_stuck, at_most=False),
        Bar(f"{policy}: stuck clients that got what they must", told, num_stuck, at_most=False),
    ]


def run_policy(
    policy: str, num_stuck: int, num_readers: int, num_tokens: int, step_ms: float
) -> Row:
    core, _ = two_cores()
    with tempfile.TemporaryDirectory() as folder:
        num_seqs = num_stuck + num_readers
        server = OurServer(Path(folder), num_seqs, num_tokens, step_ms, core, False, ())
        with server:
            return asyncio.run(measure(server, policy, num_stuck, num_readers, num_tokens))


@click.command(help=__doc__)
@click.option("--stuck", "num_stuck", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--readers", "num_readers", type=click.IntRange(min=1), default=4, show_default=True)
@click.option(
    "--tokens", "num_tokens", type=click.IntRange(min=400), default=800, show_default=True
)
@click.option("--step-ms", type=click.FloatRange(min=0.5), default=5.0, show_default=True)
@click.option("--policy", "policies", type=click.Choice(POLICIES), multiple=True, default=POLICIES)
@click.option("--json", "json_path", type=click.Path(dir_okay=False))
def main(
    num_stuck: int,
    num_readers: int,
    num_tokens: int,
    step_ms: float,
    policies: tuple[str, ...],
    json_path: str | None,
) -> None:
    end_on_sigterm()
    rows = [run_policy(each, num_stuck, num_readers, num_tokens, step_ms) for each in policies]
    print_table(rows)
    print(noise_sentence(row["noise_cores"] for row in rows))
    write_json(json_path, rows)
    if not print_bars([bar for row in rows for bar in bars_of(row)]):
        sys.exit(1)


if __name__ == "__main__":
    main()
