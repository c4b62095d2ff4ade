"""When the next step is planned: as late as possible, and whether it waits for masks of constraints."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from drift_sdk.scheduling.scheduler import RowCounts
from drift_sdk.steps import StepPlan, StepResult

START_MARGIN_S, LEAST_MARGIN_S, MOST_MARGIN_S = 0.004, 0.0015, 0.05
"""Seconds before the end of a step at which the next one is planned: at first, at least and at most. Planning
and launching take about 1 ms for 64 sequences."""
WIDENING, NARROWING = 2.0, 0.995
"""Factors of the margin after a step that was planned too late, and after one that was not."""
IDLE_S = 0.0001
"""Most seconds between two steps of a device that has not waited for the host."""
LEAST_DURATIONS, MOST_DURATIONS = 2, 4
"""Latest steps of a kind, the shortest of which tells how long the next one takes at least. The first one may
take longer than all others."""
FREE_WEIGHT = 2
"""Weight of a sequence that is slowed down, beside one that gains."""
PLAN_S = 0.001
"""Seconds in which a step is planned and launched."""
TOKENS_OF_KIND = 64
"""Steps are of a kind if their prompt tokens are as many, rounded up to a multiple of this."""

Kind = tuple[int, int, int, str]


class _StepInFlight(Struct):
    """A launched step. has_waited: whether its plan was delayed while the step before it ran."""

    kind: Kind
    launched_at: float
    has_waited: bool


class PlanTimer:
    """Predicts when the step that runs on the device ends, and when the next one has to be planned.

    A step is launched while the one before it runs. One that is planned at once when that one starts lacks
    the requests that come while it runs, and they wait for two steps. So the plan is made `margin_s` seconds
    before the end. The margin grows if the device has been idle, for example because other threads kept the
    interpreter's lock; then steps are planned at once, as long as they are shorter than the margin.

    All times are of one clock, in seconds.
    """

    def __init__(self) -> None:
        self.margin_s: float = START_MARGIN_S
        self._durations: dict[Kind, deque[float]] = {}
        self._in_flight: deque[_StepInFlight] = deque()
        self._free_at = 0.0  # when the device ended the latest step that was collected
        self._has_waited = False

    def launched(self, plan: StepPlan, now: float) -> None:
        """Note that a step has been launched."""
        has_waited = self._has_waited and bool(self._in_flight)
        self._in_flight.append(_StepInFlight(kind_of(plan), now, has_waited))
        self._has_waited = False

    def wait_s(self, now: float) -> float:
        """The seconds that planning the next step can wait; 0 unless one step is in flight, whose kind has
        been measured twice."""
        if len(self._in_flight) != 1:
            return 0.0

        running = self._in_flight[0]
        durations = self._durations.get(running.kind)
        if durations is None or len(durations) < LEAST_DURATIONS:
            return 0.0

        ends_at = max(running.launched_at, self._free_at) + min(durations)
        wait_s = max(0.0, ends_at - self.margin_s - now)
        self._has_waited |= wait_s > 0.0
        return wait_s

    def collected(self, result: StepResult, now: float) -> None:
        """Note the result of the oldest step in flight."""
        step = self._in_flight.popleft()
        self._durations.setdefault(step.kind, deque(maxlen=MOST_DURATIONS)).append(result.duration_s)
        self._free_at = now
        self._has_waited = False
        if step.has_waited:
            was_late = result.idle_s > IDLE_S
            margin_s = self.margin_s * (WIDENING if was_late else NARROWING)
            self.margin_s = min(max(margin_s, LEAST_MARGIN_S), MOST_MARGIN_S)


class MaskTimer:
    """Decides whether a step waits for sequences whose masks depend on tokens that are not known.

    Launched behind the step that runs, a step lacks the sequences of that one which are bound so, and they
    take part in every other step. If a step is launched when all masks are computed, the device is idle
    meanwhile. So two steps, of which one has the bound sequences, are compared with two that wait, by tokens
    in a second; the others count more, because they are slowed down. Nothing waits for sequences whose masks
    take longer than a step, and on an idle device not for longer than twice the time that they took last.

    All times are of one clock, in seconds.
    """

    def __init__(self) -> None:
        self._deadline: tuple[float, ...] = ()  # until when a step waits on an idle device
        self._durations: deque[float] = deque(maxlen=MOST_DURATIONS)  # of the newest steps

    def collected(self, result: StepResult) -> None:
        """Note the result of a step."""
        self._durations.append(result.duration_s)

    @property
    def most_mask_s(self) -> float:
        """Seconds that the masks of sequences take at most for which a step waits."""
        return self._step_s - PLAN_S

    def holds(self, counts: RowCounts, now: float) -> bool:
        """Whether the next step waits. counts: with `most_mask_s`."""
        self._deadline = ()
        gap_s = counts.mask_s + PLAN_S
        weight = 2 * FREE_WEIGHT * counts.num_free + counts.num_bound
        if not counts.num_lacking or counts.num_bound * self._step_s <= weight * gap_s:
            return False

        if counts.has_in_flight:
            return True

        until = counts.asked_at + min(2 * gap_s, self._step_s)
        self._deadline = (until,) if now < until else ()
        return now < until

    def take_deadline(self) -> tuple[float, ...]:
        """The time until which the step that was held last waits on an idle device, once; or nothing."""
        deadline, self._deadline = self._deadline, ()
        return deadline

    @property
    def _step_s(self) -> float:
        return min(self._durations, default=0.0)


def kind_of(plan: StepPlan) -> Kind:
    """The kind of a step: steps of the same kind take about as long."""
    num_tokens = sum([len(chunk.token_ids) for chunk in plan.prefill])
    most_drafts = max([row.num_draft_tokens for row in plan.decode], default=0)
    rows = len(plan.decode).bit_length()
    return rows, -(-num_tokens // TOKENS_OF_KIND), most_drafts, plan.verification
