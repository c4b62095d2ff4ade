"""Statistics of engines for Prometheus: as text, or in the registry of the host.

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
drift_ngram_drafted_tokens_total          counter   drafted by n-grams beside a draft model
drift_ngram_accepted_tokens_total         counter   of those, the ones accepted
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

In the registry of the host, each has the label `engine` and those of `collector` besides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from drift_sdk.errors import ConfigError, DriftError, EngineClosed
from drift_sdk.stats import EngineMetrics, EngineStats, Histograms

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from drift_sdk._metric_families import Measured, families_of, printable
except ImportError as cause:
    raise DriftError(
        'metrics need the package prometheus-client: pip install "drift-engine[metrics]"'
    ) from cause

__all__ = ["collector", "metrics_text"]

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
             be added and removed, and those that are not open have no samples.
    labels:  further labels of every sample.

    A registry takes one such collector, and raises ValueError for a second one. ConfigError for names that
    cannot be labels, for values that are not strings, and for what is no engine.
    """
    if not isinstance(engines, Mapping):
        raise ConfigError.of("engines", engines, "a mapping of names to engines")

    for engine in engines.values():
        if not callable(getattr(engine, "metrics", None)):
            raise ConfigError.of("engines", engine, "values that are engines")

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
        return families_of([], self._labels)

    def collect(self) -> Iterator[Metric]:
        return families_of(self._read(), self._labels)
