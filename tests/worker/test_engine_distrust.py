"""Front ends that cannot be believed: whoever runs the engine is told once, and the channel ends at the step boundary."""

import pytest

from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES
from shmserve.worker.channels import MOST_BAD_RECORDS


def told_by(rig):
    told = []
    rig.engine.channels.on_broken = lambda channel, fault: told.append(
        (channel.http, channel.epoch, fault)
    )
    return told


@pytest.mark.parametrize("ring", ["submit", "tokens"])
@pytest.mark.parametrize("when", ["before the step", "under the forward pass"])
def test_a_counter_that_lies_is_told_once_and_nothing_it_announced_is_handled(rig, ring, when):
    r = rig(num_http=2, token_slots=4, max_num_seqs=8)
    told = told_by(r)
    liar, other = r.fronts
    for front in r.fronts:
        front.submit(front.http + 1, max_tokens=30)
    r.step()

    def lie():
        counter = liar.channel.submit.data if ring == "submit" else liar.channel.tokens.credits
        counter.add(1 << 40)

    if when == "before the step":
        lie()
    else:
        r.under_forward = lie
    for _ in range(40):
        r.step()
        other.read()
    ((http, epoch, fault),) = told
    assert (http, epoch) == (0, 1)
    assert "slots" in fault
    assert list(other.finished) == [2]
    assert r.board["num_bad_records"] == 0
    r.assert_idle()


def test_bad_records_end_the_channel_when_there_are_too_many(rig):
    r = rig(num_http=2)
    told = told_by(r)
    front, other = r.fronts
    noise = b"\xee" * SUBMIT_SLOT_BYTES
    for _ in range(MOST_BAD_RECORDS - 1):
        front.send_raw(noise)
    front.submit(1)
    r.step()
    assert not told
    front.send_raw(noise)
    other.submit(2)
    r.run_dry()
    ((http, _, fault),) = told
    assert http == 0
    assert fault == f"{MOST_BAD_RECORDS} of its records could not be read"
    assert 2 in other.finished
    r.assert_idle()
