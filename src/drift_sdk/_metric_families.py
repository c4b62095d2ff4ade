"""The metrics of engines as families of prometheus_client: their names, types, help texts and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from drift_sdk.speculation import MAX_DRAFT_TOKENS
from drift_sdk.stats import EngineMetrics, EngineStats, Histogram

__all__ = ["Measured", "families_of", "printable"]

DRAFTS = tuple(float(number) for number in range(MAX_DRAFT_TOKENS + 1))

Kind: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily]


class Measured(Struct, frozen=True):
    """The metrics of an engine at one moment, and labels of all its samples."""

    labels: dict[str, str]
    metrics: EngineMetrics


def families_of(engines: Sequence[Measured], labels: tuple[str, ...]) -> Iterator[Metric]:
    """All families, with the samples of the engines. labels: names of the labels that engines have."""
    families = Families(engines, labels)
    yield families.info()
    yield from requests(families)
    yield from tokens(families)
    yield from speculation(families)
    yield from slow_paths(families)
    yield from cache_and_steps(families)
    yield from distributions(families)


def printable(value: str) -> str:
    """A label's value as text that can be encoded: a path may have bytes that are no UTF-8."""
    return value.encode(errors="backslashreplace").decode()


class Families:
    """Makes a family of each metric, with the samples of all engines."""

    def __init__(self, engines: Sequence[Measured], labels: tuple[str, ...]) -> None:
        self._engines = engines
        self._labels = labels

    def info(self) -> Metric:
        family = GaugeMetricFamily(
            "drift_engine_info", "The engine", labels=[*self._labels, "model", "executor"]
        )
        for measured in self._engines:
            metrics = measured.metrics
            family.add_metric([*measured.labels.values(), printable(metrics.model), metrics.executor], 1)

        return family

    def gauge(self, name: str, help_text: str, value: Callable[[EngineStats], float]) -> Metric:
        return self._family(GaugeMetricFamily, name, help_text, value)

    def counter(self, name: str, help_text: str, value: Callable[[EngineStats], float]) -> Metric:
        return self._family(CounterMetricFamily, name, help_text, value)

    def gauges(
        self, name: str, help_text: str, label: str, values: Callable[[EngineStats], Mapping[str, float]]
    ) -> Metric:
        """Gauges with one more label, whose values are the keys of what `values` gives."""
        return self._labelled_family(GaugeMetricFamily, name, help_text, label, values)

    def counters(
        self, name: str, help_text: str, label: str, values: Callable[[EngineStats], Mapping[str, float]]
    ) -> Metric:
        """Counters with one more label, whose values are the keys of what `values` gives."""
        return self._labelled_family(CounterMetricFamily, name, help_text, label, values)

    def histogram(self, name: str, help_text: str, values: Callable[[EngineMetrics], Histogram]) -> Metric:
        family = HistogramMetricFamily(f"drift_{name}", help_text, labels=self._labels)
        for measured in self._engines:
            found = values(measured.metrics)
            counts, total, so_far = list(found.counts), found.total, 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip([*found.bounds, float("inf")], counts, strict=True):
                so_far += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), so_far))
            family.add_metric(list(measured.labels.values()), buckets, total)

        return family

    def _family(self, kind: Kind, name: str, help_text: str, value: Callable[[EngineStats], float]) -> Metric:
        family = kind(f"drift_{name}", help_text, labels=self._labels)
        for measured in self._engines:
            family.add_metric(list(measured.labels.values()), value(measured.metrics.stats))

        return family

    def _labelled_family(
        self,
        kind: Kind,
        name: str,
        help_text: str,
        label: str,
        values: Callable[[EngineStats], Mapping[str, float]],
    ) -> Metric:
        family = kind(f"drift_{name}", help_text, labels=[*self._labels, label])
        for measured in self._engines:
            for key, value in values(measured.metrics.stats).items():
                family.add_metric([*measured.labels.values(), key], value)

        return family


def requests(families: Families) -> Iterator[Metric]:
    yield families.gauge("requests_running", "Requests in a slot", lambda s: s.num_running)
    yield families.gauge("requests_waiting", "Requests waiting for a slot", lambda s: s.num_waiting)
    yield families.counter("requests_submitted", "Requests admitted", lambda s: s.num_submitted)
    yield families.counter(
        "requests_rejected", "Requests rejected because the queue was full", lambda s: s.num_rejected
    )
    yield families.counters(
        "requests_ended",
        "Requests ended",
        "reason",
        lambda s: {
            "stop": s.num_stopped,
            "length": s.num_length_limited,
            "cancelled": s.num_cancelled,
            "error": s.num_failed,
        },
    )
    yield families.counter(
        "preemptions", "Sequences that gave up their KV to others", lambda s: s.num_preemptions
    )


def tokens(families: Families) -> Iterator[Metric]:
    yield families.counter(
        "prompt_tokens", "Tokens of prompts whose first token has come", lambda s: s.num_prompt_tokens
    )
    yield families.counter(
        "cached_prompt_tokens", "Prompt tokens found in the prefix cache", lambda s: s.num_cached_tokens
    )
    yield families.counter("generated_tokens", "Tokens generated", lambda s: s.num_generated_tokens)
    yield families.gauge(
        "tokens_per_second",
        "Tokens generated a second, over the last 5 seconds",
        lambda s: s.tokens_per_second,
    )


def speculation(families: Families) -> Iterator[Metric]:
    yield families.counter(
        "draft_rounds", "Rounds of a sequence with drafted tokens", lambda s: s.num_draft_rounds
    )
    yield families.counter("drafted_tokens", "Tokens drafted", lambda s: s.num_drafted_tokens)
    yield families.counter("accepted_tokens", "Drafted tokens accepted", lambda s: s.num_accepted_tokens)
    yield families.counter(
        "rewound_tokens", "Drafted tokens not accepted", lambda s: s.speculation.num_rewound
    )
    yield families.counter(
        "ngram_drafted_tokens",
        "Tokens drafted by n-grams beside a draft model",
        lambda s: s.num_ngram_drafted_tokens,
    )
    yield families.counter(
        "ngram_accepted_tokens",
        "Tokens drafted by n-grams beside a draft model and accepted",
        lambda s: s.num_ngram_accepted_tokens,
    )
    yield families.gauge(
        "acceptance_length",
        "Mean tokens a round with drafted ones",
        lambda s: s.speculation.acceptance_length,
    )
    yield families.gauges(
        "acceptance_ratio",
        "Share of rounds with all drafts up to a position accepted",
        "position",
        lambda s: {str(position): rate for position, rate in enumerate(s.speculation.rates)},
    )
    yield families.counters(
        "undrafted_rows",
        "Rows without a draft on a speculating engine",
        "reason",
        lambda s: {
            "policy": s.num_undrafted_by_policy,
            "request": s.num_undrafted_by_request,
            "room": s.num_undrafted_for_room,
            "drafter": s.num_undrafted_by_drafter,
            "checks": s.num_undrafted_by_checks,
        },
    )
    yield families.counters(
        "violations",
        "Rounds that the checks of speculation found wrong",
        "reason",
        lambda s: dict(s.violations),
    )


def slow_paths(families: Families) -> Iterator[Metric]:
    yield families.gauge(
        "untuned_shapes", "Weight shapes without measured kernels", lambda s: s.num_untuned_shapes
    )
    yield families.counters(
        "host_work",
        "Work of the host that slows graphs down",
        "kind",
        lambda s: {
            "wait": s.num_host_waits,
            "round": s.num_split_rounds,
            "copy": s.num_host_copies,
            "allocation": s.num_allocations,
        },
    )


def cache_and_steps(families: Families) -> Iterator[Metric]:
    yield families.gauges(
        "step_rows",
        "Rows of the last step",
        "kind",
        lambda s: {"prefill": s.num_prefill_rows, "decode": s.num_decode_rows},
    )
    yield families.gauges(
        "active_sequences",
        "Sequences that got tokens in a decoding step",
        "bound",
        lambda s: {"min": s.min_active, "mean": s.mean_active, "max": s.max_active},
    )
    yield families.gauge("kv_blocks", "Blocks of the KV cache", lambda s: s.num_blocks)
    yield families.gauge("kv_blocks_free", "Blocks free or only cached", lambda s: s.num_free_blocks)
    yield families.gauge("kv_blocks_cached", "Blocks in the prefix cache", lambda s: s.num_cached_blocks)
    yield families.gauge("kv_use_ratio", "Share of the KV cache held by sequences", lambda s: s.kv_use)


def distributions(families: Families) -> Iterator[Metric]:
    def accepted(metrics: EngineMetrics) -> Histogram:
        histogram = Histogram(DRAFTS)
        for num_accepted, num_rounds in enumerate(metrics.stats.speculation.acceptance_histogram):
            histogram.observe(num_accepted, num_rounds)

        return histogram

    for name, help_text, field in (
        ("time_to_first_token_seconds", "From the call to the first token", "first_token"),
        ("time_between_tokens_seconds", "From one chunk of a stream to its next", "time_between_tokens"),
        ("queue_seconds", "From the call to the first slot", "queued"),
        ("request_seconds", "From the call to the end, by stop or length", "request"),
        ("step_seconds", "A step on the device", "step"),
        ("request_prompt_tokens", "Tokens of a prompt", "prompt_tokens"),
        ("request_completion_tokens", "Tokens of a completion", "completion_tokens"),
    ):
        yield families.histogram(name, help_text, histogram_of(field))
    yield families.histogram("round_accepted_tokens", "Drafted tokens accepted in a round", accepted)


def histogram_of(field: str) -> Callable[[EngineMetrics], Histogram]:
    """A function that takes one of an engine's histograms."""

    def take(metrics: EngineMetrics) -> Histogram:
        histogram: Any = getattr(metrics.histograms, field)
        assert isinstance(histogram, Histogram)
        return histogram

    return take
