"""Ray as the placer of shmserve: an actor per node owns one `shmserve start`, on a fixed port, and registers it with the router.

    python deploy/ray/shmserve_ray.py --router http://10.0.0.1:30000 --num-nodes 2 --port 8000 -- --model ... --queue-full-status 429

Owns: where instances run, that they run, and that the router knows them. Never: a token. Requests go from the router to the instances as they do
without Ray (Ray Serve in their way costs ten to twenty times the CPU of a router per frame).

Each actor takes the resource `shmserve_slot` of its node, so that no node has two: start nodes with `ray start --resources='{"shmserve_slot": 1}'`.
The port is the same on every node and at every restart: a new one would leave the old address in the router's list for ever.

What dies, and what happens:
    the server            its actor starts it anew on the same port (shmserve's own supervisor has already done what it can)
    the actor             the server's control link ends with it, so the server does too; Ray starts the actor anew (max_restarts)
    the node              Ray starts the actor on another node with a free slot; the address of the dead is taken out of the router
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import ray

log = logging.getLogger("shmserve_ray")

SLOT = "shmserve_slot"
LOOK_S = 1.0
READY_PATIENCE_S = 1800.0  # a large model loads
PR_SET_PDEATHSIG = 1


def ask(url: str, method: str = "GET", body: object = None, timeout_s: float = 5.0) -> Any:
    """The JSON of an answer, or None where there is none (an empty body, an error, nobody there)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            content = answer.read()
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        log.debug("%s %s: %s", method, url, error)
        return None
    return json.loads(content) if content.strip() else None


def is_up(url: str) -> bool:
    """Whether /ready says 200."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


class RouterList:
    """The workers that an smg knows, by their URLs."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def ids(self) -> dict[str, str]:
        """URL -> the router's id."""
        listed = ask(f"{self._url}/workers") or {"workers": []}
        return {each["url"]: each["id"] for each in listed["workers"]}

    def add(self, url: str) -> None:
        """Nothing happens if it is known: the address of an instance that starts anew is."""
        if url not in self.ids():
            ask(f"{self._url}/workers", "POST", {"url": url})

    def remove(self, url: str) -> None:
        if (known := self.ids().get(url)) is not None:
            ask(f"{self._url}/workers/{known}", "DELETE")


def _die_with_parent() -> None:
    """In the child: SIGKILL when the actor's process ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# No retries of calls: who looks at an actor that is on its way to another node is to hear so.
@ray.remote(max_restarts=-1, max_task_retries=0, num_cpus=0, resources={SLOT: 1})
class Place:
    """One node's `shmserve start`: started, watched, registered."""

    def __init__(self, router: str, port: int, argv: Sequence[str]) -> None:
        self._router = RouterList(router)
        self._host = ray.util.get_node_ip_address()
        self._port = port
        # A name of its own, for a machine may have several nodes (and a test has).
        name = f"ray-{self._host.replace('.', '-').replace(':', '-')}-{port}"
        self._argv = [*argv, f"--instance={name}", f"--host={self._host}", f"--port={port}"]
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        # The thread that forks is the actor's main one, which lives as long as its process: PDEATHSIG is of the thread.
        return subprocess.Popen(self._argv, preexec_fn=_die_with_parent)

    def pids(self) -> tuple[int, int]:
        """(the actor's, its server's)."""
        return os.getpid(), self._process.pid

    def look(self) -> tuple[str, str]:
        """("up", "starting", or "ended" with the server started anew; its URL). Registers what is up."""
        url = f"http://{self._host}:{self._port}"
        if self._process.poll() is not None:
            log.warning("%s ended with %s: starting it anew", url, self._process.returncode)
            self._process = self._start()
            return "ended", url
        if not is_up(url):
            return "starting", url
        self._router.add(url)
        return "up", url

    def drain(self) -> int:
        """SIGTERM: running streams finish. The exit code."""
        self._process.terminate()
        return self._process.wait()


class Placement:
    """As many places as were asked for, each on a node of its own; those of lost nodes are made anew elsewhere."""

    def __init__(self, router: str, num_nodes: int, port: int, argv: Sequence[str]) -> None:
        self._list = RouterList(router)
        self._make = lambda: Place.remote(router, port, list(argv))
        self.places = [self._make() for _ in range(num_nodes)]
        self._urls = [""] * num_nodes
        # The look that is not answered yet: one for each place at most, however long its actor seeks a node.
        self._looks: list[Any] = [None] * num_nodes

    def look(self, patience_s: float = 5.0) -> list[str]:
        """The state of every place; "lost" where no answer came, and Ray seeks another node for it."""
        return [self._look(index, patience_s) for index in range(len(self.places))]

    def _look(self, index: int, patience_s: float) -> str:
        if self._looks[index] is None:
            self._looks[index] = self.places[index].look.remote()
        try:
            state, url = ray.get(self._looks[index], timeout=patience_s)
        except ray.exceptions.GetTimeoutError:
            return "lost"  # no node has a free slot, or the actor is on its way to one
        except ray.exceptions.RayActorError as error:
            # Its process or its node ended while it was asked. Ray restarts it without end, so it is not made anew here.
            self._looks[index] = None
            log.warning("place %d: %s", index, str(error).partition("\n")[0])
            return "lost"
        self._looks[index] = None
        if self._urls[index] not in ("", url):
            self._list.remove(self._urls[index])  # it moved: nobody will answer there
        self._urls[index] = url
        return str(state)

    def drain(self) -> list[int]:
        """All of them end when their streams have; the exit codes."""
        for url in self._urls:
            self._list.remove(url)
        return list(ray.get([place.drain.remote() for place in self.places]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", required=True, help="where smg listens, as http://HOST:PORT")
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--port", type=int, default=8000, help="of every instance")
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("serve", nargs="*", help="flags of `shmserve start`, behind --")
    asked = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    ray.init(address=asked.address, log_to_driver=True)
    command = [sys.executable, "-m", "shmserve", "start", *asked.serve]
    placement = Placement(asked.router, asked.num_nodes, asked.port, command)
    told: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if (states := placement.look()) != told:
                log.info("places: %s", ", ".join(states))
                told = states
            time.sleep(LOOK_S)
    return max(placement.drain())


if __name__ == "__main__":
    sys.exit(main())
