"""The same checkpoints through the CUDA runner, its operations in plain torch: transformers' logits, prompts and recorded steps alike."""

import numpy as np
import pytest
import torch
from checkpoints import prepared
from toys import BLOCK, FAMILIES, MAX_POSITIONS, TOKENS, VOCAB, batch_of

from shmserve.request import SamplingParams
from shmserve.worker.cuda.ops import REFERENCE
from shmserve.worker.cuda.runner import CudaRunner
from shmserve.worker.sampling_state import SamplingState

pytestmark = pytest.mark.slow

BLOCKS = [9, 3, 12]


def cuda_runner(folder, **options) -> CudaRunner:
    return CudaRunner(
        prepared(folder),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=MAX_POSITIONS,
        kv_cache_bytes=1 << 20,
        block_size=BLOCK,
        num_threads=1,
        progress=lambda what, share: None,
        device="cpu",
        dtype=torch.float32,
        ops=REFERENCE,
        **options,
    )


def greedy(num_rows=4) -> SamplingState:
    state = SamplingState(num_rows)
    state.temperature[:] = 0
    return state


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(toy, name):
    made, prompt = toy(name), len(TOKENS) - 2
    runner = cuda_runner(made.folder)
    with torch.inference_mode():
        runner.run(batch_of((TOKENS[:prompt], 0, BLOCKS)), greedy())
        found = [runner._model.hidden_logits(0, prompt)]
        for at in (prompt, prompt + 1):  # recorded steps of one row
            output = runner.run(batch_of(([TOKENS[at]], at, BLOCKS)), greedy())
            found.append(runner._model.logits[:1].clone())
    torch.testing.assert_close(torch.cat(found), made.logits, atol=1e-4, rtol=0.0)
    assert output.token_ids[0, 0] == made.logits[-1].argmax()
    runner.close()


def test_an_id_beyond_the_tokenizers_is_never_chosen(toy):
    most_likely = int(toy("smollm2").logits[-1].argmax())
    runner = cuda_runner(toy("smollm2").folder, num_token_ids=most_likely)
    assert runner.info.vocab_size == most_likely < VOCAB
    state = greedy()
    for row in range(1, 4):
        state.set(row, SamplingParams(max_tokens=1, temperature=50.0, seed=row), (), 0)
    hot = [(TOKENS[:6], 0, [20 + row]) for row in range(3)]
    output = runner.run(batch_of((TOKENS, 0, BLOCKS), *hot), state)
    expected = toy("smollm2").logits[-1, :most_likely].argmax()
    assert output.token_ids[0, 0] == expected and output.token_ids.max() < most_likely
    assert np.isfinite(runner._model.logits.numpy()).all()
    runner.close()
