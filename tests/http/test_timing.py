"""The times that a client is told of its own request: they are its own, in order, and each wait is in its own hop."""

import itertools
import json
import os
import signal
import statistics
import struct
import threading
import time

import pytest
from serving import PATIENCE_S, until

from shmserve.http.timing import Entrance, TokenTimes
from shmserve.wire.tokens import fold_tokens

ORDER = [
    *("arrival", "parsed", "tokenised", "submitted"),
    *("admitted", "first_scheduled", "prefill_end"),
    *("sampled", "published", "popped", "framed", "written"),
]
HOPS = ("publish", "pop", "frame", "write")
TIMED = {"stream_options": {"include_timing": True}}


def timings_of(objects):
    """(emission times of every frame with tokens, the object at the end) of one streamed choice or /generate."""
    found = []
    for event in objects:
        if "meta_info" in event:
            found.append(event["meta_info"]["timing"])
        elif event["choices"] and "timing" in event["choices"][0]:
            found.append(event["choices"][0]["timing"])
    *frames, end = found
    assert all(list(frame) == ["token_us"] for frame in frames)
    return [frame["token_us"] for frame in frames], end


def check_order(end, *, has_written):
    stamps = end["stamps_us"]
    assert list(stamps) == ORDER
    known = ORDER if has_written else ORDER[:-1]
    assert all(stamps[name] is not None for name in known), stamps
    assert (stamps["written"] is not None) == has_written
    for before, after in itertools.pairwise(known):
        assert stamps[before] <= stamps[after], (before, after, stamps)
    assert stamps["arrival"] == 0 and end["queue_us"] == stamps["first_scheduled"]
    for hop in HOPS if has_written else HOPS[:-1]:
        times = end["hops_us"][hop]
        assert 0 <= times["p50"] <= times["p99"] <= times["max"], (hop, times)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "ignore_eos": True, "max_tokens": 2, **TIMED}),
        (
            "/generate",
            {"text": "Hi", "sampling_params": {"ignore_eos": True, "max_new_tokens": 2}},
        ),
    ],
)
def test_the_hops_of_100_requests_add_up_to_what_the_client_measured(asker, path, body):
    differences, empty = [], []
    connection = asker.connect()
    data = json.dumps({"stream": True} | body)
    for _ in range(100):
        sent_ns = time.monotonic_ns()
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        line = response.readline()
        seen_us = (time.monotonic_ns() - sent_ns) / 1000
        assert line.startswith(b"data: {")
        lines = [line, *response.read().splitlines()]
        objects = [json.loads(x[6:]) for x in lines if x.startswith(b"data: {")]
        frames, end = timings_of(objects)
        assert [len(frame) for frame in frames] == [1, 1]
        check_order(end, has_written=True)
        assert end["ttft_us"] == end["stamps_us"]["written"]
        differences.append(seen_us - end["ttft_us"])
        sent_ns = time.monotonic_ns()
        connection.request("GET", "/live")
        connection.getresponse().read()
        empty.append((time.monotonic_ns() - sent_ns) / 1000)
    connection.close()
    assert statistics.median(differences) > 0  # a client sees nothing before it is written
    # 0.4 ms on a machine with nothing else to do: the way to the front end and back, as a request has it that asks for nothing.
    least = max(1_000, statistics.median(empty))
    assert statistics.median(differences) < 5 * least, (sorted(differences), sorted(empty))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_frame_has_its_tokens_times_and_the_end_is_made_of_them(asker, path):
    body = {"max_tokens": 20, "ignore_eos": True, "seed": 3, "prompt": "Hi"}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    objects = asker.stream(path, **body, **TIMED).objects()
    frames, end = timings_of(objects)
    assert [len(frame) for frame in frames] == [1] * 20
    times = [at for frame in frames for at in frame]
    assert times == sorted(times) and len(set(times)) == 20
    check_order(end, has_written=True)
    assert end["stamps_us"]["sampled"] == times[0]
    assert end["last_token_us"]["sampled"] == times[-1]
    assert end["num_tokens"] == 20 and end["num_coalesced_tokens"] == 0
    mean = (times[-1] - times[0]) / 19
    assert end["itl_engine_us"]["mean"] == pytest.approx(mean, abs=1)
    assert end["tokens_per_s"] == pytest.approx(1e6 / mean, rel=1e-2)
    assert end["itl_wire_us"]["mean"] > 0
    assert end["cached_tokens"] >= 0 and end["num_retractions"] == 0


def test_a_plain_answer_ends_with_the_same_object_and_all_its_tokens_times(asker):
    body = {"max_tokens": 5, "ignore_eos": True, "include_timing": True, "n": 2}
    streamed = timings_of(
        asker.stream(max_tokens=2, ignore_eos=True, include_timing=True).objects()
    )
    for choice in asker.complete(**body)["choices"]:
        told = choice["timing"]
        assert set(told) == set(streamed[1]) | {"token_us"}
        assert len(told["token_us"]) == 5
        check_order(told, has_written=False)
        assert told["itl_wire_us"] is None and told["itl_engine_us"] is not None
        assert told["ttft_us"] == told["stamps_us"]["framed"]


def test_who_does_not_ask_is_told_nothing(asker):
    whole = asker.complete(max_tokens=3)
    events = asker.stream(max_tokens=3).objects()
    assert "timing" not in json.dumps([whole, events])


def test_a_timed_stream_says_the_same_as_another(asker, seed_of):
    for name in ("emoji", "dog_then_eos", "one_two_three_four_at_once", "unfinished_then_plain"):
        fields = {"seed": seed_of(name), "max_tokens": 7, "temperature": 1}
        told = []
        for more in ({}, TIMED, TIMED | {"stream_interval": 3}):
            objects = asker.stream(**fields, **more).objects()
            choices = [event["choices"][0] for event in objects]
            told.append(("".join(c["text"] for c in choices), choices[-1]["finish_reason"]))
        assert told[0] == told[1] == told[2]
        frames, end = timings_of(objects)
        assert sum(map(len, frames)) == end["num_tokens"]
        assert end["num_coalesced_tokens"] == end["num_tokens"] - len(frames)


def test_meta_info_has_sglangs_keys_under_their_names(asker):
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    before = time.time()
    meta = asker.post("/generate", {"text": "Hi", "sampling_params": sampling}).json()["meta_info"]
    after = time.time()
    assert set(meta) >= {
        *("id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions"),
        *("reasoning_tokens", "completion_tokens", "cached_tokens", "cached_tokens_details"),
        *("dp_rank", "e2e_latency", "response_sent_to_client_ts", "queue_time"),
        *("forward_entry_time", "prefill_finished_time", "request_received_ts"),
        *("first_token_latency", "api_server_dispatch_finish_ts", "request_finished_ts"),
        "decode_throughput",
    }
    assert meta["cached_tokens_details"] == {"device": meta["cached_tokens"], "host": 0}
    days = [
        meta[name]
        for name in (
            "request_received_ts",
            "api_server_dispatch_finish_ts",
            "forward_entry_time",
            "prefill_finished_time",
            "request_finished_ts",
            "response_sent_to_client_ts",
        )
    ]
    assert [before - 0.1, *days, after + 0.1] == sorted([before - 0.1, *days, after + 0.1])
    frames = asker.stream("/generate", text="Hi", sampling_params=sampling).objects()
    assert [frame["meta_info"]["timing"]["token_us"] != [] for frame in frames] == [True] * 4 + [
        False
    ]
    assert all("e2e_latency" not in frame["meta_info"] for frame in frames[:-1])


@pytest.fixture(scope="module")
def tight(start_server):
    """A server whose token ring is soon full, and whose clients may be slow for long."""
    return start_server("--step-ms=2", "--token-ring-slots=32", "--slow-client-bytes=1048576")


def longest_hop(end):
    return max(HOPS, key=lambda hop: (end["hops_us"][hop] or {"max": 0})["max"])


def stop_front_end(server, seconds):
    """Stop the front end's process: the event loop stands still, and all else goes on. For how long it did."""
    pid = server.words("http")["pid"]
    begin = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)
    return time.monotonic() - begin


def test_a_stalled_event_loop_is_in_the_hop_before_the_tokens_are_read(tight):
    """0.05 s of one stream at 2 ms a step are 25 tokens: they fit the ring. It lasts a second, so that a client that is late still meets it.

    Three stops, as one may fall between a send and the stamp behind it: its wait is then the write's, and no gap on the wire. One
    that became so long that the ring was full is the next test's, and all begins anew.
    """
    for _ in range(5):
        stream = tight.stream(max_tokens=500, ignore_eos=True, **TIMED)
        events = stream.events()
        first = [json.loads(next(events))]
        lasted = []
        for _ in range(3):
            lasted.append(stop_front_end(tight, 0.05))
            time.sleep(0.0131)
        _, end = timings_of(first + [json.loads(e) for e in events if e != "[DONE]"])
        stream.leave()
        tight.wait_idle()
        if max(lasted) < 0.06:
            break
    hops = end["hops_us"]
    assert max(hops, key=lambda name: hops[name]["mean"]) == "pop", hops
    assert hops["pop"]["max"] >= 20_000
    assert end["itl_wire_us"]["max"] >= 40_000


def test_a_full_ring_is_in_the_hop_before_the_tokens_are_published(tight):
    """16 streams fill 32 slots in two steps: what is sampled while the front end stands still waits in the worker."""
    streams = [tight.stream(max_tokens=500, ignore_eos=True, **TIMED) for _ in range(16)]
    ends = []
    first = [[json.loads(text) for text in stream.take(1)] for stream in streams]
    threads = [
        threading.Thread(
            target=lambda s=stream, f=events: ends.append(
                timings_of(f + [json.loads(e) for e in s.events() if e != "[DONE]"])[1]
            )
        )
        for stream, events in zip(streams, first, strict=True)
    ]
    stop_front_end(tight, 0.15)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for stream in streams:
        stream.leave()
    tight.wait_idle()
    assert len(ends) == 16
    assert all(end["num_tokens"] == 500 for end in ends)
    assert max(end["hops_us"]["publish"]["max"] for end in ends) >= 75_000
    # The merged tokens keep their own times: the engine never waited.
    assert all(end["itl_engine_us"]["p50"] < end["hops_us"]["publish"]["max"] for end in ends)


def test_a_slow_client_is_in_the_hop_before_its_tokens_are_written(tight, wire):
    slow = wire(tight, receive_buffer=4096)
    # Long frames, so that the kernel's buffers are soon full.
    body = {"text": "Hi", "stream": True, "rid": "r" * 200, "incremental": True}
    slow.send("/generate", body | {"sampling_params": {"max_new_tokens": 400, "ignore_eos": True}})
    until(lambda: tight.words("http")["clients_congested"], "the client is behind")
    time.sleep(0.4)
    data = slow.read_until(b"data: [DONE]").split(b"\n\n")
    objects = [json.loads(x[x.index(b"data: {") + 6 :]) for x in data if b"data: {" in x]
    frames, end = timings_of(objects)
    assert sum(map(len, frames)) == 400
    assert longest_hop(end) == "write", end["hops_us"]
    assert end["hops_us"]["write"]["max"] >= 390_000
    assert end["num_coalesced_tokens"] == 400 - sum(1 for frame in frames if frame)
    tight.wait_idle()


def slot_of(time_ns, *, delay_us=0, index=0):
    slot = bytearray(128)
    struct.pack_into("<QQIBBBBQ", slot, 0, 7, time_ns, index, 1, 1, 0, 0, 0)
    struct.pack_into("<I", slot, 64, delay_us)
    return slot


def test_tokens_that_were_merged_on_the_way_keep_their_own_times():
    times = TokenTimes(Entrance(1_000_000, 1_000_000, 1_000_000))
    slot = slot_of(2_000_000)
    for index in (1, 2):
        assert fold_tokens(slot, memoryview(slot_of(2_000_000 + index * 500_000, index=index)))
    struct.pack_into("<I", slot, 64, 1_500)  # published 1.5 ms after the first
    times.came(bytes(slot), 3, 9_000_000)
    assert times.take(2) == [1_000, 1_500]
    assert times.take(1) == [2_000]
    times.framed(9_100_000)
    times.written(9_200_000)
    hops = times._hops()
    assert hops["publish"]["max"] == 1_500 and hops["publish"]["mean"] == 1_000
    assert hops["pop"]["max"] == hops["pop"]["p50"] == 5_500
    assert hops["frame"]["max"] == hops["write"]["max"] == 100


@pytest.mark.parametrize("time_ns", [0, 5_000, 2**63, 2**64 - 1])
def test_no_hop_is_negative_whatever_times_a_worker_tells(time_ns):
    times = TokenTimes(Entrance(1_000, 1_000, 1_000))
    times.came(bytes(slot_of(time_ns, delay_us=0xFFFF_FFFF)), 1, 9_000)
    times.framed(9_100)
    assert all(hop is None or hop["max"] >= 0 for hop in times._hops().values())
