"""The attention function that transformers' decoders call in place of their own: ours, over a paged KV cache.

Owns: what is registered with transformers, the cache of each layer, and the proof that a model's attention is what this function
computes. Never: loads a model, or knows a request. Worker process, main thread only.

A model is surveyed once, by a forward pass over a few tokens that attends to nothing: it shows the modules that call the
function, the sizes of their heads, and which of the masks that the model asks for reaches which layer. The law that makes it safe
to compute without masks: each one is a causal window, and its width is then the layer's. Anything else that would change the
scores (position biases, masks of images, chunks) is refused by name, never ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from shmserve.worker.batch import Batch
from shmserve.worker.models.attention import AttentionPlan, KVCache

_NUMBERS = itertools.count()

HARMLESS = frozenset(
    ("position_ids", "cache_position", "output_attentions", "use_cache", "dropout", "training")
)
"""Arguments that say what the plan of the batch says already, or nothing."""


class UnfitAttentionError(Exception):
    """What about a model's attention this function does not compute."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def values_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(slots=True)
class Survey:
    """What one forward pass showed: the modules that attended, in order; and the stand-ins for the masks that were asked for,
    each with the window that it stands for."""

    context_length: int
    layers: dict[nn.Module, LayerShape] = field(default_factory=dict)
    masks: list[tuple[Tensor, int | None]] = field(default_factory=list)

    def check(self, num_layers: int) -> None:
        """Raises UnfitAttentionError unless every layer attended."""
        if len(self.layers) != num_layers:
            raise UnfitAttentionError(
                f"{len(self.layers)} of {num_layers} layers attend through transformers' AttentionInterface"
            )


@dataclass(frozen=True, slots=True)
class _Step:
    kv_slots: Tensor
    plans: Mapping[int | None, AttentionPlan]


class PagedAttention:
    """One model's attention; `name` is what its `attn_implementation` must be."""

    def __init__(self) -> None:
        # A name of its own: transformers' registry is one per process, and never forgets.
        self.name = f"shmserve_{next(_NUMBERS)}"
        self._survey: Survey | None = None
        self._step: _Step | None = None
        self._layers: dict[nn.Module, tuple[KVCache, int | None]] = {}
        AttentionInterface.register(self.name, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(self.name, self._mask)

    def survey(self, context_length: int, forward: Callable[[], object]) -> Survey:
        """What `forward` shows; raises UnfitAttentionError at the first thing that cannot be computed."""
        self._survey = Survey(context_length)
        try:
            forward()
            return self._survey
        finally:
            self._survey = None

    def allocate(self, survey: Survey, num_blocks: int, block_size: int) -> None:
        """Caches for the surveyed layers."""
        self._block_size = block_size
        self._layers = {
            module: (
                KVCache(
                    1, num_blocks, block_size, shape.num_kv_heads, shape.key_dim, shape.value_dim
                ),
                shape.window,
            )
            for module, shape in survey.layers.items()
        }

    def begin(self, batch: Batch) -> None:
        """The forward pass that follows computes `batch`."""
        for cache, _ in self._layers.values():
            cache.clear_opened(batch.kv_slots)
        windows = {window for _, window in self._layers.values()}
        plans = {window: AttentionPlan(batch, self._block_size, window) for window in windows}
        self._step = _Step(torch.from_numpy(batch.kv_slots).long(), plans)

    def release(self) -> None:
        """Let the caches go."""
        self._layers, self._step = {}, None

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Query [1, heads, T, key_dim], key and value [1, kv heads, T, ...]; [1, T, heads, value_dim] attended."""
        if self._survey is not None:
            self._note(module, key, value, attention_mask, sliding_window, others)
            return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None
        assert self._step is not None, "a forward pass outside a step"
        cache, window = self._layers[module]
        cache.write(0, self._step.kv_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        attended = self._step.plans[window].attend(
            query[0].transpose(0, 1).contiguous(),
            cache.keys[0],
            cache.values[0],
            scale=scaling,
            softcap=softcap,
            sinks=s_aux,
        )
        return attended.unsqueeze(0), None

    def _note(
        self,
        module: nn.Module,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        sliding_window: int | None,
        others: Mapping[str, Any],
    ) -> None:
        survey, kind = self._survey, type(module).__name__
        assert survey is not None
        if module in survey.layers:
            raise UnfitAttentionError(f"{kind} attends more than once in a layer")
        is_causal = others.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if not is_causal or getattr(module, "is_cross_attention", False):
            raise UnfitAttentionError(f"{kind} attends to more than the tokens before")
        for name, argument in others.items():
            if isinstance(argument, Tensor) and name not in HARMLESS:
                raise UnfitAttentionError(f"{kind} attends with {name}, which is not supported")
        if attention_mask is None:
            is_windowed = sliding_window is not None and sliding_window < survey.context_length
            window = sliding_window if is_windowed else None
        else:
            found = [window for mask, window in survey.masks if mask is attention_mask]
            if not found:
                raise UnfitAttentionError(f"{kind} brings a mask of its own")
            window = found[0]
        survey.layers[module] = LayerShape(key.shape[1], key.shape[3], value.shape[3], window)

    def _mask(
        self, *args: Any, mask_function: Callable[..., Tensor], **others: Any
    ) -> Tensor | None:
        """None: the plan of the batch knows who sees what. In a survey, a stand-in by which its layers are known."""
        if self._survey is None:
            return None
        window = window_of(mask_function, self._survey.context_length)
        self._survey.masks.append((torch.zeros(1, 1, 1, 1), window))
        return self._survey.masks[-1][0]


def window_of(mask_function: Callable[..., Tensor], context_length: int) -> int | None:
    """How many tokens, itself included, a token sees under `mask_function`; None: all before it. Raises UnfitAttentionError if
    that is not the same for all tokens."""
    zero, keys = torch.tensor(0), torch.arange(context_length)
    window: int | None = None
    # The last token tells the window; two others tell that it goes with the token, and is no chunk.
    for at in sorted({context_length - 1, context_length - 2, context_length // 2}, reverse=True):
        if at < 0:
            continue
        seen = mask_function(zero, zero, torch.tensor(at), keys).expand(context_length).nonzero()
        first, last = int(seen[0]), int(seen[-1])
        if at == context_length - 1 and first > 0:
            window = at - first + 1
        expected = 0 if window is None else max(0, at - window + 1)
        if last != at or first != expected or len(seen) != last - first + 1:
            raise UnfitAttentionError("its mask is not a causal window")
    return window
