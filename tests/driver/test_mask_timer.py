"""Whether a step waits for sequences whose masks depend on tokens that are not known."""

from __future__ import annotations

import pytest

from drift_sdk.driver.driver import FREE_WEIGHT, PLAN_S, START_MASK_S, MaskTimer
from drift_sdk.scheduling.scheduler import RowCounts
from drift_sdk.steps import StepResult

GAP_S = START_MASK_S + PLAN_S


def timer_after(step_s: float, mask_s: tuple[float, ...] = ()) -> MaskTimer:
    """A timer after steps that end at time 0, with masks that take so long after each."""
    timer = MaskTimer()
    for each in (*mask_s, None):
        timer.collected(StepResult(step_id=0, prefill=(), decode=(), duration_s=step_s), 0.0)
        if each is not None:
            timer.computed(each)
    return timer


def counts(
    num_free: int, num_bound: int, num_lacking: int | None = None, *, is_idle: bool = False
) -> RowCounts:
    num_lacking = num_bound if num_lacking is None else num_lacking
    return RowCounts(num_free, num_bound, num_lacking, has_in_flight=not is_idle)


def test_bound_sequences_alone_wait_for_each_other_if_masks_take_less_than_a_step() -> None:
    both = counts(0, 64, 32)
    assert timer_after(1.01 * GAP_S).holds(both, 0.0)
    assert not timer_after(0.99 * GAP_S).holds(both, 0.0)
    assert not timer_after(1.0).holds(counts(0, 64, 0), 0.0)  # the plan has all of them


def test_free_sequences_wait_if_enough_others_gain() -> None:
    timer = timer_after(0.006)
    held = [number for number in range(65) if timer.holds(counts(64 - number, number), 0.0)]
    least = next(each for each in range(65) if each * 0.006 > (2 * FREE_WEIGHT * (64 - each) + each) * GAP_S)
    assert held == [*range(least, 65)] and 32 < least < 64


def test_masks_that_take_longer_than_a_step_are_not_waited_for() -> None:
    assert timer_after(0.006, (0.002,) * 60).holds(counts(0, 8), 0.0)
    assert not timer_after(0.006, (0.006,) * 60).holds(counts(0, 8), 0.0)


def test_an_idle_device_waits_for_masks_until_a_deadline() -> None:
    timer = timer_after(1.0)
    idle = counts(60, 4, 1, is_idle=True)
    assert timer.holds(idle, GAP_S)
    (deadline,) = timer.take_deadline()
    assert deadline == pytest.approx(2 * GAP_S) and timer.take_deadline() == ()
    assert not timer.holds(idle, deadline) and timer.take_deadline() == ()
    assert timer.holds(idle, 0.0) and not timer.holds(counts(60, 4, 0, is_idle=True), 0.0)
    assert timer.take_deadline() == ()
    short = timer_after(GAP_S)
    assert short.holds(idle, 0.0) and short.take_deadline() == (pytest.approx(GAP_S / 2),)
