"""Cases of attention: decode and verify rows over long and short contexts, and a whole prompt."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from drift_sdk._kernels.attention.attention_plan import (
    AttentionPlan,
    Partitions,
    PlannedRows,
    plan_attention,
)
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.paged_attention import AttentionScratch, attention_config, paged_attention
from drift_sdk._kernels.attention.prefill_attention import prefill_attention, prefill_attention_config
from drift_sdk._kernels.attention.prefill_tiles import TILE_FIELDS, prefill_tiles
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.quantised.e4m3 import E4M3
from perf.cases.case import Case, Prepared, num_copies
from perf.cases.gemm import ITEMSIZE
from perf.harness.shapes import Model

__all__ = ["attention_cases", "decode_case", "prefill_case"]

BLOCK_SIZE = 64
CONTEXTS, BATCHES, ROWS_PER_SEQUENCE = (512, 16_384, 32_768), (1, 4, 8, 64), (1, 4)
"""Tokens of a sequence; sequences; rows of each: one to decode, or one and three drafts to verify."""
PROMPT = 8192
"""Tokens of the prompt."""
KV_NAMES = {torch.bfloat16: "", E4M3: ", fp8 KV"}
"""Names of dtypes of the KV cache, appended to the name of a kernel."""


def attention_cases(
    model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str
) -> Iterator[Case]:
    """Yield the cases of CONTEXTS, BATCHES and ROWS_PER_SEQUENCE, and of a prompt; in bfloat16, with caches
    of bfloat16 and of e4m3.

    row_counts and table have no influence on attention.
    """
    for dtype in KV_NAMES:
        for context in CONTEXTS:
            for batch in BATCHES:
                for rows in ROWS_PER_SEQUENCE:
                    yield decode_case(model.config, context, batch, rows, device, dtype)
        yield prefill_case(model.config, PROMPT, device, dtype)


def decode_case(
    config: DecoderConfig,
    context: int,
    batch: int,
    rows: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Return the case of the last `rows` rows of each of `batch` sequences of `context` tokens. dtype: of the
    KV cache."""
    kv_bytes = batch * context * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    row_size = config.num_heads * config.head_dim
    return Case(
        kernel=f"attention{KV_NAMES[dtype]}",
        shape=f"batch {batch}, {context} keys",
        num_rows=batch * rows,
        num_bytes=kv_bytes + 2 * batch * rows * row_size * ITEMSIZE,
        num_flops=4 * batch * rows * context * row_size,
        prepare=partial(prepare_decode, config, context, batch, rows, device, dtype),
    )


def prefill_case(
    config: DecoderConfig, num_tokens: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> Case:
    """Return the case of a whole prompt. A token sees half of the tokens on average."""
    row_size = config.num_heads * config.head_dim
    kv_bytes = num_tokens * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    return Case(
        kernel=f"prefill attention{KV_NAMES[dtype]}",
        shape=f"{num_tokens} tokens",
        num_rows=num_tokens,
        num_bytes=kv_bytes + 2 * num_tokens * row_size * ITEMSIZE,
        num_flops=4 * row_size * num_tokens**2 / 2,
        prepare=partial(prepare_prefill, config, num_tokens, device, dtype),
    )


def prepare_decode(
    config: DecoderConfig, context: int, batch: int, rows: int, device: str, dtype: torch.dtype
) -> Prepared:
    """Make the inputs of `decode_case`: random queries, keys and values, and the attention plan."""
    caches, block_table = cache_of(config, context, batch, device, dtype)
    slot = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(rows)
    position = torch.arange(context - rows, context, dtype=torch.int32, device=device).repeat(batch)
    plan = AttentionPlan(batch, context, Partitions(), torch.device(device))
    group = config.num_heads // config.num_kv_heads
    scratch = AttentionScratch.allocate(
        plan, num_kv_heads=config.num_kv_heads, num_rows=rows, group=group, head_dim=config.head_dim
    )
    planned = PlannedRows(slot, position, rows)
    plan_attention(planned, plan)
    query = torch.randn(batch * rows, config.num_heads, config.head_dim, device=device).to(torch.bfloat16)
    out = torch.empty_like(query)
    layers = [LayerAttention(query=query, out=out, kv=kv, block_table=block_table) for kv in caches]
    options = attention_config(config.head_dim, dtype, plan.partitions.tile)

    def step() -> None:
        for layer in layers:
            paged_attention(layer, planned, scratch, options)

    return Prepared(step, len(caches), (out,))


def prepare_prefill(config: DecoderConfig, num_tokens: int, device: str, dtype: torch.dtype) -> Prepared:
    """Make the inputs of `prefill_case`: random queries, keys and values, and the table of tiles."""
    caches, block_table = cache_of(config, num_tokens, 1, device, dtype)
    attention = prefill_attention_config(config.head_dim, torch.bfloat16)
    found = np.empty((-(-num_tokens // attention.tile_rows), TILE_FIELDS), np.int32)
    prefill_tiles([(0, 0, num_tokens)], attention.tile_rows, found)
    tiles = torch.from_numpy(found).to(device)
    query = torch.randn(num_tokens, config.num_heads, config.head_dim, device=device).to(torch.bfloat16)
    out = torch.empty_like(query)
    layers = [LayerAttention(query=query, out=out, kv=kv, block_table=block_table) for kv in caches]

    def step() -> None:
        for layer in layers:
            prefill_attention(layer, tiles, attention)

    return Prepared(step, len(caches), (out,))


def cache_of(
    config: DecoderConfig, context: int, batch: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[LayerKV], Tensor]:
    """Return keys and values of several layers in `dtype`, those of e4m3 with scales of 1, and the block
    table of sequences with shuffled blocks."""
    num_blocks = -(-context // BLOCK_SIZE)
    shape = (batch * num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    layers = num_copies(
        2 * batch * num_blocks * config.num_kv_heads * BLOCK_SIZE * config.head_dim * dtype.itemsize
    )

    def random() -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_().to(dtype)

    table = torch.randperm(batch * num_blocks).to(device, torch.int32).view(batch, num_blocks)
    scale = torch.ones(config.num_kv_heads, device=device) if dtype == E4M3 else None
    return [LayerKV(random(), random(), scale, scale) for _ in range(layers)], table
