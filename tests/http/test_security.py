"""Who may ask: Host, Origin and key, before the body is read. The rules by themselves, and in a server."""

import hashlib
import json
import os
import socket
import stat
from pathlib import Path

import pytest
from aiohttp import HttpVersion
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict
from serving import GENERATING

from shmserve.config import HttpConfig
from shmserve.http.errors import ApiError
from shmserve.http.security import MOST_REMEMBERED, Gate, bound_addresses, name_of, warning_of
from shmserve.rings.segment import SHM_DIR, names

KEY, OTHER_KEY, ADMIN_KEY = "sk-first-0123456789", "sk-second-9876543210", "operator-55555"
COMPLETION = {"prompt": "Hi", "max_tokens": 2}


def digest(key):
    return hashlib.sha256(key.encode()).hexdigest()


def refusal(gate, headers, version=(1, 1)):
    """(status, code) of the gate's refusal; None if it lets a request with these headers in."""
    request = make_mocked_request("GET", "/v1/models", headers, version=HttpVersion(*version))
    try:
        gate.check(request)
    except ApiError as error:
        return error.status, error.code
    return None


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        ("localhost.", "localhost"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[::1]:8000", "::1"),
        ("[::1", ""),
        ("[::1]8000", ""),
        ("[localhost]", ""),
        ("::1", ""),
        ("localhost:80:80", ""),
        ("localhost:http", ""),
        ("evil@localhost", "evil@localhost"),
        ("", ""),
    ],
)
def test_the_name_in_a_host_header(host, name):
    assert name_of(host) == name


LOOPBACK = ["127.0.0.1"]
OWN = socket.gethostname()


@pytest.mark.parametrize(
    ("bound", "allowed", "host", "is_let_in"),
    [
        (LOOPBACK, (), "127.0.0.1:8000", True),
        (LOOPBACK, (), "127.9.9.9", True),
        (LOOPBACK, (), "localhost:9", True),
        (LOOPBACK, (), "[::1]:8000", True),
        (LOOPBACK, (), "10.0.0.5", False),
        (LOOPBACK, (), "0.0.0.0:8000", False),
        (LOOPBACK, (), OWN, OWN == "localhost"),
        (LOOPBACK, (), "evil.example", False),
        (LOOPBACK, (), "localhost.evil.example", False),
        (LOOPBACK, (), "127.0.0.1.evil.example", False),
        (LOOPBACK, (), "evil@localhost", False),
        (["0.0.0.0"], (), "10.0.0.5:8000", True),
        (["0.0.0.0"], (), "0.0.0.0:8000", True),
        (["::"], (), "[fe80::1]", True),
        (["0.0.0.0"], (), OWN, True),
        (["0.0.0.0"], (), "evil.example", False),
        (["10.0.0.5"], (), "10.0.0.5", True),
        (["10.0.0.5"], (), "10.0.0.6", False),
        (["10.0.0.5"], (), "127.0.0.1", False),
        (LOOPBACK, ("llm.example",), "LLM.example:443", True),
        (LOOPBACK, ("llm.example",), "x.llm.example", False),
        (LOOPBACK, (".llm.example, box",), "x.llm.example", True),
        (LOOPBACK, (".llm.example,box",), "box", True),
        (LOOPBACK, (".llm.example",), "xllm.example", False),
        (LOOPBACK, ("10.0.0.6",), "10.0.0.6:80", True),
        (LOOPBACK, ("*",), "evil.example", True),
        ([], (), "anything", True),
    ],
)
def test_which_hosts_are_ours(bound, allowed, host, is_let_in):
    gate = Gate(HttpConfig(allowed_hosts=allowed), bound)
    for _ in range(2):  # the second time from memory
        found = refusal(gate, {"Host": host})
        assert found == (None if is_let_in else (403, "host_not_allowed"))


def test_a_host_is_needed_since_http_1_1_and_only_once():
    gate = Gate(HttpConfig(), LOOPBACK)
    assert refusal(gate, {}) == (400, "invalid_host")
    assert refusal(gate, {}, version=(1, 0)) is None
    twice = [("Host", "localhost"), ("Host", "evil.example")]
    assert refusal(gate, CIMultiDict(twice)) == (400, "invalid_host")


def test_hosts_that_are_remembered_are_bounded():
    gate = Gate(HttpConfig(allowed_hosts=(".example",)), LOOPBACK)
    for i in range(MOST_REMEMBERED + 10):
        assert refusal(gate, {"Host": f"{i}.example"}) is None
    assert len(gate._good_hosts) == MOST_REMEMBERED


@pytest.mark.parametrize(
    ("headers", "origins", "is_let_in"),
    [
        ({"Origin": "http://localhost:8000"}, (), True),
        ({"Origin": "http://localhost"}, (), False),
        ({"Origin": "http://evil.example"}, (), False),
        ({"Origin": "null"}, (), False),
        ({"Origin": ""}, (), False),
        ({"Sec-Fetch-Site": "same-origin"}, (), True),
        ({"Sec-Fetch-Site": "none"}, (), True),
        ({"Sec-Fetch-Site": "cross-site"}, (), False),
        ({"Sec-Fetch-Site": "same-site"}, (), False),
        ({"Origin": "https://chat.example"}, ("https://chat.example",), True),
        ({"Origin": "HTTPS://chat.example"}, ("https://chat.example/",), True),
        ({"Origin": "http://chat.example"}, ("https://chat.example",), False),
        ({"Origin": "https://chat.example.evil"}, ("https://chat.example",), False),
        ({"Origin": "null"}, ("*",), True),
        (
            {"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"},
            ("https://a.example,https://chat.example",),
            True,
        ),
    ],
)
def test_which_origins_may_ask(headers, origins, is_let_in):
    gate = Gate(HttpConfig(cors_origins=origins), LOOPBACK)
    found = refusal(gate, {"Host": "localhost:8000"} | headers)
    assert found == (None if is_let_in else (403, "origin_not_allowed"))


def test_a_server_that_is_open_to_a_network_without_a_key_says_so():
    keys = {"api_keys": (digest(KEY),)}
    assert "--api-key" in warning_of(HttpConfig(), ["127.0.0.1", "0.0.0.0"])
    assert "10.0.0.5" in warning_of(HttpConfig(), ["10.0.0.5"])
    for config, bound in (
        (HttpConfig(), LOOPBACK),
        (HttpConfig(), ["127.0.0.1", "::1"]),
        (HttpConfig(), []),
        (HttpConfig(**keys), ["0.0.0.0"]),
    ):
        assert warning_of(config, bound) == ""


def test_a_unix_socket_has_no_address_and_others_have_theirs(tmp_path):
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
        unix.bind(str(tmp_path / "s"))
        tcp.bind(("127.0.0.1", 0))
        assert bound_addresses([unix, tcp]) == ["127.0.0.1"]


# --- in a server


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# clients\n\n{OTHER_KEY}\n")
    return file


@pytest.fixture(scope="module")
def guarded(start_server, keys):
    """Two client keys (a flag and a file), an operator's key, and pages of one foreign origin."""
    return start_server(
        *("--step-ms=1", f"--api-key={KEY}", f"--api-key-file={keys}", f"--admin-key={ADMIN_KEY}"),
        *("--cors-origin=https://chat.example", "--log-level=debug"),
        f"--emission-log={keys.with_name('emissions')}",
    )


BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/generate"),
        ("PUT", "/generate"),
        ("POST", "/tokenize"),
        ("POST", "/v1/detokenize"),
        ("POST", "/abort_request"),
        ("GET", "/flush_cache"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/x"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/openapi.json"),
        ("GET", "/health_generate"),
        ("GET", "/server_info"),
        ("GET", "/v1/loads"),
        ("GET", "/nothing/there"),
        ("DELETE", "/v1/models"),
        ("POST", "/health"),
        ("GET", "/health/"),
        ("GET", "/health/../v1/models"),
    ],
)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}])
def test_without_a_key_everything_is_401(guarded, method, path, headers):
    answer = guarded.request(method, path, COMPLETION if method == "POST" else None, headers)
    assert answer.status == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    error = answer.error()
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize("path", ["/live", "/health", "/ready"])
def test_probes_need_neither_key_nor_host(guarded, path):
    answer = guarded.request("GET", path, None, {"Host": "pod.cluster.local"})
    assert answer.status == 200


def test_anthropics_endpoints_refuse_in_their_own_shape(guarded):
    answer = guarded.request("POST", "/v1/messages", {})
    assert answer.status == 401
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "headers",
    [
        BEARER,
        {"Authorization": f"bearer  {KEY}"},
        {"x-api-key": KEY},
        {"X-Api-Key": OTHER_KEY},
        {"Authorization": f"Bearer {OTHER_KEY}"},
        {"Authorization": "Bearer wrong", "x-api-key": KEY},
        {"Authorization": f"Bearer {ADMIN_KEY}"},
    ],
)
def test_each_key_opens_in_each_header(guarded, headers):
    answer = guarded.request("POST", "/v1/completions", COMPLETION, headers)
    assert answer.status == 200


@pytest.mark.parametrize(
    "authorization",
    [
        f"Basic {KEY}",
        KEY,
        "Bearer",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {digest(KEY)}",
    ],
)
def test_what_is_almost_the_key_opens_nothing(guarded, authorization):
    answer = guarded.request("GET", "/v1/models", None, {"Authorization": authorization})
    assert answer.status == 401


def test_a_key_that_is_no_text_is_a_wrong_key(guarded, wire):
    rude = wire(guarded)
    rude.sock.sendall(
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx-api-key: \xff\xfe\xe9\r\n\r\n"
    )
    assert rude.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(("method", "path"), [("POST", "/abort_request"), ("GET", "/flush_cache")])
def test_the_operators_paths_need_the_operators_key(guarded, method, path):
    body = {"rid": "nobody"} if method == "POST" else None
    refused = guarded.request(method, path, body, BEARER)
    assert refused.status == 403
    assert refused.error()["code"] == "admin_key_required"
    assert guarded.request(method, path, body, {"x-api-key": ADMIN_KEY}).status == 200


@pytest.mark.parametrize("path", GENERATING)
def test_a_refusal_does_not_wait_for_the_body(guarded, wire, path):
    eager = wire(guarded)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n"
    eager.sock.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
    assert eager.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 401 ")  # and no 100 before it


def test_a_client_that_asks_first_is_told_to_go_on_and_is_answered(guarded, wire):
    polite, body = wire(guarded), json.dumps(COMPLETION).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    polite.sock.sendall(f"{head}x-api-key: {KEY}\r\nExpect: 100-continue\r\n\r\n".encode())
    assert polite.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    polite.sock.sendall(body)
    assert polite.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_an_http_1_0_client_gets_its_answer_and_nothing_before_it(guarded, wire):
    """It would take a 100 for the answer."""
    old, body = wire(guarded), json.dumps(COMPLETION).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\nx-api-key: {KEY}\r\n"
    old.sock.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
    old.sock.sendall(body)
    assert old.read_all().startswith(b"HTTP/1.0 200 ")


def test_foreign_pages_are_refused_and_one_is_allowed(guarded):
    foreign = guarded.request(
        "GET", "/v1/models", None, BEARER | {"Origin": "https://evil.example"}
    )
    assert (foreign.status, foreign.error()["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in foreign.headers
    ours = guarded.request("GET", "/v1/models", None, BEARER | {"Origin": "https://chat.example"})
    assert ours.status == 200
    assert ours.headers["access-control-allow-origin"] == "https://chat.example"
    assert ours.headers["vary"] == "Origin"


def test_a_page_that_may_ask_may_read_a_stream_and_a_refusal(guarded):
    headers = BEARER | {"Origin": "https://chat.example"}
    stream = guarded.stream(headers=headers, max_tokens=2)
    assert stream.response.headers["Access-Control-Allow-Origin"] == "https://chat.example"
    assert stream.objects()
    refused = guarded.request("POST", "/v1/completions", {}, {"Origin": "https://chat.example"})
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"


def test_a_preflight_is_answered_without_a_key_and_only_to_who_may_ask(guarded):
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    ours = guarded.request(
        "OPTIONS", "/v1/completions", None, asked | {"Origin": "https://chat.example"}
    )
    assert ours.status == 204
    assert ours.headers["access-control-allow-origin"] == "https://chat.example"
    assert ours.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in ours.headers["access-control-allow-methods"]
    foreign = guarded.request(
        "OPTIONS", "/v1/completions", None, asked | {"Origin": "https://evil.example"}
    )
    assert foreign.status == 403


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/flush_cache", "/metrics"])
def test_a_name_that_is_not_ours_is_refused_with_the_right_key_too(guarded, path):
    method = "POST" if "completions" in path else "GET"
    answer = guarded.request(method, path, None, BEARER | {"Host": "evil.example:8000"})
    assert (answer.status, answer.error()["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts" in answer.error()["message"]


def test_what_was_denied_is_counted(guarded):
    before = guarded.words("http")["num_denied"]
    guarded.request("GET", "/v1/models")
    guarded.request("GET", "/v1/models", None, BEARER | {"Host": "evil.example"})
    guarded.request("GET", "/v1/models", None, BEARER)
    assert guarded.words("http")["num_denied"] == before + 2


def test_no_key_is_in_the_log_the_environment_or_the_arguments_of_a_child(guarded):
    """At debug level, after requests with right and wrong keys."""
    guarded.request("GET", "/v1/models", None, BEARER)
    guarded.request("GET", "/v1/models", None, {"x-api-key": "wrong-key-canary"})
    seen = guarded.output()
    for line in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(line.read_text().rpartition(")")[2].split()[1])
            if parent == guarded.process.pid:
                seen += line.with_name("cmdline").read_text()
                seen += line.with_name("environ").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
    assert "--control" in seen, "the children's arguments were read"
    for key in (KEY, OTHER_KEY, ADMIN_KEY, "wrong-key-canary"):
        assert key not in seen


# --- what is shown to nobody but its user

CANARY = "xylophone-canary-5150"
PASSWORD = "session=hunter2-canary-5151"
ADMINS = {"Authorization": f"Bearer {ADMIN_KEY}"}


def bodies():
    """(path, body) of good requests and bad ones, with the canary wherever a text may stand."""
    message = {"role": "user", "content": CANARY}
    tool = {"type": "function", "function": {"name": "f", "description": CANARY, "parameters": {}}}
    schema = {"type": "object", "properties": {CANARY: {"type": "string"}}}
    for stream in (False, True):
        common = {"max_tokens": 3, "stream": stream}
        yield "/v1/completions", common | {"prompt": CANARY, "stop": [CANARY], "user": CANARY}
        yield "/v1/chat/completions", common | {"messages": [message], "tools": [tool]}
        yield "/v1/messages", common | {"messages": [message], "system": CANARY}
        yield "/v1/responses", {"input": CANARY, "max_output_tokens": 3, "stream": stream}
        sampling = {"max_new_tokens": 3, "stop": CANARY}
        yield "/generate", {"text": CANARY, "sampling_params": sampling, "stream": stream}
        yield "/v1/completions", common | {"prompt": CANARY, "structured_outputs": {"json": schema}}
    yield "/tokenize", {"prompt": CANARY}
    yield "/abort_request", {"rid": CANARY}
    for field in ("prompt", "stop", "temperature", "logit_bias", "tools", "response_format", "seed",
                  "stop_regex", "model", "messages", CANARY):  # fmt: skip
        yield "/v1/completions", {"prompt": "Hi", "max_tokens": 2, field: {CANARY: [CANARY]}}
        yield "/v1/chat/completions", {"messages": [message], "max_tokens": 2, field: CANARY}


def test_no_prompt_is_in_any_log_even_at_debug(guarded, wire):
    server = guarded
    statuses = set()
    for path, body in bodies():
        answer = server.request(
            "POST", path, body, ADMINS | {"X-Request-Id": "1", "Cookie": PASSWORD}
        )
        statuses.add(answer.status)
    for raw in (
        f'{{"prompt": "{CANARY}'.encode(),
        CANARY.encode(),
        b'{"prompt": "\xff' + CANARY.encode(),
    ):
        statuses.add(server.request("POST", "/v1/completions", raw, BEARER).status)
    assert {200, 400} <= statuses <= {200, 400, 404, 422}, statuses
    for head in (f"GET /{CANARY} HTTP/1.1\r\n{CANARY}\r\n\r\n", f"{CANARY} / HTTP/1.1\r\n\r\n",
                 f"GET / HTTP/1.1\r\nHost: localhost\r\nX: {CANARY * 900}\r\n\r\n"):  # fmt: skip
        rude = wire(server)
        rude.sock.sendall(head.encode())
        rude.read_all()
    leaver = server.stream(headers=BEARER, prompt=CANARY, max_tokens=4_000, ignore_eos=True)
    leaver.take(1)
    leaver.leave()
    server.wait_idle()
    seen = server.output()
    assert " DEBUG " in seen, "it says all it has to say"
    for secret in (CANARY, PASSWORD):
        assert secret not in seen, [line for line in seen.splitlines() if secret in line][:3]
    assert "Traceback" not in seen


def test_segments_and_sockets_and_dumps_are_closed_to_others(guarded, keys):
    server = guarded
    assert server.request("POST", "/v1/completions", COMPLETION, BEARER).status == 200
    segments = [Path(SHM_DIR + name) for name in names(f"shmserve.{server.name}.")]
    assert len(segments) >= 5, "three boards and two rings"
    runtime = server.log.parent / "shmserve"
    files = [path for path in runtime.rglob("*") if not path.is_dir()]
    assert any(stat.S_ISSOCK(path.stat().st_mode) for path in files)
    for path in (*segments, *files, keys.with_name("emissions")):
        mode = path.stat().st_mode
        assert stat.S_IMODE(mode) & 0o077 == 0, f"{path} {stat.filemode(mode)}"
        assert path.stat().st_uid == os.getuid()
    assert stat.S_IMODE(runtime.stat().st_mode) & 0o077 == 0
