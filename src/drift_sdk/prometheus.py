"""Statistics of engines for Prometheus: as text, or in the registry of the host.

========================================= ========= ====================================================
name                                      type      what
========================================= ========= ====================================================
drift_engine_info{model, executor}        gauge     always 1
drift_paused                              gauge     1 while the engine is paused, else 0
drift_asleep                              gauge     1 while it sleeps, else 0
drift_weights_version                     gauge     times that weights were put in the place of others
drift_requests_running                    gauge     in a slot
drift_requests_waiting                    gauge     waiting for a slot, preempted ones included
drift_requests_submitted_total            counter   submitted and not rejected
drift_requests_rejected_total             counter   rejected with QueueFull
drift_requests_ended_total{reason}        counter   stop, length, cancelled, error
drift_preemptions_total                   counter   sequences that gave up their KV to others
drift_prompt_tokens_total                 counter   of prompts whose first token has come
drift_cached_prompt_tokens_total          counter   of them, those found in the prefix cache
drift_recomputed_prompt_tokens_total      counter   cached, but without a checkpoint of states
drift_generated_tokens_total              counter   delivered to streams
drift_draft_rounds_total                  counter   rounds of a sequence with drafts
drift_drafted_tokens_total                counter   tokens drafted in them
drift_accepted_tokens_total               counter   of those, the ones accepted
drift_rewound_tokens_total                counter   the others: rows of the KV cache rewound
drift_ngram_drafted_tokens_total          counter   drafted by n-grams beside a draft model
drift_ngram_accepted_tokens_total         counter   of those, the ones accepted
drift_partial_rounds_total                counter   rounds verified over a part of the KV cache (lossy)
drift_refresh_rounds_total                counter   rounds over all of it that refreshed this part
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
drift_kv_window_blocks                    gauge     of layers with windows, if these have their own
drift_kv_window_blocks_free               gauge     of them, free or only cached
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

In the registry of the host, each has the label `engine` and those of `collector` besides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from drift_sdk.errors import ConfigError, DriftError, EngineClosed
from drift_sdk.speculation import MAX_DRAFT_TOKENS
from drift_sdk.stats import EngineMetrics, EngineStats, Histogram, Histograms

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as cause:
    raise DriftError(
        'metrics need the package prometheus-client: pip install "drift-engine[metrics]"'
    ) from cause

__all__ = ["collector", "metrics_text"]


def printable(value: str) -> str:
    """A label's value as text that can be encoded: a path may have bytes that are no UTF-8."""
    return value.encode(errors="backslashreplace").decode()


class Measured(Struct, frozen=True):
    """The metrics of an engine at one moment, and labels of all its samples."""

    labels: dict[str, str]
    metrics: EngineMetrics


Kind: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily]


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


DRAFTS = tuple(float(number) for number in range(MAX_DRAFT_TOKENS + 1))
LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
OWN_LABELS = ("engine", "executor", "kind", "le", "model", "position", "reason")


class HasMetrics(Protocol):
    """An `Engine` or a `SyncEngine`."""

    def metrics(self) -> EngineMetrics: ...


def metrics_text(stats: EngineStats, histograms: Histograms, *, model: str, executor: str) -> str:
    """Statistics and histograms in Prometheus' text format, version 0.0.4."""
    metrics = EngineMetrics(model=model, executor=executor, stats=stats, histograms=histograms)
    registry = CollectorRegistry()
    registry.register(MetricsCollector(lambda: [Measured({}, metrics)], ()))
    return generate_latest(registry).decode()


def collector(engines: Mapping[str, HasMetrics], *, labels: Mapping[str, str] | None = None) -> Collector:
    """A collector of one or several engines, for a registry of prometheus_client. Each metric is one family,
    with the samples of all engines.

    engines: engines by the value of their label `engine`. The mapping is read at each collection: engines may
             be added and removed, and those that are not open and have not failed have no samples.
    labels:  further labels of every sample.

    A registry takes one such collector, and raises ValueError for a second one. ConfigError for names that
    cannot be labels, for values that are not strings, and for what is no engine.
    """
    if not isinstance(engines, Mapping):
        raise ConfigError.of("engines", engines, "a mapping of names to engines")

    for engine in engines.values():
        if not callable(getattr(engine, "metrics", None)):
            raise ConfigError.of("engines", engine, "values that are engines")

    if labels is not None and not isinstance(labels, Mapping):
        raise ConfigError.of("labels", labels, "a mapping of names to strings, or None")

    given: dict[str, str] = {}
    for name, value in (labels or {}).items():
        if not (isinstance(name, str) and LABEL.fullmatch(name)) or name in OWN_LABELS:
            allowed = f"names of letters, digits and _, other than {', '.join(OWN_LABELS)}"
            raise ConfigError.of("labels", name, allowed)

        if not isinstance(value, str):
            raise ConfigError.of("labels", value, "strings as values")

        given[name] = printable(value)

    def read() -> list[Measured]:
        measured = []
        for name, engine in dict(engines).items():
            try:
                measured.append(Measured({**given, "engine": printable(str(name))}, engine.metrics()))
            except EngineClosed:
                continue

        return measured

    return MetricsCollector(read, (*given, "engine"))


class MetricsCollector(Collector):
    """The metrics of engines at the moment of a collection.

    read:   the engines that are open.
    labels: names of the labels that they all have.
    """

    def __init__(self, read: Callable[[], Sequence[Measured]], labels: tuple[str, ...]) -> None:
        self._read = read
        self._labels = labels

    def describe(self) -> Iterator[Metric]:
        """The families without samples, by which a registry rejects a second collector of the same names."""
        return self._families([])

    def collect(self) -> Iterator[Metric]:
        return self._families(self._read())

    def _families(self, engines: Sequence[Measured]) -> Iterator[Metric]:
        families = Families(engines, self._labels)
        yield families.info()
        yield from requests(families)
        yield from tokens(families)
        yield from speculation(families)
        yield from slow_paths(families)
        yield from cache_and_steps(families)
        yield from distributions(families)


def requests(families: Families) -> Iterator[Metric]:
    yield families.gauge("paused", "Whether the engine is paused", lambda s: s.is_paused)
    yield families.gauge("asleep", "Whether the engine sleeps", lambda s: s.is_asleep)
    yield families.gauge("weights_version", "Times that weights were replaced", lambda s: s.weights_version)
    yield families.gauge("requests_running", "Requests in a slot", lambda s: s.num_running)
    yield families.gauge("requests_waiting", "Requests waiting for a slot", lambda s: s.num_waiting)
    yield families.counter("requests_submitted", "Requests submitted", lambda s: s.num_submitted)
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
    yield families.counter(
        "recomputed_prompt_tokens",
        "Cached prompt tokens computed again for want of a checkpoint of recurrent states",
        lambda s: s.num_recomputed_tokens,
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
    yield families.counter(
        "partial_rounds",
        "Rounds of a sequence that verified over a part of the KV cache",
        lambda s: s.num_partial_rounds,
    )
    yield families.counter(
        "refresh_rounds",
        "Rounds of a sequence over the whole KV cache that refreshed this part",
        lambda s: s.num_refresh_rounds,
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
    yield families.gauge("kv_window_blocks", "Blocks of layers with windows", lambda s: s.num_window_blocks)
    yield families.gauge(
        "kv_window_blocks_free", "Window blocks free or only cached", lambda s: s.num_free_window_blocks
    )
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
