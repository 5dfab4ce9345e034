"""The servers of `bench_engine.py`, and one load on one of them.

Owns: starting and stopping ours and any OpenAI-compatible peer, the prompts, and the figures of a run. Never: compares.

    tokens_per_s          output tokens of all requests over the whole run, prefill of their prompts included
    ttft_p50_ms           the median request's first token, from the moment all were sent
    decode_tokens_per_s   requests over the median request's time per token after its first

All requests of a run go out at once. Prompts are random words of one token each in the vocabularies of English models, from a
seed, so two servers get the same text and no prefix cache has seen it; what the servers count is checked, not believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import mortal
from bench_common import ROOT, Row, children_of, median, stop_process, wait_for
from frontend_servers import free_port, still_running

from shmserve.load_report import RequestResult
from shmserve.load_spec import COMPLETIONS_PATH, LoadSpec
from shmserve.loadgen import run_load

STOP_GRACE_S = 15.0
START_TIMEOUT_S = 300.0
IGNORE_EOS: Mapping[str, Any] = {"ignore_eos": True}
WORDS = (
    "time people way day man world life hand part child eye woman place work week case point company number group problem "
    "fact water room mother area money story month lot right study book word business issue side kind head house service "
    "friend father power hour game line end member law car city name president team minute idea body information back "
    "parent face level office door health person art war history party result change morning reason research girl guy food "
    "moment air teacher force education river stone green light music paper table window winter summer garden letter market "
    "school street"
)


def make_prompts(num_prompts: int, num_tokens: int, seed: int) -> tuple[str, ...]:
    """Texts of `num_tokens` words, of which no two begin alike."""
    draw, words = random.Random(seed), WORDS.split()
    return tuple(
        " ".join(["the", *draw.choices(words, k=num_tokens - 1)]) for _ in range(num_prompts)
    )


class Server:
    """A server at `url`; `command` starts it, and an empty one means that it runs already. `extra` goes into every body."""

    def __init__(
        self,
        name: str,
        url: str,
        command: Sequence[str],
        folder: Path,
        model: str = "",
        extra: Mapping[str, Any] = IGNORE_EOS,
    ) -> None:
        self.name, self.url, self.model, self.extra = name, url.rstrip("/"), model, extra
        self._command = list(command)
        self._output = folder / f"{name}-output.txt"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if self._command:
            try:
                with self._output.open("wb") as output:
                    self._process = mortal.start(
                        self._command,
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
            except OSError as error:
                raise SystemExit(f"{self.name}: {self._command[0]}: {error.strerror}") from None
        try:
            wait_for(self._is_up, START_TIMEOUT_S, f"{self.name} at {self.url}")
            self.model = self.model or self._first_model()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """SIGTERM and a grace; what is left of its tree after that is killed. Nothing where it ran before."""
        if self._process is None:
            return
        tree = children_of(self._process.pid)
        stop_process(self._process, STOP_GRACE_S)
        for pid in still_running(tree, 2.0):
            print(f"{self.name} left pid {pid} behind ({tree[pid]}): killed", file=sys.stderr)
            with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
                os.kill(pid, signal.SIGKILL)

    def _is_up(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            words = self._output.read_text(errors="replace")[-4000:]
            raise SystemExit(f"{self.name} ended with {self._process.returncode}:\n{words}")
        try:
            status, _ = self._get("/health")
            if status == 404:  # a server without one
                status, _ = self._get("/v1/models")
        except (OSError, http.client.HTTPException):
            return False
        return status == 200

    def _first_model(self) -> str:
        status, body = self._get("/v1/models")
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            told = body[:200].decode(errors="replace")
            raise SystemExit(
                f"{self.name} names no model ({status}: {told}): give --peer-model"
            ) from None

    def _get(self, path: str) -> tuple[int, bytes]:
        parts = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def our_server(
    folder: Path, model: str, num_threads: int, max_num_seqs: int, options: str
) -> Server:
    """`shmserve start` on a free port, an instance of its own."""
    port = free_port()
    words = [sys.executable, "-m", "shmserve", "start", "--port", str(port)]
    words += ["--instance", f"bench-{port}", "--max-num-seqs", str(max_num_seqs)]
    words += ["--threads", str(num_threads), *(["--model", model] if model else [])]
    return Server("shmserve", f"http://127.0.0.1:{port}", [*words, *shlex.split(options)], folder)


@dataclass(frozen=True, slots=True)
class Load:
    """`batch` requests at once, each `num_prompt_tokens` in and `num_tokens` out; another seed, other prompts."""

    batch: int
    num_prompt_tokens: int
    num_tokens: int
    seed: int


def run(server: Server, load: Load) -> Row:
    """One run. Raises SystemExit if a request failed: a rate over fewer requests would be another load."""
    spec = LoadSpec(
        base_url=server.url,
        model=server.model,
        prompts=make_prompts(load.batch, load.num_prompt_tokens, load.seed),
        max_tokens=(load.num_tokens,),
        num_requests=load.batch,
        concurrency=load.batch,
        path=COMPLETIONS_PATH,
        extra={"temperature": 0, **server.extra},
    )
    report = asyncio.run(run_load(spec))
    failed = [result for result in report.results if not is_whole(result)]
    if failed:
        told = ", ".join(sorted({str(result.error) for result in failed}))
        raise SystemExit(f"{server.name}: {len(failed)} of {load.batch} requests failed: {told}")
    return figures(report.results)


def is_whole(result: RequestResult) -> bool:
    """Some servers end a stream without [DONE]: one with a finish reason has said all that it had to say."""
    is_unmarked = result.error == "broken stream" and result.finish_reason is not None
    return bool(result.arrivals_ns) and (result.error is None or is_unmarked)


def figures(results: Sequence[RequestResult]) -> Row:
    first_ns = min(result.sent_ns for result in results)
    last_ns = max(result.end_ns for result in results)
    num_tokens = sum(result.num_tokens for result in results)
    tpot_ms = median([result.tpot_ms for result in results if result.tpot_ms is not None])
    counted: list[Any] = [result.num_prompt_tokens for result in results]
    return {
        "prompt_tokens": counted[0] if len(set(counted)) == 1 else None,
        "output_tokens": num_tokens,
        "tokens_per_s": num_tokens / (last_ns - first_ns) * 1e9,
        "ttft_p50_ms": median([result.ttft_ms for result in results]),
        "tpot_p50_ms": tpot_ms,
        "decode_tokens_per_s": None if not tpot_ms else len(results) * 1000 / tpot_ms,
    }
