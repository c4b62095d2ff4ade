"""Blocks of layers with windows: which are kept, and where sequences go on, against a fake device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from scheduler_rig import Rig

from drift_sdk.scheduling.blocks import WindowBlocks
from drift_sdk.scheduling.planning import least_window_blocks
from drift_sdk.scheduling.sequence import Sequence

WINDOW, SIZE = 8, 4
OTHER_TOKENS = itertools.count(10_000)


def window_rig(**changes: Any) -> Rig:
    return Rig(**{"window": WINDOW, "num_window_blocks": 40, "block_size": SIZE, **changes})


def windows(rig: Rig) -> WindowBlocks:
    found = rig.scheduler._blocks.windows
    assert found is not None
    return found


def other(length: int) -> list[int]:
    """Tokens that no other prompt has."""
    return [next(OTHER_TOKENS)] * length


def run(rig: Rig, prompt_ids: list[int], max_tokens: int = 2, **options: Any) -> Sequence:
    sequence = rig.add(prompt_ids, max_tokens, **options)
    rig.drain()
    return sequence


def num_held(rig: Rig) -> int:
    """Window blocks that sequences hold."""
    return rig.config.num_window_blocks - rig.scheduler.num_free_window_blocks


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_long_sequence_holds_its_window_alone(num_draft_tokens: int) -> None:
    """100 windows, in chunks of three and then a token or a few at a time."""
    rig = window_rig(
        num_blocks=300, prefill_token_budget=3 * WINDOW, num_draft_tokens=num_draft_tokens, max_num_seqs=1
    )
    sequence = rig.add(50 * WINDOW, max_tokens=50 * WINDOW)
    most: list[int] = []
    while rig.scheduler.has_work:
        if rig.scheduler.num_in_flight < 2 and rig.schedule() is not None:
            continue
        rig.commit()
        if sequence.num_output_tokens > 1 and sequence.finish is None:
            most.append(num_held(rig))
    assert sequence.token_ids == rig.story(sequence)
    assert len(most) > 50
    assert max(most) <= 2 + WINDOW // SIZE + -(-2 * (num_draft_tokens + 1) // SIZE)


def test_a_whole_prompt_needs_no_more_blocks_than_its_window_and_chunks() -> None:
    rig = window_rig(num_window_blocks=5, prefill_token_budget=64, num_blocks=100)
    sequence = run(rig, other(300), 20)
    assert sequence.token_ids == rig.story(sequence)
    assert rig.scheduler.num_preemptions == 0


@pytest.mark.parametrize("length", range(20, 29))
def test_equal_prompts_go_on_from_the_last_block_before_their_last_token(length: int) -> None:
    rig = window_rig()
    prompt = other(length)
    cached = [run(rig, prompt).num_cached_tokens for _ in range(2)]
    assert cached == [0, (length - 1) // SIZE * SIZE]
    assert windows(rig).num_lost_tokens == 0


def test_a_conversation_hits_behind_the_window() -> None:
    rig = window_rig(num_blocks=400, num_window_blocks=12, prefill_token_budget=32)
    tokens = other(40)
    for _ in range(20):
        sequence = run(rig, tokens, 12)
        assert sequence.num_cached_tokens in (0, *range(len(tokens) - 24, len(tokens)))
        tokens = sequence.token_ids + other(11)
    assert sequence.num_cached_tokens >= 20 * WINDOW
    assert windows(rig).num_lost_tokens == 0


def test_long_sessions_beside_each_other_hit_behind_their_windows() -> None:
    """Two conversations of 50,000 tokens, turn by turn, in window blocks for a few thousand tokens: two
    windows each, and the chunks in flight. What sequences hold of these does not grow."""
    window, size, budget, num_answered = 512, 64, 1024, 12
    num_window_blocks = 4 * (1 + window // size) + 2 * budget // size
    rig = window_rig(
        window=window,
        block_size=size,
        num_blocks=1700,
        num_window_blocks=num_window_blocks,
        prefill_token_budget=budget,
        max_num_seqs=2,
    )
    sessions, cached, most = [other(1500), other(700)], [0, 0], 0
    while min(map(len, sessions)) < 50_000:
        turns = [rig.add(tokens, num_answered) for tokens in sessions]
        while rig.scheduler.has_work:
            if rig.scheduler.num_in_flight >= 2 or rig.schedule() is None:
                rig.commit()
                most = max(most, num_held(rig))
        assert [turn.num_cached_tokens for turn in turns] == cached
        assert [turn.token_ids for turn in turns] == [rig.story(turn) for turn in turns]
        assert num_held(rig) == 0
        cached = [(len(turn.token_ids) - 1) // size * size for turn in turns]
        sessions = [turn.token_ids + other(6000) for turn in turns]
    assert most <= 2 * (2 + window // size) + 2 * budget // size < num_window_blocks
    assert min(cached) > 40_000
    assert windows(rig).num_lost_tokens == 0 and rig.scheduler.num_preemptions == 0


def test_a_branch_hits_while_memory_allows() -> None:
    """Recycled blocks stay cached, so prompts go on where they leave another one, far before its end."""
    rig = window_rig(num_window_blocks=60)
    prefix = other(80)
    run(rig, prefix + other(60))
    assert run(rig, prefix + other(5)).num_cached_tokens == 80
    assert run(rig, prefix[:41] + other(5)).num_cached_tokens == 40


def test_without_a_window_a_shallower_one_is_used_and_the_branch_is_mended() -> None:
    rig = window_rig(num_window_blocks=16, num_blocks=400)
    prefix = other(80)
    run(rig, prefix + other(120))
    assert rig.scheduler.num_free_window_blocks == 16
    first = run(rig, prefix + other(5))
    assert first.num_cached_tokens == 0 and windows(rig).num_lost_tokens == 80
    # It has given the window before the branch to the nodes of the first one.
    second = run(rig, prefix + other(5))
    assert second.num_cached_tokens == 80 and windows(rig).num_lost_tokens == 80


def test_a_window_with_a_hole_is_no_hit() -> None:
    rig = window_rig()
    prompt = other(40)
    run(rig, prompt)
    nodes = rig.scheduler._blocks.trie.iter_nodes()
    assert windows(rig).num_resumable(nodes) == len(nodes) == 10
    windows(rig).evict(nodes[8])
    assert windows(rig).num_resumable(nodes) == 8
    windows(rig).evict(nodes[6])
    assert windows(rig).num_resumable(nodes) == 6
    windows(rig).evict(nodes[1])
    assert windows(rig).num_resumable(nodes) == 6
    windows(rig).evict(nodes[5])
    assert windows(rig).num_resumable(nodes) == 5
    windows(rig).evict(nodes[4])
    windows(rig).evict(nodes[2])
    assert windows(rig).num_resumable(nodes) == 1
    windows(rig).evict(nodes[0])
    assert windows(rig).num_resumable(nodes) == 0
    assert run(rig, prompt).num_cached_tokens == 0
    assert run(rig, prompt).num_cached_tokens == 36


def test_window_blocks_are_evicted_without_their_nodes() -> None:
    rig = window_rig(num_window_blocks=12, num_blocks=400)
    prompts = [other(30) for _ in range(10)]
    for prompt in prompts:
        run(rig, prompt)
    assert rig.scheduler.num_cached_blocks == 70
    cached = [run(rig, prompt).num_cached_tokens for prompt in (prompts[-1], prompts[0])]
    assert cached == [28, 0]


def test_a_long_prompt_does_not_evict_the_windows_of_others() -> None:
    rig = window_rig(num_window_blocks=30, num_blocks=1000, prefill_token_budget=16)
    conversation, prefix = other(50), other(60)
    run(rig, conversation)
    for _ in range(3):
        run(rig, prefix + other(30))
    run(rig, other(1000))
    assert run(rig, conversation).num_cached_tokens == 48
    assert run(rig, prefix + other(30)).num_cached_tokens == 60


def test_an_evicted_node_frees_its_window_block() -> None:
    rig = window_rig(num_blocks=12)
    for _ in range(5):
        run(rig, other(40))
    nodes = rig.scheduler._blocks.trie.iter_nodes()
    assert sum(node.window_block >= 0 for node in nodes) == windows(rig).num_cached <= len(nodes) <= 12


def test_prompts_share_the_blocks_of_a_window() -> None:
    rig = window_rig(max_num_seqs=8)
    prompt = other(41)
    run(rig, prompt)
    for _ in range(6):
        rig.add(prompt, 3)
    rig.launch()
    # Two blocks of the window, which all have, and for each what is behind it.
    assert num_held(rig) == 2 + 6
    rig.drain()


def test_a_prompt_waits_for_the_window_blocks_of_others() -> None:
    """Chunks are cut to the blocks that there are; nothing is lost, and both prompts progress."""
    rig = window_rig(num_window_blocks=8, num_blocks=300, prefill_token_budget=64, max_num_seqs=3)
    sequences = [rig.add(length, 6) for length in (200, 150, 90)]
    rig.drain()
    for sequence in sequences:
        assert sequence.token_ids == rig.story(sequence)


def test_rejected_drafts_do_not_move_the_window() -> None:
    rig = window_rig(num_draft_tokens=6, num_window_blocks=20)
    sequences = [rig.add(30, 60) for _ in range(3)]
    rig.drain()
    for sequence in sequences:
        assert sequence.token_ids == rig.story(sequence)


@pytest.mark.parametrize("window", range(1, 20))
def test_a_hit_fits_into_the_fewest_blocks(window: int) -> None:
    """It holds the window before it already."""
    for size in (1, 2, 4):
        least = least_window_blocks(window, size, 1)
        rig = window_rig(block_size=size, num_blocks=400, window=window, num_window_blocks=least)
        prefix = other(40)
        run(rig, prefix)
        for _ in range(3):
            sequence = run(rig, prefix + other(50), 30)
            assert sequence.token_ids == rig.story(sequence)
        assert rig.scheduler.num_preemptions == 0


def test_a_sequence_alone_fits_into_the_fewest_blocks() -> None:
    for num_draft_tokens, window in itertools.product(range(6), range(1, 14)):
        rig = window_rig(
            num_draft_tokens=num_draft_tokens,
            window=window,
            num_window_blocks=-(-(window + num_draft_tokens + 2) // SIZE) + 2,
        )
        sequence = rig.add(67, 70)
        rig.drain()
        assert sequence.token_ids == rig.story(sequence)
        assert rig.scheduler.num_preemptions == 0
        with pytest.raises(AssertionError, match="num_window_blocks"):
            window_rig(
                num_draft_tokens=num_draft_tokens,
                window=window,
                num_window_blocks=rig.config.num_window_blocks - 1,
            )
