"""Attention of several sequences in one step equals that of each sequence alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoder_parity import inner_terms, load_decoder, poisoned_cache, random_tokens
from model_zoo import make_model
from tolerances import assert_near

from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models import attention
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.spec.model import KVShape, ModelSpec

NUM_BLOCKS = 256
WINDOWED = 30  # a Gemma 3 of the zoo, with layers of both kinds
BLOCK_SIZE = 8
# (tokens in the cache, rows of this step) of each sequence: decode rows, first and later chunks of prompts,
# and rows that verify drafts.
MIXED = [
    (13, 1),
    (0, 20),
    (70, 1),
    (9, 3),
    (31, 1),
    (24, 30),
    (0, 1),
    (44, 3),
    (8, 6),
    (0, 3),
    (5, 17),
    (1, 1),
]


@pytest.fixture(scope="module", params=[1, 12, 22, WINDOWED])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("model")
    make_model(request.param, folder)
    return load_decoder(folder)


def _tables(lengths: list[int]) -> list[list[int]]:
    """Scattered blocks for each sequence, one more than it needs."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    return [[free.pop() for _ in range(length // BLOCK_SIZE + 2)] for length in lengths]


def _run(
    decoder: Decoder, sequences: list[tuple[int, int]], *, together: bool
) -> tuple[list[torch.Tensor], KVCache]:
    """Hidden rows of each sequence, computed together in one step or in one step for each sequence."""
    cache = poisoned_cache(decoder.spec, NUM_BLOCKS)
    tables = _tables([start + num_rows for start, num_rows in sequences])
    tokens, rows = [], []
    for index, (start, num_rows) in enumerate(sequences):
        token_ids = random_tokens(decoder.spec, start + num_rows, seed=index)
        if start:
            batch = AttentionBatch([SequenceRows(tables[index], 0, start)], cache)
            decoder.forward(token_ids[:start], batch, cache)

        tokens.append(token_ids[start:])
        rows.append(SequenceRows(tables[index], start, num_rows))

    if together:
        hidden, _ = decoder.forward(torch.cat(tokens), AttentionBatch(rows, cache), cache)
        return list(hidden.split([num_rows for _, num_rows in sequences])), cache

    pairs = zip(tokens, rows, strict=True)
    return [decoder.forward(ids, AttentionBatch([row], cache), cache)[0] for ids, row in pairs], cache


def _assert_same(
    spec: ModelSpec,
    found: tuple[list[torch.Tensor], KVCache],
    expected: tuple[list[torch.Tensor], KVCache],
) -> None:
    inner, depth = inner_terms(spec), spec.num_layers + 1
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert_near(mine, theirs, inner=inner, depth=depth)

    for mine, theirs in zip(found[1].tensors, expected[1].tensors, strict=True):
        assert_near(mine, theirs, inner=inner, depth=depth)


def test_mixed_step_equals_single_sequences(decoder: Decoder) -> None:
    _assert_same(decoder.spec, _run(decoder, MIXED, together=True), _run(decoder, MIXED, together=False))


@pytest.mark.parametrize("padding, max_slots", [(0, 32_768), (10_000, 32_768), (10_000, 80)])
def test_grouping_does_not_change_the_output(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, padding: int, max_slots: int
) -> None:
    expected = _run(decoder, MIXED, together=True)
    monkeypatch.setattr(attention, "MIN_PADDING", padding)
    monkeypatch.setattr(attention, "MAX_PADDED_SLOTS", max_slots)
    _assert_same(decoder.spec, _run(decoder, MIXED, together=True), expected)


def test_sequences_of_very_different_lengths_are_not_grouped() -> None:
    lengths = [4000, 10, 3900, 240, 2100, 20, 900]
    groups = attention._group_sequences([SequenceRows((), length - 1, 1) for length in lengths])
    assert sorted(groups) == [[0, 2, 4], [1, 3, 5], [6]]
    many = attention._group_sequences([SequenceRows((), 8191, 1)] * 10)
    assert [len(group) for group in many] == [4, 4, 2]


def test_long_chunk_after_a_long_context() -> None:
    """Some key blocks of the attention kernel are masked completely for a row and must not contribute."""
    cache = KVCache([KVShape(2, 16, 16)], 400, BLOCK_SIZE, torch.float32, "cpu")
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    start, num_rows = 700, 1500
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, start + num_rows, 2, 16, generator=generator)
    query = torch.randn(num_rows, 4, 16, generator=generator)
    blocks = torch.randperm(400, generator=generator).tolist()
    past = AttentionBatch([SequenceRows(blocks, 0, start)], cache)
    past.attend(torch.zeros(start, 4, 16), key[:start], value[:start], cache, 0)
    batch = AttentionBatch([SequenceRows(blocks, start, num_rows)], cache)
    found = batch.attend(query, key[start:], value[start:], cache, 0)

    scores = torch.einsum("rhd,khd->hrk", query, key.repeat_interleave(2, 1)) / 4
    is_visible = torch.ones(num_rows, start + num_rows, dtype=torch.bool).tril(start)
    weights = scores.masked_fill(~is_visible, float("-inf")).softmax(-1)
    expected = torch.einsum("hrk,khd->rhd", weights, value.repeat_interleave(2, 1)).reshape(num_rows, -1)
    assert_near(found, expected, inner=start + num_rows, magnitude=value.abs().max().item())


@pytest.mark.parametrize("window", [1, 2, 7, 16, 200])
def test_rows_see_the_keys_of_their_window_alone(window: int) -> None:
    """Sequences of one and of several rows, alone and padded together. Keys that no row of a sequence sees
    are NaN, which would spread to the rows."""
    sequences = [(40, 1), (3, 1), (90, 1), (25, 6), (60, 6), (0, 6), (50, 30), (0, 30)]
    generator = torch.Generator().manual_seed(window)
    cache = KVCache([KVShape(2, 16, 16)], NUM_BLOCKS, BLOCK_SIZE, torch.float32, "cpu")
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    tables = _tables([start + num_rows for start, num_rows in sequences])
    rows, queries, newest, expected = [], [], [], []
    for (start, num_rows), table in zip(sequences, tables, strict=True):
        num_keys = start + num_rows
        key, value = torch.randn(2, num_keys, 2, 16, generator=generator)
        query = torch.randn(num_rows, 4, 16, generator=generator)
        first = max(0, start + 1 - window)
        slots = torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(num_keys)])
        for places, stored in zip(cache.layer(0), (key, value), strict=True):
            places[slots[first:start]] = stored[first:start]
        distance = torch.arange(start, num_keys)[:, None] - torch.arange(num_keys)
        scores = torch.einsum("rhd,khd->hrk", query, key.repeat_interleave(2, 1)) * 0.3
        is_hidden = (distance < 0) | (distance >= window)
        weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
        expected.append(
            torch.einsum("hrk,khd->rhd", weights, value.repeat_interleave(2, 1)).reshape(num_rows, -1)
        )
        rows.append(SequenceRows(table, start, num_rows))
        queries.append(query)
        newest.append((key[start:], value[start:]))

    keys, values = (torch.cat(parts) for parts in zip(*newest, strict=True))
    batch = AttentionBatch(rows, cache)
    found = batch.attend(torch.cat(queries), keys, values, cache, 0, window=window, scale=0.3)
    assert_near(found, torch.cat(expected), inner=100, magnitude=values.abs().max().item())


def test_positions_and_slots_are_in_the_order_of_rows(decoder: Decoder) -> None:
    cache = poisoned_cache(decoder.spec, 8)
    batch = AttentionBatch(
        [SequenceRows([5, 2], 9, 1), SequenceRows([3, 0], 6, 4), SequenceRows([7], 2, 1)], cache
    )
    assert batch.num_rows == 6
    assert batch.positions.tolist() == [9, 6, 7, 8, 9, 2]
    assert batch.slot_mapping.tolist() == [2 * 8 + 1, 3 * 8 + 6, 3 * 8 + 7, 0, 1, 7 * 8 + 2]


def test_all_tensors_are_on_the_given_device(tmp_path: Path) -> None:
    """On the meta device, an operation with a tensor of the CPU fails."""
    make_model(1, tmp_path)
    source = resolve(tmp_path)
    spec = read_spec(source.config)
    away = Decoder.load(spec, source.tensors(), device="meta", dtype=torch.bfloat16)
    cache = away.empty_kv_cache(64, 8)
    sequences = [(0, 20), (7, 30), (3, 1), (60, 1), (4, 3), (9, 3), (11, 1)]
    rows = [SequenceRows(range(16), start, num_rows) for start, num_rows in sequences]
    batch = AttentionBatch(rows, cache)
    tokens = torch.zeros(batch.num_rows, dtype=torch.int64, device="meta")
    hidden, _ = away.forward(tokens, batch, cache)
    assert away.logits(hidden).shape == (batch.num_rows, spec.vocab_size)
    for tensor in (hidden, batch.positions, batch.slot_mapping, *cache.tensors, away.weights.head):
        assert tensor.device.type == "meta"


@pytest.mark.parametrize(
    "rows, message", [(SequenceRows([1], 0, 9), "1 blocks"), (SequenceRows([1], 0, 0), "at least one")]
)
def test_invalid_rows_are_rejected(decoder: Decoder, rows: SequenceRows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionBatch([rows], poisoned_cache(decoder.spec, 8))


def test_wrong_token_shapes_and_aux_layers_are_rejected(decoder: Decoder) -> None:
    cache = poisoned_cache(decoder.spec, 8)
    batch = AttentionBatch([SequenceRows([1], 0, 2)], cache)
    with pytest.raises(ValueError, match=r"expected \[2\]"):
        decoder.forward(torch.tensor([1, 2, 3]), batch, cache)

    with pytest.raises(ValueError, match="expected each from 0"):
        decoder.forward(torch.tensor([1, 2]), batch, cache, (decoder.spec.num_layers + 1,))


def test_layers_with_windows_have_a_table_of_their_own(tmp_path: Path) -> None:
    """Other blocks, and none behind the window: the same rows as with one table for all layers."""
    make_model(WINDOWED, tmp_path)
    decoder = load_decoder(tmp_path)
    (window,) = {each for each in decoder.spec.windows if each is not None}
    expected, _ = _run(decoder, MIXED, together=True)
    lengths = [start + num_rows for start, num_rows in MIXED]
    tables = _tables(lengths)
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4)).tolist()
    window_tables = [[free.pop() for _ in table] for table in tables]
    cache = decoder.empty_kv_cache(NUM_BLOCKS, BLOCK_SIZE, NUM_BLOCKS + 1)
    tokens, rows = [], []
    for index, (start, num_rows) in enumerate(MIXED):
        token_ids = random_tokens(decoder.spec, start + num_rows, seed=index)
        own = window_tables[index]
        if start:
            batch = AttentionBatch([SequenceRows(tables[index], 0, start, own)], cache)
            decoder.forward(token_ids[:start], batch, cache)
        # A block that was never written takes the place of those behind the window.
        first = max(start - window + 1, 0) // BLOCK_SIZE
        tokens.append(token_ids[start:])
        rows.append(SequenceRows(tables[index], start, num_rows, [NUM_BLOCKS] * first + own[first:]))
    hidden, _ = decoder.forward(torch.cat(tokens), AttentionBatch(rows, cache), cache)
    for found, wanted in zip(hidden.split([num_rows for _, num_rows in MIXED]), expected, strict=True):
        assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match="1 blocks for 13 tokens: expected 2 or more"):
        AttentionBatch([SequenceRows([0, 1], 12, 1, [2])], cache)
