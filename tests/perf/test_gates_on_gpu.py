"""`pytest -m perf`: the gates of `micro`, measured once on this machine's GPU, a test for each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drift_sdk._kernels.gemm.tuning import gpu_key
from perf.gating.figures import read_folder
from perf.gating.gate import Gate, load_gates
from perf.gating.judging import judge
from perf.gating.measuring import commands_of, measure
from perf.harness.record import RESULTS

pytestmark = [
    pytest.mark.perf,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gates are measured on an NVIDIA GPU"),
]

FILE = load_gates()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the results of `micro`; fails with what the measurement reports."""
    folder = tmp_path_factory.mktemp("gates") / "micro"
    errors = [one.error for one in measure(commands_of("micro"), "cuda", folder)]
    assert not any(errors), errors
    return folder


@pytest.mark.parametrize("gate", FILE.of("micro"), ids=lambda gate: gate.name)
def test_gate_of_micro_is_green(gate: Gate, measured: Path) -> None:
    committed = read_folder(RESULTS / gpu_key(torch.cuda.get_device_name()))
    verdict = judge(gate, FILE, read_folder(measured), committed)
    assert verdict.state == "green", str(verdict)
