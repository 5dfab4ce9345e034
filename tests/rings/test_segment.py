"""Segments: made whole or not at all, given to one, swept when nobody holds them."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import posix_ipc
import pytest

from shmserve.rings import layout as L
from shmserve.rings import segment as segment_module
from shmserve.rings.channel import Ring, RingShape
from shmserve.rings.segment import Segment, SegmentError, is_locked, names, sweep, try_lock


def path_of(name: str) -> str:
    return segment_module.SHM_DIR + name


@pytest.fixture
def made(instance):
    """Create segments that are unlinked and closed at the end."""
    segments = []

    def make(tail="1.0-0.tokens", num_bytes=8192, whole=True):
        segment = Segment.create(f"/shmserve.{instance}.{tail}", num_bytes)
        if whole:
            segment.words()[L.W_MAGIC] = L.MAGIC
        segments.append(segment)
        return segment

    yield make
    for segment in segments:
        segment.unlink()
        segment.close()


def test_name_that_exists_is_refused_and_its_segment_kept(made):
    first = made()
    with pytest.raises(SegmentError, match="exists already") as caught:
        made()
    assert caught.value.errno == errno.EEXIST
    assert os.stat(path_of(first.name)).st_ino == os.fstat(first.fd).st_ino


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_may_open_a_segment_whatever_the_umask(made, umask):
    before = os.umask(umask)
    try:
        segment = made()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path_of(segment.name)).st_mode) == 0o600


@pytest.mark.parametrize("num_bytes", [4096, 4104, 2 * 1024 * 1024 + 4096])
def test_pages_are_reserved_at_creation(made, num_bytes):
    segment = made(num_bytes=num_bytes)
    status = os.fstat(segment.fd)
    assert status.st_size == segment.num_bytes == num_bytes
    assert status.st_blocks * 512 >= num_bytes


def test_descriptors_do_not_leak_into_programs_that_are_started(made):
    segment = made()
    assert segment.claim(L.LOCK_PRODUCER)
    file = os.fstat(segment.fd)
    links = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    ours = [
        int(link.name) for link in links if link.exists() and os.path.samestat(link.stat(), file)
    ]
    assert len(ours) == 3  # the segment's own, the mapping's, the private one of the claim
    assert not any(os.get_inheritable(fd) for fd in ours)


def test_role_is_given_once_in_one_process(made):
    segment = made()
    assert segment.claim(L.LOCK_PRODUCER)
    assert not segment.claim(L.LOCK_PRODUCER)
    assert segment.claim(L.LOCK_CONSUMER)


def test_refused_claim_leaves_no_descriptor_and_no_hole_in_the_lock(made, num_fds):
    segment = made()
    assert segment.claim(L.LOCK_PRODUCER)
    num_before = num_fds()
    for _ in range(3):
        assert not segment.claim(L.LOCK_PRODUCER)
    assert num_fds() == num_before
    assert is_locked(segment.fd, L.LOCK_PRODUCER)


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_second_holder_of_an_inherited_descriptor_is_refused_the_role(instance, act, role):
    ring = Ring.create(f"/shmserve.{instance}.1.0-0.tokens", RingShape(8, 8), 1)
    try:
        fds = ",".join(map(str, ring.fds()))
        first = act("claim_role", ring.segment.name, fds, role, pass_fds=ring.fds())
        assert json.loads(first.hear()) == {"capacity": 8}
        second = act("claim_role", ring.segment.name, fds, role, pass_fds=ring.fds())
        refusal = json.loads(second.hear())
        assert refusal["errno"] == errno.EBUSY
        assert f"the {role} end of {ring.segment.name} is taken by another process" in str(refusal)
        with pytest.raises(SegmentError, match="is taken"):
            getattr(ring, role)()

        first.kill()
        first.wait()
        third = act("claim_role", ring.segment.name, fds, role, pass_fds=ring.fds())
        assert json.loads(third.hear()) == {"capacity": 8}  # it had moved nothing: no harm
    finally:
        ring.segment.unlink()
        ring.close()


def test_owner_byte_is_free_exactly_when_the_last_holder_is_gone(instance, act):
    segment = Segment.create(f"/shmserve.{instance}.1.0-0.tokens", 4096)
    segment.words()[L.W_MAGIC] = L.MAGIC
    watcher = Segment.attach_readonly(segment.name)
    try:
        assert is_locked(watcher.fd, L.LOCK_OWNER)
        child = act("hold", segment.name, segment.fd, pass_fds=[segment.fd])
        heir = act("hold_through_a_child", segment.name, segment.fd, pass_fds=[segment.fd])
        assert child.hear() == heir.hear() == '"holding"'
        segment.close()  # the creator is gone
        assert is_locked(watcher.fd, L.LOCK_OWNER)
        child.kill()
        child.wait()
        heir.wait()  # the grandchild lives on
        assert is_locked(watcher.fd, L.LOCK_OWNER)
        heir.tell("end")
        assert heir.stdout.read() == ""  # end of file: the last holder has closed everything
        assert not is_locked(watcher.fd, L.LOCK_OWNER)
        assert sweep(segment.name[1:]) == [segment.name]
    finally:
        watcher.close()


def test_sweep_removes_the_dead_and_leaves_the_living(instance, act):
    living = act("own", f"/shmserve.{instance}-a.1.0-0.tokens:whole")
    dead = act("own", f"/shmserve.{instance}-b.1.0-0.tokens:whole")
    assert living.hear() == dead.hear() == '"owning"'
    assert sweep(f"shmserve.{instance}") == []
    dead.kill()
    dead.wait()
    assert sweep(f"shmserve.{instance}") == [f"/shmserve.{instance}-b.1.0-0.tokens"]
    assert names(f"shmserve.{instance}") == [f"/shmserve.{instance}-a.1.0-0.tokens"]
    living.kill()
    living.wait()
    assert sweep(f"shmserve.{instance}") == [f"/shmserve.{instance}-a.1.0-0.tokens"]


def test_sweep_looks_only_at_its_prefix(instance, act):
    dead = act("own", f"/shmserve.{instance}-b.1.0-0.tokens:whole")
    dead.hear()
    dead.kill()
    dead.wait()
    assert sweep(f"shmserve.{instance}-a") == []
    assert sweep(f"shmserve.{instance}-b") == [f"/shmserve.{instance}-b.1.0-0.tokens"]


def test_sweep_spares_young_unfinished_segments_and_removes_old_ones(instance, act, monkeypatch):
    name = f"/shmserve.{instance}.1.0-0.tokens"
    dead = act("own", f"{name}:unfinished")
    dead.hear()
    dead.kill()
    dead.wait()
    assert sweep(f"shmserve.{instance}") == []
    made_s = os.stat(path_of(name)).st_ctime
    monkeypatch.setattr(time, "time", lambda: made_s + segment_module.UNFINISHED_GRACE_S - 1)
    assert sweep(f"shmserve.{instance}") == []
    monkeypatch.setattr(time, "time", lambda: made_s + segment_module.UNFINISHED_GRACE_S + 1)
    assert sweep(f"shmserve.{instance}") == [name]


def test_sweep_spares_an_old_unfinished_segment_whose_creator_lives(instance, act, monkeypatch):
    creator = act("own", f"/shmserve.{instance}.1.0-0.tokens:unfinished")
    creator.hear()
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert sweep(f"shmserve.{instance}") == []
    creator.kill()
    creator.wait()
    assert sweep(f"shmserve.{instance}") == [f"/shmserve.{instance}.1.0-0.tokens"]


def test_sweep_does_not_touch_the_lock_of_a_segment_that_is_being_made(instance, monkeypatch):
    """The creator's own claim of the owner byte must not meet a sweep that is just looking."""
    claims = []

    def create_meets_sweep(fd, byte):
        monkeypatch.setattr(segment_module, "try_lock", lambda *_: claims.append("sweep"))
        assert sweep(f"shmserve.{instance}") == []
        monkeypatch.setattr(segment_module, "try_lock", try_lock)
        return try_lock(fd, byte)

    monkeypatch.setattr(segment_module, "try_lock", create_meets_sweep)
    segment = Segment.create(f"/shmserve.{instance}.1.0-0.tokens", 4096)
    assert claims == []
    segment.unlink()
    segment.close()


def test_sweep_that_comes_second_does_not_remove_a_name_made_anew(instance, act, monkeypatch):
    """Two sweeps opened one dead segment; the first removed it and a new instance made the name again."""
    name = f"/shmserve.{instance}.1.0-0.tokens"
    dead = act("own", f"{name}:whole")
    dead.hear()
    dead.kill()
    dead.wait()
    made = []

    def lock_after_the_other_sweep(fd, byte):
        monkeypatch.setattr(segment_module, "try_lock", try_lock)
        segment_module.unlink(name)
        made.append(Segment.create(name, 4096))
        return try_lock(fd, byte)

    monkeypatch.setattr(segment_module, "try_lock", lock_after_the_other_sweep)
    assert sweep(f"shmserve.{instance}") == []
    assert names(f"shmserve.{instance}") == [name]
    made[0].unlink()
    made[0].close()


def test_vanished_name_is_no_error(made):
    segment = made()
    os.unlink(path_of(segment.name))  # as logind does when the user logs out
    segment.words()[L.W_READ_CURSOR] = 5
    assert segment.words()[L.W_READ_CURSOR] == 5  # the mapping goes on
    assert segment.claim(L.LOCK_PRODUCER)  # and so do the roles
    segment.unlink()
    segment_module.unlink(segment.name)
    with pytest.raises(SegmentError) as caught:
        Segment.attach_readonly(segment.name)
    assert caught.value.errno == errno.ENOENT


def test_readonly_attach_refuses_writes_in_python(made):
    segment = made()
    reader = Segment.attach_readonly(segment.name)
    try:
        with pytest.raises(TypeError):
            reader.words()[L.W_READ_CURSOR] = 1
        with pytest.raises(TypeError):
            reader.bytes_view(0, 8)[:] = bytes(8)
        with pytest.raises(TypeError):
            reader.mapping[0:1] = b"x"
        assert reader.words()[L.W_MAGIC] == L.MAGIC
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("how", "answer"),
    [("map", "EACCES"), ("write", "EBADF"), ("mprotect", [-1, "EACCES"])],
)
def test_kernel_refuses_to_make_a_readonly_attach_writable(made, act, how, answer):
    segment = made()
    actor = act("write_readonly", segment.name, how)
    assert json.loads(actor.hear()) == answer


def test_store_through_a_readonly_attach_is_a_segmentation_fault(made, act):
    segment = made()
    actor = act("write_readonly", segment.name, "store")
    assert actor.hear() == '"storing"'
    assert actor.stdout.read() == ""
    assert actor.wait() == -signal.SIGSEGV
    assert segment.words()[L.W_MAGIC] == L.MAGIC


def test_unfinished_and_foreign_files_cannot_be_attached(instance, num_fds):
    name = f"/shmserve.{instance}.1.0-0.tokens"
    fd = os.open(path_of(name), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        num_before = num_fds()
        for size, complaint in ((0, "unfinished"), (8, "8 bytes"), (4097, "4097 bytes")):
            os.ftruncate(fd, size)
            with pytest.raises(SegmentError, match=complaint):
                Segment.attach_readonly(name)
            with pytest.raises(SegmentError, match=complaint):
                Segment.from_fd(name, os.dup(fd))
        assert num_fds() == num_before
    finally:
        os.close(fd)
        os.unlink(path_of(name))


def test_segment_with_views_in_use_says_so_and_closes_later(made):
    segment = made()
    part = segment.bytes_view(0, 64)[8:16]
    with pytest.raises(BufferError):
        segment.close()
    part.release()
    assert segment.mapping[:8] == b"SHMRING1"


def test_more_than_all_of_shm_is_refused_with_numbers_and_leaves_nothing(instance):
    status = os.statvfs(segment_module.SHM_DIR)
    if not status.f_blocks:
        pytest.skip("/dev/shm has no size limit here")
    num_bytes = status.f_blocks * status.f_frsize + 4096
    with pytest.raises(SegmentError) as caught:
        Segment.create(f"/shmserve.{instance}.1.0-0.tokens", num_bytes)
    assert caught.value.errno == errno.ENOSPC
    text = str(caught.value)
    assert f"/dev/shm has no room: {num_bytes} bytes needed, " in text
    assert "--shm-size" in text and "--token-ring-slots" in text
    assert "\n" not in text
    assert names(f"shmserve.{instance}") == []


def test_shm_that_fills_up_during_creation_leaves_nothing(instance, monkeypatch, num_fds):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    num_before = num_fds()
    with pytest.raises(SegmentError, match=r"8192 bytes needed, \d+ free") as caught:
        Segment.create(f"/shmserve.{instance}.1.0-0.tokens", 8192)
    assert caught.value.errno == errno.ENOSPC
    assert names(f"shmserve.{instance}") == []
    assert num_fds() == num_before


def test_other_failures_of_creation_leave_nothing_and_keep_their_reason(instance, monkeypatch):
    def interrupted(fd, offset, length):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Segment.create(f"/shmserve.{instance}.1.0-0.tokens", 8192)
    assert names(f"shmserve.{instance}") == []


def test_full_shm_is_a_clear_refusal_and_never_a_bus_error(request, instance):
    """In a mount namespace of its own, with a /dev/shm of 64 KiB that is then filled to the last page."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("mount namespaces are not allowed here")
    actors = request.path.with_name("actors.py")
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    actor = [sys.executable, str(actors), "small_shm", instance, str(64 * 1024)]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *actor],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    refusal, filled, written = map(json.loads, done.stdout.splitlines())
    assert refusal["errno"] == errno.ENOSPC
    assert f"{4096 + 64 * 1024} bytes needed, {64 * 1024 - 3 * 4096} free" in refusal["text"]
    assert refusal["left"] == []  # the submit ring, which had fitted, is gone too
    assert filled == {"filled": "ENOSPC"}
    assert written == {"written": 64, "depth": 64}


@pytest.mark.parametrize("kind", ["pipe", "link", "another user's"])
def test_what_others_put_into_shm_under_our_names_is_neither_opened_nor_removed(
    instance, made, monkeypatch, kind, num_fds
):
    """Anybody may write there: a pipe would be waited for at its opening, a file that shrinks ends whoever has mapped it."""
    name = f"/shmserve.{instance}.9.http0.board"
    target = made()
    if kind == "pipe":
        os.mkfifo(path_of(name), 0o666)
    elif kind == "link":
        os.symlink(path_of(target.name), path_of(name))
    else:
        Path(path_of(name)).write_bytes(bytes(4096))
        monkeypatch.setattr(os, "geteuid", lambda: os.stat(path_of(name)).st_uid + 1)
    monkeypatch.setattr(time, "time", lambda: 1e12)  # older than any grace
    num_before = num_fds()
    try:
        with pytest.raises(SegmentError):
            Segment.attach_readonly(name)
        assert sweep(name[1:]) == []
        assert names(name[1:]) == [name]
        assert num_fds() == num_before
    finally:
        os.unlink(path_of(name))


def test_root_may_look_at_the_segments_of_others(made, monkeypatch):
    segment = made()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    Segment.attach_readonly(segment.name).close()


def test_a_host_without_shared_memory_says_so(monkeypatch, tmp_path):
    def nothing(*args, **kwargs):
        raise posix_ipc.ExistentialError("No shared memory exists with the specified name")

    monkeypatch.setattr(segment_module, "SHM_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(posix_ipc, "SharedMemory", nothing)
    assert names("shmserve.") == sweep("shmserve.") == []
    with pytest.raises(SegmentError, match="there is no /dev/shm") as caught:
        Segment.create("/shmserve.x.1.0-0.tokens", 4096)
    assert caught.value.errno == errno.ENOENT


def test_shared_memory_that_may_not_be_written_is_one_line(monkeypatch):
    def denied(*args, **kwargs):
        raise posix_ipc.PermissionsError("No permission to create this segment")

    monkeypatch.setattr(posix_ipc, "SharedMemory", denied)
    with pytest.raises(SegmentError, match="Permission denied") as caught:
        Segment.create("/shmserve.x.1.0-0.tokens", 4096)
    assert caught.value.errno == errno.EACCES


def test_a_system_without_ofd_locks_says_so(made, monkeypatch):
    """A sandbox (gVisor) that knows the lock commands of POSIX only."""
    segment = made()

    def unknown(fd, command, argument):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(segment_module.fcntl, "fcntl", unknown)
    for ask in (try_lock, is_locked):
        with pytest.raises(SegmentError, match="F_OFD_SETLK"):
            ask(segment.fd, L.LOCK_OWNER)
