"""The lock of a name, and its files, without a supervisor."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from shmserve.instance_socket import (
    InstanceError,
    InstanceLock,
    LockRecord,
    ask,
    instances,
    is_holder,
    runtime_dir,
    sweep_stale,
)


def test_name_has_one_holder_and_a_second_claim_says_who(tmp_path: Path) -> None:
    lock = InstanceLock.claim(str(tmp_path), "one")
    lock.record(LockRecord(pid=77, url="http://somewhere:1", epoch=3))
    with pytest.raises(InstanceError, match=r"'one' is already running \(pid 77, http://somewhere"):
        InstanceLock.claim(str(tmp_path), "one")
    lock.release()
    InstanceLock.claim(str(tmp_path), "one").release()
    assert list(tmp_path.iterdir()) == []


def test_clean_end_leaves_no_epoch_and_a_killed_holder_does(tmp_path: Path) -> None:
    lock = InstanceLock.claim(str(tmp_path), "one")
    lock.record(LockRecord(pid=1, url="u", epoch=9))
    lock.abandon()  # what the kernel does for a killed process
    lock = InstanceLock.claim(str(tmp_path), "one")
    assert lock.former.epoch == 9
    lock.release()
    lock = InstanceLock.claim(str(tmp_path), "one")
    assert lock.former.epoch == 0
    lock.release()


def test_shorter_record_replaces_a_longer_one_whole(tmp_path: Path) -> None:
    lock = InstanceLock.claim(str(tmp_path), "one")
    lock.record(LockRecord(pid=123456789, url="http://a-long-name:65535", epoch=10**9))
    lock.record(LockRecord(pid=1, url="", epoch=1))
    lock.abandon()
    lock = InstanceLock.claim(str(tmp_path), "one")
    assert lock.former == LockRecord(pid=1, url="", epoch=1)
    lock.release()


def test_stale_socket_file_is_replaced_by_the_locks_holder(tmp_path: Path) -> None:
    lock = InstanceLock.claim(str(tmp_path), "one")
    first = lock.listen()
    first.close()
    lock.abandon()
    assert (tmp_path / "one.sock").exists()
    lock = InstanceLock.claim(str(tmp_path), "one")
    second = lock.listen()
    assert (tmp_path / "one.sock").stat().st_mode & 0o777 == 0o600
    second.close()
    lock.release()


def test_instances_are_those_whose_lock_is_held(tmp_path: Path) -> None:
    held = InstanceLock.claim(str(tmp_path), "held")
    InstanceLock.claim(str(tmp_path), "left").abandon()
    assert instances(str(tmp_path)) == ["held"]
    assert sweep_stale(str(tmp_path)) == ["left"]
    assert [path.name for path in tmp_path.iterdir()] == ["held.lock"]
    held.release()


def test_nobody_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(InstanceError, match="no instance 'ghost' is running"):
        ask(str(tmp_path), "ghost", {"type": "status"}, 5.0)


def test_supervisor_that_does_not_answer_is_waited_for_only_so_long(tmp_path: Path) -> None:
    lock = InstanceLock.claim(str(tmp_path), "busy")
    sock = lock.listen()
    with pytest.raises(InstanceError, match=r"did not answer in 0\.05 s"):
        ask(str(tmp_path), "busy", {"type": "status"}, 0.05)
    sock.close()
    lock.release()


def test_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InstanceError, match="shorten --instance"):
        InstanceLock.claim(str(tmp_path), "x" * 100)


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_runtime_directory_must_be_ours_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "shmserve"
    if kind == "open":
        path.mkdir()
        path.chmod(0o750)
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.touch()
    with pytest.raises(InstanceError, match="shmserve"):
        runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_runtime_directory_is_made_private(tmp_path: Path) -> None:
    path = runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert os.stat(path).st_mode & 0o777 == 0o700
    assert runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == path


def test_supervisor_whose_backlog_is_full_is_waited_for_only_so_long(tmp_path: Path) -> None:
    """One that was stopped is asked by others, too; the kernel lets the next one wait for ever."""
    lock = InstanceLock.claim(str(tmp_path), "busy")
    sock = lock.listen()
    askers = []
    for _ in range(64):
        asker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asker.setblocking(False)
        askers.append(asker)
        try:
            asker.connect(lock.socket_path)
        except BlockingIOError:
            break
    else:
        pytest.fail("the backlog has no end")
    with pytest.raises(InstanceError, match=r"did not answer in 0\.05 s"):
        ask(str(tmp_path), "busy", {"type": "status"}, 0.05)
    for each in (*askers, sock):
        each.close()
    lock.release()


def test_a_lock_file_that_is_touched_is_not_old(tmp_path: Path) -> None:
    lock = InstanceLock.claim(str(tmp_path), "one")
    path = tmp_path / "one.lock"
    os.utime(path, (1, 1))
    lock.touch()
    assert min(path.stat().st_atime, path.stat().st_mtime) > 1e9
    lock.release()


def test_a_lock_file_that_cannot_be_opened_or_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = InstanceLock.claim(str(tmp_path), "one")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        with pytest.raises(InstanceError, match=r"one\.lock: No space left on device"):
            lock.record(LockRecord())
    lock.release()
    (tmp_path / "two.lock").mkdir()
    with pytest.raises(InstanceError, match=r"two\.lock: Is a directory"):
        InstanceLock.claim(str(tmp_path), "two")


def test_the_holder_is_known_also_while_it_opens_and_closes_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = InstanceLock.claim(str(tmp_path), "one")
    real = os.listdir

    def listed(path: str) -> list[str]:
        return ["99999", *real(path)] if path.startswith("/proc/") else real(path)

    monkeypatch.setattr(os, "listdir", listed)
    assert is_holder(str(tmp_path), "one", os.getpid())
    lock.release()
    assert not is_holder(str(tmp_path), "one", os.getpid())
