"""Arguments that all kernels of attention take: what a layer's rows attend to, and by which rules."""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.attention.cache import cache_words, check_cache, check_scales, is_decoded_in_pairs
from drift_sdk._kernels.attention.softmax import LOG2_E, Partitions
from drift_sdk._kernels.launch.arguments import (
    check_power_of_two,
    check_range,
    check_rows,
    check_tensor,
    check_tensors,
    next_power_of_2,
)
from drift_sdk.quantised.formats import E4M3

MIN_DOT_SIZE = 16
"""The least rows and columns of a tile in a product: those of an MMA."""


class LayerKV(Struct, frozen=True):
    """Keys and values of a layer, [num_blocks, num_kv_heads, block_size, head_dim], of the storage type. With
    scales, float32 [num_kv_heads] each, they are e4m3 as cache.py lays them out. latent_dim: values are the
    first so many numbers of keys, and `values` is `keys`; 0: they are apart."""

    keys: Tensor
    values: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    latent_dim: int = 0

    @property
    def num_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raise ValueError for keys, values or scales of another shape, type or layout. dtype: the storage
        type."""
        num_blocks, num_heads, block_size, _ = self.keys.shape
        check_cache(self.keys, self.values, (num_blocks, num_heads, block_size, head_dim), dtype)
        check_scales(self.keys, num_heads, key_scale=self.key_scale, value_scale=self.value_scale)


class LayerAttention(Struct, frozen=True, kw_only=True):
    """Attention of rows in a layer.

    query, out: [R, num_heads, head_dim], of the storage type. Of latents, `out` has value_dim in its place.
    block_table: [S, max_blocks] int32, the blocks of each slot in order.
    window: how many keys a row sees, its own being the last; 0: all.
    first_key: positions before it are not read.
    scale: of scores; None: 1 / sqrt(head_dim).
    sinks: [num_heads] in the storage type, a score each that takes its share of the softmax and adds nothing.
    index: number of the layer in the model.
    """

    query: Tensor
    out: Tensor
    kv: LayerKV
    block_table: Tensor
    window: int = 0
    first_key: int = 0
    scale: float | None = None
    sinks: Tensor | None = None
    index: int = 0

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values."""
        return self.kv.latent_dim or self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.kv.num_heads

    @property
    def partitions(self) -> Partitions:
        """Borders at which its keys are cut, part of the result's bits."""
        if self.kv.latent_dim:
            return Partitions.of_latents(self.num_heads)

        return Partitions.of_layer(self.head_dim, self.window)

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def log2_scale(self) -> float:
        """The scale of scores, times log2(e): kernels compute powers of two."""
        return self.score_scale * float(LOG2_E.value)

    def of_rows(self, rows: slice) -> LayerAttention:
        """The attention of some of the rows, or all."""
        if rows == slice(0, self.query.shape[0]):
            return self

        return replace(self, query=self.query[rows], out=self.out[rows])

    def check(self, *, max_first_key: int, has_strides: bool = False) -> None:
        """Raise ValueError for a number out of range, or a tensor of another shape, type or layout.

        has_strides: whether rows of `query` and of the block table may have any stride.
        """
        num_rows, num_heads, head_dim = self.query.shape
        dtype = self.query.dtype
        if num_heads % self.kv.num_heads:
            raise ValueError(
                f"num_heads={num_heads}: expected a multiple of num_kv_heads={self.kv.num_heads}"
            )

        check_power_of_two("block_size", self.kv.block_size)
        check_range("window", self.window, 0)
        check_range("first_key", self.first_key, 0, max_first_key)
        check_argument = check_rows if has_strides else check_tensor
        check_argument("query", self.query, self.query.shape, dtype)
        if self.query.stride(1) != head_dim:
            raise ValueError(f"query: strides {self.query.stride()}: expected a row's heads side by side")

        check_tensor("out", self.out, (num_rows, num_heads, self.value_dim), dtype)
        self.kv.check(head_dim, dtype)
        check_argument("block_table", self.block_table, self.block_table.shape, torch.int32)
        check_tensors((num_heads,), dtype, sinks=self.sinks)

    def kernel_arguments(self) -> dict[str, Any]:
        """Return the arguments of kernels by name."""
        num_parts = 2 if self.kv.keys.dtype == E4M3 else 1
        return {
            "query_ptr": self.query,
            "keys_ptr": cache_words(self.kv.keys),
            "values_ptr": cache_words(self.kv.values),
            "key_scale_ptr": self.kv.key_scale,
            "block_table_ptr": self.block_table,
            "scale": self.log2_scale,
            "NUM_KV_HEADS": self.kv.num_heads,
            "HEAD_DIM": self.head_dim,
            "NUM_PARTS": num_parts,
            "PADDED_DIM": padded_size(self.head_dim // num_parts),
            "IN_PAIRS": is_decoded_in_pairs(self.query.dtype),
            "KV_BLOCK_SIZE": self.kv.block_size,
            "WINDOW": self.window,
        }


def padded_size(size: int) -> int:
    """Return the least size of a tile in a product, a power of two, that holds `size` rows or columns."""
    return max(MIN_DOT_SIZE, next_power_of_2(size))
