"""Every part of a model is at some rank, once, and what cannot be shared is refused with numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shmserve.worker.models.config import DecoderConfig, ModelLoadError, Rope
from shmserve.worker.parallel.plan import Cut, Partition, Span, refusal

WEIGHTS = Path("toy")


def config_of(**changes) -> DecoderConfig:
    layers = 2
    config = DecoderConfig(
        architecture="llama",
        vocab_size=100,
        context_length=64,
        num_layers=layers,
        hidden_size=48,
        ffn_size=96,
        num_heads=12,
        num_kv_heads=4,
        head_dim=8,
        norm_eps=1e-5,
        ropes=(Rope(10000.0),) * layers,
        sliding_windows=(None,) * layers,
        has_qkv_bias=False,
        has_output_bias=False,
        has_qk_norm=False,
        tied_head=False,
    )
    return replace(config, **changes)


def partitions(config: DecoderConfig, num_ranks: int) -> list[Partition]:
    return [Partition.of(config, rank, num_ranks, WEIGHTS) for rank in range(num_ranks)]


def all_of(spans: list[Span]) -> list[int]:
    return [index for span in spans for index in range(span.start, span.end)]


@given(
    num_kv=st.integers(1, 12),
    group=st.integers(1, 8),
    ffn=st.integers(8, 3000),
    vocab=st.integers(200, 3000),
    num_ranks=st.integers(1, 8),
)
def test_each_head_row_and_id_is_at_one_rank_and_none_goes_without(
    num_kv, group, ffn, vocab, num_ranks
):
    sizes = {"num_kv_heads": num_kv, "num_heads": num_kv * group}
    config = config_of(**sizes, ffn_size=ffn, vocab_size=vocab)
    assume(refusal(config, num_ranks) is None)
    parts = partitions(config, num_ranks)
    assert all_of([part.heads for part in parts]) == list(range(num_kv * group))
    assert all_of([part.ffn for part in parts]) == list(range(ffn))
    assert all_of([part.ids for part in parts]) == list(range(vocab))
    assert all(len(part.heads) and len(part.ffn) and len(part.ids) for part in parts)
    assert sorted(set(all_of([part.kv_heads for part in parts]))) == list(range(num_kv))
    assert sum(len(part.kv_heads) for part in parts) == parts[0].num_kv_heads_of_all
    for part in parts:  # the queries of a rank are those of its KV heads, as many of each
        shared = {head // group for head in range(part.heads.start, part.heads.end)}
        assert shared == set(range(part.kv_heads.start, part.kv_heads.end))
        assert len(part.heads) % len(part.kv_heads) == 0
        assert part.own.num_heads == len(part.heads) and part.own.ffn_size == len(part.ffn)


def test_an_even_model_is_shared_evenly_and_nothing_is_remarked():
    parts = partitions(config_of(ffn_size=11008), 4)
    assert [len(part.ffn) for part in parts] == [2752] * 4
    assert [(len(part.heads), len(part.kv_heads)) for part in parts] == [(3, 1)] * 4
    assert parts[0].remark == ""


def test_kv_heads_that_do_not_divide_go_with_their_queries():
    first, second = partitions(config_of(num_heads=9, num_kv_heads=3), 2)
    assert (first.heads, first.kv_heads) == (Span(0, 3), Span(0, 1))
    assert (second.heads, second.kv_heads) == (Span(3, 9), Span(1, 3))
    assert first.remark == "3 kv heads do not divide evenly: a rank has 1 or 2 of them"


def test_with_more_ranks_than_kv_heads_each_is_kept_by_several():
    parts = partitions(config_of(num_heads=8, num_kv_heads=2), 4)
    assert [part.kv_heads for part in parts] == [Span(0, 1), Span(0, 1), Span(1, 2), Span(1, 2)]
    assert [part.heads for part in parts] == [Span(2 * r, 2 * r + 2) for r in range(4)]
    assert parts[0].num_kv_heads_of_all == 4
    assert parts[0].remark == "each of 2 kv heads is kept by 2 ranks"


@pytest.mark.parametrize(
    ("changes", "num_ranks", "reason"),
    [
        (
            {"num_heads": 9, "num_kv_heads": 3},
            4,
            r"9 heads over 3 kv heads cannot be shared among 4 ranks \(up to 3, or 9 ranks\)",
        ),
        (
            {"num_heads": 8, "num_kv_heads": 8},
            16,
            r"8 heads over 8 kv heads cannot be shared among 16 ranks \(up to 8\)",
        ),
        ({"ffn_size": 3}, 4, "3 rows of the feed-forward cannot be shared among 4 ranks"),
        ({"vocab_size": 5}, 4, "5 token ids cannot be shared among 4 ranks"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name_and_number(changes, num_ranks, reason):
    with pytest.raises(ModelLoadError, match=f"^toy: --tensor-parallel {num_ranks}: .*{reason}$"):
        Partition.of(config_of(**changes), 0, num_ranks, WEIGHTS)


def test_columns_are_those_of_the_rows_before_them():
    part = partitions(config_of(), 4)[1]
    assert part.cut("q") == Cut(0, Span(24, 48), 24)
    assert part.cut("output") == Cut(1, Span(24, 48), 24)
    assert part.cut("k") == part.cut("v_bias") == Cut(0, Span(8, 16), 8)
    assert part.cut("up") == Cut(0, Span(24, 48), 24) and part.cut("down") == Cut(
        1, Span(24, 48), 24
    )
    whole = ("attention_norm", "ffn_norm", "q_norm", "k_norm", "output_bias", "final_norm")
    assert {part.cut(name) for name in whole} == {None}


def test_ids_that_do_not_exist_have_a_place_at_the_last_rank():
    parts = partitions(config_of(vocab_size=101), 2)
    assert [part.cut("head") for part in parts] == [
        Cut(0, Span(0, 51), 51),
        Cut(0, Span(51, 101), 51),
    ]
