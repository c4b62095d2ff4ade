"""Cases of latent attention: decode and verify rows over long and short contexts, chunks of prompts, absorbed
and expanded, and the products with the matrices of heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.attention.decode import AttentionScratch
from drift_sdk._kernels.attention.exact_prefill import exact_prefill_config
from drift_sdk._kernels.attention.expanded import BLOCK_KEYS, PART_KEYS, fill_parts, part_words
from drift_sdk._kernels.attention.latent import latent_attention, latent_prompt_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import AttentionPlan, PlannedRows, plan_attention
from drift_sdk._kernels.attention.prefill import TILE_FIELDS, prefill_tiles
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.layers.latent_rows import multiply_heads
from drift_sdk.execution.forward.attention import ExpandedKeys
from drift_sdk.spec.model import LatentAttention
from perf.cases.attention import BATCHES, BLOCK_SIZE, CHUNKS, CONTEXTS, ROWS_PER_SEQUENCE
from perf.cases.case import Case, Prepared, num_copies
from perf.cases.gemm import ITEMSIZE
from perf.harness.shapes import Model

__all__ = ["latent_cases"]

TILE_ROWS = 64
"""Rows of a chunk's tiles."""


def latent_cases(model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str) -> Iterator[Case]:
    """Yield the cases of the sizes of `attention_cases`, in bfloat16, and for each number of rows those of
    the two products; none for a model without latents. table has no influence."""
    spec = model.spec.attention
    if not isinstance(spec, LatentAttention):
        return

    for context in CONTEXTS:
        for batch in BATCHES:
            for rows in ROWS_PER_SEQUENCE:
                yield decode_case(spec, context, batch, rows, device)
    for num_before, num_rows in CHUNKS:
        yield chunk_case(spec, num_before, num_rows, device)
        if spec.query_dim == spec.output_dim:
            yield expanded_case(spec, num_before, num_rows, device)
    for num_rows in row_counts:
        for columns, inner in ((spec.latent_dim, spec.plain_dim), (spec.output_dim, spec.latent_dim)):
            yield product_case(spec.num_heads, columns, inner, num_rows, device)


def row_flops(spec: LatentAttention) -> int:
    """Operations of a row and a key that it sees."""
    return 2 * spec.num_heads * (spec.head_dim + spec.value_dim)


def row_bytes(spec: LatentAttention) -> int:
    """Bytes of a row's queries and outputs."""
    return ITEMSIZE * spec.num_heads * (spec.head_dim + spec.value_dim)


def decode_case(spec: LatentAttention, context: int, batch: int, rows: int, device: str) -> Case:
    """Return the case of the last `rows` rows of each of `batch` sequences."""
    return Case(
        kernel="latent attention",
        shape=f"batch {batch}, {context} keys",
        num_rows=batch * rows,
        num_bytes=batch * (ITEMSIZE * context * spec.head_dim + rows * row_bytes(spec)),
        num_flops=row_flops(spec) * rows * batch * context,
        prepare=partial(prepare_decode, spec, context, batch, rows, device),
    )


def chunk_case(spec: LatentAttention, num_before: int, num_rows: int, device: str) -> Case:
    """Return the case of a chunk of `num_rows` tokens behind `num_before` others."""
    num_keys = num_before + num_rows
    return Case(
        kernel="latent prompt attention",
        shape=f"{num_rows} tokens behind {num_before}",
        num_rows=num_rows,
        num_bytes=ITEMSIZE * num_keys * spec.head_dim + num_rows * row_bytes(spec),
        num_flops=row_flops(spec) * num_rows * (num_before + num_rows / 2),
        prepare=partial(prepare_chunk, spec, num_before, num_rows, device),
    )


def expanded_case(spec: LatentAttention, num_before: int, num_rows: int, device: str) -> Case:
    """Return the case of such a chunk to expanded keys, their expansion included."""
    num_keys = num_before + num_rows
    matrices = spec.plain_dim + spec.output_dim
    num_elements = num_keys * spec.head_dim + spec.num_heads * (
        spec.latent_dim * matrices + 2 * num_rows * spec.output_dim
    )
    flops_of_key = spec.latent_dim * matrices
    flops_of_row = (spec.query_dim + spec.output_dim) * (num_before + num_rows / 2)
    return Case(
        kernel="expanded prompt attention",
        shape=f"{num_rows} tokens behind {num_before}",
        num_rows=num_rows,
        num_bytes=ITEMSIZE * num_elements,
        num_flops=2 * spec.num_heads * (num_keys * flops_of_key + num_rows * flops_of_row),
        prepare=partial(prepare_expanded, spec, num_before, num_rows, device),
    )


def product_case(num_heads: int, columns: int, inner: int, num_rows: int, device: str) -> Case:
    """Return the case of a product with a matrix of each head."""
    elements = num_heads * (columns * inner + num_rows * (columns + inner))
    return Case(
        kernel="product of heads",
        shape=f"{num_heads} x {columns} x {inner}",
        num_rows=num_rows,
        num_bytes=ITEMSIZE * elements,
        num_flops=2 * num_rows * num_heads * columns * inner,
        prepare=partial(prepare_product, num_heads, columns, inner, num_rows, device),
    )


def prepare_decode(spec: LatentAttention, context: int, batch: int, rows: int, device: str) -> Prepared:
    layers = layers_of(spec, context, batch, batch * rows, device)
    slot = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(rows)
    position = torch.arange(context - rows, context, dtype=torch.int32, device=device).repeat(batch)
    planned = PlannedRows(slot, position, rows)
    plan = AttentionPlan(batch, context, layers[0].partitions, torch.device(device))
    plan_attention(planned, plan)
    scratch = AttentionScratch.allocate(
        plan, num_kv_heads=1, num_rows=rows, group=spec.num_heads, head_dim=spec.value_dim
    )

    def step() -> None:
        for layer in layers:
            latent_attention(layer, planned, scratch)

    return Prepared(step, len(layers), (layers[0].out,))


def prepare_chunk(spec: LatentAttention, num_before: int, num_rows: int, device: str) -> Prepared:
    layers = layers_of(spec, num_before + num_rows, 1, num_rows, device)
    found = np.empty((-(-num_rows // TILE_ROWS), TILE_FIELDS), np.int32)
    prefill_tiles([(0, num_before, num_rows)], TILE_ROWS, found)
    tiles = torch.from_numpy(found).to(device)

    def step() -> None:
        for layer in layers:
            latent_prompt_attention(layer, tiles, TILE_ROWS, layer.partitions)

    return Prepared(step, len(layers), (layers[0].out,))


def prepare_expanded(spec: LatentAttention, num_before: int, num_rows: int, device: str) -> Prepared:
    num_keys = num_before + num_rows
    layers = layers_of(spec, num_keys, 1, num_rows, device)
    config = exact_prefill_config(spec.output_dim, torch.bfloat16)
    num_parts = -(-num_keys // PART_KEYS)
    parts = np.empty(part_words(num_parts * PART_KEYS), np.int32)
    (block,) = fill_parts([(0, num_keys)], parts)
    found = np.empty((-(-num_rows // config.tile_rows), TILE_FIELDS), np.int32)
    prefill_tiles([(block, num_before, num_rows)], config.tile_rows, found)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(torch.bfloat16)

    weight = random(spec.num_heads, spec.plain_dim + spec.output_dim, spec.latent_dim)
    num_blocks = num_parts * PART_KEYS // BLOCK_KEYS
    keys, values = (random(num_blocks, spec.num_heads, BLOCK_KEYS, spec.output_dim) for _ in range(2))
    expanded = ExpandedKeys(
        tiles=torch.from_numpy(found).to(device),
        rows=torch.ones(num_rows, dtype=torch.int32, device=device),
        parts=torch.from_numpy(parts).to(device),
        config=config,
        kv=LayerKV(keys, values),
        blocks=torch.arange(num_blocks, dtype=torch.int32, device=device)[:, None],
    )
    query, out = (
        random(num_rows, spec.num_heads, spec.query_dim),
        random(num_rows, spec.num_heads, spec.output_dim),
    )

    def step() -> None:
        for layer in layers:
            expanded.attend(replace(layer, query=query, out=out), weight)

    return Prepared(step, len(layers), (out,))


def prepare_product(num_heads: int, columns: int, inner: int, num_rows: int, device: str) -> Prepared:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(torch.bfloat16)

    weights = [
        random(num_heads, columns, inner) for _ in range(num_copies(ITEMSIZE * num_heads * columns * inner))
    ]
    x, out = random(num_rows, num_heads, inner), random(num_rows, num_heads, columns)

    def step() -> None:
        for weight in weights:
            multiply_heads(x, weight, out)

    return Prepared(step, len(weights), (out,))


def layers_of(
    spec: LatentAttention, context: int, batch: int, num_rows: int, device: str
) -> list[LayerAttention]:
    """Return several layers with random latents, in shuffled blocks, and queries. They share the output."""
    num_blocks = batch * -(-context // BLOCK_SIZE)
    shape = num_blocks, 1, BLOCK_SIZE, spec.head_dim
    table = torch.randperm(num_blocks).to(device, torch.int32).view(batch, -1)
    query = torch.randn(num_rows, spec.num_heads, spec.head_dim, device=device).to(torch.bfloat16)
    out = torch.empty(num_rows, spec.num_heads, spec.value_dim, dtype=torch.bfloat16, device=device)
    copies = num_copies(ITEMSIZE * num_blocks * BLOCK_SIZE * spec.head_dim)
    caches = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(copies))
    return [
        LayerAttention(
            query=query,
            out=out,
            kv=LayerKV(keys, keys, latent_dim=spec.latent_dim),
            block_table=table,
            scale=spec.scale,
        )
        for keys in caches
    ]
