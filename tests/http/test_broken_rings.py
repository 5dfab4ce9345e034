"""Rings that cannot be believed, as the front end sees them: it says so once, and closes its side at once."""

import asyncio

import pytest
from puppet import Rings, until

from shmserve.http.errors import ApiError

NONSENSE = 99


def nonsense(req_id):
    slot = bytearray(128)
    slot[:8] = req_id.to_bytes(8, "little")
    slot[20] = NONSENSE
    return bytes(slot)


async def broken(rings):
    """A request in flight, and what the supervisor is told."""
    told = []
    rings.client.on_broken = lambda *message: told.append(message)
    entry = await rings.submit()
    rings.take()
    return entry, told


@pytest.mark.parametrize("ring", ["tokens", "submit"])
def test_a_counter_that_lies_is_told_once_with_the_epoch_of_the_channel(ring):
    async def scenario():
        async with Rings() as rings:
            entry, told = await broken(rings)
            counter = (
                rings.channel.tokens.data if ring == "tokens" else rings.channel.submit.credits
            )
            counter.add(1 << 40)
            while not entry.is_over:
                if ring == "submit":  # found out when the next record wants to be written
                    with pytest.raises(ApiError, match=r"slots more than it was sent|restarting"):
                        for _ in range(20):
                            await rings.submit()
                await asyncio.sleep(0.002)
            await until(lambda: rings.link.channel is None, "the channel is closed")
            ((worker, epoch, fault),) = told
            assert (worker, epoch) == (0, 1)
            assert "slots" in fault
            assert entry.error.code == "worker_died"
            assert not rings.client.in_flight

    asyncio.run(scenario())


def test_a_few_records_that_cannot_be_read_are_no_reason_and_many_are():
    async def scenario():
        async with Rings() as rings:
            entry, told = await broken(rings)
            rings.put(*[nonsense(entry.req_id)] * 15)
            await until(lambda: rings.link.pump.num_bad == 15, "they are counted")
            assert entry.error.status == 500  # its own end, and nobody else's
            assert told == [] and rings.link.is_serving
            rings.put(nonsense(entry.req_id))
            await until(lambda: rings.link.channel is None, "the channel is closed")
            ((_, _, fault),) = told
            assert fault.startswith("16 of its records could not be read")

    asyncio.run(scenario())


def test_a_new_channel_starts_with_a_clean_record():
    async def scenario():
        async with Rings() as rings:
            _, told = await broken(rings)
            rings.channel.tokens.data.add(1 << 40)
            await until(lambda: rings.link.channel is None, "the channel is closed")
            rings.connect()
            entry = await rings.submit()
            rings.take()
            assert not entry.is_over
            rings.channel.tokens.data.add(1 << 40)
            await until(lambda: entry.is_over, "the end of the second")
            assert [epoch for _, epoch, _ in told] == [1, 2]

    asyncio.run(scenario())
