"""Cases of attention: decode and verify rows over long and short contexts, chunks of prompts, and a whole
prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from drift_sdk._kernels.attention.decode import AttentionScratch, attention_config, paged_attention
from drift_sdk._kernels.attention.exact_prefill import exact_prefill_attention, exact_prefill_config
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import (
    MAX_COMPANIONS,
    AttentionPlan,
    BlockTable,
    PlannedRows,
    plan_attention,
)
from drift_sdk._kernels.attention.prefill import (
    TILE_FIELDS,
    prefill_attention,
    prefill_attention_config,
    prefill_tiles,
)
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.quantised.formats import E4M3
from drift_sdk.spec.model import Attention
from perf.cases.case import Case, Prepared, num_copies
from perf.cases.gemm import ITEMSIZE
from perf.harness.shapes import Model

__all__ = ["attention_cases", "chunk_case", "decode_case", "prefill_case"]

BLOCK_SIZE = 64
CONTEXTS, BATCHES, ROWS_PER_SEQUENCE = (512, 16_384, 32_768), (1, 4, 8, 64), (1, 4)
"""Tokens of a sequence; sequences; rows of each: one to decode, or one and three drafts to verify."""
UNEVEN_CONTEXTS = (100, 180, 260, 350, 480, 700, 1100, 3200)
"""Tokens of sequences that a service decodes together, prompts having a median of 350 tokens."""
SHARING_BATCH, SHARING_CONTEXT, SHARED_KEYS = 32, 2176, 2048
"""Sequences, their tokens, and the tokens of the prefix that every four of them share."""
PROMPT = 8192
"""Tokens of the prompt."""
CHUNKS = ((0, 448), (700, 192), (1000, 448), (0, PROMPT))
"""Keys before a chunk, and its rows: of mixed steps, and a whole prompt."""
KV_NAMES = {torch.bfloat16: "", E4M3: ", fp8 KV"}
"""Names of dtypes of the KV cache, appended to the name of a kernel."""


def attention_cases(
    model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str
) -> Iterator[Case]:
    """Yield the cases of CONTEXTS, BATCHES and ROWS_PER_SEQUENCE, of UNEVEN_CONTEXTS, of shared prefixes, of
    CHUNKS, and of a prompt; in bfloat16, with caches of bfloat16 and of e4m3.

    row_counts and table have no influence on attention.
    """
    spec = model.spec.attention
    if not isinstance(spec, Attention):  # see perf/cases/latent.py
        return

    for dtype in KV_NAMES:
        for context in CONTEXTS:
            for batch in BATCHES:
                for rows in ROWS_PER_SEQUENCE:
                    yield decode_case(spec, (context,) * batch, rows, device, dtype)
        for repeats in (1, 8):
            yield decode_case(spec, UNEVEN_CONTEXTS * repeats, 1, device, dtype)
        for shared in (0, SHARED_KEYS):
            contexts = (SHARING_CONTEXT,) * SHARING_BATCH
            yield decode_case(spec, contexts, 1, device, dtype, shared)
        for num_before, num_rows in CHUNKS:
            yield chunk_case(spec, num_before, num_rows, device, dtype)
        yield prefill_case(spec, PROMPT, device, dtype)


def decode_case(
    spec: Attention,
    contexts: Sequence[int],
    rows: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    num_shared: int = 0,
) -> Case:
    """Return the case of the last `rows` rows of each of several sequences.

    contexts: their tokens. dtype: of the KV cache. num_shared: keys of the prefix that every four sequences
    share. Their bytes are counted once.
    """
    batch, least, most = len(contexts), min(contexts), max(contexts)
    num_keys = sum(contexts) - (batch - -(-batch // MAX_COMPANIONS.value)) * num_shared
    kv_bytes = num_keys * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    row_size = spec.num_heads * spec.head_dim
    lengths = f"{most}" if least == most else f"{least} to {most}"
    return Case(
        kernel=f"attention{KV_NAMES[dtype]}",
        shape=f"batch {batch}, {lengths} keys" + (f", {num_shared} of them shared" if num_shared else ""),
        num_rows=batch * rows,
        num_bytes=kv_bytes + 2 * batch * rows * row_size * ITEMSIZE,
        num_flops=4 * rows * sum(contexts) * row_size,
        prepare=partial(prepare_decode, spec, contexts, rows, device, dtype, num_shared),
    )


def prefill_case(spec: Attention, num_tokens: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Return the case of a whole prompt."""
    kernel, shape = f"prefill attention{KV_NAMES[dtype]}", f"{num_tokens} tokens"
    prepare = partial(prepare_prefill, spec, num_tokens, device, dtype)
    return rows_case(kernel, shape, spec, 0, num_tokens, dtype, prepare)


def chunk_case(
    spec: Attention,
    num_before: int,
    num_rows: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Return the case of a chunk of `num_rows` tokens behind `num_before` others, summed as decoding does."""
    kernel, shape = f"exact prefill attention{KV_NAMES[dtype]}", f"{num_rows} tokens behind {num_before}"
    prepare = partial(prepare_chunk, spec, num_before, num_rows, device, dtype)
    return rows_case(kernel, shape, spec, num_before, num_rows, dtype, prepare)


def rows_case(
    kernel: str,
    shape: str,
    spec: Attention,
    num_before: int,
    num_rows: int,
    dtype: torch.dtype,
    prepare: Callable[[], Prepared],
) -> Case:
    """Return the case of a prompt's tokens behind `num_before` others. A token sees half of them on average,
    and all others."""
    row_size, num_keys = spec.num_heads * spec.head_dim, num_before + num_rows
    kv_bytes = num_keys * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    return Case(
        kernel=kernel,
        shape=shape,
        num_rows=num_rows,
        num_bytes=kv_bytes + 2 * num_rows * row_size * ITEMSIZE,
        num_flops=4 * row_size * num_rows * (num_before + num_rows / 2),
        prepare=prepare,
    )


def prepare_decode(
    spec: Attention,
    contexts: Sequence[int],
    rows: int,
    device: str,
    dtype: torch.dtype,
    num_shared: int = 0,
) -> Prepared:
    """Make the inputs of `decode_case`: random queries, keys and values, and the attention plan."""
    batch, most = len(contexts), max(contexts)
    caches, block_table = cache_of(spec, most, batch, device, dtype)
    first = torch.arange(batch, device=device) // MAX_COMPANIONS.value * MAX_COMPANIONS.value
    num_blocks = num_shared // BLOCK_SIZE
    block_table[:, :num_blocks] = block_table[first, :num_blocks]
    slot = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(rows)
    ends = torch.tensor(contexts, dtype=torch.int32, device=device)
    position = (ends[:, None] + torch.arange(-rows, 0, dtype=torch.int32, device=device)).flatten()
    plan = AttentionPlan(batch, most, Partitions(), torch.device(device))
    scratch = AttentionScratch.allocate(
        plan, num_kv_heads=spec.num_kv_heads, num_rows=rows, group=spec.group, head_dim=spec.head_dim
    )
    planned = PlannedRows(slot, position, rows)
    plan_attention(planned, plan, BlockTable(block_table, BLOCK_SIZE), spec.group)
    query = torch.randn(batch * rows, spec.num_heads, spec.head_dim, device=device).to(torch.bfloat16)
    out = torch.empty_like(query)
    layers = [LayerAttention(query=query, out=out, kv=kv, block_table=block_table) for kv in caches]
    options = attention_config(spec.head_dim, dtype, plan.partitions.tile)

    def step() -> None:
        for layer in layers:
            paged_attention(layer, planned, scratch, options)

    return Prepared(step, len(caches), (out,))


def prepare_prefill(spec: Attention, num_tokens: int, device: str, dtype: torch.dtype) -> Prepared:
    """Make the inputs of `prefill_case`: random queries, keys and values, and the table of tiles."""
    attention = prefill_attention_config(spec.head_dim, torch.bfloat16)
    layers, tiles = chunk_of(spec, 0, num_tokens, attention.tile_rows, device, dtype)

    def step() -> None:
        for layer in layers:
            prefill_attention(layer, tiles, attention)

    return Prepared(step, len(layers), (layers[0].out,))


def prepare_chunk(
    spec: Attention, num_before: int, num_rows: int, device: str, dtype: torch.dtype
) -> Prepared:
    """Make the inputs of `chunk_case`, as those of `prefill_case`."""
    attention = exact_prefill_config(spec.head_dim, torch.bfloat16, num_rows)
    layers, tiles = chunk_of(spec, num_before, num_rows, attention.tile_rows, device, dtype)

    def step() -> None:
        for layer in layers:
            exact_prefill_attention(layer, tiles, attention, Partitions())

    return Prepared(step, len(layers), (layers[0].out,))


def chunk_of(
    spec: Attention,
    num_before: int,
    num_rows: int,
    tile_rows: int,
    device: str,
    dtype: torch.dtype,
) -> tuple[list[LayerAttention], Tensor]:
    """Return several layers with random keys, values and queries of a chunk, and its tiles of rows."""
    caches, block_table = cache_of(spec, num_before + num_rows, 1, device, dtype)
    found = np.empty((-(-num_rows // tile_rows), TILE_FIELDS), np.int32)
    prefill_tiles([(0, num_before, num_rows)], tile_rows, found)
    query = torch.randn(num_rows, spec.num_heads, spec.head_dim, device=device).to(torch.bfloat16)
    out = torch.empty_like(query)
    layers = [LayerAttention(query=query, out=out, kv=kv, block_table=block_table) for kv in caches]
    return layers, torch.from_numpy(found).to(device)


def cache_of(
    spec: Attention, context: int, batch: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[LayerKV], Tensor]:
    """Return keys and values of several layers in `dtype`, those of e4m3 with scales of 1, and the block
    table of sequences with shuffled blocks."""
    num_blocks = -(-context // BLOCK_SIZE)
    shape = (batch * num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    layers = num_copies(
        2 * batch * num_blocks * spec.num_kv_heads * BLOCK_SIZE * spec.head_dim * dtype.itemsize
    )

    def random() -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_().to(dtype)

    table = torch.randperm(batch * num_blocks).to(device, torch.int32).view(batch, num_blocks)
    scale = torch.ones(spec.num_kv_heads, device=device) if dtype == E4M3 else None
    return [LayerKV(random(), random(), scale, scale) for _ in range(layers)], table
