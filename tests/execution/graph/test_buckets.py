from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drift_sdk.execution.graph.buckets import GraphBuckets, max_expanded_tokens
from drift_sdk.execution.graph.step_launcher import StepLauncher, fill_mixed, fill_slots
from drift_sdk.families import read_spec
from drift_sdk.steps import EXPANDED_TILE, MAX_CHUNKS, DecodeRow, ExecutorLimits, PrefillChunk, StepPlan
from perf.harness.published import PUBLISHED


def buckets(max_num_seqs: int, budget: int, **options: Any) -> GraphBuckets:
    decoder: Any = SimpleNamespace(
        spec=SimpleNamespace(max_head_dim=128, recurrent_layers=(), attention=None),
        dtype=torch.bfloat16,
    )
    limits = ExecutorLimits(
        max_num_seqs=max_num_seqs, max_model_len=4096, num_blocks=64, block_size=64, vocab_size=100
    )
    return GraphBuckets.of(decoder, limits, budget, **{"is_exact": False} | options)


@pytest.mark.parametrize(
    ("model", "has_scales", "max_model_len", "expected"),
    [
        ("glm-4.7-flash", False, 100_000, 52_352),
        ("glm-4.7-flash", False, 200, 2 * EXPANDED_TILE * 3),
        ("glm-4.7-flash", True, 100_000, 0),
        ("deepseek-v3-4-layers", False, 100_000, 0),
        ("qwen3-8b", False, 40_000, 0),
    ],
)
def test_expanded_keys_are_bounded(model: str, has_scales: bool, max_model_len: int, expected: int) -> None:
    decoder: Any = SimpleNamespace(
        spec=read_spec(PUBLISHED[model]),
        dtype=torch.bfloat16,
        weights=SimpleNamespace(kv_scales=object() if has_scales else None),
    )
    limits = ExecutorLimits(
        max_num_seqs=3, max_model_len=max_model_len, num_blocks=64, block_size=64, vocab_size=100
    )
    assert max_expanded_tokens(decoder, limits) == expected


@pytest.mark.parametrize(
    ("tokens", "rows", "bucket"),
    [
        (1, 1, (120, 8)),
        (120, 8, (120, 8)),
        (121, 8, (248, 8)),
        (96, 9, (96, 32)),
        (320, 33, (320, 64)),
        (320, 64, (320, 64)),
        (321, 64, (448, 64)),
        (449, 64, None),
        (504, 8, (504, 8)),
        (256, 65, (256, 128)),
        (128, 200, (128, 256)),
        (129, 200, (256, 256)),
        (256, 256, (256, 256)),
        (257, 256, None),
    ],
)
def test_mixed_steps_have_at_most_512_rows(tokens: int, rows: int, bucket: tuple[int, int] | None) -> None:
    """A step of more rows is computed in two passes."""
    assert buckets(256, 2048).mixed_bucket(tokens, 1, rows) == (bucket and (*bucket, 0))


@pytest.mark.parametrize(
    ("chunks", "bucket"),
    [(8, (64, 64)), (9, (192, 64)), (24, (192, 64)), (25, (320, 64)), (32, (320, 64)), (33, None)],
)
def test_many_chunks_take_a_larger_mixed_step(chunks: int, bucket: tuple[int, int] | None) -> None:
    """Chunks have few rows each; room for more chunks would take time in every step."""
    assert buckets(256, 2048).mixed_bucket(60, chunks, 64) == (bucket and (*bucket, 0))
    assert buckets(64, 16).mixed_bucket(8, 8, 64) == (16, 64, 0)


@pytest.mark.parametrize("num_slots", [1, 7, 8, 9])
def test_slots_that_a_round_does_not_have_are_padding(num_slots: int) -> None:
    """An entry still has the payload of the replay that used it before."""
    payload = np.full(64, 99, np.int32)
    slots, values = list(range(40, 40 + num_slots)), [3] * num_slots
    size = fill_slots(buckets(32, 64), slots, values, payload)
    assert size >= num_slots
    assert payload[:size].tolist() == slots + [-1] * (size - num_slots)
    assert payload[size : size + num_slots].tolist() == values


def test_tiles_of_a_step_with_many_chunks_fit() -> None:
    found = buckets(256, 2048)
    graphs: Any = SimpleNamespace(draft_extend={})
    unused: Any = None
    chunks = [PrefillChunk(slot=slot, start=0, token_ids=(5, 6, 7), next_token_id=None) for slot in range(20)]
    plan = StepPlan(
        step_id=0,
        assignments=(),
        block_updates=(),
        prefill=tuple(chunks),
        decode=(DecodeRow(slot=20, num_draft_tokens=0),),
    )
    bucket = StepLauncher(unused, graphs, found, unused)._mixed_bucket(plan)
    assert bucket == (224, 32, 0)
    layout = found.mixed_layout(bucket)
    payload = np.zeros(layout.num_words, np.int32)
    fill_mixed(found, plan, (), bucket, payload)
    slots = payload[layout.tiles].reshape(-1, 4)[:, 0]
    assert sorted(slots[slots >= 0]) == [*range(20)]


def test_last_token_of_a_prompt_is_a_row_of_the_round() -> None:
    """The chunk has the tokens before it."""
    found = buckets(16, 256, draft_choices=(1, 3))
    bucket = found.mixed_bucket(3, 1, 2, 1)
    assert bucket is not None
    plan = StepPlan(
        step_id=0,
        assignments=(),
        block_updates=(),
        prefill=(PrefillChunk(slot=5, start=4, token_ids=(7, 8, 9), next_token_id=None),),
        decode=(DecodeRow(slot=2, num_draft_tokens=1),),
    )
    layout = found.mixed_layout(bucket)
    payload = np.full(layout.num_words, 99, np.int32)
    fill_mixed(found, plan, (), bucket, payload)
    rows = payload[layout.rows].reshape(3, bucket.size)
    place = bucket.num_rows + 1 + bucket.num_drafts
    assert np.flatnonzero(rows[1] >= 0).tolist() == [0, 1, place]
    assert rows[:, [0, 1, place]].T.tolist() == [[7, 5, 4], [8, 5, 5], [9, 5, 6]]


def test_few_chunk_rows_have_smaller_tiles() -> None:
    """Smaller tiles give programs for most multiprocessors."""
    found = buckets(256, 2048)
    tiles = {bucket.num_rows: found.mixed_attention(bucket).tile_rows for bucket in found.mixed}
    assert tiles[64] == tiles[192] == 64 and tiles[320] == tiles[448] == 128


def test_every_mixed_bucket_fits_the_payload() -> None:
    for max_num_seqs, budget in ((256, 2048), (3, 40), (64, 16), (100, 300)):
        found = buckets(max_num_seqs, budget)
        assert found.mixed and found.mixed[-1].num_slots == max_num_seqs
        for bucket in found.mixed:
            assert bucket.num_rows <= max(budget, 16) + 15 and bucket.size <= 512
            layout = found.mixed_layout(bucket)
            assert layout.num_words <= found.payload_words
            places = [place.indices(layout.num_words) for place in layout]
            assert [start for start, _, _ in places] == [0, *(stop for _, stop, _ in places[:-1])]


@pytest.mark.parametrize(
    ("tokens", "rows", "drafts", "bucket"),
    [
        (1, 1, 3, (96, 8, 3)),
        (352, 8, 3, (352, 8, 3)),
        (353, 8, 3, (480, 8, 3)),
        (481, 8, 3, None),
        (640, 32, 3, (640, 32, 3)),
        (100, 9, 3, (128, 32, 3)),
        (129, 9, 3, (256, 32, 3)),
        (100, 33, 3, (128, 64, 3)),
        (512, 64, 3, (512, 64, 3)),
        (513, 64, 3, (768, 64, 3)),
        (200, 65, 3, (256, 128, 3)),
        (100, 129, 3, None),  # the round alone has 1,024 rows
        (100, 33, 1, (128, 64, 3)),
        (129, 33, 0, (192, 64, 0)),
        (193, 33, 0, (320, 64, 0)),
    ],
)
def test_mixed_steps_with_drafts_have_at_most_1024_rows(
    tokens: int, rows: int, drafts: int, bucket: tuple[int, int, int] | None
) -> None:
    """Twice the round's rows are added to 512. A round is padded to the most drafts, but not where most of
    its rows would be padding."""
    assert buckets(256, 2048, draft_choices=(1, 3)).mixed_bucket(tokens, 1, rows, drafts) == bucket
    far = buckets(256, 2048, draft_choices=(1, 3, 5, 8))
    assert far.mixed_bucket(10, 1, 2, 3) is None and far.mixed_bucket(10, 1, 2, 5) is not None


def test_mixed_tokens_are_the_sizes_beside_a_round() -> None:
    found = buckets(100, 2048, draft_choices=(1, 3)).mixed_tokens
    assert [num_slots for num_slots, _ in found[0]] == [8, 32, 64, 100]
    assert found[0][2] == (64, (64, 192, 320, 448))
    assert found[1] == found[3] and found[3][2] == (64, (128, 256, 512, 768))


def test_trees_and_checked_rounds_have_a_pass_of_their_own() -> None:
    trees = buckets(64, 2048, draft_choices=(1, 7), tree_choices=(7,), shares_rows=True)
    assert {bucket.num_drafts for bucket in trees.mixed} == {0} and 7 not in trees.mixed_tokens
    checked = buckets(64, 2048, draft_choices=(1, 3), has_checks=True)
    assert checked.mixed == () and checked.mixed_tokens == {} and checked.mixed_bucket(10, 1, 2, 3) is None


def test_one_slot_has_no_mixed_steps() -> None:
    """A chunk and a decode row of a step belong to two sequences."""
    one = buckets(1, 2048, draft_choices=(1, 3))
    assert one.mixed == () and one.mixed_tokens == {} and one.most_mixed_rows == 0
    assert buckets(2, 2048, draft_choices=(1, 3)).mixed_bucket(10, 1, 2, 3) is not None


def test_room_for_chunks_is_bounded() -> None:
    """Each tile of attention takes a program for every head, whether it is used or not."""
    found = buckets(256, 2048)
    assert found.max_chunks == MAX_CHUNKS and buckets(3, 2048).max_chunks == 3
    assert found.num_tiles(512) == 4 + MAX_CHUNKS
    assert found.first_tokens == (1, 2, 4, 8, 16, 32) and buckets(20, 2048).first_tokens[-1] == 20
