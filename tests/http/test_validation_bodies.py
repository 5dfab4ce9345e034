"""Bodies, paths, methods and fields that are refused or ignored, how that is said, and that the server goes on."""

import json

import pytest
from refusals import BODIES, CHAT, refused

pytestmark = pytest.mark.usefixtures("goes_on")


@pytest.mark.parametrize("depth", [100, 900, 1000, 20_000, 200_000])
def test_deeply_nested_json_is_refused_or_ignored_D5(asker, depth):
    nest = "[" * depth + "]" * depth
    for path, body in BODIES.items():
        for field in ('"x":@', '"metadata":@', '"tools":[{"type":"function","function":{"parameters":@}}]',
                      '"chat_template_kwargs":{"a":@}'):  # fmt: skip
            text = json.dumps(body)[:-1] + "," + field.replace("@", nest) + "}"
            answer = asker.post(path, text.encode())
            assert answer.status in (200, 400), answer.body
            if answer.status == 400:
                answer.error()
    message = json.dumps(
        {"messages": [{"role": "user", "content": "Hi", "x": "@"}], "max_tokens": 1}
    )
    answer = asker.post("/v1/chat/completions", message.replace('"@"', nest).encode())
    assert answer.status in (200, 400)


def test_json_that_can_just_be_decoded_and_is_walked_over_is_refused_or_taken_D5(asker):
    for depth in range(940, 1000, 3):
        nest = '{"a":' * depth + "1" + "}" * depth
        tool = (
            '{"type":"function","name":"f","parameters":@,"function":{"name":"f","parameters":@}}'
        )
        call = '[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":@}}]}]'
        for path, text in (
            ("/v1/chat/completions", '{"messages":[{"role":"user","content":"Hi"}],"tools":[' + tool + "]}"),
            ("/v1/chat/completions", '{"messages":' + call + "}"),
            ("/v1/responses", '{"input":"Hi","metadata":@,"tools":[' + tool + "]}"),
        ):  # fmt: skip
            body = text[:-1].replace("@", nest) + ',"max_tokens":1,"max_output_tokens":1}'
            answer = asker.post(path, body.encode())
            assert answer.status in (200, 400), (depth, answer.body)


def test_a_body_larger_than_a_megabyte_is_read_D6(asker):
    body = CHAT | {"messages": [{"role": "user", "content": "long " * 300_000}]}
    error = refused(asker, "/v1/chat/completions", body)
    assert error["code"] == "context_length_exceeded"


def test_a_body_over_the_limit_is_413_and_not_kept_D6(server, wire):
    """The limit of this server is 4 MiB; the refusal comes by the header, before the body."""
    told = wire(server)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    told.sock.sendall(head.encode() + b'{"prompt":')
    answer = told.read_until(b"}}")
    assert answer.startswith(b"HTTP/1.1 413")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "body_too_large" and "4194304" in error["message"]
    assert server.words("http")["in_flight"] == 0


def test_a_chunked_body_over_the_limit_is_413_too_D6(server, wire):
    told = wire(server)
    told.sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    block = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    try:
        for _ in range(80):
            told.sock.sendall(block)
    except (ConnectionResetError, BrokenPipeError):
        pytest.fail("reset before the answer could be read")
    assert told.read_until(b"}}").startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body",
    [b'{"a":1,}', b"", b"[]", b'"x"', b"null", b"\xff\xfe", b"{", b'{"prompt":"\\ud800"}', b"7"],
)
def test_bad_json_is_refused_D10(asker, path, body):
    answer = asker.post(path, body)
    assert answer.status == 400
    assert answer.error()["code"] == "invalid_json"


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/json; charset=latin-1"])
def test_the_content_type_does_not_matter_D10(asker, content_type):
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    answer = asker.request("POST", "/v1/completions", body, {"Content-Type": content_type})
    assert answer.status == 200


def test_unknown_models_paths_and_methods_have_the_one_error_shape_D10(asker):
    for path, body in BODIES.items():
        answer = asker.post(path, body | {"model": "nobody"})
        assert (answer.status, answer.error()["code"]) == (404, "model_not_found")
        assert answer.error()["param"] == "model"
        for method in ("GET", "DELETE", "OPTIONS"):
            answer = asker.request(method, path)
            assert (answer.status, answer.error()["code"]) == (405, "method_not_allowed")
            assert "POST" in answer.headers["allow"]
        assert asker.request("HEAD", path).status == 405
    answer = asker.get("/no/such/path")
    assert (answer.status, answer.error()["code"]) == (404, "not_found")
    answer = asker.get("/v1/models/nobody")
    assert (answer.status, answer.error()["code"]) == (404, "model_not_found")
    answer = asker.post("/v1/models", {})
    assert answer.status == 405 and answer.error()


def test_the_model_may_be_named_or_not(asker):
    name = asker.get("/v1/models").json()["data"][0]["id"]
    assert asker.complete(model=name, max_tokens=1)["model"] == name
    assert asker.complete(model=None, max_tokens=1)["model"] == name


def test_of_a_key_that_stands_twice_the_last_one_is_checked_and_used_D10(asker):
    answer = asker.post("/v1/completions", b'{"prompt":"Hi","max_tokens":-1,"max_tokens":3}')
    assert answer.json()["usage"]["completion_tokens"] == 3
    answer = asker.post("/v1/completions", b'{"prompt":"Hi","max_tokens":3,"max_tokens":-1}')
    assert answer.status == 400


UNSUPPORTED = {
    "/v1/completions": {"suffix": "x", "best_of": 2},
    "/v1/chat/completions": {"audio": {}, "modalities": ["audio"], "use_beam_search": True},
}


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_a_field_that_is_not_honoured_yet_is_refused_by_name(asker, path):
    for name, value in UNSUPPORTED[path].items():
        error = refused(asker, path, BODIES[path] | {name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert name in error["message"]


def test_a_field_of_generate_that_is_not_honoured_yet_is_refused_by_name(asker):
    for name in ("lora_path", "image_data"):
        error = refused(asker, "/generate", BODIES["/generate"] | {name: "x"})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize("path", BODIES)
def test_values_that_ask_for_nothing_are_taken(asker, path):
    harmless = {
        "/v1/completions": {"echo": False, "logprobs": None, "suffix": None, "best_of": 1},
        "/v1/chat/completions": {
            "logprobs": False,
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "top_logprobs": 0,
        },
        "/generate": {"return_logprob": False, "priority": 0, "top_logprobs_num": 0},
    }[path]
    penalties = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1}
    body = BODIES[path] | harmless
    if path == "/generate":
        body["sampling_params"] = body["sampling_params"] | penalties
    else:
        body |= penalties
    answer = asker.post(path, body)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_nobody_knows_are_ignored_and_named_in_a_header(asker, path):
    answer = asker.post(path, BODIES[path] | {"zebra": 1, "aardvark": None, "é\n": 1})
    assert answer.status == 200
    assert answer.headers["x-shmserve-ignored"] == "aardvark, zebra"
    assert "x-shmserve-ignored" not in asker.post(path, BODIES[path]).headers
    stream = asker.stream(path, **BODIES[path], zebra=1)
    assert stream.response.headers["X-Shmserve-Ignored"] == "zebra"
    assert stream.objects()


@pytest.mark.parametrize("path", BODIES)
def test_the_request_id_is_taken_and_given_back(asker, path):
    for more in ({}, {"stream": True}):
        answer = asker.request("POST", path, BODIES[path] | more, {"X-Request-Id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
    name = "rid" if path == "/generate" else "request_id"
    answer = asker.post(path, BODIES[path] | {name: "from-the-body"})
    assert answer.headers["x-request-id"] == "from-the-body"
    bad = asker.post(path, BODIES[path] | {name: "a\r\nSet-Cookie: b"})
    assert bad.status == 200 and "set-cookie" not in bad.headers
    # The same id twice is a retry, not a fault.
    assert asker.request("POST", path, BODIES[path], {"X-Request-Id": "abc-1"}).status == 200


def test_a_refusal_carries_the_request_id_too(asker):
    answer = asker.request("POST", "/v1/completions", {"prompt": ""}, {"X-Request-Id": "abc-2"})
    assert answer.status == 400
    assert answer.headers["x-request-id"] == "abc-2"
