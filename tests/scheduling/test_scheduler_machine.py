"""The scheduler under random orders of events, against a fake device that checks every KV slot."""

from __future__ import annotations

from unittest import mock

import fake_device
import hypothesis.strategies as st
import msgspec
import pytest
from fake_device import ALPHABET, FakeDevice, logprob_of
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drift_sdk.draft_policy import ViewCosts
from drift_sdk.scheduling import planning
from drift_sdk.scheduling import sequence as sequence_module
from drift_sdk.scheduling.planning import (
    MAX_STEPS_WITHOUT_TOKENS,
    SchedulerConfig,
    least_window_blocks,
)
from drift_sdk.scheduling.prefix import PrefixNode
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Delta, Sequence
from drift_sdk.speculation import PartialVerification, ViewLayout
from drift_sdk.steps import StepPlan

MAX_DEPTH = 3
PREFIXES = [[], [0] * 5, [1, 2, 3, 4, 0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 3, 3, 3]]
TOKENS = st.integers(0, ALPHABET - 1)


class SchedulerMachine(RuleBasedStateMachine):
    block_sizes = (1, 2, 4)
    max_num_blocks = 40
    min_num_seqs = 1
    prefixes = PREFIXES
    max_tokens = 16

    @initialize(
        data=st.data(),
        num_draft_tokens=st.integers(0, 4),
        prefers_throughput=st.booleans(),
        target_ms=st.sampled_from([None, 11.0]),
        depth=st.integers(1, MAX_DEPTH),
    )
    def start(
        self,
        data: st.DataObject,
        num_draft_tokens: int,
        prefers_throughput: bool,
        target_ms: float | None,
        depth: int,
    ) -> None:
        layout = self.draw_layout(data, num_draft_tokens) if num_draft_tokens else None
        block_size = (
            layout.block_size
            if layout is not None
            else data.draw(st.sampled_from(self.block_sizes), label="block_size")
        )
        num_checkpoints, checkpoint_tokens = self.draw_checkpoints(data, block_size)
        window = self.draw_window(data)
        max_tree_depth = None
        if layout is None:
            max_tree_depth = data.draw(st.sampled_from([None, 1, 2, 6]), label="max_tree_depth")
        least = least_window_blocks(window, block_size, 1 + min(num_draft_tokens, max_tree_depth or 6))
        self.config = SchedulerConfig(
            max_num_seqs=data.draw(st.integers(self.min_num_seqs, 6), label="max_num_seqs"),
            num_blocks=data.draw(st.integers(6, self.max_num_blocks), label="num_blocks"),
            block_size=block_size,
            prefill_token_budget=data.draw(st.integers(1, 12), label="prefill_token_budget"),
            draft_choices=(num_draft_tokens,) if num_draft_tokens else (),
            max_tree_depth=max_tree_depth,
            view_layout=layout,
            view_costs=None if layout is None else ViewCosts(refresh_tokens=9, view_tokens=9),
            is_draft_adaptive=False,
            has_draft_kv=num_draft_tokens > 0 and data.draw(st.booleans(), label="has_draft_kv"),
            num_checkpoints=num_checkpoints,
            checkpoint_tokens=checkpoint_tokens,
            window=window,
            num_window_blocks=least + data.draw(st.sampled_from([0, 0, 1, 4, 12]), label="more blocks")
            if window
            else 0,
            max_expanded_tokens=self.draw_expanded(data),
            target_latency_ms_p50=target_ms,
            prefer_high_throughput=prefers_throughput,
        )
        self.depth = depth
        self.scheduler = Scheduler(self.config)
        self.device = FakeDevice(self.config, seed=data.draw(st.integers(0, 2**32), label="device"))
        self.delivered: dict[Sequence, list[int]] = {}
        self.removed: set[Sequence] = set()
        self.left_out: Sequence | None = None

    def draw_layout(self, data: st.DataObject, num_draft_tokens: int) -> ViewLayout | None:
        """No partial verification."""
        return None

    def draw_checkpoints(self, data: st.DataObject, block_size: int) -> tuple[int, int]:
        """No recurrent states."""
        return 0, 0

    def draw_window(self, data: st.DataObject) -> int:
        """One block for all layers."""
        return 0

    def draw_expanded(self, data: st.DataObject) -> int:
        """One form of attention."""
        return 0

    @rule(
        data=st.data(),
        suffix=st.lists(TOKENS, max_size=6),
        priority=st.integers(0, 2),
        stops=st.one_of(st.just([]), st.lists(TOKENS, max_size=1)),
        wants_logprobs=st.booleans(),
        cache_salt=st.sampled_from([None, None, "a", "b"]),
        borders=st.lists(st.integers(0, 20), max_size=2),
    )
    def add(
        self,
        data: st.DataObject,
        suffix: list[int],
        priority: int,
        stops: list[int],
        wants_logprobs: bool,
        cache_salt: str | None,
        borders: list[int],
    ) -> None:
        # The cache must hold the longest sequence: KV of all tokens but the last, with a draft also of the
        # last.
        most = self.config.num_blocks * self.config.block_size + (not self.config.has_draft_kv)
        prefix = data.draw(st.sampled_from(self.prefixes), label="prefix")
        prompt_ids = ([*prefix, *suffix] or [0])[: most - 1]
        sequence = self.device.sequence(
            prompt_ids,
            max_tokens=data.draw(
                st.integers(1, min(self.max_tokens, most - len(prompt_ids))), label="max_tokens"
            ),
            arrival=len(self.delivered),
            priority=priority,
            stop_token_ids=tuple(stops),
            num_logprobs=0 if wants_logprobs else None,
            cache_salt=cache_salt,
            borders=tuple(borders),
        )
        if self.config.view_layout is not None:
            sequence.max_draft_tokens = data.draw(
                st.sampled_from([None, None, 0, 1]), label="max_draft_tokens"
            )
        self.delivered[sequence] = []
        self.scheduler.add(sequence)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Remove any sequence at any time, even if it has ended."""
        sequence = data.draw(st.sampled_from(list(self.delivered)))
        self.scheduler.remove(sequence)
        self.scheduler.remove(sequence)
        self.removed.add(sequence)
        assert sequence.finish is not None

    @precondition(lambda self: self.scheduler.num_in_flight < self.depth)
    @rule()
    def launch(self) -> None:
        self.try_launch()

    @precondition(lambda self: self.scheduler.num_in_flight)
    @rule()
    def commit(self) -> None:
        self.commit_one()

    @rule(count=st.integers(1, 8))
    def turn(self, count: int) -> None:
        """Launch and commit as the engine does, several times."""
        for _ in range(count):
            if self.scheduler.num_in_flight < self.depth:
                self.try_launch()

            if self.scheduler.num_in_flight >= self.depth:
                self.commit_one()

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "scheduler"):
            return

        scheduler = self.scheduler
        scheduler.check_integrity()
        assert scheduler.num_in_flight == len(self.device.launched)
        assert scheduler.num_waiting + scheduler.num_running == len(self.unended())
        assert scheduler.num_running <= self.config.max_num_seqs
        assert scheduler.num_queued == sum(sequence.started_at is None for sequence in self.unended())
        for sequence, token_ids in self.delivered.items():
            story = self.device.stories[sequence.arrival]
            assert token_ids == story.output_ids[: len(token_ids)]
            if sequence not in self.removed:
                assert sequence.token_ids == story.prompt_ids + token_ids
                assert (len(token_ids) == len(story.output_ids)) == (sequence.finish is not None)
                assert sequence.finish in (None, story.finish)

    def unended(self) -> list[Sequence]:
        return [sequence for sequence in self.delivered if sequence.finish is None]

    def try_launch(self) -> bool:
        must_launch = bool(self.unended()) and not self.scheduler.num_in_flight
        before = self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is None:
            assert not must_launch, "there is work, nothing is in flight, and nothing is planned"
            assert self.scheduler.num_preemptions == before or self.scheduler.num_in_flight
            return False

        self.device.launch(plan)
        self.check_order(plan)
        return True

    def check_order(self, plan: StepPlan) -> None:
        """The first running sequence is part of the newest plan, unless it waits for its own results; or,
        once, for a refresh of the sequences with pending rows, if there are too many to refresh all; or its
        prompt was passed over for shorter ones, a few times in a row."""
        first = min((s for s in self.delivered if s.slot >= 0), key=lambda s: s.order, default=None)
        if first is None or first.num_in_flight:
            self.left_out = None
        elif plan.verification == "refresh" and first is not self.left_out:
            self.left_out = first
        elif first.is_prefilling and plan.prefill:
            assert 0 < first.num_steps_without_tokens <= MAX_STEPS_WITHOUT_TOKENS, (
                f"{first} makes no progress"
            )
        else:
            raise AssertionError(f"{first} makes no progress")

    def commit_one(self) -> None:
        for delta in self.scheduler.commit(self.device.collect()):
            self.deliver(delta)

        self.scheduler.check_integrity()

    def deliver(self, delta: Delta) -> None:
        sequence, output = delta.sequence, delta.output
        assert sequence not in self.removed, "tokens for a removed sequence"
        assert output.token_ids
        token_ids = self.delivered[sequence]
        first = sequence.num_prompt_tokens + len(token_ids)
        wanted = None
        if sequence.sampling.num_logprobs is not None:
            wanted = tuple(logprob_of(first + i, token_id) for i, token_id in enumerate(output.token_ids))

        assert output.logprobs == wanted
        token_ids.extend(output.token_ids)
        assert output.finish == sequence.finish

    def drain(self) -> None:
        budget = 100 + 100 * len(self.delivered)
        while self.scheduler.has_work:
            budget -= 1
            assert budget > 0, "no progress"
            if self.scheduler.num_in_flight < self.depth and self.try_launch():
                continue

            self.commit_one()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return

        self.drain()
        self.is_sound()
        assert not self.unended()
        assert self.scheduler.num_free_blocks == self.config.num_blocks
        assert self.scheduler.num_free_window_blocks == self.config.num_window_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.num_queued == 0
        assert self.scheduler.schedule() is None
        for sequence, token_ids in self.delivered.items():
            assert (sequence.num_in_flight, sequence.slot, sequence.block_table) == (0, -1, [])
            if sequence not in self.removed:
                assert token_ids == self.device.stories[sequence.arrival].output_ids


class TinyPoolMachine(SchedulerMachine):
    """So few blocks that sequences are preempted all the time."""

    block_sizes = (2, 4)
    max_num_blocks = 9
    min_num_seqs = 3
    prefixes = PREFIXES[:2]
    max_tokens = 40


class CheckpointMachine(SchedulerMachine):
    """Recurrent states, with so few places that checkpoints are taken from nodes all the time."""

    max_tokens = 24

    def draw_checkpoints(self, data: st.DataObject, block_size: int) -> tuple[int, int]:
        num_blocks = data.draw(st.integers(1, 3), label="blocks of a checkpoint")
        return data.draw(st.integers(0, 6), label="num_checkpoints"), num_blocks * block_size

    @precondition(lambda self: not self.scheduler.num_in_flight)
    @rule()
    def lose_kv(self) -> None:
        self.scheduler.forget_kv()
        self.device.lose_kv()
        self.scheduler.check_integrity()
        assert self.scheduler.checkpoints is not None
        assert self.scheduler.checkpoints.pool.num_held == self.scheduler.num_cached_blocks == 0

    @invariant()
    def holds_states(self) -> None:
        """The place of each node has the states after the tokens on the path to it."""
        if not hasattr(self, "scheduler"):
            return

        paths: list[tuple[PrefixNode, list[int | str]]] = [(self.scheduler._blocks.trie.root, [])]
        for node, path in paths:
            paths += [(child, [*path, *key]) for key, child in node.children.items()]
            if node.checkpoint >= 0:
                token_ids = [token_id for token_id in path if isinstance(token_id, int)]
                place = self.device.places[node.checkpoint]
                assert [content[0] for content in place] == token_ids

        for sequence in self.scheduler._running.sequences:
            story = self.device.stories[sequence.arrival]
            for kept in sequence.kept_checkpoints:
                if kept.checkpoint >= 0:
                    assert self.device.places[kept.checkpoint] == story.kv[: kept.position]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "scheduler"):
            self.holds_states()


class WindowMachine(SchedulerMachine):
    """Layers with windows that have blocks of their own, few enough that cached ones are evicted all the time
    and prompts have to wait for them."""

    max_tokens = 30
    max_num_blocks = 80
    prefixes = [*PREFIXES, [number % 5 for number in range(40)], [number // 7 % 5 for number in range(47)]]

    def draw_window(self, data: st.DataObject) -> int:
        return data.draw(st.integers(1, 9), label="window")

    @precondition(lambda self: not self.scheduler.num_in_flight)
    @rule()
    def lose_kv(self) -> None:
        self.scheduler.forget_kv()
        self.device.lose_kv()
        self.scheduler.check_integrity()
        assert self.scheduler.num_free_window_blocks == self.config.num_window_blocks

    @invariant()
    def holds_windows(self) -> None:
        """The window block of each node has the tokens of its block, and of the path to it."""
        if not hasattr(self, "scheduler"):
            return

        size = self.config.block_size
        paths: list[tuple[PrefixNode, list[int | str]]] = [(self.scheduler._blocks.trie.root, [])]
        for node, path in paths:
            paths += [(child, [*path, *key]) for key, child in node.children.items()]
            if node.window_block >= 0:
                found = self.device.window_kv[node.window_block * size : (node.window_block + 1) * size]
                assert found == self.device.kv[node.block_id * size : (node.block_id + 1) * size]
                token_ids = [token_id for token_id in path if isinstance(token_id, int)]
                assert [content[0] for content in found] == token_ids[-size:]


class ExpandedMachine(SchedulerMachine):
    """Prompts attend to expanded keys, so few in a step that some have to wait, and so few of a prompt that
    its end does not. Answers are the beginnings of later prompts."""

    max_tokens = 24
    least_prompt = 4

    def draw_expanded(self, data: st.DataObject) -> int:
        self.patches = [
            mock.patch.object(planning, "MIN_EXPANDED_PROMPT", self.least_prompt),
            mock.patch.object(
                planning, "EXPANDED_BORDER", data.draw(st.sampled_from([2, 4]), label="border")
            ),
            *(
                mock.patch.object(module, "EXPANDED_TILE", 2)
                for module in (planning, sequence_module, fake_device)
            ),
        ]
        for patch in self.patches:
            patch.start()
        return 2 * data.draw(st.integers(1, 12), label="tiles of expanded keys")

    @precondition(lambda self: any(map(len, self.delivered.values())))
    @rule(data=st.data(), num_tokens=st.integers(0, 24), suffix=st.lists(TOKENS, max_size=6))
    def add_turn(self, data: st.DataObject, num_tokens: int, suffix: list[int]) -> None:
        """The prompt and a part of the answer of another sequence as the beginning of a prompt."""
        before = data.draw(st.sampled_from([each for each, given in self.delivered.items() if given]))
        prompt_ids = [*before.token_ids[: before.num_prompt_tokens + num_tokens], *suffix]
        most = self.config.num_blocks * self.config.block_size - 1
        added = self.device.sequence(prompt_ids[:most], max_tokens=1, arrival=len(self.delivered))
        self.delivered[added] = []
        self.scheduler.add(added)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            for patch in getattr(self, "patches", ()):
                patch.stop()


class ViewMachine(SchedulerMachine):
    """Verification over views, with so few rows in a refresh that some sequences have to wait for it."""

    min_num_seqs = 3
    max_num_blocks = 20
    max_tokens = 40

    def draw_layout(self, data: st.DataObject, num_draft_tokens: int) -> ViewLayout:
        settings = PartialVerification(
            sink_tokens=data.draw(st.integers(1, 3), label="sink_tokens"),
            retrieved_tokens=data.draw(st.integers(1, 4), label="retrieved_tokens"),
            window_tokens=data.draw(st.integers(1, 3), label="window_tokens"),
            refresh_tokens=data.draw(st.integers(num_draft_tokens + 1, 9), label="refresh_tokens"),
        )
        block_size = data.draw(st.sampled_from(self.block_sizes), label="block_size")
        layout = settings.layout(block_size, num_draft_tokens)
        return msgspec.structs.replace(layout, max_sequences=data.draw(st.integers(1, 6), label="most"))


FEW = settings(max_examples=80, stateful_step_count=40, deadline=None)
MANY = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
TestTinyPool = TinyPoolMachine.TestCase
TestCheckpoints = CheckpointMachine.TestCase
TestWindows = WindowMachine.TestCase
TestViews = ViewMachine.TestCase
TestExpanded = ExpandedMachine.TestCase
TestScheduler.settings = TestTinyPool.settings = TestCheckpoints.settings = TestViews.settings = FEW
TestWindows.settings = TestExpanded.settings = FEW


@pytest.mark.slow
class TestSchedulerAtLength(TestScheduler):
    settings = MANY


@pytest.mark.slow
class TestTinyPoolAtLength(TestTinyPool):
    settings = MANY


@pytest.mark.slow
class TestCheckpointsAtLength(TestCheckpoints):
    settings = MANY


@pytest.mark.slow
class TestWindowsAtLength(TestWindows):
    settings = MANY


@pytest.mark.slow
class TestViewsAtLength(TestViews):
    settings = MANY


@pytest.mark.slow
class TestExpandedAtLength(TestExpanded):
    settings = MANY


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_tokens_under_many_preemptions(num_draft_tokens: int, depth: int) -> None:
    config = SchedulerConfig(
        max_num_seqs=8,
        num_blocks=24,
        block_size=4,
        prefill_token_budget=16,
        draft_choices=(num_draft_tokens,) if num_draft_tokens else (),
        is_draft_adaptive=False,
    )
    scheduler, device = Scheduler(config), FakeDevice(config, seed=depth)
    delivered: dict[Sequence, list[int]] = {}
    for arrival in range(30):
        prompt_ids = [arrival % 3] * 9 + [arrival % ALPHABET]
        sequence = device.sequence(prompt_ids, max_tokens=60, arrival=arrival, priority=arrival % 2)
        delivered[sequence] = []
        scheduler.add(sequence)

    while scheduler.has_work:
        plan = scheduler.schedule() if scheduler.num_in_flight < depth else None
        scheduler.check_integrity()
        if plan is not None:
            device.launch(plan)

        if plan is None or scheduler.num_in_flight == depth:
            for delta in scheduler.commit(device.collect()):
                delivered[delta.sequence] += delta.output.token_ids

            scheduler.check_integrity()

    assert scheduler.num_preemptions > 20
    assert scheduler.num_free_blocks == config.num_blocks
    for sequence, token_ids in delivered.items():
        assert token_ids == device.stories[sequence.arrival].output_ids
        assert sequence.finish == "length"


@pytest.mark.parametrize(
    ("num_drafts", "refresh_tokens", "num_blocks", "seed", "start", "prompts", "outputs"),
    [(2, 4, 14, 421647, 2, (11, 9), (10, 2)), (3, 9, 13, 184594, 2, (4, 9), (14, 10))],
)
def test_a_refresh_whose_sequences_are_preempted_plans_the_others(
    num_drafts: int,
    refresh_tokens: int,
    num_blocks: int,
    seed: int,
    start: int,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
) -> None:
    """A refresh that is too small for all sequences takes those with pending rows. If it preempts all of
    these, because they lack blocks, the others are planned at once: there is nothing else to wait for."""
    settings = PartialVerification(
        sink_tokens=1, retrieved_tokens=1, window_tokens=1, refresh_tokens=refresh_tokens
    )
    config = SchedulerConfig(
        max_num_seqs=2,
        num_blocks=num_blocks,
        block_size=2,
        prefill_token_budget=32,
        draft_choices=(num_drafts,),
        is_draft_adaptive=False,
        view_layout=msgspec.structs.replace(settings.layout(2, num_drafts), max_sequences=1),
        view_costs=ViewCosts(refresh_tokens=refresh_tokens, view_tokens=9),
    )
    scheduler, device = Scheduler(config), FakeDevice(config, seed=seed)
    low, high = (
        device.sequence(
            [arrival] * prompts[arrival], max_tokens=outputs[arrival], arrival=arrival, priority=priority
        )
        for arrival, priority in ((0, 1), (1, 0))
    )
    scheduler.add(low)
    for number in range(100):
        if number == start:
            scheduler.add(high)
        plan = scheduler.schedule()
        if plan is None:
            break
        device.launch(plan)
        scheduler.commit(device.collect())
        scheduler.check_integrity()
    assert (low.finish, high.finish) == ("length", "length")


def test_a_refresh_leaves_out_the_first_sequence_once() -> None:
    """It came while another one had pending rows, for which alone there is room."""
    settings = PartialVerification(sink_tokens=1, retrieved_tokens=1, window_tokens=1, refresh_tokens=2)
    config = SchedulerConfig(
        max_num_seqs=2,
        num_blocks=32,
        block_size=1,
        prefill_token_budget=8,
        draft_choices=(1,),
        is_draft_adaptive=False,
        view_layout=msgspec.structs.replace(settings.layout(1, 1), max_sequences=1),
        view_costs=ViewCosts(refresh_tokens=9, view_tokens=9),
    )
    scheduler, device = Scheduler(config), FakeDevice(config, seed=6)
    low, high = (
        device.sequence([0] * 6, max_tokens=12, arrival=arrival, priority=priority)
        for arrival, priority in ((0, 1), (1, 0))
    )

    def step() -> StepPlan:
        plan = scheduler.schedule()
        assert plan is not None
        device.launch(plan)
        scheduler.commit(device.collect())
        return plan

    scheduler.add(low)
    while step().verification != "partial":
        pass
    scheduler.add(high)
    plans = [step()]  # its prompt is computed beside rows of the other
    while plans[-1].verification != "refresh":
        plans.append(step())
    assert [row.slot for row in plans[-1].decode] == [low.slot]
    assert {row.slot for row in step().decode} == {low.slot, high.slot}
