"""The soak's checks: each one finds what it is for. And (slow) a soak: of a sound server nothing is found, of a disturbed one much."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import soak
from soak_answer import Answer, BadAnswerError
from soak_client import ABORT, Outcome, Plan, ask
from soak_faults import BURST, DEATHS, EXCUSES, Windows, finding_of
from soak_laws import (
    REFUSED_AS,
    broken_by_counts,
    broken_by_deaths,
    broken_by_growth,
    broken_by_idle,
    growth,
    last_life,
    row_of,
    slope,
)
from soak_run import FLAGS, Soak
from soak_traffic import CPU, SIMULATED, Mix, book
from soak_watch import IDLE_WORDS, Look, Process, SoakServer, process_of

from shmserve.boards import HTTP_BOARD, SUPERVISOR_BOARD, WORKER_BOARD

STREAMED = Plan("/v1/completions", {"stream": True}, "Once upon")
PLAIN = Plan("/v1/completions", {}, "Once upon")


def event(value):
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def choice(text, finish=None, stop_reason=None):
    inner = {"index": 0, "text": text, "finish_reason": finish, "stop_reason": stop_reason}
    return event({"choices": [inner]})


USAGE = event({"choices": [], "usage": {"completion_tokens": 2}})
DONE = b"data: [DONE]\n\n"
SONG = (choice("Once"), choice(" upon"), choice("", "length"), USAGE, DONE)


def streamed(*events, end=b"0\r\n\r\n"):
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in events) + end


def plain(status, value, *headers):
    body = json.dumps(value).encode()
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def refusal(status, code, *headers):
    error = {"message": "No.", "type": "overloaded_error", "param": None, "code": code}
    return plain(status, {"error": error}, *headers)


# ------------------------------------------------------------------------------------------------------------------ the client


def test_an_answer_is_the_same_however_it_is_cut():
    data = streamed(*SONG)
    for size in (1, 7, len(data)):
        answer = Answer()
        for at in range(0, len(data), size):
            assert not answer.is_over
            answer.feed(data[at : at + size])
        assert answer.is_over and answer.is_done
        text, end, usage = answer.result()
        assert (text, end["finish_reason"], usage) == (
            "Once upon",
            "length",
            {"completion_tokens": 2},
        )


@pytest.mark.parametrize(
    "data",
    [
        streamed(*SONG[:-1]),
        streamed(*SONG, choice("more")),
        streamed(*SONG) + b"x",
        streamed(b"data: {nonsense\n\n", DONE),
        streamed(b"event: x\n\n", DONE),
        streamed(*SONG, b"data: half"),
        streamed(end=b"zz\r\n\r\n"),
        streamed(end=b"1\r\nabc"),
        plain(200, {}) + b"x",
        b"SSH-2.0\r\n\r\n",
    ],
)
def test_an_answer_that_no_client_could_read_is_told(data):
    with pytest.raises(BadAnswerError):
        Answer().feed(data)


async def asked(data, plan):
    """How a request ends to which somebody answers `data` and closes."""
    loop = asyncio.get_running_loop()

    async def serve(listener):
        connection, _ = await loop.sock_accept(listener)
        with connection:
            connection.setblocking(False)
            await loop.sock_recv(connection, 65_536)
            await loop.sock_sendall(connection, data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        found, _ = await asyncio.gather(ask(listener.getsockname()[1], plan), serve(listener))
    return found


WRONG_SONG = (choice("Once"), choice(" open"), *SONG[2:])
CUT_BY_ERROR = (
    choice("Once"),
    event({"error": {"message": "x", "type": "y", "code": "aborted"}}),
    DONE,
)


@pytest.mark.parametrize(
    ("data", "plan", "end", "code"),
    [
        (streamed(*SONG), STREAMED, "whole", ""),
        (streamed(*WRONG_SONG), STREAMED, "wrong", ""),
        (streamed(SONG[0], *SONG[2:]), STREAMED, "wrong", ""),  # a token was lost
        (streamed(SONG[0], *SONG), STREAMED, "wrong", ""),  # or came twice
        (streamed(choice("Once"), choice("", "length", "timeout"), DONE), STREAMED, "whole", ""),
        (streamed(choice("Once upon"), DONE), STREAMED, "wrong", ""),  # and no finish_reason
        (streamed(*CUT_BY_ERROR), STREAMED, "error", "aborted"),
        (streamed(SONG[0], end=b""), STREAMED, "broken", ""),
        (streamed(WRONG_SONG[1], end=b""), STREAMED, "wrong", ""),
        (
            plain(200, {"choices": [{"text": "Once upon", "finish_reason": "stop"}]}),
            PLAIN,
            "whole",
            "",
        ),
        (plain(200, {"choices": [{"text": "Once", "finish_reason": "stop"}]}), PLAIN, "wrong", ""),
        (refusal(503, "queue_full", "Retry-After: 1"), PLAIN, "refused", "queue_full"),
        (refusal(503, "queue_full"), PLAIN, "wrong", "queue_full"),  # when may it come again?
        (plain(500, {"oops": 1}), PLAIN, "wrong", ""),
        (b"", PLAIN, "broken", ""),
        (b"", replace(PLAIN, way="soon"), "left", ""),
        (plain(200, {"num_aborted": 1}), Plan(ABORT, {"rid": "a"}), "whole", ""),
    ],
)
def test_every_end_is_told_as_what_it_is(data, plan, end, code):
    outcome = asyncio.run(asked(data, plan))
    assert (outcome.end, outcome.code) == (end, code), outcome


def test_a_port_that_refuses_is_a_finding():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and does not listen
        outcome = asyncio.run(ask(sock.getsockname()[1], PLAIN))
    assert finding_of(outcome, {"http killed"})


# ------------------------------------------------------------------------------------------------------------------ the excuses


def outcome(end="whole", code="", plan=PLAIN, **more):
    return Outcome(plan, 1.0, end, 2.0, code=code, **more)


@pytest.mark.parametrize(("code", "faults"), EXCUSES.items())
def test_an_error_needs_its_own_fault(code, faults):
    ended = outcome("broken") if code == "broken" else outcome("refused", code)
    assert finding_of(ended, ())
    assert finding_of(ended, {"supervisor stopped"})
    for fault in faults:
        assert not finding_of(ended, {fault})


@pytest.mark.parametrize(
    ("ended", "is_fine"),
    [
        (outcome(), True),
        (outcome("late"), False),
        (outcome("wrong", fault="x"), False),
        (outcome(stop_reason="timeout"), False),
        (outcome(stop_reason="timeout", plan=replace(PLAIN, body={"timeout_ms": 5})), True),
        (outcome("refused", "deadline_exceeded"), False),
        (outcome("refused", "deadline_exceeded", replace(PLAIN, body={"timeout_ms": 5})), True),
        (outcome("error", "aborted"), False),
        (outcome("error", "aborted", replace(PLAIN, aborted_after_s=1.0)), True),
        (outcome("error", "slow_client"), False),
        (outcome("error", "slow_client", replace(PLAIN, way="stuck", stuck_s=1.0)), True),
        (outcome("broken", plan=replace(PLAIN, way="stuck", stuck_s=1.0)), False),
        (outcome("broken", plan=replace(PLAIN, way="stuck", stuck_s=6.0)), True),
        (outcome("error", "queue_full"), False),  # a refusal behind a 200
        (outcome("refused", "internal_error"), False),
        (outcome("refused", "invalid_value", replace(PLAIN, expected_code="invalid_value")), True),
        (outcome("refused", "invalid_value", replace(PLAIN, expected_code="invalid_type")), False),
        (outcome(plan=replace(PLAIN, expected_code="invalid_type")), False),
    ],
)
def test_a_client_answers_only_for_its_own_doing(ended, is_fine):
    faults = {"burst"} if ended.end == "error" else set()
    assert (finding_of(ended, faults) == "") is is_fine


def test_a_fault_is_felt_from_its_beginning_until_a_moment_after_its_end():
    windows = Windows()
    early = Outcome(PLAIN, 0.0, "whole", time.monotonic() - 0.1)
    window = windows.open(BURST)
    during = Outcome(PLAIN, 0.0, "whole", time.monotonic() + 0.1)
    assert (windows.of(early), windows.of(during)) == (set(), {"burst"})
    windows.close(window)
    assert windows.of(Outcome(PLAIN, window.end_s - 0.1, "whole", window.end_s + 5)) == {"burst"}
    assert windows.of(Outcome(PLAIN, window.end_s + 0.1, "whole", window.end_s + 5)) == set()


# --------------------------------------------------------------------------------------------------------------------- the laws

PROCESS = Process(10, 100, 2**20, 3, (("socket", 4),))


def look(**words):
    """A server at rest; `words` by role overrides some of the board's, which are 0."""
    found = {
        "worker": dict.fromkeys(WORKER_BOARD.words, 0),
        "http": dict.fromkeys(HTTP_BOARD.words, 0),
        "supervisor": dict.fromkeys(SUPERVISOR_BOARD.words, 0),
    }
    for role, some in words.items():
        assert set(some) <= set(found[role])
        found[role] |= some
    processes = {role: replace(PROCESS, pid=i) for i, role in enumerate(found)}
    return Look(1.0, processes, (), ("1.worker0.board",), found)


def test_the_laws_ask_for_words_that_boards_have():
    boards = {"worker": WORKER_BOARD, "http": HTTP_BOARD, "supervisor": SUPERVISOR_BOARD}
    for role, words in IDLE_WORDS.items():
        assert set(words) <= set(boards[role].words)
    assert {word for words in REFUSED_AS.values() for word in words} <= set(HTTP_BOARD.words)


def test_a_server_at_rest_breaks_no_law():
    rest = look()
    assert broken_by_idle(rest, rest, rest.processes) == []


@pytest.mark.parametrize(
    "found",
    [
        look(worker={"kv_blocks_used": 1}),
        look(http={"in_flight": 1}),
        look(http={"num_bad_records": 1}),
        replace(look(), strangers=("pid 7: x",)),
        replace(look(), segments=()),
        replace(look(), segments=("1.worker0.board", "2.worker0.board")),
        replace(look(), words={}),
        replace(look(), processes={k: v for k, v in look().processes.items() if k != "worker"}),
        replace(
            look(),
            processes=look().processes | {"http": replace(PROCESS, descriptors=(("socket", 5),))},
        ),
    ],
)
def test_whatever_is_held_at_rest_is_told(found):
    assert broken_by_idle(look(), found, look().processes)


def counts(requests, computed, read, frames, refused=0):
    http = {"num_requests": requests, "tokens": read, "frames": frames}
    return look(
        worker={"generation_tokens": computed},
        http=http | {"num_refused_queue_full": refused},
    )


WHOLE = outcome(num_tokens=5, num_events=3)
LEFT = outcome("left", plan=replace(PLAIN, way="soon"))
SILENT = outcome("left", plan=replace(PLAIN, way="connect"))
REFUSED = outcome("refused", "queue_full")


@pytest.mark.parametrize(
    ("after", "outcomes", "is_fine"),
    [
        (counts(2, 10, 10, 6), [WHOLE, WHOLE], True),
        (counts(1, 10, 10, 6), [WHOLE, WHOLE], False),
        (counts(3, 10, 10, 6), [WHOLE, WHOLE], False),
        (counts(2, 11, 10, 6), [WHOLE, WHOLE], False),
        (counts(2, 10, 9, 6), [WHOLE, WHOLE], False),
        (counts(2, 10, 10, 7), [WHOLE, WHOLE], False),
        (counts(2, 50, 50, 20), [WHOLE, LEFT], True),
        (counts(1, 5, 5, 3), [WHOLE, LEFT, SILENT], True),
        (counts(3, 5, 5, 3), [WHOLE, LEFT, SILENT], False),
        (counts(2, 4, 4, 3), [WHOLE, LEFT], False),
        (counts(2, 5, 5, 2), [WHOLE, LEFT], False),
        (counts(2, 5, 5, 3, refused=1), [WHOLE, REFUSED], True),
        (counts(2, 5, 5, 3), [WHOLE, REFUSED], False),
        (counts(2, 5, 5, 3, refused=2), [WHOLE, REFUSED], False),
    ],
)
def test_counters_add_up_or_are_told(after, outcomes, is_fine):
    assert (broken_by_counts(look(), after, outcomes) == []) is is_fine


def test_what_a_dead_front_end_counted_is_not_forgotten():
    before = counts(7, 0, 0, 0)
    after = look(http={"num_requests": 1}, supervisor={"past_http_num_requests": 8})
    after.processes["http"] = replace(PROCESS, life=200)
    assert broken_by_counts(before, after, [WHOLE, WHOLE]) == []
    assert broken_by_counts(before, after, [WHOLE]) != []


def test_a_death_that_nobody_caused_is_told():
    killed = {"worker_restarts_signal": 1, "http_restarts_stopped": 1}
    words = look(supervisor=killed).words["supervisor"]
    assert broken_by_deaths(words, {"worker killed": 1, "http hung": 1}) == []
    assert len(broken_by_deaths(words, {})) == 2
    assert broken_by_deaths(look().words["supervisor"], {"worker faulted": 1})


def test_growth_and_slope_tell_a_leak_from_a_warm_up():
    warm_up = [10.0, 50.0, 55.0, 55.0, 55.0, 54.0, 55.0, 55.0]
    leak = [10.0 + 2 * i for i in range(8)]
    assert growth(warm_up) == 0.0
    assert growth(leak) == 8.0
    assert growth(leak[:7]) is None
    assert slope([0.0, 1.0, 2.0], [5.0, 7.0, 9.0]) == pytest.approx(2.0)
    assert slope([1.0], [5.0]) is None


def test_a_process_that_grows_is_told():
    def rows(*mib, threads=3):
        looks = [look() for _ in mib]
        for each, rss in zip(looks, mib, strict=True):
            grown = replace(PROCESS, rss=rss * 2**20, num_threads=threads)
            each.processes["worker"] = grown
        looks[-1].processes["worker"] = replace(grown, num_threads=3)
        return row_of(looks, "worker")

    assert broken_by_growth(rows(*[50] * 8)) == []
    assert broken_by_growth(rows(*[50] * 7)) == []
    assert len(broken_by_growth(rows(*range(50, 82, 4)))) == 1
    assert len(broken_by_growth(rows(*[50] * 8, threads=2))) == 1


def test_the_last_life_begins_with_the_last_process():
    looks = [look() for _ in range(3)]
    looks[0].processes["http"] = replace(PROCESS, life=1)
    assert len(last_life(looks, "http")) == 2
    assert len(last_life(looks, "worker")) == 3


# ------------------------------------------------------------------------------------------------------------ traffic, and a look


@pytest.mark.parametrize("profile", [SIMULATED, CPU])
def test_the_same_seed_plans_the_same_traffic_of_every_kind(profile):
    def plans(seed):
        songs = book(profile, seed)
        assert songs == book(profile, seed)
        mix = Mix(profile, songs, random.Random(seed))
        return [mix.any() for _ in range(400)]

    drawn = plans(1)
    assert drawn == plans(1) != plans(2)
    assert {plan.way for plan in drawn} >= {"read", "stuck", "read head only", "connect", "head"}
    assert any("timeout_ms" in plan.body for plan in drawn)
    assert any(plan.aborted_after_s for plan in drawn)
    assert any(plan.expected_code for plan in drawn)
    policies = {plan.body.get("on_slow_client") for plan in drawn}
    assert policies == {None, "coalesce", "block", "drop"}


def test_a_process_is_seen_with_its_descriptors():
    before = process_of(os.getpid())
    read, write = os.pipe()
    after = process_of(os.getpid())
    os.close(read)
    os.close(write)
    assert dict(after.descriptors)["pipe"] == dict(before.descriptors).get("pipe", 0) + 2
    assert (before.pid, before.life) == (after.pid, after.life)
    assert before.rss > 2**20


# ----------------------------------------------------------------------------------------------------------------- whole soaks


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("default_model")
def test_of_a_sound_server_nothing_is_found(tmp_path):
    found = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, soak.__file__, "--minutes=0.3", "--seed=2", f"--json={found}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary, *rows = json.loads(found.read_text())
    assert summary["findings"] == []
    assert summary["ends"]["whole"] > 20
    assert {row["process"] for row in rows} == {"supervisor", "http", "worker"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("default_model")
def test_a_death_outside_of_every_window_is_found(tmp_path):
    """The same soak, with a hand that it does not know of."""

    async def disturbed(server):
        run = Soak(server, SIMULATED, seed=2)
        run._bag = [BURST] * 100
        soaking = asyncio.create_task(run.run(0.3))
        while not run.looks:
            await asyncio.sleep(0.1)
        await asyncio.sleep(3)
        os.kill(server.pids()["worker"], signal.SIGKILL)
        await soaking
        run.judge_run(0.3)
        return run.findings

    with SoakServer(tmp_path, (*SIMULATED.flags, *FLAGS)) as server:
        findings = asyncio.run(disturbed(server))
        assert server.end() == []
        assert server.alarms() == []
    assert any("worker_died" in finding or "no_worker" in finding for finding in findings), findings
    assert "worker_restarts_signal: 1, caused were 0" in findings


def test_every_death_has_an_excuse_to_give():
    excused = set().union(*EXCUSES.values())
    assert {fault.name for fault in DEATHS} <= excused
