"""A server over a family that only transformers knows: chosen without being asked for, and the same tokens as its own generate()."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from serving import Server, until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shmserve.token_bytes import byte_of_character

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.process, pytest.mark.slow]

PADDED = 320
PROMPT = "hello, "


def write_tokenizer(folder: Path) -> Tokenizer:
    """One token a byte, and an end."""
    words = ["<|end|>", *sorted(byte_of_character())]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return tokenizer


@pytest.fixture(scope="module")
def neox(tmp_path_factory):
    """A folder, the model in it and its tokenizer. Ids from 257 on have no token, and most of the weight."""
    folder = tmp_path_factory.mktemp("models") / "neox"
    tokenizer = write_tokenizer(folder)
    torch.manual_seed(5)
    config = transformers.GPTNeoXConfig(
        vocab_size=PADDED,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = transformers.GPTNeoXForCausalLM(config).eval()
    model.save_pretrained(folder)
    return folder, model, tokenizer


def start(folder: Path, model: Path, name: str, *flags: str) -> Server:
    name = f"fb-{os.getpid()}-{name}"
    return Server(folder, name, f"--model={model}", "--max-num-seqs=4", *flags)


def expected_ids(neox, count: int) -> list[int]:
    _, model, tokenizer = neox
    ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    num_prompt = len(ids)
    while len(ids) < num_prompt + count:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits[: tokenizer.get_vocab_size()].argmax()))
    return ids[num_prompt:]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("flags", [(), ("--runner=hf",)], ids=["chosen", "asked for"])
def test_the_fallback_serves_and_never_gives_an_id_without_a_token(neox, tmp_path, flags):
    server = start(tmp_path, neox[0], f"hf{len(flags)}", *flags).wait_ready(120.0)
    try:
        expected = expected_ids(neox, 24)
        fields = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        for _ in range(2):  # the second finds the prompt's blocks
            answer = server.post("/generate", {"text": PROMPT, "sampling_params": fields})
            assert answer.status == 200, answer.body
            assert answer.json()["output_ids"] == expected
        hot = {"temperature": 5.0, "max_new_tokens": 60, "ignore_eos": True, "seed": 3}
        answer = server.post("/generate", {"text": PROMPT, "sampling_params": hot})
        assert max(answer.json()["output_ids"]) < neox[2].get_vocab_size()
        server.wait_idle()
    finally:
        server.stop()


@pytest.mark.timeout(180)
def test_a_model_that_nothing_here_can_run_ends_the_start_in_one_line(tmp_path):
    folder = tmp_path / "bamba"
    write_tokenizer(folder)
    config = {"model_type": "bamba", "vocab_size": 257, "max_position_embeddings": 64}
    config |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "attn_layer_indices": [1], "eos_token_id": 0}
    config |= {"mamba_n_heads": 8, "mamba_d_head": 8}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"nothing.of.it": torch.zeros(1)}, folder / "model.safetensors")
    server = start(tmp_path / "run", folder, "bamba")
    until(lambda: server.process.poll() is not None, "the end of the start", 120.0)
    assert server.process.returncode == 1
    output = server.output()
    assert "bamba cannot be served: layers of type" in output and "Traceback" not in output
