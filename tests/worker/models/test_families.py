"""Each family of the own decoder against transformers' own classes, on checkpoints that those made; and that no batch changes a row."""

import pytest
import torch
from toys import FAMILIES, TOKENS, VOCAB, computed

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
BLOCKS = [9, 3, 12]


@pytest.fixture(params=FAMILIES)
def model(request, toy):
    """(the checkpoint, our decoder over it)"""
    made = toy(request.param)
    return made, computed(made.folder)


def test_logits_are_those_of_transformers(model):
    toy, ours = model
    assert toy.logits.shape == (len(TOKENS), VOCAB) and toy.logits.std() > 0.5
    torch.testing.assert_close(ours.logits((TOKENS, 0, BLOCKS)), toy.logits, **TOLERANCE)


def test_a_row_is_the_same_alone_in_a_ragged_batch_behind_a_prefix_and_decoded(model):
    toy, ours = model
    whole = toy.logits
    ours.logits((TOKENS, 0, BLOCKS))
    # A prefix hit: the first two blocks are those of the sequence above, the rest is computed into a block of its own.
    hit = ours.logits((TOKENS[32:], 32, [*BLOCKS[:2], 20]))
    torch.testing.assert_close(hit, whole[32:], **TOLERANCE)
    # The same rows among others of every kind: a first chunk, a chunk behind a prefix, decode rows at two positions.
    ours.logits((TOKENS[:20], 0, [5, 6]))
    parts = [
        (TOKENS[44:], 44, [*BLOCKS[:2], 20]),
        (TOKENS[:7], 0, [7]),
        (TOKENS[32:44], 32, [*BLOCKS[:2], 21]),
        (TOKENS[20:21], 20, [5, 6]),
        (TOKENS[:45], 0, [30, 31, 32]),
    ]
    ragged = ours.logits(*parts)
    expected = torch.cat([whole[start : start + len(ids)] for ids, start, _ in parts])
    torch.testing.assert_close(ragged, expected, **TOLERANCE)
    alone = torch.cat([ours.logits(part) for part in parts])
    torch.testing.assert_close(ragged, alone, atol=2e-5, rtol=0.0)


def test_shards_are_read_as_one_file(toy):
    folder = toy("llama 3").folder
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 3
    assert (folder / "model.safetensors.index.json").exists()
