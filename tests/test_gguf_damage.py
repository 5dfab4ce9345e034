"""Damaged GGUF files: whatever bytes they have, the answer is a readable file or one line, and no more memory than the file asks."""

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.gguf import GGUFError, GGUFFile
from shmserve.model_cache import ModelError
from shmserve.model_facts import facts_of_gguf
from shmserve.token_bytes import TokenBytes

FUZZ = settings(
    max_examples=4 * settings.default.max_examples,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
OBJECT_BYTES = 160  # what Python keeps for a value of the least 8 bytes in the file: a list's place, an array's head


@pytest.fixture
def toy(write_gguf, toy_metadata) -> Path:
    rows = 262
    return write_gguf(
        toy_metadata(
            chat_template="{{ messages }}",
            scores=[0.5] * rows,
            bos_token_id=1,
            padding_token_id=0,
            add_bos_token=True,
        ),
        {
            "token_embd.weight": ((rows, 32), "Q4_1", bytes(rows * 20)),
            "blk.0.ffn_norm.weight": ((32,), "F32", bytes(128)),
        },
    )


def use(path: Path) -> None:
    """All that a start does with a file before its weights are read. Anything but one line is a failure."""
    file = GGUFFile(path)
    for info in file.tensors.values():
        assert file.raw(info.name).nbytes == info.num_bytes <= path.stat().st_size
    facts = facts_of_gguf(path)
    assert facts.context_length > 0
    TokenBytes.from_tokenizer(facts.tokenizer, facts.vocab_size)


def refusal(path: Path) -> str:
    """The line that refuses the file; empty if nothing does."""
    try:
        use(path)
    except (GGUFError, ModelError) as error:
        text = str(error)
        assert text.startswith(str(path)) and text.isprintable(), text
        return text
    return ""


@FUZZ
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_one_line(toy, share):
    whole = toy.read_bytes()
    path = toy.with_name("cut.gguf")
    path.write_bytes(whole[: int(share * (len(whole) - 32))])
    assert refusal(path)


@FUZZ
@given(
    flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=6)
)
def test_changed_bytes_give_a_readable_file_or_one_line(toy, flips):
    content = bytearray(toy.read_bytes())
    for at, value in flips:
        content[at % len(content)] = value
    path = toy.with_name("flipped.gguf")
    path.write_bytes(content)
    refusal(path)


@FUZZ
@given(at=st.integers(0, 400), value=st.integers(0, 2**64 - 1), width=st.sampled_from([4, 8]))
def test_any_number_in_the_header_takes_no_more_memory_than_the_file_can_fill(
    toy, at, value, width
):
    content = bytearray(toy.read_bytes())
    content[at : at + width] = struct.pack("<Q", value)[:width]
    path = toy.with_name("counts.gguf")
    path.write_bytes(content)
    tracemalloc.start()
    try:
        GGUFFile(path)
    except GGUFError as error:
        assert str(error).isprintable()
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < len(content) // 8 * OBJECT_BYTES + 200_000
    refusal(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_type": [1.0] * 261 + [float("nan")]}, "token_type"),
        ({"token_type": ["a"] * 262}, "token_type"),
        ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens"),
        ({"merges": [1, 2]}, "no merges"),
        ({"model": 3}, "tokenizer kind 3"),
        ({"pre": ["smollm"]}, r"pre-tokenizer \['smollm'\]"),
        ({"eos_token_id": 0.5}, "eos_token_id is 0.5"),
        ({"eos_token_id": "a"}, "eos_token_id is 'a'"),
        ({"add_bos_token": 1}, "add_bos_token is 1"),
    ],
)
def test_metadata_of_another_kind_than_expected_are_named(write_gguf, toy_metadata, changes, says):
    path = write_gguf(toy_metadata(**changes))
    with pytest.raises(ModelError, match=says):
        facts_of_gguf(path)


def test_a_context_of_no_tokens_is_refused(write_gguf, toy_metadata):
    for length in (0, -5):
        path = write_gguf(toy_metadata() | {"llama.context_length": length})
        with pytest.raises(ModelError, match=rf"{length} tokens as llama\.context_length"):
            facts_of_gguf(path)


def test_scores_that_are_no_numbers_are_refused(write_gguf, toy_metadata):
    for scores in ([float("nan")] * 262, [float("inf")] * 262, [0.0] * 261, [1] * 262):
        path = write_gguf(toy_metadata(model="llama", scores=scores))
        with pytest.raises(ModelError, match=r"tokenizer\.ggml\.scores"):
            facts_of_gguf(path)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2Jb", "a\u2028b"])
def test_a_name_with_line_ends_in_it_stays_in_one_line(write_gguf, name):
    path = write_gguf({name: "x"}, {name: ((256,), "Q2_K", bytes(84))})
    with pytest.raises(GGUFError) as caught:
        GGUFFile(path).array(name)
    assert str(caught.value).isprintable() and "Q2_K" in str(caught.value)
    content = path.read_bytes()
    key = name.encode()
    path.write_bytes(content.replace(key + struct.pack("<I", 8), key + struct.pack("<I", 99), 1))
    with pytest.raises(GGUFError, match=r"metadata key a.+b: unknown value type 99") as caught:
        GGUFFile(path)
    assert str(caught.value).isprintable()
