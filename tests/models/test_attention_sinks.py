from __future__ import annotations

import pytest
import torch
from tolerances import assert_near

from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.spec.model import KVShape

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 8
SINKS = torch.tensor([-3.0, 0.0, 2.0, 30.0])
"""The last is larger than all products, so that its head attends to nearly nothing else."""

# Of each sequence, the position of its first row and the number of rows.
STEPS = (
    ((0, 1),),
    ((13, 1),),
    ((0, 20),),
    ((9, 20),),
    ((0, 3), (7, 3), (30, 3)),
    ((5, 1), (0, 1), (22, 1)),
    ((0, 18), (4, 2), (6, 2)),
)


def formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, window: int | None, scale: float
) -> torch.Tensor:
    """Row by row and head by head, in float64: [rows, NUM_HEADS * HEAD_DIM]."""
    rows = []
    for row in range(len(query)):
        position = start + row
        first = 0 if window is None else max(position - window + 1, 0)
        heads = []
        for head in range(NUM_HEADS):
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            keys, values = key[first : position + 1, kv_head], value[first : position + 1, kv_head]
            products = scale * (keys @ query[row, head])
            weights = torch.cat((products, SINKS[head : head + 1].double())).softmax(0)[:-1]
            heads.append(weights @ values)
        rows.append(torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("window", [None, 1, 6, 64])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_attention_with_sinks_is_near_the_formula(
    step: tuple[tuple[int, int], ...], window: int | None, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    cache = KVCache(
        [KVShape(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM)], 8 * len(step), BLOCK_SIZE, torch.float32, "cpu"
    )
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    sequences = [
        SequenceRows(range(8 * index, 8 * index + 8), start, num_rows)
        for index, (start, num_rows) in enumerate(step)
    ]
    queries, keys, values, expected = [], [], [], []
    for index, (start, num_rows) in enumerate(step):
        key, value = torch.randn(2, start + num_rows, NUM_KV_HEADS, HEAD_DIM, generator=generator)
        query = torch.randn(num_rows, NUM_HEADS, HEAD_DIM, generator=generator)
        first = 8 * index * BLOCK_SIZE
        for places, stored in zip(cache.layer(0), (key, value), strict=True):
            places[first : first + start] = stored[:start]
        queries.append(query)
        keys.append(key[start:])
        values.append(value[start:])
        expected.append(
            formula(query.double(), key.double(), value.double(), start, window, scale or HEAD_DIM**-0.5)
        )
    batch = AttentionBatch(sequences, cache)
    found = batch.attend(
        torch.cat(queries),
        torch.cat(keys),
        torch.cat(values),
        cache,
        0,
        window=window,
        scale=scale,
        sinks=SINKS,
    )
    assert found.is_contiguous()
    assert_near(found, torch.cat(expected), inner=64, magnitude=4.0)
