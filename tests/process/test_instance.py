"""One name, one supervisor: refusals, the instance socket, joining by hand, systemd's two protocols."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmserve.control import ControlLink
from shmserve.instance_socket import ask, instances, runtime_dir

Start = Callable[..., Any]
FAKE_CHILD = str(Path(__file__).with_name("fake_child.py"))


def error_of(server: Any) -> str:
    """The one error line of a server that ended with code 1; it may have said that it prepares the model before."""
    assert server.wait() == 1, server.output()
    *before, line = server.output().splitlines()
    assert line.startswith("shmserve: error: ")
    assert before in ([], ["shmserve: preparing"])
    return str(line)


@pytest.mark.slow
def test_second_start_of_one_name_is_refused_with_the_first_ones_address(start: Start) -> None:
    first = start()
    url = first.wait_ready()["url"]
    line = error_of(start(name=first.name))
    assert url in line
    assert str(first.pid) in line
    assert first.status()["state"] == "ready"


def test_port_in_use_by_another_program_is_refused_before_the_model_is_prepared(
    start: Start, free_port: int
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port))
        other.listen()
        server = start(config={"http": {"port": free_port}}, prepare_s=60)
        assert f"127.0.0.1:{free_port} is in use" in error_of(server)
    assert server.leftovers() == []


@pytest.mark.slow
def test_port_of_another_instance_is_refused_and_the_first_is_not_disturbed(
    start: Start, free_port: int
) -> None:
    first = start(config={"http": {"port": free_port}})
    first.wait_ready()
    second = start(config={"http": {"port": free_port}})
    assert f"127.0.0.1:{free_port} is in use" in error_of(second)
    assert first.told()["workers"]["0"]["state"] == "ready"
    assert second.segments() == []


@pytest.mark.slow
def test_two_front_ends_do_not_share_a_port_with_another_program(
    start: Start, free_port: int
) -> None:
    first = start(config={"http": {"port": free_port}, "num_http": 2})
    first.wait_ready()
    line = error_of(start(config={"http": {"port": free_port}, "num_http": 2}))
    assert f"127.0.0.1:{free_port} is in use" in line


def test_restart_on_the_same_port_works_at_once_J6(start: Start, free_port: int) -> None:
    for _ in range(2):
        server = start(config={"http": {"port": free_port}})
        server.wait_ready()
        server.told()  # leaves a connection in TIME_WAIT
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait() == 0


def test_stop_ends_the_instance_and_the_asker_sees_it(start: Start) -> None:
    server = start()
    server.wait_ready()
    directory = runtime_dir(server.environ)
    assert instances(directory) == [server.name]
    answer = ask(directory, server.name, {"type": "stop"}, 10.0, until_gone=True)
    assert answer["pid"] == server.pid
    assert server.wait() == 0
    assert server.leftovers() == []
    assert instances(directory) == []


@pytest.mark.slow
def test_drain_over_the_socket_waits_for_what_is_in_flight(start: Start, until: Any) -> None:
    server = start(modes={"http": "slow_drain"})
    server.wait_ready()
    http = server.child("http")["pid"]
    ask(runtime_dir(server.environ), server.name, {"type": "drain"}, 10.0)
    assert server.status()["state"] == "draining"
    until(lambda: server.told()["draining"], "the front end drains")
    os.kill(http, signal.SIGUSR1)
    assert server.wait() == 0


@pytest.mark.slow
def test_nonsense_on_the_instance_socket_is_refused_and_harms_nobody(start: Start) -> None:
    server = start()
    server.wait_ready()
    path = Path(runtime_dir(server.environ)) / f"{server.name}.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    for data in (b"{", b"[]", b'{"type": 7}', b'{"type": "dance"}', b"\xff" * 9):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(path))
            client.send(data)
            assert json.loads(client.recv(4096))["type"] == "refused", data
        assert server.status()["state"] == "ready"


@pytest.mark.slow
def test_worker_started_by_hand_joins_the_free_place_only(start: Start, until: Any) -> None:
    server = start(external=("worker",))
    until(lambda: server.leftovers() and "waiting" in server.output(), "the invitation")
    control = f"unix:{runtime_dir(server.environ)}/{server.name}.sock"
    argv = [sys.executable, FAKE_CHILD, "worker", "", "--control", control]
    with subprocess.Popen(argv, env=server.environ, stderr=subprocess.PIPE) as worker:
        status = server.wait_ready()
        assert server.pids("worker") == [worker.pid]
        assert status["channels"][0]["worker"] == 0
        late = subprocess.run(argv, env=server.environ, capture_output=True, text=True)
        assert late.returncode == 4
        assert "is taken" in late.stderr
        worker.kill()
        worker.wait()
        until(lambda: server.child("worker")["state"] == "dead", "its death")
    with subprocess.Popen(argv, env=server.environ, stderr=subprocess.PIPE) as successor:
        until(lambda: server.status()["state"] == "ready", "ready again")
        os.kill(server.pid, signal.SIGTERM)
        assert successor.wait(30) == 0
    assert server.wait() == 0
    assert server.leftovers() == []


@pytest.mark.slow
def test_spawned_children_cannot_be_replaced_by_a_joiner(start: Start) -> None:
    server = start()
    server.wait_ready()
    link = ControlLink.connect(f"unix:{runtime_dir(server.environ)}/{server.name}.sock")
    link.send({"type": "join", "role": "worker", "index": 0})
    received = link.receive()
    assert received is not None
    assert received[0]["type"] == "refused"
    link.close()


def test_service_manager_hears_progress_ready_watchdog_and_stopping(
    start: Start, tmp_path: Path
) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(30)
        server = start(extra_environ={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000"})
        heard: list[str] = []
        while "WATCHDOG=1" not in heard or not any("READY=1" in text for text in heard):
            heard.append(manager.recv(4096).decode())
        assert any("STATUS=preparing" in text for text in heard)
        assert any("EXTEND_TIMEOUT_USEC=" in text for text in heard)
        os.kill(server.pid, signal.SIGTERM)
        while not any("STOPPING=1" in text for text in heard):
            heard.append(manager.recv(4096).decode())
        assert server.wait() == 0


@pytest.mark.slow
def test_watchdog_is_withheld_while_a_child_is_stopped_and_only_then(
    start: Start, tmp_path: Path, until: Any
) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        server = start(extra_environ={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "400000"})
        server.wait_ready()

        def heard(timeout_s: float) -> list[str]:
            """What comes until nothing came for so long, or WATCHDOG=1 did."""
            texts: list[str] = []
            manager.settimeout(timeout_s)
            try:
                while "WATCHDOG=1" not in texts:
                    texts.append(manager.recv(4096).decode())
            except TimeoutError:
                pass  # silence is an answer
            return texts

        assert "WATCHDOG=1" in heard(30)
        worker = server.child("worker")["pid"]
        os.kill(worker, signal.SIGSTOP)
        until(lambda: server.child("worker")["state"] == "stopped", "the news")
        manager.setblocking(False)
        while select.select([manager], [], [], 0)[0]:
            manager.recv(4096)
        assert "WATCHDOG=1" not in heard(0.6)  # a dozen were due
        os.kill(worker, signal.SIGCONT)
        assert "WATCHDOG=1" in heard(30)


def test_sockets_from_systemd_are_served(start: Start) -> None:
    with socket.socket() as activated:
        activated.bind(("127.0.0.1", 0))
        activated.listen()
        port = activated.getsockname()[1]
        # As systemd does: descriptor 3, and the pid that exec keeps.
        fd = activated.fileno()
        script = f'exec 3<&{fd} {fd}<&-; export LISTEN_FDS=1 LISTEN_PID=$$; exec "$@"'
        server = start(wrapper=["bash", "-c", script, "bash"], pass_fds=[fd])
        assert server.wait_ready()["url"] == f"http://127.0.0.1:{port}"
    assert server.told()["workers"]["0"]["state"] == "ready"


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small /dev/shm needs root")
@pytest.mark.parametrize("num_kib", [64, 1024])
def test_full_dev_shm_refuses_to_start_with_both_numbers_J4(start: Start, num_kib: int) -> None:
    mount = f'mount -t tmpfs -o size={num_kib}k tmpfs /dev/shm && exec "$@"'
    server = start(
        config={"rings": {"token_slots": 16384, "submit_slots": 1024}},
        wrapper=["unshare", "-m", "sh", "-c", mount, "sh"],
    )
    line = error_of(server)
    assert "/dev/shm has no room" in line
    assert "bytes needed" in line
    assert server.leftovers() == []
