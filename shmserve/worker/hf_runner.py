"""Any decoder of transformers, run by its own classes with our paged attention, in float32 on the CPU.

Owns: the model, and the step from a `Batch` to its `StepOutput`. Never: knows a request, chooses blocks, or decides what can be served
(hf_loading.py, and the survey of hf_attention.py). Worker process, main thread only; transformers is imported with this module,
which takes seconds, so it is imported for a model that nothing else can run. The speed is that of eager torch.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor

from shmserve.worker.batch import I4, Batch, StepOutput
from shmserve.worker.hf_attention import PagedAttention, Survey, UnfitAttentionError
from shmserve.worker.hf_loading import config_of, context_of, folder_of, load, unfit
from shmserve.worker.models.config import UnknownArchitectureError
from shmserve.worker.runner import Progress, RunnerInfo
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.sizing import StepLimits, sized
from shmserve.worker.torch_output import output_of, rows_needed

if TYPE_CHECKING:
    from shmserve.models import PreparedModel
    from shmserve.worker.parallel.team import Team

log = logging.getLogger(__name__)

BYTES_PER_VALUE = 4
SURVEYED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class _Sizes:
    vocab_size: int
    context_length: int


class HFRunner:
    """`ModelRunner` over a model class of transformers.

    `team`: transformers shares the model among several ranks by its own plan (`refuse_unshared` tells whether it can), and this is one
    of them; `kv_cache_bytes` is what all of them keep together.

    `max_model_len` None means as much of the model's context as `kv_cache_bytes` can hold; `num_token_ids` is how many ids have a
    token, where the model's vocabulary is padded: the others do not exist for anybody. Raises ModelLoadError, one line, for a
    model that does not fit, cannot be loaded, or for a KV cache too small for one sequence.
    """

    def __init__(
        self,
        model: PreparedModel,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int | None,
        kv_cache_bytes: int,
        block_size: int = 16,
        num_threads: int | None,
        progress: Progress,
        num_token_ids: int | None = None,
        team: Team | None = None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._limits = StepLimits(max_num_seqs, max_num_batched_tokens)
        if model.format != "safetensors":
            raise UnknownArchitectureError(
                f"{model.weights}: transformers' classes read safetensors, not {model.format}"
            )
        folder = folder_of(model)
        # What it has to say to a person goes through our own lines.
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        config = config_of(folder)
        num_ranks = 1 if team is None else team.group.size
        self._attention = PagedAttention()
        progress("loading weights", 0.0)
        self._model = load(folder, config, self._attention.name, num_ranks)
        self._takes_rows = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        text = config.get_text_config(decoder=True)
        sizes = _Sizes(self._model.get_output_embeddings().weight.shape[0], context_of(text, model))
        survey = self._surveyed(folder, text, sizes.context_length)
        per_token = sum(shape.values_per_token for shape in survey.layers.values())
        per_block = BYTES_PER_VALUE * per_token * block_size  # of this rank's heads
        if team is not None:
            kv_cache_bytes = per_block * team.group.least(kv_cache_bytes // num_ranks // per_block)
        info = sized(
            "hf-cpu" if team is None else f"hf-cpu, {num_ranks} ranks",
            sizes,
            per_block,
            max_model_len,
            kv_cache_bytes,
            block_size,
        )
        self._attention.allocate(survey, info.num_blocks, block_size)
        num_ids = min(info.vocab_size, num_token_ids or info.vocab_size)
        self._info = replace(info, vocab_size=num_ids, max_guesses=max_num_batched_tokens)
        self._team = team
        self._followed: Batch | None = None
        log.info(
            "%s is computed by transformers' %s with paged attention, at the speed of eager torch",
            model.name,
            type(self._model).__name__,
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        """Compute and sample; see `ModelRunner.run`."""
        self._limits.check(batch)
        if not batch.num_tokens:
            return StepOutput.of_nothing()
        rows = rows_needed(batch)
        if self._team is not None:
            self._team.compute(batch)
            self._team.logits(rows)
        with torch.inference_mode():
            self._attention.begin(batch)
            logits = self._logits(batch.token_ids, batch.positions, rows)
            return output_of(
                batch,
                sampling,
                lambda wanted: logits[torch.from_numpy(np.searchsorted(rows, wanted))],
            )

    def follow(self, batch: Batch, carried: I4 | None) -> None:
        """Note a step of rank 0; of a rank > 0. Its forward pass comes with the rows whose logits it ends with."""
        self._followed = batch

    def follow_logits(self, rows: I4) -> None:
        """Compute this rank's part of the step that was noted last."""
        batch = self._followed
        assert batch is not None, "logits of no step"
        with torch.inference_mode():
            self._attention.begin(batch)
            self._logits(batch.token_ids, batch.positions, rows)

    def close(self) -> None:
        """Let weights and cache go, and the other ranks."""
        if self._team is not None:
            self._team.close()
        self._attention.release()
        del self._model

    def _logits(self, token_ids: I4, positions: I4, rows: I4) -> Tensor:
        """f32[len(rows), num_ids], of a flat batch."""
        keep = torch.from_numpy(rows).long()
        logits: Tensor = self._model(
            input_ids=torch.from_numpy(token_ids).long()[None],
            position_ids=torch.from_numpy(positions).long()[None],
            use_cache=False,
            **({"logits_to_keep": keep} if self._takes_rows else {}),
        ).logits[0]
        return (logits if self._takes_rows else logits[keep])[:, : self._info.vocab_size].float()

    def _surveyed(self, folder: Path, text: Any, context_length: int) -> Survey:
        def forward() -> object:
            count = min(SURVEYED_TOKENS, context_length)
            return self._model(
                input_ids=torch.zeros((1, count), dtype=torch.long),
                position_ids=torch.arange(count)[None],
                use_cache=False,
            )

        try:
            with torch.inference_mode():
                survey = self._attention.survey(context_length, forward)
            survey.check(text.num_hidden_layers)
        except UnfitAttentionError as error:
            raise unfit(folder, type(self._model).__name__, str(error)) from None
        return survey
