"""`shmserve start` with a model that cannot be served: one line that names what is wrong, code 1, nothing left, no traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Serve = Callable[..., Any]
HIDDEN = 32


@pytest.fixture
def model_file(write_gguf: Any, toy_metadata: Any, environ: dict[str, str], tmp_path: Any) -> Any:
    """model_file(changes of the metadata, changes of the tensors): a servable toy but for those."""
    environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")

    def write(metadata: dict[str, object] | None = None, tensors: Any = None) -> str:
        sizes = {"block_count": 1, "embedding_length": HIDDEN, "feed_forward_length": HIDDEN}
        sizes |= {"attention.head_count": 2, "attention.head_count_kv": 2}
        fields = toy_metadata() | {f"llama.{key}": size for key, size in sizes.items()}
        fields["llama.attention.layer_norm_rms_epsilon"] = 1e-5
        square = ((HIDDEN, HIDDEN), "F32", bytes(4 * HIDDEN * HIDDEN))
        norm = ((HIDDEN,), "F32", bytes(4 * HIDDEN))
        matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        parts: dict[str, Any] = {
            "token_embd.weight": ((262, HIDDEN), "F32", bytes(4 * 262 * HIDDEN)),
            "output_norm.weight": norm,
            "blk.0.attn_norm.weight": norm,
            "blk.0.ffn_norm.weight": norm,
            **{f"blk.0.{name}.weight": square for name in matrices},
        }
        parts |= tensors or {}
        kept = {name: part for name, part in parts.items() if part is not None}
        return str(write_gguf(fields | (metadata or {}), kept))

    return write


def refusal(serve: Serve, spec: str, *flags: str) -> str:
    """The line that says why; all else that must be so is asserted."""
    server = serve("--model", spec, *flags)
    assert server.wait() == 1
    assert server.output().count("error: ") == 1, server.output()
    *_, line = server.output().splitlines()
    assert line.startswith("shmserve: error: ") and spec in line, server.output()
    assert server.leftovers() == []
    return str(line)


def test_unknown_pre_tokenizer_is_named(serve: Serve, model_file: Any) -> None:
    line = refusal(serve, model_file({"tokenizer.ggml.pre": "strange-bpe"}))
    assert "pre-tokenizer 'strange-bpe'" in line


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (((HIDDEN, 256), "Q2_K", bytes(84 * HIDDEN)), "shape [32, 256], expected [32, 32]"),
        (None, "is missing, expected [32, 32]"),
    ],
)
def test_missing_and_misshapen_tensors_are_named(
    serve: Serve, model_file: Any, part: Any, says: str
) -> None:
    spec = model_file(tensors={"blk.0.ffn_up.weight": part})
    line = refusal(serve, spec, "--runner=torch")
    assert "tensor blk.0.ffn_up.weight" in line and says in line


def test_kv_cache_of_fewer_blocks_than_sequences_is_refused(serve: Serve, model_file: Any) -> None:
    flags = ("--runner=torch", "--kv-cache-bytes=65536", "--max-num-seqs=16")
    line = refusal(serve, model_file(), *flags)
    assert "the KV cache holds 15 blocks of 16 tokens" in line and "16 sequences" in line
