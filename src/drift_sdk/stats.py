"""Statistics of an engine, as plain values."""

from __future__ import annotations

from bisect import bisect_left

from msgspec import Struct
from msgspec.structs import replace

from drift_sdk._display import html_table, struct_repr
from drift_sdk.results import SpeculationStats

__all__ = ["EngineMetrics", "EngineStats", "Histogram", "Histograms", "counts_of", "load_of"]

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
STEP_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)
TOKENS = tuple(float(2**exponent) for exponent in range(18))


class EngineStats(Struct, frozen=True, kw_only=True):
    """A snapshot, made after each step and when requests come or go between steps.

    Current state, zeros when the engine has failed:

    is_paused:         whether the engine is paused: no step runs until `resume`.
    is_asleep:         whether it sleeps: weights and KV cache are freed until `wake`.
    weights_version:   times that weights were put in the place of others since the start: by
                       `update_weights`, and by `wake`, which loads the files.
    num_running:       sequences in a slot.
    num_waiting:       sequences waiting for a slot, preempted ones included.
    num_queued:        of them, those that never had a slot.
    num_free_slots:    slots without a sequence.
    num_blocks:        blocks of the KV cache.
    num_free_blocks:   of them, those that no sequence uses, cached ones included.
    num_cached_blocks: of them, those in the prefix cache.
    num_window_blocks: blocks of layers with windows, if these have blocks of their own; else 0.
    num_free_window_blocks: of them, those that no sequence uses, cached ones included.
    num_checkpoints:   states of recurrent layers that the prefix cache keeps.
    num_prefill_rows:  prefill chunks of the last step.
    num_decode_rows:   decoding sequences of the last step.
    tokens_per_second: tokens generated a second, over the last 5 seconds.

    Counted since the start:

    num_submitted:            requests submitted and not rejected.
    num_rejected:             requests rejected with QueueFull.
    num_stopped:              requests ended by the end of sequence, a stop token or a stop string.
    num_length_limited:       requests ended by max_tokens or by the end of the context.
    num_cancelled:            requests cancelled.
    num_failed:               requests ended by an error.
    num_preemptions:          times that a sequence gave up its KV, to one that is served first or because the
                              engine fell asleep.
    num_prompt_tokens:        tokens of prompts whose first token has come.
    num_cached_tokens:        of them, those found in the prefix cache.
    num_checkpoint_hits:      times that a sequence went on from a checkpoint of recurrent states.
    num_recomputed_tokens:    tokens that a sequence computed, although their blocks were cached, for want of
                              a checkpoint, or of blocks of the window before them.
    num_generated_tokens:     tokens generated.
    num_draft_rounds:         rounds of a sequence in which tokens were drafted.
    num_drafted_tokens:       tokens drafted in them.
    num_accepted_tokens:      of them, those accepted because the model chose the same token.
    accepted_at:              at index i, rounds in which draft i and all drafts before it were accepted.
    num_ngram_rounds, num_ngram_drafted_tokens, num_ngram_accepted_tokens: of these, those in which
                              `Speculation.ngrams` took the place of the draft's tokens.
    num_partial_rounds, num_refresh_rounds: rounds of a sequence that verified over a part of the KV cache,
                              and that refreshed it; see `PartialVerification`.
    num_undrafted_by_policy:  rows without a draft on a speculating engine, because none would be faster,
                              because the batch is too large for trees, or because the masks of the request's
                              grammar take too long.
    num_undrafted_by_request: the same because the request forbids drafts.
    num_undrafted_for_room:   the same because there was room for one more token only.
    num_undrafted_by_drafter: the same because the drafter proposed nothing.
    num_undrafted_by_checks:  the same because a check had found the sequence's drafts wrong.
    violations:               rounds that the checks of speculation found wrong, by reason: (reason, rounds).
    min_active, max_active:   fewest and most sequences that got tokens in a step that decodes.
    mean_active:              the mean of their number.
    num_steps:                steps run.
    step_seconds:             device time of these steps.
    kv_dtype:                 numbers of the KV cache, such as "bfloat16", "fp8" or "nvfp4"; "" before the
                              start.
    kv_bytes:                 bytes of the KV cache, with those of a draft, on each GPU of a model; without
                              the next ones.
    window_kv_bytes:          bytes of `num_window_blocks` blocks.
    start_seconds:            stages of starting and the seconds that each took, in order. "imports" is the
                              time before the first report, mostly the import of torch.

    Slow paths of the graph executor:

    num_tuned_shapes:   shapes of weights whose kernels run as measured on this kind of GPU.
    num_untuned_shapes: the other shapes: never measured on this kind of GPU, or not to be run as measured.
    num_host_waits:     times that the host waited for room to pass on a step's input.
    num_split_rounds:   rounds split in two to ask a grammar which tokens may follow each draft.
    num_host_copies:    results that were copied because they were read late.
    num_allocations:    allocations of GPU memory by torch, in the whole process, counted every 256 steps.
    """

    is_paused: bool = False
    is_asleep: bool = False
    weights_version: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_queued: int = 0
    num_free_slots: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_window_blocks: int = 0
    num_free_window_blocks: int = 0
    num_checkpoints: int = 0
    num_prefill_rows: int = 0
    num_decode_rows: int = 0
    tokens_per_second: float = 0.0

    num_submitted: int = 0
    num_rejected: int = 0
    num_stopped: int = 0
    num_length_limited: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_checkpoint_hits: int = 0
    num_recomputed_tokens: int = 0
    num_generated_tokens: int = 0
    num_draft_rounds: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    num_ngram_rounds: int = 0
    num_ngram_drafted_tokens: int = 0
    num_ngram_accepted_tokens: int = 0
    num_partial_rounds: int = 0
    num_refresh_rounds: int = 0
    num_undrafted_by_policy: int = 0
    num_undrafted_by_request: int = 0
    num_undrafted_for_room: int = 0
    num_undrafted_by_drafter: int = 0
    num_undrafted_by_checks: int = 0
    violations: tuple[tuple[str, int], ...] = ()
    min_active: int = 0
    max_active: int = 0
    mean_active: float = 0.0
    num_steps: int = 0
    step_seconds: float = 0.0
    kv_dtype: str = ""
    kv_bytes: int = 0
    window_kv_bytes: int = 0
    start_seconds: tuple[tuple[str, float], ...] = ()
    num_tuned_shapes: int = 0
    num_untuned_shapes: int = 0
    num_host_waits: int = 0
    num_split_rounds: int = 0
    num_host_copies: int = 0
    num_allocations: int = 0

    def __repr__(self) -> str:
        """The fields that differ from their defaults."""
        return struct_repr(self)

    def _repr_html_(self) -> str:
        """The current state and the main counters, for notebooks."""
        counters = {
            "requests": self.num_submitted,
            "failed": self.num_failed,
            "rejected": self.num_rejected,
            "preemptions": self.num_preemptions,
            "generated tokens": self.num_generated_tokens,
        }
        return html_table("EngineStats", load_of(self) | {name: f"{n:,}" for name, n in counters.items()})

    @property
    def kv_use(self) -> float:
        """Share of the KV cache that sequences hold, 0 to 1; blocks that are only cached do not count. With
        blocks of layers with windows, the larger share of the two."""
        pools = (
            (self.num_free_blocks, self.num_blocks),
            (self.num_free_window_blocks, self.num_window_blocks),
        )
        return max(1.0 - num_free / number if number else 0.0 for num_free, number in pools)

    @property
    def speculation(self) -> SpeculationStats:
        """Counts of speculation since the start, over all requests; zeros if nothing was drafted."""
        return SpeculationStats(
            num_rounds=self.num_draft_rounds,
            num_drafted=self.num_drafted_tokens,
            num_accepted=self.num_accepted_tokens,
            accepted_at=self.accepted_at,
            num_ngram_rounds=self.num_ngram_rounds,
            num_ngram_drafted=self.num_ngram_drafted_tokens,
            num_ngram_accepted=self.num_ngram_accepted_tokens,
            num_partial_rounds=self.num_partial_rounds,
            num_refresh_rounds=self.num_refresh_rounds,
        )


STATE = (
    "is_paused", "is_asleep", "num_running", "num_waiting", "num_queued", "num_free_slots", "num_blocks",
    "num_free_blocks", "num_cached_blocks", "num_window_blocks", "num_free_window_blocks", "num_prefill_rows",
    "num_decode_rows", "tokens_per_second",
)  # fmt: skip
"""Fields of `EngineStats` that are its current state."""


def counts_of(stats: EngineStats) -> EngineStats:
    """The statistics of an engine that has ended: its counts since the start, and a state of zeros."""
    empty = EngineStats()
    return replace(stats, **{name: getattr(empty, name) for name in STATE})


def load_of(stats: EngineStats) -> dict[str, str]:
    """The current load in words, by what it is."""
    return {
        "running": f"{stats.num_running:,}",
        "waiting": f"{stats.num_waiting:,}",
        "KV": f"{stats.kv_use:.0%} of {stats.num_blocks:,} blocks",
        "tokens/s": f"{stats.tokens_per_second:,.1f}",
    }


class Histogram:
    """Counts of observations by bucket.

    bounds: inclusive upper bounds of the buckets, ascending; one more bucket has none.
    counts: observations in each bucket.
    total:  sum of all observed values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds: tuple[float, ...] = bounds
        self.counts: list[int] = [0] * (len(bounds) + 1)
        self.total: float = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, as often as `times` says."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Histograms:
    """Histograms of an engine, written on its thread and read from any.

    first_token:         seconds from the call to the first token.
    time_between_tokens: seconds from one chunk of a stream to its next.
    queued:              seconds from the call to the first slot.
    request:             seconds from the call to the end, of requests that ended by a stop or by length.
    step:                seconds of a step on the device.
    prompt_tokens:       tokens of prompts whose first token has come.
    completion_tokens:   tokens of completions that ended by a stop or by length.
    """

    __slots__ = (
        "completion_tokens",
        "first_token",
        "prompt_tokens",
        "queued",
        "request",
        "step",
        "time_between_tokens",
    )

    def __init__(self) -> None:
        self.first_token: Histogram = Histogram(SECONDS)
        self.time_between_tokens: Histogram = Histogram(STEP_SECONDS)
        self.queued: Histogram = Histogram(SECONDS)
        self.request: Histogram = Histogram(SECONDS)
        self.step: Histogram = Histogram(STEP_SECONDS)
        self.prompt_tokens: Histogram = Histogram(TOKENS)
        self.completion_tokens: Histogram = Histogram(TOKENS)


class EngineMetrics(Struct, frozen=True, kw_only=True):
    """The metrics of an engine, for Prometheus.

    model, executor: its model's name, without the folder that it is in, and its executor.
    stats:           a snapshot.
    histograms:      distributions since the start. They go on changing while the engine serves.
    """

    model: str
    executor: str
    stats: EngineStats
    histograms: Histograms
