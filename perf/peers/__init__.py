"""Other engines, each measured by a function in the same way as this one."""

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
"""Name -> measure(model, scenarios, repeats, read bandwidth in TB/s), which yields a run per scenario."""
