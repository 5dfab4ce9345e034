"""The operations that the CUDA runner is made of, behind one type, so that it runs on kernels or on plain torch.

`REFERENCE` is reference.py; `TRITON` is the kernels. `TRITON` is made when it is first asked for: neither this module nor its
importers need triton or a GPU. Shapes, dtypes and laws are in reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from shmserve.worker.cuda import reference
from shmserve.worker.cuda.reference import DecodeScratch, SampleScratch

__all__ = ["REFERENCE", "DecodeScratch", "Ops", "SampleScratch", "triton_ops"]

Operation = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Ops:
    """One back end. Each field is the function of its name in reference.py."""

    name: str
    embed: Operation
    add_rms_norm: Operation
    rotary_write: Operation
    decode_attention: Operation
    prefill_attention: Operation
    gated_mul: Operation
    gemv: Operation
    sample: Operation


REFERENCE = Ops(
    "reference",
    reference.embed,
    reference.add_rms_norm,
    reference.rotary_write,
    reference.decode_attention,
    reference.prefill_attention,
    reference.gated_mul,
    reference.gemv,
    reference.sample,
)


@cache
def triton_ops() -> Ops:
    """The kernels. Imports triton; raises ImportError where it is not installed."""
    from shmserve.worker.cuda import (
        activation,
        attention_decode,
        attention_prefill,
        embedding,
        gemv,
        norm,
        rotary,
        sampling,
    )

    return Ops(
        "triton",
        embedding.embed,
        norm.add_rms_norm,
        rotary.rotary_write,
        attention_decode.decode_attention,
        attention_prefill.prefill_attention,
        activation.gated_mul,
        gemv.gemv,
        sampling.sample,
    )


def __getattr__(name: str) -> Ops:
    if name == "TRITON":
        return triton_ops()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
