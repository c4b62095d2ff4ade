"""The slices of a weight: the places at which a product's inner dimension is cut, part of the result's bits.

They are a function of the weight's shape and of whether its product is used whole, and of nothing else: not
of the GPU, of tuning, or of the number of rows. All kernels that multiply by a weight take them from here.

    more than MAX_SLICED_COLUMNS columns, or used whole:  1 slice
    fewer than MANY_COLUMNS columns:                      up to 4 slices
    all others:                                           up to 2 slices

Slices are equal wherever the inner dimension allows it: their number is the highest power of two up to the
above that divides it into multiples of 128 (WIDE_ALIGNMENT), and if there is none, into multiples of 64
(SLICE_ALIGNMENT). Borders then are

- at half of the inner dimension, where the shards of two GPUs meet;
- at borders of heads, for heads of 16, 32, 64 and 128 dimensions, and for others if the number of heads is a
  multiple of the number of slices;
- at borders of quantisation groups of 128 columns, or of 64.

An inner dimension that is no multiple of 128 cannot be halved so. Its slices are multiples of 64, equal but
for the last one, which has the rest; such a weight (576 columns, for example) cannot be sharded with the same
bits.

The sums of slices are added in ascending order. Two GPUs that hold two of four slices each must exchange both
sums, not their total. Four GPUs need at least four equal slices of each weight that is sharded along its
inner dimension, and eight need eight: a weight with fewer gets as many as there are GPUs (`shard_slices`),
and so other bits than on one GPU. To exchange one sum a GPU, slices have to be added as a binary tree,
(0 + 1) + (2 + 3), which for two slices is the same as today.
"""

from __future__ import annotations

SLICE_ALIGNMENT = 64
"""Slices begin at multiples of this many inner indices. It is the smallest tile_k that tuning tries, so a
slice can consist of whole tiles, and 64 elements of 2 bytes are a line of 128 bytes."""

WIDE_ALIGNMENT = 128
"""The alignment that is preferred: columns of a group of common quantised formats, and the most dimensions of
common heads. A slice of such a multiple also consists of whole tiles of 128."""

MAX_SLICED_COLUMNS = 20_000
"""Weights with more columns are not sliced: 157 tiles of 128 columns are more than an H200 has
multiprocessors (132)."""

MANY_COLUMNS = 4096
"""From this many columns on, two slices occupy an H200: 128 CTAs for tiles of 64 columns. Weights of fewer
columns may have four slices."""


def num_slices(num_columns: int, inner: int, *, is_whole: bool = False) -> int:
    """Return the number of slices of a weight [num_columns, inner], 1, 2, 3 or 4.

    is_whole: whether the product is used without adding partial sums: gated weights and the head.
    """
    if is_whole or num_columns > MAX_SLICED_COLUMNS:
        return 1

    most = 2 if num_columns >= MANY_COLUMNS else 4
    for alignment in (WIDE_ALIGNMENT, SLICE_ALIGNMENT):
        for number in (4, 2):
            if number <= most and inner % (number * alignment) == 0:
                return number

    # A last slice without an index would be a partial sum of zeros.
    return -(-inner // slice_size(inner, most))


def shard_slices(num_columns: int, inner: int, num_shards: int) -> int:
    """Return the number of slices of each shard of a weight [num_columns, inner] whose inner dimension is
    divided between GPUs; 0 if it cannot be.

    Shards consist of whole slices, those of `num_slices` if their number is a multiple of `num_shards`: then
    the sum over all shards has the bits that one GPU computes. Otherwise each shard is one slice.
    """
    number = num_slices(num_columns, inner)
    if number % num_shards:
        number = num_shards
    return number // num_shards if inner % (number * SLICE_ALIGNMENT) == 0 else 0


def slice_size(inner: int, number: int) -> int:
    """Return the inner indices of every slice but the last, which has the rest of `inner`."""
    return -(-inner // (number * SLICE_ALIGNMENT)) * SLICE_ALIGNMENT
