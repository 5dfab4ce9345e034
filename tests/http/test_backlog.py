"""What the kernel is told about clients, and what it tells of them, on real sockets."""

import socket
import time

import pytest

from shmserve.http.backlog import (
    LATER_THAN_US_S,
    NOTSENT_LOWAT_BYTES,
    acknowledged_bytes,
    bound_kernel_share,
    unacknowledged_bytes,
)

TCP_NOTSENT_LOWAT = 25


@pytest.fixture
def pair():
    """A connection that a bounded listening socket accepted: (ours, the client's, which has a small receive buffer)."""
    listening = socket.create_server(("127.0.0.1", 0))
    bound_kernel_share(listening, 60.0)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(listening.getsockname())
    ours, _ = listening.accept()
    ours.setblocking(False)
    yield ours, client
    for each in (ours, client, listening):
        each.close()


def fill(sock):
    """Write until the kernel takes no more; how much it took."""
    taken = 0
    while True:
        try:
            taken += sock.send(bytes(4096))
        except BlockingIOError:
            return taken


def test_a_connection_inherits_the_bounds_of_its_listening_socket(pair):
    ours, _ = pair
    assert ours.getsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT) == NOTSENT_LOWAT_BYTES
    timeout_ms = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert timeout_ms == (60 + LATER_THAN_US_S) * 1000


def test_the_kernel_takes_little_of_a_client_that_does_not_read(pair):
    ours, _ = pair
    assert fill(ours) < 8 * NOTSENT_LOWAT_BYTES  # without the bound it takes 2.5 MB


def test_the_queue_shrinks_and_the_acknowledged_grow_by_what_is_read(pair):
    ours, client = pair
    taken = fill(ours)
    left = -1
    while left != unacknowledged_bytes(ours):  # the client's kernel may still be answering
        left, acknowledged = unacknowledged_bytes(ours), acknowledged_bytes(ours)
    assert 0 < left <= taken
    # The kernel counts the SYN, too.
    assert acknowledged in (taken - left, taken - left + 1)
    read = 0
    while read < taken:
        read += len(client.recv(65536))
    while unacknowledged_bytes(ours):  # until its last answer has come
        time.sleep(0.001)
    assert acknowledged_bytes(ours) - acknowledged == left


def test_a_unix_socket_tells_of_its_queue_and_a_closed_one_of_nothing():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(bytes(1000))
        assert unacknowledged_bytes(ours) >= 1000
        theirs.recv(1000)
        assert unacknowledged_bytes(ours) == 0
        assert acknowledged_bytes(ours) == 0
    assert unacknowledged_bytes(ours) == 0 and acknowledged_bytes(ours) == 0
