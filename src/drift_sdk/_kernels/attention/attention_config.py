"""Launch configurations of paged attention."""

from __future__ import annotations

import torch
from msgspec import Struct

from drift_sdk._kernels.attention.layer_attention import padded_size
from drift_sdk._kernels.common.gpu_limits import gpu_limits
from drift_sdk.quantised.e4m3 import E4M3

__all__ = ["AttentionConfig", "attention_config", "most_query_rows"]

SHARED_RESERVE = 24 * 1024
"""Bytes of shared memory that a program may take beside its stages: queries, and changes of layout."""


class AttentionConfig(Struct, frozen=True):
    """Launch configuration of `_attend`; within these limits none of it is part of the result's bits.

    num_programs: over all heads. 528 are as many as an H200 holds at once, see `attention_config`.
    num_stages: of Triton's pipeline.
    num_warps: 1, 2 or 4, whose results are compared bit for bit by a test on the GPU.
    """

    num_programs: int = 528
    num_stages: int = 2
    num_warps: int = 2

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4):
            raise ValueError(f"num_warps={self.num_warps}: expected 1, 2 or 4, whose bits are equal")


WARPS_PER_MULTIPROCESSOR = 8
"""As many as registers allow."""

WARPS, WIDE_WARPS, WIDE = 2, 4, 128
"""Warps of a program, for heads of up to WIDE dimensions and for wider ones. With two warps, the sums of 64
query rows of 256 dimensions alone take all registers, and the compiler keeps 11 KB a thread in memory."""


STAGES, E4M3_STAGES = 2, 3
"""Stages where there is room for them. With caches of e4m3, whose tiles have half of the bytes, a third one
takes 2% to 3% of the kernel's time behind 16K and 32K keys."""


def attention_config(head_dim: int, kv_dtype: torch.dtype, tile_keys: int) -> AttentionConfig:
    """Return the configuration for a size of heads and a cache of `kv_dtype` on the current GPU: as many
    programs as it holds at once, and as many stages as fit its shared memory, up to a bound."""
    limits = gpu_limits()
    stage_bytes = 2 * tile_keys * padded_size(head_dim) * kv_dtype.itemsize
    num_fitting = (limits.shared_bytes - SHARED_RESERVE) // stage_bytes
    num_warps = WARPS if head_dim <= WIDE else WIDE_WARPS
    return AttentionConfig(
        num_programs=WARPS_PER_MULTIPROCESSOR // num_warps * limits.num_multiprocessors,
        num_stages=max(1, min(E4M3_STAGES if kv_dtype == E4M3 else STAGES, num_fitting)),
        num_warps=num_warps,
    )


def most_query_rows(head_dim: int, dtype: torch.dtype, tile_keys: int) -> int:
    """Return how many query rows of a sequence, over the heads of a group, fit the shared memory of the
    current GPU: a power of two, beside whose queries and scores there is room for a tile of keys."""
    padded_dim = padded_size(head_dim)
    num_numbers = gpu_limits().shared_bytes // dtype.itemsize - padded_dim * tile_keys
    return 1 << (max(num_numbers // (padded_dim + tile_keys), 1).bit_length() - 1)
