"""The order in which attention is summed: the same steps for decoding, verification and prompts.

A query row's keys are cut into partitions at fixed positions (see `Partitions`), and a partition into tiles:

    attend_tile:    takes a tile of keys into a partition's sums (online softmax)
    add_partition:  adds a partition's sums to those of all partitions before it, in ascending order
    add_sink:       adds a score without a value, after all partitions

Each step is one product of a fixed inner size, or one operation on elements. Products are bit-equal by
mma.sync and by wgmma, whatever the number of rows (measured on the H200: tests/_kernels/attention compares
them), and where a multiplication and an addition could be fused or not, the fusion is written out. So a row's
bits depend on its query and on the keys it sees, and not on the kernel, the rows beside it or the tile of
rows. Keys that a row does not see leave its sums as they are, bit for bit.

The softmax's denominator is a product with ones: its order of summation is the product's, and its terms are
the probabilities in the storage type, which also weight the values.

A cache of e4m3 numbers is read in two halves of the dimensions (see cache.py), and products along the
dimensions take the first half first. Queries and sums of values are in two parts for that: tuples of two,
otherwise of one. Halves joined to rows would be multiplied in another order by mma.sync, for which Triton
would give a thread four neighbouring numbers of a joined row instead of two. The scales of keys and values
multiply no single number: the keys' is a factor of the scores' scale, the values' a factor of the output.

Borders at which the keys of a sequence are cut into partitions, each summed by itself.
"""

from __future__ import annotations

import triton.language as tl
from msgspec import Struct
from msgspec.structs import replace

from drift_sdk._kernels.attention.cache import decode_pairs
from drift_sdk._kernels.launch.kernel import device_function

WIDE_HEAD = 256
"""Heads of more dimensions are wide: they have smaller tiles of keys, and prompts have a kernel for them."""
MANY_HEADS = 64
"""Of latents that more heads share, partitions are twice as wide: each of them has the sums of all heads, and
programs that divide the heads use a GPU in place of the programs of other partitions."""


class Partitions(Struct, frozen=True):
    """Borders at which the keys of a sequence are cut; part of the result's bits.

    Up to position `narrow_end`, partitions are `narrow` keys wide. Their width doubles there, and wherever
    the position has doubled, `num_doublings` times in all. They consist of tiles of `tile` keys. A program
    has at least one partition, so short contexts need narrow ones, to fill the GPU; long contexts need wide
    ones, which leave less to add up.

    In whole steps on an H200, for Llama-3.1-8B shapes, partitions of 64 keys were 0.9% faster than 128 for
    one short sequence and 0.5% slower for eight (perf/tried.md).
    """

    narrow: int = 128
    narrow_end: int = 2048
    num_doublings: int = 2
    tile: int = 64

    @classmethod
    def of_latents(cls, num_heads: int) -> Partitions:
        """Borders for latents of so many heads."""
        return cls() if num_heads <= MANY_HEADS else cls(narrow=2 * cls().narrow)

    @classmethod
    def of_layer(cls, head_dim: int, window: int) -> Partitions:
        """Borders for heads of `head_dim` dimensions, and rows that see only their last `window` keys; 0: all
        keys.

        Few keys need narrow partitions wherever they lie. Of wide heads, a tile of 32 keys has the bytes of
        64 keys of half the size.
        """
        default = cls() if head_dim <= WIDE_HEAD else cls(tile=32)
        return replace(default, num_doublings=0) if 0 < window <= default.narrow_end else default

    def __post_init__(self) -> None:
        if self.narrow % self.tile or self.narrow_end % (2 * self.narrow) or self.narrow_end <= 0:
            raise ValueError(
                f"{self}: expected whole tiles in a partition, and an even number of partitions to narrow_end"
            )

    def index(self, position: int) -> int:
        """Return the index of the partition that a position lies in."""
        doublings = sum(position >= self.narrow_end << index for index in range(self.num_doublings))
        return (position >> doublings) // self.narrow + doublings * (self.narrow_end // self.narrow // 2)

    def start(self, index: int) -> int:
        """Return the first position of a partition, given its index."""
        half = self.narrow_end // self.narrow // 2
        doublings = min(max(index // half - 1, 0), self.num_doublings)
        return (index - doublings * half) * self.narrow << doublings

    def count(self, num_keys: int) -> int:
        """Return how many partitions `num_keys` keys lie in."""
        return self.index(num_keys - 1) + 1 if num_keys > 0 else 0

    def floor(self, position: int) -> int:
        """Return the last border that is not behind a position."""
        return self.start(self.index(position))

    def most(self, num_keys: int) -> int:
        """Return the most partitions that `num_keys` neighbouring keys lie in, wherever they begin."""
        return -(-(num_keys - 1) // self.narrow) + 1

    def room(self, max_num_keys: int, window: int, num_rows: int) -> int:
        """Return how many partitions the keys may lie in that `num_rows` neighbouring rows of a sequence of
        at most `max_num_keys` keys see, each the last `window` keys; 0: all."""
        every = self.count(max_num_keys)
        return min(every, self.most(window + num_rows - 1)) if window > 0 else every


@device_function
def partition_of(position, NARROW: tl.constexpr, NARROW_END: tl.constexpr, NUM_DOUBLINGS: tl.constexpr):
    """Return the index of the partition that a position lies in."""
    doublings = position * 0
    for index in tl.static_range(NUM_DOUBLINGS):
        doublings += (position >= (NARROW_END << index)).to(tl.int32)
    return (position >> doublings) // NARROW + doublings * (NARROW_END // NARROW // 2)


@device_function
def partition_start(index, NARROW: tl.constexpr, NARROW_END: tl.constexpr, NUM_DOUBLINGS: tl.constexpr):
    """Return the first position of a partition, given its index."""
    HALF: tl.constexpr = NARROW_END // NARROW // 2
    doublings = tl.minimum(tl.maximum(index // HALF - 1, 0), NUM_DOUBLINGS)
    return (index - doublings * HALF) * NARROW << doublings


LOG2_E = tl.constexpr(1.4426950408889634)
"""log2(e): exp(x) = exp2(x * LOG2_E), and GPUs have an instruction for exp2."""

ONES_COLUMNS = tl.constexpr(16)
"""Columns of the matrix of ones: the narrowest product that `tl.dot` takes. All columns hold the same
sums."""


@device_function
def head_scale(
    scale,  # of scores, times log2(e)
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    head,  # KV head
):
    """Return the factor of a head's scores, its scale of keys included."""
    if key_scale_ptr is not None:
        scale = scale * tl.load(key_scale_ptr + head)
    return scale


@device_function
def load_parts(
    pointers,  # [ROWS, PADDED_DIM], to the first part
    mask,
    PART_DIM: tl.constexpr,  # dimensions of a part
    NUM_PARTS: tl.constexpr,
    CACHE: tl.constexpr,  # the loads' cache_modifier
):
    """Return the parts of rows, zeros where the mask is false."""
    parts = (tl.load(pointers, mask=mask, other=0.0, cache_modifier=CACHE),)
    if NUM_PARTS == 2:
        second = tl.load(pointers + PART_DIM, mask=mask, other=0.0, cache_modifier=CACHE)
        parts = parts + (second,)  # type: ignore[assignment]  # a longer tuple
    return parts


@device_function
def store_parts(
    pointers,  # [ROWS, PADDED_DIM], to the first part
    parts,  # NUM_PARTS times [ROWS, PADDED_DIM]
    mask,
    PART_DIM: tl.constexpr,  # dimensions of a part
    NUM_PARTS: tl.constexpr,
):
    """Store the parts of rows."""
    for part in tl.static_range(NUM_PARTS):
        tl.store(pointers + part * PART_DIM, parts[part].to(pointers.dtype.element_ty), mask=mask)


@device_function
def zero_parts(ROWS: tl.constexpr, PADDED_DIM: tl.constexpr, NUM_PARTS: tl.constexpr):
    """Return the sums of no values."""
    parts = (tl.zeros((ROWS, PADDED_DIM), tl.float32),)
    if NUM_PARTS == 2:
        parts = parts + (tl.zeros((ROWS, PADDED_DIM), tl.float32),)  # type: ignore[assignment]  # a longer tuple
    return parts


@device_function
def clear_parts(
    parts,  # NUM_PARTS times [ROWS, PADDED_DIM]
    is_cleared,  # [ROWS]
    NUM_PARTS: tl.constexpr,
):
    """Return parts with zeros in some rows."""
    cleared = (tl.where(is_cleared[:, None], 0.0, parts[0]),)
    if NUM_PARTS == 2:
        cleared = cleared + (tl.where(is_cleared[:, None], 0.0, parts[1]),)  # type: ignore[assignment]  # a longer tuple
    return cleared


@device_function
def multiply_parts(
    parts,  # [ROWS, PADDED_DIM]
    factor,  # broadcasts to a part
):
    """Return parts times a factor."""
    products = (parts[0] * factor,)
    if len(parts) == 2:
        products = products + (parts[1] * factor,)  # type: ignore[assignment]  # a longer tuple
    return products


@device_function
def attend_tile(
    maximum,  # [TILE_ROWS] fp32: highest score so far (times log2(e)); -inf at the partition's start
    weight,  # [TILE_ROWS, ONES_COLUMNS] fp32: sum of exp2(score - maximum), in every column
    total,  # parts [TILE_ROWS, PADDED_DIM] fp32: sum of exp2(score - maximum) * value
    queries,  # parts [TILE_ROWS, PADDED_DIM], storage type
    keys,  # [TILE_KEYS, PADDED_DIM] as in the cache; zeros where there is no key
    values,  # as keys
    is_seen,  # [TILE_ROWS, TILE_KEYS]: which keys a row sees; not read without IS_MASKED
    scale,  # of scores: log2(e) / sqrt(head_dim), times the scale of keys
    IS_MASKED: tl.constexpr,  # whether there may be keys that a row does not see
    IN_PAIRS: tl.constexpr,  # of keys and values in two parts, see `decode_pairs`
):
    """Return maximum, weight and total with a tile of keys taken in."""
    if len(queries) == 1:
        score = tl.dot(queries[0], keys.T, input_precision="ieee")
    else:
        low_keys, high_keys = decode_pairs(keys, queries[0].dtype, IN_PAIRS)
        score = tl.dot(queries[0], low_keys.T, input_precision="ieee")
        score = tl.dot(queries[1], high_keys.T, score, input_precision="ieee")
    if IS_MASKED:
        score = tl.where(is_seen, score, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(score, 1) * scale)
    reference = new_maximum
    if IS_MASKED:
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf would be NaN.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    rescale = tl.exp2(maximum - reference)
    probability = tl.exp2(tl.fma(score, scale, -reference[:, None])).to(queries[0].dtype)
    ones = tl.full((values.shape[0], ONES_COLUMNS), 1.0, queries[0].dtype)
    weight = tl.dot(probability, ones, weight * rescale[:, None], input_precision="ieee")
    if len(total) == 1:
        sums = (tl.dot(probability, values, total[0] * rescale[:, None], input_precision="ieee"),)
    else:
        low, high = decode_pairs(values, queries[0].dtype, IN_PAIRS)
        low_sum = tl.dot(probability, low, total[0] * rescale[:, None], input_precision="ieee")
        high_sum = tl.dot(probability, high, total[1] * rescale[:, None], input_precision="ieee")
        sums = (low_sum, high_sum)  # type: ignore[assignment]  # a longer tuple
    return new_maximum, weight, sums


@device_function
def add_partition(
    maximum,  # [ROWS] fp32: of all partitions before; -inf before the first
    weight,  # [ROWS] fp32
    total,  # parts [ROWS, PADDED_DIM] fp32
    part_maximum,  # [ROWS] fp32: of the next partition; -inf where a row sees none of its keys
    part_weight,  # [ROWS] fp32
    part_total,  # as total
):
    """Return maximum, weight and total of the keys of all partitions, the next one included."""
    new_maximum = tl.maximum(maximum, part_maximum)
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    rescale = tl.exp2(maximum - reference)
    share = tl.exp2(part_maximum - reference)
    weight = tl.fma(part_weight, share, weight * rescale)
    sums = (tl.fma(part_total[0], share[:, None], total[0] * rescale[:, None]),)
    if len(total) == 2:
        second = tl.fma(part_total[1], share[:, None], total[1] * rescale[:, None])
        sums = sums + (second,)  # type: ignore[assignment]  # a longer tuple
    return new_maximum, weight, sums


@device_function
def add_sink(
    maximum,  # fp32: of all partitions
    weight,  # fp32
    sink,  # fp32: a score that takes its share of the softmax
):
    """Return what the total is multiplied by, and the weight with the sink in it."""
    new_maximum = tl.maximum(maximum, sink * LOG2_E)
    rescale = tl.exp2(maximum - new_maximum)
    share = tl.exp2(tl.fma(sink + tl.zeros_like(weight), LOG2_E, -new_maximum))
    return rescale, tl.fma(weight, rescale, share)
