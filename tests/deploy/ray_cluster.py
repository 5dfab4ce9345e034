"""A Ray cluster of two nodes on loopback, the router, and what the placement does when a server, an actor and a node die.

A program of its own, since Ray's processes and warnings are no business of pytest's: it prints one line of JSON for each stage. The nodes are
127.0.0.2, 127.0.0.3 and, after the first is lost, 127.0.0.4: the port is the same on all of them, as in production. The head is 127.0.0.9, since
Ray takes 127.0.0.1 for the machine's own address.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "deploy" / "ray")]

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from router_client import question  # noqa: E402
from router_fleet import KINDS, Router, free_ports, get, until  # noqa: E402
from shmserve_ray import SLOT, Placement, RouterList  # noqa: E402

PATIENCE_S = 150.0


def wait_for(placement: Placement, router: RouterList, hosts: set[str], port: int) -> float:
    """Until every place is up and the router knows just these. The seconds."""
    began = time.monotonic()
    wanted = {f"http://{host}:{port}" for host in hosts}
    while True:
        states = placement.look(2.0)
        known = set(router.ids())
        if set(states) == {"up"} and known == wanted:
            return time.monotonic() - began
        if time.monotonic() - began > PATIENCE_S:
            raise SystemExit(f"waited in vain: {states}, router knows {known}, wanted {wanted}")
        time.sleep(0.2)


def serves(router_port: int) -> int:
    """The status of a request through the router."""
    body = json.dumps(question(0, 2, stream=False)).encode()
    url = f"http://127.0.0.1:{router_port}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(answer.status)


def tell(stage: str, **more: object) -> None:
    print(json.dumps({"stage": stage} | more), flush=True)


def main(folder: Path, smg: str) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    router_port, metrics_port, port = free_ports(3)
    router = Router(KINDS["smg"], router_port, metrics_port, folder / "router")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.9"}
    )
    try:
        nodes = [
            cluster.add_node(num_cpus=1, resources={SLOT: 1}, node_ip_address=f"127.0.0.{i}")
            for i in (2, 3)
        ]
        ray.init(address=cluster.address, log_to_driver=False)
        router.start([], smg)
        command = [sys.executable, "-m", "shmserve", "start", "--runner=simulated"]
        placement = Placement(f"http://127.0.0.1:{router_port}", 2, port, command)
        listed = RouterList(router.url)
        first = {"127.0.0.2", "127.0.0.3"}
        tell("placed", took_s=round(wait_for(placement, listed, first, port), 1))
        tell("asked", status=serves(router_port))

        pids = ray.get([place.pids.remote() for place in placement.places])
        os.kill(pids[0][1], signal.SIGKILL)
        placement.look()
        tell("server killed", back_s=round(wait_for(placement, listed, first, port), 1))

        pids = ray.get([place.pids.remote() for place in placement.places])
        os.kill(pids[0][0], signal.SIGKILL)
        took = wait_for(placement, listed, first, port)
        again = ray.get([place.pids.remote() for place in placement.places])
        tell("actor killed", back_s=round(took, 1), is_new=again[0] != pids[0])

        cluster.remove_node(nodes[0], allow_graceful=False)
        status = serves(router_port)
        cluster.add_node(num_cpus=1, resources={SLOT: 1}, node_ip_address="127.0.0.4")
        second = {"127.0.0.3", "127.0.0.4"}
        took = wait_for(placement, listed, second, port)
        gone = get(f"http://127.0.0.2:{port}/ready")[0]
        tell("node lost", meanwhile=status, back_s=round(took, 1), old_answers=gone)
        tell("asked", status=serves(router_port))
        codes = placement.drain()
        until(lambda: not listed.ids(), "the router has forgotten them", PATIENCE_S)
        tell("drained", codes=codes)
    finally:
        ray.shutdown()
        cluster.shutdown()
        router.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
