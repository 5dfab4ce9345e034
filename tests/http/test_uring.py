import contextlib
import errno
import os
import resource
import socket

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.http.uring import MOST_SENDS, NUM_PARTS, SendRing, address_of


def send(ring, fds, frames):
    """Frames in as many parts as the ring takes, some of them empty: [(i, result)] of those that were not sent whole."""
    kept = []
    for i, frame in enumerate(frames):
        cuts = [0, len(frame) // 3, len(frame) // 3, len(frame) // 2, len(frame)]
        for k in range(NUM_PARTS):
            part = frame[cuts[k] : cuts[k + 1]] + b"never sent"
            kept.append(part)
            ring.parts[i, k] = (address_of(part), cuts[k + 1] - cuts[k])
    results = ring.send(np.array(fds, np.int32)).tolist()
    return [
        (i, result)
        for i, (result, frame) in enumerate(zip(results, frames, strict=True))
        if result != len(frame)
    ]


@pytest.fixture
def ring():
    try:
        ring = SendRing()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")
    yield ring
    ring.close()


@pytest.fixture
def pairs():
    """Connections, each (sending socket, receiving socket)."""
    made = [socket.socketpair() for _ in range(MOST_SENDS)]
    for ours, theirs in made:
        ours.setblocking(False)
        theirs.setblocking(False)
    yield made
    for both in made:
        for one in both:
            one.close()


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    calls=st.lists(
        st.tuples(
            st.integers(1, MOST_SENDS), st.integers(0, MOST_SENDS - 1), st.binary(min_size=1)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_each_descriptor_gets_its_own_frames_whole_over_many_laps(ring, pairs, calls):
    for count, first, data in calls:
        chosen = [pairs[(first + i) % MOST_SENDS] for i in range(count)]
        frames = [data * (1 + i % 7) + b"%d" % i for i in range(count)]
        assert send(ring, [ours.fileno() for ours, _ in chosen], frames) == []
        assert [theirs.recv(1 << 20) for _, theirs in chosen] == frames


def test_a_socket_that_takes_a_part_or_nothing_is_told_and_the_others_get_theirs(ring, pairs):
    full = pairs[1][0]
    large = b"x" * (1 << 20)
    fds = [ours.fileno() for ours, _ in pairs[:3]]
    [(index, sent)] = send(ring, fds, [b"a", large, b"c"])
    assert index == 1 and 0 < sent < len(large)
    with contextlib.suppress(BlockingIOError):
        while True:
            full.send(b"x")
    assert send(ring, fds, [b"d", b"y", b"f"]) == [(1, -errno.EAGAIN)]
    assert pairs[0][1].recv(10) == b"ad" and pairs[2][1].recv(10) == b"cf"


def test_a_connection_that_broke_is_an_errno_and_no_signal(ring, pairs):
    pairs[0][1].close()
    fds = [ours.fileno() for ours, _ in pairs[:2]]
    assert send(ring, fds, [b"a", b"b"]) == [(0, -errno.EPIPE)]
    assert pairs[1][1].recv(10) == b"b"


def test_a_descriptor_that_is_none_is_an_errno(ring, pairs):
    assert send(ring, [1 << 20, pairs[0][0].fileno()], [b"a", b"b"]) == [(0, -errno.EBADF)]
    assert pairs[0][1].recv(10) == b"b"


def test_when_the_kernel_refuses_a_call_nothing_counts_as_sent_and_the_ring_is_closed(ring, pairs):
    given, ring._fd = ring._fd, os.open(os.devnull, os.O_RDONLY)
    assert send(ring, [pairs[0][0].fileno()], [b"a"]) == [(0, -errno.EAGAIN)]
    assert ring.failure == errno.EOPNOTSUPP and not ring.is_open
    with pytest.raises(BlockingIOError):
        pairs[0][1].recv(10)
    os.close(given)


def test_where_it_cannot_be_made_it_says_why():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(OSError, match="io_uring_setup") as raised:
            SendRing()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised.value.errno in (errno.EMFILE, errno.ENOSYS, errno.EPERM)
