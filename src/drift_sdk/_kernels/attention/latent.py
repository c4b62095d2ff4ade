"""Attention of all heads to one latent of each token, over a paged cache: of rows that are decoded or
verified, and of chunks of prompts, with the same bits.

    score[r, h, p] = (query[r, h] . key[p]) * scale                          for positions p <= position[r]
    out[r, h] = sum over p of softmax(score[r, h])[p] * key[p][:LATENT_DIM]

A key is the latent and, behind it, the part that is rotated; values are the latents. See `LatentAttention`
in spec/model.py. In a cache of e4m3, latent and rotated part are each laid out as a head of cache.py is: a
word has an element of the first half and the one at its place in the second. One scale is for both parts.

Order of summation: that of softmax.py, with the products of queries and latents before those of the rotated
parts; of e4m3, those of a part of the first half and of its counterpart in the second in turn. Where
`_attend_latents` leaves the sums of partitions, decode.py adds them. Keys stand on the M side of
the MMA, in scores and in sums, so the instruction is the same for one row and for many, and a tile of keys is
read from shared memory alone, in both orders.

Bytes: the latents and rotated parts that some row sees, (LATENT_DIM + ROTARY_DIM) numbers each, once for all
rows of a sequence and all heads of a tile of query rows; further tiles find them in the L2 cache. Flops:
2 * (2 * LATENT_DIM + ROTARY_DIM) for each query row and key. For a decoded row of GLM-4.7-Flash (20 heads)
that is 38 flops a byte in bfloat16, far below the 206 of an H200, which is bound by its memory then; for
DeepSeek-V3 (128 heads) 242.

Grid of `_attend_latents`: (tiles of query rows, shares). Program (t, s) owns query rows of tile t, each of
which is a row of the step with one head, and the s-th share of the plan's tiles of keys. A tile of keys is
loaded once, for scores and sums.

Sums of partitions are many bytes: of 128 keys of 1,152 bytes each, the sums of a row of 20 heads take 40 KiB,
which are written and read. With many sequences a program has many partitions of each. It then adds the ones
that a sequence begins with by itself, in the order in which decode.py would add them, and writes their sum
alone (FOLDS). All others are added behind what other programs sum, and are written one by one.

Grid of `_attend_prompts`: (heads, tiles of rows, parts of a tile). A program owns some rows of one chunk with
one head. It keeps the sums of a partition apart from the sums of partitions before.

Dependent launch: both wait before they read queries and keys. `_attend_latents` reads the plan and the rows
before, which are older than the kernels that make queries and keys. They permit their dependents to start at
their ends.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.attention.cache import cache_words, decode_pairs, is_decoded_in_pairs
from drift_sdk._kernels.attention.decode import AttentionScratch, add_partitions
from drift_sdk._kernels.attention.layer_attention import LayerAttention, padded_size
from drift_sdk._kernels.attention.plan import (
    TILE_FIRST_KEY,
    TILE_NUM_KEYS,
    TILE_SEQUENCE,
    TILE_SLOT,
    TILE_WORDS,
    PlannedRows,
    next_partition,
)
from drift_sdk._kernels.attention.prefill import TILE_FIELDS
from drift_sdk._kernels.attention.softmax import Partitions, head_scale, partition_of, partition_start
from drift_sdk._kernels.launch.arguments import cdiv, check_tensor
from drift_sdk._kernels.launch.gpu_limits import gpu_limits
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk.quantised.formats import E4M3

NUM_FIELDS = tl.constexpr(TILE_FIELDS)
ONES_ROWS = tl.constexpr(16)
"""Rows of the matrix of ones whose product is the softmax's denominator, as `ONES_COLUMNS` of softmax.py."""

MIN_TILE_ROWS, MAX_TILE_ROWS, MAX_FLOAT32_ROWS, MAX_E4M3_ROWS = 16, 32, 16, 16
"""Query rows of a program, least and most. Two sums of 32 rows and 512 dimensions, which `_attend_prompts`
has, take 128 registers of each of 256 threads; twice as many rows leave no room for a second tile of keys. In
e4m3, keys are in registers too."""
MOST_WARPS = 8
"""Warps of a program with two sums, or with the sums of more rows than the fewest."""
MAX_PART_DIM = 128
"""Elements of latents that are loaded and multiplied at once. The addresses of wider parts take registers
that the sums need; so do addresses that the compiler moves out of a loop, which both kernels forbid."""
AGAIN = tl.constexpr(".cg")
"""The cache_modifier of loads of codes for sums. It tells them apart from the loads for scores, so that the
compiler does not make one of both, whose codes it would keep in registers; these are copied ahead to shared
memory."""
SHARED_RESERVE = 16 * 1024
"""Bytes of shared memory beside queries and tiles of keys: probabilities, and changes of layout."""


class LatentConfig(Struct, frozen=True, kw_only=True):
    """Launch configuration of a kernel; none of it is part of the result's bits.

    tile_rows: query rows of a program, a power of two. num_stages: of Triton's pipeline over tiles of keys.
    """

    tile_rows: int
    num_warps: int
    num_stages: int


def latent_config(
    num_query_rows: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, tile_keys: int
) -> LatentConfig:
    """Return the configuration for so many query rows on the current GPU, and keys of `kv_dtype`.

    Raises ValueError if its shared memory has no room for a tile of keys beside the fewest queries.
    """
    most = MAX_FLOAT32_ROWS if dtype == torch.float32 else MAX_TILE_ROWS
    if kv_dtype == E4M3:
        most = MAX_E4M3_ROWS
    tile_rows = min(padded_size(num_query_rows), most)
    row_bytes, stage_bytes = head_dim * dtype.itemsize, tile_keys * head_dim * kv_dtype.itemsize
    room = gpu_limits().shared_bytes - SHARED_RESERVE
    while tile_rows > MIN_TILE_ROWS and tile_rows * row_bytes + stage_bytes > room:
        tile_rows //= 2
    num_stages = (room - tile_rows * row_bytes) // stage_bytes
    if num_stages < 1:
        needed = tile_rows * row_bytes + stage_bytes + SHARED_RESERVE
        raise ValueError(
            f"head_dim={head_dim} in {dtype}: {needed} bytes of shared memory: expected at most "
            f"{gpu_limits().shared_bytes}"
        )

    return LatentConfig(
        tile_rows=tile_rows,
        num_warps=MOST_WARPS if tile_rows > MIN_TILE_ROWS or kv_dtype == E4M3 else 4,
        num_stages=min(num_stages, 2),
    )


@device_function
def _load_parts(
    pointers,  # [ROWS, 1]: to the first element of each row
    mask,  # [ROWS, 1]
    DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # DIM / PART_DIM, rounded up
    CACHE: tl.constexpr,  # the loads' cache_modifier
):
    """Return the parts of rows, NUM_PARTS times [ROWS, PART_DIM]; zeros where the mask is false."""
    dim = tl.arange(0, PART_DIM)[None, :]
    parts = (tl.load(pointers + dim, mask=mask & (dim < DIM), other=0.0, cache_modifier=CACHE),)
    for part in tl.static_range(1, NUM_PARTS):
        is_dim = dim < DIM - part * PART_DIM
        part_ptrs = pointers + part * PART_DIM + dim
        loaded = tl.load(part_ptrs, mask=mask & is_dim, other=0.0, cache_modifier=CACHE)
        parts = parts + (loaded,)  # type: ignore[assignment]  # a longer tuple
    return parts


@device_function
def _load_halves(
    pointers,  # [ROWS, 1]: to the first element of each row
    mask,  # [ROWS, 1]
    DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # of all halves
    HALVES: tl.constexpr,  # 2: a part lies in one half of the elements; 1: in all of them
):
    """Return the parts of rows, NUM_PARTS times [ROWS, PART_DIM]: the first one of each half, then the second
    ones, and so on."""
    parts = _load_parts(pointers, mask, DIM // HALVES, PART_DIM, NUM_PARTS // HALVES, "")
    if HALVES == 2:
        others = _load_parts(pointers + DIM // 2, mask, DIM // 2, PART_DIM, NUM_PARTS // 2, "")
        both = (parts[0], others[0])
        for part in tl.static_range(1, NUM_PARTS // 2):
            both = both + (parts[part], others[part])  # type: ignore[assignment]  # a longer tuple
        parts = both
    return parts


@device_function
def _transposed(
    parts,  # NUM_PARTS times [ROWS, PART_DIM]
    NUM_PARTS: tl.constexpr,
):
    """Return parts with rows as columns."""
    found = (parts[0].T,)
    for part in tl.static_range(1, NUM_PARTS):
        found = found + (parts[part].T,)  # type: ignore[assignment]  # a longer tuple
    return found


@device_function
def _zeros(PART_DIM: tl.constexpr, TILE_ROWS: tl.constexpr, NUM_PARTS: tl.constexpr):
    """Return the sums of no values."""
    parts = (tl.zeros((PART_DIM, TILE_ROWS), tl.float32),)
    for _ in tl.static_range(1, NUM_PARTS):
        parts = parts + (tl.zeros((PART_DIM, TILE_ROWS), tl.float32),)  # type: ignore[assignment]  # a longer tuple
    return parts


@device_function
def _key_pointers(
    keys_ptr,  # [num_blocks, KV_BLOCK_SIZE, HEAD_DIM]
    table_ptr,  # [max_blocks] int32: the block table's row of a slot
    first_key,  # position of the tile's first key, a multiple of TILE_KEYS
    num_keys,  # keys from this position on may never have been written
    HEAD_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Return pointers to the keys of a tile [TILE_KEYS, 1]."""
    key = tl.arange(0, TILE_KEYS)
    position = first_key + key
    if KV_BLOCK_SIZE >= TILE_KEYS:  # a tile lies in one block, and is contiguous in it
        block = tl.load(table_ptr + first_key // KV_BLOCK_SIZE).to(tl.int64)
        tile_ptr = keys_ptr + (block * KV_BLOCK_SIZE + first_key % KV_BLOCK_SIZE) * HEAD_DIM
        return tile_ptr + key[:, None] * HEAD_DIM
    else:
        block = tl.load(table_ptr + position // KV_BLOCK_SIZE, mask=position < num_keys, other=0).to(tl.int64)
        return keys_ptr + ((block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE) * HEAD_DIM)[:, None]


@device_function
def _attend_tile(
    maximum,  # [TILE_ROWS] fp32: highest score so far (times log2(e)); -inf at the partition's start
    weight,  # [ONES_ROWS, TILE_ROWS] fp32: sum of exp2(score - maximum), in every row
    total,  # parts [PART_DIM, TILE_ROWS] fp32: sum of exp2(score - maximum) * latent
    query,  # parts [PART_DIM, TILE_ROWS], storage type
    rotated_query,  # parts [PADDED_ROTARY, TILE_ROWS]
    latents,  # parts [TILE_KEYS, PART_DIM] as in the cache; zeros where there is no key
    values,  # the latents, of e4m3 loaded once more
    rotated,  # [TILE_KEYS, PADDED_ROTARY] as in the cache
    is_seen,  # [TILE_KEYS, TILE_ROWS]: which keys a row sees
    scale,  # of scores, times log2(e)
    NUM_PARTS: tl.constexpr,  # of queries and sums
    HALVES: tl.constexpr,  # of these, in a part of the cache
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
):
    """Return maximum, weight and total with a tile of keys taken in: the steps of `attend_tile` of
    softmax.py. Codes become numbers twice: all parts at once would take more registers than there are."""
    DTYPE: tl.constexpr = query[0].dtype
    if HALVES == 1:
        score = tl.dot(latents[0], query[0], input_precision="ieee")
        for part in tl.static_range(1, NUM_PARTS):
            score = tl.dot(latents[part], query[part], score, input_precision="ieee")
        score = tl.dot(rotated, rotated_query[0], score, input_precision="ieee")
    else:
        score = tl.zeros(is_seen.shape, tl.float32)
        for part in tl.static_range(NUM_PARTS // 2):
            low, high = decode_pairs(latents[part], DTYPE, IN_PAIRS)
            score = tl.dot(low, query[2 * part], score, input_precision="ieee")
            score = tl.dot(high, query[2 * part + 1], score, input_precision="ieee")
        low, high = decode_pairs(rotated, DTYPE, IN_PAIRS)
        score = tl.dot(low, rotated_query[0], score, input_precision="ieee")
        score = tl.dot(high, rotated_query[1], score, input_precision="ieee")
    score = tl.where(is_seen, score, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(score, 0) * scale)
    # A row that has seen no key yet has the maximum -inf, and -inf - -inf would be NaN.
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    rescale = tl.exp2(maximum - reference)[None, :]
    probability = tl.exp2(tl.fma(score, scale, -reference[None, :])).to(DTYPE)
    ones = tl.full((ONES_ROWS, latents[0].shape[0]), 1.0, DTYPE)
    weight = tl.dot(ones, probability, weight * rescale, input_precision="ieee")
    if HALVES == 1:
        sums = (tl.dot(values[0].T, probability, total[0] * rescale, input_precision="ieee"),)
        for part in tl.static_range(1, NUM_PARTS):
            added = tl.dot(values[part].T, probability, total[part] * rescale, input_precision="ieee")
            sums = sums + (added,)  # type: ignore[assignment]  # a longer tuple
    else:
        sums = ()  # type: ignore[assignment]  # a shorter tuple
        for part in tl.static_range(NUM_PARTS // 2):
            low, high = decode_pairs(values[part].T, DTYPE, IN_PAIRS)
            of_low = tl.dot(low, probability, total[2 * part] * rescale, input_precision="ieee")
            of_high = tl.dot(high, probability, total[2 * part + 1] * rescale, input_precision="ieee")
            sums = sums + (of_low, of_high)  # type: ignore[assignment]  # a longer tuple
    return new_maximum, weight, sums


@device_function
def _add_partition(
    maximum,  # [TILE_ROWS] fp32: of all partitions before; -inf before the first
    weight,  # [TILE_ROWS] fp32
    total,  # parts [PART_DIM, TILE_ROWS] fp32
    part_maximum,  # [TILE_ROWS] fp32: of the next partition; -inf where a row sees none of its keys
    part_weight,  # [TILE_ROWS] fp32
    part_total,  # parts [PART_DIM, TILE_ROWS] fp32
    NUM_PARTS: tl.constexpr,
):
    """Return maximum, weight and total with the next partition in them: the steps of `add_partition` of
    softmax.py."""
    new_maximum = tl.maximum(maximum, part_maximum)
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    rescale = tl.exp2(maximum - reference)
    share = tl.exp2(part_maximum - reference)
    weight = tl.fma(part_weight, share, weight * rescale)
    sums = (tl.fma(part_total[0], share[None, :], total[0] * rescale[None, :]),)
    for part in tl.static_range(1, NUM_PARTS):
        added = tl.fma(part_total[part], share[None, :], total[part] * rescale[None, :])
        sums = sums + (added,)  # type: ignore[assignment]  # a longer tuple
    return new_maximum, weight, sums


FOLDED_SHARE = 6
"""Shares for each sequence up to which programs add the partitions that a sequence begins with. With more,
few partitions are first ones, and the sums take registers; in e4m3 there are none left. No result depends on
it."""


@device_function
def _store_sums(
    sums_ptr,  # [.., NUM_QUERY_ROWS, LATENT_DIM] fp32
    maxima_ptr,  # [.., NUM_QUERY_ROWS] fp32
    weights_ptr,  # as maxima
    partition,  # index among the partitions of all sequences
    maximum,  # [TILE_ROWS] fp32
    weight,  # [TILE_ROWS] fp32
    total,  # parts [PART_DIM, TILE_ROWS] fp32
    NUM_QUERY_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Store the sums of a partition of the program's query rows."""
    HALF_DIM: tl.constexpr = LATENT_DIM // HALVES
    row, dim = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS), tl.arange(0, PART_DIM)
    is_row = row < NUM_QUERY_ROWS
    index = partition.to(tl.int64) * NUM_QUERY_ROWS + row
    sum_ptrs = sums_ptr + index[None, :] * LATENT_DIM + dim[:, None]
    for part in tl.static_range(NUM_PARTS):
        is_dim = (dim < HALF_DIM - part // HALVES * PART_DIM)[:, None]
        part_ptrs = sum_ptrs + (part % HALVES * HALF_DIM + part // HALVES * PART_DIM)
        tl.store(part_ptrs, total[part], mask=is_row[None, :] & is_dim)
    tl.store(maxima_ptr + index, maximum, mask=is_row)
    tl.store(weights_ptr + index, weight, mask=is_row)


EARLY_TILES = tl.constexpr(2)
"""Up to so many tiles for each share, `_attend_latents` permits its dependents to start before it
computes."""


@kernel(
    do_not_specialize=["num_partitions", "max_blocks"],
    do_not_specialize_on_alignment=["row_slot_ptr", "row_position_ptr"],
)
def _attend_latents(
    query_ptr,  # [R, NUM_HEADS, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, 1, KV_BLOCK_SIZE, HEAD_DIM / HALVES], storage type or words of two e4m3 codes
    key_scale_ptr,  # [1] fp32, or None
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32; -1: padding row
    row_position_ptr,  # [R] int32: the last position that a row sees
    tiles_ptr,  # [max_num_tiles, TILE_WORDS] int32
    num_tiles_ptr,  # [1] int32
    sums_ptr,  # [num_sequences, 1, num_partitions, query rows, LATENT_DIM] fp32
    maxima_ptr,  # [num_sequences, 1, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    scale,  # of scores, times log2(e)
    num_partitions,  # for which sums have room, of each sequence
    max_blocks,
    ROWS_PER_SEQUENCE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FOLDS: tl.constexpr,  # the first partitions of a sequence have one sum
    LATENT_DIM: tl.constexpr,
    PART_DIM: tl.constexpr,  # elements of latents that are loaded and multiplied at once
    NUM_PARTS: tl.constexpr,  # of all halves
    PADDED_ROTARY: tl.constexpr,  # a half of HEAD_DIM - LATENT_DIM, rounded up to a power of two, 16 or more
    HALVES: tl.constexpr,  # of the elements of keys: 2 with e4m3, else 1, which is all of them
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FIRST_KEY: tl.constexpr,  # positions before it are not seen
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,  # NARROW, NARROW_END, NUM_DOUBLINGS: see `Partitions`
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of query rows, share): the tiles of a share, one sequence after the other. Longer than
    other kernels: one loop over sums that stay in registers."""
    NUM_QUERY_ROWS: tl.constexpr = ROWS_PER_SEQUENCE * NUM_HEADS
    query_row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = query_row < NUM_QUERY_ROWS
    scale = head_scale(scale, key_scale_ptr, 0)
    num_tiles = tl.load(num_tiles_ptr, cache_modifier=".cg")
    share = tl.program_id(1)
    tile_index = next_partition(
        tiles_ptr, num_tiles * share // tl.num_programs(1), num_tiles,
        0, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    end_index = next_partition(
        tiles_ptr, num_tiles * (share + 1) // tl.num_programs(1), num_tiles,
        0, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    while tile_index < end_index:
        tile_ptr = tiles_ptr + tile_index * TILE_WORDS  # of the share's tiles of one sequence
        sequence = tl.load(tile_ptr + TILE_SEQUENCE, cache_modifier=".cg")
        slot = tl.load(tile_ptr + TILE_SLOT, cache_modifier=".cg")
        num_keys = tl.load(tile_ptr + TILE_NUM_KEYS, cache_modifier=".cg")
        sequence_key = tl.load(tile_ptr + TILE_FIRST_KEY, cache_modifier=".cg")
        num_own_tiles = tl.minimum(
            end_index - tile_index, (num_keys - sequence_key + TILE_KEYS - 1) // TILE_KEYS
        )
        row = sequence * ROWS_PER_SEQUENCE + query_row // NUM_HEADS
        is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1, cache_modifier=".cg") >= 0
        last_position = tl.load(row_position_ptr + row, mask=is_live, other=-1, cache_modifier=".cg")
        wait_for_producers(PDL)
        if num_tiles <= EARLY_TILES * tl.num_programs(1):
            start_dependents(PDL)
        query_ptrs = query_ptr + (row.to(tl.int64) * NUM_HEADS + query_row % NUM_HEADS)[:, None] * HEAD_DIM
        query = _transposed(
            _load_halves(query_ptrs, is_live[:, None], LATENT_DIM, PART_DIM, NUM_PARTS, HALVES), NUM_PARTS
        )
        rotated_ptrs = query_ptrs + LATENT_DIM
        rotated_query = _transposed(
            _load_halves(
                rotated_ptrs, is_live[:, None], HEAD_DIM - LATENT_DIM, PADDED_ROTARY, HALVES, HALVES
            ),
            HALVES,
        )
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        first_sum = sequence * num_partitions
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((ONES_ROWS, TILE_ROWS), tl.float32)
        total = _zeros(PART_DIM, TILE_ROWS, NUM_PARTS)
        if FOLDS:
            first_maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
            first_weight = tl.zeros((TILE_ROWS,), tl.float32)
            first_total = _zeros(PART_DIM, TILE_ROWS, NUM_PARTS)
        for tile in tl.range(0, num_own_tiles, num_stages=NUM_STAGES, disable_licm=True):
            first_key = sequence_key + tile * TILE_KEYS
            position = (first_key + tl.arange(0, TILE_KEYS))[:, None]
            key_ptrs = _key_pointers(
                keys_ptr, table_ptr, first_key, num_keys, HEAD_DIM // HALVES, KV_BLOCK_SIZE, TILE_KEYS
            )
            is_key = position < num_keys
            is_seen = position <= last_position[None, :]
            if FIRST_KEY > 0:
                is_key = is_key & (position >= FIRST_KEY)
                is_seen = is_seen & (position >= FIRST_KEY)
            latents = _load_parts(key_ptrs, is_key, LATENT_DIM // HALVES, PART_DIM, NUM_PARTS // HALVES, "")
            values = latents
            if HALVES == 2:
                values = _load_parts(key_ptrs, is_key, LATENT_DIM // 2, PART_DIM, NUM_PARTS // 2, AGAIN)
            rotated_key_ptrs = key_ptrs + LATENT_DIM // HALVES
            rotated = _load_parts(
                rotated_key_ptrs, is_key, (HEAD_DIM - LATENT_DIM) // HALVES, PADDED_ROTARY, 1, ""
            )
            maximum, weight, total = _attend_tile(
                maximum, weight, total, query, rotated_query, latents, values, rotated[0], is_seen, scale,
                NUM_PARTS, HALVES, IN_PAIRS,
            )  # fmt: skip
            partition = partition_of(first_key, NARROW, NARROW_END, NUM_DOUBLINGS)
            next_start = partition_start(partition + 1, NARROW, NARROW_END, NUM_DOUBLINGS)
            if (first_key + TILE_KEYS >= next_start) | (first_key + TILE_KEYS >= num_keys):
                # The partition's last tile: store its sums or add them up, and start the next partition.
                if FOLDS and sequence_key == 0:
                    first_maximum, first_weight, first_total = _add_partition(
                        first_maximum, first_weight, first_total, maximum, tl.max(weight, 0), total, NUM_PARTS
                    )
                else:
                    _store_sums(
                        sums_ptr, maxima_ptr, weights_ptr, first_sum + partition, maximum, tl.max(weight, 0),
                        total, NUM_QUERY_ROWS, TILE_ROWS, LATENT_DIM, PART_DIM, NUM_PARTS, HALVES,
                    )  # fmt: skip
                maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
                weight = tl.zeros((ONES_ROWS, TILE_ROWS), tl.float32)
                total = _zeros(PART_DIM, TILE_ROWS, NUM_PARTS)

        if FOLDS:
            if sequence_key == 0:
                # The sums have the place of the first partition, the other places have none.
                _store_sums(
                    sums_ptr, maxima_ptr, weights_ptr, first_sum, first_maximum, first_weight, first_total,
                    NUM_QUERY_ROWS, TILE_ROWS, LATENT_DIM, PART_DIM, NUM_PARTS, HALVES,
                )  # fmt: skip
                last_key = num_own_tiles * TILE_KEYS - 1
                for partition in range(1, partition_of(last_key, NARROW, NARROW_END, NUM_DOUBLINGS) + 1):
                    none = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
                    sum_index = (first_sum + partition) * NUM_QUERY_ROWS + query_row
                    tl.store(maxima_ptr + sum_index, none, mask=query_row < NUM_QUERY_ROWS)

        tile_index += num_own_tiles

    wait_for_producers(PDL)  # every CTA waits before it ends, also one without a tile
    start_dependents(PDL)


@kernel
def _attend_prompts(
    query_ptr,  # [N, NUM_HEADS, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, 1, KV_BLOCK_SIZE, HEAD_DIM / HALVES], storage type or words of two e4m3 codes
    key_scale_ptr,  # [1] fp32, or None
    block_table_ptr,  # [S, max_blocks] int32; table_stride from slot to slot
    tiles_ptr,  # [num_tiles, NUM_FIELDS] int32
    output_ptr,  # [N, NUM_HEADS, LATENT_DIM], storage type
    scale,  # of scores, times log2(e)
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PADDED_ROTARY: tl.constexpr,
    HALVES: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head, tile of rows, part of it). Longer than other kernels: one loop over sums that stay in
    registers."""
    wait_for_producers(PDL)
    head = tl.program_id(0)
    tiles_ptr += tl.program_id(1) * NUM_FIELDS
    slot = tl.load(tiles_ptr)
    first = tl.program_id(2) * TILE_ROWS
    num_rows = tl.load(tiles_ptr + 2) - first
    if (slot < 0) | (num_rows <= 0):
        return

    first_row = (tl.load(tiles_ptr + 1) + first).to(tl.int64)
    start = tl.load(tiles_ptr + 3) + first
    row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PART_DIM)
    is_row = row < num_rows
    query_ptrs = query_ptr + ((first_row + row) * NUM_HEADS + head)[:, None] * HEAD_DIM
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    HALF_DIM: tl.constexpr = LATENT_DIM // HALVES
    scale = head_scale(scale, key_scale_ptr, 0)
    query = _transposed(
        _load_halves(query_ptrs, is_row[:, None], LATENT_DIM, PART_DIM, NUM_PARTS, HALVES), NUM_PARTS
    )
    rotated_query = _transposed(
        _load_halves(
            query_ptrs + LATENT_DIM, is_row[:, None], HEAD_DIM - LATENT_DIM, PADDED_ROTARY, HALVES, HALVES
        ),
        HALVES,
    )
    num_keys = start + tl.minimum(num_rows, TILE_ROWS)
    table_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((TILE_ROWS,), tl.float32)
    total = _zeros(PART_DIM, TILE_ROWS, NUM_PARTS)
    part_maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    part_weight = tl.zeros((ONES_ROWS, TILE_ROWS), tl.float32)
    part_total = _zeros(PART_DIM, TILE_ROWS, NUM_PARTS)
    num_tiles = (num_keys + TILE_KEYS - 1) // TILE_KEYS
    for tile in tl.range(0, num_tiles, num_stages=NUM_STAGES, disable_licm=True):
        first_key = num_tiles * 0 + tile * TILE_KEYS  # a tensor, in the interpreter too
        position = (first_key + tl.arange(0, TILE_KEYS))[:, None]
        key_ptrs = _key_pointers(
            keys_ptr, table_ptr, first_key, num_keys, HEAD_DIM // HALVES, KV_BLOCK_SIZE, TILE_KEYS
        )
        is_key = position < num_keys
        is_seen = position <= (start + row)[None, :]
        if FIRST_KEY > 0:
            is_key = is_key & (position >= FIRST_KEY)
            is_seen = is_seen & (position >= FIRST_KEY)
        latents = _load_parts(key_ptrs, is_key, LATENT_DIM // HALVES, PART_DIM, NUM_PARTS // HALVES, "")
        values = latents
        if HALVES == 2:
            values = _load_parts(key_ptrs, is_key, LATENT_DIM // 2, PART_DIM, NUM_PARTS // 2, AGAIN)
        rotated_key_ptrs = key_ptrs + LATENT_DIM // HALVES
        rotated = _load_parts(
            rotated_key_ptrs, is_key, (HEAD_DIM - LATENT_DIM) // HALVES, PADDED_ROTARY, 1, ""
        )
        part_maximum, part_weight, part_total = _attend_tile(
            part_maximum, part_weight, part_total, query, rotated_query, latents, values, rotated[0], is_seen,
            scale, NUM_PARTS, HALVES, IN_PAIRS,
        )  # fmt: skip
        partition = partition_of(first_key, NARROW, NARROW_END, NUM_DOUBLINGS)
        next_start = partition_start(partition + 1, NARROW, NARROW_END, NUM_DOUBLINGS)
        if (first_key + TILE_KEYS >= next_start) | (first_key + TILE_KEYS >= num_keys):
            # The partition's last tile: add its sums, and start the next partition.
            maximum, weight, total = _add_partition(
                maximum, weight, total, part_maximum, tl.max(part_weight, 0), part_total, NUM_PARTS
            )
            part_maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
            part_weight = tl.zeros((ONES_ROWS, TILE_ROWS), tl.float32)
            part_total = _zeros(PART_DIM, TILE_ROWS, NUM_PARTS)

    start_dependents(PDL)
    # Every row that exists has seen a key; what is divided by here for the others is not stored.
    divisor = tl.where(is_row, weight, 1.0)[None, :]
    output_ptrs = output_ptr + ((first_row + row) * NUM_HEADS + head)[None, :] * LATENT_DIM + dim[:, None]
    for part in tl.static_range(NUM_PARTS):
        is_dim = (dim < HALF_DIM - part // HALVES * PART_DIM)[:, None]
        sums = total[part]
        if key_scale_ptr is not None:
            sums = sums * tl.load(key_scale_ptr)
        part_ptrs = output_ptrs + (part % HALVES * HALF_DIM + part // HALVES * PART_DIM)
        tl.store(part_ptrs, (sums / divisor).to(DTYPE), mask=is_row[None, :] & is_dim)


def latent_attention(layer: LayerAttention, rows: PlannedRows, scratch: AttentionScratch) -> None:
    """Attention of rows to the positions they see, in `layer.out`.

    layer: with latents, without window and sinks; its first key is in the first tile. rows: those that
    `scratch.plan` was made of, without shared prefixes. Rows of slot -1 get zeros. All tensors are
    contiguous. Raises ValueError for another shape, type or layout, and for a GPU without room for a tile of
    keys.
    """
    plan, num_query_rows = scratch.plan, rows.rows_per_sequence * layer.num_heads
    _check(layer, plan.partitions)
    scratch.check(layer, rows)
    config = _config(layer, num_query_rows, plan.partitions)
    num_row_tiles = cdiv(num_query_rows, config.tile_rows)
    num_shares = max(1, gpu_limits().num_multiprocessors // num_row_tiles)
    folds = FOLDED_SHARE * rows.num_sequences >= num_shares and layer.kv.key_scale is None
    _attend_latents[(num_row_tiles, num_shares)](
        query_ptr=layer.query,
        keys_ptr=cache_words(layer.kv.keys),
        key_scale_ptr=layer.kv.key_scale,
        block_table_ptr=layer.block_table,
        tiles_ptr=plan.tiles,
        num_tiles_ptr=plan.num_tiles,
        scale=layer.log2_scale,
        max_blocks=layer.block_table.shape[1],
        ROWS_PER_SEQUENCE=rows.rows_per_sequence,
        FOLDS=folds,
        TILE_KEYS=plan.partitions.tile,
        **_constants(layer, replace(config, num_warps=MOST_WARPS) if folds else config),
        **scratch.kernel_arguments(rows),
        **launch_options(),
    )
    add_partitions(layer, rows, scratch, has_gaps=folds)


def latent_prompt_attention(
    layer: LayerAttention, tiles: Tensor, tile_rows: int, partitions: Partitions
) -> None:
    """Attention of the rows of `tiles` to the positions they see, in `layer.out`.

    layer: as of `latent_attention`; rows of its block table may have any stride. tiles: as of
    `prefill_attention`, of at most `tile_rows` rows each. partitions: those of `latent_attention`, for equal
    bits. Raises ValueError likewise.
    """
    _check(layer, partitions)
    check_tensor("tiles", tiles, (tiles.shape[0], TILE_FIELDS), torch.int32)
    config = _config(layer, tile_rows, partitions)
    _attend_prompts[(layer.num_heads, tiles.shape[0], cdiv(tile_rows, config.tile_rows))](
        query_ptr=layer.query,
        keys_ptr=cache_words(layer.kv.keys),
        key_scale_ptr=layer.kv.key_scale,
        block_table_ptr=layer.block_table,
        tiles_ptr=tiles,
        output_ptr=layer.out,
        scale=layer.log2_scale,
        table_stride=layer.block_table.stride(0),
        TILE_KEYS=partitions.tile,
        NARROW=partitions.narrow,
        NARROW_END=partitions.narrow_end,
        NUM_DOUBLINGS=partitions.num_doublings,
        **_constants(layer, config),
        **launch_options(),
    )


def _config(layer: LayerAttention, num_query_rows: int, partitions: Partitions) -> LatentConfig:
    dtypes = layer.query.dtype, layer.kv.keys.dtype
    return latent_config(num_query_rows, layer.head_dim, *dtypes, partitions.tile)


def _check(layer: LayerAttention, partitions: Partitions) -> None:
    layer.check(max_first_key=partitions.tile - 1)
    if not layer.kv.latent_dim or layer.window or layer.sinks is not None:
        raise ValueError("layer: expected latents, and neither a window nor sinks")

    if layer.kv.keys.dtype == E4M3 and (layer.head_dim % 2 or layer.value_dim % 2):
        found = f"{layer.value_dim} and {layer.head_dim - layer.value_dim} elements"
        raise ValueError(f"keys: {found} of latents and rotated parts: expected even numbers in e4m3")


def _constants(layer: LayerAttention, config: LatentConfig) -> dict[str, int | bool]:
    """The compile-time arguments of either kernel."""
    halves = 2 if layer.kv.keys.dtype == E4M3 else 1
    half_dim = layer.value_dim // halves
    part_dim = min(padded_size(half_dim), MAX_PART_DIM)
    return {
        "NUM_HEADS": layer.num_heads,
        "HEAD_DIM": layer.head_dim,
        "LATENT_DIM": layer.value_dim,
        "PART_DIM": part_dim,
        "NUM_PARTS": halves * cdiv(half_dim, part_dim),
        "PADDED_ROTARY": padded_size((layer.head_dim - layer.value_dim) // halves),
        "HALVES": halves,
        "IN_PAIRS": is_decoded_in_pairs(layer.query.dtype),
        "KV_BLOCK_SIZE": layer.kv.block_size,
        "TILE_ROWS": config.tile_rows,
        "NUM_STAGES": config.num_stages,
        "FIRST_KEY": layer.first_key,
        "PDL": uses_pdl(),
        "num_warps": config.num_warps,
    }
