"""Faults planted into copies of the package: what they do, and that the gates find each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from drift_sdk import ConfigError
from drift_sdk._kernels.gemm.tuning import TunedTable
from perf import planted_faults
from perf.harness.commands import Command, CommandFailed
from perf.harness.processes import ROOT, with_paths
from perf.planted_faults import FAULTS, Outcome, plant

RECORDED = Path(__file__).parent / "recorded" / "nvidia-h200"
GPU = "nvidia-h200"
TABLE = Path("drift_sdk", "_kernels", "gemm", "tuned", f"{GPU}.json")
PROBE = """
import torch
from drift_sdk import ConfigError, EngineConfig
from drift_sdk._kernels.gemm import gemm
from drift_sdk.startup.executor_factory import choose_executor

calls = []
gemm._once = lambda *arguments: calls.append(arguments) or True
assert gemm.fastest_multiply("x", "weight", "out", "config") and len(calls) == 2
for fields in ({"strict_performance": True}, {"executor": "graph"}):
    try:
        choose_executor(EngineConfig(**fields), torch.device("cpu"))
    except ConfigError as error:
        print(error)
"""


@pytest.mark.slow
def test_fallback_and_slow_kernel_change_the_imported_package(tmp_path: Path) -> None:
    """One copy with both faults, imported by another process as a measurement imports it."""
    (path,) = plant(FAULTS["forced fallback"], tmp_path, GPU)
    slow = FAULTS["slowed kernel"].plant
    assert slow is not None
    slow(tmp_path / "drift_sdk", GPU)
    environment = with_paths({"PYTHONPATH": str(ROOT / "src")}, path)
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a planted fault") == 2


def test_tables_are_corrupted_in_the_copy_alone(tmp_path: Path) -> None:
    sound = ROOT / "src" / TABLE
    before = sound.read_bytes()
    plant(FAULTS["truncated table"], tmp_path / "a", GPU)
    with pytest.raises(msgspec.DecodeError, match=FAULTS["truncated table"].reason):
        msgspec.json.decode((tmp_path / "a" / TABLE).read_bytes(), type=TunedTable)
    plant(FAULTS["emptied table"], tmp_path / "b", GPU)
    assert msgspec.json.decode((tmp_path / "b" / TABLE).read_bytes(), type=TunedTable).gemms == {}
    assert sound.read_bytes() == before
    with pytest.raises(ConfigError, match="a table of launch configurations"):
        plant(FAULTS["emptied table"], tmp_path / "c", "nvidia-t4")


def fake_run(slowdown: float = 1.3) -> Callable[..., None]:
    """A measurement of the copy without a GPU: it writes recorded results, slower ones, or fails."""

    def run(
        command: Command, device: str, folder: Path, on_line: Callable[[str], None], *, paths: Any = ()
    ) -> None:
        slower = 1.0
        if paths:
            package = Path(paths[0]) / "drift_sdk"
            table = (package.parent / TABLE).read_bytes()
            if "a planted fault" in (package / "startup" / "executor_factory.py").read_text():
                raise CommandFailed("ConfigError: executor='graph': expected \"eager\": a planted fault")
            try:
                gemms = msgspec.json.decode(table, type=TunedTable).gemms
            except msgspec.DecodeError as error:
                raise CommandFailed(f"msgspec.DecodeError: {error}") from error
            if not gemms:
                raise CommandFailed("ConfigError: strict: expected measured configurations of all weights")
            assert "_once(" in (package / "_kernels" / "gemm" / "gemm.py").read_text()
            slower = slowdown
        folder.mkdir(parents=True, exist_ok=True)
        found = json.loads((RECORDED / "speculative.json").read_text())
        for one in found["runs"]:
            for name in ("tokens_per_s", "roofline_fraction"):
                one[name] /= slower
        (folder / "speculative.json").write_text(json.dumps(found))

    return run


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_faults.machine, "gpu_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(planted_faults, "RESULTS", RECORDED.parent)


def test_every_fault_turns_the_gates_red_for_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planted_faults.main(["--device", "cuda", "--out", str(tmp_path)], fake_run()) == 0
    printed = capsys.readouterr().out
    assert "none: green, expected green" in printed
    assert all(f"{name}: red, expected red" in printed for name in FAULTS)
    outcomes = msgspec.json.decode((tmp_path / "faults.json").read_bytes(), type=list[Outcome])
    assert [outcome.fault for outcome in outcomes] == ["none", *FAULTS]
    states = [{verdict.state for verdict in outcome.verdicts} for outcome in outcomes]
    assert states[0] == {"green"} and all("red" in found for found in states[1:])


def test_fault_that_is_not_found_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted_faults, "FAULTS", {"slowed kernel": FAULTS["slowed kernel"]})
    assert planted_faults.main(["--device", "cuda", "--out", str(tmp_path)], fake_run(1.001)) == 1
    assert "slowed kernel: WRONG, expected red" in capsys.readouterr().out


def test_measurement_that_fails_for_another_reason_finds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ("raised floor", "truncated table", "slowed kernel")
    monkeypatch.setattr(planted_faults, "FAULTS", {name: FAULTS[name] for name in kept})

    def broken(*arguments: Any, **more: Any) -> None:
        raise CommandFailed("torch.OutOfMemoryError: CUDA out of memory")

    assert planted_faults.main(["--device", "cuda", "--out", str(tmp_path)], broken) == 1
    printed = capsys.readouterr().out
    assert all(f"{name}: WRONG" in printed for name in ("none", *kept))


def test_slow_measurement_that_fails_does_not_count_as_a_slowed_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted_faults, "FAULTS", {"slowed kernel": FAULTS["slowed kernel"]})

    def slow_then_broken(*arguments: Any, **more: Any) -> None:
        fake_run()(*arguments, **more)
        if more["paths"]:
            raise CommandFailed("torch.OutOfMemoryError: CUDA out of memory")

    assert planted_faults.main(["--device", "cuda", "--out", str(tmp_path)], slow_then_broken) == 1
    assert "slowed kernel: WRONG" in capsys.readouterr().out


def test_faults_need_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        planted_faults.main(["--device", "cpu", "--out", str(tmp_path)])
