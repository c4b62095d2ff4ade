"""The number of experts that rows have, as read from the device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drift_sdk import Engine
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward.channels import take_counts
from perf.harness.decoding import DecodeOptions, engine_config
from perf.harness.experts import distinct_experts, measured_experts
from perf.harness.scenario import Scenario
from perf.harness.shapes import prepare


@pytest.mark.parametrize("is_recorded", [False, True])
def test_experts_are_counted_in_layers_of_whole_rounds(is_recorded: bool, tmp_path: Path) -> None:
    model = prepare("tiny-experts", tmp_path)  # 4 layers, 2 of 8 experts a row
    workspace = Workspace(torch.device("cpu"))
    executor = SimpleNamespace(_resources=SimpleNamespace(workspace=workspace))
    assert model.spec.experts is not None
    counts = take_counts(workspace, 4, model.spec.experts)
    assert counts.shape == (4, 8)
    counts.zero_()
    shown = SimpleNamespace(_executor=executor) if is_recorded else executor
    assert distinct_experts(shown, model, 3) is None
    counts[0, :2] = 3  # three rows with the same two experts
    counts[1, :6] = 1  # with six different ones
    counts[2, :2] = 2  # of a round with two rows
    counts[3, 0] = 6  # of no round at all
    assert distinct_experts(shown, model, 3) == 4
    assert distinct_experts(shown, model, 2) == 2


async def test_nothing_is_counted_without_experts_or_graphs(tmp_path: Path) -> None:
    options = DecodeOptions(repeats=1, lengths=(2, 4), max_model_len=128)
    scenario = Scenario.parse("single-16")
    for name in ("tiny", "tiny-experts"):
        model = prepare(name, tmp_path / name)
        async with Engine(model.path, engine_config(model, [scenario], options)) as engine:
            assert await measured_experts(engine, model, scenario, options) is None
