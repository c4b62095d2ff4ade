from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import tolerances
import torch
from references.attention import prefill_attention_reference

from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.prefill import (
    PrefillAttentionConfig,
    prefill_attention,
    prefill_attention_config,
    prefill_tiles,
)

pytestmark = pytest.mark.kernel

SMALL = PrefillAttentionConfig(tile_rows=16, tile_keys=16, num_warps=4, num_stages=2)
MAX_KEYS = 96
# Slot, start, number of rows. Starts inside a block, a single row, tiles over two blocks, several tiles.
CHUNKS = [
    [(0, 0, 1)],
    [(2, 0, 3), (0, 37, 17)],
    [(1, 5, 33), (0, 63, 1), (3, 31, 16)],
]
# num_heads, num_kv_heads, head_dim
HEADS = [(3, 3, 64), (9, 3, 16), (4, 1, 80), (8, 1, 8), (2, 1, 256)]


class Prompt:
    """Chunks over a cache in which everything that no row sees is NaN. Queries are parts of wider rows."""

    def __init__(
        self,
        chunks: Sequence[tuple[int, int, int]],
        heads: tuple[int, int, int],
        block_size: int,
        device: str,
        *,
        dtype: torch.dtype = torch.float32,
        window: int = 0,
        has_sinks: bool = False,
        max_keys: int = MAX_KEYS,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.num_rows = sum(chunk[2] for chunk in chunks)
        self.chunks, self.device = chunks, device
        generator = torch.Generator().manual_seed(sum(heads) + block_size)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        num_slots, max_blocks = 4, -(-max_keys // block_size)
        # Block 0 is never written; the table's unused places name it.
        shape = (1 + num_slots * max_blocks, num_kv_heads, block_size, head_dim)
        keys, values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        table = torch.zeros(num_slots, max_blocks, dtype=torch.int32)
        free = (1 + torch.randperm(num_slots * max_blocks, generator=generator)).tolist()
        for slot, start, num_rows in chunks:
            first = max(0, start - window + 1) if window else 0
            for position in range(first, start + num_rows):
                if table[slot, position // block_size] == 0:
                    table[slot, position // block_size] = free.pop()
                place = int(table[slot, position // block_size]), slice(None), position % block_size
                keys[place], values[place] = (random(num_kv_heads, head_dim) for _ in range(2))

        self.keys, self.values = keys.to(device), values.to(device)
        self.block_table = table.to(device)
        width = (num_heads + 2 * num_kv_heads) * head_dim
        rows = torch.full((self.num_rows + 2, width), torch.nan, dtype=dtype, device=device)
        rows[: self.num_rows] = random(self.num_rows, width).to(device)
        self.query = rows[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
        sinks = random(num_heads).to(device) if has_sinks else None
        self.options: dict[str, Any] = {"window": window, "sinks": sinks}

    def run(self, config: PrefillAttentionConfig | None, num_unused: int = 2) -> torch.Tensor:
        """The output of the kernel, or of the reference if config is None. It holds NaN before."""
        tile_rows = 16 if config is None else config.tile_rows
        num_tiles = self.num_rows // tile_rows + len(self.chunks) + num_unused
        tiles = np.full((num_tiles, 4), 2**30, dtype=np.int32)
        prefill_tiles(self.chunks, tile_rows, tiles)
        layer = LayerAttention(
            query=self.query,
            out=torch.full(self.query.shape, torch.nan, dtype=self.query.dtype, device=self.device),
            kv=LayerKV(self.keys, self.values),
            block_table=self.block_table,
            **self.options,
        )
        table = torch.from_numpy(tiles).to(self.device)
        if config is None:
            prefill_attention_reference(layer, table)
        else:
            prefill_attention(layer, table, config)

        assert layer.out[self.num_rows :].isnan().all()
        return layer.out[: self.num_rows]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Probabilities are rounded to the storage type before the product with the values."""
    num_roundings = 0 if found.dtype == torch.float32 else 1
    tolerances.assert_near(found, expected, inner=MAX_KEYS, magnitude=4.0, num_roundings=num_roundings)


@pytest.mark.parametrize(
    ("chunks", "heads", "block_size"),
    [(CHUNKS[i % 3], *shape) for i, shape in enumerate(product(HEADS, [1, 4, 16, 64]))],
)
def test_attention_is_near_the_reference(
    chunks: list[tuple[int, int, int]], heads: tuple[int, int, int], block_size: int, device: str
) -> None:
    prompt = Prompt(chunks, heads, block_size, device)
    assert_near(prompt.run(SMALL), prompt.run(None))


@pytest.mark.parametrize("block_size", [4, 64])
@pytest.mark.parametrize("window", [1, 7, 16, 40, 1000])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_and_sinks_are_near_the_reference(
    window: int, has_sinks: bool, block_size: int, device: str
) -> None:
    prompt = Prompt(CHUNKS[2], (4, 2, 16), block_size, device, window=window, has_sinks=has_sinks)
    assert_near(prompt.run(SMALL), prompt.run(None))


@pytest.mark.parametrize("block_size", [4, 64])
@pytest.mark.parametrize("window", [0, 3, 40])
@pytest.mark.parametrize("first_key", [1, 5])
def test_positions_before_first_key_are_not_read(
    first_key: int, window: int, block_size: int, device: str
) -> None:
    prompt = Prompt([(1, 5, 33), (0, 63, 1), (3, 31, 16)], (4, 2, 16), block_size, device, window=window)
    for position in range(first_key):
        block = prompt.block_table[:, position // block_size].long()
        prompt.keys[block, :, position % block_size] = torch.nan
        prompt.values[block, :, position % block_size] = torch.nan
    prompt.options["first_key"] = first_key
    assert_near(prompt.run(SMALL), prompt.run(None))


def test_a_sink_takes_its_share_of_the_softmax(device: str) -> None:
    prompt = Prompt([(0, 0, 2)], (2, 1, 16), 4, device, has_sinks=True)
    prompt.query[:2] = 0
    prompt.options["sinks"] = torch.tensor([0.0, -100.0], device=device)
    value = prompt.values[prompt.block_table[0, 0], 0]
    output = prompt.run(SMALL)
    torch.testing.assert_close(output[0], torch.stack((value[0] / 2, value[0])))
    torch.testing.assert_close(output[1], torch.stack(((value[0] + value[1]) / 3, (value[0] + value[1]) / 2)))


def test_scale_replaces_that_of_the_head_dim(device: str) -> None:
    prompt = Prompt(CHUNKS[1], (4, 2, 16), 16, device)
    usual = prompt.run(SMALL)
    prompt.options["scale"] = 0.7
    assert_near(prompt.run(SMALL), prompt.run(None))
    assert not torch.allclose(prompt.run(SMALL), usual, atol=1e-2)


@pytest.mark.parametrize("tile", [(32, 16), (16, 32), (64, 64)])
def test_tiles_of_other_sizes_are_near_the_reference(tile: tuple[int, int], device: str) -> None:
    prompt = Prompt(CHUNKS[2], (4, 2, 16), 16, device)
    config = PrefillAttentionConfig(tile_rows=tile[0], tile_keys=tile[1], num_warps=4, num_stages=2)
    assert_near(prompt.run(config), prompt.run(None))


def test_bits_of_a_row_do_not_depend_on_its_chunk(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter multiplies by BLAS, whose order of summation depends on the row; tensor cores' does not.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b).sum(1, dtype=dtype))
    whole = Prompt([(0, 0, 70)], (4, 2, 16), 16, device)
    expected = whole.run(SMALL)
    for start, num_rows in ((69, 1), (33, 37), (5, 20)):
        whole.chunks = [(0, start, num_rows)]
        part = Prompt(whole.chunks, (4, 2, 16), 16, device)
        part.keys, part.values, part.block_table = whole.keys, whole.values, whole.block_table
        part.query[:num_rows] = whole.query[start : start + num_rows]
        assert torch.equal(part.run(SMALL), expected[start : start + num_rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_real_sizes_are_near_the_reference(
    dtype: torch.dtype, head_dim: int, block_size: int, device: str
) -> None:
    chunks = [(0, 1000, 500), (3, 0, 129), (1, 2047, 1), (2, 777, 128)]
    heads = (8, 2, head_dim)
    for options in ({}, {"window": 200, "has_sinks": True}):
        prompt = Prompt(chunks, heads, block_size, device, dtype=dtype, max_keys=2048, **options)
        assert_near(prompt.run(prefill_attention_config(head_dim, dtype)), prompt.run(None))


def test_every_row_is_in_one_tile_and_tiles_with_most_keys_come_first() -> None:
    chunks = [(4, 0, 1), (0, 100, 33), (7, 3, 16), (1, 0, 250)]
    out = np.full((25, 4), 2**30, dtype=np.int32)
    num_tiles = prefill_tiles(chunks, 16, out)
    assert num_tiles == 1 + 3 + 1 + 16
    rows: dict[int, tuple[int, int]] = {}
    for slot, first_row, num_rows, position in out[:num_tiles].tolist():
        assert 1 <= num_rows <= 16
        for row in range(num_rows):
            assert first_row + row not in rows
            rows[first_row + row] = slot, position + row

    expected = [(slot, start + row) for slot, start, num_rows in chunks for row in range(num_rows)]
    assert [rows[row] for row in range(300)] == expected
    num_keys = out[:num_tiles, 2] + out[:num_tiles, 3]
    assert (np.diff(num_keys) <= 0).all()
    assert (out[num_tiles:, 0] == -1).all()


def test_tiles_that_do_not_fit_are_rejected() -> None:
    out = np.zeros((3, 4), dtype=np.int32)
    assert prefill_tiles([], 16, out) == 0
    assert out[:, 0].tolist() == [-1, -1, -1]
    assert prefill_tiles([(0, 0, 33)], 16, out) == 3
    with pytest.raises(ValueError, match="out: room for 3 tiles: expected 4 or more"):
        prefill_tiles([(0, 0, 33), (1, 0, 1)], 16, out)


def test_errors_name_the_argument(device: str) -> None:
    prompt = Prompt([(0, 0, 2)], (4, 2, 16), 4, device)
    prompt.options["window"] = -1
    with pytest.raises(ValueError, match="window=-1: expected 0"):
        prompt.run(SMALL)

    prompt.options |= {"window": 0, "first_key": 16}
    with pytest.raises(ValueError, match="first_key=16: expected 0 to 15"):
        prompt.run(SMALL)

    prompt = Prompt([(0, 0, 2)], (4, 2, 16), 4, device)
    prompt.values = prompt.values.half()
    with pytest.raises(ValueError, match=r"values: .* torch.float16: expected .* torch.float32"):
        prompt.run(SMALL)

    prompt = Prompt([(0, 0, 2)], (4, 3, 16), 4, device)
    with pytest.raises(ValueError, match="num_heads=4: expected a multiple of num_kv_heads=3"):
        prompt.run(SMALL)

    prompt = Prompt([(0, 0, 2)], (4, 2, 16), 3, device)
    with pytest.raises(ValueError, match="block_size=3: expected a power of two"):
        prompt.run(SMALL)

    prompt = Prompt([(0, 0, 2)], (4, 2, 16), 4, device)
    prompt.query = prompt.query.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="query: strides .* heads side by side"):
        prompt.run(SMALL)
