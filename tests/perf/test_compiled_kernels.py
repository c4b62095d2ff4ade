"""Kernels compiled for GPUs that are not here: their shared memory, their instructions, and their number."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from ttir import HEAD, TAIL, WAIT

from drift_sdk._kernels.launch.parallel_compile import KernelToCompile
from perf.cross_compile import GPUS, main, violations

ROOT = Path(__file__).parents[2]


PROGRAM = """
import json, sys
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
for name, *arguments in json.loads(sys.argv[1]):
    with redirect_stdout(StringIO()) as printed:
        status = import_module(name).main(arguments)
    print(json.dumps([status, printed.getvalue()]), flush=True)
"""
"""Runs commands one after the other, and prints the status and output of each."""
VARIANTS = ("perf.kernel_variants", "--model", "llama-3.1-8b")
TWO_GPUS = ("perf.cross_compile", "--tensor-parallel", "2", "--model", "llama-3.1-8b", "--capability", "90")
LARGEST = ("perf.cross_compile", "--covering", "--largest", "--capability", "90", "86")
ATTENTION = tuple(("compiled_attention", str(dim), way) for dim in (64, 128) for way in ("beside", "behind"))
RECURRENT = ("compiled_recurrent", "90", "86")
LATENT = ("compiled_latent", "glm-4.7-flash", "deepseek-v2-lite", "deepseek-v3-4-layers")
FUSION = ("compiled_fusion",)
BINARY = ("compiled_binary",)
MOST = {"plain": 66, "EAGLE-3": 138}
"""Variants of kernels, by the kind of decoding."""

Outcome = tuple[int | None, str]


def run_commands(*commands: tuple[str, ...], folder: Path) -> dict[tuple[str, ...], Outcome]:
    """Run commands with a compiler, because kernels of this process are interpreted, in one process, because
    it takes seconds to start. Returns the status and output of each; missing are those that a failed one
    kept from running."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(folder),
        "TRITON_DISABLE_LINE_INFO": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    return dict(zip(commands, map(json.loads, done.stdout.splitlines()), strict=False))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Outcome]:
    """Variants are counted first: nothing is compiled yet that would not count."""
    return run_commands(
        VARIANTS, TWO_GPUS, LARGEST, *ATTENTION, RECURRENT, LATENT, folder=tmp_path_factory.mktemp("compiled")
    )


@pytest.mark.slow
def test_default_engines_compile_no_more_variants_of_kernels(
    outcomes: dict[tuple[str, ...], Outcome],
) -> None:
    """Those of Llama-3.1-8B on an H200."""
    _, printed = outcomes[VARIANTS]
    *_, total = printed.splitlines()
    for (kind, most), found in zip(MOST.items(), total.split()[:2], strict=True):
        assert int(found) <= most, (
            f"{kind}: {found} variants of kernels: expected at most {most}. Each takes about 0.3 s of an "
            "engine's first start on a machine, and is loaded at every other start. Numbers that differ from "
            f"step to step need no variants of their own: see `do_not_specialize`.\n{printed}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("command", ATTENTION, ids=" ".join)
def test_attention_beside_chunks_reads_early_around_the_l1_cache_and_waits_at_its_end(
    command: tuple[str, ...], outcomes: dict[tuple[str, ...], Outcome]
) -> None:
    """It writes its scratch memory early. Elsewhere it reads the plan and the rows alone before it waits."""
    status, printed = outcomes[command]
    assert status == 0, printed
    found = json.loads(printed)
    is_beside = command[-1] == "beside"
    sums = ["maxima_ptr", "sums_ptr", "weights_ptr"]
    inputs = {"query_ptr", "keys_ptr", "values_ptr", "block_table_ptr"}
    planned = {"tiles_ptr", "num_tiles_ptr", "row_slot_ptr", "row_position_ptr"}
    assert set(found["reads_early"]) == planned | (inputs if is_beside else set())
    assert found["writes_early"] == (sums if is_beside else [])
    assert not found["triggers_early"]
    assert found["num_cached_loads"] == 0


@pytest.mark.slow
def test_kernels_of_recurrent_layers_compile_and_wait(outcomes: dict[tuple[str, ...], Outcome]) -> None:
    """Gates alone read weights before they wait, and let the next kernel start."""
    status, printed = outcomes[RECURRENT]
    assert status == 0, printed
    found = json.loads(printed)
    assert found["errors"] == []
    waiting = ("_keep_inputs", "_keep_rows", "_mix_rows", "_move_borders", "_norm_gated")
    assert found["early"] == {
        "_fill_gates": [["decay_ptr", "step_ptr"], True],
        **{name: [[], False] for name in waiting},
    }


@pytest.mark.slow
def test_kernels_of_latent_attention_compile_without_spills(
    outcomes: dict[tuple[str, ...], Outcome],
) -> None:
    """Of 20, 16 and 128 heads, whose queries have a latent, none, and one; keys in bfloat16 and in e4m3."""
    status, printed = outcomes[LATENT]
    assert status == 0, printed
    found = json.loads(printed)
    names = ["_attend_latents", "_attend_prompts", "_multiply_heads", "_split_queries", "_store_latents"]
    assert found == {"errors": [], "spills": [], "kernels": 6 * names}


@pytest.mark.slow
def test_exact_attention_leaves_no_fusion_to_the_compiler(tmp_path: Path) -> None:
    """A kernel in which the score of a sink was fused, and one in CUDA C++ in which it was not, differed in a
    few rows."""
    status, printed = run_commands(FUSION, folder=tmp_path)[FUSION]
    assert status == 0, printed
    found = json.loads(printed)
    assert len(found) == 4 and all(fused == written > 0 for fused, written in found.values()), found


@pytest.mark.slow
def test_largest_kernels_fit_gpus_of_8_6(outcomes: dict[tuple[str, ...], Outcome]) -> None:
    """8.6 has the instructions of 8.0 and the least shared memory. Kernels for 9.0, compiled before in the
    same process, leave nothing behind."""
    status, printed = outcomes[LARGEST]
    assert status == 0, printed
    assert printed.splitlines()[-2:] == [
        "90: 5 kernels compiled so far, 0 violations", "86: 10 kernels compiled so far, 0 violations"
    ]  # fmt: skip


@pytest.mark.slow
def test_kernels_of_two_gpus_fit_gpus_of_9_0(outcomes: dict[tuple[str, ...], Outcome]) -> None:
    """Sums inside and after layers, logits, drafts, and the beginning of a step."""
    status, printed = outcomes[TWO_GPUS]
    assert status == 0, printed
    assert re.fullmatch(r"90: [1-9]\d* kernels compiled so far, 0 violations", printed.splitlines()[-1])


@pytest.mark.slow
def test_kernel_is_read_where_the_cache_has_its_binary_alone(tmp_path: Path) -> None:
    """As with TRITON_STORE_BINARY_ONLY; engines did not start."""
    _, printed = run_commands(BINARY, folder=tmp_path)[BINARY]
    assert json.loads(printed) == {"binary": ["cubin", "source"], "is_same": True, "is_kept": True}


MODELS = ("llama-3.1-8b", "smollm2-shapes", "qwen3-30b-a3b")
CAPABILITIES = tuple(map(str, GPUS))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_kernels_fit_all_gpus(capability: str, model: str, tmp_path: Path) -> None:
    covering = ("--covering",) if model == MODELS[0] else ()
    command = ("perf.cross_compile", "--model", model, "--capability", capability, *covering)
    status, printed = run_commands(command, folder=tmp_path)[command]
    assert status == 0, printed


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--kv-dtype", "fp8")], ids=["", "fp8 KV"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_largest_kernels_fit_all_gpus(capability: str, options: tuple[str, ...], tmp_path: Path) -> None:
    models = (*MODELS, "gemma-4-31b")
    command = ("perf.cross_compile", "--largest", "--model", *models, "--capability", capability, *options)
    status, printed = run_commands(command, folder=tmp_path)[command]
    assert status == 0, printed


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
    code = {"ptx": ptx, "ttgir": "", "ttir": f"{HEAD}{WAIT}{TAIL}"}
    binary = SimpleNamespace(asm=code, metadata=SimpleNamespace(shared=shared))
    monkeypatch.setattr(KernelToCompile, "compile", lambda _: binary)
    assert len(list(violations([kernel(arch)]))) == is_found


@pytest.mark.parametrize(("arch", "is_found"), [(86, False), (90, True)])
def test_kernel_that_does_not_wait_is_a_violation_where_kernels_overlap(
    arch: int, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = {"ptx": "mma.sync", "ttgir": "", "ttir": HEAD + TAIL}
    binary = SimpleNamespace(asm=code, metadata=SimpleNamespace(shared=0))
    monkeypatch.setattr(KernelToCompile, "compile", lambda _: binary)
    assert [found.error for found in violations([kernel(arch)])] == [
        "kernel: may end without having waited"
    ] * is_found


@pytest.mark.parametrize(
    ("name", "dtype", "width", "is_found"),
    [
        ("_attend", "bf16", 2, False),
        ("_attend", "bf16", 4, True),
        ("_attend", "f16", 1, True),
        ("_attend", "f32", 1, False),
        ("_prefill_attention", "bf16", 4, False),
    ],
)
def test_product_in_another_order_is_a_violation(
    name: str, dtype: str, width: int, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows joined from the halves of a cache of e4m3 numbers had it: their prompts differed from decoding."""
    operand = f"tensor<16x64x{dtype}, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {width}}}>>"
    code = {"ptx": "", "ttgir": f"tt.dot %a, %b, %c : {operand}", "ttir": f"{HEAD}{WAIT}{TAIL}"}
    binary = SimpleNamespace(asm=code, metadata=SimpleNamespace(shared=0))
    monkeypatch.setattr(KernelToCompile, "compile", lambda _: binary)
    assert len(list(violations([replace(kernel(90), name=name)]))) == is_found


def test_a_check_of_no_kernel_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels of several GPUs were looked for in a folder that was gone."""
    assert main(["--capability", "90"]) == 1
    assert capsys.readouterr().out == "90: 0 kernels compiled so far, 0 violations\n"


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
