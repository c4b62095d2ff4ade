"""Steps are planned shortly before the one that runs is predicted to end."""

from __future__ import annotations

import threading

import anyio
import msgspec
import pytest

from drift_sdk import Engine, EngineClosed, SamplingParams
from drift_sdk.driver import driver
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.driver.step_timers import (
    IDLE_S,
    LEAST_MARGIN_S,
    MOST_DURATIONS,
    MOST_MARGIN_S,
    START_MARGIN_S,
    PlanTimer,
    kind_of,
)
from drift_sdk.events import Report
from drift_sdk.steps import DecodeRow, Executor, ExecutorLimits, PrefillChunk, StepPlan, StepResult
from drift_sdk.testing import ScriptedModel


def plan(num_rows: int = 1, num_tokens: int = 0, num_drafts: int = 0) -> StepPlan:
    chunks = [PrefillChunk(slot=0, start=0, token_ids=(1,) * num_tokens, next_token_id=None)]
    return StepPlan(
        step_id=0,
        assignments=(),
        block_updates=(),
        prefill=tuple(chunks[: bool(num_tokens)]),
        decode=tuple(DecodeRow(slot=slot, num_draft_tokens=num_drafts) for slot in range(num_rows)),
    )


def result(duration_s: float, idle_s: float = 0.0) -> StepResult:
    return StepResult(step_id=0, prefill=(), decode=(), duration_s=duration_s, idle_s=idle_s)


def measured(*durations: float) -> PlanTimer:
    """A timer that knows steps of one row, the last of which has ended at time 0. A single duration counts
    twice."""
    timer = PlanTimer()
    for duration_s in durations if len(durations) > 1 else 2 * durations:
        timer.launched(plan(), 0.0)
        timer.collected(result(duration_s), 0.0)
    return timer


def test_plan_waits_until_the_margin_before_the_end() -> None:
    timer = measured(0.01)
    timer.launched(plan(), -0.001)  # behind the one before, which ended at 0
    assert timer.wait_s(0.002) == pytest.approx(0.01 - START_MARGIN_S - 0.002)
    assert timer.wait_s(0.009) == 0.0
    timer = measured(0.01)
    timer.launched(plan(), 0.5)  # the device was idle
    assert timer.wait_s(0.5) == pytest.approx(0.01 - START_MARGIN_S)


def test_plan_does_not_wait_without_a_prediction() -> None:
    timer = measured(1.0)
    assert timer.wait_s(0.0) == 0.0  # nothing runs
    timer.launched(plan(num_rows=2), 0.0)
    assert timer.wait_s(0.0) == 0.0  # steps of another kind do
    timer.collected(result(1.0), 0.0)
    timer.launched(plan(num_rows=2), 0.0)
    assert timer.wait_s(0.0) == 0.0  # one of them has been measured, which may have taken long
    timer.launched(plan(), 0.0)
    assert timer.wait_s(0.0) == 0.0  # the next one has been planned


def test_shortest_of_the_latest_steps_predicts() -> None:
    timer = measured(0.5, *[2.0] * (MOST_DURATIONS - 1))
    timer.launched(plan(), 0.0)
    assert timer.wait_s(0.0) == pytest.approx(0.5 - START_MARGIN_S)
    timer = measured(0.5, *[2.0] * MOST_DURATIONS)
    timer.launched(plan(), 0.0)
    assert timer.wait_s(0.0) == pytest.approx(2.0 - START_MARGIN_S)


def test_kinds_tell_what_makes_steps_longer() -> None:
    assert kind_of(plan(33)) == kind_of(plan(63)) != kind_of(plan(64))
    assert kind_of(plan(1, 1)) == kind_of(plan(1, 64)) != kind_of(plan(1, 65))
    assert kind_of(plan(1, 0)) != kind_of(plan(1, 1))
    assert kind_of(plan(1, num_drafts=3)) != kind_of(plan(1))


def run(timer: PlanTimer, num_steps: int, idle_s: float, duration_s: float = 1.0) -> None:
    """Steps, each planned at its time, before which the device is idle for so long."""
    now = 0.0
    timer.launched(plan(), now)
    for _ in range(num_steps):
        now += timer.wait_s(now)
        timer.launched(plan(), now)
        timer.collected(result(duration_s, idle_s), now := now + timer.margin_s)


def test_margin_grows_while_the_device_has_been_idle_and_shrinks_otherwise() -> None:
    late = 2 * IDLE_S
    timer = measured(1.0)
    run(timer, 2, late)
    assert timer.margin_s == pytest.approx(2 * START_MARGIN_S)
    run(measured_late := measured(1.0), 100, late)
    assert measured_late.margin_s == MOST_MARGIN_S
    run(timer := measured(1.0), 1000, IDLE_S / 2)
    assert timer.margin_s == LEAST_MARGIN_S


def test_margin_stays_for_steps_that_were_not_waited_for() -> None:
    timer = measured(0.001)
    run(timer, 10, 1.0, duration_s=0.001)
    assert timer.margin_s == START_MARGIN_S


def test_margin_stays_when_there_was_nothing_to_plan() -> None:
    """The device is idle because all requests wait for the host, not because a plan came late."""
    timer = measured(1.0)
    for _ in range(3):
        timer.launched(plan(), 0.0)
        assert timer.wait_s(0.0) > 0.0
        timer.collected(result(1.0, 5.0), 0.0)
    assert timer.margin_s == START_MARGIN_S


def test_time_that_collecting_takes_does_not_hide_that_the_device_was_idle() -> None:
    """Steps of 10 ms are planned in 3 ms, and reading their results takes long: the margin is enough."""
    timer, now, idle_s = measured(0.01), 0.0, 0.0
    duration_s, plan_s, read_s = 0.01, 0.003, 0.001
    timer.launched(plan(), now)
    ends, idles = [duration_s], [0.0]
    for _ in range(2000):
        now += timer.wait_s(now) + plan_s
        timer.launched(plan(), now)
        started_at = max(now, ends[-1])
        idles.append(started_at - ends[-1])
        ends.append(started_at + duration_s)
        now = max(now, ends.pop(0)) + read_s
        timer.collected(result(duration_s, idles.pop(0)), now)
        idle_s += idles[-1]
    assert idle_s < 0.01 * now


class RunningExecutor:
    """A scripted executor whose steps run until they are collected. plans: those that were launched."""

    is_done = False

    def __init__(self, executor: Executor, plans: list[StepPlan]) -> None:
        self._executor, self._plans = executor, plans
        self.limits, self.collect, self.close = executor.limits, executor.collect, executor.close

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._executor.launch(plan)


class RunningModel(ScriptedModel):
    """A scripted model whose steps are planned like those of a GPU."""

    def __init__(self, reply: str) -> None:
        super().__init__(reply)
        self.plans: list[StepPlan] = []
        self.executor: RunningExecutor | None = None

    def __call__(self, report: Report, limits: ExecutorLimits | None = None) -> LoadedModel:
        model = super().__call__(report, limits)
        self.executor = RunningExecutor(model.executor, self.plans)
        return msgspec.structs.replace(model, executor=self.executor)


async def test_requests_that_come_while_a_step_runs_are_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third step waits for a command, and has the chunk of the request that it brings."""
    waits, model = threading.Event(), RunningModel("x" * 64)
    engine = Engine("scripted", model.config, open_model=model)

    class WaitingTimer(PlanTimer):
        def wait_s(self, now: float) -> float:
            assert super().wait_s(now) == 0.0  # steps of no time
            if len(model.plans) != 2 or len(self._in_flight) != 1 or engine._driver._scheduler.num_waiting:
                return 0.0

            waits.set()
            return 3600.0

    monkeypatch.setattr(driver, "PlanTimer", WaitingTimer)
    async with engine:
        first = engine.generate("a", SamplingParams(max_tokens=16))
        assert await anyio.to_thread.run_sync(waits.wait, 120)
        second = engine.generate("b", SamplingParams(max_tokens=16))
        assert len((await first).token_ids) == len((await second).token_ids) == 16

    assert [len(plan.prefill) for plan in model.plans[:4]] == [1, 0, 1, 0]
    assert len(model.plans[2].decode) == 1


async def test_steps_that_run_while_they_are_collected_are_planned_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class EndlessTimer(PlanTimer):
        def wait_s(self, now: float) -> float:
            return 3600.0

    monkeypatch.setattr(driver, "PlanTimer", EndlessTimer)
    model = ScriptedModel("fine")
    async with Engine("scripted", model.config, open_model=model) as engine:
        assert (await engine.generate("a")).text == "fine"


def endless_timer(model: RunningModel, waits: threading.Event) -> type[PlanTimer]:
    """A timer that predicts no end of the second step."""

    class EndlessTimer(PlanTimer):
        def wait_s(self, now: float) -> float:
            if len(model.plans) < 2 or len(self._in_flight) != 1:
                return 0.0

            waits.set()
            return 3600.0

    return EndlessTimer


async def test_waiting_ends_with_a_step_that_takes_less_time_than_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, model = threading.Event(), RunningModel("fine")
    monkeypatch.setattr(driver, "PlanTimer", endless_timer(model, waits))
    async with Engine("scripted", model.config, open_model=model) as engine:
        stream = engine.generate("a")
        assert await anyio.to_thread.run_sync(waits.wait, 120)
        assert len(model.plans) == 2
        assert model.executor is not None
        model.executor.is_done = True
        with anyio.fail_after(120):
            assert (await stream).text == "fine"


async def test_waiting_ends_with_a_pause_and_with_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, model = threading.Event(), RunningModel("x" * 64)
    monkeypatch.setattr(driver, "PlanTimer", endless_timer(model, waits))
    async with Engine("scripted", model.config, open_model=model) as engine:
        stream = engine.generate("a")
        assert await anyio.to_thread.run_sync(waits.wait, 120)
        with anyio.fail_after(120):
            await engine.pause()
        assert len(model.plans) == 2
        waits.clear()
        await engine.resume()
        assert await anyio.to_thread.run_sync(waits.wait, 120)
    with pytest.raises(EngineClosed):
        await stream
