"""Attention of trees against attention of each path as a chain."""

from __future__ import annotations

import random

import pytest
import torch
from random_trees import random_tree
from tolerances import assert_near

from drift_sdk.models.attention import AttentionBatch, SequenceRows, TreeAttentionBatch, TreeRows
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.spec.model import KVShape

BLOCK_SIZE, NUM_BLOCKS = 4, 30


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_each_node_sees_its_path(
    offset: int, num_sequences: int, window: int | None, has_sinks: bool
) -> None:
    rng = random.Random(num_sequences)
    generator = torch.Generator().manual_seed(offset)
    cache = KVCache([KVShape(2, 8, 8)] * 2, NUM_BLOCKS, BLOCK_SIZE, torch.float32, "cpu")
    for tensor in cache.tensors:
        tensor.fill_(torch.nan)
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    free_slots = iter(range((NUM_BLOCKS - 8) * BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE))
    blocks = [block for block in blocks if block < NUM_BLOCKS - 8]
    trees, sequences = [], []
    for index in range(num_sequences):
        tree, length = random_tree(rng, 9), (5, 1, 11)[index]
        table = blocks[index * 7 : index * 7 + 7]
        prefix = [
            table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(offset, length + offset)
        ]
        for tensor in cache.tensors:
            tensor[:, prefix] = torch.randn(2, length, 2, 8, generator=generator)
        trees.append(tree)
        sequences.append(
            TreeRows(
                table,
                length,
                [length + depth for depth in tree.depths],
                [next(free_slots) for _ in range(tree.num_nodes)],
                [tree.path(node) for node in range(tree.num_nodes)],
            )
        )
    batch = TreeAttentionBatch(sequences, cache, slot_offset=offset)
    query, key, value = (torch.randn(batch.num_rows, heads, 8, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator) if has_sinks else None
    found = batch.attend(query, key, value, cache, 1, window=window, scale=0.3, sinks=sinks)
    assert batch.positions.tolist() == [each for rows in sequences for each in rows.positions]
    first = 0
    for tree, rows in zip(trees, sequences, strict=True):
        for node in range(tree.num_nodes):
            path = [first + each for each in tree.path(node)]
            chain = AttentionBatch(
                [SequenceRows(rows.block_ids, rows.num_prefix, len(path))], cache, slot_offset=offset
            )
            attended = chain.attend(
                query[path], key[path], value[path], cache, 1, window=window, scale=0.3, sinks=sinks
            )
            expected = attended[-1]
            assert_near(found[first + node], expected.double(), inner=30, magnitude=5.0)
        first += tree.num_nodes
