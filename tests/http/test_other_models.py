"""Models that are not the default one: without a chat template, and with a template and a tokenizer that both know a BOS."""

import json
import struct

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from shmserve.token_bytes import byte_of_character

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
BOS = 1


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A Hugging Face folder whose tokenizer puts a BOS first; one token a byte, and no chat template."""
    folder = tmp_path_factory.mktemp("models") / "Toy-Base"
    folder.mkdir()
    words = ["<|end|>", "<|start|>", *sorted(byte_of_character())]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|start|>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": len(words), "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q2s", 2, b"{}"))
    return folder


@pytest.fixture(scope="module")
def base(start_server, model_folder):
    return start_server("--step-ms=1", f"--model={model_folder}")


@pytest.fixture(scope="module")
def templated(start_server, model_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text("{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}")
    return start_server("--step-ms=1", f"--model={model_folder}", f"--chat-template={path}")


def test_a_model_without_a_template_refuses_chats_and_completes_I4(base):
    for more in ({}, {"stream": True}):
        answer = base.post("/v1/chat/completions", CHAT | more)
        assert (answer.status, answer.error()["code"]) == (400, "no_chat_template")
        assert "no chat template" in answer.error()["message"]
    assert base.complete(max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    assert len(base.post("/generate", body).json()["output_ids"]) == 3
    base.wait_idle()


@pytest.mark.slow
def test_a_template_of_the_operator_makes_it_chat_I4(templated):
    answer = templated.post("/v1/chat/completions", CHAT)
    assert answer.status == 200, answer.body
    templated.wait_idle()


def test_a_bos_of_the_template_is_not_put_first_again_I1(templated):
    def prompt_ids(path, body):
        answer = templated.post(path, body | {"max_tokens": 1, "return_token_ids": True}).json()
        choice = answer["choices"][0]
        return (
            choice["prompt_token_ids"]
            if "prompt_token_ids" in choice
            else answer["prompt_token_ids"]
        )

    chat = prompt_ids("/v1/chat/completions", CHAT)
    assert chat[0] == BOS and chat.count(BOS) == 1 and len(chat) == len("[Hi]") + 1
    # A plain prompt gets the one that this tokenizer puts first.
    plain = prompt_ids("/v1/completions", {"prompt": "Hi"})
    assert plain[0] == BOS and plain.count(BOS) == 1 and len(plain) == 3


def test_a_chat_gets_special_tokens_of_its_own_where_it_asks_for_them_as_tokenize_does(templated):
    counts = []
    for fields in ({}, {"add_special_tokens": True}):
        told = templated.post("/tokenize", {"messages": CHAT["messages"]} | fields).json()
        usage = templated.post("/v1/chat/completions", CHAT | fields).json()["usage"]
        assert usage["prompt_tokens"] == told["count"]
        counts.append(told["count"])
    assert counts == [len("[Hi]") + 1, len("[Hi]") + 2]
