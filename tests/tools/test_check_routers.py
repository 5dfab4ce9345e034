"""check_routers.py: what its client reads out of a stream, and that a configuration is the file of deploy/ with this run's addresses."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from check_routers import program_of
from router_client import Told, ask, question, questions, session
from router_fleet import KINDS, Router, Waited, free_ports, until


def frame(event):
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def delta(text, finish=None):
    return frame({"choices": [{"delta": {"content": text}, "finish_reason": finish}]})


WHOLE = (delta("a"), delta("b"), delta("", "length"), b"data: [DONE]\n\n")
BROKEN = (delta("a"), frame({"error": {"code": "worker_died"}}), b"data: [DONE]\n\n")


def answered(*frames, is_cut=False):
    """What the client tells of a server that answers with these frames, one chunk each."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head)
        for each in frames:
            writer.write(b"%x\r\n%b\r\n" % (len(each), each))
            await writer.drain()
        if not is_cut:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, session() as client:
            return await ask(client, f"http://127.0.0.1:{port}", question(1, 2))

    return asyncio.run(run())


def test_a_whole_stream_is_complete():
    told = answered(*WHOLE)
    assert told.is_complete and (told.text, told.finish, told.num_frames) == ("ab", "length", 3)


def test_a_stream_that_is_cut_or_lacks_its_end_is_not_complete():
    assert not answered(*WHOLE, is_cut=True).is_whole
    assert not answered(*WHOLE[:-1]).is_complete
    assert not answered(*WHOLE[:2], WHOLE[-1]).is_complete


def test_an_error_in_a_stream_is_told_by_its_code():
    told = answered(*BROKEN)
    assert not told.is_complete and told.code == "worker_died"
    assert told.has_done and told.is_whole


def test_nobody_there_is_status_0():
    (port,) = free_ports(1)

    async def run():
        async with session() as client:
            return await ask(client, f"http://127.0.0.1:{port}", question(1, 2))

    told = asyncio.run(run())
    assert (told.status, told.is_whole) == (0, False)


def test_no_two_questions_are_alike():
    asked = [json.dumps(each["messages"]) for each in questions(50, 2) + questions(50, 2)]
    assert len(set(asked)) == 100
    assert Told().is_complete is False


NOW = datetime(2026, 1, 1, tzinfo=UTC)


def report(*, num_reqs=0, age_s=0.0):
    """A worker in smg's list, with what it said of itself `age_s` before NOW."""
    said = (NOW - timedelta(seconds=age_s)).isoformat()
    return {"engine_load": {"timestamp": said, "loads": [{"num_total_reqs": num_reqs}]}}


@pytest.mark.parametrize(
    ("listed", "has_seen"),
    [
        ([report(), report()], True),
        ([report(), report(num_reqs=1)], False),
        ([report(age_s=0.001), report()], False),
        ([report(), {"engine_load": None}], False),
        ([report(), {}], False),
        ([], False),
    ],
)
def test_smg_has_seen_its_workers_idle_by_reports_that_are_new_enough(
    listed, has_seen, tmp_path, monkeypatch
):
    monkeypatch.setattr(Router, "workers", lambda self: listed)
    assert Router(KINDS["smg"], 39, 40, tmp_path).has_seen_idle(NOW) is has_seen
    assert Router(KINDS["nginx"], 39, 40, tmp_path).has_seen_idle(NOW), "it asks for no reports"


@pytest.mark.parametrize(("name", "file"), [("nginx", "nginx.conf"), ("haproxy", "haproxy.cfg")])
def test_a_configuration_has_the_addresses_of_this_run_and_none_of_its_own(name, file, tmp_path):
    router = Router(KINDS[name], 39, 40, tmp_path)
    workers = ["http://127.0.0.1:41", "http://127.0.0.1:42"]
    text = Path(router.configuration(file, workers)).read_text()
    for address in ("127.0.0.1:39", "127.0.0.1:41", "127.0.0.1:42"):
        assert address in text
    for address in ("127.0.0.1:30000", "127.0.0.1:8001", "127.0.0.1:8002"):
        assert address not in text


def test_a_program_is_what_was_named_else_what_is_found_else_none(tmp_path):
    assert program_of(KINDS["smg"], {"smg": "/bin/sh"}) == "/bin/sh"
    kind = type(KINDS["smg"])("none", "no-such-program-at-all", False)
    assert program_of(kind, {}) is None


def test_waiting_in_vain_says_for_what():
    with pytest.raises(Waited, match="for a miracle"):
        until(lambda: False, "for a miracle", 0.01)
