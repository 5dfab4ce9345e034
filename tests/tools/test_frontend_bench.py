"""The measuring chain of bench_frontend.py: client, floor server, logs and their arithmetic."""

import json
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
from bench_common import command_line, compile_c
from bench_floor import DEFAULT_FRAME
from bench_frontend import Settings, bars_of, measure_pair
from frontend_features import FEATURES, PLAIN
from frontend_run import EmissionLog, Stream, StreamRun, Window, run_client, tokens_per_s
from frontend_servers import FloorServer, OurServer

from shmserve.http.fields import decode
from shmserve.http.openai.schemas import UNSUPPORTED_CHAT, ChatRequest
from shmserve.http.structured import asked_for

pytestmark = pytest.mark.slow

CORE = 0


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compile_c(
        Path(__file__).parents[2] / "tools" / "sse_client.c", tmp_path_factory.mktemp("client")
    )


class ScriptedServer:
    """A server that answers one connection with given pieces, each sent on its own."""

    measured_pids = (1,)

    def __init__(self, folder: Path, pieces: list[bytes]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.client_address = ["-p", str(self._listener.getsockname()[1])]
        self.body_file = folder / "body.json"
        self.body_file.write_text('{"n": 1}')
        self.request = b""
        self._pieces = pieces
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while not self.request.endswith(b'{"n": 1}'):
                self.request += connection.recv(4096)
            for piece in self._pieces:
                connection.sendall(piece)

    def join(self) -> None:
        self._thread.join()
        self._listener.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*frames: bytes) -> bytes:
    return b"".join(b"%X\r\n%b\r\n" % (len(frame), frame) for frame in frames) + b"0\r\n\r\n"


def frame(content: str, key: str = '"delta":{"content":') -> bytes:
    return b'data: {"id":"chatcmpl-00000000000000ab","choices":[{%s%s}]}\n\n' % (
        key.encode(),
        json.dumps(content).encode(),
    )


STREAM = [
    frame(""),  # the role's: no content
    frame("a"),
    b": keep-alive\n\n",
    frame('"'),  # an escaped quote is content
    frame("c", '"index":0,"delta":{"content":'),  # the key stands elsewhere
    b'data: {"id":"x","choices":[{"delta":{},"finish_reason":"length"}]}\n\n',
    b"data: [DONE]\n\n",
]


def run_scripted(program, tmp_path, pieces, num_tokens=3) -> tuple[StreamRun, bytes]:
    server = ScriptedServer(tmp_path, pieces)
    try:
        return run_client(program, server, 1, num_tokens), server.request
    finally:
        server.join()


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_client_counts_frames_with_content_however_the_bytes_are_cut(program, tmp_path, size):
    data = HEAD + chunked(*STREAM)
    run, request = run_scripted(
        program, tmp_path, [data[i : i + size] for i in range(0, len(data), size)]
    )
    (stream,) = run.streams
    assert stream.is_whole
    assert stream.req_id == "00000000000000ab"
    assert len(stream.arrivals_ns) == 3
    assert stream.num_bytes == len(data)
    assert stream.start_ns < stream.arrivals_ns[0] <= stream.arrivals_ns[1] <= stream.arrivals_ns[2]
    assert request.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")


def test_client_counts_completions_text_and_chunks_that_cut_a_frame(program, tmp_path):
    frames = b"".join(frame(text, '"text":') for text in "abcd")
    pieces = [HEAD, chunked(frames[:100], frames[100:101], frames[101:], b"data: [DONE]\n\n")]
    (stream,) = run_scripted(program, tmp_path, pieces)[0].streams
    assert len(stream.arrivals_ns) == 4


def test_client_calls_a_cut_stream_not_whole(program, tmp_path):
    data = HEAD + chunked(*STREAM)
    (stream,) = run_scripted(program, tmp_path, [data[:-5]])[0].streams
    assert len(stream.arrivals_ns) == 3
    assert not stream.is_whole


def test_client_reports_a_refusal_by_its_status(program, tmp_path):
    refusal = (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    )
    (stream,) = run_scripted(program, tmp_path, [refusal])[0].streams
    assert stream.status == 503
    assert not stream.is_whole


@pytest.mark.parametrize("over_unix", [False, True])
def test_floor_gives_each_stream_every_token_as_its_own_frame_with_its_time(
    program, tmp_path, over_unix
):
    with FloorServer(tmp_path, DEFAULT_FRAME, 48, 2.0, CORE, over_unix) as floor:
        run = run_client(program, floor, 5, 48)
    emitted = EmissionLog(floor.log_path).emission_times(
        {stream.req_id for stream in run.streams}, 48
    )
    assert len(emitted) == 5
    for stream in run.streams:
        assert len(stream.arrivals_ns) == len(emitted[stream.req_id]) == 48
        assert all(lag > 0 for lag in stream.lags_ns(emitted[stream.req_id]))
        assert emitted[stream.req_id] == sorted(emitted[stream.req_id])
    assert run.window is not None
    assert 0 < run.window.num_frames < 5 * 48
    assert run.window.server_cpu_ns > 0


class FakeServer(OurServer):
    extra: tuple[str, ...] = ()

    def command(self):
        fake = str(Path(__file__).parent / "fake_server.py")
        return [sys.executable, fake, str(self.port), *self.extra]


@pytest.mark.parametrize("extra", [(), ("--orphan",)])
def test_front_end_is_found_pinned_probed_and_never_left_behind(tmp_path, capfd, extra):
    core = min(os.sched_getaffinity(0))
    server = FakeServer(tmp_path, 4, 16, 4.48, core, False, ())
    server.extra = extra
    with server:
        pid = server.measured_pid
        assert "-m shmserve.http" in command_line(pid)
        assert os.sched_getaffinity(pid) == {core}
        assert json.loads(server.body_file.read_text())["model"] == "fake-model"
        assert b'"content":" bb"' in server.probe_frame()  # of " a", " bb", " longer" the median
    assert command_line(pid) == ""
    assert ("left pid" in capfd.readouterr().err) == bool(extra)


def test_server_that_ends_at_its_start_is_an_error_with_its_words(tmp_path):
    server = FakeServer(tmp_path, 4, 16, 4.48, 0, False, ())
    server.extra = ("shmserve.http",)
    server.port = -1
    with pytest.raises(SystemExit, match=r"ended with 1:\n(.|\n)*port"):
        server.__enter__()


def test_command_names_what_the_bench_needs_of_the_server(tmp_path):
    words = OurServer(tmp_path, 384, 256, 4.48, 0, True, ("--x",)).command()
    assert words[1:6] == ["-m", "shmserve", "start", "--runner", "simulated"]
    for flag in ("--step-ms", "--max-num-seqs", "--port", "--emission-log", "--uds"):
        assert flag in words
    assert words[-1] == "--x" and "--http-processes" not in words
    pair = OurServer(tmp_path, 512, 256, 4.48, 0, False, (), pins=False, num_http=2).command()
    assert pair[pair.index("--http-processes") + 1] == "2"


def test_a_server_paired_with_itself_holds_frames_and_rate(program, tmp_path):
    settings = Settings(step_ms=4.48, num_tokens=64, num_pairs=1, num_redo=0, patience_s=0)
    with FloorServer(tmp_path, DEFAULT_FRAME, 64, 4.48, CORE, False) as floor:
        floor.name, second = "first", floor

        class Other:
            name = "second"

            def __getattr__(self, key):
                return getattr(second, key)

        pair = measure_pair(4, True, floor, Other(), program, settings)
    assert pair["frames_per_token"] == 1
    assert pair["c_us"] > 0 and pair["floor_c_us"] > 0
    assert pair["c_ratio"] == pair["c_us"] / pair["floor_c_us"]
    assert pair["lag_p50_ms"] > 0
    assert not (tmp_path / "first.sock").exists()


def test_bars_know_their_batches_and_fail_above_their_limits():
    row = {
        "batch": 256,
        "c_ratio": 1.61,
        "frames_per_token": 0.99,
        "tokens_per_s_of_ideal": 0.989,
        "itl_p99_over_floor_ms": 2.24,
        "lag_p99_over_floor_ms": 4.49,
    }
    assert [bar.holds for bar in bars_of([row], 4.48)] == [False, True, False, True, False]
    assert len(bars_of([{**row, "batch": 8}], 4.48)) == 4
    assert bars_of([{**row, "feature": "stop"}], 4.48) == [], "the promises are those of plain text"


def test_every_feature_is_a_request_that_chat_completions_take():
    for name, extra in FEATURES.items():
        body = {"messages": [{"role": "user", "content": "x"}], **extra}
        parsed, ignored = decode(json.dumps(body).encode(), ChatRequest, UNSUPPORTED_CHAT)
        assert not ignored and (name == PLAIN or extra)
        assert bool(asked_for(parsed)) == (name == "grammar")


def stream_of(arrivals_ns: list[int]) -> Stream:
    return Stream("00", 200, True, 0, 0, arrivals_ns)


def test_rate_counts_whole_steps_wherever_the_window_ends():
    step_ns = 4_480_000
    arrivals = [step * step_ns + 1000 for step in range(100)]
    for end in (10 * step_ns + 999, 10 * step_ns + 1001, 11 * step_ns - 1):
        run = StreamRun([stream_of(arrivals)] * 8, Window(500, end + 500, 1, 1), 0)
        assert tokens_per_s(run, 4.48) == pytest.approx(8 / 4.48e-3)


def test_lag_of_merged_frames_counts_only_the_certain_ends():
    assert stream_of([5, 6, 9]).lags_ns([1, 2, 3]) == [4, 4, 6]
    assert stream_of([5, 9]).lags_ns([1, 2, 3]) == [4, 6]


def test_emission_log_reads_on_expands_counts_and_leaves_a_half_line(tmp_path):
    path = tmp_path / "log"
    log = EmissionLog(path)
    first = {"step": 1, "time_ns": 10, "req_ids": ["a", "b"], "indices": [0, 0]}
    second = {"step": 2, "time_ns": 20, "req_ids": ["a", "b"], "indices": [1, 1], "counts": [2, 1]}
    third = json.dumps({"step": 3, "time_ns": 30, "req_ids": ["b"], "indices": [2]}) + "\n"
    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n" + third[:9])
    with pytest.raises(SystemExit, match="1 of 2 requests"):
        log.emission_times({"a", "b"}, 3, timeout_s=0)
    with path.open("a") as file:
        file.write(third[9:])
    assert log.emission_times({"a", "b"}, 3) == {"a": [10, 20, 20], "b": [10, 20, 30]}


def test_emission_log_with_a_lost_token_is_refused(tmp_path):
    path = tmp_path / "log"
    path.write_text(json.dumps({"step": 1, "time_ns": 10, "req_ids": ["a"], "indices": [1]}) + "\n")
    with pytest.raises(SystemExit, match="goes from token"):
        EmissionLog(path).emission_times({"a"}, 1, timeout_s=0)
