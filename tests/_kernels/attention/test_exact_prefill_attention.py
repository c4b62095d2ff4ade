"""Prompts in decoding's order of summation: against float64, and bit for bit against decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tolerances
import torch
from msgspec.structs import replace
from order_probe import expected_sum, probe_row
from prompt_chunks import Prompt
from slow_cases import slow_after, slow_rows_after

from drift_sdk._kernels.attention import exact_prefill
from drift_sdk._kernels.attention.exact_prefill import (
    ExactPrefillConfig,
    exact_prefill_config,
    wide_prefill_attention,
)
from drift_sdk._kernels.attention.softmax import WIDE_HEAD, Partitions

pytestmark = pytest.mark.kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16) if torch.cuda.is_available() else (torch.float32,)
SMALL = ExactPrefillConfig(tile_rows=16, num_warps=4, num_stages=2, narrow_stages=2)
SMALL_PARTITIONS = Partitions(narrow=32, narrow_end=64, num_doublings=2, tile=16)
HEADS = [(3, 3, 64), (4, 1, 80), (8, 2, 16), (2, 1, 264)]
# Slot, position of the first row, rows: a single row, chunks that start inside a tile, several tiles of rows,
# ends on a partition's border and behind it, partitions of every width before the diagonal.
CHUNKS = [
    [(0, 0, 1)],
    [(2, 0, 64), (0, 37, 17)],
    [(1, 5, 60), (0, 63, 1), (3, 127, 50)],
    [(0, 383, 18)],
]
MAX_KEYS = 448


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", slow_after(1, [8, 64]))
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_equals_float64(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, device: str
) -> None:
    for chunks in CHUNKS:
        prompt = Prompt(chunks, heads, block_size, device, dtype, MAX_KEYS)
        tolerances.assert_near(
            prompt.exact(SMALL, SMALL_PARTITIONS),
            prompt.expected(),
            inner=max(start + num_rows for _, start, num_rows in chunks),
            magnitude=prompt.values.nan_to_num().abs().max().item(),
            num_roundings=0 if dtype == torch.float32 else 1,
            name=f"{heads} {chunks}",
        )


@pytest.mark.parametrize("head_dim", [16, 264])
@pytest.mark.parametrize(
    ("window", "has_sinks"),
    slow_rows_after(3, [(0, True), (9, False), (300, False), (0, False), (40, True)]),
)
def test_windows_and_sinks_have_the_bits_of_decoding(
    window: int, has_sinks: bool, head_dim: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter multiplies by BLAS, whose order of summation may vary. Tensor cores' does not."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b).sum(1, dtype=dtype))
    options: dict[str, Any] = {"window": window, "has_sinks": has_sinks}
    chunks = [(0, 0, 3), (3, 250, 15)]
    prompt = Prompt(chunks, (2, 1, head_dim), 64, device, torch.float32, MAX_KEYS, **options)
    found = prompt.exact(SMALL, SMALL_PARTITIONS)
    tolerances.assert_near(found, prompt.expected(), inner=265, magnitude=8.0)
    for rows_per_sequence, num_programs in ((1, 4), (3, 10)):
        assert torch.equal(prompt.decoded(rows_per_sequence, SMALL_PARTITIONS, num_programs), found)


def test_parts_of_a_tile_and_shares_of_values_have_the_bits_of_others(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of wide heads, whose programs divide tiles of more than 32 rows."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b).sum(1, dtype=dtype))
    chunks = [(0, 3, 5), (1, 60, 43), (2, 0, 33)]
    prompt = Prompt(chunks, (2, 1, 272), 16, device, torch.float32, MAX_KEYS)
    expected = prompt.exact(SMALL, SMALL_PARTITIONS)
    assert expected.isfinite().all()
    for tile_rows, num_shares in ((32, 1), (64, 2), (128, 4)):
        monkeypatch.setattr(exact_prefill, "VALUE_SHARES", num_shares)
        assert torch.equal(prompt.exact(replace(SMALL, tile_rows=tile_rows), SMALL_PARTITIONS), expected)


def test_wide_heads_alone_have_the_kernel_of_wide_heads(device: str) -> None:
    layer = Prompt(CHUNKS[0], (2, 1, 256), 64, device, torch.float32).layer()
    with pytest.raises(ValueError, match="head_dim=256: expected 257 or more"):
        wide_prefill_attention(layer, torch.zeros(1, 4, dtype=torch.int32), 16, SMALL_PARTITIONS)


@pytest.mark.parametrize("num_rows", [3, 17])
@pytest.mark.parametrize(
    ("num_doublings", "borders"),
    [
        (0, (32, 64, 96, 128, 160, 192)),
        (1, (32, 64, 128, 192, 256, 320)),
        (2, (32, 64, 128, 256, 384, 512)),
    ],
)
def test_partitions_are_added_in_ascending_order(
    num_doublings: int, borders: tuple[int, ...], num_rows: int, device: str
) -> None:
    """As decoding adds them. All keys have the same score, so a row's output is the mean of the values."""
    partitions = replace(SMALL_PARTITIONS, num_doublings=num_doublings)
    num_keys = borders[5]
    chunks = [(0, num_keys - num_rows, num_rows)]
    prompt = Prompt(chunks, (1, 1, 16), 64, device, torch.float32, max_keys=512)
    prompt.query.zero_()
    keys = torch.arange(num_keys, device=device)
    row = probe_row(num_keys, borders[:5]).to(device)
    prompt.values[prompt.table[0, keys // 64].long(), :, keys % 64] = row[:, None, None]
    found = prompt.exact(SMALL, partitions)[-1] * num_keys
    assert (found - expected_sum(6)).abs().max() < 1e-3
    assert torch.equal(prompt.decoded(1, partitions, num_programs=2)[-1] * num_keys, found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "heads",
    [(32, 8, 128), (14, 2, 64), (9, 3, 64), (8, 8, 256), (6, 2, 80), (16, 2, 512), (16, 1, 512), (6, 2, 320)],
    ids=str,
)
def test_prompts_have_the_bits_of_decoding(
    heads: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    chunks = [(0, 0, 5), (1, 0, 300), (2, 2000, 130), (3, 4500, 700)]
    config, partitions = exact_prefill_config(heads[2], dtype), Partitions.of_layer(heads[2], 0)
    prompt = Prompt(chunks, heads, 64, device, dtype, max_keys=5248)
    found = prompt.exact(config, partitions)
    assert found.isfinite().all()
    if heads[2] > WIDE_HEAD:
        magnitude = prompt.values.nan_to_num().abs().max().item()
        tolerances.assert_near(
            found, prompt.expected(), inner=5248, magnitude=magnitude, num_roundings=1, name=f"{heads}"
        )
    for rows_per_sequence in (1, 5):
        assert torch.equal(prompt.decoded(rows_per_sequence, partitions), found), rows_per_sequence


@pytest.mark.gpu
def test_bits_do_not_depend_on_tiles_warps_or_stages(device: str) -> None:
    prompt = Prompt([(0, 0, 200), (1, 4500, 333)], (32, 8, 128), 64, device, torch.bfloat16, max_keys=4864)
    expected = prompt.exact(exact_prefill_config(128, torch.bfloat16), Partitions())
    few = exact_prefill_config(128, torch.bfloat16, 100)
    assert few.tile_rows < 128 and torch.equal(prompt.exact(few, Partitions()), expected)
    for tile_rows, num_warps, num_stages in ((16, 4, 2), (64, 4, 3), (64, 8, 2), (128, 8, 1)):
        config = ExactPrefillConfig(
            tile_rows=tile_rows, num_warps=num_warps, num_stages=num_stages, narrow_stages=1
        )
        assert torch.equal(prompt.exact(config, Partitions()), expected), config


def test_wrong_shapes_are_rejected(device: str) -> None:
    prompt = Prompt(CHUNKS[0], HEADS[0], 8, device, torch.float32)
    with pytest.raises(ValueError, match="block_table"):
        prompt.table = prompt.table.long()
        prompt.exact(SMALL, SMALL_PARTITIONS)
    prompt = Prompt(CHUNKS[0], HEADS[0], 8, device, torch.float32)
    prompt.options["first_key"] = 1
    with pytest.raises(ValueError, match="first_key=1: expected 0 to 0"):
        prompt.exact(SMALL, SMALL_PARTITIONS)
