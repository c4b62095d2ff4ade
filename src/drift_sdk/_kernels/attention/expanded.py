"""Keys and values of heads from latents, for attention of prompts that is not absorbed.

    key[p, h] = (K[h] latent[p], rotated[p])          value[p, h] = V[h] latent[p]

Prompts attend to these with `exact_prefill_attention`: for GLM-4.7-Flash 512 multiply-adds for each head, row
and key in place of 1,088. They are computed again for each chunk of a prompt and each layer, in memory that
all layers share. Rows of other sequences, and the number of rows of a step, have no influence on their bits.

The keys of a step lie in parts of PART_KEYS positions of one sequence each, in blocks of BLOCK_KEYS. The
parts of a sequence follow one another, so its keys are found from the first of its blocks on. What lies
behind its last key is zero.

Order of summation: ascending elements of the latent, in one slice; tensor cores sum in float32, and the
result is rounded once.

Grid: programs that go through tiles: PART_KEYS keys, and TILE_COLUMNS rows of a head's matrix. The number
of parts is known on the device alone, so the grid does not depend on it.

Bytes: for each part and head, its latents and the head's matrix, from the L2 cache after the first, and the
results, num_heads * head_dim * 2 elements a position. Flops: 2 * latent_dim * num_heads * (plain_dim +
output_dim) a position: for GLM-4.7-Flash 9.2 million, which for a chunk of 2,048 rows is a twentieth of what
attention takes.

Dependent launch: a program waits before it reads anything, and then permits its dependents to start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerKV, padded_size
from drift_sdk._kernels.launch.arguments import cdiv, check_rows, check_tensor
from drift_sdk._kernels.launch.gpu_limits import gpu_limits
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)

PART_KEYS = 128
"""Keys of a part: EXPANDED_TILE of steps.py, in which the scheduler counts them."""
PART_FIELDS = 3
"""Numbers of a part: slot, first position, number of keys."""
BLOCK_KEYS = 64
"""Keys of a block of expanded keys and values."""
TILE_COLUMNS, TILE_INNER = 64, 64
"""Rows of a head's matrix, and elements of latents, of a tile."""
NUM_STAGES, NUM_WARPS, PROGRAMS_PER_MULTIPROCESSOR = 3, 8, 2


def part_words(num_keys: int) -> int:
    """Words of the parts of a step with so many expanded keys at most."""
    return 1 + PART_FIELDS * (num_keys // PART_KEYS)


def fill_parts(sequences: Sequence[tuple[int, int]], out: npt.NDArray[np.int32]) -> list[int]:
    """Cut the keys of sequences into parts: the number of parts, then the fields of each.

    sequences: (slot, number of keys) each. out: int32 [part_words]. Returns the first block of each sequence.
    Raises ValueError if they do not fit.
    """
    counts = [-(-num_keys // PART_KEYS) for _, num_keys in sequences]
    if part_words(sum(counts) * PART_KEYS) > len(out):
        raise ValueError(f"out: {len(out)} words: expected {part_words(sum(counts) * PART_KEYS)} or more")

    out[0] = sum(counts)
    parts, first, blocks = out[1:].reshape(-1, PART_FIELDS), 0, []
    for (slot, num_keys), count in zip(sequences, counts, strict=True):
        starts = np.arange(count) * PART_KEYS
        part = parts[first : first + count]
        part[:, 0], part[:, 1] = slot, starts
        part[:, 2] = np.minimum(num_keys - starts, PART_KEYS)
        blocks.append(first * (PART_KEYS // BLOCK_KEYS))
        first += count
    return blocks


@kernel
def _expand_latents(
    latents_ptr,  # [num_blocks, 1, KV_BLOCK_SIZE, LATENT_DIM + ROTARY_DIM], storage type
    block_table_ptr,  # [S, max_blocks] int32; table_stride from slot to slot
    parts_ptr,  # [1 + num_parts * FIELDS] int32, see `fill_parts`
    weight_ptr,  # [NUM_HEADS, PLAIN_DIM + OUTPUT_DIM, LATENT_DIM], storage type
    keys_ptr,  # [blocks, NUM_HEADS, BLOCK_KEYS, HEAD_DIM], storage type
    values_ptr,  # as keys_ptr
    table_stride,
    NUM_HEADS: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    OUTPUT_DIM: tl.constexpr,
    PADDED_ROTARY: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i: tiles i, i + NUM_PROGRAMS, ... of all parts, heads and tiles of columns."""
    HEAD_DIM: tl.constexpr = PLAIN_DIM + ROTARY_DIM
    ROW_SIZE: tl.constexpr = LATENT_DIM + ROTARY_DIM
    NUM_COLUMNS: tl.constexpr = PLAIN_DIM + OUTPUT_DIM
    NUM_TILES: tl.constexpr = (NUM_COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    key, inner = tl.arange(0, TILE_KEYS), tl.arange(0, TILE_INNER)
    rotary = tl.arange(0, PADDED_ROTARY)
    wait_for_producers(PDL)
    start_dependents(PDL)
    num_tiles = tl.load(parts_ptr) * (NUM_HEADS * NUM_TILES)
    for index in range(tl.program_id(0), num_tiles, NUM_PROGRAMS):
        part = index // (NUM_HEADS * NUM_TILES)
        head = index // NUM_TILES % NUM_HEADS
        tile = index % NUM_TILES
        column = tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        fields_ptr = parts_ptr + 1 + part * FIELDS
        slot = tl.load(fields_ptr).to(tl.int64)
        position = tl.load(fields_ptr + 1) + key
        is_key = key < tl.load(fields_ptr + 2)
        block_ptrs = block_table_ptr + slot * table_stride + position // KV_BLOCK_SIZE
        block = tl.load(block_ptrs, mask=is_key, other=0).to(tl.int64)
        row_ptrs = latents_ptr + (block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE)[:, None] * ROW_SIZE
        weight_ptrs = weight_ptr + (head * NUM_COLUMNS + column)[None, :] * LATENT_DIM
        total = tl.zeros((TILE_KEYS, TILE_COLUMNS), tl.float32)
        for k in tl.range(0, LATENT_DIM, TILE_INNER, num_stages=NUM_STAGES):
            element = k + inner
            is_element = element < LATENT_DIM
            row_mask = is_key[:, None] & is_element[None, :]
            latents = tl.load(row_ptrs + element[None, :], mask=row_mask, other=0.0)
            column_mask = is_element[:, None] & (column < NUM_COLUMNS)[None, :]
            weights = tl.load(weight_ptrs + element[:, None], mask=column_mask, other=0.0)
            total = tl.dot(latents, weights, total, input_precision="ieee")

        place = part.to(tl.int64) * TILE_KEYS + key
        place = (place // BLOCK_KEYS * NUM_HEADS + head) * BLOCK_KEYS + place % BLOCK_KEYS
        result = total.to(keys_ptr.dtype.element_ty)
        key_ptrs = keys_ptr + place[:, None] * HEAD_DIM
        is_plain = (column < PLAIN_DIM)[None, :] & (key >= 0)[:, None]
        tl.store(key_ptrs + column[None, :], result, mask=is_plain)
        is_value = ((column >= PLAIN_DIM) & (column < NUM_COLUMNS))[None, :] & (key >= 0)[:, None]
        value_ptrs = values_ptr + place[:, None] * OUTPUT_DIM - PLAIN_DIM
        tl.store(value_ptrs + column[None, :], result, mask=is_value)
        if tile == 0:
            is_rotary = (rotary < ROTARY_DIM)[None, :] & (key >= 0)[:, None]
            rotated = tl.load(
                row_ptrs + LATENT_DIM + rotary[None, :], mask=is_rotary & is_key[:, None], other=0.0
            )
            tl.store(key_ptrs + PLAIN_DIM + rotary[None, :], rotated, mask=is_rotary)


def expand_latents(
    kv: LayerKV, block_table: Tensor, parts: Tensor, weight: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Write the keys and values of all parts.

    kv: latents of a layer, without scales. block_table: [S, max_blocks] int32. parts: see `fill_parts`.
    weight: [num_heads, plain_dim + output_dim, latent_dim], matrices of keys before those of values.
    keys: [num_blocks, num_heads, BLOCK_KEYS, plain_dim + rotary_dim], with room for all parts. values: so,
    with output_dim. All in the storage type. Raises ValueError for another shape, type or layout.
    """
    (num_heads, num_columns, latent_dim), dtype = weight.shape, weight.dtype
    rotary_dim, output_dim = kv.keys.shape[-1] - kv.latent_dim, values.shape[-1]
    plain_dim, num_blocks = num_columns - output_dim, keys.shape[0]
    check_tensor("weight", weight, (num_heads, num_columns, kv.latent_dim), dtype)
    check_tensor("latents", kv.keys, (kv.keys.shape[0], 1, kv.block_size, latent_dim + rotary_dim), dtype)
    check_tensor("keys", keys, (num_blocks, num_heads, BLOCK_KEYS, plain_dim + rotary_dim), dtype)
    check_tensor("values", values, (num_blocks, num_heads, BLOCK_KEYS, output_dim), dtype)
    check_rows("block_table", block_table, block_table.shape, torch.int32)
    check_tensor("parts", parts, (part_words(num_blocks * BLOCK_KEYS),), torch.int32)
    num_tiles = num_blocks * BLOCK_KEYS // PART_KEYS * num_heads * cdiv(num_columns, TILE_COLUMNS)
    num_programs = min(num_tiles, gpu_limits().num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR)
    _expand_latents[(num_programs,)](
        latents_ptr=kv.keys,
        block_table_ptr=block_table,
        parts_ptr=parts,
        weight_ptr=weight,
        keys_ptr=keys,
        values_ptr=values,
        table_stride=block_table.stride(0),
        NUM_HEADS=num_heads,
        PLAIN_DIM=plain_dim,
        ROTARY_DIM=rotary_dim,
        LATENT_DIM=latent_dim,
        OUTPUT_DIM=output_dim,
        PADDED_ROTARY=padded_size(rotary_dim),
        KV_BLOCK_SIZE=kv.block_size,
        BLOCK_KEYS=BLOCK_KEYS,
        FIELDS=PART_FIELDS,
        TILE_KEYS=PART_KEYS,
        TILE_COLUMNS=TILE_COLUMNS,
        TILE_INNER=TILE_INNER,
        NUM_PROGRAMS=num_programs,
        NUM_STAGES=NUM_STAGES,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )
