"""The control link: whole messages with their descriptors, and what is not one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import msgspec
import pytest

from shmserve import __version__, child
from shmserve.config import Config
from shmserve.control import MAX_MESSAGE_BYTES, ControlError, ControlLink


@pytest.fixture
def links() -> Iterator[tuple[ControlLink, ControlLink]]:
    ours, theirs = ControlLink.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(links: tuple[ControlLink, ControlLink]) -> None:
    ours, theirs = links
    for number in range(100):
        ours.send({"type": "loading", "fraction": number})
    received = [theirs.receive() for _ in range(100)]
    assert [message and message[0]["fraction"] for message in received] == list(range(100))


def test_descriptors_arrive_open_and_close_on_exec(links: tuple[ControlLink, ControlLink]) -> None:
    ours, theirs = links
    reader, writer = os.pipe()
    ours.send({"type": "channel"}, [reader, writer])
    received = theirs.receive()
    assert received is not None
    _, (their_reader, their_writer) = received
    os.write(their_writer, b"through")
    assert os.read(reader, 16) == b"through"
    assert not os.get_inheritable(their_reader)
    for fd in (reader, writer, their_reader, their_writer):
        os.close(fd)


def test_config_survives_the_welcome(links: tuple[ControlLink, ControlLink]) -> None:
    ours, theirs = links
    config = Config(instance="a-name", num_http=3)
    ours.send({"type": "welcome", "config": msgspec.to_builtins(config)})
    received = theirs.receive()
    assert received is not None
    assert Config.from_builtins(received[0]["config"]) == config


def test_end_of_file_is_none_after_the_last_message(
    links: tuple[ControlLink, ControlLink],
) -> None:
    ours, theirs = links
    ours.send({"type": "failed", "error": "last words"})
    ours.close()
    received = theirs.receive()
    assert received is not None
    assert received[0]["error"] == "last words"
    assert theirs.receive() is None


def test_last_words_of_one_that_left_unread_mail_behind_are_heard(
    links: tuple[ControlLink, ControlLink],
) -> None:
    one, other = links
    one.send({"type": "never read"})
    other.send({"type": "loading"})
    other.send({"type": "failed"})
    other.close()
    for kind in ("loading", "failed"):
        received = one.receive()
        assert received is not None
        assert received[0]["type"] == kind
    assert one.receive() is None


def test_nothing_there_would_block(links: tuple[ControlLink, ControlLink]) -> None:
    _, theirs = links
    theirs.set_nonblocking()
    with pytest.raises(BlockingIOError):
        theirs.receive()


def test_reader_that_never_reads_blocks_the_writer_only_by_an_error(
    links: tuple[ControlLink, ControlLink],
) -> None:
    ours, _ = links
    ours.set_nonblocking()
    with pytest.raises(BlockingIOError):
        for _ in range(100_000):
            ours.send({"type": "worker", "reason": "x" * 1000})


def test_too_long_a_message_is_refused_before_it_is_sent(
    links: tuple[ControlLink, ControlLink],
) -> None:
    ours, theirs = links
    with pytest.raises(ControlError, match="bytes"):
        ours.send({"type": "loading", "phase": "x" * MAX_MESSAGE_BYTES})
    theirs.set_nonblocking()
    with pytest.raises(BlockingIOError):
        theirs.receive()


@pytest.mark.parametrize("data", [b"[]", b'"type"', b'{"no": "type"}', b'{"type": 1}'])
def test_message_without_a_type_is_an_error(
    links: tuple[ControlLink, ControlLink], data: bytes
) -> None:
    ours, theirs = links
    ours.sock.send(data)
    with pytest.raises(ControlError, match="no type"):
        theirs.receive()


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"\0" * 10])
def test_what_is_no_json_is_an_error_and_its_descriptors_are_closed(
    links: tuple[ControlLink, ControlLink], data: bytes
) -> None:
    ours, theirs = links
    reader, writer = os.pipe()
    socket.send_fds(ours.sock, [data], [writer])
    os.close(writer)
    with pytest.raises(ControlError, match="not JSON"):
        theirs.receive()
    assert os.read(reader, 1) == b""  # the last writer is closed
    os.close(reader)


@pytest.mark.parametrize("spec", ["", "fd:", "fd:x", "unix:", "tcp:1", "7"])
def test_control_argument_of_another_form_is_an_error(spec: str) -> None:
    with pytest.raises(ControlError, match="--control"):
        ControlLink.connect(spec)


def test_link_by_number_is_the_inherited_socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = ControlLink.connect(f"fd:{theirs.detach()}")
    assert not os.get_inheritable(link.fileno())
    link.send({"type": "drained"})
    assert ours.recv(100) == b'{"type":"drained"}'
    link.close()
    ours.close()


@pytest.mark.parametrize("version", ["0.0.1", None])
def test_a_child_of_another_version_than_its_supervisors_says_so_and_ends(
    links: tuple[ControlLink, ControlLink], monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    """The package was replaced while the instance ran, and a child died: its successor would read the rings by other rules."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ours, theirs = links
    welcome = {"type": "welcome", "role": "worker", "index": 0, "instance": "x", "epoch": 1}
    ours.send(welcome | {"config": {}} | ({"version": version} if version else {}))
    said = f"supervisor is shmserve {version}, this is {__version__}"
    with pytest.raises(SystemExit, match=said):
        child.join("worker", ["--control", f"fd:{os.dup(theirs.fileno())}"])
    received = ours.receive()
    assert received is not None
    assert received[0]["type"] == "failed"
    assert "replaced while the instance ran" in received[0]["error"]
