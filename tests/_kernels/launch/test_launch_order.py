from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from ttir import LOAD_A, STORE_B, WAIT, CompiledKernel

from drift_sdk._kernels.launch import launch_order
from drift_sdk._kernels.launch.launch_order import (
    LIBRARY,
    KernelAccess,
    Launches,
    LaunchOrderError,
    checked_launches,
    note,
    note_kernel,
    note_library_kernel,
)
from drift_sdk._kernels.slots import advance


def names(*values: str) -> frozenset[str]:
    return frozenset(values)


WRITER = KernelAccess(names(), names("out"), False)
EARLY_TRIGGER_WRITER = KernelAccess(names(), names("out"), True)
READER = KernelAccess(names("x"), names("out"), False)
WAITING_READER = KernelAccess(names(), names("out"), False)


def run(*steps: tuple[KernelAccess, torch.Tensor | None, torch.Tensor | None]) -> None:
    launches = Launches()
    for index, (kernel, x, out) in enumerate(steps):
        launches.add(f"k{index}", kernel, {"x": x, "out": out})


def test_early_reads_of_what_the_preceding_kernel_writes_are_rejected() -> None:
    plan, other = torch.zeros(2, 8)
    with pytest.raises(LaunchOrderError, match="k1 reads x before it waits: k0 may still be writing it"):
        run((WRITER, None, plan), (READER, plan, other))
    with pytest.raises(LaunchOrderError):
        run((WRITER, None, plan[3:4]), (READER, plan[::2][1:3], other))  # a view of a view
    with pytest.raises(LaunchOrderError):
        run((WRITER, None, plan), (READER, plan[7:], other))  # the last number
    run((WRITER, None, plan[:4]), (READER, plan[4:], other))
    run((WRITER, None, plan), (WRITER, None, other), (READER, plan, other))
    run((WRITER, None, plan), (WAITING_READER, plan, other))
    run((WRITER, None, plan), (READER, None, other), (READER, plan[:0], other))


def test_early_writes_of_what_the_preceding_kernel_may_use_are_rejected() -> None:
    plan, other, sums = torch.zeros(3, 8)
    early_writer = KernelAccess(names(), names("out"), False, names("out"))
    late_reader = {"x": plan, "out": other}

    def write_after(*kernels: KernelAccess, out: torch.Tensor | None, has_all: bool = True) -> None:
        launches = Launches()
        for kernel in kernels:
            launches.add("k0", kernel, late_reader, has_all=has_all)
        launches.add("k1", early_writer, {"out": out})

    write_after(WRITER, out=sums)
    for used in (plan[7:], other[:1]):
        with pytest.raises(LaunchOrderError, match="k1 writes out before it waits: k0 may still be using it"):
            write_after(WRITER, out=used)
    write_after(out=plan)
    write_after(WRITER, out=None)
    with pytest.raises(LaunchOrderError, match="k1 writes out before it waits"):
        write_after(WRITER, out=sums, has_all=False)  # it may use any memory


def test_early_writes_are_held_against_every_kernel_that_may_run() -> None:
    plan, other, sums = torch.zeros(3, 8)
    early_writer = KernelAccess(names(), names("out"), False, names("out"))
    launches = Launches()
    launches.add("k0", WRITER, {"x": plan, "out": other}, has_all=True)
    launches.add("k1", EARLY_TRIGGER_WRITER, {"out": sums}, has_all=True)
    with pytest.raises(LaunchOrderError, match="k2 writes out before it waits: k0 may still be using it"):
        launches.add("k2", early_writer, {"out": plan})


def test_kernels_with_unknown_arguments_may_use_any_memory() -> None:
    other, sums = torch.zeros(2, 8)
    early_writer = KernelAccess(names(), names("out"), False, names("out"))
    launches = Launches()
    launches.add("k0", WRITER, {"out": other})
    with pytest.raises(LaunchOrderError, match="k0 may still be using it"):
        launches.add("k1", early_writer, {"out": sums})
    launches = Launches()
    with_addresses = KernelAccess(names(), names("out"), False, has_addresses=True)
    launches.add("k0", with_addresses, {"out": other}, has_all=True)
    with pytest.raises(LaunchOrderError, match="k0 may still be using it"):
        launches.add("k1", early_writer, {"out": sums})


def test_early_writers_keep_early_triggers_in_the_check() -> None:
    plan, other, sums = torch.zeros(3, 8)
    launches = Launches()
    launches.add("k0", WRITER, {"out": plan}, has_all=True)
    launches.add("k1", KernelAccess(names(), names("out"), True, names("out")), {"out": sums}, has_all=True)
    for name in ("plan", "sums"):
        with pytest.raises(LaunchOrderError):
            launches.add("k2", READER, {"x": {"plan": plan, "sums": sums}[name], "out": other})
    launches.add("k2", READER, {"x": other, "out": None})


def test_torch_kernels_wait_and_count_as_writers() -> None:
    plan, other = torch.zeros(2, 8)
    early_trigger_reader = KernelAccess(names("x"), names("out"), True)
    launches = Launches()
    launches.add("k0", WRITER, {"out": plan})
    launches.add("torch", LIBRARY, {"out": other})
    launches.add("k1", early_trigger_reader, {"x": plan, "out": None})
    with pytest.raises(LaunchOrderError, match="k2 reads x before it waits: torch may still be writing it"):
        launches.add("k2", READER, {"x": other, "out": None})
    note_library_kernel(other)  # outside `checked_launches`, where nothing is checked


def test_kernels_of_cuda_programs_are_checked() -> None:
    plan, other = torch.zeros(2, 8)
    with checked_launches():
        note_kernel("k0", WRITER, {"x": None, "out": plan})
        with pytest.raises(LaunchOrderError, match="k1 reads x before it waits"):
            note_kernel("k1", READER, {"x": plan, "out": None})
        note_kernel("k1", WRITER, {"x": None, "out": other})
        note_kernel("k2", READER, {"x": plan, "out": None})
        early_writer = KernelAccess(names(), names("out"), False, names("out"))
        with pytest.raises(LaunchOrderError, match="k3 writes out before it waits: k2 may still be using it"):
            note_kernel("k3", early_writer, {"out": other})
        note_kernel("k3", WRITER, {"out": other}, has_all=True)
        note_kernel("k4", early_writer, {"out": plan})
    note_kernel("k3", READER, {"x": other, "out": None})  # nothing is checked any more


class Kernel:
    __name__ = "kernel_of_two_forms"
    arg_names = ("a", "b", "num_rows", "NUM_STEPS")


@pytest.fixture
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's cache is empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch_order, "_accesses", {})


@pytest.mark.usefixtures("nothing_kept")
def test_compiled_kernel_is_scanned_once() -> None:
    """Steps of other sizes launch the same compiled kernels."""
    plan, other = torch.zeros(2, 8)
    early, late = CompiledKernel(LOAD_A, WAIT, STORE_B), CompiledKernel(WAIT, LOAD_A, STORE_B)
    for num_rows in (1, 2, 16, 1):
        note(Launches(), Kernel(), early, (plan, other, num_rows, 1), {})
        note(Launches(), Kernel(), late, (plan, other, num_rows, 2), {"num_warps": 4})
    assert early.num_read == late.num_read == 1
    launches = Launches()
    launches.add("writer", WRITER, {"out": plan})
    note(launches, Kernel(), late, (plan, other, 4, 2), {})
    for values, options in (((plan, other, 4), {"NUM_STEPS": 1}), ((), {"b": other, "a": plan})):
        launches = Launches()
        launches.add("writer", WRITER, {"out": plan})
        with pytest.raises(LaunchOrderError, match="kernel_of_two_forms reads a before it waits"):
            note(launches, Kernel(), early, values, options)


@pytest.mark.usefixtures("nothing_kept")
def test_early_writers_may_follow_compiled_kernels_that_use_other_memory() -> None:
    used, other = torch.zeros(2, 8)
    writer, early_writer = CompiledKernel(WAIT, LOAD_A, STORE_B), CompiledKernel(STORE_B, WAIT)
    for memory, more in ((used, 1), (other, 1), (other, (1, used))):
        launches = Launches()
        note(launches, Kernel(), writer, (used, used, 4, more), {})
        is_used = memory is used or more != 1  # a tuple may have any tensor
        with pytest.raises(LaunchOrderError) if is_used else nullcontext():
            note(launches, Kernel(), early_writer, (other, memory, 4, 1), {})


@pytest.mark.usefixtures("nothing_kept")
def test_launches_of_other_threads_are_not_checked() -> None:
    plan, other = torch.zeros(2, 8)
    launches, early = Launches(), CompiledKernel(LOAD_A, WAIT, STORE_B)
    launches.add("writer", WRITER, {"out": plan})
    thread = threading.Thread(target=note, args=(launches, Kernel(), early, (plan, other, 4, 1), {}))
    thread.start()
    thread.join()
    note(launches, Kernel(), CompiledKernel(WAIT, LOAD_A, STORE_B), (plan, other, 4, 1), {})


def test_early_triggers_keep_earlier_writers_in_the_check() -> None:
    plan, other = torch.zeros(2, 8)
    with pytest.raises(LaunchOrderError, match="k3 reads x before it waits: k0 may still be writing it"):
        run(
            (WRITER, None, plan),
            (EARLY_TRIGGER_WRITER, None, other),
            (EARLY_TRIGGER_WRITER, None, other),
            (READER, plan, None),
        )
    run(
        (WRITER, None, plan), (WRITER, None, other), (EARLY_TRIGGER_WRITER, None, other), (READER, plan, None)
    )


@pytest.mark.gpu
@pytest.mark.kernel
def test_launches_on_a_gpu_are_recorded() -> None:
    """A kernel that waits first may follow itself; one that reads early what it writes may not."""
    index = torch.zeros(1, dtype=torch.int32, device="cuda")
    with checked_launches():
        advance(index, 3)
        advance(index, 3)
    assert index.item() == 2

    from drift_sdk._kernels.slots import _advance

    argument = _advance.arg_names[0]
    compiled = _advance.warmup(index, 3, True, grid=(1,), num_warps=1, launch_pdl=True)
    assert launch_order._accesses[compiled.hash] == KernelAccess(names(), names(argument), False)
    launches = Launches()
    early_reader = KernelAccess(names(argument), names(argument), False)
    launches.add("advance", early_reader, {argument: index})
    with pytest.raises(LaunchOrderError):
        launches.add("advance", early_reader, {argument: index})
