"""Plans and commits of the scheduler, step by step against a fake device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from scheduler_rig import Rig, rows, spans

from drift_sdk.scheduling.planning import EXPANDED_BORDER, MAX_STEPS_WITHOUT_TOKENS, MIN_EXPANDED_PROMPT
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import MAX_CHUNKS, PrefillChunk, Violation


def constraint(mask: object = None, *, is_slow: bool = False) -> Any:
    """The part of a `TokenConstraint` that a scheduler reads. mask: the one of `mask_ahead`."""
    return SimpleNamespace(is_slow=is_slow, mask_ahead=lambda: mask)


def test_chunks_and_rows_are_launched_ahead() -> None:
    rig = Rig(prefill_token_budget=4)
    sequence = rig.add(10)
    plans = [rig.launch() for _ in range(5)]
    assert [spans(plan) for plan in plans] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)], [], []]
    assert [[chunk.is_last for chunk in plan.prefill] for plan in plans[:3]] == [[False], [False], [True]]
    assert [rows(plan) for plan in plans] == [[], [], [], [0], [0]]
    assert [len(plan.assignments) for plan in plans] == [1, 0, 0, 0, 0]
    assert [len(rig.commit()) for _ in plans] == [0, 0, 1, 1, 1]
    assert sequence.token_ids == rig.story(sequence)[:13]


def test_budget_goes_to_the_shortest_prompts_beside_decode_rows() -> None:
    rig = Rig(prefill_token_budget=8)
    rig.add(3)
    rig.turn()
    for length in (6, 7, 4):
        rig.add(length)

    plan = rig.launch()
    assert (spans(plan), rows(plan)) == ([(1, 0, 4), (2, 0, 4)], [0])
    plan = rig.launch()
    assert (spans(plan), rows(plan)) == ([(1, 4, 2), (3, 0, 6)], [0, 2])


@pytest.mark.parametrize("second", [39, 40, 41])
def test_short_prompts_do_not_wait_for_long_ones_that_wait(second: int) -> None:
    rig = Rig(max_num_seqs=8, prefill_token_budget=8)
    rig.add(40)
    rig.launch()
    waiting = rig.add(second)
    short = rig.add(3)
    plan = rig.launch()
    assert spans(plan)[-1] == (1, 0, 3)
    assert (short.slot, waiting.is_running) == (1, False)
    rig.drain()
    assert waiting.token_ids == rig.story(waiting)


def test_sequence_waits_for_a_slot_only_behind_earlier_ones() -> None:
    """A long prompt that gets no tokens yet keeps its right to the last free slot."""
    rig = Rig(max_num_seqs=2, prefill_token_budget=8)
    rig.add(40, max_tokens=1)
    rig.launch()
    waiting, short = rig.add(41, max_tokens=1), rig.add(3, max_tokens=1)
    rig.launch()
    assert not waiting.is_running and not short.is_running
    while not short.finish:
        rig.turn()
        assert waiting.num_planned_tokens > 0 or not short.is_running


def test_cached_tokens_of_a_waiting_prompt_do_not_count() -> None:
    """The next turn of a conversation is as short as what it adds."""
    rig = Rig(max_num_seqs=8, prefill_token_budget=8)
    conversation = list(range(40))
    rig.add(conversation, max_tokens=1)
    rig.drain()
    rig.add(30)
    rig.launch()
    rig.add([*conversation, 1, 2])
    assert (1, 40, 2) in spans(rig.launch())


@pytest.mark.parametrize("length", [MIN_EXPANDED_PROMPT, MIN_EXPANDED_PROMPT + EXPANDED_BORDER - 2])
def test_samples_of_a_long_prompt_expand_no_keys(length: int) -> None:
    """They share its blocks, so expanding all keys for the few tokens that are left would take longer than
    these, and a step has room for one prompt."""
    room = MIN_EXPANDED_PROMPT + EXPANDED_BORDER
    rig = Rig(num_blocks=5000, prefill_token_budget=room, max_expanded_tokens=room)
    prompt = [token % 5 for token in range(length)]
    rig.add(prompt, max_tokens=1)
    assert rig.launch().prefill[0].num_expanded > 0
    rig.drain()
    for _ in range(3):
        rig.add(prompt, max_tokens=1)
    chunks = rig.launch().prefill
    assert [chunk.num_expanded for chunk in chunks] == [0, 0, 0]
    assert all(chunk.is_last and chunk.start for chunk in chunks)
    rig.drain()


def test_the_next_turn_of_a_long_conversation_expands_no_keys() -> None:
    """Prompt and answer are cached, unless the next prompt is longer by a border of expanded keys."""
    rig = Rig(num_blocks=5000, prefill_token_budget=4096, max_expanded_tokens=8192)
    first = rig.add(2 * MIN_EXPANDED_PROMPT + 100, max_tokens=100)
    rig.drain()
    turn = [*first.token_ids, *range(50)]
    second = rig.add(turn, max_tokens=1)
    (chunk,) = rig.launch().prefill
    assert chunk.num_expanded == 0 and len(chunk.token_ids) < 100 and chunk.is_last
    rig.drain()
    third = rig.add([*turn, *range(EXPANDED_BORDER)], max_tokens=1)
    (chunk,) = rig.launch().prefill
    assert chunk.num_expanded == EXPANDED_BORDER and chunk.start == 2 * MIN_EXPANDED_PROMPT
    rig.drain()
    assert first.num_expanded_tokens == second.num_expanded_tokens == chunk.start
    assert third.num_expanded_tokens == chunk.start + EXPANDED_BORDER


def test_tokens_without_room_for_expanded_keys_go_to_other_prompts() -> None:
    """Prompts that get none are not admitted."""
    room = 2 * EXPANDED_BORDER
    rig = Rig(max_num_seqs=8, num_blocks=5000, prefill_token_budget=2200, max_expanded_tokens=room)
    first, second, third = [rig.add(room + 50 + index) for index in range(3)]
    last = rig.add(40, priority=1)
    chunks = rig.launch().prefill
    assert [len(chunk.token_ids) for chunk in chunks] == [room + 50, 40]
    assert first.is_running and last.is_running and not (second.is_running or third.is_running)
    rig.drain()
    for each in (first, second, third, last):
        assert each.token_ids == rig.story(each)


def test_a_cached_prompt_that_an_admission_evicts_waits_for_room_for_its_keys() -> None:
    """It was to expand none; blocks of an older prompt are evicted first."""
    room, size = MIN_EXPANDED_PROMPT, MIN_EXPANDED_PROMPT + 76
    rig = Rig(num_blocks=600, block_size=4, prefill_token_budget=4096, max_expanded_tokens=room)
    prompts = [[(token * number) % 5 for token in range(size)] for number in (1, 2, 3)]
    for prompt in prompts[:2]:
        rig.add(prompt, max_tokens=1)
        rig.drain()
    new, cached = rig.add(prompts[2]), rig.add([*prompts[0], 1, 2], priority=1)
    plan = rig.launch()  # the device holds the plan to the room
    assert new.is_running and sum(chunk.num_expanded for chunk in plan.prefill) == room
    rig.drain()
    assert (new.token_ids, cached.token_ids) == (rig.story(new), rig.story(cached))
    assert cached.num_cached_tokens < room


def test_cut_prompts_do_not_keep_new_ones_from_a_step() -> None:
    """More prompts are cut than a step has chunks, and a short one of higher priority comes."""
    rig = Rig(max_num_seqs=64, num_blocks=5000, prefill_token_budget=8)
    for index in range(MAX_CHUNKS + 8):
        rig.add(500 - 10 * index, priority=1)  # the latest is the shortest
        rig.launch()
    assert rig.scheduler.num_running > MAX_CHUNKS
    urgent = rig.add(8, priority=0)
    assert spans(rig.launch()) == [(urgent.slot, 0, 8)]


@pytest.mark.parametrize("num_waiting", [0, 1])
def test_first_waiting_prompt_progresses_behind_shorter_ones(num_waiting: int) -> None:
    """Also when it waits: with a steady flow of short prompts that take the whole budget."""
    rig = Rig(max_num_seqs=16, prefill_token_budget=8)
    long = [rig.add(40, max_tokens=1) for _ in range(1 + num_waiting)]
    for _ in range(20 * (1 + num_waiting) * (MAX_STEPS_WITHOUT_TOKENS + 1)):
        rig.add(8, max_tokens=1)
        rig.turn()
        if long[-1].finish:
            break
    assert [sequence.finish for sequence in long] == ["length"] * len(long)


def test_first_prompt_progresses_behind_shorter_ones_that_take_the_whole_budget() -> None:
    rig = Rig(max_num_seqs=16, prefill_token_budget=8)
    rig.add(40)
    rig.launch()
    found: list[bool] = []
    for _ in range(2 * MAX_STEPS_WITHOUT_TOKENS + 2):
        rig.add(8)
        found.append(any(slot == 0 for slot, _, _ in spans(rig.launch())))
    assert found == 2 * [*[False] * MAX_STEPS_WITHOUT_TOKENS, True]


def test_first_prompt_gets_what_shorter_ones_leave() -> None:
    rig = Rig(max_num_seqs=8, prefill_token_budget=8)
    rig.add(40)
    rig.launch()
    found: list[list[tuple[int, int, int]]] = []
    for _ in range(6):
        rig.add(4)
        found.append(spans(rig.launch()))
    starts = [8 + 4 * index for index in range(6)]
    assert found == [[(0, start, 4), (1 + index, 0, 4)] for index, start in enumerate(starts)]


def test_number_of_chunks_of_a_step_is_bounded() -> None:
    """Prompts beyond it wait for the next step."""
    rig = Rig(max_num_seqs=64, num_blocks=200, prefill_token_budget=256)
    for _ in range(MAX_CHUNKS + 5):
        rig.add(2)
    first, second = rig.launch(), rig.launch()
    assert [len(plan.prefill) for plan in (first, second)] == [MAX_CHUNKS, 5]
    assert len(first.assignments) == MAX_CHUNKS and not first.decode


def test_budget_while_decoding_is_a_share() -> None:
    rig = Rig(prefill_token_budget=40, prefer_high_throughput=False)
    rig.add(30)
    rig.add(30)
    assert spans(rig.launch()) == [(0, 0, 30), (1, 0, 10)]
    assert spans(rig.launch()) == [(1, 10, 10)]


@pytest.mark.parametrize("is_ahead", [True, False])
def test_budget_is_a_share_beside_a_sequence_that_waits_for_its_mask(is_ahead: bool) -> None:
    """The mask depends on the step in flight, or is being computed."""
    rig = Rig(prefill_token_budget=40, prefer_high_throughput=False)
    waiting = rig.add(5)
    waiting.constraint = constraint()
    rig.launch()
    if not is_ahead:
        rig.commit()
        waiting.awaits_mask = True
    rig.add(30)
    plan = rig.launch()
    assert not plan.decode and spans(plan) == [(1, 0, 10)]


def test_budget_is_a_share_beside_a_sequence_that_lacks_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(prefill_token_budget=40, prefer_high_throughput=False)
    rig.add(8)
    rig.add(90)
    assert spans(rig.launch()) == [(0, 0, 8), (1, 0, 32)]
    monkeypatch.setattr(rig.scheduler, "_reserve", lambda sequence, num_blocks: False)
    plan = rig.launch()
    assert not plan.decode and spans(plan) == [(1, 32, 10)]


def test_budget_of_mixed_steps_holds_the_waiting_prompts() -> None:
    mixed = {0: ((4, (4, 8, 16, 32)),)}
    rig = Rig(mixed_tokens=mixed, prefer_high_throughput=False)
    rig.add(3)
    rig.turn()
    for length in (40, 7, 3):
        rig.add(length)
    assert spans(rig.launch()) == [(1, 0, 22), (2, 0, 7), (3, 0, 3)]  # the largest size
    assert spans(rig.launch()) == [(1, 22, 18)]


def test_waiting_tokens_are_those_of_prompts_that_can_be_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(max_num_seqs=3, prefill_token_budget=16)
    seen: list[int] = []
    num_tokens = rig.scheduler._budget.num_tokens
    monkeypatch.setattr(
        rig.scheduler._budget,
        "num_tokens",
        lambda rows, waiting, drafts: (seen.append(waiting), num_tokens(rows, waiting, drafts))[1],
    )
    for length in (3, 30, 5, 100):
        rig.add(length)
    for _ in range(4):
        rig.launch()
    assert seen == [38, 22, 6, 0]  # the first three get all slots


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_no_row_is_planned_when_all_tokens_may_be_in_flight(num_draft_tokens: int) -> None:
    rig = Rig(num_draft_tokens=num_draft_tokens)
    sequence = rig.add(5, max_tokens=3)
    assert [rig.schedule() is None for _ in range(4)] == [False, False, False, True]
    rig.drain()
    assert (sequence.finish, sequence.token_ids) == ("length", rig.story(sequence))


@pytest.mark.parametrize("has_draft_kv", [False, True])
def test_blocks_for_rejected_drafts_are_freed(has_draft_kv: bool) -> None:
    """The newest token has no KV yet, unless a draft's KV is kept one slot ahead."""
    rig = Rig(num_draft_tokens=3, has_draft_kv=has_draft_kv)
    sequence = rig.add(8)
    for num_tokens in (8 + 1, 8 + 1 + 4, 8 + 1 + 4 + 4):
        num_held = len(sequence.block_table)
        (update,) = rig.launch().block_updates
        num_blocks = -(-(num_tokens - (not has_draft_kv)) // 4)
        assert (update.first_index, len(update.block_ids)) == (
            num_held,
            num_blocks - num_held,
        )
        assert len(sequence.block_table) == num_blocks

    rig.commit()
    num_freed = 0
    for _ in range(8):
        num_held = len(sequence.block_table)
        rig.commit()
        most = len(sequence.token_ids) + sequence.max_in_flight_tokens - (not has_draft_kv)
        assert len(sequence.block_table) == -(-most // 4)
        assert rig.scheduler.num_free_blocks == 100 - len(sequence.block_table)
        num_freed += num_held - len(sequence.block_table)
        rig.launch()

    assert num_freed > 0


def test_blocks_filled_by_decoding_are_shared() -> None:
    rig = Rig()
    running = rig.add(3)
    rig.turn(8)
    assert running.is_running and running.num_computed_tokens == 10
    follower = rig.add(running.token_ids)
    rig.launch()
    assert follower.num_cached_tokens == 8


def test_no_blocks_are_reserved_beyond_max_length() -> None:
    rig = Rig(num_draft_tokens=4, num_blocks=2)
    sequence = rig.add(6, max_tokens=3)
    rig.drain()
    assert sequence.token_ids == rig.story(sequence)


@pytest.mark.parametrize(("length", "num_cached"), [(7, 4), (8, 4), (9, 8), (4, 0), (3, 0)])
def test_prefix_hit_is_whole_blocks_and_excludes_the_last_token(length: int, num_cached: int) -> None:
    rig = Rig()
    prompt = list(range(length))
    first = rig.add(prompt, max_tokens=1)
    rig.drain()
    second = rig.add(prompt, max_tokens=1)
    plan = rig.launch()
    assert spans(plan) == [(0, num_cached, length - num_cached)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_cached)
    rig.drain()


@pytest.mark.parametrize(
    ("salts", "num_cached"),
    [((None, "a"), 0), (("a", None), 0), (("a", "b"), 0), (("a", "a"), 8), ((None, None), 8)],
)
def test_only_equal_salts_share_blocks(salts: tuple[str | None, str | None], num_cached: int) -> None:
    """Also after a preemption."""
    rig = Rig(num_blocks=12, num_draft_tokens=2)
    prompt = list(range(11))
    first = rig.add(prompt, max_tokens=30, priority=1, cache_salt=salts[0])
    rig.turn()
    second = rig.add(prompt, max_tokens=30, priority=1, cache_salt=salts[1])
    rig.turn()
    assert second.is_running and second.num_cached_tokens == num_cached
    other = rig.add(40, max_tokens=5)
    while other.finish is None:
        rig.turn()
    assert rig.scheduler.num_preemptions
    rig.drain()
    for sequence in (first, second):
        assert sequence.token_ids == rig.story(sequence)


def test_uncommitted_blocks_are_not_shared() -> None:
    rig = Rig(prefill_token_budget=8)
    prompt = list(range(13))
    rig.add(prompt)
    rig.launch()
    rig.launch()
    second = rig.add(prompt)
    plan = rig.launch()
    assert plan.prefill[0].start == second.num_cached_tokens == 0
    rig.commit()
    third = rig.add(prompt)
    plan = rig.launch()
    assert plan.prefill[-1].start == third.num_cached_tokens == 8
    rig.drain()


def test_equal_blocks_of_two_sequences_are_cached_once() -> None:
    rig = Rig()
    prompt = list(range(12))
    twins = [rig.add(prompt, max_tokens=9), rig.add(prompt, max_tokens=9)]
    rig.turn()
    assert rig.scheduler.num_cached_blocks == 3
    assert not set(twins[0].block_table) & set(twins[1].block_table)
    rig.drain()
    assert twins[0].token_ids != twins[1].token_ids
    for twin in twins:
        follower = rig.add([*twin.token_ids, 7])
        rig.launch()
        assert follower.num_cached_tokens == 20  # the newest token's KV was never written
        rig.scheduler.remove(follower)

    rig.drain()


def test_longest_sequence_fits_beside_an_equal_one() -> None:
    rig = Rig(num_blocks=4, max_num_seqs=2)
    twins = [rig.add([1, 2, 3, 4, 5], max_tokens=12), rig.add([1, 2, 3, 4, 5], max_tokens=12)]
    rig.drain()
    assert [twin.token_ids for twin in twins] == [rig.story(twin) for twin in twins]


def test_admission_follows_priority_then_arrival() -> None:
    rig = Rig(max_num_seqs=1)
    added = [rig.add(3, max_tokens=1, priority=priority) for priority in (1, 0, 1, 0)]
    ended: list[Sequence] = []
    while rig.scheduler.has_work:
        rig.launch()
        ended += [delta.sequence for delta in rig.commit()]

    assert ended == [added[1], added[3], added[0], added[2]]


def test_no_sequence_overtakes_the_first_of_the_queue() -> None:
    rig = Rig(num_blocks=10)
    rig.add(20, max_tokens=20)
    rig.turn()
    large, small = rig.add(21, max_tokens=9), rig.add(2, max_tokens=9)
    plan = rig.launch()
    assert not plan.prefill
    assert (large.started_at, small.started_at) == (None, None)
    assert (rig.scheduler.num_waiting, rig.scheduler.num_queued) == (2, 2)
    rig.scheduler.remove(large)
    assert len(rig.launch().prefill) == 1
    assert small.started_at is not None


def test_no_admission_while_a_row_lacks_blocks() -> None:
    rig = Rig(num_blocks=6, num_draft_tokens=7)
    rig.add(4, max_tokens=20)
    rig.add(8, max_tokens=1)
    rig.launch()
    rig.launch()
    small = rig.add(1, max_tokens=1)
    assert rig.scheduler.num_free_blocks == 1
    assert rig.schedule() is None
    assert small.started_at is None
    rig.drain()
    assert small.token_ids == rig.story(small)


def test_admission_counts_cached_blocks_once() -> None:
    rig = Rig(num_blocks=6)
    prompt = list(range(16))
    rig.add(prompt, max_tokens=1)
    rig.drain()
    rig.add(7, max_tokens=2)  # two of the six blocks
    rig.launch()
    # Three cached blocks are hit and one more is free or evictable, but a row would need a fifth.
    waiting = rig.add(prompt, max_tokens=9)
    assert rig.scheduler.num_free_blocks == 4
    assert not rig.launch().prefill
    assert waiting.started_at is None
    rig.drain()
    assert waiting.num_cached_tokens == 12


def test_preempted_sequence_recomputes_its_output_too() -> None:
    rig = Rig(num_blocks=8)
    worst = rig.add(9, max_tokens=20, priority=1)
    rig.turn(3)
    best = rig.add(12, max_tokens=20)
    while not rig.scheduler.num_preemptions:
        rig.turn()

    assert (worst.slot, worst.block_table, worst.num_in_flight) == (-1, [], 0)
    assert best.is_running
    assert (rig.scheduler.num_waiting, rig.scheduler.num_queued) == (1, 0)
    started_at, length = worst.started_at, len(worst.token_ids)
    while not worst.is_running:
        chunks = rig.launch().prefill
        rig.commit()

    (chunk,) = chunks
    assert chunk.start + len(chunk.token_ids) == length
    assert worst.started_at == started_at
    assert worst.num_cached_tokens == 0  # of the first admission
    rig.drain()
    assert (best.token_ids, worst.token_ids) == (rig.story(best), rig.story(worst))


def test_preempted_sequence_does_not_report_its_prompt_again() -> None:
    rig = Rig(num_blocks=8)
    worst = rig.add(9, max_tokens=20, priority=1)
    worst.sampling = replace(worst.sampling, num_prompt_logprobs=2)
    plans = [rig.launch()]
    rig.commit()
    rig.turn(2)
    rig.add(12, max_tokens=20)
    while not rig.scheduler.num_preemptions:
        rig.turn()
    while not worst.is_running:
        plans.append(rig.launch())
        rig.commit()
    reported = [each.sampling.num_prompt_logprobs for plan in plans for each in plan.assignments]
    assert (reported[0], reported[-1]) == (2, None)
    rig.drain()
    assert worst.token_ids == rig.story(worst)


def test_later_sequence_preempts_itself_rather_than_an_earlier_one() -> None:
    rig = Rig(num_blocks=8, max_num_seqs=2)
    best, worst = rig.add(4, max_tokens=25), rig.add(16, max_tokens=9)
    while not rig.scheduler.num_preemptions:
        rig.turn()

    assert best.is_running and not worst.is_running
    rig.drain()
    assert (best.token_ids, worst.token_ids) == (rig.story(best), rig.story(worst))


def test_results_in_flight_of_a_preempted_sequence_delay_its_admission() -> None:
    rig = Rig(num_blocks=3)
    best, worst = rig.add(3, max_tokens=9), rig.add(5, max_tokens=8)
    assert [rows(rig.launch()) for _ in range(3)] == [[], [0, 1], [1]]  # `best` waits for its results
    rig.commit()
    rig.commit()
    assert rows(rig.launch()) == [0]
    assert (worst.slot, worst.num_in_flight, len(worst.token_ids)) == (-1, 1, 7)
    rig.scheduler.remove(best)
    assert rig.schedule() is None  # there is room, but the length is not known yet
    (delta,) = rig.commit()
    assert (delta.sequence, len(worst.token_ids)) == (worst, 8)
    (chunk,) = rig.launch().prefill
    assert chunk.start + len(chunk.token_ids) == 8
    rig.drain()
    assert worst.token_ids == rig.story(worst)


def test_preempted_sequence_ends_while_waiting() -> None:
    rig = Rig(num_blocks=3)
    best, worst = rig.add(3, max_tokens=9), rig.add(5, max_tokens=3)
    for _ in range(3):
        rig.launch()

    rig.commit()
    rig.commit()
    rig.launch()
    assert (rig.scheduler.num_preemptions, rig.scheduler.num_waiting) == (1, 1)
    (delta,) = rig.commit()
    assert (delta.sequence, delta.output.finish, worst.finish) == (worst, "length", "length")
    assert rig.scheduler.num_waiting == 0
    rig.drain()
    assert (best.token_ids, worst.token_ids) == (rig.story(best), rig.story(worst))


def test_removal_frees_slot_and_blocks_and_drops_results_in_flight() -> None:
    rig = Rig(max_num_seqs=1, num_blocks=3)
    removed = rig.add(8, max_tokens=5)
    rig.launch()
    rig.launch()
    rig.scheduler.remove(removed)
    rig.scheduler.remove(removed)
    assert rig.scheduler.num_free_blocks == 3
    assert removed.finish == "cancelled"
    successor = rig.add(5, max_tokens=2)
    plan = rig.launch()
    assert [assignment.slot for assignment in plan.assignments] == [0]
    assert rig.commit() == rig.commit() == []
    (delta,) = rig.commit()
    assert delta.sequence is successor
    rig.drain()
    assert successor.token_ids == rig.story(successor)


def test_removal_keeps_an_earlier_finish_reason() -> None:
    rig = Rig()
    sequence = rig.add(8)
    rig.turn()
    sequence.finish = "stop"
    rig.scheduler.remove(sequence)
    assert sequence.finish == "stop"
    assert not rig.scheduler.has_work
    assert rig.scheduler.num_free_blocks == 100


def test_removal_of_a_waiting_sequence() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add(3)
    waiting = rig.add(3)
    rig.turn()
    rig.scheduler.remove(waiting)
    assert (rig.scheduler.num_waiting, rig.scheduler.num_queued, rig.scheduler.num_running) == (0, 0, 1)


def test_sequence_larger_than_the_cache_is_rejected() -> None:
    rig = Rig(num_blocks=2)
    with pytest.raises(AssertionError, match="3 blocks"):
        rig.add(5, max_tokens=5)

    rig.add(5, max_tokens=4)


def test_result_out_of_order_is_rejected() -> None:
    rig = Rig()
    rig.add(3)
    rig.launch()
    rig.launch()
    rig.device.collect()
    with pytest.raises(AssertionError, match="step 0 comes first"):
        rig.scheduler.commit(rig.device.collect())


def test_budget_observes_results_of_unfinished_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(prefill_token_budget=6)
    seen: list[tuple[int, int, int, float]] = []
    monkeypatch.setattr(rig.scheduler._budget, "observe", lambda *observed: seen.append(observed))
    first = rig.add(4)
    second = rig.add(6, max_tokens=2)
    for _ in range(5):
        rig.launch()

    assert seen == []
    rig.commit()
    assert seen == [(6, 0, 0, pytest.approx(0.0006))]
    rig.scheduler.remove(first)
    for _ in range(3):
        rig.commit()

    # The rows of the removed sequence were computed. The last row of `second` came after its end.
    assert second.finish == "length"
    assert seen[1:] == [(4, 1, 1, pytest.approx(0.0104)), (0, 2, 2, pytest.approx(0.01))]
    rig.commit()
    assert len(seen) == 3


def test_chunk_holds_the_tokens_of_the_prompt() -> None:
    rig = Rig()
    sequence = rig.add([5, 6, 7])
    assert rig.launch().prefill == (
        PrefillChunk(slot=sequence.slot, start=0, token_ids=(5, 6, 7), next_token_id=None),
    )


def test_row_of_a_tree_reserves_the_blocks_of_its_depth() -> None:
    rig = Rig(num_draft_tokens=15, max_tree_depth=3, block_size=1)
    sequence = rig.add(5)
    rig.turn()
    (row,) = rig.launch().decode
    assert (row.num_draft_tokens, row.max_depth, row.max_emitted_tokens) == (15, 3, 4)
    # KV of the newest token and of three drafts.
    assert len(sequence.block_table) == 9
    assert sequence.max_in_flight_tokens == 4


def test_tree_is_limited_by_request_room_and_constraint() -> None:
    rig = Rig(num_draft_tokens=15, max_tree_depth=5)
    capped, short, constrained = rig.add(5), rig.add(5, max_tokens=4), rig.add(5)
    capped.max_draft_tokens = 6
    constrained.constraint = constraint()
    rig.turn()
    rows = {row.slot: row for row in rig.launch().decode}
    found = [
        (rows[sequence.slot].num_draft_tokens, rows[sequence.slot].max_emitted_tokens)
        for sequence in (capped, short, constrained)
    ]
    assert found == [(6, 6), (15, 3), (5, 6)]


@pytest.mark.parametrize("max_tree_depth", [0, 3])
def test_nothing_is_drafted_while_masks_take_long(max_tree_depth: int) -> None:
    rig = Rig(num_draft_tokens=3, max_tree_depth=max_tree_depth)
    sequence = rig.add(5)
    rig.turn()
    for is_slow, num_draft_tokens in ((False, 3), (True, 0)):
        sequence.constraint = constraint(is_slow=is_slow)
        assert sequence.num_draft_tokens(3) == num_draft_tokens
        assert sequence.num_tree_tokens(3, 3) == num_draft_tokens
    (row,) = rig.launch().decode
    assert row.num_draft_tokens == 0


def test_row_whose_mask_is_known_is_planned_one_token_ahead() -> None:
    rig = Rig()
    free, known, unknown = rig.add(5), rig.add(5), rig.add(5)
    mask = object()
    known.constraint = constraint(mask)
    unknown.constraint = constraint()
    rig.launch()
    ahead = rig.launch()  # behind the step that ends the prompts
    assert {row.slot: row.mask for row in ahead.decode} == {free.slot: None, known.slot: mask}
    assert rows(rig.launch()) == [free.slot]  # two tokens are not known
    for _ in range(3):
        rig.commit()
    assert {row.slot: row.mask for row in rig.launch().decode} == {
        each.slot: None for each in (free, known, unknown)
    }
    known.awaits_mask = True
    assert rows(rig.launch()) == [free.slot]


def test_sequences_whose_masks_depend_on_a_step_in_flight_are_counted() -> None:
    rig = Rig(max_num_seqs=5, prefill_token_budget=18)
    free, bound, other, long = rig.add(5), rig.add(5), rig.add(5), rig.add(20)
    rig.add(3, priority=1)
    for each, mask_s in ((bound, 0.25), (other, 0.5), (long, 0.5)):
        each.is_bound, each.mask_s = True, mask_s
    rig.launch()  # three prompts, and a chunk of the fourth, whose next one can follow
    assert rig.scheduler.count_rows(10.0, 0.5) == (3, 2, 2, 0.5, 0.0, True)
    rig.commit()
    other.await_mask(9.5)
    assert rig.scheduler.count_rows(10.0, 0.5) == (3, 2, 1, 0.5, 9.5, False)
    assert rig.scheduler.count_rows(10.5, 0.5) == (3, 1, 0, 0.25, 0.0, False)  # it has taken too long
    other.end_mask(10.5)
    assert other.mask_s == 1.0 and rig.scheduler.count_rows(10.5, 0.5).num_bound == 1
    assert rig.scheduler.count_rows(10.5, 1.0) == (3, 2, 0, 1.0, 0.0, False)
    assert not free.is_bound


def test_sequences_without_a_further_row_are_not_counted() -> None:
    rig = Rig()
    sequences = [rig.add(5, max_tokens=most) for most in (1, 1, 2)]
    for each in sequences:
        each.is_bound = True
    rig.launch()
    assert rig.scheduler.count_rows(0.0, 1.0)[:3] == (0, 1, 1)


def test_a_sequence_is_bound_once_a_plan_has_lacked_its_row() -> None:
    rig = Rig()
    known, unknown = rig.add(5), rig.add(5)
    known.constraint, unknown.constraint = constraint(object()), constraint(None)
    rig.launch()
    rig.launch()
    assert (known.is_bound, unknown.is_bound) == (False, True)
    drafting = Rig(num_draft_tokens=3)
    sequence, _ = drafting.add(5), drafting.add(5)
    sequence.constraint = constraint(object())
    drafting.launch()
    drafting.launch()
    assert sequence.is_bound


def test_a_batch_that_drafts_plans_no_constrained_row_ahead() -> None:
    rig = Rig(num_draft_tokens=3)
    sequence = rig.add(5)
    sequence.constraint = constraint(object())
    rig.launch()
    assert rig.schedule() is None


@pytest.mark.parametrize("is_fatal", [True, False])
def test_sequence_with_a_violation_drafts_no_more(is_fatal: bool) -> None:
    rig = Rig(num_draft_tokens=3, block_size=1)
    sequence = rig.add(5)
    rig.turn(2)
    num_cached = rig.scheduler.num_cached_blocks
    rig.launch()
    result = rig.device.collect()
    violation = Violation(reason="kv", details="", is_fatal=is_fatal)
    wrong = replace(result, decode=(replace(result.decode[0], violation=violation),))
    (delta,) = rig.scheduler.commit(wrong)
    assert delta.output.violation is violation
    assert sequence.max_draft_tokens == 0 and sequence.has_wrong_drafts
    # KV that cannot be trusted is not shared.
    assert (rig.scheduler.num_cached_blocks == num_cached) == is_fatal
    if is_fatal:
        rig.scheduler.remove(sequence)
        assert rig.scheduler.num_cached_blocks == num_cached
    else:
        (row,) = rig.launch().decode
        assert row.num_draft_tokens == 0
    rig.scheduler.check_integrity()
