"""One SSE response behind a real socket, its records put in by hand: errors after the 200, silence."""

import asyncio
import errno
import gc
import json

import pytest
from puppet import (
    events_of,
    finish_record,
    read_answer,
    started_record,
    text_of,
    tokens_record,
    until,
)
from stuck import DOG, WORLD, run

from shmserve.http.choice import Choice
from shmserve.http.generation import Generation
from shmserve.http.in_flight import InFlight
from shmserve.http.stream import SseStream
from shmserve.request import FinishReason
from shmserve.wire.submit_slots import SubmitKind

OF_A_STREAM = (SseStream, Choice, Generation, InFlight)


def test_plain_tokens_are_written_one_frame_each_and_the_end_behind_them(default_model):
    async def scenario(puppet):
        reader, _ = await puppet.ask(stream=True, max_tokens=4)
        req_id = (await puppet.submitted()).req_id
        for i in range(4):
            puppet.put(tokens_record(req_id, [WORLD], i))
            await until(lambda i=i: puppet.board["frames"] == i + 1, "its frame")
        puppet.put(finish_record(req_id, prompt_tokens=1, completion_tokens=4))
        status, body = await read_answer(reader)
        events = events_of(body)
        assert status == 200
        assert [e["choices"][0]["text"] for e in events[:-1]] == [" world"] * 4 + [""]
        assert events[0]["id"] == f"cmpl-{req_id:016x}"
        assert puppet.board["frames"] == 5

    run(scenario, default_model)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_stream_that_has_ended_leaves_nothing_for_the_garbage_collector(default_model, path):
    async def scenario(puppet):
        fields = {"text": "Hi", "prompt": None} if path == "/generate" else {}
        reader, writer = await puppet.ask(path, stream=True, **fields)
        req_id = (await puppet.submitted()).req_id
        for i in range(3):  # the second one is the first that the pump may write itself
            puppet.put(tokens_record(req_id, [WORLD], i))
            await asyncio.sleep(0.005)
        assert [type(each) for each in gc.get_objects() if type(each) in OF_A_STREAM]
        puppet.put(finish_record(req_id, prompt_tokens=1, completion_tokens=3))
        await read_answer(reader)
        writer.close()
        await until(
            lambda: not any(type(each) in OF_A_STREAM for each in gc.get_objects()),
            "all of it is gone",
        )

    gc.collect()
    gc.disable()
    try:
        run(scenario, default_model)
    finally:
        gc.enable()


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_an_error_before_the_first_token_is_a_status_for_streams_too(default_model, path):
    async def scenario(puppet):
        fields = {"text": "Hi", "prompt": None} if path == "/generate" else {}
        reader, _ = await puppet.ask(path, stream=True, **fields)
        req_id = (await puppet.submitted()).req_id
        puppet.put(
            started_record(req_id), finish_record(req_id, FinishReason.ERROR, "no such thing")
        )
        status, body = await read_answer(reader)
        assert status == 500
        assert json.loads(body)["error"]["message"] == "no such thing"

    run(scenario, default_model)


@pytest.mark.parametrize(
    ("how", "code"), [("error", "engine_error"), ("death", "worker_died"), ("abort", "aborted")]
)
def test_a_failure_after_the_200_is_an_error_event_and_then_the_end_C6(default_model, how, code):
    async def scenario(puppet):
        reader, _ = await puppet.ask(stream=True)
        req_id = (await puppet.submitted()).req_id
        puppet.put(tokens_record(req_id, [WORLD]))
        await reader.readuntil(b" world")
        puppet.put(tokens_record(req_id, [WORLD, WORLD], 1))
        if how == "error":
            puppet.put(finish_record(req_id, FinishReason.ERROR, "the logits were not finite"))
        elif how == "abort":  # somebody else aborted it, by its id
            puppet.put(finish_record(req_id, FinishReason.ABORT))
        else:
            puppet.link.close("signal 9")
        body = await reader.readuntil(b"0\r\n\r\n")
        assert b"HTTP/1.1" not in body, "a second response in the middle of the first"
        lines = [line for line in body.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]"
        error = json.loads(lines[-2][6:])["error"]
        assert error["code"] == code and error["message"]
        assert body.count(b" world") == 2  # what came before the error was sent before it
        assert b'"finish_reason":"' not in body

    run(scenario, default_model)


def test_an_abort_by_somebody_else_is_an_error_of_a_plain_request(default_model):
    async def scenario(puppet):
        reader, _ = await puppet.ask()
        req_id = (await puppet.submitted()).req_id
        puppet.put(tokens_record(req_id, [WORLD]), finish_record(req_id, FinishReason.ABORT))
        status, body = await read_answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (503, "aborted")

    run(scenario, default_model)


def test_a_fault_of_ours_after_the_200_is_an_error_event_too(default_model, monkeypatch):
    async def scenario(puppet):
        from shmserve.http.openai.choice import OpenAIChoice

        def fails(*_):
            raise RuntimeError("on purpose")

        reader, _ = await puppet.ask(stream=True)
        req_id = (await puppet.submitted()).req_id
        puppet.put(tokens_record(req_id, [WORLD]))
        await reader.readuntil(b" world")
        monkeypatch.setattr(OpenAIChoice, "closing", fails)
        puppet.put(finish_record(req_id))
        body = await reader.readuntil(b"0\r\n\r\n")
        assert b'"internal_error"' in body and b"on purpose" not in body
        assert b"HTTP/1.1" not in body

    run(scenario, default_model)


def test_one_of_several_choices_that_fails_ends_the_response_and_aborts_the_others(default_model):
    async def scenario(puppet):
        reader, _ = await puppet.ask(stream=True, n=2)
        await until(lambda: len(puppet.client.in_flight) == 2, "two SUBMITs")
        first, second = (req_id for _, req_id, _ in puppet.take())
        puppet.put(tokens_record(first, [WORLD]), tokens_record(second, [DOG]))
        await reader.readuntil(b" dog")
        puppet.put(finish_record(first, FinishReason.ERROR, "no"))
        body = await reader.readuntil(b"0\r\n\r\n")
        assert b'"engine_error"' in body
        taken = await until(puppet.take, "an ABORT")
        assert [(kind, req_id) for kind, req_id, _ in taken] == [(SubmitKind.ABORT, second)]
        puppet.put(finish_record(second, FinishReason.ABORT))
        await until(lambda: not puppet.client.in_flight, "FINISH")

    run(scenario, default_model)


def test_a_queued_request_gets_no_200_however_long_it_waits(default_model):
    async def scenario(puppet):
        reader, _ = await puppet.ask(stream=True)
        req_id = (await puppet.submitted()).req_id
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.3)
        puppet.put(finish_record(req_id, FinishReason.ERROR, "waited too long"))
        assert (await read_answer(reader))[0] == 500

    run(scenario, default_model, headers_after_s=0.02, keep_alive_s=0.02)


def test_a_started_request_gets_its_200_after_a_while_and_then_comments(default_model):
    async def scenario(puppet):
        reader, _ = await puppet.ask(stream=True)
        req_id = (await puppet.submitted()).req_id
        puppet.put(started_record(req_id))
        data = b""
        while data.count(b": keep-alive\n\n") < 4:
            data += await reader.read(4096)
        assert data.startswith(b"HTTP/1.1 200")
        puppet.put(tokens_record(req_id, [WORLD]))
        await reader.readuntil(b" world")
        await reader.readuntil(b": keep-alive\n\n")  # and in a silence between tokens
        puppet.put(finish_record(req_id))
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b"[DONE]" in rest
        assert puppet.board["frames"] == 2  # comments are none
        assert puppet.board.histograms["ttft_us"]

    run(scenario, default_model, headers_after_s=0.05, keep_alive_s=0.05)


def test_a_stream_that_flows_gets_no_comments(default_model):
    """It flows for longer than the silence that a comment breaks; a machine may stand still for less than that."""

    async def scenario(puppet):
        reader, _ = await puppet.ask(stream=True)
        req_id = (await puppet.submitted()).req_id
        for i in range(50):
            puppet.put(tokens_record(req_id, [WORLD], i))
            await asyncio.sleep(0.015)
        puppet.put(finish_record(req_id))
        _, body = await read_answer(reader)
        assert b"keep-alive" not in body
        assert text_of(events_of(body)) == " world" * 50

    run(scenario, default_model, keep_alive_s=0.5)


def test_a_client_that_leaves_in_the_moment_of_its_first_token_is_aborted(default_model):
    async def scenario(puppet):
        for delay in range(6):
            _, writer = await puppet.ask(stream=True)
            req_id = (await puppet.submitted()).req_id
            writer.transport.abort()
            for _ in range(delay):
                await asyncio.sleep(0)
            puppet.put(tokens_record(req_id, [WORLD]), tokens_record(req_id, [WORLD], 1))
            taken = await until(puppet.take, "an ABORT")
            assert [(kind, each) for kind, each, _ in taken] == [(SubmitKind.ABORT, req_id)]
            puppet.put(finish_record(req_id, FinishReason.ABORT))
            await until(lambda: not puppet.client.in_flight, "FINISH")

    run(scenario, default_model)


def test_a_pump_that_merges_tokens_of_a_stream_with_held_text_keeps_their_order(default_model):
    """Parts of characters and plain tokens in turn, in records of every size."""

    async def scenario(puppet):
        ids = [19556, 10813, 17, 905, 10813, 242, 905, 143, 233, 17, 218, 905, 321, 2767]
        tokenizer = puppet.front.model.tokenizer()
        for size in (1, 2, 3, 5):
            reader, _ = await puppet.ask(stream=True)
            req_id = (await puppet.submitted()).req_id
            for at in range(0, len(ids), size):
                puppet.put(tokens_record(req_id, ids[at : at + size], at))
                await asyncio.sleep(0.002)
            puppet.put(finish_record(req_id))
            _, body = await read_answer(reader)
            assert text_of(events_of(body)) == tokenizer.decode(ids)

    run(scenario, default_model)


def test_the_runner_cancels_handlers_of_clients_that_leave(default_model):
    async def scenario(puppet):
        assert puppet._runner.server.handler_cancellation is True

    run(scenario, default_model)


def test_a_frame_that_the_kernel_has_no_memory_for_ends_the_connection_and_leaves_no_hole(
    default_model,
):
    async def scenario(puppet):
        reader, _ = await puppet.ask(stream=True)
        req_id = (await puppet.submitted()).req_id
        puppet.put(tokens_record(req_id, [WORLD]))
        await reader.readuntil(b" world")
        entry = puppet.client.in_flight[req_id]
        lines, fixed, front, back, pieces, _, spill, _ = entry.direct

        def fail(frame):
            raise OSError(errno.ENOBUFS, "no memory")

        entry.direct = (lines, fixed, front, back, pieces, fail, spill, None)
        puppet.put(*(tokens_record(req_id, [WORLD], 1 + i) for i in range(3)))
        with pytest.raises(ConnectionResetError):
            while rest := await reader.read(4096):
                assert b" world" not in rest
            raise ConnectionResetError  # an end without a last chunk is one, too
        taken = await until(puppet.take, "an ABORT")
        assert [(kind, each) for kind, each, _ in taken] == [(SubmitKind.ABORT, req_id)]
        puppet.put(finish_record(req_id, FinishReason.ABORT))
        await until(lambda: not puppet.client.in_flight, "FINISH")

    run(scenario, default_model)
