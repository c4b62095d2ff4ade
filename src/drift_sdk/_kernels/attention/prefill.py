"""Causal attention of prompt chunks over a paged cache, to which their own keys were written before.

    score[r, h, p] = query[r, h] . key[p] * scale                          for positions p <= position[r]
    output[r, h] = sum over p of softmax(score[r, h])[p] * value[p]

With a window w, a row sees only the last w of these positions. A sink is one more score in the softmax, whose
value is zero.

Grid: (query heads, tiles of rows). A program owns one tile of a chunk's rows for one query head, and writes
each of its outputs once. It takes the keys that the rows see from position 0 on: first those that all of its
rows see, without any mask, then the few tiles of keys along the diagonal.

Order of summation: keys are cut at multiples of TILE_KEYS, whatever the tile of rows, and keys that a row
does not see leave its sums as they are. A row's result therefore does not depend on where its chunk began.

Flops: 4 * num_heads * head_dim for each pair of a row and a key it sees. Bytes: a program reads the keys and
values it sees once, TILE_ROWS flops for each byte of bfloat16. At 128 rows and 600 TFLOP/s that is 4.7 TB/s,
most of it from L2, because programs of one tile's heads are neighbours and take the same keys in the same
order; 64 rows would need twice that, more than L2 gives. Blocks of TILE_KEYS or more are the fast path: a
tile of keys is then one contiguous piece, found by one entry of the table.

Dependent launch: the kernel waits first. It permits its dependents to start when only the output is left to
store; a program without rows does so by ending.

Attention of prompt chunks in CUDA C++: that of `prefill_attention`, and bit for bit that of
`exact_prefill_attention`.

On GPUs of compute capability 9.0, for bfloat16 and heads of 64, 128 or 256 dimensions. In decoding's order,
they may have a window, and there are heads of 512 dimensions, whose values are divided between two CTAs. Keys
and values come by the copy engine ahead of the products. The warp that starts the copies computes nothing for
a single copy, so that it starts as soon as its place is free. The softmax of a tile is computed while the
values of the tile before are multiplied: with partitions by parts of 64 keys; without them, two warpgroups
start their products in turns.

Order of summation: with partitions, that of softmax.py. Scores and values are products of wgmma, the
denominator one with 8 columns of ones. Without, tiles of keys in ascending order, wherever a chunk began.

Grid: (query heads times the CTAs that divide the values of one, CTAs). A CTA goes through tiles of 64 or 128
rows, so that the unused tiles of a step's table need no CTAs of their own. Few rows have small tiles, which
fill more multiprocessors. Of many rows, the heads that share keys run together, before others. With a window,
a tile of rows begins with the tile of the first key that one of them sees.

Bytes: a tile of rows reads the keys and values that it sees, from the L2 cache where other heads and tiles
have read them. Flops: 4 * num_heads * head_dim for each pair of a row and a key, 6 with heads of 512.

Dependent launch: a CTA waits before it reads anything, and then permits its dependents to start. Attention of
other rows fills the multiprocessors that few chunks leave idle (see `paged_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.cache import decode_pairs
from drift_sdk._kernels.attention.layer_attention import MIN_DOT_SIZE, LayerAttention
from drift_sdk._kernels.attention.softmax import LOG2_E, WIDE_HEAD, Partitions, head_scale
from drift_sdk._kernels.launch.arguments import check_tensor, next_power_of_2
from drift_sdk._kernels.launch.gpu_limits import GpuLimits, gpu_limits
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.launch.launch_order import KernelAccess, note_kernel

TILE_FIELDS = 4
"""Numbers of a tile: slot (-1: unused tile), first row, number of rows, position of the first row."""


def prefill_tiles(
    chunks: Sequence[tuple[int, int, int]],
    tile_rows: int,
    out: npt.NDArray[np.int32],
    firsts: Sequence[int] | None = None,
) -> int:
    """Cut chunks into tiles of `tile_rows` rows, the last tile of a chunk being shorter.

    chunks: (slot, start, num_rows) each, where start is the position of the first row.
    firsts: the first row of each chunk in the step; None: the rows of all chunks follow one another.
    out: int32 [max_tiles, 4], gets the tiles, those that see the most keys first, so that no long one starts
    last; then slot -1 to the end. num_rows // tile_rows + len(chunks) tiles are always enough, num_rows being
    the rows of all chunks.
    Returns the number of tiles used. Raises ValueError if they do not fit.
    """
    slots, starts, sizes = np.array(chunks, dtype=np.int32).reshape(-1, 3).T
    tile_counts = -(-sizes // tile_rows)
    num_tiles = int(tile_counts.sum())
    if num_tiles > out.shape[0]:
        raise ValueError(f"out: room for {out.shape[0]} tiles: expected {num_tiles} or more")

    # Of every tile: its chunk, and its first row counted from that of the chunk.
    chunk = np.repeat(np.arange(len(tile_counts)), tile_counts)
    first_tile = np.repeat(tile_counts.cumsum() - tile_counts, tile_counts)
    row_in_chunk = (np.arange(num_tiles) - first_tile) * tile_rows
    num_rows = np.minimum(sizes[chunk] - row_in_chunk, tile_rows)
    position = starts[chunk] + row_in_chunk
    first_of_chunk = sizes.cumsum() - sizes if firsts is None else np.array(firsts, dtype=np.int32)
    first_row = first_of_chunk[chunk] + row_in_chunk
    most_keys_first = np.argsort(-(position + num_rows), kind="stable")
    out[:num_tiles] = np.stack((slots[chunk], first_row, num_rows, position), axis=1)[most_keys_first]
    out[num_tiles:, 0] = -1
    return num_tiles


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


CUDA_HEAD_DIM = 256
"""Dimensions of heads that the kernel in CUDA C++ computes by tiles of 64 rows alone."""


def prefill_attention_config(head_dim: int, dtype: torch.dtype) -> PrefillAttentionConfig:
    """Return the configuration for a size of heads on the current GPU: what fits in registers and shared
    memory, no spilling. Of wide heads, that of the largest others: see exact_prefill.py."""
    head_dim = min(head_dim, WIDE_HEAD)
    if dtype == torch.float32:
        return PrefillAttentionConfig(tile_rows=16, tile_keys=32, num_stages=1)

    tile_keys, limits = 64 if head_dim <= 128 else 32, gpu_limits()
    narrow = PrefillAttentionConfig(tile_rows=64, tile_keys=32, num_warps=4, num_stages=3)
    if head_dim == CUDA_HEAD_DIM and limits.capability == (9, 0):
        return narrow

    wide = PrefillAttentionConfig(tile_keys=tile_keys)
    for config in (wide, PrefillAttentionConfig(tile_keys=tile_keys, num_stages=3)):
        if shared_bytes(config, head_dim, limits) <= limits.shared_bytes:
            return config

    return narrow


def shared_bytes(config: PrefillAttentionConfig, head_dim: int, limits: GpuLimits) -> int:
    """Return at least the shared memory that a program takes: queries, and keys and values of the tiles that
    are under way. Triton keeps one tile more with wgmma, which reads them from there."""
    num_tiles = config.num_stages // 2 + (limits.capability[0] == 9)
    padded_dim = next_power_of_2(head_dim)
    reserve = SHARED_RESERVE if padded_dim <= 128 else WIDE_SHARED_RESERVE
    return (config.tile_rows + 2 * config.tile_keys * num_tiles) * padded_dim * 2 + reserve


COMMON_FILES = (
    "launch/types.cu",
    "launch/dependent_launch.cu",
    "launch/hopper.cu",
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
KEYS = {64: 128, 128: 128, 256: 64, 512: 32}
"""Keys of a tile by dimensions of a head. Registers hold the sums of 64 rows' values and scores of a tile."""
MOST_VALUE_DIM = 256
"""Most dimensions of values of a CTA. Wide heads have two CTAs, which both compute all scores."""
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

    value_dim = min(layer.head_dim, MOST_VALUE_DIM)
    has_shape = tile_rows in LAUNCHES and layer.head_dim in KEYS and tile_rows * value_dim <= MAX_SUMS
    has_rows = query.stride(0) * query.element_size() % ALIGNMENT == 0 and query.data_ptr() % ALIGNMENT == 0
    if layer.first_key or not has_shape or not has_rows or layer.kv.block_size % BOX_KEYS:
        return False

    is_other = layer.window > 0 or layer.head_dim > MOST_VALUE_DIM
    if is_other if partitions is None else not _has_whole_tiles(layer.head_dim, partitions):
        return False

    # Imported here: cuda.core is installed where there is a GPU.
    from drift_sdk._kernels.launch.cuda_programs import has_compiler

    return torch.cuda.get_device_capability(query.device) == (9, 0) and has_compiler()


def cuda_prefill_attention(
    layer: LayerAttention, tiles: Tensor, tile_rows: int, partitions: Partitions | None
) -> None:
    """Attention of the rows of `tiles`, in `layer.out`, where `has_cuda_prefill`. The caller,
    `prefill_attention` or `exact_prefill_attention`, checks the arguments. Unused tiles are the last ones.

    partitions: in whose order to sum; None: all keys in one.
    """
    from drift_sdk._kernels.launch.cuda_programs import Boxes, CudaKernel, compile_kernel, launch_kernel

    options, num_warpgroups, head_dim = LAUNCHES[tile_rows], tile_rows // ROWS, layer.head_dim
    value_dim, tile_keys = min(head_dim, MOST_VALUE_DIM), KEYS[head_dim]
    stage_bytes = (tile_rows * head_dim + NUM_STAGES * tile_keys * (head_dim + value_dim)) * 2
    shared_bytes = stage_bytes + ONES_BYTES + BARRIER_BYTES
    sizes = (num_warpgroups, NUM_STAGES, options.copy_registers, options.registers)
    macros = {
        "DIM": head_dim,
        "VALUE_DIM": value_dim,
        "KEYS": tile_keys,
        "WINDOW": layer.window,
        "ATTEND": f"attend<{', '.join(map(str, sizes))}>",
        "THREADS": options.num_threads,
    }
    if partitions is not None:
        macros |= {
            "NARROW": partitions.narrow,
            "NARROW_END": partitions.narrow_end,
            "NUM_DOUBLINGS": partitions.num_doublings,
        }
        shared_bytes += tile_rows * value_dim * 4
    files = FILES if partitions is None else EXACT_FILES
    kernel = CudaKernel(files, "attend_prompts", tuple((name, str(value)) for name, value in macros.items()))
    keys, values = (
        Boxes(cache.view(prod(cache.shape[:-1]), head_dim), min(BOX_KEYS, tile_keys), HALF_DIM)
        for cache in (layer.kv.keys, layer.kv.values)
    )
    # As many CTAs as one chunk of all rows has tiles, at least one for each multiprocessor. Several chunks
    # may have more tiles; some CTAs then take several.
    num_rows, num_tiles = layer.query.shape[0], tiles.shape[0]
    shares = head_dim // value_dim
    num_heads, group = layer.num_heads * shares, layer.group * shares
    filling = -(-gpu_limits().num_multiprocessors // num_heads)
    num_ctas = min(num_tiles, max(filling, -(-num_rows // tile_rows)))
    # Where the heads that share keys fill the GPU, the L2 cache holds their keys until all rows are done.
    is_filled = num_ctas * group >= gpu_limits().num_multiprocessors
    launch_kernel(
        compile_kernel(kernel, layer.query.device.index or 0, shared_bytes),
        (num_heads, num_ctas),
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
        group if is_filled else num_heads,
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
    tile_keys = KEYS[head_dim]
    return partitions.tile == min(tile_keys, BOX_KEYS) and partitions.narrow % tile_keys == 0


NUM_FIELDS = tl.constexpr(TILE_FIELDS)


@device_function
def _decode_rows(
    words,  # [ROWS, PADDED] int16: two codes each
    DTYPE: tl.constexpr,
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
):
    """Return the numbers of rows [ROWS, 2 * PADDED]: of the lower bytes, then of the upper. Products with
    joined rows have another order of summation than all others (see softmax.py)."""
    low, high = decode_pairs(words, DTYPE, IN_PAIRS)
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(both, (words.shape[0], 2 * words.shape[1]))


@device_function
def _attend_keys(
    maximum,  # [TILE_ROWS] fp32: the highest score so far, times log2(e)
    weight,  # [TILE_ROWS] fp32: the sum of exp2(score - maximum)
    total,  # [TILE_ROWS, NUM_PARTS * PADDED_DIM] fp32: values weighted likewise
    queries,  # [TILE_ROWS, NUM_PARTS * PADDED_DIM], storage type
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    table_ptr,  # [max_blocks] int32: the block table's row of the slot
    head,  # KV head
    position,  # [TILE_ROWS]: the last position that each row sees
    begin,  # a multiple of TILE_KEYS
    end,
    first_key,  # positions before it are not loaded
    num_keys,  # positions from it on are not loaded
    scale,  # of scores, times log2(e)
    NUM_KV_HEADS: tl.constexpr,
    PART_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # PART_DIM, rounded up to a power of two, 16 or more
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
    KV_BLOCK_SIZE: tl.constexpr,  # positions in a block of the KV cache
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    NUM_STAGES: tl.constexpr,
    IS_MASKED: tl.constexpr,  # whether some row does not see some of these keys
):
    """Add keys begin ... end - 1 to the sums of the rows; return maximum, weight and total.

    Keys before first_key or from num_keys on may never have been written: they are not loaded.
    """
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < PART_DIM
    for k in tl.range(begin, end, TILE_KEYS, num_stages=NUM_STAGES):
        key_position = k + tl.arange(0, TILE_KEYS)
        is_key = (key_position >= first_key) & (key_position < num_keys)
        if KV_BLOCK_SIZE >= TILE_KEYS:  # a tile lies in one block, and is contiguous in it
            block = tl.load(table_ptr + k // KV_BLOCK_SIZE).to(tl.int64)
            tile_offset = ((block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + k % KV_BLOCK_SIZE) * PART_DIM
            key_offset = (tl.arange(0, TILE_KEYS) * PART_DIM)[:, None] + dim[None, :]
        else:
            block = tl.load(table_ptr + key_position // KV_BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            cache_row = (block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + key_position % KV_BLOCK_SIZE
            tile_offset = 0
            key_offset = (cache_row * PART_DIM)[:, None] + dim[None, :]

        if IS_MASKED:
            key_mask = is_key[:, None] & is_dim[None, :]
            keys = tl.load(keys_ptr + tile_offset + key_offset, mask=key_mask, other=0)
            values = tl.load(values_ptr + tile_offset + key_offset, mask=key_mask, other=0)
        elif PART_DIM < PADDED_DIM:
            keys = tl.load(keys_ptr + tile_offset + key_offset, mask=is_dim[None, :], other=0)
            values = tl.load(values_ptr + tile_offset + key_offset, mask=is_dim[None, :], other=0)
        else:
            keys = tl.load(keys_ptr + tile_offset + key_offset)
            values = tl.load(values_ptr + tile_offset + key_offset)

        if NUM_PARTS == 2:
            keys = _decode_rows(keys, queries.dtype, IN_PAIRS)
            values = _decode_rows(values, queries.dtype, IN_PAIRS)
        score = tl.dot(queries, keys.T, input_precision="ieee")
        if IS_MASKED:
            is_seen = (key_position[None, :] <= position[:, None]) & (key_position >= first_key)[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (key_position[None, :] > position[:, None] - WINDOW)

            score = tl.where(is_seen, score, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(score, axis=1) * scale)
        reference = new_maximum
        if IS_MASKED and WINDOW > 0:
            # A row that has seen no key yet has the maximum -inf, and -inf - -inf would be NaN.
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)

        rescale = tl.exp2(maximum - reference)
        probability = tl.exp2(score * scale - reference[:, None])
        weight = weight * rescale + tl.sum(probability, axis=1)
        share = probability.to(queries.dtype)
        total = tl.dot(share, values, total * rescale[:, None], input_precision="ieee")
        maximum = new_maximum

    return maximum, weight, total


@kernel
def _prefill_attention(
    query_ptr,  # [R, NUM_HEADS, HEAD_DIM], storage type; rows have a stride
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    value_scale_ptr,  # as key_scale_ptr
    block_table_ptr,  # [S, max_blocks] int32; rows have a stride
    tiles_ptr,  # [num_tiles, NUM_FIELDS] int32, see `prefill_tiles`; slot -1: unused
    sinks_ptr,  # [NUM_HEADS], storage type, or None
    output_ptr,  # [R, NUM_HEADS * HEAD_DIM], storage type
    scale,  # of scores, times log2(e)
    query_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # of the dimensions: 2 with e4m3, else 1
    PADDED_DIM: tl.constexpr,  # those of a part, rounded up to a power of two, 16 or more
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
    KV_BLOCK_SIZE: tl.constexpr,  # positions in a block of the KV cache
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    FIRST_KEY: tl.constexpr,  # positions before it are not seen
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head, tile): heads run first, so those that share keys run together. Longer than other
    kernels: three ranges of keys, with the same sums in registers."""
    PART_DIM: tl.constexpr = HEAD_DIM // NUM_PARTS
    wait_for_producers(PDL)
    head = tl.program_id(0)
    tiles_ptr += tl.program_id(1) * NUM_FIELDS
    slot = tl.load(tiles_ptr)
    if slot < 0:
        return

    first_row = tl.load(tiles_ptr + 1).to(tl.int64)
    num_rows = tl.load(tiles_ptr + 2)
    start = tl.load(tiles_ptr + 3)
    row = tl.arange(0, TILE_ROWS)
    place = tl.arange(0, NUM_PARTS * PADDED_DIM)
    dim = place // PADDED_DIM * PART_DIM + place % PADDED_DIM
    row_mask = (row < num_rows)[:, None] & (place % PADDED_DIM < PART_DIM)[None, :]
    query_ptr += first_row * query_stride + head * HEAD_DIM
    query_ptrs = query_ptr + row[:, None] * query_stride + dim[None, :]
    queries = tl.load(query_ptrs, mask=row_mask, other=0.0)

    if sinks_ptr is None:
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS,), tl.float32)
    else:
        # As if a key with this score and no value had been seen before all others.
        maximum = tl.zeros((TILE_ROWS,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        weight = tl.full((TILE_ROWS,), 1.0, tl.float32)

    total = tl.zeros((TILE_ROWS, NUM_PARTS * PADDED_DIM), tl.float32)
    position = start + row
    num_keys = start + num_rows
    # The last key that the first row sees is the last that all rows see: tiles before need no mask for it.
    diagonal = (start + 1) // TILE_KEYS * TILE_KEYS
    first_key = FIRST_KEY
    begin = 0
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    scale = head_scale(scale, key_scale_ptr, kv_head)
    table_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    if WINDOW > 0 or FIRST_KEY > 0:
        # Tiles of keys along the early edge, which not all rows see in full, are masked too. The edge begins
        # at the first key that the first row sees, and ends at the first key that the last row sees.
        last_edge = FIRST_KEY
        if WINDOW > 0:
            first_key = tl.maximum(start - WINDOW + 1, FIRST_KEY)
            last_edge = tl.maximum(num_keys - WINDOW, FIRST_KEY)

        edge = first_key // TILE_KEYS * TILE_KEYS
        begin = tl.minimum((last_edge + TILE_KEYS - 1) // TILE_KEYS * TILE_KEYS, diagonal)
        maximum, weight, total = _attend_keys(
            maximum, weight, total, queries, keys_ptr, values_ptr, table_ptr, kv_head, position,
            edge, begin, first_key, num_keys, scale,
            NUM_KV_HEADS, PART_DIM, NUM_PARTS, PADDED_DIM, IN_PAIRS, KV_BLOCK_SIZE, TILE_KEYS, WINDOW,
            NUM_STAGES, True,
        )  # fmt: skip

    # Tiles of keys that all rows see.
    maximum, weight, total = _attend_keys(
        maximum, weight, total, queries, keys_ptr, values_ptr, table_ptr, kv_head, position,
        begin, diagonal, first_key, num_keys, scale,
        NUM_KV_HEADS, PART_DIM, NUM_PARTS, PADDED_DIM, IN_PAIRS, KV_BLOCK_SIZE, TILE_KEYS, WINDOW, NUM_STAGES,
        False,
    )  # fmt: skip
    # Tiles of keys along the diagonal.
    maximum, weight, total = _attend_keys(
        maximum, weight, total, queries, keys_ptr, values_ptr, table_ptr, kv_head, position,
        diagonal, num_keys, first_key, num_keys, scale,
        NUM_KV_HEADS, PART_DIM, NUM_PARTS, PADDED_DIM, IN_PAIRS, KV_BLOCK_SIZE, TILE_KEYS, WINDOW, NUM_STAGES,
        True,
    )  # fmt: skip
    start_dependents(PDL)
    # Every row that exists has seen a key. The others are divided by 1, and not stored.
    factor = 1.0 / tl.where(row < num_rows, weight, 1.0)
    if value_scale_ptr is not None:
        factor = factor * tl.load(value_scale_ptr + kv_head)
    output_ptr += first_row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    output_ptrs = output_ptr + (row[:, None] * (NUM_HEADS * HEAD_DIM) + dim[None, :])
    tl.store(output_ptrs, (total * factor[:, None]).to(output_ptr.dtype.element_ty), mask=row_mask)


def prefill_attention(layer: LayerAttention, tiles: Tensor, config: PrefillAttentionConfig) -> None:
    """Attention of the rows of `tiles` to the keys they see, in `layer.out`.

    tiles: [num_tiles, 4] int32, as `prefill_tiles` fills it for config.tile_rows: slot, or -1 for an unused
    tile; first row in query; number of rows; position of the first row. Row j of a tile sees positions
    0 ... position + j. Rows of no tile are left as they are.
    The first key is at most 15, and at most any row's own position. Rows of query and block table may have
    any stride. Raises ValueError for another shape, type or layout.
    Where it can, `cuda_prefill_attention` computes the same in less time, with other bits.
    """
    layer.check(max_first_key=MIN_DOT_SIZE - 1, has_strides=True)  # it lies in the first tile of keys
    check_tensor("tiles", tiles, (tiles.shape[0], TILE_FIELDS), torch.int32)
    if has_cuda_prefill(layer, config.tile_rows, partitions=None):
        cuda_prefill_attention(layer, tiles, config.tile_rows, partitions=None)
        return

    _prefill_attention[(layer.num_heads, tiles.shape[0])](
        value_scale_ptr=layer.kv.value_scale,
        tiles_ptr=tiles,
        sinks_ptr=layer.sinks,
        output_ptr=layer.out,
        query_stride=layer.query.stride(0),
        table_stride=layer.block_table.stride(0),
        NUM_HEADS=layer.num_heads,
        TILE_ROWS=config.tile_rows,
        TILE_KEYS=config.tile_keys,
        FIRST_KEY=layer.first_key,
        NUM_STAGES=config.num_stages,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **layer.kernel_arguments(),
        **launch_options(),
    )
