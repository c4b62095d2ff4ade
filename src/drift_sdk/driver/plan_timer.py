"""When the next step is planned: as late as possible, so that requests that come meanwhile are in it."""

from __future__ import annotations

from collections import deque

from drift_sdk.steps import StepPlan, StepResult

__all__ = ["PlanTimer"]

START_MARGIN_S, LEAST_MARGIN_S, MOST_MARGIN_S = 0.004, 0.0015, 0.05
"""Seconds before the end of a step at which the next one is planned: at first, at least and at most. Planning
and launching take about 1 ms for 64 sequences."""
WIDENING, NARROWING = 2.0, 0.995
"""Factors of the margin after a step that was planned too late, and after one that was not."""
DONE_S = 0.0002
"""A step that is collected in less time had ended before the next one was launched."""
LEAST_DURATIONS, MOST_DURATIONS = 2, 4
"""Latest steps of a kind, the shortest of which tells how long the next one takes at least. The first one may
take longer than all others."""
TOKENS_OF_KIND = 64
"""Steps are of a kind if their prompt tokens are as many, rounded up to a multiple of this."""

Kind = tuple[int, int, int, str]


class PlanTimer:
    """Predicts when the step that runs on the device ends, and when the next one has to be planned.

    A step is launched while the one before it runs. One that is planned at once when that one starts lacks
    the requests that come while it runs, and they wait for two steps. So the plan is made `margin_s` seconds
    before the end. The margin grows if the device has been idle, for example because other threads kept the
    interpreter's lock; then steps are planned at once, as long as they are shorter than the margin.

    All times are those of one clock, in seconds.
    """

    def __init__(self) -> None:
        self.margin_s = START_MARGIN_S
        self._durations: dict[Kind, deque[float]] = {}
        self._in_flight: deque[tuple[Kind, float]] = deque()  # and when they were launched
        self._free_at = 0.0  # when the device ended the latest step that was collected
        self._has_waited = False

    def launched(self, plan: StepPlan, now: float) -> None:
        """Note that a step has been launched."""
        self._in_flight.append((kind_of(plan), now))

    def wait_s(self, now: float) -> float:
        """The seconds that planning the next step can wait; 0 unless one step is in flight, whose kind has
        been measured twice."""
        if len(self._in_flight) != 1:
            return 0.0

        kind, launched_at = self._in_flight[0]
        durations = self._durations.get(kind)
        if durations is None or len(durations) < LEAST_DURATIONS:
            return 0.0

        ends_at = max(launched_at, self._free_at) + min(durations)
        wait_s = max(0.0, ends_at - self.margin_s - now)
        self._has_waited |= wait_s > 0.0
        return wait_s

    def collected(self, result: StepResult, waited_s: float, now: float) -> None:
        """Note the result of the oldest step in flight, which took the host `waited_s` seconds to collect."""
        kind, _ = self._in_flight.popleft()
        self._durations.setdefault(kind, deque(maxlen=MOST_DURATIONS)).append(result.duration_s)
        self._free_at = now
        if self._has_waited and self._in_flight:
            was_late = waited_s < DONE_S
            margin_s = self.margin_s * (WIDENING if was_late else NARROWING)
            self.margin_s = min(max(margin_s, LEAST_MARGIN_S), MOST_MARGIN_S)
        self._has_waited = False


def kind_of(plan: StepPlan) -> Kind:
    """The kind of a step: steps of the same kind take about as long."""
    num_tokens = sum([len(chunk.token_ids) for chunk in plan.prefill])
    most_drafts = max([row.num_draft_tokens for row in plan.decode], default=0)
    rows = len(plan.decode).bit_length()
    return rows, -(-num_tokens // TOKENS_OF_KIND), most_drafts, plan.verification
