"""Attention of a few query rows a sequence over a paged cache, for decoding and for verifying drafts.

    score[r, h, p] = query[r, h] . key[p] * scale                          for positions p <= position[r]
    out[r, h] = sum over p of softmax(score[r, h])[p] * value[p]

With a window w, a row sees only the last w of these positions. A sink is one more score in the softmax, whose
value is zero.

Two kernels. `_attend` sums the keys of each partition by itself, in the form of a softmax's maximum, weight
and weighted sum of values; `_add_partitions` combines the partitions of each row.

Order of summation: that of softmax.py. `_attend` takes the tiles of a partition, `_add_partitions`
adds the partitions of a row. A row's bits depend on its query and on the keys it sees: not on the rows beside
it, on other sequences, or on which program computes what.

Grid of `_attend`: (KV heads, shares). Program (h, s) owns KV head h of the s-th share of the plan's tiles
(see plan.py), for all rows of each sequence and all query heads of the group; with wide heads, for a tile of
these. For each of its
partitions it writes the sums of these rows. Sequences that share a prefix are companions there: their rows
lie in one tile.

A cache of e4m3 numbers has scales; see cache.py. Its keys and values become numbers of the storage type in
registers.

Bytes: the keys and values that some row sees, once for all rows of a sequence and all heads of a group, and
once for companions; and the partitions' sums, written and read once. Many programs a multiprocessor are
needed to keep enough loads under way.

Dependent launch: `_attend` reads the plan and the rows before it waits; they are older than the two kernels
before it, which make queries and keys. It permits its dependents to start at its end, or where programs have
few keys, when it has waited: memory can read weights of the next product then.

Directly behind attention of prompts in CUDA C++, which permits its dependents to start as soon as it has
waited itself, and writes other rows, `_attend` waits only at its end (BESIDE_CHUNKS): queries and keys are
complete when it starts. What it loads bypasses the L1 cache. Triton applies `.cg` only to copies of 16 bytes;
these are, because that kernel is used only for heads of 64 or 128 numbers of 16 bits.

The second kernel of paged attention: the sums of a row's partitions, combined to its output.

With a window, only the partitions that hold keys of the row's window are added. A sink is one more score,
added last (see `add_sink`).

The first kernel, `_attend`, writes sums, maxima and weights (see `AttentionScratch`).

Grid: (rows of a sequence times query heads of a group times tiles of dimensions, KV heads, sequences). A
program owns some dimensions of one row of one query head of the output.

Order of summation: that of softmax.py, one partition after the other in ascending order. What a
partition's sums are multiplied by depends on maxima alone. These factors are computed for many partitions at
once, one in each thread, so that adding a partition takes one multiplication and one fused addition.

Bytes: the sums of the partitions of a row in, in fp32; a row out.

Dependent launch: the kernel always follows `_attend`, so it permits its dependents to start at once; before
it waits, it reads the rows' slots and positions, the plan and the sinks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.cache import offset_in_cache
from drift_sdk._kernels.attention.layer_attention import LayerAttention, padded_size
from drift_sdk._kernels.attention.plan import (
    TILE_COMPANIONS,
    TILE_FIRST_KEY,
    TILE_NUM_KEYS,
    TILE_SEQUENCE,
    TILE_SLOT,
    TILE_WORDS,
    AttentionPlan,
    PlannedRows,
    most_companions,
    next_partition,
)
from drift_sdk._kernels.attention.softmax import (
    ONES_COLUMNS,
    WIDE_HEAD,
    add_sink,
    attend_tile,
    head_scale,
    load_parts,
    partition_of,
    partition_start,
    store_parts,
    zero_parts,
)
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

SHARED_RESERVE = 24 * 1024
"""Bytes of shared memory that a program may take beside its stages: queries, and changes of layout."""


class AttentionConfig(Struct, frozen=True):
    """Launch configuration of `_attend`; within these limits none of it is part of the result's bits.

    num_programs: over all heads. 528 are as many as an H200 holds at once, see `attention_config`.
    num_stages: of Triton's pipeline.
    num_warps: 1, 2, 4 or 8, whose results are compared bit for bit by a test on the GPU.
    """

    num_programs: int = 528
    num_stages: int = 2
    num_warps: int = 2

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps={self.num_warps}: expected 1, 2, 4 or 8, whose bits are equal")


WARPS_PER_MULTIPROCESSOR = 8
"""As many as registers allow."""

WARPS, MORE_WARPS, MOST_WARPS, NARROW_HEAD = 2, 4, 8, 128
"""Warps of a program, for heads of up to NARROW_HEAD dimensions, for larger ones, and for those of more than
WIDE_HEAD. With two warps, the sums of 64 query rows of 256 dimensions alone take all registers, and the
compiler keeps 11 KB a thread in memory."""

WIDE_TILE_ROWS = 32
"""Most query rows of a program with wide heads; programs divide more of them. With 64 rows of 512 dimensions,
the compiler keeps 168 bytes a thread in memory, and stages take more shared memory than there is."""

STAGES, E4M3_STAGES = 2, 3
"""Stages where there is room for them. With caches of e4m3, whose tiles have half of the bytes, a third one
takes 2% to 3% of the kernel's time behind 16K and 32K keys."""


def attention_config(head_dim: int, kv_dtype: torch.dtype, tile_keys: int) -> AttentionConfig:
    """Return the configuration for a size of heads and a cache of `kv_dtype` on the current GPU: as many
    programs as it holds at once, and as many stages as fit its shared memory, up to a bound."""
    limits = gpu_limits()
    stage_bytes = 2 * tile_keys * padded_size(head_dim) * kv_dtype.itemsize
    num_fitting = (limits.shared_bytes - SHARED_RESERVE) // stage_bytes
    num_warps = WARPS if head_dim <= NARROW_HEAD else MORE_WARPS if head_dim <= WIDE_HEAD else MOST_WARPS
    return AttentionConfig(
        num_programs=WARPS_PER_MULTIPROCESSOR // num_warps * limits.num_multiprocessors,
        num_stages=max(1, min(E4M3_STAGES if kv_dtype == E4M3 else STAGES, num_fitting)),
        num_warps=num_warps,
    )


def most_query_rows(head_dim: int, dtype: torch.dtype, tile_keys: int) -> int | None:
    """Return how many query rows of a sequence, over the heads of a group, fit the shared memory of the
    current GPU: a power of two, beside whose queries and scores there is room for a tile of keys. None: any
    number, as programs divide them."""
    if head_dim > WIDE_HEAD:
        return None

    padded_dim = padded_size(head_dim)
    num_numbers = gpu_limits().shared_bytes // dtype.itemsize - padded_dim * tile_keys
    return 1 << (max(num_numbers // (padded_dim + tile_keys), 1).bit_length() - 1)


FEW_PARTITIONS = 8
"""Partitions that `_add_partitions` loads before it adds the first of them, if the row has no more: a load
from L2 takes longer than many additions. No result depends on it."""

LOADED_NUMBERS = 1024
"""Numbers that it loads first if the row has more partitions, 32 for each thread of a warp. Twice as many
gain little at 32K keys, and take several times as long to compile. No result depends on it."""

MIN_PROGRAMS = 1024
"""Programs of `_add_partitions` for which the dimensions of a row are not divided: about eight for each
multiprocessor of an H200."""

MIN_TILE_DIM, MAX_TILE_DIM = 32, 256
"""Least dimensions of a program, one for each thread of a warp, and most."""


class AttentionScratch(Struct, frozen=True):
    """A plan, and memory for the partitions' sums of its sequences, fp32, uninitialised.

    The first place of a sequence is that of its first partition, or with a window, of the first partition
    that its first row sees.
    sums: [plan.num_sequences, num_kv_heads, plan.max_num_partitions, rows * group, head_dim], the values
    weighted by exp2(score - maximum), where rows is the largest number of rows of a sequence. A step of fewer
    rows uses the beginning of the memory, laid out as if it were made for that number.
    maxima: the same without the last dimension, the highest score in a partition (times log2(e)).
    weights: like maxima, the sum of exp2(score - maximum).
    """

    plan: AttentionPlan
    sums: Tensor
    maxima: Tensor
    weights: Tensor

    @classmethod
    def allocate(
        cls, plan: AttentionPlan, *, num_kv_heads: int, num_rows: int, group: int, head_dim: int
    ) -> AttentionScratch:
        """Allocate memory for `num_rows` rows a sequence and `group` query heads a KV head."""
        shape = (plan.num_sequences, num_kv_heads, plan.max_num_partitions, num_rows * group)

        def empty(*last: int) -> Tensor:
            return torch.empty(*shape, *last, dtype=torch.float32, device=plan.tiles.device)

        return cls(plan, empty(head_dim), empty(), empty())

    def check(self, layer: LayerAttention, rows: PlannedRows) -> None:
        """Raise ValueError if plan and memory are not for these rows of the layer."""
        plan, num_rows, rows_each = self.plan, layer.query.shape[0], rows.rows_per_sequence
        if layer.window != plan.window:
            raise ValueError(f"window={layer.window}: expected {plan.window}, that of the plan")

        if num_rows % rows_each or num_rows > plan.num_sequences * rows_each:
            raise ValueError(
                f"query: {num_rows} rows: expected {rows_each} for each of at most {plan.num_sequences} "
                "sequences"
            )

        rows.check(num_rows)
        num_query_rows, room = rows_each * layer.group, self.maxima.shape[-1]
        if room < num_query_rows:
            raise ValueError(f"scratch: room for {room} query rows: expected {num_query_rows} or more")

        shape = (plan.num_sequences, layer.kv.num_heads, plan.max_num_partitions, room)
        check_tensor("scratch.sums", self.sums, (*shape, layer.value_dim), torch.float32)
        check_tensor("scratch.maxima", self.maxima, shape, torch.float32)
        check_tensor("scratch.weights", self.weights, shape, torch.float32)

    def kernel_arguments(self, rows: PlannedRows) -> dict[str, Any]:
        """Return the arguments by name of kernels that sum partitions or add their sums."""
        partitions = self.plan.partitions
        return {
            "row_slot_ptr": rows.slot,
            "row_position_ptr": rows.position,
            "sums_ptr": self.sums,
            "maxima_ptr": self.maxima,
            "weights_ptr": self.weights,
            "num_partitions": self.plan.max_num_partitions,
            "NARROW": partitions.narrow,
            "NARROW_END": partitions.narrow_end,
            "NUM_DOUBLINGS": partitions.num_doublings,
        }


@device_function
def _higher(one, other):
    return tl.maximum(one, other)


@device_function
def _add_several(
    maximum,  # [] fp32: of all partitions before; -inf before the first
    weight,  # [TILE_DIM] fp32, the same for all dimensions
    total,  # [TILE_DIM] fp32
    sums_ptr,  # of the row's partition 0 and the program's dimensions
    maxima_ptr,  # of the row's partition 0
    weights_ptr,  # as maxima
    first,  # the first partition to add
    end,  # the row's last partition, and one
    is_dim,  # [TILE_DIM]
    dim,  # [TILE_DIM]
    STRIDE: tl.constexpr,  # rows from a partition to the next
    HEAD_DIM: tl.constexpr,
    NUMBER: tl.constexpr,
    HAS_GAPS: tl.constexpr,  # some partitions are in the sums of one before, and have the maximum -inf
):
    """Return maximum, weight and total with partitions first ... first + NUMBER - 1 added, in this order.

    What `add_partition` of softmax.py computes for each of them, bit for bit.
    """
    partition = first + tl.arange(0, NUMBER)
    is_partition = partition < end
    maxima = tl.load(maxima_ptr + partition * STRIDE, mask=is_partition, other=float("-inf"))
    has_before = (partition > first) & (partition <= end)
    before = tl.load(maxima_ptr + (partition - 1) * STRIDE, mask=has_before, other=float("-inf"))
    zeros = tl.zeros_like(dim)
    weight_ptrs = weights_ptr + first * STRIDE + zeros
    sum_ptrs = sums_ptr + first * (STRIDE * HEAD_DIM) + dim
    part_weights, part_totals = (), ()
    for number in tl.static_range(NUMBER):
        is_part = number + zeros < end - first
        if HAS_GAPS:
            part_maximum_ptrs = maxima_ptr + (first + number) * STRIDE + zeros
            is_part = is_part & (tl.load(part_maximum_ptrs, mask=is_part, other=0.0) > float("-inf"))
        part_weight = tl.load(weight_ptrs + number * STRIDE, mask=is_part, other=0.0)
        part_total = tl.load(sum_ptrs + number * (STRIDE * HEAD_DIM), mask=is_part & is_dim, other=0.0)
        part_weights = part_weights + (part_weight,)  # type: ignore[assignment]  # longer tuples
        part_totals = part_totals + (part_total,)  # type: ignore[assignment]  # longer tuples

    # No load is moved behind a barrier, so all of them are under way from here on.
    tl.debug_barrier()
    # The highest score of the partitions up to each of them, and of those before it.
    highest = tl.maximum(tl.associative_scan(maxima, 0, _higher), maximum)
    highest_before = tl.maximum(tl.associative_scan(before, 0, _higher), maximum)
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    rescale = tl.exp2(highest_before - reference)
    share = tl.exp2(maxima - reference)
    for number in tl.static_range(NUMBER):
        index = tl.full(dim.shape, number, tl.int32)
        part_rescale, part_share = tl.gather(rescale, index, 0), tl.gather(share, index, 0)
        weight = tl.fma(part_weights[number], part_share, weight * part_rescale)
        total = tl.fma(part_totals[number], part_share, total * part_rescale)
    return tl.max(highest, 0), weight, total


@kernel(
    do_not_specialize=["num_partitions"],
    do_not_specialize_on_alignment=["row_slot_ptr", "row_position_ptr"],
)
def _add_partitions(
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    row_slot_ptr,  # [R] int32; -1: padding row
    row_position_ptr,  # [R] int32
    sinks_ptr,  # [num_heads], storage type, or None
    value_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    out_ptr,  # [R, num_heads, HEAD_DIM], storage type
    num_partitions,  # for which sums have room, of each sequence
    ROWS_PER_SEQUENCE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,  # dimensions of a program
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    HAS_GAPS: tl.constexpr,  # see `_add_several`
    WINDOW: tl.constexpr,  # 0: off
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (query row and tile of dimensions, head, sequence): the partitions of one row and one query
    head of the group. Longer than other kernels by its signature."""
    start_dependents(PDL)
    NUM_QUERY_ROWS: tl.constexpr = ROWS_PER_SEQUENCE * GROUP_SIZE
    NUM_TILES: tl.constexpr = PADDED_DIM // TILE_DIM
    query_row, head, sequence = tl.program_id(0) // NUM_TILES, tl.program_id(1), tl.program_id(2)
    row = sequence * ROWS_PER_SEQUENCE + query_row // GROUP_SIZE
    dim = tl.program_id(0) % NUM_TILES * TILE_DIM + tl.arange(0, TILE_DIM)
    is_dim = dim < HEAD_DIM
    slot = tl.load(row_slot_ptr + row, cache_modifier=".cg")
    position = tl.load(row_position_ptr + row, cache_modifier=".cg")
    first = 0
    if WINDOW > 0:
        first = partition_of(tl.maximum(position - (WINDOW - 1), 0), NARROW, NARROW_END, NUM_DOUBLINGS)
        first_position = tl.load(row_position_ptr + sequence * ROWS_PER_SEQUENCE, cache_modifier=".cg")
        first_place = partition_of(
            tl.maximum(first_position - (WINDOW - 1), 0), NARROW, NARROW_END, NUM_DOUBLINGS
        )
    # Padding rows see nothing, and get zeros.
    end = tl.where(slot >= 0, partition_of(position, NARROW, NARROW_END, NUM_DOUBLINGS) + 1, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * GROUP_SIZE + query_row % GROUP_SIZE).to(tl.float32)
    wait_for_producers(PDL)
    first_sum = ((sequence * NUM_KV_HEADS + head) * num_partitions).to(tl.int64) * NUM_QUERY_ROWS + query_row
    if WINDOW > 0:  # as in `_attend`, for all rows of the sequence
        first_sum -= first_place * NUM_QUERY_ROWS
    sums_ptr += first_sum * HEAD_DIM
    maxima_ptr += first_sum
    weights_ptr += first_sum
    maximum = tl.full((), float("-inf"), tl.float32)
    weight = tl.zeros((TILE_DIM,), tl.float32)
    total = tl.zeros((TILE_DIM,), tl.float32)
    if end - first <= FEW:
        maximum, weight, total = _add_several(
            maximum, weight, total, sums_ptr, maxima_ptr, weights_ptr, first, end, is_dim, dim,
            NUM_QUERY_ROWS, HEAD_DIM, FEW, HAS_GAPS,
        )  # fmt: skip
    else:
        for begin in range(first, end, MANY):
            maximum, weight, total = _add_several(
                maximum, weight, total, sums_ptr, maxima_ptr, weights_ptr, begin, end, is_dim, dim,
                NUM_QUERY_ROWS, HEAD_DIM, MANY, HAS_GAPS,
            )  # fmt: skip

    if sinks_ptr is not None:
        rescale, weight = add_sink(maximum, weight, sink)
        total = total * rescale
    if value_scale_ptr is not None:
        total = total * tl.load(value_scale_ptr + head)
    result = total / tl.where(end > 0, weight, 1.0)
    out_ptrs = out_ptr + ((row * NUM_KV_HEADS + head) * GROUP_SIZE + query_row % GROUP_SIZE) * HEAD_DIM + dim
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_dim)


def add_partitions(
    layer: LayerAttention, rows: PlannedRows, scratch: AttentionScratch, *, has_gaps: bool = False
) -> None:
    """Combine the partitions' sums in `scratch`, which are those of the same rows, to `layer.out`.

    Rows of slot -1 get zeros. has_gaps: partitions of the maximum -inf have no sums, because these are in the
    sums of a partition before.
    """
    num_rows = rows.slot.shape[0]
    num_heads, num_kv_heads, group = layer.num_heads, layer.kv.num_heads, layer.group
    padded_dim = padded_size(layer.value_dim)
    most_dim = MIN_TILE_DIM if num_rows * num_heads < MIN_PROGRAMS else MAX_TILE_DIM
    tile_dim = min(padded_dim, most_dim)
    num_tiles = padded_dim // tile_dim
    _add_partitions[(rows.rows_per_sequence * group * num_tiles, num_kv_heads, rows.num_sequences)](
        sinks_ptr=layer.sinks,
        value_scale_ptr=layer.kv.value_scale,
        out_ptr=layer.out,
        ROWS_PER_SEQUENCE=rows.rows_per_sequence,
        GROUP_SIZE=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=layer.value_dim,
        PADDED_DIM=padded_dim,
        TILE_DIM=tile_dim,
        FEW=FEW_PARTITIONS,
        MANY=max(2, min(32, LOADED_NUMBERS // tile_dim)),
        HAS_GAPS=has_gaps,
        WINDOW=layer.window,
        PDL=uses_pdl(),
        num_warps=1,
        **scratch.kernel_arguments(rows),
        **launch_options(),
    )


EARLY_TILES = tl.constexpr(2)
"""Up to so many tiles for each share, `_attend` permits its dependents to start before it computes."""


@kernel(
    do_not_specialize=["num_partitions", "max_blocks"],
    do_not_specialize_on_alignment=["row_slot_ptr", "row_position_ptr"],
)
def _attend(
    query_ptr,  # [R, num_heads, HEAD_DIM], storage type; heads of a group side by side
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32; -1: padding row
    row_position_ptr,  # [R] int32: the last position that a row sees
    tiles_ptr,  # [max_num_tiles, TILE_WORDS] int32
    num_tiles_ptr,  # [1] int32
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    scale,  # of scores, times log2(e)
    num_partitions,  # for which sums have room, of each sequence
    max_blocks,
    ROWS_PER_SEQUENCE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # query heads that share a KV head
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # query rows of a program: a power of two, 16 or more
    NUM_ROW_TILES: tl.constexpr,  # programs that divide the query rows of a sequence
    NUM_COMPANIONS: tl.constexpr,  # sequences that may share a tile
    NUM_PARTS: tl.constexpr,  # of the dimensions: 2 with e4m3, else 1
    PADDED_DIM: tl.constexpr,  # those of a part, rounded up likewise
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
    KV_BLOCK_SIZE: tl.constexpr,  # positions in a block of the KV cache
    NUM_STAGES: tl.constexpr,
    FIRST_KEY: tl.constexpr,  # positions before it are not seen
    WINDOW: tl.constexpr,  # 0: off
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,  # NARROW, NARROW_END, NUM_DOUBLINGS: see `Partitions`
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    BESIDE_CHUNKS: tl.constexpr,  # wait only at the end
    PDL: tl.constexpr,
):
    """Program (head and tile of query rows, share): the tiles of a share, one sequence after the other.

    A "query row" below is one row of the step with one query head of the group. Longer than other kernels:
    one loop over sums that stay in registers.
    """
    NUM_QUERY_ROWS: tl.constexpr = ROWS_PER_SEQUENCE * GROUP_SIZE
    PART_DIM: tl.constexpr = HEAD_DIM // NUM_PARTS
    CACHE: tl.constexpr = ".cg" if BESIDE_CHUNKS else ""
    head = tl.program_id(0) // NUM_ROW_TILES
    first_query_row = tl.program_id(0) % NUM_ROW_TILES * TILE_ROWS
    query_row = (first_query_row + tl.arange(0, TILE_ROWS)) % NUM_QUERY_ROWS
    companion = (first_query_row + tl.arange(0, TILE_ROWS)) // NUM_QUERY_ROWS
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < PART_DIM
    scale = head_scale(scale, key_scale_ptr, head)
    key = tl.arange(0, TILE_KEYS)
    num_tiles = tl.load(num_tiles_ptr, cache_modifier=".cg")
    share = tl.program_id(1)
    tile_index = next_partition(
        tiles_ptr, num_tiles * share // tl.num_programs(1), num_tiles,
        WINDOW, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    end_index = next_partition(
        tiles_ptr, num_tiles * (share + 1) // tl.num_programs(1), num_tiles,
        WINDOW, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    while tile_index < end_index:
        # The share's tiles of one sequence, or of the prefix that companions share.
        tile_ptr = tiles_ptr + tile_index * TILE_WORDS
        # The sequence of each query row, -1 of rows without one.
        if NUM_COMPANIONS == 1:
            sequence = tl.load(tile_ptr + TILE_SEQUENCE, cache_modifier=".cg")
            is_row = companion == 0
        else:
            companion_ptrs = tile_ptr + TILE_COMPANIONS + companion
            has_place = companion < NUM_COMPANIONS
            sequence = tl.load(companion_ptrs, mask=has_place, other=-1, cache_modifier=".cg")
            is_row = sequence >= 0
        slot = tl.load(tile_ptr + TILE_SLOT, cache_modifier=".cg")
        num_keys = tl.load(tile_ptr + TILE_NUM_KEYS, cache_modifier=".cg")
        sequence_key = tl.load(tile_ptr + TILE_FIRST_KEY, cache_modifier=".cg")
        num_own_tiles = tl.minimum(
            end_index - tile_index, (num_keys - sequence_key + TILE_KEYS - 1) // TILE_KEYS
        )
        row = sequence * ROWS_PER_SEQUENCE + query_row // GROUP_SIZE
        is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1, cache_modifier=".cg") >= 0
        last_position = tl.load(row_position_ptr + row, mask=is_live, other=-1, cache_modifier=".cg")
        first_seen = FIRST_KEY
        if WINDOW > 0:
            # Keys that no row sees are not loaded: they may hold anything.
            if NUM_ROW_TILES == 1:
                first_position = tl.min(tl.where(is_live, last_position, 0x7FFFFFFF), 0)
            else:
                first_position = tl.load(
                    row_position_ptr + sequence * ROWS_PER_SEQUENCE, cache_modifier=".cg"
                )
            first_seen = tl.maximum(first_position - (WINDOW - 1), FIRST_KEY)
        query_index = (row * NUM_KV_HEADS + head) * GROUP_SIZE + query_row % GROUP_SIZE
        query_mask = is_live[:, None] & is_dim[None, :]
        if not BESIDE_CHUNKS:
            wait_for_producers(PDL)
            if num_tiles <= EARLY_TILES * tl.num_programs(1):
                start_dependents(PDL)
        query_ptrs = query_ptr + query_index[:, None] * HEAD_DIM + dim[None, :]
        queries = load_parts(query_ptrs, query_mask, PART_DIM, NUM_PARTS, CACHE)
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        first_sum = (sequence * NUM_KV_HEADS + head) * num_partitions * NUM_QUERY_ROWS + query_row
        if WINDOW > 0:  # the first place is that of the first partition that a row sees
            first_sum -= partition_of(first_seen, NARROW, NARROW_END, NUM_DOUBLINGS) * NUM_QUERY_ROWS
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for tile in tl.range(0, num_own_tiles, num_stages=NUM_STAGES):
            first_key = sequence_key + tile * TILE_KEYS
            position = first_key + key
            is_key = position < num_keys
            if FIRST_KEY > 0 or WINDOW > 0:
                is_key = is_key & (position >= first_seen)
            key_mask = is_key[:, None] & is_dim[None, :]
            cache_offset = offset_in_cache(
                table_ptr, first_key, key, position, num_keys, head, dim,
                NUM_KV_HEADS, PART_DIM, KV_BLOCK_SIZE, TILE_KEYS, CACHE,
            )  # fmt: skip
            keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0, cache_modifier=CACHE)
            values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0, cache_modifier=CACHE)
            is_seen = position[None, :] <= last_position[:, None]
            if FIRST_KEY > 0:
                is_seen = is_seen & (position >= FIRST_KEY)[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (position[None, :] > last_position[:, None] - WINDOW)
            maximum, weight, total = attend_tile(
                maximum, weight, total, queries, keys, values, is_seen, scale, True, IN_PAIRS
            )
            partition = partition_of(first_key, NARROW, NARROW_END, NUM_DOUBLINGS)
            next_start = partition_start(partition + 1, NARROW, NARROW_END, NUM_DOUBLINGS)
            if (first_key + TILE_KEYS >= next_start) | (first_key + TILE_KEYS >= num_keys):
                # The partition's last tile: store its sums, and start the next partition.
                sum_index = first_sum + partition * NUM_QUERY_ROWS
                sum_mask = is_row[:, None] & is_dim[None, :]
                sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
                store_parts(sum_ptrs, total, sum_mask, PART_DIM, NUM_PARTS)
                tl.store(maxima_ptr + sum_index, maximum, mask=is_row)
                tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=is_row)
                maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
                weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
                total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)

        tile_index += num_own_tiles

    wait_for_producers(PDL)  # every CTA waits before it ends, also one without a tile
    start_dependents(PDL)


def paged_attention(
    layer: LayerAttention,
    rows: PlannedRows,
    scratch: AttentionScratch,
    config: AttentionConfig,
    *,
    beside_chunks: bool = False,
) -> None:
    """Attention of rows to the positions they see, in `layer.out`.

    rows: those that `scratch.plan` was made of, which has the layer's window. Rows of slot -1 get zeros.
    beside_chunks: True only if the launch directly before was attention of prompts in CUDA C++, of other rows
    of the step.
    The first key lies in the first tile. All tensors are contiguous. Raises ValueError for another shape,
    type or layout.
    """
    plan = scratch.plan
    layer.check(max_first_key=plan.partitions.tile - 1)
    scratch.check(layer, rows)
    tile_rows = padded_size(rows.rows_per_sequence * layer.group)
    if layer.head_dim > WIDE_HEAD:
        tile_rows = min(tile_rows, WIDE_TILE_ROWS)
    num_row_tiles = cdiv(rows.rows_per_sequence * layer.group, tile_rows)
    num_columns = layer.kv.num_heads * num_row_tiles
    _attend[(num_columns, max(1, config.num_programs // num_columns))](
        tiles_ptr=plan.tiles,
        num_tiles_ptr=plan.num_tiles,
        max_blocks=layer.block_table.shape[1],
        ROWS_PER_SEQUENCE=rows.rows_per_sequence,
        GROUP_SIZE=layer.group,
        TILE_ROWS=tile_rows,
        NUM_ROW_TILES=num_row_tiles,
        NUM_COMPANIONS=most_companions(rows, layer.group, plan.window),
        NUM_STAGES=config.num_stages,
        FIRST_KEY=layer.first_key,
        TILE_KEYS=plan.partitions.tile,
        BESIDE_CHUNKS=beside_chunks and uses_pdl(),
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **layer.kernel_arguments(),
        **scratch.kernel_arguments(rows),
        **launch_options(),
    )
    add_partitions(layer, rows, scratch)
