"""Clients that are no clients: slow heads and bodies, too large ones, several at once, and what is no HTTP at all."""

import contextlib
import gzip
import json
import socket
import time
import zlib

import pytest
from serving import until

TIMEOUT_S = 0.8  # of those who come in time: a machine may stand still for less
PATIENT_S = 5 * TIMEOUT_S
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
SHORT = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()


@pytest.fixture(scope="module")
def strict(start_server):
    return start_server(
        *("--step-ms=1", f"--request-timeout={TIMEOUT_S}", f"--idle-timeout={2 * TIMEOUT_S}"),
        "--max-body-bytes=100000",
    )


def framed(body: bytes, more: str = "") -> bytes:
    return f"{HEAD}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def refusal(data: bytes) -> tuple[int, str]:
    """(status, code) of a refusal, which must be JSON and say that the connection ends."""
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 ") or b"connection: close" in head.lower(), head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.slow
def test_a_head_that_does_not_come_is_a_408_and_the_end(strict, wire):
    slow = wire(strict)
    slow.sock.settimeout(PATIENT_S)
    slow.sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHo")
    slow.sock.sendall(b"st: localhost\r\n")
    assert refusal(slow.read_all()) == (408, "request_timeout")


def test_a_head_that_comes_byte_by_byte_gets_no_more_time(strict, wire):
    """The classic: each byte comes in time, the whole never."""
    slow = wire(strict)
    begin = time.monotonic()
    slow.sock.settimeout(0.02)
    slow.sock.sendall(b"GET /v1/models HTTP/1.1\r\nX: ")
    answer = b""
    while time.monotonic() - begin < 5 * PATIENT_S and not answer:
        with contextlib.suppress(ConnectionError):  # answered and closed since the last look
            slow.sock.sendall(b"a")
        with contextlib.suppress(TimeoutError):
            answer = slow.sock.recv(1 << 16)
    assert refusal(answer) == (408, "request_timeout")


@pytest.mark.slow
def test_the_second_head_of_a_connection_is_held_to_the_time_too(strict, wire):
    slow = wire(strict)
    slow.sock.settimeout(PATIENT_S)
    slow.sock.sendall(framed(SHORT))
    assert slow.read_until(b"}}").startswith(b"HTTP/1.1 200 ")
    slow.sock.sendall(b"GET /v1/mod")
    assert refusal(slow.read_all()) == (408, "request_timeout")


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize(
    "path", ["/v1/completions", pytest.param("/generate", marks=pytest.mark.slow)]
)
def test_a_body_that_does_not_come_is_a_408_and_the_end(strict, wire, path, framing):
    slow = wire(strict)
    slow.sock.settimeout(PATIENT_S)
    length = "Content-Length: 1000" if framing == "length" else "Transfer-Encoding: chunked"
    begin = '{"prompt":' if framing == "length" else '5\r\n{"a":\r\n'
    slow.sock.sendall(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n{begin}".encode()
    )
    data = slow.read_until(b"}}")
    assert refusal(data) == (408, "request_timeout")
    strict.wait_idle()


@pytest.mark.slow
def test_many_slow_clients_keep_nobody_from_being_served_and_are_gone_in_the_end(strict, wire):
    before = len(strict.output())
    slow = [wire(strict) for _ in range(60)]
    for i, each in enumerate(slow):
        each.sock.sendall(b"GET /v1/mo" if i % 2 else framed(SHORT)[:-5])
    assert strict.text(max_tokens=3)
    for each in slow:
        assert each.read_all().startswith(b"HTTP/1.1 408 ")
    until(lambda: strict.words("http")["connections"] == 0, "their connections are gone")
    assert "ERROR" not in strict.output()[before:]


@pytest.mark.slow
def test_a_silent_connection_is_closed_before_and_between_requests(strict, wire):
    silent = wire(strict)
    silent.sock.settimeout(10 * PATIENT_S)
    assert silent.read_all() == b""
    between = wire(strict)
    between.sock.settimeout(10 * PATIENT_S)
    between.sock.sendall(framed(SHORT))
    assert between.read_all().startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
def test_a_stream_and_a_slow_answer_outlive_these_times(strict):
    """They are for what a client sends, not for what it waits for."""
    begin = time.monotonic()
    count = int(4_000 * TIMEOUT_S)
    assert len(strict.stream(max_tokens=count, ignore_eos=True).objects()) == count + 1
    assert time.monotonic() - begin > TIMEOUT_S


# --- several at once


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_request_behind_a_running_one_is_not_answered_and_ends_the_connection(
    strict, wire, is_stream
):
    running = wire(strict)
    body = json.dumps(
        {"prompt": "Hi", "max_tokens": 300, "ignore_eos": True, "stream": is_stream}
    ).encode()
    running.sock.sendall(framed(body))
    until(lambda: strict.words("worker")["running"], "it runs")
    running.sock.sendall(framed(SHORT))
    running.sock.sendall(framed(SHORT))
    data = running.read_all()
    assert data.count(b"HTTP/1.1 200 OK") == 1, "the first is answered whole, and nothing else"
    if is_stream:
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") or b"data: [DONE]" in data[-40:]
    else:
        assert b'"completion_tokens":300' in data


def test_two_requests_in_one_packet_are_the_first_alone(strict, wire):
    both = wire(strict)
    both.sock.sendall(framed(SHORT) + framed(SHORT) + b"GET /v1/models HTTP/1.1\r\n")
    assert both.read_all().count(b"HTTP/1.1 200 OK") == 1


def test_a_client_that_waits_for_each_answer_keeps_its_connection(strict):
    connection = strict.connect()
    sockets = []
    for i in range(50):
        body = json.dumps({"prompt": "Hi", "max_tokens": 2, "stream": i % 2 == 0})
        connection.request("POST", "/v1/completions", body)
        assert connection.getresponse().read()
        sockets.append(connection.sock)
    assert sockets[0] is not None and len(set(sockets)) == 1
    connection.close()


def test_a_connection_outlives_large_bodies_and_their_refusals(server):
    connection = server.connect()
    sockets = set()
    for prompt in ("a" * 1_000_000, "", "b" * 3_000_000, ""):
        body = {"prompt": prompt} if prompt else [prompt]
        connection.request("POST", "/tokenize", json.dumps(body))
        response = connection.getresponse()
        assert response.status == (200 if prompt else 400) and response.read()
        sockets.add(connection.sock)
    assert None not in sockets and len(sockets) == 1
    connection.close()


def test_a_head_that_goes_on_beside_a_running_request_ends_the_connection_behind_it(strict, wire):
    """It is nobody's turn yet, and without a bound it would be kept for as long as the stream runs."""
    running = wire(strict)
    body = {"prompt": "Hi", "max_tokens": 8000, "stream": True, "ignore_eos": True}
    running.send("/v1/completions", body | {"request_id": "runs"})
    data = running.read_until(b"data: ")
    head = b"".join(b"X-%d: %b\r\n" % (i, b"a" * 8_000) for i in range(12))
    running.sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + head)
    assert strict.post("/abort_request", {"rid": "runs"}).json() == {"num_aborted": 1}
    data += running.read_until(b"0\r\n\r\n")
    assert data.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    with contextlib.suppress(ConnectionError):  # it may be closed already
        running.sock.sendall(b"\r\n")
    assert running.read_all() == b"", "no answer to what came too early"


# --- too much, and no HTTP


def test_a_header_that_is_too_long_is_a_431(strict, wire):
    big = wire(strict)
    big.sock.sendall(
        f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: {'a' * 9_000}\r\n\r\n".encode()
    )
    assert refusal(big.read_all()) == (431, "headers_too_large")


@pytest.mark.slow
def test_too_many_headers_are_a_431(strict, wire):
    many = wire(strict)
    headers = "".join(f"X-{i}: 1\r\n" for i in range(200))
    many.sock.sendall(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
    assert refusal(many.read_all()) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: local\x00host\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.9\r\n",
    ],
)
def test_what_is_no_http_is_a_400_without_a_word_in_the_log(strict, wire, data):
    before = len(strict.output())
    rude = wire(strict)
    rude.sock.sendall(data)
    assert refusal(rude.read_all()) == (400, "bad_request")
    # Lines of requests that ended before come when the log gets to them.
    said = strict.output()[before:].splitlines()
    assert [line for line in said if " request id=" not in line] == []


def test_a_body_that_is_not_what_its_headers_say_is_a_400(strict, wire):
    before = len(strict.output())
    for more, body in (
        ("Content-Encoding: gzip\r\nContent-Length: 8\r\n", b"not gzip"),
        ("Transfer-Encoding: chunked\r\n", b"zz\r\nhello\r\n0\r\n\r\n"),
    ):
        rude = wire(strict)
        rude.sock.sendall(f"{HEAD}{more}\r\n".encode() + body)
        assert b" 400 Bad Request" in rude.read_until(b"}}")[:30], more
    assert "Traceback" not in strict.output()[before:]


def test_a_compression_that_is_not_read_here_is_a_415_that_names_those_that_are(strict, wire):
    unread = wire(strict)
    unread.sock.sendall(framed(b"\x28\xb5\x2f\xfd", "Content-Encoding: zstd\r\n"))
    answer = unread.read_all()
    assert refusal(answer) == (415, "unsupported_encoding") and b"gzip" in answer


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_small_body_that_unpacks_to_a_large_one_is_a_413(strict, wire, pack):
    coding = "gzip" if pack is gzip.compress else "deflate"
    packed = pack(b'{"prompt": "' + b"a" * 50_000_000 + b'"}')
    assert len(packed) < 100_000
    bomb = wire(strict)
    bomb.sock.sendall(framed(packed, f"Content-Encoding: {coding}\r\n"))
    assert bomb.read_until(b"}}").startswith(b"HTTP/1.1 413 ")
    answer = strict.request("POST", "/v1/completions", pack(SHORT), {"Content-Encoding": coding})
    assert answer.status == 200, "an honest one is read"


# --- deep JSON

DEEP = 900  # below what Python's own limit stops
FIELDS = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
}


def nested(how: str, depth: int) -> str:
    if how == "list":
        return "[" * depth + "]" * depth
    if how == "object":
        return '{"a":' * depth + "1" + "}" * depth
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


@pytest.mark.parametrize("depth", [DEEP, 40_000])
@pytest.mark.parametrize("how", ["list", "object"])
@pytest.mark.parametrize("path", FIELDS)
def test_json_however_deep_is_served_or_refused_wherever_it_stands(strict, path, how, depth):
    """A field that is unknown, and those that reach templates, grammars and messages."""
    for field in ("x", "tools", "messages", "chat_template_kwargs", "response_format", "metadata",
                  "prompt", "text", "input", "logit_bias", "sampling_params"):  # fmt: skip
        rest = {key: value for key, value in FIELDS[path].items() if key != field}
        body = json.dumps(rest)[:-1] + f', "{field}": {nested(how, depth)}}}'
        if len(body) > 100_000:
            body = body[:99_000]  # and cut: no JSON either
        answer = strict.request("POST", path, body.encode())
        assert answer.status in (200, 400), (field, answer.body[:300])
    assert strict.words("worker")["pid"] == strict.worker_pid


@pytest.mark.parametrize("depth", [50, DEEP // 3])
def test_a_deep_schema_is_a_grammar_or_a_400_and_never_a_death(strict, depth):
    schema = nested("schema", depth)
    for path, field, value in (
        ("/v1/completions", "response_format",
         f'{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}'),
        ("/v1/completions", "structured_outputs", f'{{"json":{schema}}}'),
        ("/v1/chat/completions", "tools",
         f'[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]'),
    ):  # fmt: skip
        body = json.dumps(FIELDS[path])[:-1] + f', "{field}": {value}}}'
        answer = strict.request("POST", path, body.encode())
        assert answer.status in (200, 400), answer.body[:300]
    assert strict.words("worker")["pid"] == strict.worker_pid
    assert strict.text(max_tokens=2)


def test_the_front_end_that_all_this_was_sent_to_never_died(strict):
    """The last of the module: the same processes, idle, and no fault of ours in the log."""
    strict.wait_idle()
    assert "Traceback" not in strict.output()
    sock = socket.create_connection(("127.0.0.1", strict.port))
    sock.close()
