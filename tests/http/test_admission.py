"""The verdict on who comes in, by the front end's own counts; who has to go for somebody better; and how fast places come free."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.boards import REFUSALS
from shmserve.config import HttpConfig
from shmserve.http.admission import EVICTED, Admission
from shmserve.http.drain_rate import DrainRate
from shmserve.http.errors import ApiError
from shmserve.request import FinishReason


class FakeClient:
    """What Admission asks a WorkerClient, and the worker behind it."""

    def __init__(self):
        self.link = SimpleNamespace(worker=0, state="ready", phase="", fraction=0.0)
        self.links = {0: self.link}
        self.counts = dict.fromkeys(REFUSALS, 0)
        self.total = 0
        self.refused = []
        self.num_free = 100
        self._numbers = iter(range(1, 1 << 30))

    def note_refusal(self, reason):
        self.total += 1
        self.counts[reason] += 1

    def serving(self):
        return self.link if self.link.state == "ready" else None

    def refuse(self, entry, error):
        self.refused.append((entry.req_id, error))

    def submit(self, admission, party, *num_tokens):
        """What a Generation does."""
        admission.settle(party, sum(num_tokens))
        entries = []
        for count in num_tokens:
            entry = SimpleNamespace(req_id=next(self._numbers), party=party, started=None)
            entry.finish = entry.expiry = None
            entry.deadline_ns = 0
            party.joined(entry, count)
            entries.append(entry)
        return entries

    def start(self, entry):
        entry.started = object()
        self.on_started(entry)

    def finish(self, entry, reason=FinishReason.LENGTH, time_ns=0, scheduled_ns=1):
        entry.finish = SimpleNamespace(finish=reason, time_ns=time_ns, scheduled_ns=scheduled_ns)
        self.on_left(entry)


def bench(run_slots=2, **config):
    client = FakeClient()
    return client, Admission(client, run_slots, HttpConfig(**config))


def refusal(call, *args, **more):
    with pytest.raises(ApiError) as refused:
        call(*args, **more)
    return refused.value


def test_run_slots_and_the_queue_are_what_may_be_in():
    client, admission = bench(2, max_queued_requests=3)
    parties = [admission.enter(1) for _ in range(5)]  # nothing of them is submitted yet
    error = refusal(admission.enter, 1)
    assert (error.status, error.code, error.type) == (503, "queue_full", "overloaded_error")
    assert error.message == "The request queue is full." and error.retry_after_s >= 1
    assert (client.total, client.counts["queue_full"]) == (1, 1)
    admission.close(parties[0])
    admission.close(parties[0])  # silent
    admission.enter(1)
    assert refusal(admission.enter, 2).code == "queue_full"
    too_many = refusal(admission.enter, 6)
    assert (too_many.status, too_many.param) == (400, "n")


def test_a_place_is_held_until_the_finish_whatever_its_handler_does():
    client, admission = bench(1, max_queued_requests=0)
    party = admission.enter(1)
    (entry,) = client.submit(admission, party, 3)
    admission.close(party)  # its client has gone; the worker has not said so
    assert refusal(admission.enter, 1).code == "queue_full"
    client.finish(entry, FinishReason.ABORT)
    admission.enter(1)


def test_the_operator_chooses_the_status_of_a_full_queue():
    _, admission = bench(1, max_queued_requests=0, queue_full_status=429)
    admission.enter(1)
    error = refusal(admission.enter, 1)
    assert (error.status, error.code) == (429, "queue_full")


def test_draining_comes_before_everything_and_can_be_retried():
    client, admission = bench()
    party = admission.enter(1)
    admission.is_draining = True
    for error in (refusal(admission.enter, 1), refusal(admission.settle, party, 1)):
        assert (error.status, error.code, error.retry_after_s) == (503, "draining", 1)
    assert client.counts["draining"] == client.total == 2


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [("loading", "loading", "40%"), ("dead", "no_worker", "dead"), ("hung", "no_worker", "hung")],
)
def test_without_a_worker_the_refusal_says_what_it_does_instead(state, code, words):
    client, admission = bench()
    client.link.state, client.link.phase, client.link.fraction = state, "reading weights", 0.4
    error = refusal(admission.enter, 1)
    assert (error.status, error.code, error.retry_after_s) == (503, code, 1)
    assert words in error.message and client.counts[code] == 1


# -- priority --------------------------------------------------------------------------------------------------------------


def test_a_better_request_takes_the_place_of_the_worst_and_newest_that_waits():
    client, admission = bench(1, max_queued_requests=3)
    (running,) = client.submit(admission, admission.enter(1, priority=9), 1)
    client.start(running)
    parties = [admission.enter(1, priority=priority) for priority in (2, 5, 5)]
    entries = [client.submit(admission, party, 1)[0] for party in parties]
    assert refusal(admission.enter, 1, priority=5).code == "queue_full"  # strictly better only
    better = admission.enter(1, priority=4)
    assert not client.refused, "nobody goes before the better one was found valid"
    client.submit(admission, better, 1)
    ((req_id, error),) = client.refused
    assert req_id == entries[2].req_id, "the newest of the worst; who runs stays, however bad"
    assert (error.status, error.code, error.message) == (503, "queue_full", EVICTED)
    assert error.retry_after_s >= 1 and client.counts["evicted"] == 1
    # The worker has yet to say that it is gone: its place is taken all the same, once.
    assert admission.line.num_places == 4
    client.finish(entries[2], FinishReason.ABORT)
    admission.close(parties[2])
    assert admission.line.num_places == 4 and admission.line.num_waiting == 3


def test_who_is_better_but_invalid_costs_nobody_its_place():
    client, admission = bench(0, max_queued_requests=1)
    worse = admission.enter(1, priority=1)
    better = admission.enter(1, priority=0)
    admission.close(better)  # a 400
    client.submit(admission, worse, 1)
    assert not client.refused and admission.line.num_places == 1


def test_nobody_is_sent_away_for_one_that_the_table_has_no_place_for():
    client, admission = bench(0, max_queued_requests=1)
    client.submit(admission, admission.enter(1, priority=1), 1)
    client.num_free = 0
    assert refusal(client.submit, admission, admission.enter(1), 1).code == "queue_full"
    assert not client.refused


def test_who_was_sent_away_while_its_prompt_was_tokenised_hears_of_it():
    client, admission = bench(0, max_queued_requests=1)
    worse = admission.enter(1, priority=1)
    client.submit(admission, admission.enter(1, priority=0), 1)
    assert refusal(admission.settle, worse, 1).message == EVICTED
    admission.close(worse)
    assert (admission.line.num_places, admission.line.num_waiting) == (1, 1)


def test_who_counted_on_a_place_that_was_started_meanwhile_is_refused_itself():
    client, admission = bench(0, max_queued_requests=1)
    (entry,) = client.submit(admission, admission.enter(1, priority=1), 1)
    better = admission.enter(1, priority=0)
    client.start(entry)
    assert refusal(admission.settle, better, 1).code == "queue_full"
    assert not client.refused


def test_several_go_for_one_of_several_choices_or_none():
    client, admission = bench(0, max_queued_requests=3)
    for priority in (1, 3, 2):
        client.submit(admission, admission.enter(1, priority=priority), 1)
    assert refusal(admission.settle, admission.enter(3, priority=2), 3).code == "queue_full"
    assert not client.refused, "one place would not have been enough"
    client, admission = bench(0, max_queued_requests=3)
    for priority in (1, 3, 2):
        client.submit(admission, admission.enter(1, priority=priority), 1)
    client.submit(admission, admission.enter(2, priority=0), 1, 1)
    assert [req_id for req_id, _ in client.refused] == [2, 3]


def test_a_request_of_which_a_choice_runs_is_not_sent_away():
    client, admission = bench(1, max_queued_requests=1)
    first, second = client.submit(admission, admission.enter(2, priority=9), 1, 1)
    client.start(first)
    assert refusal(admission.enter, 1, priority=0).code == "queue_full"
    assert admission.line.num_waiting == 1 and second.started is None


# -- prompt tokens ---------------------------------------------------------------------------------------------------------


def test_prompt_tokens_that_wait_are_bounded():
    client, admission = bench(1, max_queued_requests=9, max_queued_tokens=100)
    (long,) = client.submit(admission, admission.enter(1), 500)  # alone, whatever its length
    assert refusal(admission.enter, 1, least_tokens=1).code == "queue_full"
    client.start(long)
    client.submit(admission, admission.enter(1), 60)
    error = refusal(admission.enter, 1, least_tokens=41)
    assert "60 prompt tokens wait" in error.message and "100" in error.message
    party = admission.enter(1, least_tokens=10)
    assert admission.line.num_tokens == 70
    assert refusal(admission.settle, party, 41).code == "queue_full"
    admission.close(party)
    assert client.counts["tokens"] == client.total == 3
    client.submit(admission, admission.enter(1), 40)
    assert admission.line.num_tokens == 100


def test_a_better_prompt_takes_the_room_of_worse_ones():
    client, admission = bench(0, max_queued_requests=9, max_queued_tokens=100)
    for count in (50, 30, 20):
        client.submit(admission, admission.enter(1, priority=1), count)
    client.submit(admission, admission.enter(1, least_tokens=40), 45)
    assert [req_id for req_id, _ in client.refused] == [3, 2]
    assert admission.line.num_tokens == 95


# -- timeouts --------------------------------------------------------------------------------------------------------------


def test_the_time_that_was_over_in_the_queue_says_whose_bound_it_was():
    client, admission = bench(0, max_queued_requests=9)
    for deadline_ns, status, code in ((0, 503, "waiting_timeout"), (70, 504, "deadline_exceeded")):
        (entry,) = client.submit(admission, admission.enter(1), 1)
        entry.deadline_ns = deadline_ns
        client.finish(entry, FinishReason.TIMEOUT, time_ns=71, scheduled_ns=0)
        assert (entry.expiry.status, entry.expiry.code) == (status, code)
    assert client.counts["waiting_timeout"] == client.counts["deadline"] == 1
    (entry,) = client.submit(admission, admission.enter(1), 1)
    client.start(entry)
    client.finish(entry, FinishReason.TIMEOUT)  # it ran: what it has is its answer
    assert entry.expiry is None


# -- laws ------------------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "submit", "close", "start", "finish"]),
        st.integers(1, 3),
        st.integers(-1, 1),
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(STEPS)
def test_counts_are_those_of_who_is_in_and_never_above_the_bounds(steps):
    client, admission = bench(2, max_queued_requests=4, max_queued_tokens=40)
    parties, submitted, entries = [], [], []
    for what, size, priority, pick in steps:
        try:
            if what == "enter":
                parties.append((admission.enter(size, priority=priority), size))
            elif what == "submit" and parties:
                party, size = parties.pop(pick % len(parties))
                submitted.append(party)
                entries += client.submit(admission, party, *[pick] * size)
            elif what == "close" and submitted:
                admission.close(submitted.pop(pick % len(submitted)))
            elif entries:
                entry = entries[pick % len(entries)]
                if what == "start" and entry.started is None and entry.party.error is None:
                    client.start(entry)
                elif what == "finish":
                    entries.remove(entry)
                    client.finish(entry)
        except ApiError as error:
            assert error.code in ("queue_full",)
        line = admission.line
        alive = [e for e in entries if e.party.error is None]
        held = sum(size for party, size in parties if party.error is None)
        over = sum(p.num_over for p, _ in parties if p.error is None)
        refused_late = [p for p in submitted if p.error is None and p._num_held]
        held += sum(p._num_held for p in refused_late)
        over += sum(p.num_over for p in refused_late)
        assert line.num_places == len(alive) + held <= admission.most_places + over
        waiting = [e for e in alive if e.started is None]
        assert line.num_waiting == len(waiting) + held
    for party in [p for p, _ in parties] + submitted:
        admission.close(party)
    for entry in entries:
        client.finish(entry)
        admission.close(entry.party)
    line = admission.line
    assert (line.num_places, line.num_waiting, line.num_tokens) == (0, 0, 0)
    assert not line.has_worse_than(-2)


# -- Retry-After -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("shmserve.http.drain_rate.time.monotonic", lambda: clock.now)
    return clock


def test_retry_after_is_the_places_by_the_rate_since_the_queue_formed(clock):
    rate = DrainRate()
    assert rate.retry_after_s(5) == 1  # nothing is known
    clock.now = 3600.0  # an idle hour is no rate
    rate.formed()
    for _ in range(5):
        clock.now += 2.0
        rate.finished()
    assert [rate.retry_after_s(n) for n in (1, 3, 1000)] == [2, 6, 60]
    clock.now += 20.0  # it has stalled: 30 s for five
    assert rate.retry_after_s(1) == 6
    rate.dissolved()
    clock.now += 3600.0
    rate.formed()  # what was known last, until there is something newer
    assert rate.retry_after_s(1) == 6
    for _ in range(100):
        clock.now += 0.5
        rate.finished()
    assert rate.retry_after_s(4) == 2


def test_the_queue_tells_the_rate_what_it_sees(clock):
    client, admission = bench(1, max_queued_requests=2)
    entries = [client.submit(admission, admission.enter(1), 1)[0] for _ in range(3)]
    for entry in entries[:2]:
        client.start(entry)
        clock.now += 7.0
        client.finish(entry)
        entries.append(client.submit(admission, admission.enter(1), 1)[0])
    assert refusal(admission.enter, 1).retry_after_s == 7
