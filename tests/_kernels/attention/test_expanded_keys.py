"""Keys and values expanded from latents: against float64, and bit for bit wherever their sequence lies; and
attention to them against absorbed attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerances import assert_near

from drift_sdk._kernels.attention.exact_prefill import exact_prefill_attention, exact_prefill_config
from drift_sdk._kernels.attention.expanded import (
    BLOCK_KEYS,
    PART_KEYS,
    expand_latents,
    fill_parts,
    part_words,
)
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.prefill import TILE_FIELDS, prefill_tiles
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk.steps import EXPANDED_TILE

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("steady_dots")]

IS_GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16) if IS_GPU else (torch.float32,)
SHAPES = [(3, 12, 8, 24), (1, 20, 4, 70), (2, 32, 32, 64)]
"""Heads, plain and rotated elements of a key, elements of a latent. Values have as many as keys."""
SEQUENCES = [[(2, 1)], [(0, PART_KEYS)], [(1, PART_KEYS + 1), (0, 17), (2, 2 * PART_KEYS - 1)]]
"""Slot and number of keys."""
MAX_KEYS = 3 * PART_KEYS


class Case:
    """Latents of three slots in shuffled blocks, whose places that no key has are NaN."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, *, block_size: int = 16
    ) -> None:
        self.num_heads, self.plain_dim, self.rotary_dim, self.latent_dim = shape
        self.head_dim = self.plain_dim + self.rotary_dim
        generator = torch.Generator().manual_seed(sum(shape))
        num_blocks = MAX_KEYS // block_size
        self.latents = torch.randn(3, MAX_KEYS, self.latent_dim + self.rotary_dim, generator=generator)
        self.latents = self.latents.to(device, dtype)
        self.weight = torch.randn(
            self.num_heads, self.plain_dim + self.head_dim, self.latent_dim, generator=generator
        ).to(device, dtype)
        self.table = torch.randperm(3 * num_blocks, generator=generator).view(3, num_blocks).int()
        self.block_size, self.dtype, self.device = block_size, dtype, device

    def cache(self, num_keys: list[int]) -> LayerKV:
        """The latents of the first keys of each slot, with NaN behind them."""
        kept = torch.full_like(self.latents, torch.nan)
        for slot, number in enumerate(num_keys):
            kept[slot, :number] = self.latents[slot, :number]
        rows = torch.empty_like(kept).view(-1, 1, self.block_size, kept.shape[-1])
        rows[self.table.flatten().long().to(self.device), 0] = kept.view(-1, *rows.shape[2:])
        return LayerKV(rows, rows, latent_dim=self.latent_dim)

    def expand(self, sequences: list[tuple[int, int]]) -> tuple[LayerKV, list[int]]:
        """Keys and values in memory of NaN, and the first block of each sequence."""
        num_keys = [0, 0, 0]
        for slot, number in sequences:
            num_keys[slot] = number
        words = np.full(part_words(6 * PART_KEYS), 7, np.int32)
        blocks = fill_parts(sequences, words)
        shape = 6 * PART_KEYS // BLOCK_KEYS, self.num_heads, BLOCK_KEYS, self.head_dim
        keys, values = (torch.full(shape, torch.nan, dtype=self.dtype, device=self.device) for _ in range(2))
        parts = torch.from_numpy(words).to(self.device)
        table = self.table.to(self.device)
        expand_latents(self.cache(num_keys), table, parts, self.weight, keys, values)
        return LayerKV(keys, values), blocks

    def expected(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all heads [MAX_KEYS, num_heads, head_dim] in float64."""
        latent, rotated = self.latents[slot].double().split((self.latent_dim, self.rotary_dim), -1)
        both = torch.einsum("kl,hnl->khn", latent, self.weight.double())
        rotated = rotated[:, None].expand(-1, self.num_heads, -1)
        return torch.cat((both[..., : self.plain_dim], rotated), -1), both[..., self.plain_dim :]


def rows_of(cache: torch.Tensor, block: int, num_keys: int) -> torch.Tensor:
    """[num_keys, num_heads, head_dim] from a block on."""
    return cache[block:].transpose(1, 2).flatten(0, 1)[:num_keys]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("sequences", SEQUENCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_and_values_are_near_float64(
    shape: tuple[int, int, int, int],
    sequences: list[tuple[int, int]],
    block_size: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    case = Case(shape, dtype, device, block_size=block_size)
    found, blocks = case.expand(sequences)
    num_written = 0
    for (slot, num_keys), block in zip(sequences, blocks, strict=True):
        num_parts = -(-num_keys // PART_KEYS)
        for cache, expected in zip((found.keys, found.values), case.expected(slot), strict=True):
            rows = rows_of(cache, block, num_parts * PART_KEYS)
            assert_near(
                rows[:num_keys],
                expected[:num_keys],
                inner=shape[3],
                num_roundings=dtype != torch.float32,
            )
            assert not rows[num_keys:].any(), "what lies behind the last key"
        num_written += num_parts * PART_KEYS // BLOCK_KEYS
    assert found.keys[num_written:].isnan().all() and found.values[num_written:].isnan().all()


def test_bits_do_not_depend_on_other_sequences_or_the_number_of_keys(device: str) -> None:
    case = Case(SHAPES[0], DTYPES[-1], device)
    alone, (block,) = case.expand([(1, 200)])
    beside, blocks = case.expand([(0, 130), (1, 201)])
    assert blocks == [0, 4]
    for one, other in zip((alone.keys, alone.values), (beside.keys, beside.values), strict=True):
        assert torch.equal(rows_of(one, block, 200), rows_of(other, blocks[1], 200))


def test_the_scheduler_counts_whole_parts() -> None:
    assert PART_KEYS == EXPANDED_TILE


def test_no_sequences_write_nothing(device: str) -> None:
    found, _ = Case(SHAPES[0], DTYPES[-1], device).expand([])
    assert found.keys.isnan().all() and found.values.isnan().all()


def test_parts_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="out: 4 words: expected 7 or more"):
        fill_parts([(0, PART_KEYS + 1)], np.empty(part_words(PART_KEYS), np.int32))


def test_attention_to_expanded_keys_is_near_absorbed_attention(device: str) -> None:
    """Two chunks behind other tokens of their sequences, which see different blocks."""
    case = Case((2, 12, 20, 24), torch.float32, device)
    chunks = [(1, 150, 30), (2, 0, 17)]
    kv, blocks = case.expand([(slot, start + number) for slot, start, number in chunks])
    tiles = np.empty((8, TILE_FIELDS), np.int32)
    config = exact_prefill_config(case.head_dim, torch.float32)
    first_rows = [3, 40]
    placed = [(block, start, number) for block, (_, start, number) in zip(blocks, chunks, strict=True)]
    prefill_tiles(placed, config.tile_rows, tiles, first_rows)
    query = torch.randn(60, case.num_heads, case.head_dim, device=device)
    out = torch.full_like(query, torch.nan)
    table = torch.arange(len(kv.keys), dtype=torch.int32, device=device)[:, None]
    layer = LayerAttention(query=query, out=out, kv=kv, block_table=table, scale=0.2)
    exact_prefill_attention(layer, torch.from_numpy(tiles).to(device), config, Partitions())
    is_row = torch.zeros(60, dtype=torch.bool)
    of_keys, of_values = case.weight.double().split((case.plain_dim, case.head_dim), dim=1)
    for (slot, start, number), first in zip(chunks, first_rows, strict=True):
        is_row[first : first + number] = True
        latents = case.latents[slot, : start + number].double()
        plain, rotated = query[first : first + number].double().split((case.plain_dim, case.rotary_dim), -1)
        absorbed = torch.cat((torch.einsum("rhp,hpl->rhl", plain, of_keys), rotated), -1)
        scores = 0.2 * torch.einsum("rhl,kl->rhk", absorbed, latents)
        position = torch.arange(start, start + number, device=device)[:, None, None]
        keys = torch.arange(start + number, device=device)
        weights = scores.masked_fill(keys > position, -torch.inf).softmax(-1)
        sums = torch.einsum("rhk,kl->rhl", weights, latents[:, : case.latent_dim])
        expected = torch.einsum("rhl,hol->rho", sums, of_values)
        assert_near(out[first : first + number], expected, inner=start + number, depth=4, magnitude=20.0)
    assert out[~is_row.to(device)].isnan().all()
