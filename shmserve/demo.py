"""`shmserve demo`: start a server, stream one answer to the terminal, show where the time of its tokens went, stop.

Owns: the demonstration, nothing of the server: it talks to it as any client does, and reads its boards as any observer does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Final

from rich.console import Console

from shmserve.chat_turns import Conversation
from shmserve.child import with_source_tree
from shmserve.load_report import LoadReport, RequestResult
from shmserve.load_table import latency_table, text_table
from shmserve.rings.board import BoardReader, HistogramReading
from shmserve.rings.observe import boards_of
from shmserve.target import Target, served_model
from shmserve.terminal_chat import Screen, timing_line

PROMPT: Final = "Explain in three sentences why the sky is blue."
READY_TIMEOUT_S: Final = 600.0
HOPS: Final = (
    ("sampled to published", "hop_publish_us"),
    ("published to popped", "hop_pop_us"),
    ("popped to framed", "hop_frame_us"),
    ("framed to written", "hop_write_us"),
)


def run(prompt: str = PROMPT, max_tokens: int = 160) -> int:
    """The whole demonstration; the exit code."""
    console = Console()
    instance = f"demo-{os.getpid()}"
    # Progress and the ready line go to our stderr; stdin is not the server's.
    server = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "shmserve",
            "start",
            "--port=0",
            f"--instance={instance}",
            "--no-log-requests",
        ],
        env=with_source_tree(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = _wait_until_ready(server, instance)
        if url is None:
            return server.wait() or 1
        console.print(f"\n[bold]{prompt}[/bold]\n", highlight=False)
        answer = asyncio.run(_stream(url, prompt, max_tokens))
        print("\n")
        time.sleep(0.3)  # one heartbeat: the front end has folded the times of the last tokens
        _show(console, answer, _hops(instance))
    finally:
        server.terminate()
        code = server.wait()
    return code


def _wait_until_ready(server: subprocess.Popen[str], instance: str) -> str | None:
    """The server's URL once it says that it serves; None if it ended instead."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", file=sys.stderr)
        if "ready:" in line:
            return next(word for word in line.split() if word.startswith("http"))
    return None


async def _stream(url: str, prompt: str, max_tokens: int) -> RequestResult:
    """Print the answer as it comes. Raises TargetError, TurnError."""
    target = Target(url)
    async with target.session(None) as session:
        fields = {
            "model": await served_model(target, session),
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        screen = Screen(sys.stdout)
        return await Conversation(target, fields).turn(session, prompt, screen.piece)


def _hops(instance: str) -> dict[str, HistogramReading]:
    """The front end's histograms of this run."""
    for name in boards_of(instance):
        if ".http" in name:
            reader = BoardReader.attach(name)
            try:
                return reader.histograms()
            finally:
                reader.close()
    return {}


def _show(console: Console, result: RequestResult, hops: dict[str, HistogramReading]) -> None:
    row = LoadReport.of([result]).summary()
    console.print("one stream, as its client saw it", style="bold")
    print(timing_line(result))
    print(latency_table(row, ("itl",)) + "\n")
    rows = [
        [label, f"{hops[name].sum / hops[name].count:.0f} us", _bound(hops[name], 0.99)]
        for label, name in HOPS
        if name in hops and hops[name].count
    ]
    if rows:
        console.print("where a token's time went behind the model", style="bold")
        print(text_table(["hop", "mean", "p99 at most"], rows))


def _bound(reading: HistogramReading, q: float) -> str:
    """The bucket's upper bound below which `q` of the observations lie."""
    total = 0
    for bound, count in zip(reading.bounds, reading.counts, strict=False):
        total += count
        if total >= q * reading.count:
            return f"{bound} us"
    return f"> {reading.bounds[-1]} us"
