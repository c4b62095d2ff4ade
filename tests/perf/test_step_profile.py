"""Analysis of a step's trace (names, places and gaps of kernels), and the memory of captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_device import InterpretedDevice
from msgspec import UNSET, to_builtins

from drift_sdk.steps import ExecutorLimits
from perf.graph_memory import Captured, NotesMemory, captured_graphs, measure, open_executor
from perf.graph_memory import main as memory_main
from perf.harness.active_rounds import tiles_of
from perf.harness.decoding import DecodeOptions
from perf.harness.drafting import Drafting
from perf.harness.scenario import Scenario
from perf.harness.shapes import Model, prepare, prepare_draft
from perf.harness.table import progress
from perf.step_profile import COLUMNS, Kernel, busy_us, kernels_of_trace, main, profile_runs, table_rows

LAYER = ("_multiply", "_rotate_and_store", "_attend", "_add_partitions", "_multiply", "_add_norm")
MLP = ("_gated_multiply", "_multiply", "_add_norm")
OPTIONS = DecodeOptions(device="cpu", dtype="bfloat16")
SINGLE = Scenario.parse("single-64")


@pytest.fixture
def tiny(tmp_path: Path) -> Model:
    return prepare("tiny", tmp_path / "tiny")


def step_names(num_layers: int) -> list[str]:
    return ["_enter", "_embed_norm", *(LAYER + MLP) * num_layers, "_multiply", "rule_logits", "_commit"]


def trace_of(names: list[str], num_steps: int) -> dict[str, Any]:
    """A shuffled trace of steps that begin a millisecond apart.

    Each kernel takes 10 us and starts 8 us after the previous one, except the last, which starts 2 us after
    the end of the previous one.
    """
    events: list[dict[str, Any]] = [{"ph": "X", "cat": "cpu_op", "name": "launch", "ts": 0.0, "dur": 5.0}]
    for step in range(num_steps):
        for index, name in enumerate(names):
            late = 4.0 if index == len(names) - 1 else 0.0
            start = step * 1000.0 + index * 8.0 + late
            events.append({"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": 10.0})

    return {"traceEvents": events[::-1]}


def test_kernels_of_a_step_are_grouped_by_place(tiny: Model) -> None:
    names = step_names(tiny.spec.num_layers)
    kernels = kernels_of_trace(trace_of(names, 4))
    assert len(kernels) == 4 * len(names)
    runs = list(profile_runs(kernels, 4, tiny, Scenario.parse("batch2-64"), OPTIONS, 0.001))
    found = {(run.kernel, run.shape): run for run in runs}
    assert [key for key in found if key[0].endswith("_multiply") or key[0] == "_multiply"] == [
        ("_multiply", "qkv 128x64"),
        ("_multiply", "output 64x64"),
        ("_gated_multiply", "gate_up 320x64 gated"),
        ("_multiply", "down 64x160"),
        ("_multiply", "lm_head 320x64"),
    ]
    qkv, head = found["_multiply", "qkv 128x64"], found["_multiply", "lm_head 320x64"]
    assert (qkv.launches, head.launches) == (3, 1)
    assert (qkv.us, qkv.us_per_step) == (10, 30)
    assert qkv.num_bytes == 2 * (128 * 64 + 2 * 64)
    assert qkv.tb_s == pytest.approx(qkv.num_bytes / 10e-6 / 1e12)
    assert qkv.roofline_fraction == pytest.approx(qkv.tb_s / 0.001)
    attention = found["_attend", ""]
    context = 64 + 1 + 3 + 2
    assert attention.num_bytes == 2 * context * 2 * 2 * 16 * 2  # batch, keys and values, heads, head_dim
    assert found["_commit", ""].num_bytes is UNSET

    step = runs[-1]
    span = (len(names) - 1) * 8 + 4 + 10
    assert (step.kernel, step.launches, step.us) == ("step", len(names), span)
    assert step.idle_share == pytest.approx(2 / span)
    assert step.num_bytes == tiny.decode_bytes(2, context, 2)
    rows = table_rows([to_builtins(run) for run in runs])
    assert {len(row) for row in rows} == {len(COLUMNS)}


def test_kernels_of_a_step_with_chunks_have_no_places(tiny: Model) -> None:
    """Those of the library have other names, and rows of prompts share them."""
    names = ["library", "_multiply", "library", "_commit"]
    kernels = kernels_of_trace(trace_of(names, 2))
    runs = list(profile_runs(kernels, 2, tiny, Scenario.parse("batch2-64"), OPTIONS, 0.001, 190))
    assert [(run.kernel, run.shape, run.launches) for run in runs] == [
        ("library", "", 2),
        ("_multiply", "", 1),
        ("_commit", "", 1),
        ("step", "", 4),
    ]
    assert {run.scenario for run in runs} == {"batch2-64+190"}
    assert all(run.num_bytes is UNSET for run in runs[:-1]) and runs[-1].num_bytes is not UNSET


def test_kernels_of_a_round_with_drafts_have_no_places(tiny: Model) -> None:
    """Those of the head have the same names, and its bytes are part of the round's."""
    names = ["_multiply", "_attend", "_multiply", "_commit"]
    kernels = kernels_of_trace(trace_of(names, 2))
    drafting = Drafting(draft=prepare_draft(tiny), num_draft_tokens=3, acceptance_length=3.0)
    scenario = Scenario.parse("batch2-64")
    runs = list(profile_runs(kernels, 2, tiny, scenario, OPTIONS, 0.001, drafting=drafting))
    assert [(run.kernel, run.shape, run.launches) for run in runs] == [
        ("_multiply", "", 2),
        ("_attend", "", 1),
        ("_commit", "", 1),
        ("step", "", 4),
    ]
    assert {(run.num_draft_tokens, run.acceptance, run.acceptance_length) for run in runs} == {
        (3, "simulated", 3.0)
    }
    assert all(run.num_bytes is UNSET for run in runs[:-1])
    context = 64 + 1 + (3 + 1) * 3.0
    own_bytes = tiny.decode_bytes(2, context, 2)
    assert runs[-1].num_bytes == own_bytes + drafting.round_bytes(3, scenario, OPTIONS) > own_bytes
    rows = table_rows([to_builtins(run) for run in runs])
    assert {len(row) for row in rows} == {len(COLUMNS)}


def test_overlapping_kernels_count_once() -> None:
    assert busy_us([Kernel(0, 10, "a"), Kernel(5, 12, "b"), Kernel(6, 8, "c"), Kernel(20, 21, "d")]) == 13


@pytest.mark.parametrize("num_kernels", [0, 7, 8])
def test_steps_with_different_kernels_are_rejected(num_kernels: int, tiny: Model) -> None:
    kernels = [Kernel(index, index + 1, "ab"[index % 3 == 0]) for index in range(num_kernels)]
    with pytest.raises(RuntimeError, match="expected 4 steps of the same ones"):
        list(profile_runs(kernels, 4, tiny, Scenario.parse("single-64"), OPTIONS, 4.0))


def test_memory_is_measured_for_every_graph(tiny: Model) -> None:
    """Each capture takes a MiB more than the previous one."""

    state = {"calls": 0, "free": 2**40}

    def free_bytes() -> int:
        state["calls"] += 1
        if state["calls"] % 2 == 0:
            state["free"] -= state["calls"] // 2 * 2**20
        return state["free"]

    memory = NotesMemory(free_bytes)
    limits = ExecutorLimits(
        max_num_seqs=2, max_model_len=64, num_blocks=4, block_size=16, vocab_size=tiny.spec.vocab_size
    )
    executor = open_executor(tiny, InterpretedDevice(), limits, torch.float32, 2, memory)
    graphs = captured_graphs(executor, memory.taken)
    assert [graph.mib for graph in graphs] == [float(index + 1) for index in range(len(graphs))]
    assert {graph.kind for graph in graphs} == {
        "prefill", "mixed", "draft_extend", "decode", "draft", "verify", "first_tokens", "update",
    }  # fmt: skip
    assert {graph.size for graph in graphs if graph.kind == "decode"} == {"1x0", "1x2", "2x0", "2x2"}
    assert len(graphs) == len(memory.taken)
    assert isinstance(tiles_of(executor)(), int)
    executor.close()


def test_memory_of_graphs_of_a_kind_is_added() -> None:
    graphs = [
        Captured("decode", "2x0", 3.0),
        Captured("first_tokens", "2", 1.0),
        Captured("decode", "1x0", 0.5),
    ]
    fields = {"engine": "drift", "model": "m", "dtype": "d", "scenario": "graphs", "batch": 2, "context": 8}
    runs = [(run.graph, run.num_graphs, run.mib) for run in measure(graphs, **fields)]
    assert runs == [
        ("decode 2x0", 1, 3.0), ("first_tokens 2", 1, 1.0), ("decode 1x0", 1, 0.5),
        ("all decode", 2, 3.5), ("all first_tokens", 1, 1.0),
    ]  # fmt: skip


def test_graphs_of_a_speculating_engine_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"engine": "drift", "model": "m", "dtype": "d", "scenario": "graphs", "batch": 2, "context": 8}
    for run in measure([Captured("decode", "2x3", 3.0)], num_draft_tokens=3, **fields):
        progress(run)
    assert capsys.readouterr().out.startswith("drift m graphs 3: mib 3\n")


def test_products_of_few_rows_take_the_place_of_others(tiny: Model) -> None:
    """Some weights are multiplied by another kernel, all by one of two."""
    output = LAYER.index("_multiply", 1)
    layer = [*LAYER[:output], "few_rows_product", *LAYER[output + 1 :], *MLP]
    kernels = kernels_of_trace(trace_of([*layer * tiny.spec.num_layers, "_multiply"], 2))
    runs = profile_runs(kernels, 2, tiny, SINGLE, OPTIONS, 0.001)
    assert [(run.kernel, run.shape, run.launches) for run in runs if run.shape] == [
        ("_multiply", "qkv 128x64", 3),
        ("few_rows_product", "output 64x64", 3),
        ("_gated_multiply", "gate_up 320x64 gated", 3),
        ("_multiply", "down 64x160", 3),
        ("_multiply", "lm_head 320x64", 1),
    ]


@pytest.mark.parametrize("script", [main, memory_main])
def test_profile_and_memory_need_a_gpu(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script(["--device", "cpu"])
    assert "on a GPU" in capsys.readouterr().err


def test_kernels_of_experts_are_grouped_by_place(tmp_path: Path) -> None:
    """The products of CUDA C++ have one name; their router is no product of its own."""
    model = prepare("tiny-experts", tmp_path / "tiny-experts")
    attention = ["_multiply", "_attend", "_multiply", "_add_norm"]
    triton = ["_multiply", "_choose_experts", "_list_rows", "_gated_expert_multiply", "_expert_multiply"]
    for experts, router in ((["route", "product", "product"], []), (triton, ["router 8x64"])):
        names = [*(*attention, *experts, "_add_norm") * 4, "_multiply"]
        kernels = kernels_of_trace(trace_of(names, 2))
        found = {
            run.shape: run for run in profile_runs(kernels, 2, model, SINGLE, OPTIONS, 0.001) if run.shape
        }
        assert list(found) == [
            "qkv 128x64", "output 64x64", *router, "gate_up of experts", "down of experts", "lm_head 320x64",
        ]  # fmt: skip
        assert found["down of experts"].launches == 4
        assert found["gate_up of experts"].num_bytes == pytest.approx(2 * model.expert_bytes(2) * 2 / 3)
