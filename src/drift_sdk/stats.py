"""What an engine tells about itself, as plain values."""

from __future__ import annotations

from bisect import bisect_left

from msgspec import Struct

from drift_sdk.results import SpeculationStats

__all__ = ["EngineStats", "Histogram", "Histograms"]

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
STEP_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)
TOKENS = tuple(float(2**exponent) for exponent in range(18))


class EngineStats(Struct, frozen=True, kw_only=True):
    """A snapshot after a step.

    Now: sequences running (in a slot), waiting (for a slot, preempted ones included) and queued (never
    started). Blocks: free ones include cached blocks that nobody uses now. Rows of the last step, prefill
    chunks and decoding sequences. `tokens_per_second` generated over the last 5 seconds.

    Since the start: requests submitted, rejected (QueueFull), and ended: stopped (end of sequence, stop token
    or stop string), length-limited, cancelled, failed (any error). Tokens of prompts whose first token has
    come, and how many of them the prefix cache held; tokens generated. Rounds of a sequence with drafted
    tokens, the tokens drafted in them, and those the model said too; `accepted_at[i]`: rounds in which draft
    i was right, and all before. Rows of a speculating engine without a draft, by the reason. `step_seconds`
    sums the device time of `num_steps` steps. `start_seconds`: the stages of starting and how long each took,
    in order; "imports" is what comes before the first report, torch's mostly.

    What slows the graph executor down: `num_untuned_shapes` of weights whose kernels were never measured on
    this kind of GPU, or cannot be run as measured. Times the host had to wait for room to pass on a step's
    input, rounds cut in two to ask a grammar what may follow each draft, results copied because they were
    read late, and allocations of the GPU's memory by torch, of anybody in the process, counted every 256
    steps.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued: int = 0
    num_free_slots: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
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
    num_generated_tokens: int = 0
    num_draft_rounds: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    num_undrafted_by_policy: int = 0
    num_undrafted_by_request: int = 0
    num_undrafted_for_room: int = 0
    num_undrafted_by_drafter: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0
    start_seconds: tuple[tuple[str, float], ...] = ()
    num_untuned_shapes: int = 0
    num_host_waits: int = 0
    num_split_rounds: int = 0
    num_host_copies: int = 0
    num_allocations: int = 0

    @property
    def kv_use(self) -> float:
        """Share of the KV cache held by sequences, 0 to 1; blocks that are merely cached do not count."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def speculation(self) -> SpeculationStats:
        """How speculation went since the start, as in a `Completion`, over all requests; zeros where nothing
        was drafted."""
        return SpeculationStats(
            num_rounds=self.num_draft_rounds,
            num_drafted=self.num_drafted_tokens,
            num_accepted=self.num_accepted_tokens,
            accepted_at=self.accepted_at,
        )


class Histogram:
    """How many observations fell into each bucket. `bounds` are inclusive upper bounds; the last bucket has
    none."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Histograms:
    """An engine's distributions: written on its thread, read from any.

    Seconds: from the call to the first token, from one chunk of a stream to its next, from the call to the
    first slot, from the call to the end, of a step on the device. Tokens: of prompts and of completions.
    The end's ones count requests that ended by a stop or by length.
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
        self.first_token = Histogram(SECONDS)
        self.time_between_tokens = Histogram(STEP_SECONDS)
        self.queued = Histogram(SECONDS)
        self.request = Histogram(SECONDS)
        self.step = Histogram(STEP_SECONDS)
        self.prompt_tokens = Histogram(TOKENS)
        self.completion_tokens = Histogram(TOKENS)
