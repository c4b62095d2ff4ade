"""Kernels compiled for GPUs that are not here fit their shared memory and use no instruction that they
lack."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from drift_sdk._kernels.common.parallel_compile import KernelToCompile
from perf.cross_compile import violations

ROOT = Path(__file__).parents[2]


def run_command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command with a compiler: kernels of this process are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "perf.cross_compile", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_largest_kernels_fit_gpus_of_8_6(tmp_path: Path) -> None:
    """8.6 has the instructions of 8.0 and the least shared memory. Kernels for 9.0, compiled before in the
    same process, leave nothing behind."""
    done = run_command("--covering", "--largest", "--capability", "90", "86", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "90: 4 kernels compiled so far, 0 violations", "86: 8 kernels compiled so far, 0 violations"
    ]  # fmt: skip


def test_kernels_of_two_gpus_fit_gpus_of_9_0(tmp_path: Path) -> None:
    """Sums inside and after layers, logits, drafts, and the beginning of a step."""
    arguments = ("--tensor-parallel", "2", "--model", "llama-3.1-8b", "--capability", "90")
    done = run_command(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"90: [1-9]\d* kernels compiled so far, 0 violations", done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--kv-dtype", "fp8")], ids=["", "fp8 KV"])
def test_all_kernels_fit_all_gpus(options: tuple[str, ...], tmp_path: Path) -> None:
    models = ("llama-3.1-8b", "smollm2-shapes", "qwen3-30b-a3b")
    done = run_command("--covering", "--model", *models, *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arch", "ptx", "shared", "is_found"),
    [
        (80, "mma.sync", 163 * 1024, False),
        (80, "mma.sync", 163 * 1024 + 1, True),
        (86, "mma.sync", 99 * 1024 + 1, True),
        (89, "griddepcontrol.wait;", 0, True),
        (80, "wgmma.mma_async", 0, True),
        (86, "cp.async.bulk.tensor", 0, True),
        (86, "cp.async.cg.shared.global", 0, False),
        (90, "griddepcontrol.wait; wgmma.mma_async", 227 * 1024, False),
        (120, "griddepcontrol.wait;", 99 * 1024, False),
    ],
)
def test_violations_are_found(
    arch: int, ptx: str, shared: int, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = SimpleNamespace(asm={"ptx": ptx}, metadata=SimpleNamespace(shared=shared))
    monkeypatch.setattr(KernelToCompile, "compile", lambda _: binary)
    assert len(list(violations([kernel(arch)]))) == is_found


def test_kernel_that_does_not_compile_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: KernelToCompile) -> None:
        raise RuntimeError("ptxas")

    monkeypatch.setattr(KernelToCompile, "compile", fail)
    (found,) = violations([kernel(80)])
    assert found.error == "RuntimeError('ptxas')"


def kernel(arch: int) -> KernelToCompile:
    return KernelToCompile(
        module="m", name="k", signature={}, constants={}, attributes={}, backend="cuda", arch=arch,
        warp_size=32,
        options={},
    )  # fmt: skip
