"""Clients that no one here wrote: Anthropic's, litellm, and schemathesis over our own description. `make test-all` installs them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"make test-all installs {module}"
    )


def run_python(code: str, *args: str) -> str:
    """stdout of a script in a process of its own: these packages' imports warn, and patch what they find."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout


ANTHROPIC = """
import json, sys, anthropic
base, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
messages = [{"role": "user", "content": "Hi"}]
body = {"seed": 7, "ignore_eos": True}
plain = client.messages.create(model=model, max_tokens=8, messages=messages, extra_body=body)
with client.messages.stream(model=model, max_tokens=8, messages=messages, extra_body=body) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
count = client.messages.count_tokens(model=model, messages=messages)
try:
    client.messages.create(model=model, max_tokens=8, messages=[{"role": "robot", "content": "x"}])
    refused = ""
except anthropic.BadRequestError as error:
    refused = str(error)
print(json.dumps([plain.content[0].text, text, final.content[0].text, plain.stop_reason,
                  count.input_tokens, plain.usage.output_tokens, refused]))
"""

LITELLM = """
import json, sys, litellm
base, model = sys.argv[1:]
where = dict(model="openai/" + model, api_base=base + "/v1", api_key="none", num_retries=0, seed=7, max_tokens=8)
messages = [{"role": "user", "content": "Hi"}]
plain = litellm.completion(messages=messages, **where)
pieces = litellm.completion(messages=messages, stream=True, **where)
text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
print(json.dumps([plain.choices[0].message.content, text, plain.usage.prompt_tokens]))
"""


@needs("anthropic")
def test_anthropics_client_reads_messages_streams_counts_and_errors(simulated):
    model = simulated.get("/v1/models").json()["data"][0]["id"]
    base = f"http://127.0.0.1:{simulated.port}"
    told = json.loads(run_python(ANTHROPIC, base, model))
    plain, text, final, reason, count, num_output, refused = told
    assert plain == text == final and plain
    assert (reason, count, num_output) == ("max_tokens", 31, 8)
    assert "role" in refused


@needs("litellm")
def test_litellm_reads_plain_and_streamed_answers(simulated):
    model = simulated.get("/v1/models").json()["data"][0]["id"]
    base = f"http://127.0.0.1:{simulated.port}"
    plain, text, num_prompt = json.loads(run_python(LITELLM, base, model).splitlines()[-1])
    assert plain == text and plain and num_prompt == 31


@needs("schemathesis")
def test_no_request_that_the_description_allows_is_a_server_error(short, tmp_path):
    program = Path(sys.executable).with_name("schemathesis")
    checks = "not_a_server_error,response_schema_conformance,status_code_conformance,content_type_conformance"
    done = subprocess.run(
        [
            str(program),
            "run",
            f"http://127.0.0.1:{short.port}/openapi.json",
            "--max-examples=20",
            "--phases=examples,coverage,fuzzing",
            "--workers=2",
            "--request-timeout=30",
            "--seed=1",
            f"--checks={checks}",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:]
    assert short.get("/health").status == 200
    short.wait_idle()
