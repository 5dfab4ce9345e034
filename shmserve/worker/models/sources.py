"""The tensors of a model by name, from a GGUF file or a folder of safetensors, as float32.

Owns: the names of tensors in both formats. Never: knows what is computed with them, or keeps what it has read.

Rows of q and k are in the half-split rotary order of Hugging Face; llama-architecture GGUF files interleave them and are
put right here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shmserve.gguf import GGUFError, GGUFFile, printable, unpermute_rows
from shmserve.worker.models.config import DecoderConfig, ModelLoadError

if TYPE_CHECKING:
    from shmserve.worker.parallel.plan import Cut

Shape = tuple[int, ...]

# part -> (name in a GGUF file, name in a Hugging Face checkpoint)
MODEL_NAMES = {
    "embedding": ("token_embd.weight", "model.embed_tokens.weight"),
    "final_norm": ("output_norm.weight", "model.norm.weight"),
    "head": ("output.weight", "lm_head.weight"),
}
LAYER_NAMES = {
    "attention_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "q": ("attn_q.weight", "self_attn.q_proj.weight"),
    "k": ("attn_k.weight", "self_attn.k_proj.weight"),
    "v": ("attn_v.weight", "self_attn.v_proj.weight"),
    "q_bias": ("attn_q.bias", "self_attn.q_proj.bias"),
    "k_bias": ("attn_k.bias", "self_attn.k_proj.bias"),
    "v_bias": ("attn_v.bias", "self_attn.v_proj.bias"),
    "q_norm": ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    "output": ("attn_output.weight", "self_attn.o_proj.weight"),
    "output_bias": ("attn_output.bias", "self_attn.o_proj.bias"),
    "ffn_norm": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    "gate": ("ffn_gate.weight", "mlp.gate_proj.weight"),
    "up": ("ffn_up.weight", "mlp.up_proj.weight"),
    "down": ("ffn_down.weight", "mlp.down_proj.weight"),
    "attention_branch_norm": ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    "ffn_branch_norm": ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
}
BRANCH_NORM_NAMES = {"ffn_norm": "pre_feedforward_layernorm.weight"}
"""In checkpoints with branch norms, whose post_attention_layernorm is one."""

NORMS = frozenset(part for part in (*MODEL_NAMES, *LAYER_NAMES) if part.endswith("_norm"))
SAFETENSORS_DTYPES = ("F32", "F16", "BF16")


class TensorSource(Protocol):
    """One model's tensors by name."""

    def name(self, part: str, layer: int | None) -> str: ...

    def shape(self, name: str) -> Shape | None:
        """None where there is no such tensor."""

    def read(self, name: str, part: str, cut: Cut | None = None) -> Tensor:
        """The values as float32: all of them, or of a cut those in its span."""

    def where(self, name: str) -> Path:
        """The file that has the tensor, or should have it."""


class GGUFSource:
    def __init__(self, file: GGUFFile, config: DecoderConfig) -> None:
        self._file = file
        _refuse_unread(file, config)
        is_interleaved = config.architecture == "llama"
        self._interleaved_heads = (
            dict.fromkeys(("q", "q_bias"), config.num_heads)
            | dict.fromkeys(("k", "k_bias"), config.num_kv_heads)
            if is_interleaved
            else {}
        )

    def name(self, part: str, layer: int | None) -> str:
        return MODEL_NAMES[part][0] if layer is None else f"blk.{layer}.{LAYER_NAMES[part][0]}"

    def shape(self, name: str) -> Shape | None:
        info = self._file.tensors.get(name)
        return None if info is None else tuple(info.shape)

    def read(self, name: str, part: str, cut: Cut | None = None) -> Tensor:
        rows = None if cut is None or cut.dim else slice(cut.span.start, cut.span.end)
        try:
            values = self._file.array(name, rows)
        except GGUFError as error:
            raise ModelLoadError(str(error)) from None
        if part in self._interleaved_heads:
            num_heads = self._interleaved_heads[part]
            if rows is not None:  # whole heads
                num_heads = num_heads * len(values) // self._file.tensors[name].shape[0]
            values = unpermute_rows(values, num_heads)
        if cut is not None and cut.dim:
            values = values[:, cut.span.start : cut.span.end]
        return torch.from_numpy(values)

    def where(self, name: str) -> Path:
        return self._file.path


def _refuse_unread(file: GGUFFile, config: DecoderConfig) -> None:
    """A tensor that nobody reads (biases of the feed-forward, as granite-code has them, or norms of its own) would change the output."""
    is_used = dict.fromkeys(LAYER_NAMES, True)
    is_used |= dict.fromkeys(("q_bias", "k_bias", "v_bias"), config.has_qkv_bias)
    is_used |= dict.fromkeys(("q_norm", "k_norm"), config.has_qk_norm)
    is_used |= dict.fromkeys(("attention_branch_norm", "ffn_branch_norm"), config.has_branch_norms)
    is_used["output_bias"] = config.has_output_bias
    known = {names[0] for names in MODEL_NAMES.values()} | {"rope_freqs.weight"}
    for part, (name, _) in LAYER_NAMES.items():
        if is_used[part]:
            known |= {f"blk.{layer}.{name}" for layer in range(config.num_layers)}
    unread = [name for name in file.tensors if name not in known and not name.startswith("cls.")]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise ModelLoadError(
            f"{file.path}: tensor {printable(unread[0])}{more}: not supported in a model of {config.architecture}"
        )


class SafetensorsSource:
    """The tensors of model.safetensors, or of the shards that model.safetensors.index.json names.

    Rows of a fused tensor (Phi-3's qkv_proj and gate_up_proj) are a tensor too, called "NAME[first:end]".
    """

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self._config = config
        self._rows = _fused_rows(config) if config.has_fused_matrices else {}
        index = folder / "model.safetensors.index.json"
        self._single = folder / "model.safetensors"
        self._handles: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        if index.exists():
            self._file_of = {name: folder / file for name, file in _weight_map(index).items()}
        elif self._single.exists():
            self._file_of = dict.fromkeys(self._open(self._single).keys(), self._single)
        else:
            raise ModelLoadError(
                f"{folder}: has neither model.safetensors nor model.safetensors.index.json"
            )

    def name(self, part: str, layer: int | None) -> str:
        if layer is None:
            return MODEL_NAMES[part][1]
        name = LAYER_NAMES[part][1]
        if self._config.has_branch_norms:
            name = BRANCH_NORM_NAMES.get(part, name)
        if part in self._rows:
            fused, first, end, _ = self._rows[part]
            name = f"{fused}[{first}:{end}]"
        return f"model.layers.{layer}.{name}"

    def shape(self, name: str) -> Shape | None:
        whole, first, end = _split(name)
        path = self._file_of.get(whole)
        if path is None:
            return None
        tensor = self._slice(path, whole)
        if tensor.get_dtype() not in SAFETENSORS_DTYPES:
            known = ", ".join(SAFETENSORS_DTYPES)
            raise ModelLoadError(
                f"{path}: tensor {whole} has type {tensor.get_dtype()}, which cannot be read (readable: {known})"
            )
        shape = tuple(tensor.get_shape())
        if end is None:
            return shape
        num_rows = next(rows[3] for rows in self._rows.values() if whole.endswith(rows[0]))
        if shape[:1] != (num_rows,):
            raise ModelLoadError(
                f"{path}: tensor {whole} has shape {list(shape)}, expected {[num_rows, *shape[1:]]}"
            )
        return (end - first, *shape[1:])

    def read(self, name: str, part: str, cut: Cut | None = None) -> Tensor:
        whole, first, end = _split(name)
        path = self._file_of[whole]
        if cut is not None and not cut.dim:
            first, end = first + cut.span.start, first + cut.span.end
        tensor: Tensor
        if cut is not None and cut.dim:
            tensor = self._slice(path, whole)[:, cut.span.start : cut.span.end]
        elif end is None:
            tensor = self._open(path).get_tensor(whole)
        else:
            tensor = self._slice(path, whole)[first:end]
        tensor = tensor.to(torch.float32)
        return tensor + self._config.norm_offset if part in NORMS else tensor

    def where(self, name: str) -> Path:
        return self._file_of.get(_split(name)[0], self._single)

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{path}: cannot be read: {error}") from None
        return self._handles[path]

    def _slice(self, path: Path, name: str) -> Any:
        try:
            return self._open(path).get_slice(name)
        except SafetensorError:
            raise ModelLoadError(
                f"{path}: tensor {name} is missing, though the index names it"
            ) from None


def _fused_rows(config: DecoderConfig) -> dict[str, tuple[str, int, int, int]]:
    """part -> (name, first row, end row, all rows of the tensor that it is in)."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv, gate_up = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
    ffn = config.ffn_size
    return {
        "q": (qkv, 0, q, q + 2 * kv),
        "k": (qkv, q, q + kv, q + 2 * kv),
        "v": (qkv, q + kv, q + 2 * kv, q + 2 * kv),
        "gate": (gate_up, 0, ffn, 2 * ffn),
        "up": (gate_up, ffn, 2 * ffn, 2 * ffn),
    }


def _split(name: str) -> tuple[str, int, int | None]:
    """The tensor that "NAME" or "NAME[first:end]" means, and its rows; None as end for a whole tensor."""
    if not name.endswith("]"):
        return name, 0, None
    whole, _, rows = name[:-1].rpartition("[")
    first, _, end = rows.partition(":")
    return whole, int(first), int(end)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: cannot be read: {type(error).__name__}: {error}") from None
