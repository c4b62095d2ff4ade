"""Other engines, measured like this one, each by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from record import DecodeRun
from scenario import Scenario
from shapes import Model

from peers import transformers, vllm

__all__ = ["PEERS"]

PEERS: dict[str, Callable[[Model, Sequence[Scenario], int, float], Iterator[DecodeRun]]] = {
    "transformers": transformers.measure,
    "vllm": vllm.measure,
}
"""By name: measure(model, scenarios, repeats, read bandwidth in TB/s) yields a run for each scenario."""
