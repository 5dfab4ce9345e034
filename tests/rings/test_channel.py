"""Channels: names, the six descriptors, and everything that must not be taken for one."""

import errno
import json
import os
import socket

import pytest

from shmserve.rings import layout as L
from shmserve.rings import wakeup
from shmserve.rings.channel import Channel, Ring, RingShape
from shmserve.rings.segment import SegmentError, names
from shmserve.rings.wakeup import Counter, RingProtocolError

SUBMIT, TOKENS = RingShape(64, 4), RingShape(8, 16)


@pytest.fixture
def channel(instance):
    channel = Channel.create(instance, 5, 1, 2, SUBMIT, TOKENS)
    yield channel
    channel.unlink()
    channel.close()


@pytest.fixture
def sent(channel):
    """Copies of the channel's descriptors, as a child would receive them."""
    return [os.dup(fd) for fd in channel.fds()]


def test_names_say_instance_epoch_pair_and_ring(channel, instance):
    expected = (f"/shmserve.{instance}.5.1-2.submit", f"/shmserve.{instance}.5.1-2.tokens")
    assert Channel.names(instance, 5, 1, 2) == expected
    assert names(f"shmserve.{instance}.") == list(expected)
    assert (channel.submit.segment.name, channel.tokens.segment.name) == expected


def test_both_rings_have_their_shape_and_the_epoch(channel):
    assert (channel.submit.slot_size, channel.submit.capacity, channel.submit.epoch) == (64, 4, 5)
    assert (channel.tokens.slot_size, channel.tokens.capacity, channel.tokens.epoch) == (8, 16, 5)


def test_the_six_descriptors_are_distinct_and_close_on_exec(channel):
    assert len(set(channel.fds())) == 6
    assert not any(map(os.get_inheritable, channel.fds()))


def test_unlink_removes_both_names_and_the_rings_go_on(channel, instance):
    channel.unlink()
    assert names(f"shmserve.{instance}") == []
    channel.unlink()  # a vanished name is no error
    producer, consumer = channel.tokens.producer(), channel.tokens.consumer()
    assert producer.try_write(bytes(8), 1)
    assert consumer.poll() == 1


def test_unlink_spares_a_name_that_was_made_anew(channel, instance):
    channel.unlink()
    again = Channel.create(instance, 5, 1, 2, SUBMIT, TOKENS)
    channel.unlink()
    assert names(f"shmserve.{instance}") == list(Channel.names(instance, 5, 1, 2))
    again.unlink()
    again.close()


def test_close_gives_back_every_descriptor_and_mapping(instance, num_fds):
    before = num_fds()
    channel = Channel.create(instance, 1, 0, 0, SUBMIT, TOKENS)
    channel.submit.producer()
    channel.tokens.consumer()
    assert num_fds() > before
    channel.unlink()
    channel.close()
    assert num_fds() == before


def test_descriptors_in_order_make_the_same_channel(channel, instance, sent):
    other = Channel.from_fds(instance, 5, 1, 2, sent)
    assert other.fds() == sent
    worker, http = channel, other
    assert http.submit.producer().try_write(b"a" * 64, 1)
    inbox = worker.submit.consumer()
    assert inbox.poll() == 1
    assert bytes(inbox.view(1)) == b"a" * 64
    assert worker.tokens.producer().try_write(b"b" * 8, 1)
    outbox = http.tokens.consumer()
    assert outbox.poll() == 1
    assert bytes(outbox.view(1)) == b"b" * 8
    other.close()


def test_received_descriptors_are_close_on_exec(channel, instance, sent):
    for fd in sent:
        os.set_inheritable(fd, True)
    other = Channel.from_fds(instance, 5, 1, 2, sent)
    try:
        assert not os.get_inheritable(other.submit.segment.fd)
        assert not os.get_inheritable(other.tokens.segment.fd)
    finally:
        other.close()


def test_channel_works_between_two_processes_over_descriptors_sent_by_socket(
    channel, instance, act
):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        front_end = act("join_channel", instance, 5, theirs.fileno(), pass_fds=[theirs.fileno()])
        socket.send_fds(ours, [b"c"], channel.fds())
        inbox = channel.submit.consumer()
        assert ours.recv(1) == b"s"
        assert inbox.poll() == 2
        assert bytes(inbox.view(2)) == bytes([1]) * 64 + bytes([2]) * 64
        inbox.release(2)
        tokens = channel.tokens.producer()
        assert tokens.try_write(b"".join(n.to_bytes(8, "big") for n in range(5)), 5)
        ours.send(b"t")
        assert json.loads(front_end.hear()) == "".join(f"{n:016x}" for n in range(5))
        assert ours.recv(1) == b"r"
        assert tokens.free(16) == 16
        front_end.wait()
        assert channel.submit.segment.claim(L.LOCK_PRODUCER)  # the role is free with its process


def test_channel_of_another_epoch_is_refused_and_its_descriptors_closed(
    channel, instance, sent, num_fds
):
    before = num_fds()
    with pytest.raises(SegmentError, match="is of epoch 5, the channel of epoch 6") as caught:
        Channel.from_fds(instance, 6, 1, 2, sent)
    assert caught.value.errno == errno.EPROTO
    assert num_fds() == before - 6


@pytest.mark.parametrize("ring", ["submit", "tokens"])
@pytest.mark.parametrize("word", [L.W_MAGIC, L.W_VERSION, L.W_SLOT_SIZE, L.W_CAPACITY, L.W_EPOCH])
def test_damaged_header_is_refused_and_the_descriptors_closed(
    channel, instance, sent, ring, word, num_fds
):
    getattr(channel, ring).segment.words()[word] = 3
    before = num_fds()
    with pytest.raises(SegmentError, match=rf"\.{ring}"):
        Channel.from_fds(instance, 5, 1, 2, sent)
    assert num_fds() == before - 6


@pytest.mark.parametrize("size", [0, 1, 8, 4095, 4096, 5000, 8192])
def test_file_that_is_no_ring_is_refused_and_the_descriptors_closed(
    channel, instance, sent, tmp_path, size, num_fds
):
    path = tmp_path / "garbage"
    path.write_bytes(b"SHM" * size)
    with path.open("r+b") as file:
        os.truncate(path, size)
        os.dup2(file.fileno(), sent[3], inheritable=False)
    before = num_fds()
    with pytest.raises(SegmentError):
        Channel.from_fds(instance, 5, 1, 2, sent)
    assert num_fds() == before - 6


@pytest.mark.parametrize("taken", ["submit", "tokens"])
def test_channel_is_made_whole_or_not_at_all_when_a_name_is_taken(instance, taken, num_fds):
    stem = f"/shmserve.{instance}.1.0-0"
    blocker = Ring.create(f"{stem}.{taken}", TOKENS, 1)
    before = num_fds()
    with pytest.raises(SegmentError, match="exists already"):
        Channel.create(instance, 1, 0, 0, SUBMIT, TOKENS)
    assert names(f"shmserve.{instance}") == [f"{stem}.{taken}"]
    assert num_fds() == before
    blocker.segment.unlink()
    blocker.close()


@pytest.mark.parametrize("num_counters", range(4))
def test_channel_is_made_whole_or_not_at_all_when_descriptors_run_out(
    instance, monkeypatch, num_counters, num_fds
):
    left = [None] * num_counters
    eventfd = os.eventfd

    def limited(*args):
        if not left:
            raise OSError(errno.EMFILE, "Too many open files")
        left.pop()
        return eventfd(*args)

    monkeypatch.setattr(wakeup.os, "eventfd", limited)
    before = num_fds()
    with pytest.raises(OSError, match="Too many open files"):
        Channel.create(instance, 1, 0, 0, SUBMIT, TOKENS)
    assert names(f"shmserve.{instance}") == []
    assert num_fds() == before


def test_shape_that_cannot_be_is_refused_before_anything_is_made(instance):
    with pytest.raises(ValueError, match="power of two"):
        Channel.create(instance, 1, 0, 0, SUBMIT, RingShape(8, 12))
    assert names(f"shmserve.{instance}") == []


def test_end_that_was_used_is_not_given_to_a_second_life(channel, instance, sent):
    """The dead end took slots and credits into its own memory: a successor would overwrite or lose them."""
    first = Channel.from_fds(instance, 5, 1, 2, sent)
    assert first.tokens.producer().try_write(bytes(16), 2)
    consumer = channel.tokens.consumer()
    assert consumer.poll() == 2
    first.close()  # the producer is gone
    with pytest.raises(SegmentError, match="new channel") as caught:
        channel.tokens.producer()
    assert caught.value.errno == errno.ESTALE


def test_consumer_that_took_slots_has_no_successor_either(channel, instance, sent):
    first = Channel.from_fds(instance, 5, 1, 2, sent)
    assert channel.tokens.producer().try_write(bytes(16), 2)
    assert first.tokens.consumer().poll() == 2
    first.close()
    with pytest.raises(SegmentError, match="had a consumer: a new life needs a new channel"):
        channel.tokens.consumer()


def test_wait_credits_ends_when_credits_come_and_takes_none(channel):
    producer, consumer = channel.tokens.producer(), channel.tokens.consumer()
    assert not channel.tokens.wait_credits(0.0)
    assert not channel.tokens.wait_credits(-1.0)
    assert not channel.tokens.wait_credits(0.001)
    assert producer.try_write(bytes(8 * 16), 16)
    consumer.poll()
    consumer.release(3)
    assert channel.tokens.wait_credits(1000.0)
    assert channel.tokens.wait_credits(1000.0)
    assert producer.free(16) == 3
    assert not channel.tokens.wait_credits(0.0)


def test_counter_hands_over_the_sum_once():
    counter = Counter.create()
    assert counter.take() == 0
    for count in (1, 2, 2**40):
        counter.add(count)
    assert counter.take() == 2**40 + 3
    assert counter.take() == 0
    counter.close()


def test_a_counter_that_the_peer_has_filled_is_its_fault():
    counter = Counter.create()
    counter.add(2**64 - 2)
    with pytest.raises(RingProtocolError, match="filled"):
        counter.add(1)
    counter.close()


def test_counter_never_blocks_and_is_close_on_exec():
    counter = Counter.create()
    assert not os.get_blocking(counter.fd)
    assert not os.get_inheritable(counter.fd)
    counter.close()
