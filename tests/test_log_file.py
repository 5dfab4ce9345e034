"""The bounded log: what several writers with O_APPEND see, and what is kept."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from shmserve.log_file import BoundedLog, LogError, open_log, state_dir


def test_log_is_private_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for text in (b"one\n", b"two\n"):
        fd = open_log(str(path))
        os.write(fd, text)
        os.close(fd)
    assert path.read_bytes() == b"one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_past_its_bound_the_log_is_kept_once_and_every_writer_goes_on_at_its_begin(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.log"
    mine, other = open_log(str(path)), open_log(str(path))
    log = BoundedLog(str(path), max_bytes=10, fd=mine)
    for generation in (b"first", b"second"):
        os.write(other, generation + b" is long enough\n")
        assert log.check() == ""
        assert path.read_bytes() == b""
        assert (tmp_path / "a.log.1").read_bytes() == generation + b" is long enough\n"
        assert (tmp_path / "a.log.1").stat().st_mode & 0o777 == 0o600
    os.write(other, b"short\n")
    os.write(mine, b"x\n")
    assert log.check() == ""
    assert path.read_bytes() == b"short\nx\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    os.close(mine)
    os.close(other)


def test_log_that_cannot_be_kept_is_emptied_all_the_same_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    (tmp_path / "a.log.1").mkdir()
    fd = open_log(str(path))
    os.write(fd, b"0123456789\n")
    assert "a.log.1" in BoundedLog(str(path), max_bytes=10, fd=fd).check()
    assert path.read_bytes() == b""
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".partial")] == []
    os.close(fd)


def test_log_that_was_moved_away_is_left_alone_and_one_that_was_removed_is_emptied(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.log"
    fd = open_log(str(path))
    os.write(fd, b"0123456789\n")
    log = BoundedLog(str(path), max_bytes=10, fd=fd)
    path.rename(tmp_path / "moved")
    path.write_bytes(b"another program's, and longer than our bound")
    assert log.check() == ""
    assert (tmp_path / "moved").read_bytes() == b"0123456789\n"
    assert path.read_bytes().startswith(b"another")
    (tmp_path / "moved").unlink()
    assert log.check() == ""
    assert os.fstat(fd).st_size == 0
    os.close(fd)


@pytest.mark.parametrize("make", ["folder", "fifo"])
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, make: str) -> None:
    path = tmp_path / "x"
    path.mkdir() if make == "folder" else os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if make == "fifo" else -1
    with pytest.raises(LogError, match=str(path)):
        open_log(str(path))
    if reader >= 0:
        os.close(reader)


def test_stderr_of_a_process_goes_to_the_log(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    code = "import sys; from shmserve.log_file import redirect_stderr as r; r(sys.argv[1]); sys.exit('bye')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, check=False, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert path.read_text() == "bye\n"


def test_state_directory_follows_the_specification(tmp_path: Path) -> None:
    found = state_dir({"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": "/nowhere"})
    assert found == str(tmp_path / "state" / "shmserve")
    assert os.stat(found).st_mode & 0o777 == 0o700
    home = tmp_path / "home"
    for environ in ({"HOME": str(home)}, {"HOME": str(home), "XDG_STATE_HOME": "relative"}):
        assert state_dir(environ) == str(home / ".local" / "state" / "shmserve")


def test_log_that_cannot_be_emptied_is_one_line_and_no_end(tmp_path: Path) -> None:
    """A file that may only be appended to (chattr +a), or whose disk is read-only by now."""
    path = tmp_path / "a.log"
    path.write_bytes(b"0123456789\n")
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(LogError, match=r"--log-max-bytes: .*a\.log: "):
        BoundedLog(str(path), max_bytes=10, fd=fd).check()
    os.close(fd)


def test_user_without_a_home_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    with pytest.raises(LogError, match="XDG_STATE_HOME"):
        state_dir({})
