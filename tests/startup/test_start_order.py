"""The order of a start on CUDA graphs: lock, memory, threads, weights, and a wait before measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_zoo import make_model
from tiny_llama import tiny_llama

from drift_sdk.families import read_spec

pytest.importorskip("cuda.core")

from drift_sdk import ConfigError, EngineConfig, ModelLoadError
from drift_sdk.events import ignore_progress
from drift_sdk.execution.device import streams
from drift_sdk.execution.drafter_factory import NO_DRAFTER
from drift_sdk.execution.forward import kernel_weights
from drift_sdk.loading.source import Source
from drift_sdk.startup import executor_factory, graph_startup, model_startup
from drift_sdk.startup.executor_factory import open_graph_executor
from drift_sdk.startup.model_parts import ModelPart, StoredWeights, load_part
from drift_sdk.startup.model_startup import open_model
from drift_sdk.startup.sizing import DeviceMemory, KVDemand, MemoryRoom


class Stopped(Exception):
    """Ends a start where a test has seen enough."""


class NotedMemory:
    """The memory of a GPU: notes when it is measured."""

    def __init__(self, events: list[str], device: torch.device) -> None:
        self._events, self.device = events, device
        events.append(f"measure {device}")

    def room(self, *, reserve: int | None = None, to_load: int = 0) -> MemoryRoom:
        self._events.append("room")
        return MemoryRoom(share=2**30, for_length=2**30, most=2**30, share_field="", account="")


@pytest.mark.parametrize("fails_in", ["load", "open"])
def test_threads_run_while_a_model_is_loaded_and_end_before_the_lock_is_free(
    fails_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(1, tmp_path / "model")
    events: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        events.append(name)
        try:
            yield
        finally:
            events.append(f"end of {name}")

    def prepared(config: EngineConfig, model: Any, dtype: Any, memories: Sequence[NotedMemory]) -> Any:
        assert [memory.device for memory in memories] == [torch.device("cpu")]
        return noted("threads")

    def load(weights: StoredWeights, *arguments: Any) -> Any:
        assert isinstance(weights.memory, NotedMemory)
        events.append("load")
        if fails_in == "load":
            raise ModelLoadError("a weight")

        decoder = SimpleNamespace(device=weights.device, kv_form=None, dtype=torch.float32)
        return SimpleNamespace(decoder=decoder, drafter_factory=NO_DRAFTER)

    def open_executor(*arguments: Any) -> Any:
        events.append("open")
        raise Stopped

    monkeypatch.setattr(model_startup, "choose_executor", lambda *arguments: ("graph", None))
    monkeypatch.setattr(model_startup, "check_attention_room", lambda *arguments: None)
    monkeypatch.setattr(model_startup, "_check_before_download", lambda *arguments: None)
    monkeypatch.setattr(model_startup, "opening_locks", lambda devices, check: noted("lock"))
    monkeypatch.setattr(model_startup, "DeviceMemory", lambda place, config: NotedMemory(events, place))
    monkeypatch.setattr(model_startup, "prepared_graphs", prepared)
    monkeypatch.setattr(model_startup, "load_part", load)
    monkeypatch.setattr(model_startup, "kv_demand", lambda *arguments: None)
    monkeypatch.setattr(model_startup, "open_graph_executor", open_executor)
    with pytest.raises(ModelLoadError if fails_in == "load" else Stopped):
        open_model(tmp_path / "model", EngineConfig(device="cpu", dtype="float32"), ignore_progress)
    steps = ["load"] if fails_in == "load" else ["load", "open"]
    assert events == ["lock", "measure cpu", "threads", *steps, "end of threads", "end of lock"]


def test_memory_and_products_are_measured_when_the_threads_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def note(name: str) -> Any:
        return lambda *arguments, **options: events.append(name)

    def part(index: int) -> ModelPart:
        device = torch.device("cuda", index)
        spec = SimpleNamespace(vocab_size=64, num_layers=1, recurrent_layers=())
        decoder: Any = SimpleNamespace(device=device, spec=spec, dtype=torch.float32)
        memory: Any = NotedMemory([], device)
        memory._events = events
        return ModelPart(decoder=decoder, memory=memory, drafter_factory=NO_DRAFTER)

    def start(*arguments: Any) -> None:
        raise Stopped

    monkeypatch.setattr(streams, "wait_for_preparation", lambda index: events.append(f"wait {index}"))
    monkeypatch.setattr(kernel_weights, "arrange_decoder", note("arrange"))
    monkeypatch.setattr(graph_startup, "engine_table", note("tune"))
    monkeypatch.setattr(graph_startup, "start_graph_executor", start)
    monkeypatch.setattr(executor_factory, "view_layout", note("views"))
    demand = KVDemand(context=1024, block_size=64, bytes_per_block=2**16)
    with pytest.raises(Stopped):
        open_graph_executor(EngineConfig(max_model_len=128), [part(2), part(3)], demand, ignore_progress)
    measured = events.index("tune")
    assert sorted(events[:measured]) == ["arrange", "arrange", "wait 2", "wait 3"]
    assert events[measured:] == ["tune", "room", "room", "views"]


@pytest.mark.parametrize("is_strict", [False, True])
def test_executor_that_cannot_be_used_is_closed(monkeypatch: pytest.MonkeyPatch, is_strict: bool) -> None:
    closed: list[str] = []

    def round_costs() -> None:
        raise Stopped

    executor = SimpleNamespace(round_costs=round_costs, close=lambda: closed.append("executor"))
    table = SimpleNamespace(untuned={"256x256"} if is_strict else set())
    device = torch.device("cuda", 0)
    spec = SimpleNamespace(vocab_size=64, num_layers=1, recurrent_layers=())
    decoder: Any = SimpleNamespace(device=device, spec=spec, dtype=torch.float32)
    drafter: Any = SimpleNamespace(
        draft=None,
        draft_choices=(0, 3),
        num_graph_layers=0,
        is_adaptive=True,
        check_graphs=lambda: None,
    )
    memory: Any = NotedMemory([], device)
    monkeypatch.setattr(streams, "wait_for_preparation", lambda index: None)
    monkeypatch.setattr(kernel_weights, "arrange_decoder", lambda *arguments: None)
    monkeypatch.setattr(graph_startup, "engine_table", lambda *arguments: table)
    monkeypatch.setattr(graph_startup, "start_graph_executor", lambda *arguments: executor)
    monkeypatch.setattr(executor_factory, "view_layout", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    config = EngineConfig(max_model_len=128, strict_performance=is_strict)
    part = ModelPart(decoder=decoder, memory=memory, drafter_factory=drafter)
    demand = KVDemand(context=1024, block_size=64, bytes_per_block=2**16)
    with pytest.raises(ConfigError if is_strict else Stopped):
        open_graph_executor(config, [part], demand, ignore_progress)
    assert closed == ["executor"]


def test_a_part_keeps_the_memory_that_was_measured_before_it_was_loaded() -> None:
    config = EngineConfig(device="cpu", dtype="float32", load="random")
    model, memory = read_spec(tiny_llama()), DeviceMemory(torch.device("cpu"), config)
    weights = StoredWeights(Source(Path()), model, torch.float32, None, memory)
    assert load_part(weights, config, ignore_progress).memory is memory
