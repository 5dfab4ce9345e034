"""The same checkpoints over two ranks, by torch and by the CUDA runner's operations: fused tensors, offsets of norms and soft caps too."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import prepared
from toys import FAMILIES, TOKENS, batch_of

PARALLEL = str(Path(__file__).parents[1] / "parallel")
if PARALLEL not in sys.path:
    sys.path.insert(0, PARALLEL)

from together import LIMITS, Together, state_of  # noqa: E402

from shmserve.worker.cuda.ops import REFERENCE  # noqa: E402
from shmserve.worker.cuda.runner import CudaRunner  # noqa: E402
from shmserve.worker.torch_runner import TorchRunner  # noqa: E402

pytestmark = pytest.mark.slow

BLOCKS = [9, 3, 12]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(toy, name):
    made = toy(name)
    model = prepared(made.folder)
    ranks = Together(2, lambda team: TorchRunner(model, **LIMITS, team=team))
    batch = batch_of((TOKENS, 0, BLOCKS))
    rows = np.arange(len(TOKENS), dtype=np.int32)
    try:
        ranks.first._team.compute(batch)
        with torch.inference_mode():
            found = ranks.first._logits(ranks.first._hidden(batch), rows)
    finally:
        ranks.close()
    torch.testing.assert_close(found, made.logits, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_the_cuda_runner_are_those_of_transformers(toy, name):
    made = toy(name)
    model = prepared(made.folder)
    options = {"device": "cpu", "dtype": torch.float32, "ops": REFERENCE}
    ranks = Together(2, lambda team: CudaRunner(model, **LIMITS, **options, team=team))
    try:
        output = ranks.first.run(batch_of((TOKENS, 0, BLOCKS)), state_of())
        found = ranks.first._model.logits[0].clone()
    finally:
        ranks.close()
    torch.testing.assert_close(found, made.logits[-1], atol=1e-4, rtol=0.0)
    assert output.token_ids[0, 0] == made.logits[-1].argmax()
