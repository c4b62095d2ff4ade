"""Whether a step waits for sequences whose masks depend on tokens that are not known."""

from __future__ import annotations

import pytest

from drift_sdk.driver.step_timers import FREE_WEIGHT, PLAN_S, MaskTimer
from drift_sdk.scheduling.scheduler import RowCounts
from drift_sdk.steps import StepResult

MASK_S = 0.0005
GAP_S = MASK_S + PLAN_S


def timer_after(*durations: float) -> MaskTimer:
    """A timer after steps."""
    timer = MaskTimer()
    for each in durations:
        timer.collected(StepResult(step_id=0, prefill=(), decode=(), duration_s=each))
    return timer


def counts(
    num_free: int, num_bound: int, num_lacking: int | None = None, *, asked_at: float | None = None
) -> RowCounts:
    """asked_at: on an idle device."""
    num_lacking = num_bound if num_lacking is None else num_lacking
    is_busy = asked_at is None
    return RowCounts(num_free, num_bound, num_lacking, MASK_S, asked_at or 0.0, has_in_flight=is_busy)


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


def test_a_step_waits_for_masks_that_take_less_than_a_step() -> None:
    """Less than the shortest of the last steps: one with a long prompt says nothing of those behind it."""
    assert timer_after(0.02, 2.0).most_mask_s == 0.02 - PLAN_S
    assert MaskTimer().most_mask_s < 0.0


def test_an_idle_device_waits_for_masks_until_a_deadline() -> None:
    timer = timer_after(1.0)
    idle = counts(60, 4, 1, asked_at=5.0)
    assert timer.holds(idle, 5.0 + GAP_S)
    (deadline,) = timer.take_deadline()
    assert deadline == pytest.approx(5.0 + 2 * GAP_S) and timer.take_deadline() == ()
    assert not timer.holds(idle, deadline) and timer.take_deadline() == ()
    assert timer.holds(idle, 5.0) and not timer.holds(counts(60, 4, 0, asked_at=5.0), 5.0)
    assert timer.take_deadline() == ()
    short, bound = timer_after(1.5 * GAP_S), counts(0, 4, 1, asked_at=5.0)
    assert short.holds(bound, 5.0) and short.take_deadline() == (pytest.approx(5.0 + 1.5 * GAP_S),)
    assert not short.holds(idle, 5.0) and short.take_deadline() == ()  # the others would lose more
