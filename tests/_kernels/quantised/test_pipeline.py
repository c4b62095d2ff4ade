"""A model of the barriers of multiply.cu: two threads copy the steps of a slice, warpgroups multiply them.

Schedules are drawn: copies arrive in any order, and each thread may be held up for as long as others can run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from barrier_model import Barrier, PipelineError
from msgspec.structs import replace
from quantised_cases import FORMATS, draw

from drift_sdk._kernels.quantised.quantised_gemm import FEW_ITEMS, Tiles, num_splits

Ready = Callable[[], bool]
STAGES = (1, 2, 3, 4, 5, 6, 9, 15, 16)
NUM_SCHEDULES = 40


class Pipeline:
    """The stages of a CTA. is_async: products of a step run until the next step of their warpgroup."""

    def __init__(self, num_stages: int, splits: int, *, is_async: bool) -> None:
        self.num_stages, self.splits, self.is_async = num_stages, splits, is_async
        self.num_steps = 2 * num_stages + 3
        self.full = [Barrier(2, 2) for _ in range(num_stages)]
        self.empty = [Barrier(1, 1) for _ in range(num_stages)]
        self.contents: list[list[int | None]] = [[None] * num_stages for _ in range(2)]  # steps
        self.copies: list[tuple[float, int, int]] = []  # priority, what is copied, step

    def run(self, schedule: random.Random) -> None:
        """Run a schedule to its end. Raises PipelineError."""
        threads = [self.copy(i, schedule) for i in (0, 1)]
        threads += [self.multiply(part) for part in range(self.splits)]
        left = [(schedule.random(), thread, next(thread)) for thread in threads]
        while left or self.copies:
            ready = [entry for entry in left if entry[2]()]
            if not ready and not self.copies:
                raise PipelineError("no thread can run")
            entry = max(ready, default=None, key=lambda entry: entry[0])
            copy = max(self.copies, default=None)
            if entry is None or (copy is not None and copy[0] > entry[0]):
                assert copy is not None
                self.copies.remove(copy)
                self.deliver(*copy[1:])
                continue
            left.remove(entry)
            priority = entry[0] if schedule.random() < 0.98 else schedule.random()
            if (condition := next(entry[1], None)) is not None:
                left.append((priority, entry[1], condition))

    def copy(self, what: int, schedule: random.Random) -> Iterator[Ready]:
        """The thread that copies weights (0) or x (1)."""
        stage, parity = 0, 1
        for step in range(self.num_steps):
            yield lambda stage=stage, parity=parity: self.empty[stage].has_ended(parity)
            self.full[stage].arrive(1)
            self.contents[what][stage] = None
            self.copies.append((schedule.random(), what, step))
            stage += 1
            if stage == self.num_stages:
                stage, parity = 0, parity ^ 1

    def deliver(self, what: int, step: int) -> None:
        stage = step % self.num_stages
        self.contents[what][stage] = step
        self.full[stage].num_copies -= 1
        self.full[stage].settle()

    def multiply(self, part: int) -> Iterator[Ready]:
        """A warpgroup, as one thread."""
        stage, parity, before = part % self.num_stages, 0, None
        for step in range(part, self.num_steps, self.splits):
            yield lambda stage=stage, parity=parity: self.full[stage].has_ended(parity)
            self.read(stage, step)
            if self.is_async and before is not None:
                self.release(before, step - self.splits)
            before = stage
            if not self.is_async:
                yield lambda: True
                self.release(stage, step)
            stage += self.splits
            if stage >= self.num_stages:
                stage, parity = stage - self.num_stages, parity ^ 1

    def read(self, stage: int, step: int) -> None:
        if [contents[stage] for contents in self.contents] != [step, step]:
            raise PipelineError(f"stage {stage} of {self.num_stages} does not have step {step}")

    def release(self, stage: int, step: int) -> None:
        self.read(stage, step)
        self.empty[stage].arrive()


def is_right(num_stages: int, splits: int, *, is_async: bool) -> bool:
    """Whether no drawn schedule fails."""
    try:
        for seed in range(NUM_SCHEDULES):
            Pipeline(num_stages, splits, is_async=is_async).run(random.Random(seed))
    except (PipelineError, IndexError):  # a stage that does not exist
        return False

    return True


@pytest.mark.parametrize("splits", [1, 2])
def test_stages_that_fit_are_those_of_pipelines_that_never_fail(splits: int) -> None:
    weight, _ = draw(FORMATS[2], 64, 64, "cpu")
    if splits == 1:
        weight = replace(weight, codes=torch.empty(2 * FEW_ITEMS + 1, 0, dtype=torch.uint8))
    assert num_splits(weight) == splits
    for num_stages in STAGES:
        fits = Tiles(1, 8, num_stages).fits(weight)
        assert is_right(num_stages, splits, is_async=True) == fits, f"{num_stages} stages"
        assert is_right(num_stages, splits, is_async=False) >= fits, f"{num_stages} stages"
