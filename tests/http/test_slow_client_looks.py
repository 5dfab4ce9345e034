"""One look at a congested client: what is said of it, from what is left and from what time it is."""

import asyncio
import time

import pytest
from sockets import SilentTransport

from shmserve.config import HttpConfig
from shmserve.http.errors import ApiError
from shmserve.http.native import GenerateRequest
from shmserve.http.slow_client import Backlog, SlowClientRules, SlowClients, rules_of


def backlog_of(transport, is_answer=False):
    rules = SlowClientRules("coalesce", 65_536, 10.0)
    return Backlog(transport, rules, "a test", lambda is_stuck: None, is_answer, 100.0)


def test_a_client_is_stuck_when_nothing_was_taken_for_the_whole_bound():
    transport = SilentTransport(5000)
    backlog = backlog_of(transport)
    assert backlog.look(109.9) == ""
    transport.size = 4999
    assert backlog.look(110.0) == ""  # a byte was taken
    assert backlog.look(119.9) == ""
    assert backlog.look(120.0) == "stuck"


def test_what_was_cut_must_be_read_by_then_however_it_is_read():
    transport = SilentTransport(5000)
    backlog = backlog_of(transport)
    backlog.end_by(112.0)
    for at in range(101, 112):
        transport.size -= 100
        assert backlog.look(at) == ""
    transport.size -= 100
    assert backlog.look(112.0) == "stuck"


def test_time_in_which_nobody_served_it_counts_for_neither_bound():
    transport = SilentTransport(5000)
    silent, cut = backlog_of(transport), backlog_of(transport)
    cut.end_by(105.0)
    for backlog in (silent, cut):
        backlog.excuse(3.0)
    assert cut.look(107.9) == "" and cut.look(108.0) == "stuck"
    assert silent.look(112.9) == "" and silent.look(113.0) == "stuck"


def test_a_front_end_that_stood_still_ends_no_client_for_it(board):
    async def run():
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        clients = SlowClients(board)
        rules = SlowClientRules("coalesce", 65_536, 0.2)
        begin = loop.time()
        backlog = clients.watch(
            SilentTransport(5000), rules, "a test", lambda is_stuck: ended.set_result(loop.time())
        )
        backlog.end_by(begin + 0.2)
        time.sleep(0.6)
        # Of the 0.6 s at most the time to the first look, 0.05 s, is the client's.
        assert await asyncio.wait_for(ended, 10) - begin >= 0.6 + 0.2 - 0.05

    asyncio.run(run())


def test_a_stream_whose_client_closed_its_side_is_gone_and_an_answer_goes_on():
    transport = SilentTransport(5000)
    stream, answer = backlog_of(transport), backlog_of(transport, is_answer=True)
    transport.is_closed = True
    assert stream.look(101) == "gone"
    assert answer.look(101) == ""  # closed by us, behind the last byte
    transport.size = 0
    assert answer.look(102) == "over"


def test_a_request_may_ask_for_less_than_the_server_allows_and_for_any_policy():
    config = HttpConfig(slow_client="drop", slow_client_bytes=8192, slow_client_seconds=5.0)
    assert rules_of(config) == SlowClientRules("drop", 8192, 5.0)
    assert rules_of(config, GenerateRequest()) == rules_of(config)
    asked = GenerateRequest(on_slow_client="block", slow_client_bytes=1024, slow_client_seconds=0.5)
    assert rules_of(config, asked) == SlowClientRules("block", 1024, 0.5)
    assert rules_of(config, asked).look_s == 0.125
    with pytest.raises(ApiError, match=r"slow_client_seconds must be 0\.01 to 5, got nan"):
        rules_of(config, GenerateRequest(slow_client_seconds=float("nan")))
