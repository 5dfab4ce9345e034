"""Any JSON in any field that the API's own description names: the answer is the same refusal plain and as a stream, or none."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Stream

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
}
# What makes an answer long is right, and too slow here; what a stream may or may not have is another test's.
LEFT_OUT = {"stream", "prompt_logprobs", "stream_options", "incremental", "max_tokens", "max_completion_tokens", "max_output_tokens", "sampling_params",
            "background", "n", "best_of", "return_token_ids"}  # fmt: skip
ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(blacklist_categories=["Cs"]), max_size=8),
        st.sampled_from(
            ["auto", "required", "none", "json_object", "type", "function", "^a", "text"]
        ),
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "name", "function", "schema", "text", "role", "content", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@pytest.fixture(scope="session")
def fields_of(server):
    """path -> the fields that the server says it reads there."""
    told = server.get("/openapi.json").json()

    def resolve(schema):
        while "$ref" in schema:
            schema = told["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    found = {}
    for path in BODIES:
        content = told["paths"][path]["post"]["requestBody"]["content"]
        properties = resolve(content["application/json"]["schema"])["properties"]
        found[path] = sorted(set(properties) - LEFT_OUT)
        assert len(found[path]) > 5, path
    return found


@settings(
    max_examples=settings.default.max_examples * 3 // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), path=st.sampled_from(list(BODIES)))
def test_any_json_in_any_field_is_served_or_refused_before_the_200_D10(
    server, fields_of, data, path
):
    fields = data.draw(
        st.dictionaries(st.sampled_from(fields_of[path]), ANYTHING, min_size=1, max_size=2)
    )
    body = BODIES[path] | fields
    plain = server.post(path, body)
    assert plain.status in (200, 400, 404), plain.body
    connection = server.connect()
    connection.request("POST", path, json.dumps(body | {"stream": True}))
    if plain.status == 200:
        assert list(Stream(connection).events())
        connection.close()
    else:
        response = connection.getresponse()
        assert response.status in (400, 404)
        assert "error" in json.loads(response.read())
        connection.close()
    assert server.words("worker")["pid"] == server.worker_pid
