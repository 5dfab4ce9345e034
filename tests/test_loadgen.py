"""The load generator against small servers whose every answer is known."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from shmserve.load_report import LoadReport, RequestResult
from shmserve.load_spec import COMPLETIONS_PATH, LoadSpec
from shmserve.loadgen import run_load

USAGE = {"prompt_tokens": 7, "completion_tokens": 9}


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"


async def start_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


async def end_stream(
    response: web.StreamResponse, usage: dict | None = USAGE
) -> web.StreamResponse:
    await response.write(chunk("", "length"))
    if usage is not None:
        await response.write(
            b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        )
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def three_frames(request: web.Request) -> web.StreamResponse:
    response = await start_stream(request)
    for text in ("", "a", "b", "c"):  # the first has no content: it is the role's
        await response.write(chunk(text))
    return await end_stream(response)


@asynccontextmanager
async def serving(handler, path="/v1/chat/completions"):
    app = web.Application()
    app.router.add_post(path, handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def load(handler, path="/v1/chat/completions", **fields) -> LoadReport:
    async def run():
        async with serving(handler, path) as url:
            return await run_load(
                LoadSpec(base_url=url, model="m", path=path, **(DEFAULTS | fields))
            )

    return asyncio.run(run())


DEFAULTS = {"prompts": ("hello",), "max_tokens": (9,), "num_requests": 1, "concurrency": 1}


def test_a_whole_stream_counts_frames_with_content_and_tokens_from_usage():
    (result,) = load(three_frames).results
    assert result.error is None
    assert result.status == 200
    assert len(result.arrivals_ns) == 3
    assert (result.num_tokens, result.num_prompt_tokens) == (9, 7)
    assert result.finish_reason == "length"
    assert result.sent_ns <= result.arrivals_ns[0] <= result.arrivals_ns[-1] <= result.end_ns


def test_without_usage_tokens_are_the_frames_with_content():
    async def handler(request):
        response = await start_stream(request)
        await response.write(chunk("a") + chunk("b"))
        return await end_stream(response, usage=None)

    (result,) = load(handler).results
    assert result.num_tokens == 2
    assert result.num_prompt_tokens is None


def test_the_body_holds_the_prompt_in_turn_and_what_is_extra_wins():
    bodies = []

    async def handler(request):
        bodies.append(await request.json())
        return await three_frames(request)

    fields = {"prompts": ("p", (1, 2)), "max_tokens": (3, 4), "num_requests": 3}
    load(handler, COMPLETIONS_PATH, extra={"model": "other", "ignore_eos": True}, **fields)
    assert [body["prompt"] for body in bodies] == ["p", [1, 2], "p"]
    assert [body["max_tokens"] for body in bodies] == [3, 4, 3]
    assert all(
        body["stream"] and body["ignore_eos"] and body["model"] == "other" for body in bodies
    )


def test_events_cut_anywhere_are_put_together_again():
    async def handler(request):
        response = await start_stream(request)
        for byte in chunk("ä").replace(b"\n", b"\r\n") + b": a comment\n\n" + b"data:[DONE]\n":
            await response.write(bytes([byte]))
        await response.write_eof()
        return response

    (result,) = load(handler).results
    assert result.error is None
    assert len(result.arrivals_ns) == 1


def test_refusals_are_counted_by_their_status_and_their_times_count_nowhere():
    num_seen = 0

    async def handler(request):
        nonlocal num_seen
        num_seen += 1
        if num_seen == 2:
            return await three_frames(request)
        status = 503 if num_seen < 4 else 400
        return web.json_response({"error": {"message": "no"}}, status=status)

    report = load(handler, num_requests=4)
    assert report.errors == {"503": 2, "400": 1}
    row = report.summary()
    assert (row["requests"], row["ok"], row["output_tokens"]) == (4, 1, 9)
    assert row["ttft_p50_ms"] == row["ttft_p99_ms"] == report.results[1].ttft_ms


def test_a_connection_cut_mid_stream_is_a_broken_stream():
    async def handler(request):
        response = await start_stream(request)
        await response.write(chunk("a"))
        request.transport.abort()
        return response

    (result,) = load(handler).results
    assert (result.status, result.error) == (200, "broken stream")


def test_a_clean_end_without_done_is_a_broken_stream():
    async def handler(request):
        response = await start_stream(request)
        await response.write(chunk("a"))
        await response.write_eof()
        return response

    (result,) = load(handler).results
    assert result.error == "broken stream"
    assert len(result.arrivals_ns) == 1


@pytest.mark.parametrize(
    "event", [b"data: {not json\n\n", b"data: 7\n\n", b'data: {"choices": [3]}\n\n']
)
def test_an_event_that_is_no_chunk_is_a_broken_stream(event):
    async def handler(request):
        response = await start_stream(request)
        await response.write(event)
        return await end_stream(response)

    (result,) = load(handler).results
    assert result.error == "broken stream"


def test_an_error_event_inside_the_stream_is_told_apart():
    async def handler(request):
        response = await start_stream(request)
        await response.write(chunk("a") + b'data: {"error": {"message": "worker died"}}\n\n')
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    assert load(handler).errors == {"error in stream": 1}


def test_nobody_listening_is_a_connect_error():
    async def run():
        async with serving(three_frames) as url:
            pass
        return await run_load(LoadSpec(base_url=url, model="m", **DEFAULTS))

    report = asyncio.run(run())
    assert report.errors == {"connect": 1}
    assert report.results[0].status is None
    assert report.summary()["ttft_p50_ms"] is None


def test_a_server_slower_than_the_timeout_is_a_timeout():
    released = asyncio.Event()

    async def handler(request):
        response = await start_stream(request)
        await response.write(chunk("a"))
        await released.wait()
        return response

    async def run():
        async with serving(handler) as url:
            report = await run_load(LoadSpec(base_url=url, model="m", timeout_s=0.8, **DEFAULTS))
            released.set()
            return report

    (result,) = asyncio.run(run()).results
    assert (result.status, result.error) == (200, "timeout")


def test_open_loop_arrivals_do_not_wait_for_completions():
    num_open, all_open = 0, asyncio.Event()

    async def handler(request):
        nonlocal num_open
        num_open += 1
        if num_open == 20:
            all_open.set()
        await all_open.wait()  # in a closed loop the twentieth would never come
        return await three_frames(request)

    report = load(handler, num_requests=20, rate=2000.0, concurrency=None)
    assert report.errors == {}
    assert num_open == 20


def test_closed_loop_never_has_more_open_than_its_concurrency():
    num_open, most = 0, 0

    async def handler(request):
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0.01)
        response = await three_frames(request)
        num_open -= 1
        return response

    report = load(handler, num_requests=12, concurrency=3)
    assert [result.index for result in report.results] == list(range(12))
    assert report.errors == {}
    assert most == 3


def test_due_times_are_poisson_and_the_same_for_the_same_seed():
    def times(seed):
        fields = DEFAULTS | {"num_requests": 4000, "rate": 50.0, "concurrency": None}
        return LoadSpec(base_url="", model="m", seed=seed, **fields).due_times_s()

    assert times(1) == times(1) != times(2)
    gaps = [after - before for before, after in zip(times(1), times(1)[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.1)
    assert deviation == pytest.approx(mean, rel=0.1)  # exponential gaps: both are 1 / rate


def test_lateness_of_the_generator_counts_against_ttft():
    result = RequestResult(0, 1_000_000, 3_000_000, 9_000_000, 200, None, (5_000_000, 8_000_000), 4)
    assert result.lateness_ms == 2.0
    assert result.ttft_ms == 4.0
    assert result.e2e_ms == 8.0
    assert result.itls_ms == [3.0]
    assert result.tpot_ms == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {"rate": 1.0},  # and a concurrency
        {"concurrency": None},
        {"concurrency": 0},
        {"concurrency": None, "rate": 0.0},
        {"concurrency": None, "rate": float("nan")},
        {"prompts": ()},
        {"num_requests": 0},
        {"prompts": ((1, 2),)},  # ids in a chat
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(fields):
    with pytest.raises(ValueError):
        LoadSpec(base_url="http://x", model="m", **(DEFAULTS | fields))


def test_warm_up_is_sent_and_neither_counted_nor_told():
    num_seen = 0
    told = []

    async def handler(request):
        nonlocal num_seen
        num_seen += 1
        return await three_frames(request)

    async def run():
        async with serving(handler) as url:
            fields = DEFAULTS | {"num_requests": 3, "num_warmup": 2}
            return await run_load(LoadSpec(base_url=url, model="m", **fields), told.append)

    report = asyncio.run(run())
    assert num_seen == 5
    assert [result.index for result in report.results] == [2, 3, 4]
    assert sorted(result.index for result in told) == [2, 3, 4]


def test_a_duration_ends_a_closed_loop_and_what_runs_is_waited_for():
    report = load(three_frames, num_requests=None, duration_s=0.6, concurrency=2)
    assert report.errors == {}
    begin_ns = report.results[0].due_ns
    assert all(result.due_ns - begin_ns < 0.6e9 for result in report.results)
    assert len(report.results) > 2


def test_a_unix_socket_and_a_key_are_used(tmp_path):
    seen = []

    async def handler(request):
        seen.append(request.headers["Authorization"])
        return await three_frames(request)

    async def run():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        path = str(tmp_path / "s")
        await web.UnixSite(runner, path).start()
        try:
            fields = {"base_url": "http://localhost", "uds": path, "api_key": "k-1"}
            return await run_load(LoadSpec(model="m", **(DEFAULTS | fields)))
        finally:
            await runner.cleanup()

    assert asyncio.run(run()).errors == {}
    assert seen == ["Bearer k-1"]


def test_a_refusal_keeps_its_message_and_a_dead_port_says_so():
    async def handler(request):
        return web.json_response({"error": {"message": "no room"}}, status=503)

    assert load(handler).results[0].message == "no room"

    async def nobody():
        async with serving(handler) as url:
            pass
        return await run_load(LoadSpec(base_url=url, model="m", **DEFAULTS))

    assert "Connection refused" in asyncio.run(nobody()).results[0].message


@pytest.mark.parametrize("usage", [{"completion_tokens": None, "prompt_tokens": "7"}, "none", [1]])
def test_a_usage_that_counts_nothing_is_as_none(usage):
    async def handler(request):
        response = await start_stream(request)
        await response.write(chunk("a") + chunk("b"))
        return await end_stream(response, usage)

    report = load(handler)
    (result,) = report.results
    assert (result.error, result.num_tokens, result.num_prompt_tokens) == (None, 2, None)
    assert report.summary()["output_tokens"] == 2
