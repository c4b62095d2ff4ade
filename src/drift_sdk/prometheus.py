"""Statistics of an engine as Prometheus text.

========================================= ========= ====================================================
name                                      type      what
========================================= ========= ====================================================
drift_engine_info{model, executor}        gauge     always 1
drift_requests_running                    gauge     in a slot
drift_requests_waiting                    gauge     waiting for a slot, preempted ones included
drift_requests_submitted_total            counter   admitted
drift_requests_rejected_total             counter   rejected with QueueFull
drift_requests_ended_total{reason}        counter   stop, length, cancelled, error
drift_preemptions_total                   counter   sequences that gave up their KV to others
drift_prompt_tokens_total                 counter   of prompts whose first token has come
drift_cached_prompt_tokens_total          counter   of them, those found in the prefix cache
drift_generated_tokens_total              counter   delivered to streams
drift_draft_rounds_total                  counter   rounds of a sequence with drafts
drift_drafted_tokens_total                counter   tokens drafted in them
drift_accepted_tokens_total               counter   of those, the ones accepted
drift_rewound_tokens_total                counter   the others: rows of the KV cache rewound
drift_acceptance_length                   gauge     mean tokens a round, the model's own included
drift_acceptance_ratio{position}          gauge     share of rounds: drafts 0 to position accepted
drift_undrafted_rows_total{reason}        counter   no draft: policy, request, room, drafter, checks
drift_violations_total{reason}            counter   rounds that checks of speculation found wrong
drift_active_sequences{bound}             gauge     got tokens in a decoding step: min, mean, max
drift_untuned_shapes                      gauge     shapes of weights without measured kernels
drift_host_work_total{kind}               counter   wait, round, copy, allocation: see EngineStats
drift_tokens_per_second                   gauge     generated a second, over the last 5 seconds
drift_step_rows{kind}                     gauge     of the last step: prefill (chunks), decode (sequences)
drift_kv_blocks                           gauge     in the KV cache
drift_kv_blocks_free                      gauge     of them, free or only cached
drift_kv_blocks_cached                    gauge     of them, in the prefix cache
drift_kv_use_ratio                        gauge     share held by sequences, 0 to 1
drift_time_to_first_token_seconds         histogram from the call to the first token
drift_time_between_tokens_seconds         histogram from one chunk of a stream to its next
drift_queue_seconds                       histogram from the call to the first slot
drift_request_seconds                     histogram from the call to the end by stop or length
drift_step_seconds                        histogram duration of a step on the device
drift_request_prompt_tokens               histogram tokens of prompts whose first token has come
drift_request_completion_tokens           histogram tokens of completions ended by stop, length
drift_round_accepted_tokens               histogram drafts accepted in rounds with drafts
========================================= ========= ====================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from drift_sdk.errors import DriftError
from drift_sdk.speculation import MAX_DRAFT_TOKENS
from drift_sdk.stats import EngineStats, Histogram, Histograms

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as cause:
    raise DriftError(
        'metrics_text() needs the package prometheus-client: pip install "drift-engine[metrics]"'
    ) from cause

__all__ = ["metrics_text"]

DRAFTS = tuple(float(number) for number in range(MAX_DRAFT_TOKENS + 1))


def metrics_text(stats: EngineStats, histograms: Histograms, *, model: str, executor: str) -> str:
    """Statistics and histograms in Prometheus' text format, version 0.0.4."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(stats, histograms, model, executor))
    return generate_latest(registry).decode()


class EngineCollector(Collector):
    """The metrics of one engine at one moment."""

    def __init__(self, stats: EngineStats, histograms: Histograms, model: str, executor: str) -> None:
        self._stats = stats
        self._histograms = histograms
        self._labels = {"model": model, "executor": executor}

    def collect(self) -> Iterator[Metric]:
        yield gauge("engine_info", "The engine", 1, self._labels)
        yield from self._requests()
        yield from self._tokens()
        yield from self._speculation()
        yield from self._slow_paths()
        yield from self._cache_and_steps()
        yield from self._distributions()

    def _requests(self) -> Iterator[Metric]:
        stats = self._stats
        yield gauge("requests_running", "Requests in a slot", stats.num_running)
        yield gauge("requests_waiting", "Requests waiting for a slot", stats.num_waiting)
        yield counter("requests_submitted", "Requests admitted", stats.num_submitted)
        yield counter("requests_rejected", "Requests rejected because the queue was full", stats.num_rejected)
        ended = {
            "stop": stats.num_stopped,
            "length": stats.num_length_limited,
            "cancelled": stats.num_cancelled,
            "error": stats.num_failed,
        }
        yield counters("requests_ended", "Requests ended", "reason", ended)
        yield counter("preemptions", "Sequences that gave up their KV to others", stats.num_preemptions)

    def _tokens(self) -> Iterator[Metric]:
        stats = self._stats
        yield counter(
            "prompt_tokens", "Tokens of prompts whose first token has come", stats.num_prompt_tokens
        )
        yield counter(
            "cached_prompt_tokens", "Prompt tokens found in the prefix cache", stats.num_cached_tokens
        )
        yield counter("generated_tokens", "Tokens generated", stats.num_generated_tokens)
        yield gauge(
            "tokens_per_second", "Tokens generated a second, over the last 5 seconds", stats.tokens_per_second
        )

    def _speculation(self) -> Iterator[Metric]:
        stats, drafts = self._stats, self._stats.speculation
        yield counter("draft_rounds", "Rounds of a sequence with drafted tokens", stats.num_draft_rounds)
        yield counter("drafted_tokens", "Tokens drafted", stats.num_drafted_tokens)
        yield counter("accepted_tokens", "Drafted tokens accepted", stats.num_accepted_tokens)
        yield counter("rewound_tokens", "Drafted tokens not accepted", drafts.num_rewound)
        yield gauge("acceptance_length", "Mean tokens a round with drafted ones", drafts.acceptance_length)
        ratios = {str(position): rate for position, rate in enumerate(drafts.rates)}
        help_text = "Share of rounds with all drafts up to a position accepted"
        yield gauges("acceptance_ratio", help_text, "position", ratios)
        undrafted = {
            "policy": stats.num_undrafted_by_policy,
            "request": stats.num_undrafted_by_request,
            "room": stats.num_undrafted_for_room,
            "drafter": stats.num_undrafted_by_drafter,
            "checks": stats.num_undrafted_by_checks,
        }
        help_text = "Rows without a draft on a speculating engine"
        yield counters("undrafted_rows", help_text, "reason", undrafted)
        help_text = "Rounds that the checks of speculation found wrong"
        yield counters("violations", help_text, "reason", dict(stats.violations))

    def _slow_paths(self) -> Iterator[Metric]:
        stats = self._stats
        yield gauge("untuned_shapes", "Weight shapes without measured kernels", stats.num_untuned_shapes)
        host_work = {
            "wait": stats.num_host_waits,
            "round": stats.num_split_rounds,
            "copy": stats.num_host_copies,
            "allocation": stats.num_allocations,
        }
        yield counters("host_work", "Work of the host that slows graphs down", "kind", host_work)

    def _cache_and_steps(self) -> Iterator[Metric]:
        stats = self._stats
        rows = {"prefill": stats.num_prefill_rows, "decode": stats.num_decode_rows}
        yield gauges("step_rows", "Rows of the last step", "kind", rows)
        active = {"min": stats.min_active, "mean": stats.mean_active, "max": stats.max_active}
        yield gauges("active_sequences", "Sequences that got tokens in a decoding step", "bound", active)
        yield gauge("kv_blocks", "Blocks of the KV cache", stats.num_blocks)
        yield gauge("kv_blocks_free", "Blocks free or only cached", stats.num_free_blocks)
        yield gauge("kv_blocks_cached", "Blocks in the prefix cache", stats.num_cached_blocks)
        yield gauge("kv_use_ratio", "Share of the KV cache held by sequences", stats.kv_use)

    def _distributions(self) -> Iterator[Metric]:
        histograms = self._histograms
        accepted = Histogram(DRAFTS)
        for num_accepted, num_rounds in enumerate(self._stats.speculation.acceptance_histogram):
            accepted.observe(num_accepted, num_rounds)
        for name, help_text, values in (
            ("time_to_first_token_seconds", "From the call to the first token", histograms.first_token),
            (
                "time_between_tokens_seconds",
                "From one chunk of a stream to its next",
                histograms.time_between_tokens,
            ),
            ("queue_seconds", "From the call to the first slot", histograms.queued),
            ("request_seconds", "From the call to the end, by stop or length", histograms.request),
            ("step_seconds", "A step on the device", histograms.step),
            ("request_prompt_tokens", "Tokens of a prompt", histograms.prompt_tokens),
            ("request_completion_tokens", "Tokens of a completion", histograms.completion_tokens),
            ("round_accepted_tokens", "Drafted tokens accepted in a round", accepted),
        ):
            yield histogram(name, help_text, values)


def gauge(name: str, help_text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(f"drift_{name}", help_text, labels=list(labels or ()))
    family.add_metric(list((labels or {}).values()), value)
    return family


def gauges(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"drift_{name}", help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)

    return family


def counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"drift_{name}", help_text, value=value)


def counters(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"drift_{name}", help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)

    return family


def histogram(name: str, help_text: str, values: Histogram) -> Metric:
    family = HistogramMetricFamily(f"drift_{name}", help_text)
    counts, total, so_far = list(values.counts), values.total, 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip([*values.bounds, float("inf")], counts, strict=True):
        so_far += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), so_far))
    family.add_metric([], buckets, total)
    return family
