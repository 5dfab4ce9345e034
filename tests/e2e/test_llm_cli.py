"""The command line `llm`, with this server as a model of its extra-openai-models.yaml. `make test-all` installs it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("llm") is None, reason="make test-all installs llm"
    ),
]


@pytest.fixture
def llm(simulated, tmp_path: Path) -> Callable[..., str]:
    """llm(*words, stdin=""): the standard output of the command, with its home in a folder of the test's."""
    (model,) = simulated.get("/v1/models").json()["data"]
    base = f"http://127.0.0.1:{simulated.port}/v1"
    models = [
        {
            "model_id": name,
            "model_name": model["id"],
            "api_base": base,
            "completion": is_completion,
            "supports_schema": True,
            "supports_tools": True,
        }
        for name, is_completion in (("local", False), ("local-completion", True))
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def run(*words: str, stdin: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            input=stdin,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-3_000:]
        return done.stdout

    return run


OPTIONS = ("-o", "max_tokens", "8", "-o", "seed", "7", "-o", "temperature", "1")


def test_a_prompt_is_answered_streamed_and_plain_alike(llm):
    streamed = llm("-m", "local", *OPTIONS, "Hi")
    assert streamed.strip()
    assert llm("-m", "local", *OPTIONS, "--no-stream", "Hi") == streamed
    assert llm("-m", "local", *OPTIONS, stdin="Hi") == streamed


def test_a_conversation_goes_on_and_is_logged(llm):
    first = llm("-m", "local", *OPTIONS, "--system", "Be brief.", "Hi").strip()
    second = llm("-c", *OPTIONS, "And?").strip()
    logged = json.loads(llm("logs", "--json", "-n", "2"))
    assert [entry["response"].strip() for entry in logged] == [first, second]
    assert len({entry["conversation_id"] for entry in logged}) == 1
    assert all(entry["output_tokens"] == 8 for entry in logged)
    assert logged[1]["input_tokens"] > logged[0]["input_tokens"]


def test_a_completion_model_is_asked_at_completions(llm):
    text = llm("-m", "local-completion", *OPTIONS, "Once upon a time")
    assert text.strip()


def test_a_schema_is_kept(llm):
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": ["yes", "no"]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    said = llm("-m", "local", "--schema", json.dumps(schema), "-o", "max_tokens", "200", "Yes?")
    assert json.loads(said)["answer"] in ("yes", "no")
