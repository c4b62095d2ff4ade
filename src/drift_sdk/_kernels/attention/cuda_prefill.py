"""Attention of prompt chunks in CUDA C++: that of `prefill_attention`, and bit for bit that of
`exact_prefill_attention`.

On GPUs of compute capability 9.0, for bfloat16 and heads of 64, 128 or 256 dimensions. Keys and values come
by the copy engine ahead of the products. The warp that starts the copies computes nothing for a single copy,
so that it starts as soon as its place is free. The softmax of a tile is computed while the values of the tile
before are multiplied: with partitions by parts of 64 keys; without them, two warpgroups start their products
in turns.

Order of summation: with partitions, that of online_softmax.py. Scores and values are products of wgmma, the
denominator one with 8 columns of ones. Without, tiles of keys in ascending order, wherever a chunk began.

Grid: (query heads, CTAs). A CTA goes through tiles of 64 or 128 rows, so that the unused tiles of a step's
table need no CTAs of their own. Few rows have small tiles, which fill more multiprocessors. Of many rows, the
heads that share keys run together, before others.

Bytes: a tile of rows reads the keys and values that it sees, from the L2 cache where other heads and tiles
have read them. Flops: 4 * num_heads * head_dim for each pair of a row and a key.

Dependent launch: a CTA waits before it reads anything, and then permits its dependents to start. Attention of
other rows fills the multiprocessors that few chunks leave idle (see `paged_attention`).
"""

from __future__ import annotations

from math import prod

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.partitions import Partitions
from drift_sdk._kernels.common.gpu_limits import gpu_limits
from drift_sdk._kernels.common.kernel_access import KernelAccess
from drift_sdk._kernels.common.launch_order import note_kernel

__all__ = ["cuda_prefill_attention", "has_cuda_prefill"]

COMMON_FILES = (
    "common/types.cu",
    "common/dependent_launch.cu",
    "common/hopper.cu",
    "attention/prefill_stages.cu",
    "attention/prefill_products.cu",
    "attention/prefill_rows.cu",
)
FILES = (*COMMON_FILES, "attention/prefill.cu", "attention/prefill_kernel.cu")
EXACT_FILES = (*COMMON_FILES, "attention/exact_prefill.cu", "attention/prefill_kernel.cu")
ACCESS = KernelAccess(frozenset(), frozenset({"out"}), False)

ROWS, BOX_KEYS, HALF_DIM = 64, 64, 64
"""Rows of a warpgroup; keys that are copied at a time; dimensions of a head that lie side by side in shared
memory."""
KEYS = {64: 128, 128: 128, 256: 64}
"""Keys of a tile by dimensions of a head. Registers hold the sums of 64 rows' values and scores of a tile."""
PART_KEYS = 64
"""Keys of a tile in decoding's order of summation."""
MAX_SUMS = 16_384
"""Sums of values that a CTA may have: of all partitions in shared memory, of one in registers."""
NUM_STAGES = 2
"""Tiles of keys, and of values, in shared memory."""
ONES_BYTES, BARRIER_BYTES = 1024, 1024
ALIGNMENT = 16
"""Bytes of a query's row that are loaded at a time."""


class Launch(Struct, frozen=True):
    """Launch configuration of a CTA; no bit depends on it.

    copy_registers, registers: of a thread that copies and of one that computes; 0: as many as it starts with.
    """

    num_threads: int
    copy_registers: int = 0
    registers: int = 0


LAUNCHES = {64: Launch(160), 128: Launch(384, 40, 232)}
"""By rows of a tile."""


def has_cuda_prefill(layer: LayerAttention, tile_rows: int, partitions: Partitions | None) -> bool:
    """Return True if `cuda_prefill_attention` computes this attention."""
    query = layer.query
    if query.device.type != "cuda" or query.dtype != torch.bfloat16 or layer.kv.keys.dtype != torch.bfloat16:
        return False

    has_shape = tile_rows in LAUNCHES and layer.head_dim in KEYS and tile_rows * layer.head_dim <= MAX_SUMS
    has_rows = query.stride(0) * query.element_size() % ALIGNMENT == 0 and query.data_ptr() % ALIGNMENT == 0
    if layer.window or layer.first_key or not has_shape or not has_rows or layer.kv.block_size % BOX_KEYS:
        return False

    if partitions is not None and not _has_whole_tiles(layer.head_dim, partitions):
        return False

    # Imported here: cuda.core is installed where there is a GPU.
    from drift_sdk._kernels.common.cuda_programs import has_compiler

    return torch.cuda.get_device_capability(query.device) == (9, 0) and has_compiler()


def cuda_prefill_attention(
    layer: LayerAttention, tiles: Tensor, tile_rows: int, partitions: Partitions | None
) -> None:
    """Attention of the rows of `tiles`, in `layer.out`, where `has_cuda_prefill`. The caller,
    `prefill_attention` or `exact_prefill_attention`, checks the arguments. Unused tiles are the last ones.

    partitions: in whose order to sum; None: all keys in one.
    """
    from drift_sdk._kernels.common.cuda_programs import Boxes, CudaKernel, compile_kernel, launch_kernel

    options, num_warpgroups, head_dim = LAUNCHES[tile_rows], tile_rows // ROWS, layer.head_dim
    stage_bytes = (tile_rows + 2 * NUM_STAGES * KEYS[head_dim]) * head_dim * 2
    shared_bytes = stage_bytes + ONES_BYTES + BARRIER_BYTES
    sizes = (num_warpgroups, NUM_STAGES, options.copy_registers, options.registers)
    macros = {
        "DIM": head_dim,
        "KEYS": KEYS[head_dim],
        "ATTEND": f"attend<{', '.join(map(str, sizes))}>",
        "THREADS": options.num_threads,
    }
    if partitions is not None:
        macros |= {
            "NARROW": partitions.narrow,
            "NARROW_END": partitions.narrow_end,
            "NUM_DOUBLINGS": partitions.num_doublings,
        }
        shared_bytes += tile_rows * head_dim * 4
    files = FILES if partitions is None else EXACT_FILES
    kernel = CudaKernel(files, "attend_prompts", tuple((name, str(value)) for name, value in macros.items()))
    keys, values = (
        Boxes(cache.view(prod(cache.shape[:-1]), head_dim), BOX_KEYS, HALF_DIM)
        for cache in (layer.kv.keys, layer.kv.values)
    )
    # As many CTAs as one chunk of all rows has tiles, at least one for each multiprocessor. Several chunks
    # may have more tiles; some CTAs then take several.
    num_rows, num_tiles = layer.query.shape[0], tiles.shape[0]
    filling = -(-gpu_limits().num_multiprocessors // layer.num_heads)
    num_ctas = min(num_tiles, max(filling, -(-num_rows // tile_rows)))
    # Where the heads that share keys fill the GPU, the L2 cache holds their keys until all rows are done.
    is_filled = num_ctas * layer.group >= gpu_limits().num_multiprocessors
    launch_kernel(
        compile_kernel(kernel, layer.query.device.index or 0, shared_bytes),
        (layer.num_heads, num_ctas),
        options.num_threads,
        shared_bytes,
        layer.query,
        keys,
        values,
        layer.block_table,
        tiles,
        layer.sinks,
        layer.out,
        layer.log2_scale,
        layer.query.stride(0),
        layer.block_table.stride(0),
        num_tiles,
        layer.kv.num_heads,
        layer.group,
        layer.kv.block_size,
        layer.group if is_filled else layer.num_heads,
    )
    _note(layer, tiles)


def _note(layer: LayerAttention, tiles: Tensor) -> None:
    """Add the launch to the launches being checked."""
    note_kernel(
        "attention of prompts",
        ACCESS,
        {
            "query": layer.query,
            "keys": layer.kv.keys,
            "values": layer.kv.values,
            "block_table": layer.block_table,
            "tiles": tiles,
            "sinks": layer.sinks,
            "out": layer.out,
        },
        has_all=True,
    )


def _has_whole_tiles(head_dim: int, partitions: Partitions) -> bool:
    """Return True if no tile of keys reaches across a border. All borders are multiples of `narrow`."""
    return partitions.tile == PART_KEYS and partitions.narrow % KEYS[head_dim] == 0
