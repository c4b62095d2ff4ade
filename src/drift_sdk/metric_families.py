"""Families of metrics of Prometheus, each with the samples of several engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from drift_sdk.errors import DriftError
from drift_sdk.stats import EngineMetrics, EngineStats, Histogram

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as cause:
    raise DriftError(
        'metrics need the package prometheus-client: pip install "drift-engine[metrics]"'
    ) from cause

__all__ = [
    "Collector",
    "CollectorRegistry",
    "Families",
    "Measured",
    "Metric",
    "generate_latest",
    "printable",
]


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
