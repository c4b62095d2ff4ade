"""Launch configurations of prefill attention."""

from __future__ import annotations

import torch
from msgspec import Struct

from drift_sdk._kernels.common.gpu_limits import GpuLimits, gpu_limits
from drift_sdk._kernels.common.sizes import next_power_of_2

__all__ = ["PrefillAttentionConfig", "prefill_attention_config", "shared_bytes"]

SHARED_RESERVE, WIDE_SHARED_RESERVE = 1024, 9216
"""Bytes of shared memory that Triton may take beside the tiles; the second for heads of more than 128
dimensions, whose scores change their layout there."""


class PrefillAttentionConfig(Struct, frozen=True):
    """Tile sizes and launch configuration. tile_rows and tile_keys are powers of two, 16 at least.

    tile_rows: rows of a program; the module's docstring says why 128.
    tile_keys: keys that a program takes at a time, part of the result's bits. The others may be part of them
    too, by the instructions that Triton chooses for them.
    num_stages: of Triton's pipeline. Keys are found through the block table, so the stages serve two loads
    one after the other: five of them keep three tiles of keys in shared memory; three stages would wait for
    each tile right after asking for it.
    """

    tile_rows: int = 128
    tile_keys: int = 64
    num_warps: int = 8
    num_stages: int = 5


def prefill_attention_config(head_dim: int, dtype: torch.dtype) -> PrefillAttentionConfig:
    """Return the configuration for a size of heads on the current GPU: what fits in registers and shared
    memory, no spilling."""
    if dtype == torch.float32:
        return PrefillAttentionConfig(tile_rows=16, tile_keys=32, num_stages=1)

    tile_keys, limits = 64 if head_dim <= 128 else 32, gpu_limits()
    wide = PrefillAttentionConfig(tile_keys=tile_keys)
    for config in (wide, PrefillAttentionConfig(tile_keys=tile_keys, num_stages=3)):
        if shared_bytes(config, head_dim, limits) <= limits.shared_bytes:
            return config

    return PrefillAttentionConfig(tile_rows=64, tile_keys=32, num_warps=4, num_stages=3)


def shared_bytes(config: PrefillAttentionConfig, head_dim: int, limits: GpuLimits) -> int:
    """Return at least the shared memory that a program takes: queries, and keys and values of the tiles that
    are under way. Triton keeps one tile more with wgmma, which reads them from there."""
    num_tiles = config.num_stages // 2 + (limits.capability[0] == 9)
    padded_dim = next_power_of_2(head_dim)
    reserve = SHARED_RESERVE if padded_dim <= 128 else WIDE_SHARED_RESERVE
    return (config.tile_rows + 2 * config.tile_keys * num_tiles) * padded_dim * 2 + reserve
