"""Launch configurations of paged attention."""

from __future__ import annotations

import torch
import triton
from msgspec import Struct

from drift_sdk._kernels.attention.partition_sums import MIN_DOT_SIZE
from drift_sdk._kernels.common.gpu_limits import gpu_limits

__all__ = ["AttentionConfig", "attention_config"]

SHARED_RESERVE = 24 * 1024
"""Bytes of shared memory that a program may take beside its stages: queries, and changes of layout."""


class AttentionConfig(Struct, frozen=True):
    """Launch configuration of `_attend`; within these limits none of it is part of the result's bits.

    num_programs: over all heads. 528 are as many as an H200 holds at once, see `attention_config`.
    num_stages: of Triton's pipeline.
    num_warps: 1 or 2, whose results are compared bit for bit by a test on the GPU.
    """

    num_programs: int = 528
    num_stages: int = 2
    num_warps: int = 2

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2):
            raise ValueError(f"num_warps={self.num_warps}: expected 1 or 2, whose bits are equal")


PROGRAMS_PER_MULTIPROCESSOR = 4
"""As many as registers allow."""


def attention_config(head_dim: int, dtype: torch.dtype, tile_keys: int) -> AttentionConfig:
    """Return the configuration for a size of heads on the current GPU: as many programs as it holds at once,
    and two stages where their keys and values fit its shared memory, else one."""
    limits = gpu_limits()
    stage_bytes = 2 * tile_keys * max(MIN_DOT_SIZE, triton.next_power_of_2(head_dim)) * dtype.itemsize
    return AttentionConfig(
        num_programs=PROGRAMS_PER_MULTIPROCESSOR * limits.num_multiprocessors,
        num_stages=2 if 2 * stage_bytes + SHARED_RESERVE <= limits.shared_bytes else 1,
    )
