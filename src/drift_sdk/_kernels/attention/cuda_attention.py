"""The sums of paged attention in CUDA C++, bit for bit those of `_attend`.

For bfloat16 and heads of 64 or 128 dimensions, on GPUs of compute capability 9.0, and up to 16 query rows in
a tile. Four warps share a tile: each computes the scores of a quarter of its keys, then the softmax of all of
them, and the values of a quarter of the dimensions. A tile of 64 keys takes a third of the time of `_attend`,
which counts where programs have few of them.

Order of summation: that of online_softmax.py, by the same instruction.

Grid: (KV heads, shares), as of `_attend`.

Bytes: as of `_attend`. Copies run tiles ahead, from one sequence to the next.

Dependent launch: before it waits, a CTA reads the plan, rows and block table, as `_attend` does. It copies
its first keys and values too where they are older than the step's rows: no kernel of a step writes these.
"""

from __future__ import annotations

import torch
from msgspec import Struct

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.partition_sums import AttentionScratch
from drift_sdk._kernels.attention.planned_rows import PlannedRows
from drift_sdk._kernels.attention.shared_prefixes import most_companions
from drift_sdk._kernels.common.gpu_limits import gpu_limits
from drift_sdk._kernels.common.launch_order import KernelAccess, note_kernel

__all__ = ["CudaAttentionConfig", "cuda_attend", "has_cuda_attention"]

FILES = (
    "common/types.cu",
    "common/dependent_launch.cu",
    "common/hopper.cu",
    "attention/paged_attention.cu",
)
ROWS, KEYS, WARPS = 16, 64, 4
"""Query rows and keys of a tile; warps that share it."""
SCORE_BYTES = 2 * ROWS * (KEYS + 8) * 4
EARLY_TILES = 2
"""As of `_attend`."""
ALIGNMENT = 16
"""Bytes that are copied at a time."""


class CudaAttentionConfig(Struct, frozen=True):
    """Launch configuration; no bit depends on it.

    num_programs: for each multiprocessor. num_stages: tiles in shared memory.
    """

    num_programs: int = 3
    num_stages: int = 2


def has_cuda_attention(layer: LayerAttention, rows: PlannedRows, tile_keys: int) -> bool:
    """Return True if `cuda_attend` computes the sums of these rows."""
    query, kv = layer.query, layer.kv
    if query.device.type != "cuda" or query.dtype != torch.bfloat16 or kv.keys.dtype != torch.bfloat16:
        return False

    num_query_rows = rows.rows_per_sequence * layer.group
    has_shape = layer.head_dim in (64, 128) and num_query_rows <= ROWS and tile_keys == KEYS
    if layer.window or layer.first_key or not has_shape or kv.block_size % KEYS:
        return False

    if any(cache.data_ptr() % ALIGNMENT for cache in (kv.keys, kv.values)):
        return False

    # Imported here: cuda.core is installed where there is a GPU.
    from drift_sdk._kernels.common.cuda_programs import has_compiler

    return torch.cuda.get_device_capability(query.device) == (9, 0) and has_compiler()


def cuda_attend(
    layer: LayerAttention,
    rows: PlannedRows,
    scratch: AttentionScratch,
    config: CudaAttentionConfig = CudaAttentionConfig(),  # noqa: B008  # frozen
) -> None:
    """Write the sums of partitions to `scratch`, where `has_cuda_attention`. The caller, `paged_attention`,
    checks the arguments."""
    from drift_sdk._kernels.common.cuda_programs import CudaKernel, compile_kernel, launch_kernel

    plan, kv, partitions = scratch.plan, layer.kv, scratch.plan.partitions
    macros = {
        "DIM": layer.head_dim,
        "ROWS_PER_SEQUENCE": rows.rows_per_sequence,
        "GROUP": layer.group,
        "COMPANIONS": most_companions(rows, layer.group, plan.window),
        "NARROW": partitions.narrow,
        "NARROW_END": partitions.narrow_end,
        "NUM_DOUBLINGS": partitions.num_doublings,
        "NUM_STAGES": config.num_stages,
        "EARLY_TILES": EARLY_TILES,
    }
    shared_bytes = config.num_stages * 2 * KEYS * layer.head_dim * 2 + SCORE_BYTES
    num_programs = config.num_programs * gpu_limits().num_multiprocessors
    kernel = CudaKernel(FILES, "attend", tuple((name, str(value)) for name, value in macros.items()))
    cache = {"keys": kv.keys, "values": kv.values}
    early = {
        "block_table": layer.block_table,
        "row_slot": rows.slot,
        "row_position": rows.position,
        "tiles": plan.tiles,
        "num_tiles": plan.num_tiles,
    }
    sums = {"sums": scratch.sums, "maxima": scratch.maxima, "weights": scratch.weights}
    launch_kernel(
        compile_kernel(kernel, layer.query.device.index or 0, shared_bytes),
        (kv.num_heads, max(1, num_programs // kv.num_heads)),
        WARPS * 32,
        shared_bytes,
        layer.query,
        *cache.values(),
        *early.values(),
        *sums.values(),
        layer.log2_scale,
        plan.max_num_partitions,
        layer.block_table.shape[1],
        kv.num_heads,
        kv.block_size.bit_length() - 1,
    )
    access = KernelAccess(frozenset(early), frozenset(sums), False, frozenset(cache))
    note_kernel("sums of partitions", access, cache | early | sums)
