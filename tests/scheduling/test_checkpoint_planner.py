"""Where checkpoints are left, and which ones sequences go on from, against a fake device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace
from scheduler_rig import Rig

from drift_sdk.scheduling.blocks import CheckpointPlanner
from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import StepPlan, Violation

BORDER = 8
OTHER_TOKENS = itertools.count(10_000)


def state_rig(**changes: Any) -> Rig:
    """A rig with places for 8 checkpoints, every second block."""
    return Rig(**{"num_checkpoints": 8, "checkpoint_tokens": BORDER, **changes})


def planner(rig: Rig) -> CheckpointPlanner:
    assert rig.scheduler.checkpoints is not None
    return rig.scheduler.checkpoints


def other(length: int) -> list[int]:
    """Tokens that no other prompt has."""
    return [next(OTHER_TOKENS)] * length


def run(rig: Rig, prompt_ids: list[int], max_tokens: int = 2, **options: Any) -> Sequence:
    sequence = rig.add(prompt_ids, max_tokens, **options)
    rig.drain()
    return sequence


def written(plan: StepPlan) -> list[list[int]]:
    """The positions of the checkpoints of each chunk."""
    return [[position for position, _ in chunk.checkpoints] for chunk in plan.prefill]


def test_the_third_prompt_behind_a_shared_prefix_hits_the_branch() -> None:
    rig = Rig(
        num_blocks=1000, block_size=16, prefill_token_budget=512, num_checkpoints=8, checkpoint_tokens=32
    )
    prefix = other(2000)
    cached = [run(rig, prefix + other(length)).num_cached_tokens for length in (100, 150, 75, 1)]
    assert cached == [0, 0, 1984, 1984]
    assert planner(rig).num_hits == 2
    assert planner(rig).num_lost_tokens == 2000 + 16 + 16
    assert planner(rig).pool.num_held == 4  # the branch, and each prompt's last border but for the last


@pytest.mark.parametrize("length", range(4 * BORDER, 5 * BORDER))
def test_prefixes_of_every_length(length: int) -> None:
    rig = state_rig(num_checkpoints=40)
    prefix = other(length)
    run(rig, prefix + other(2 * BORDER))
    run(rig, prefix + other(2 * BORDER))
    for num_more in range(1, 2 * BORDER):
        assert run(rig, prefix + other(num_more)).num_cached_tokens == length // BORDER * BORDER


@pytest.mark.parametrize("length", range(1, 3 * BORDER + 1))
def test_equal_prompts_go_on_from_the_last_border_before_their_last_token(length: int) -> None:
    rig = state_rig(prefill_token_budget=5)
    prompt_ids = other(length)
    cached = [run(rig, prompt_ids).num_cached_tokens for _ in range(2)]
    assert cached == [0, (length - 1) // BORDER * BORDER]


def test_turns_of_a_conversation_go_on_from_the_prompt_before() -> None:
    """The second turn computes the first answer again, whose KV is cached, and so publishes its own blocks
    only at its end. The checkpoint at the end of its prompt is kept until then."""
    rig = state_rig()
    prompt_ids: list[int] = []
    ends = [0]
    for _ in range(5):
        prompt_ids += other(50)
        sequence = run(rig, prompt_ids, max_tokens=21)
        assert sequence.num_cached_tokens == ends[-1]
        ends.append((len(prompt_ids) - 1) // BORDER * BORDER)
        prompt_ids = list(sequence.token_ids)


def test_a_kept_checkpoint_is_taken_as_those_of_nodes() -> None:
    rig = state_rig(num_checkpoints=2)
    first = run(rig, other(20), max_tokens=20)
    second = rig.add([*first.token_ids, *other(20)])
    rig.turn()
    assert [kept.position for kept in second.kept_checkpoints] == [56]
    (kept,) = second.kept_checkpoints
    assert kept.checkpoint >= 0
    for _ in range(2):
        rig.add(other(20))
        rig.turn()
    assert kept.checkpoint == -1
    assert planner(rig).pool.num_held == 2
    rig.drain()
    assert run(rig, list(second.token_ids)).num_cached_tokens == 0


def test_an_ended_sequence_leaves_the_checkpoint_that_it_keeps() -> None:
    rig = state_rig()
    first = run(rig, other(20), max_tokens=20)
    second = rig.add([*first.token_ids, *other(20)])
    rig.turn()
    assert [kept.position for kept in second.kept_checkpoints] == [56]
    rig.scheduler.remove(second)
    rig.scheduler.check_integrity()
    assert run(rig, [*second.token_ids, *other(3)]).num_cached_tokens == 56


def test_one_of_two_kept_checkpoints_of_the_same_tokens_is_freed() -> None:
    rig = state_rig()
    first = run(rig, other(20), max_tokens=20)
    prompt_ids = [*first.token_ids, *other(20)]
    for _ in range(2):
        sequence = rig.add(prompt_ids)
        rig.turn()
        assert [kept.position for kept in sequence.kept_checkpoints] == [56]
    assert planner(rig).pool.num_held == 4
    rig.drain()
    assert planner(rig).pool.num_held == 3


def test_a_checkpoint_is_not_kept_without_its_block() -> None:
    """Blocks of a sequence whose state cannot be trusted are not published."""
    rig = state_rig(num_draft_tokens=3)
    first = run(rig, other(20), max_tokens=20)
    second = rig.add([*first.token_ids, *other(20)])
    rig.turn()
    assert [kept.position for kept in second.kept_checkpoints] == [56]
    rig.launch()
    result = rig.device.collect()
    violation = Violation(reason="kv", details="", is_fatal=True)
    rig.scheduler.commit(replace(result, decode=(replace(result.decode[0], violation=violation),)))
    rig.scheduler.remove(second)
    rig.scheduler.check_integrity()
    assert run(rig, list(second.token_ids)).num_cached_tokens == 32


@pytest.mark.parametrize(
    ("tokens", "positions"), [(32, [4096, 8192, 8992]), (96, [8928]), (128, [4096, 8192, 8960])]
)
def test_long_prompts_leave_checkpoints_on_their_way(tokens: int, positions: list[int]) -> None:
    rig = Rig(
        num_blocks=1000,
        block_size=32,
        prefill_token_budget=10_000,
        num_checkpoints=8,
        checkpoint_tokens=tokens,
    )
    rig.add(other(9000))
    assert written(rig.launch()) == [positions]
    rig.commit()
    assert planner(rig).pool.num_held == len(positions)


def test_chunks_write_the_checkpoints_that_they_pass() -> None:
    rig = state_rig(prefill_token_budget=12)
    rig.add(other(40), borders=(0, 7, 13, 24, 31, 39, 40, 50))
    plans = [rig.launch() for _ in range(4)]
    assert [written(plan) for plan in plans] == [[[8]], [[24]], [[32]], [[]]]
    rig.drain()
    assert planner(rig).pool.num_held == 3


def test_checkpoints_that_the_cache_has_are_not_written_again() -> None:
    rig = state_rig()
    prompt_ids = other(40)
    run(rig, prompt_ids, borders=(24,))
    rig.add([*prompt_ids[:24], *other(20)], borders=(8, 24, 32))
    plan = rig.launch()
    assert [assignment.checkpoint is not None for assignment in plan.assignments] == [True]
    assert [
        (chunk.start, positions) for chunk, positions in zip(plan.prefill, written(plan), strict=True)
    ] == [(24, [32, 40])]


def test_checkpoints_that_the_cache_gets_meanwhile_are_not_written_again() -> None:
    rig = state_rig(prefill_token_budget=12)
    prompt_ids = other(20)
    rig.add(prompt_ids)
    rig.turn()
    second = rig.add(prompt_ids + other(20), borders=(16,))
    assert written(rig.launch()) == [[16], []]
    assert second.wanted_checkpoints == [8, 16, 32]
    rig.commit()
    plan = rig.launch()
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.prefill] == [(4, 12)]
    assert written(plan) == [[8]]


def test_running_sequences_share_their_checkpoints() -> None:
    rig = state_rig()
    prompt_ids = other(20)
    first = rig.add(prompt_ids)
    rig.turn()
    second = rig.add(prompt_ids + other(3))
    rig.turn()
    assert first.is_running and not first.kept_checkpoints
    assert second.num_cached_tokens == 16


def test_prompts_in_flight_leave_one_checkpoint_for_one_beginning() -> None:
    rig = state_rig(prefill_token_budget=100)
    prompt_ids = other(20)
    for salt in (None, None, "a"):
        rig.add(prompt_ids, cache_salt=salt)
    rig.add(other(20))
    assert sorted(written(rig.launch())) == [[], [16], [16], [16]]


def test_prompts_leave_the_checkpoint_of_an_ended_one_in_flight() -> None:
    rig = state_rig()
    prompt_ids = other(20)
    sequence = rig.add(prompt_ids)
    rig.launch()
    rig.scheduler.remove(sequence)
    rig.add(prompt_ids)
    assert written(rig.launch()) == [[16]]


def test_checkpoints_that_are_hit_stay() -> None:
    rig = state_rig(num_checkpoints=2)
    first, second = other(20), other(20)
    for prompt_ids in (first, second, first, other(20)):
        run(rig, prompt_ids)
    assert run(rig, first).num_cached_tokens == 16
    assert run(rig, second).num_cached_tokens == 0


def test_a_plan_may_write_the_place_that_it_reads() -> None:
    rig = state_rig(num_checkpoints=1)
    prompt_ids = other(20)
    run(rig, prompt_ids)
    sequence = rig.add([*prompt_ids, *other(20)])
    plan = rig.launch()
    assert (plan.assignments[0].checkpoint, plan.prefill[0].start) == (0, 16)
    assert plan.prefill[0].checkpoints == ((32, 0),)
    rig.drain()
    assert sequence.token_ids == rig.story(sequence)


def test_without_places_that_can_be_had_checkpoints_are_left_out() -> None:
    rig = state_rig(num_checkpoints=1, prefill_token_budget=100)
    rig.add(other(20))
    rig.add(other(20))
    assert sorted(written(rig.launch())) == [[], [16]]
    rig.add(other(20))
    assert written(rig.launch()) == [[]]
    rig.drain()
    run(rig, other(20))
    assert planner(rig).pool.num_held == 1


def test_models_with_states_and_no_places_compute_everything() -> None:
    rig = state_rig(num_checkpoints=0)
    prompt_ids = other(40)
    assert [run(rig, prompt_ids).num_cached_tokens for _ in range(3)] == [0, 0, 0]
    assert planner(rig).num_lost_tokens == 2 * 36


@pytest.mark.parametrize("is_preempted", [False, True])
def test_chunks_of_sequences_that_gave_up_their_slots_leave_nothing(is_preempted: bool) -> None:
    """Not even where another sequence has published the block."""
    rig = state_rig(num_checkpoints=2)
    prompt_ids = other(40)
    first = rig.add(prompt_ids)
    assert written(rig.launch()) == [[32]]
    second = rig.add(prompt_ids[:20])
    assert written(rig.launch()) == [[16]]
    if is_preempted:
        rig.scheduler._preempt(second)
    else:
        rig.scheduler.remove(second)
    rig.scheduler.check_integrity()
    rig.commit()
    assert (planner(rig).pool.num_held, rig.scheduler.num_cached_blocks) == (1, 10)
    rig.commit()
    assert planner(rig).pool.num_held == 1
    rig.drain()
    assert first.token_ids == rig.story(first)


def test_evicted_nodes_free_their_places() -> None:
    rig = state_rig(num_blocks=12)
    run(rig, other(20))
    assert planner(rig).pool.num_held == 1
    run(rig, other(46), max_tokens=1)
    assert planner(rig).pool.num_held == 1
    rig.scheduler.forget_kv()
    rig.scheduler.check_integrity()
    assert planner(rig).pool.num_held == 0


def test_preempted_sequences_go_on_from_a_checkpoint() -> None:
    rig = state_rig()
    sequence = rig.add(other(20), max_tokens=20)
    rig.turn(3)
    rig.scheduler._preempt(sequence)
    plan = rig.launch()
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.prefill] == [(16, 7)]
    assert plan.assignments[0].checkpoint is not None
    rig.drain()
    assert sequence.token_ids == rig.story(sequence)


def test_a_checkpoint_at_no_border_is_found() -> None:
    rig = state_rig()
    run(rig, other(20))
    node = next(node for node in rig.scheduler._blocks.trie.iter_nodes() if node.checkpoint >= 0)
    assert node.parent is not None
    pool = planner(rig).pool
    pool.attach(node.parent, pool.take(node))
    with pytest.raises(AssertionError, match="at no border"):
        rig.scheduler.check_integrity()


def test_models_without_states_have_no_checkpoints() -> None:
    rig = Rig()
    prompt_ids = other(20)
    run(rig, prompt_ids)
    rig.add(prompt_ids, borders=(8,))
    plan = rig.launch()
    assert rig.scheduler.checkpoints is None
    assert [assignment.checkpoint for assignment in plan.assignments] == [None]
    assert [(chunk.start, chunk.checkpoints) for chunk in plan.prefill] == [(16, ())]


@pytest.mark.parametrize(
    ("tokens", "places", "message"),
    [(6, 1, "checkpoint_tokens: 6, blocks of 4"), (0, 1, "num_checkpoints: 1, at no positions")],
)
def test_positions_are_borders_of_blocks(tokens: int, places: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        SchedulerConfig(
            max_num_seqs=1,
            num_blocks=1,
            block_size=4,
            prefill_token_budget=1,
            checkpoint_tokens=tokens,
            num_checkpoints=places,
        )
