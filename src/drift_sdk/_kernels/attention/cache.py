"""Keys and values in a paged cache: their places, and their e4m3 codes.

Keys and values in eight bits: e4m3 codes with a scale for each KV head, and how they lie in a cache.

    code = e4m3(x / scale)           rounded to nearest, ties to even
    x    = code * scale              the codes alone in attention: scales multiply sums, once for each row

e4m3 has a sign, four bits of exponent and three of mantissa; its numbers reach from 2**-9 to 448. Numbers
beyond are stored as 448, so that no finite number becomes NaN, and NaN as zero: a cache holds finite numbers.

Two codes share 16 bits of a cache: dimension d of a head, and dimension d + head_dim / 2 in the upper byte.
A tile of keys is then read, moved and multiplied as 16-bit numbers are, in two halves of the dimensions, and
the order of summation along the dimensions is that of a cache of 16-bit numbers.

Codes become bfloat16 exactly: their bits are shifted to the places of bfloat16, and one multiplication by
2**120 corrects the exponent, also that of subnormal numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import check_tensors
from drift_sdk._kernels.launch.kernel import device_function, is_interpreted
from drift_sdk.quantised.formats import E4M3, MAX_E4M3


@device_function
def offset_in_cache(
    table_ptr,  # [max_blocks] int32: the block table's row of a slot
    first_key,  # position of the tile's first key
    key,  # [TILE_KEYS]: 0 ... TILE_KEYS - 1
    position,  # [TILE_KEYS]: first_key + key
    num_keys,
    head,  # KV head
    dim,  # [PADDED_DIM]
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CACHE: tl.constexpr,  # the cache_modifier of loads from the table
):
    """Return the offsets [TILE_KEYS, PADDED_DIM] of a tile's keys (or values) in the cache."""
    if KV_BLOCK_SIZE >= TILE_KEYS:  # a tile lies in one block, and is contiguous in it
        block = tl.load(table_ptr + first_key // KV_BLOCK_SIZE, cache_modifier=CACHE).to(tl.int64)
        return ((block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + first_key % KV_BLOCK_SIZE) * HEAD_DIM + (
            key[:, None] * HEAD_DIM + dim[None, :]
        )
    else:
        block_ptrs = table_ptr + position // KV_BLOCK_SIZE
        block = tl.load(block_ptrs, mask=position < num_keys, other=0, cache_modifier=CACHE).to(tl.int64)
        cache_row = (block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
        return cache_row[:, None] * HEAD_DIM + dim[None, :]


LARGEST = tl.constexpr(MAX_E4M3)
SMALLEST_NORMAL = tl.constexpr(2.0**-6)
ROUNDER = tl.constexpr(2.0**14)
"""Added to a number below 2**-6, it leaves the multiple of 2**-9 next to it in the lowest bits."""
ROUNDER_BITS = tl.constexpr(0x46800000)
CORRECTION = tl.constexpr(2.0**120)

DECODE_PAIRS = tl.constexpr("""
{
.reg .b32 low, high, sign, factor, zero;
mov.b32 factor, 0x7B807B80;
mov.b32 zero, 0x80008000;
shl.b32 low, $2, 4;
and.b32 low, low, 0x07F007F0;
shl.b32 sign, $2, 8;
lop3.b32 low, sign, 0x80008000, low, 0xEA;
fma.rn.bf16x2 $0, low, factor, zero;
shr.u32 high, $2, 4;
and.b32 high, high, 0x07F007F0;
lop3.b32 high, $2, 0x80008000, high, 0xEA;
fma.rn.bf16x2 $1, high, factor, zero;
}
""")
"""Two words of two codes each to the bfloat16 numbers of their lower and upper bytes. `lop3` with 0xEA is
(a & b) | c; `factor` is 2**120 twice, `zero` -0.0."""


@device_function
def encode_e4m3(
    x,  # fp32
    scale,  # fp32
):
    """Return the codes of x / scale, int32: 0 ... 255."""
    quotient = tl.div_rn(x, scale + tl.zeros_like(x))
    quotient = tl.where(quotient == quotient, quotient, 0.0)
    magnitude = tl.minimum(tl.abs(quotient), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS
    sign = (quotient.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal) | sign


@device_function
def decode_pairs(
    pairs,  # int16: two codes each
    DTYPE: tl.constexpr,
    IN_PAIRS: tl.constexpr,  # see `is_decoded_in_pairs`
):
    """Return the numbers of the lower and those of the upper bytes, in DTYPE."""
    if IN_PAIRS:
        low, high = tl.inline_asm_elementwise(
            DECODE_PAIRS, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        word = pairs.to(tl.int32)
        low_bits = ((word & 0x80) << 24) | ((word & 0x7F) << 20)
        high_bits = ((word & 0x8000) << 16) | ((word & 0x7F00) << 12)
        low = (low_bits.to(tl.float32, bitcast=True) * CORRECTION).to(DTYPE)
        high = (high_bits.to(tl.float32, bitcast=True) * CORRECTION).to(DTYPE)
    return low, high


def is_decoded_in_pairs(dtype: torch.dtype) -> bool:
    """Return True if `decode_pairs` to `dtype` is done in assembly, two words at a time. The result is the
    same."""
    return dtype == torch.bfloat16 and not is_interpreted()


def cache_words(cache: Tensor) -> Tensor:
    """Return a cache as kernels read it: of e4m3 [..., head_dim], its words of two codes [..., head_dim / 2]
    int16; any other as it is."""
    return cache.view(torch.int16) if cache.dtype == E4M3 else cache


def check_cache(keys: Tensor, values: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check keys and values of a cache: of `shape`, both e4m3, or both of the storage type `dtype`."""
    check_tensors(shape, E4M3 if keys.dtype == E4M3 else dtype, keys=keys, values=values)


def check_scales(cache: Tensor, num_kv_heads: int, **scales: Tensor | None) -> None:
    """Check the scales of a cache, by name: [num_kv_heads] fp32 for one of e4m3, None for any other."""
    for name, tensor in scales.items():
        if (tensor is None) == (cache.dtype == E4M3):
            expected = f"[{num_kv_heads}] torch.float32" if tensor is None else "None"
            raise ValueError(f"{name}: expected {expected} for a cache of {cache.dtype}")

    check_tensors((num_kv_heads,), torch.float32, **scales)
