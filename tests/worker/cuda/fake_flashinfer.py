"""A module that says what flashinfer 0.7.4 says of its two paged wrappers, and computes in plain torch.

Names and order of parameters are the library's (`optional_parameters` of plan are keywords there, too), and so are the checks: shapes of
the buffers of recorded steps, dtypes, a batch size that is fixed, a plan before a run and never inside a recording. A wrapper of
recorded steps computes from its buffers alone.
"""

from __future__ import annotations

import itertools
import sys

import torch

from shmserve.worker.cuda import reference

__version__ = "0.7.4"
RECOMMENDED_BYTES = 128 << 20

plans: list[object] = []  # wrappers, in the order of their plans and runs
runs: list[object] = []
is_recording = False
window_error = 0  # how far from the truth its windows are


def reset() -> None:
    module = sys.modules[__name__]
    plans.clear()
    runs.clear()
    module.is_recording, module.window_error = False, 0


def _check_int32(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous(), name


class _Paged:
    def _open(self, float_workspace_buffer, kv_layout, use_cuda_graph, backend):
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
        assert len(float_workspace_buffer) >= RECOMMENDED_BYTES
        assert kv_layout == "NHD" and backend in ("auto", "fa2")
        self._use_cuda_graph, self._plan = use_cuda_graph, None

    def _take(self, indptr, indices, last_page_len, shape, how):
        """A plan's own part: checks, and copies to the buffers."""
        assert not is_recording, "a plan is no part of a graph"
        _check_int32(indptr=indptr, indices=indices, last_page_len=last_page_len)
        num_pages = indptr[1:] - indptr[:-1]
        heads, kv_heads, dim, page_size = shape
        assert len(indptr) == len(last_page_len) + 1 and int(indptr[-1]) == len(indices)
        assert (num_pages >= 1).all() and (last_page_len >= 1).all()
        assert (last_page_len <= page_size).all()
        assert heads % kv_heads == 0 and dim in (64, 128, 256)
        assert how["pos_encoding_mode"] == "NONE" and how["window_left"] >= -1
        dtypes = how["q_data_type"], how["kv_data_type"]
        assert all(dtype in (torch.float16, torch.bfloat16) for dtype in dtypes)
        if self._use_cuda_graph:
            assert len(last_page_len) == self._fixed_batch_size
            assert len(indices) <= len(self._indices)
            self._indptr.copy_(indptr)
            self._last_page_len.copy_(last_page_len)
            self._indices[: len(indices)].copy_(indices)
        else:
            self._indptr, self._indices, self._last_page_len = indptr, indices, last_page_len
        self._plan = (shape, how)
        plans.append(self)

    def _run(self, q, paged_kv_cache, qo_indptr, out, options):
        assert self._plan is not None, "run before a plan"
        assert out is not None and not any(options.values())
        (heads, kv_heads, dim, page_size), how = self._plan
        k_cache, v_cache = paged_kv_cache
        assert k_cache.shape[1:] == v_cache.shape[1:] == (page_size, kv_heads, dim)
        assert q.shape[1:] == (heads, dim) and q.shape == out.shape and q.dtype == out.dtype
        assert q.dtype == how["q_data_type"] and k_cache.dtype == how["kv_data_type"]
        bounds = self._indptr.tolist()
        counts = [last - first for first, last in itertools.pairwise(bounds)]
        table = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = self._indices[bounds[row] : bounds[row] + count]
        kv_lens = (torch.tensor(counts, dtype=torch.int32) - 1) * page_size + self._last_page_len
        window = how["window_left"] + 1 + (window_error if how["window_left"] >= 0 else 0)
        scale = dim**-0.5 if how["sm_scale"] is None else how["sm_scale"]
        at = (q, k_cache, v_cache, table, qo_indptr, kv_lens, out, len(q))
        reference.prefill_attention(*at, scale, window, how["logits_soft_cap"] or 0.0)
        runs.append(self)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        self._open(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._tensor_cores = use_tensor_cores
        if use_cuda_graph:
            self._indptr, self._indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
            self._last_page_len = paged_kv_last_page_len_buffer
            _check_int32(a=self._indptr, b=self._indices, c=self._last_page_len)
            self._fixed_batch_size = len(self._last_page_len)
            assert len(self._indptr) == self._fixed_batch_size + 1

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *deprecated_positional_args, **kwargs,
    ):  # fmt: skip
        assert not deprecated_positional_args
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan_impl(indptr, indices, last_page_len, *shape, **kwargs)

    def _plan_impl(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        pos_encoding_mode="NONE", window_left=-1, window_right=0, logits_soft_cap=None,
        q_data_type="float16", kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None,
        rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None,
        fixed_split_size=None, disable_split_kv=False, q_len_per_req=1, is_causal=None,
        use_token_head_sf=False,
    ):  # fmt: skip
        scalar_groups = (1, 2, 3, 4, 6, 8, 16)
        assert self._tensor_cores or num_qo_heads // num_kv_heads in scalar_groups
        how = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left}
        how |= {"logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        how |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type or q_data_type}
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._take(indptr, indices, last_page_len, shape, how)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
        lse=None, return_lse=False, enable_pdl=None, window_left=None, sinks=None,
        q_len_per_req=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
    ):  # fmt: skip
        assert not args and len(q) == len(self._last_page_len)
        one_each = torch.arange(len(q) + 1, dtype=torch.int32)
        options = {"lse": return_lse, "window": window_left, "sinks": sinks, "k": k_scale}
        return self._run(q, paged_kv_cache, one_each, out, options)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
        variant_owns_mask=False, max_total_num_rows=None,
    ):  # fmt: skip
        assert not use_cuda_graph, "ours are not recorded"
        self._open(float_workspace_buffer, kv_layout, use_cuda_graph, backend)

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None,
        block_tables=None, max_token_per_sequence=None, max_sequence_kv=None,
        fixed_split_size=None, disable_split_kv=False, uniform_q_len=None, use_token_head_sf=False,
    ):  # fmt: skip
        assert causal and head_dim_vo in (None, head_dim_qk)
        _check_int32(qo_indptr=qo_indptr)
        assert len(qo_indptr) == len(paged_kv_indptr)
        self._qo_indptr = qo_indptr.clone()
        how = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left}
        how |= {"logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        how |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type or q_data_type}
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._take(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, shape, how)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
        lse=None, return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None,
        window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None, uses_spcompress=None,
    ):  # fmt: skip
        assert not args and len(q) == int(self._qo_indptr[-1])
        options = {"lse": return_lse, "window": window_left, "sinks": sinks, "k": k_scale}
        return self._run(q, paged_kv_cache, self._qo_indptr, out, options)
