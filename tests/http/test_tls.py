"""TLS by flags: the same answers, no byte of them in the clear, and one line for files that cannot be used.

The certificates in tls/ are for these tests alone: self-signed, for localhost and 127.0.0.1, valid for a hundred years.
"""

import asyncio
import http.client
import json
import os
import re
import socket
import ssl
import time
from pathlib import Path

import pytest
from puppet import Puppet, finish_record, tokens_record
from puppet import until as turns_until
from serving import Server, until
from stuck import RINGS, WORLD

from shmserve.config import ConfigError, HttpConfig
from shmserve.http import listener
from shmserve.http.connection import Connection
from shmserve.http.slow_client import SlowClientRules, SlowClients
from shmserve.request import FinishReason
from shmserve.tls import server_context
from shmserve.wire.submit_slots import SubmitKind

TLS = Path(__file__).with_name("tls")
CERT, KEY = str(TLS / "server.pem"), str(TLS / "server.key")
ENCRYPTED, CLIENT = str(TLS / "server-encrypted.key"), str(TLS / "client.pem")


@pytest.fixture
def password(tmp_path):
    path = tmp_path / "password"
    path.write_text("open-sesame\n")
    return str(path)


def test_without_a_certificate_there_is_no_tls():
    assert server_context(HttpConfig()) is None


@pytest.mark.parametrize("flag", ["ssl_keyfile", "ssl_keyfile_password_file", "ssl_ca_certs"])
def test_a_flag_that_needs_the_certificate_says_so(flag):
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} needs --ssl-certfile"):
        server_context(HttpConfig(**{flag: CERT}))


def test_a_key_may_stand_in_the_certificates_file(tmp_path):
    both = tmp_path / "both.pem"
    both.write_text(Path(CERT).read_text() + Path(KEY).read_text())
    assert server_context(HttpConfig(ssl_certfile=str(both))) is not None


def test_old_protocols_are_refused_and_client_certificates_asked_for_where_they_are_wanted():
    context = server_context(HttpConfig(ssl_certfile=CERT, ssl_keyfile=KEY))
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE
    context = server_context(HttpConfig(ssl_certfile=CERT, ssl_keyfile=KEY, ssl_ca_certs=CLIENT))
    assert context.verify_mode == ssl.CERT_REQUIRED


def test_an_encrypted_key_needs_its_password(password, tmp_path):
    config = HttpConfig(ssl_certfile=CERT, ssl_keyfile=ENCRYPTED)
    with pytest.raises(ConfigError, match="--ssl-keyfile-password-file"):
        server_context(config)  # and does not ask on the terminal
    files = {"ssl_certfile": CERT, "ssl_keyfile": ENCRYPTED}
    assert server_context(HttpConfig(ssl_keyfile_password_file=password, **files)) is not None
    wrong = tmp_path / "wrong"
    wrong.write_text("sesame")
    with pytest.raises(ConfigError, match="cannot be used"):
        server_context(HttpConfig(ssl_keyfile_password_file=str(wrong), **files))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"ssl_certfile": "/no/such", "ssl_keyfile": KEY}, "/no/such"),
        ({"ssl_certfile": CERT, "ssl_keyfile": "/no/such"}, "/no/such"),
        ({"ssl_certfile": CERT}, "cannot be used"),
        ({"ssl_certfile": KEY, "ssl_keyfile": KEY}, "cannot be used"),
        ({"ssl_certfile": CERT, "ssl_keyfile": CLIENT}, "key values mismatch"),
        ({"ssl_certfile": __file__}, "cannot be used"),
        ({"ssl_certfile": CERT, "ssl_keyfile": KEY, "ssl_ca_certs": KEY}, "--ssl-ca-certs"),
    ],
)
def test_files_that_cannot_be_used_are_one_line_that_names_them(files, words):
    with pytest.raises(ConfigError) as raised:
        server_context(HttpConfig(**files))
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_start_with_a_bad_certificate_ends_at_once_with_one_line(tmp_path):
    server = Server(
        tmp_path,
        f"test-tls-bad-{os.getpid()}",
        "--runner=simulated",
        f"--ssl-certfile={KEY}",
        f"--ssl-keyfile={KEY}",
    )
    assert server.process.wait(30) == 1
    (line,) = server.output().splitlines()
    assert line.startswith("shmserve: error: --ssl-certfile")


# --- in a server


class TlsServer(Server):
    """Asked over TLS, with the server's own certificate as the authority."""

    def wait_ready(self, patience_s=30.0):
        def ready():
            assert self.process.poll() is None, self.output()
            return re.search(r"ready: https://[^:]+:(\d+) .*worker 0 (\d+)\)", self.output())

        match = until(ready, "the line that says ready", patience_s)
        self.port, self.worker_pid = int(match[1]), int(match[2])
        return self

    @staticmethod
    def context():
        return ssl.create_default_context(cafile=CERT)

    def connect(self):
        return http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=30, context=self.context()
        )


@pytest.fixture(scope="module")
def encrypted(default_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    (folder / "password").write_text("open-sesame")
    server = TlsServer(
        folder,
        f"test-tls-{os.getpid()}",
        *("--runner=simulated", "--step-ms=1", "--slow-client-bytes=16384"),
        *(f"--ssl-certfile={CERT}", f"--ssl-keyfile={ENCRYPTED}"),
        f"--ssl-keyfile-password-file={folder / 'password'}",
    ).wait_ready()
    yield server
    server.stop()


def test_streams_and_plain_answers_are_the_same_over_tls(encrypted):
    fields = {"max_tokens": 200, "seed": 7, "temperature": 1.0, "ignore_eos": True}
    plain = encrypted.complete(**fields)["choices"][0]["text"]
    events = encrypted.stream(**fields).objects()
    assert "".join(event["choices"][0]["text"] for event in events) == plain
    assert len(events) > 150, "token by token, not all at the end"


def test_one_connection_serves_stream_after_stream_whatever_their_lengths(encrypted):
    """asyncio's TLS calls a buffer full that is as large as its limit: with one of 0, every second stream waited to be drained, and the
    request behind it was taken for one that came too early."""
    connection = encrypted.connect()
    for count in (4, 5, 6, 7):
        body = {"prompt": "Hi", "stream": True, "max_tokens": count, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200
        assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()


class Tapped:
    """A TLS client that keeps what came over the wire before it was decrypted."""

    def __init__(self, port, context):
        self.seen = b""
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        self._until_done(self._tls.do_handshake)

    def _until_done(self, step, *args):
        while True:
            try:
                done = step(*args)
            except ssl.SSLWantReadError:
                done = None
            self._sock.sendall(self._outgoing.read())
            if done is not None or (step == self._tls.do_handshake and self._tls.version()):
                return done
            data = self._sock.recv(65536)
            self.seen += data
            self._incoming.write(data) if data else self._incoming.write_eof()

    def ask(self, head, body):
        """Everything that the answer holds, framing included, up to its end."""
        self._until_done(self._tls.write, head + body)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += self._until_done(self._tls.read, 65536)
        self._sock.close()
        return answer


def test_no_token_of_a_stream_is_on_the_wire_in_the_clear(encrypted):
    """The pump writes plain tokens by itself: on a TLS connection it must not do so beside the TLS."""
    tapped = Tapped(encrypted.port, encrypted.context())
    body = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": 100, "ignore_eos": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    answer = tapped.ask(head.encode(), body.encode())
    assert answer.count(b"data: ") == 102 and answer.count(b"[DONE]") == 1
    assert len(tapped.seen) > len(answer)
    for mark in (b"data: ", b"choices", b"HTTP/1.1", b"completions"):
        assert mark not in tapped.seen


def test_a_client_that_stops_reading_over_tls_is_bounded_and_another_is_not_kept_waiting(encrypted):
    before = encrypted.words("http")["num_slow_clients"]
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", encrypted.port))
    stuck = encrypted.context().wrap_socket(raw, server_hostname="127.0.0.1")
    # Forty streams' worth in one: it must fill every buffer on its way.
    body = json.dumps(
        {"prompt": "Hi", "stream": True, "max_tokens": 1_900, "ignore_eos": True, "n": 16}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    stuck.sendall(head.encode() + body)

    def is_given_up():
        return encrypted.words("http")["num_slow_clients"] > before

    until(lambda: encrypted.words("http")["mailbox_bytes"] or is_given_up(), "it is congested")
    assert encrypted.text(max_tokens=5)
    until(is_given_up, "it is given up")
    stuck.close()
    encrypted.wait_idle()
    until(lambda: encrypted.words("http")["mailbox_bytes"] == 0, "nothing waits for it")


@pytest.mark.slow
def test_a_client_that_leaves_a_stream_over_tls_frees_its_sequence(encrypted):
    stream = encrypted.stream(max_tokens=4_000, ignore_eos=True)
    stream.take(2)
    stream.leave()
    encrypted.wait_idle()


@pytest.mark.slow
def test_who_never_begins_tls_keeps_nobody_from_being_served(encrypted):
    silent = [socket.create_connection(("127.0.0.1", encrypted.port)) for _ in range(20)]
    rude = socket.create_connection(("127.0.0.1", encrypted.port), timeout=30)
    rude.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    begin = time.monotonic()
    assert encrypted.text(max_tokens=2)
    assert b"HTTP/1.1 200" not in rude.recv(1000), "no HTTP without TLS"
    assert time.monotonic() - begin < 60
    for each in (*silent, rude):
        each.close()
    assert "Traceback" not in encrypted.output()


@pytest.mark.slow
def test_a_client_without_the_wanted_certificate_is_not_served(default_model, tmp_path):
    server = TlsServer(
        tmp_path,
        f"tls-m-{os.getpid()}",
        *("--runner=simulated", "--step-ms=1", f"--ssl-certfile={CERT}", f"--ssl-keyfile={KEY}"),
        f"--ssl-ca-certs={CLIENT}",
    ).wait_ready()
    try:
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            server.get("/v1/models")
        context = server.context()
        context.load_cert_chain(CLIENT)
        server.context = lambda: context
        assert server.get("/v1/models").status == 200
    finally:
        server.stop()


# --- the moments of an end, with a front end in this process


def with_tls(scenario, model, **http):
    """Run scenario(puppet) behind a front end that speaks TLS; the loop may have no complaint."""

    async def whole():
        complaints = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: complaints.append(context)
        )
        config = HttpConfig(ssl_certfile=CERT, ssl_keyfile=KEY, **http)
        async with Puppet(model, config, RINGS) as puppet, asyncio.timeout(40):
            await scenario(puppet)
        assert complaints == []

    asyncio.run(whole())


async def ask_over_tls(puppet, path="/v1/completions", head="", **fields):
    """Send a request; (reader, writer) of its connection, whose kernel takes little."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", puppet.port))
    reader, writer = await asyncio.open_connection(
        sock=sock, ssl=TlsServer.context(), server_hostname="127.0.0.1", limit=4096
    )
    body = json.dumps({"prompt": "Hi"} | fields)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return reader, writer


def test_a_client_that_leaves_in_the_turn_of_its_token_ends_nobody_elses_stream(
    default_model, monkeypatch
):
    """asyncio's TLS transport fails whoever writes to it between its end and that of the handler."""

    async def scenario(puppet):
        _, writer = await ask_over_tls(puppet, stream=True)
        req_id = (await puppet.submitted()).req_id
        puppet.put(tokens_record(req_id, [WORLD]))
        entry = puppet.client.in_flight[req_id]
        await turns_until(lambda: entry.direct is not None, "the pump writes by itself")
        connection_lost = Connection.connection_lost

        def lost(self, exc):
            connection_lost(self, exc)
            puppet.put(tokens_record(req_id, [WORLD], 1))
            puppet.link.pump._on_readable()  # as the loop would, in the same turn

        monkeypatch.setattr(Connection, "connection_lost", lost)
        writer.transport.abort()
        taken = await turns_until(puppet.take, "an ABORT")
        assert [(kind, each) for kind, each, _ in taken] == [(SubmitKind.ABORT, req_id)]
        puppet.put(finish_record(req_id, FinishReason.ABORT))
        await turns_until(lambda: not puppet.client.in_flight, "FINISH")
        assert puppet.link.channel is not None and puppet.link.state == "ready"

    with_tls(scenario, default_model)


def test_a_client_that_has_gone_does_not_blind_the_look_at_the_others(board):
    """asyncio's TLS transport cannot be asked any more then, not even whether it is closed."""

    async def whole():
        loop = asyncio.get_running_loop()
        complaints = []
        loop.set_exception_handler(lambda loop, context: complaints.append(context))
        made = loop.create_future()

        class Answering(asyncio.Protocol):
            def connection_made(self, transport):
                made.set_result(transport)

            def connection_lost(self, exc):
                made.result().close()  # as aiohttp does

        context = server_context(HttpConfig(ssl_certfile=CERT, ssl_keyfile=KEY))
        server = await loop.create_server(Answering, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=TlsServer.context(), server_hostname="127.0.0.1"
        )
        transport = await made
        writer.transport.pause_reading()
        while not transport.get_write_buffer_size():
            transport.write(bytes(1 << 16))
            await asyncio.sleep(0)
        clients = SlowClients(board)
        rules = SlowClientRules("coalesce", 65_536, 2.0)
        clients.watch_answer(transport, rules, "a test")
        assert board["clients_congested"] == 1
        writer.transport.abort()
        await turns_until(lambda: not board["clients_congested"], "it is forgotten")
        clients.watch_answer(transport, rules, "a test")
        assert board["clients_congested"] == board["num_slow_clients"] == 0
        assert complaints == []
        server.close()

    asyncio.run(whole())


def test_an_answer_that_is_read_slowly_is_whole_though_we_close(default_model, monkeypatch):
    """The time for the client's farewell begins before it has read what it asked for."""
    monkeypatch.setattr(listener, "CLOSE_NOTIFY_S", 0.2)

    async def scenario(puppet):
        reader, writer = await ask_over_tls(
            puppet, "/tokenize", "Connection: close\r\n", prompt="Hi " * 300_000
        )
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split()[0])
        assert size > 1_000_000
        await asyncio.sleep(1.0)
        assert len(await reader.readexactly(size)) == size
        writer.close()

    with_tls(scenario, default_model)
