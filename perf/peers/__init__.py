"""Other engines, measured like this one, each by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from perf.harness.record import DecodeRun
from perf.harness.scenario import Scenario
from perf.harness.shapes import Model
from perf.peers import transformers, vllm

__all__ = ["PEERS"]

PEERS: dict[str, Callable[[Model, Sequence[Scenario], int, float], Iterator[DecodeRun]]] = {
    "transformers": transformers.measure,
    "vllm": vllm.measure,
}
"""By name: measure(model, scenarios, repeats, read bandwidth in TB/s) yields a run for each scenario."""
