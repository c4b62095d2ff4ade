"""Statistics, events and log lines of an engine: counts and times, never the text of prompts and results.

One of the log lines warns if steps on a CPU stall: some take many times as long as others like them.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from statistics import median

import msgspec

from drift_sdk.draft_policy import DraftCount
from drift_sdk.driver.callbacks import NO_EVENTS, EventSender
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.driver.requests import Request, RequestRegistry
from drift_sdk.errors import DriftError, EngineClosed
from drift_sdk.results import Chunk, Completion
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Delta
from drift_sdk.stats import EngineStats, Histograms, counts_of
from drift_sdk.steps import VIOLATIONS, StepResult, Violation

FACTOR = 8.0
"""A step that takes more than this many times the median has stalled."""
NUM_STEPS = 9
"""Latest steps with as many rows, which the median is of."""
MOST_STALLED = 4
"""More stalled steps in a row are no stall: steps have become slower, because sequences are longer, say."""
MOST_LOST_S = 5.0
"""Seconds that steps may lose altogether before the warning."""

log: logging.Logger = logging.getLogger("drift_sdk")


class StalledSteps:
    """Compares decoding steps with those before them that had as many rows, until it has warned once."""

    def __init__(self) -> None:
        self._durations: dict[int, deque[float]] = {}
        self._stalled: list[float] = []  # seconds lost by the newest steps, all of which have stalled
        self._lost_s = 0.0
        self._is_over = False

    def note(self, num_rows: int, duration_s: float) -> None:
        """A step of decode rows alone has taken so long. Called on the engine's thread."""
        if self._is_over:
            return

        durations = self._durations.setdefault(num_rows, deque(maxlen=NUM_STEPS))
        usual_s = median(durations) if len(durations) == NUM_STEPS else duration_s
        if duration_s > FACTOR * usual_s and len(self._stalled) < MOST_STALLED:
            self._stalled.append(duration_s - usual_s)
            return

        if duration_s > FACTOR * usual_s:
            durations.clear()
        else:
            self._lost_s += sum(self._stalled)
        self._stalled.clear()
        durations.append(duration_s)
        if self._lost_s > MOST_LOST_S:
            self._is_over = True
            self._warn(num_rows, usual_s)

    def _warn(self, num_rows: int, usual_s: float) -> None:
        torch = sys.modules.get("torch")
        if torch is None or torch.cuda.is_initialized() or torch.get_num_threads() == 1:
            return

        log.warning(
            "steps have stalled for %.0f s in all: with %d rows one usually takes %.0f ms, and some take "
            "over %.0f times that. torch's %d threads (OMP_NUM_THREADS) wait for each other if others use "
            "their cores or a container has fewer: EngineConfig(num_threads=...) sets their number",
            *(self._lost_s, num_rows, 1e3 * usual_s, FACTOR, torch.get_num_threads()),
        )


RATE_WINDOW_S = 5.0
"""Seconds that the rate of generated tokens is measured over."""
MARK_EVERY_S = 0.25
"""Least seconds between two marks, which the rate is computed from."""

NO_MARKS: tuple[tuple[float, int], ...] = ((0.0, 0),)


class StatsRecorder:
    """Counts what the driver reports on the engine's thread. `read`, `stats` and `histograms` may be used
    from any thread.

    A chunk costs a few additions: streams that received their last chunks in the same step, nearly all of
    them, share one entry in the histogram of times between tokens.
    """

    def __init__(self, registry: RequestRegistry, events: EventSender = NO_EVENTS) -> None:
        self.stats: EngineStats = EngineStats()
        self.histograms: Histograms = Histograms()
        self._registry = registry
        self._events = events
        self._now = 0.0  # time.monotonic() when the current step was collected
        self._gap_from = 0.0  # the same of the step that brought the last chunks of `_num_gaps` streams
        self._num_gaps = 0
        self._is_paused = self._is_asleep = False
        self.weights_version: int = 0
        self._num_prefill_rows = 0
        self._num_decode_rows = 0
        self._num_steps = 0
        self._step_seconds = 0.0
        self._num_ended = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._drafts = DraftCount()
        self._start_seconds: tuple[tuple[str, float], ...] = ()
        self._kv_dtype, self._kv_bytes, self._window_kv_bytes = "", 0, 0
        self._num_tuned_shapes = 0
        self._num_untuned_shapes = 0
        self._num_host = {"waits": 0, "rounds": 0, "copies": 0, "allocations": 0}
        self._num_undrafted = {"policy": 0, "request": 0, "room": 0, "drafter": 0, "checks": 0}
        self._num_violations: dict[str, int] = {}
        self._active = ActiveSequences()
        self._stalled_steps: StalledSteps | None = None  # of an executor that may be on a CPU
        # (time, tokens generated until then), oldest first. Replaced as a whole, as other threads read it.
        self._marks = NO_MARKS

    def read(self) -> EngineStats:
        """The newest snapshot with the current rate, which no step updates while the engine is idle."""
        stats, marks, now = self.stats, self._marks, time.monotonic()
        recent = next((mark for mark in marks if now - mark[0] <= RATE_WINDOW_S), None)
        if recent is None:
            return stats

        since, num_tokens = recent
        rate = (stats.num_generated_tokens - num_tokens) / max(now - since, MARK_EVERY_S)
        return msgspec.structs.replace(stats, tokens_per_second=max(rate, 0.0))

    def ended(self) -> None:
        """The engine's requests have ended, and none follow: what was counted remains."""
        self.stats = counts_of(self.stats)
        self._marks = NO_MARKS

    def opened(self, model: LoadedModel, seconds: float) -> None:
        """The model was opened in this many seconds."""
        scheduling = model.scheduling
        self._start_seconds = model.start_seconds
        self._kv_dtype = model.kv_dtype
        self._kv_bytes, self._window_kv_bytes = model.kv_bytes, model.window_kv_bytes
        self._stalled_steps = StalledSteps() if model.executor_name == "eager" else None
        self._num_tuned_shapes = model.num_tuned_shapes
        self._num_untuned_shapes = len(model.untuned_shapes)
        self._events.started(model.executor_name, seconds)
        log.info("started: %s", ", ".join(f"{stage} {length:.2f} s" for stage, length in model.start_seconds))
        log.info(
            "ready in %.2f s: %s executor, %d sequences of up to %d tokens, %d KV blocks of %d tokens%s",
            seconds,
            model.executor_name,
            scheduling.max_num_seqs,
            model.text.max_model_len,
            scheduling.num_blocks,
            scheduling.block_size,
            f", {scheduling.num_window_blocks} in windows" if scheduling.window else "",
        )
        if model.fallback is not None:
            log.warning("executor=auto chose %s: %s", model.executor_name, model.fallback)
        if model.untuned_shapes:
            shapes = ", ".join(model.untuned_shapes)
            log.warning("weights of shape %s run without kernels measured on this GPU", shapes)

    def closed(self) -> None:
        """The engine was closed."""
        self._events.stopped()
        num_requests, num_tokens = sum(self._num_ended.values()), self._num_generated_tokens
        active = self._active
        log.info(
            "closed after %d requests and %d generated tokens; active sequences in a decoding step: "
            "mean %.1f, %d to %d",
            *(num_requests, num_tokens, active.mean, active.fewest, active.most),
        )
        drafts = self._drafts.stats()
        if drafts.num_rounds or self._num_violations:
            reasons = {"no draft by " + reason: number for reason, number in self._num_undrafted.items()}
            reasons |= {"violation " + reason: number for reason, number in self._num_violations.items()}
            log.info(
                "speculation: %d rounds, %.2f tokens a round, %.0f%% of rounds with two or more accepted; %s",
                drafts.num_rounds,
                drafts.acceptance_length,
                100 * drafts.multiple_rate,
                ", ".join(f"{reason} {number}" for reason, number in reasons.items() if number)
                or "a draft in every row",
            )

    def entered(self, request: Request) -> None:
        """A request was handed to the scheduler."""
        if log.isEnabledFor(logging.DEBUG):
            num_tokens = request.sequence.num_prompt_tokens if request.sequence is not None else 0
            log.debug("%s starts: prompt of %d tokens", request.request_id, num_tokens)

    def collected(self, result: StepResult) -> None:
        """A step was collected. Calls of `extended` for its sequences follow."""
        self._now = time.monotonic()
        self._num_prefill_rows = len(result.prefill)
        self._num_decode_rows = len(result.decode)
        self._num_steps += 1
        self._step_seconds += result.duration_s
        self.histograms.step.observe(result.duration_s)
        work = result.host_work
        self._num_host["waits"] += work.num_waits
        self._num_host["rounds"] += work.num_split_rounds
        self._num_host["copies"] += work.num_copies
        self._num_host["allocations"] += work.num_allocations
        num_active = num_drafted = 0
        for output in result.decode:
            num_active += bool(output.token_ids)
            num_drafted += output.num_drafted
            if output.num_drafted:
                self._drafts.add(output.num_drafted, output.num_accepted, is_ngram=output.is_ngram)
            if output.violation is not None:
                self._count_violation(output.violation)
        if num_active:
            self._active.add(num_active)
        if self._stalled_steps is not None and result.decode and not result.prefill:
            self._stalled_steps.note(len(result.decode) + num_drafted, result.duration_s)

    def extended(self, request: Request, delta: Delta, chunk: Chunk) -> None:
        """The collected step brought tokens of this request."""
        if request.has_drafts and delta.num_planned_drafts is not None and not delta.output.num_drafted:
            self._num_undrafted[why_undrafted(request, delta)] += 1
        if delta.verification != "whole":
            self._drafts.add(0, 0, verification=delta.verification)
        last, request.last_chunk_at = request.last_chunk_at, self._now
        self._num_generated_tokens += len(chunk.token_ids)
        if last == self._gap_from:
            self._num_gaps += 1
        elif last is None:
            self._count_first_token(request)
        else:
            self._close_gap()
            self._gap_from, self._num_gaps = last, 1

    def finished(self, request: Request, completion: Completion) -> None:
        """A request ended with a completion."""
        reason, usage, timing = completion.finish_reason, completion.usage, completion.timing
        self._num_ended[reason] += 1
        self._events.finished(completion)
        if reason != "cancelled":
            self.histograms.request.observe(timing.first_token_s + timing.decode_s)
            self.histograms.completion_tokens.observe(usage.completion_tokens)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s ends (%s): %d prompt tokens, %d of them cached, %d generated; "
                "queued %.4f s, prefill %.4f s, decode %.4f s",
                request.request_id,
                reason,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                timing.queued_s,
                timing.prefill_s,
                timing.decode_s,
            )

    def failed(self, request: Request, error: DriftError) -> None:
        """A request ended with an error."""
        self._num_ended["error"] += 1
        self._events.failed(request.request_id, error)
        # Without the error's message, which may quote the prompt.
        log.debug("%s ends: %s", request.request_id, type(error).__name__)

    def deserted(self, request: Request) -> None:
        """A request was dropped because its event loop has ended."""
        self._num_ended["cancelled"] += 1
        self._events.failed(request.request_id, EngineClosed("the request's event loop has ended"))
        log.debug("%s ends: its event loop is closed", request.request_id)

    def set_state(self, scheduler: Scheduler, *, is_paused: bool, is_asleep: bool) -> None:
        """The engine is paused or runs, sleeps or is awake, from now on."""
        self._is_paused, self._is_asleep = is_paused, is_asleep
        self.publish(scheduler)

    def publish(self, scheduler: Scheduler) -> None:
        """Replace the snapshot. Called once a step, and when requests come or go between steps. Longer than
        others: a line for each field."""
        self._close_gap()
        self._add_mark()
        config, num_running, ended = scheduler.config, scheduler.num_running, self._num_ended
        drafts, checkpoints = self._drafts.stats(), scheduler.checkpoints
        self.stats = EngineStats(
            is_paused=self._is_paused,
            is_asleep=self._is_asleep,
            weights_version=self.weights_version,
            num_running=num_running,
            num_waiting=scheduler.num_waiting,
            num_queued=scheduler.num_queued,
            num_free_slots=config.max_num_seqs - num_running,
            num_blocks=config.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            num_cached_blocks=scheduler.num_cached_blocks,
            num_window_blocks=config.num_window_blocks,
            num_free_window_blocks=scheduler.num_free_window_blocks,
            num_checkpoints=0 if checkpoints is None else checkpoints.pool.num_held,
            num_prefill_rows=self._num_prefill_rows,
            num_decode_rows=self._num_decode_rows,
            num_submitted=self._registry.num_admitted,
            num_rejected=self._registry.num_rejected,
            num_stopped=ended["stop"],
            num_length_limited=ended["length"],
            num_cancelled=ended["cancelled"],
            num_failed=ended["error"],
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_checkpoint_hits=0 if checkpoints is None else checkpoints.num_hits,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_draft_rounds=drafts.num_rounds,
            num_drafted_tokens=drafts.num_drafted,
            num_accepted_tokens=drafts.num_accepted,
            accepted_at=drafts.accepted_at,
            num_ngram_rounds=drafts.num_ngram_rounds,
            num_ngram_drafted_tokens=drafts.num_ngram_drafted,
            num_ngram_accepted_tokens=drafts.num_ngram_accepted,
            num_partial_rounds=drafts.num_partial_rounds,
            num_refresh_rounds=drafts.num_refresh_rounds,
            num_undrafted_by_policy=self._num_undrafted["policy"],
            num_undrafted_by_request=self._num_undrafted["request"],
            num_undrafted_for_room=self._num_undrafted["room"],
            num_undrafted_by_drafter=self._num_undrafted["drafter"],
            num_undrafted_by_checks=self._num_undrafted["checks"],
            violations=tuple(self._num_violations.items()),
            min_active=self._active.fewest,
            max_active=self._active.most,
            mean_active=self._active.mean,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            start_seconds=self._start_seconds,
            kv_dtype=self._kv_dtype,
            kv_bytes=self._kv_bytes,
            window_kv_bytes=self._window_kv_bytes,
            num_tuned_shapes=self._num_tuned_shapes,
            num_untuned_shapes=self._num_untuned_shapes,
            num_host_waits=self._num_host["waits"],
            num_split_rounds=self._num_host["rounds"],
            num_host_copies=self._num_host["copies"],
            num_allocations=self._num_host["allocations"],
        )

    def _count_first_token(self, request: Request) -> None:
        sequence = request.sequence
        assert sequence is not None and sequence.started_at is not None
        self._events.first_token(request.request_id)
        self._num_prompt_tokens += sequence.num_prompt_tokens
        self._num_cached_tokens += sequence.num_cached_tokens
        self.histograms.first_token.observe(self._now - request.submitted_at)
        self.histograms.queued.observe(sequence.started_at - request.submitted_at)
        self.histograms.prompt_tokens.observe(sequence.num_prompt_tokens)

    def _count_violation(self, violation: Violation) -> None:
        self._num_violations[violation.reason] = self._num_violations.get(violation.reason, 0) + 1
        log.warning("speculation: %s (%s)", VIOLATIONS[violation.reason], violation.details)

    def _close_gap(self) -> None:
        """Add the streams that share a gap to the histogram."""
        if self._num_gaps:
            self.histograms.time_between_tokens.observe(self._now - self._gap_from, self._num_gaps)
            self._num_gaps = 0

    def _add_mark(self) -> None:
        if self._now - self._marks[-1][0] >= MARK_EVERY_S:
            recent = [mark for mark in self._marks if self._now - mark[0] <= RATE_WINDOW_S]
            self._marks = (*recent, (self._now, self._num_generated_tokens))


class ActiveSequences:
    """The number of sequences that got tokens in a step that decodes: fewest, most and mean."""

    def __init__(self) -> None:
        self.fewest: int = 0
        self.most: int = 0
        self._num_steps = self._total = 0

    def add(self, number: int) -> None:
        """Count a step."""
        self.fewest = min(self.fewest, number) if self._num_steps else number
        self.most = max(self.most, number)
        self._num_steps += 1
        self._total += number

    @property
    def mean(self) -> float:
        return self._total / self._num_steps if self._num_steps else 0.0


def why_undrafted(request: Request, delta: Delta) -> str:
    """Why a row of a speculating engine had no draft: "request", its request forbids drafts; "room", there
    was room for one more token only; "checks", its drafts were found wrong; "policy", none would be faster by
    the policy's measurements; "drafter", the drafter had nothing to propose."""
    if request.params.num_draft_tokens == 0:
        return "request"

    if delta.output.finish == "length":
        return "room"

    if delta.sequence.has_wrong_drafts:
        return "checks"

    return "drafter" if delta.num_planned_drafts else "policy"
