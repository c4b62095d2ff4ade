"""A scheduler with a fake device, of which tests make each call."""

from __future__ import annotations

from typing import Any

from fake_device import FakeDevice

from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Delta, Sequence
from drift_sdk.steps import StepPlan


class Rig:
    """A scheduler with a fake device; the test makes each call. Integrity is checked after each."""

    def __init__(self, **changes: Any) -> None:
        values: dict[str, Any] = {
            "max_num_seqs": 4,
            "num_blocks": 100,
            "block_size": 4,
            "prefill_token_budget": 64,
            "prefer_high_throughput": True,
        }
        num_draft_tokens = changes.pop("num_draft_tokens", 0)
        drafts = (num_draft_tokens,) if num_draft_tokens else ()
        self.config = SchedulerConfig(
            **{**values, **changes, "draft_choices": drafts, "is_draft_adaptive": False}
        )
        self.scheduler = Scheduler(self.config)
        self.device = FakeDevice(self.config)
        self.num_added = 0

    def add(
        self,
        prompt: list[int] | int,
        max_tokens: int = 50,
        priority: int = 0,
        cache_salt: str | None = None,
        borders: tuple[int, ...] = (),
    ) -> Sequence:
        """Add a sequence. `prompt`: token ids, or the length of a prompt that shares no block with others."""
        if isinstance(prompt, int):
            prompt = [1000 + self.num_added] * prompt

        sequence = self.device.sequence(
            prompt,
            max_tokens=max_tokens,
            arrival=self.num_added,
            priority=priority,
            cache_salt=cache_salt,
            borders=borders,
        )
        self.num_added += 1
        self.scheduler.add(sequence)
        return sequence

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            self.device.launch(plan)

        return plan

    def launch(self) -> StepPlan:
        plan = self.schedule()
        assert plan is not None
        return plan

    def commit(self) -> list[Delta]:
        deltas = self.scheduler.commit(self.device.collect())
        self.scheduler.check_integrity()
        return deltas

    def turn(self, count: int = 1) -> None:
        """Run `count` steps, each committed before the next."""
        for _ in range(count):
            self.launch()
            self.commit()

    def drain(self) -> None:
        while self.scheduler.has_work:
            if self.scheduler.num_in_flight >= 2 or self.schedule() is None:
                self.commit()

    def story(self, sequence: Sequence) -> list[int]:
        return self.device.stories[sequence.arrival].token_ids


def spans(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(chunk.slot, chunk.start, len(chunk.token_ids)) for chunk in plan.prefill]


def rows(plan: StepPlan) -> list[int]:
    return [row.slot for row in plan.decode]
