"""Memory for the states of models with recurrent layers."""

from __future__ import annotations

from math import prod
from pathlib import Path

import anyio
import pytest
import torch
from hybrid_zoo import make_hybrid_model
from msgspec.structs import replace

from drift_sdk import Chain, ConfigError, Engine, EngineConfig, NGram, Speculation
from drift_sdk._kernels.recurrent.gated_delta import LayerStates
from drift_sdk.execution.forward.caches import RecurrentStates
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.weights import tensor_shapes
from drift_sdk.spec.model import BORDER, ModelSpec, checkpoint_bytes, graph_slot_bytes, slot_bytes
from drift_sdk.startup.sizing import CHECKPOINTS_PER_SLOT, MemoryRoom, check_states, size_states
from perf.harness.published import PUBLISHED

CONFIG = EngineConfig(device="cpu", max_num_seqs=8)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("hybrid")
    make_hybrid_model("qwen3_5", 0, folder)
    return read_spec(resolve(folder).config)


def room(num_bytes: int) -> MemoryRoom:
    return MemoryRoom(share=num_bytes, for_length=num_bytes, most=num_bytes, share_field="", account="a test")


def test_large_rooms_hold_all_sequences_and_their_checkpoints(spec: ModelSpec) -> None:
    states = size_states(CONFIG, spec, torch.float32, room(2**40), "eager")
    assert states is not None
    assert (states.num_slots, states.num_checkpoints) == (8, CHECKPOINTS_PER_SLOT * 8)
    assert states.slot_bytes == slot_bytes(spec, torch.float32)
    assert states.left(room(2**40)).most == 2**40 - states.num_bytes
    assert [states.checkpoint_tokens(size) for size in (1, 16, 32, 128)] == [BORDER, BORDER, BORDER, 128]


@pytest.mark.parametrize("num_slots", [1, 3, 7])
def test_small_rooms_hold_fewer_sequences(spec: ModelSpec, num_slots: int) -> None:
    """Half of the room is for keys and values."""
    each = slot_bytes(spec, torch.float32)
    states = size_states(CONFIG, spec, torch.float32, room(2 * num_slots * each), "eager")
    assert states is not None and states.num_slots == num_slots
    assert states.num_checkpoints == num_slots * each // 4 // checkpoint_bytes(spec, torch.float32)


@pytest.mark.parametrize(
    ("name", "expected"), [("qwen3.6-27b", (191, 188, 176)), ("qwen3.6-35b-a3b", (362, 356, 331))]
)
def test_sequences_that_fit_on_a_gpu_of_139_gib(name: str, expected: tuple[int, ...]) -> None:
    """With weights in bfloat16, and one, four and eight rows of a sequence in a step."""
    spec = read_spec(PUBLISHED[name])
    weights = 2 * sum(prod(shape) for shape in tensor_shapes(spec).values())
    most = room(int(CONFIG.gpu_memory_fraction * 139 * 2**30) - weights)
    found = []
    for num_drafts in (0, 3, 7):
        drafts = Speculation(draft=NGram(), shape=Chain(num_drafts)) if num_drafts else None
        config = EngineConfig(max_num_seqs=1024, speculation=drafts)
        states = size_states(config, spec, torch.bfloat16, most, "graph")
        found.append(0 if states is None else states.num_slots)
    assert tuple(found) == expected


def test_no_room_for_a_sequence_is_an_error(spec: ModelSpec) -> None:
    few = 2 * slot_bytes(spec, torch.float32) - 1
    for num_bytes in (few, 0, -5):
        with pytest.raises(ConfigError) as caught:
            size_states(CONFIG, spec, torch.float32, room(num_bytes), "eager")
        assert caught.value.field == "max_num_seqs"


def test_models_without_states_take_nothing(spec: ModelSpec) -> None:
    plain = replace(spec, layers=tuple(layer for layer in spec.layers if layer.kv is not None))
    assert size_states(CONFIG, plain, torch.float32, room(0), "eager") is None


@pytest.mark.parametrize("max_rows", [1, 4, 17])
def test_bytes_on_graphs_are_those_of_the_tensors(max_rows: int, tmp_path: Path) -> None:
    make_hybrid_model("qwen3_5", 0, tmp_path, linear_key_head_dim=32, linear_value_head_dim=16)
    spec = read_spec(resolve(tmp_path).config)
    decoder = Decoder.random(spec, device="cpu", dtype=torch.bfloat16)
    states = RecurrentStates(decoder, 3, max_rows, 2)
    slots, checkpoints = 0, 0
    for index in spec.recurrent_layers:
        layer = states.layer(index)
        tensors = [getattr(layer.states, name) for name in LayerStates.__struct_fields__]
        slots += sum(tensor.nbytes for tensor in (*tensors, layer.inputs))
        checkpoints += layer.checkpoints.nbytes + layer.checkpoint_inputs.nbytes
    assert slots == 3 * graph_slot_bytes(spec, torch.bfloat16, max_rows)
    assert checkpoints == 2 * checkpoint_bytes(spec, torch.bfloat16)
    speculation = Speculation(draft=NGram(), shape=Chain(max_rows - 1)) if max_rows > 1 else None
    config = replace(CONFIG, speculation=speculation)
    found = size_states(config, spec, torch.bfloat16, room(2**40), "graph")
    assert found is not None and 3 * found.slot_bytes == slots


@pytest.mark.parametrize(
    ("executor", "dtype", "checks", "field"),
    [
        ("graph", torch.float16, False, "dtype"),
        ("graph", torch.float32, False, "dtype"),
        ("graph", torch.bfloat16, True, "checks"),
        ("graph", torch.bfloat16, False, None),
        ("graph", None, False, None),
        ("eager", torch.float32, True, None),
    ],
)
def test_what_kernels_do_not_have_is_an_error(
    spec: ModelSpec, executor: str, dtype: torch.dtype | None, checks: bool, field: str | None
) -> None:
    config = replace(CONFIG, speculation=Speculation(draft=NGram(), shape=Chain(2), checks=checks))
    if field is None:
        check_states(config, spec, executor, dtype)
        return

    with pytest.raises(ConfigError, match="recurrent layers on CUDA graphs") as caught:
        check_states(config, spec, executor, dtype)
    assert caught.value.field == field


def test_engine_runs_as_many_sequences_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_hybrid_model("qwen3_5", 0, tmp_path)
    each = slot_bytes(read_spec(resolve(tmp_path).config), torch.float32)

    def few(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, given: MemoryRoom, executor: str):
        return size_states(config, spec, dtype, replace(given, share=6 * each, most=6 * each), executor)

    monkeypatch.setattr("drift_sdk.startup.executor_factory.size_states", few)

    async def main() -> None:
        async with Engine(tmp_path, EngineConfig(device="cpu", max_model_len=64)) as engine:
            assert engine.stats().num_free_slots == 3
            streams = [engine.generate([5, 6, 7 + i], max_tokens=3, ignore_eos=True) for i in range(9)]
            assert [len((await stream).token_ids) for stream in streams] == [3] * 9

    anyio.run(main)
    assert "max_num_seqs=256: the memory holds the states of 3" in caplog.text
