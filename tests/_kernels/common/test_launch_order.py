from __future__ import annotations

import threading

import pytest
import torch

from drift_sdk._kernels.common.launch_order import (
    LIBRARY,
    KernelAccess,
    Launches,
    LaunchOrderError,
    access_of,
    checked_launches,
    note,
    note_kernel,
    note_library_kernel,
)
from drift_sdk._kernels.slots.input_ring import advance

HEAD = """
#loc1 = loc("source"(#loc))
module {
  tt.func public @kernel(%a: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("a"(#loc)), %b: !tt.ptr<bf16> loc("b"(#loc)), %n: i32 loc("n"(#loc))) attributes {noinline = false} {
"""  # noqa: E501
LOAD_A = """
    %at = tt.splat %a : !tt.ptr<f32> -> tensor<32x!tt.ptr<f32>> loc(#loc2)
    %at_0 = tt.addptr %at, %x : tensor<32x!tt.ptr<f32>>, tensor<32xi32> loc(#loc2)
    %value = tt.load %at_0, %mask, %other : tensor<32x!tt.ptr<f32>> loc(#loc2)
"""
STORE_B = """
    %place = tt.addptr %b, %n : !tt.ptr<bf16>, i32 loc(#loc3)
    tt.store %place, %value : !tt.ptr<bf16> loc(#loc3)
"""
WAIT = "    tt.grid_dependency_wait loc(#loc4)\n"
OLD_WAIT = """
    %0 = tt.elementwise_inline_asm "griddepcontrol.wait; // dummy $0" {constraints = "=r"} -> i32 loc(#loc4)
"""
TRIGGER = "    tt.grid_dependency_launch_dependents loc(#loc5)\n"
TAIL = "    tt.return loc(#loc)\n  } loc(#loc)\n} loc(#loc)\n"


def access(*parts: str) -> KernelAccess:
    return access_of("".join((HEAD, *parts, TAIL)))


def names(*values: str) -> frozenset[str]:
    return frozenset(values)


@pytest.mark.parametrize("wait", [WAIT, OLD_WAIT])
def test_loads_before_the_wait_are_early_reads(wait: str) -> None:
    assert access(wait, LOAD_A, STORE_B, TRIGGER) == KernelAccess(names(), names("b"), False)
    assert access(LOAD_A, wait, TRIGGER, STORE_B) == KernelAccess(names("a"), names("b"), False)
    assert access(TRIGGER, LOAD_A, wait, STORE_B) == KernelAccess(names("a"), names("b"), True)


def test_pointers_are_traced_through_loops() -> None:
    loop = """
    %end:2 = scf.for %i = %c0 to %n step %c1 iter_args(%at = %a, %s = %zero) -> (!tt.ptr<f32>, f32) : i32 {
      %part = tt.load %at : !tt.ptr<f32> loc(#loc2)
      %next = tt.addptr %at, %n : !tt.ptr<f32>, i32 loc(#loc2)
      scf.yield %next, %part : !tt.ptr<f32>, f32 loc(#loc2)
    } loc(#loc2)
"""
    assert access(loop, WAIT, STORE_B).reads_early == names("a")
    assert access(WAIT, loop, STORE_B).reads_early == names()


def test_loaded_numbers_are_not_pointers() -> None:
    indirect = """
    %index = tt.load %a : !tt.ptr<f32> loc(#loc2)
    %place = tt.addptr %b, %index : !tt.ptr<bf16>, i32 loc(#loc3)
"""
    store = "    tt.store %place, %value : !tt.ptr<bf16> loc(#loc3)\n"
    assert access(indirect, WAIT, store) == KernelAccess(names("a"), names("b"), False)


def test_untraceable_pointers_count_as_pointers_into_every_argument() -> None:
    chosen = """
    %chosen = scf.if %is_first -> (!tt.ptr<f32>) {
      scf.yield %a : !tt.ptr<f32> loc(#loc2)
    } loc(#loc2)
"""
    load = "    %x = tt.load %chosen : !tt.ptr<f32> loc(#loc2)\n"
    store = "    tt.store %chosen, %value : !tt.ptr<f32> loc(#loc2)\n"
    assert access(chosen, load, WAIT) == KernelAccess(names("a", "b"), names(), False)
    assert access(WAIT, chosen, load, store) == KernelAccess(names(), names("a", "b"), False)


BRANCHES = """
    scf.if %is_first {{
{first}    }} else {{
{second}    }} loc(#loc2)
"""


def indented(part: str) -> str:
    return "".join(f"  {line}\n" for line in part.splitlines() if line)


def test_names_of_one_branch_are_other_values_in_the_other() -> None:
    load = LOAD_A.replace("%at_0", "%place")
    branches = BRANCHES.format(first=indented(WAIT + load), second=indented(WAIT + STORE_B))
    assert access(branches, WAIT) == KernelAccess(names(), names("b"), False)


def test_name_of_a_pointer_is_a_number_in_the_other_branch() -> None:
    number = """
    %at_0 = arith.addi %n, %n : i32 loc(#loc2)
    %place = tt.addptr %b, %at_0 : !tt.ptr<bf16>, i32 loc(#loc3)
    %value = tt.load %place : !tt.ptr<bf16> loc(#loc3)
"""
    branches = BRANCHES.format(first=indented(WAIT + LOAD_A), second=indented(number + WAIT))
    assert access(branches, WAIT).reads_early == names("b")


def test_name_of_a_pointer_is_a_loops_number_in_the_other_branch() -> None:
    loop = """
    %end = scf.for %i = %c0 to %n step %c1 iter_args(%at_0 = %zero) -> (i32) : i32 {
      %place = tt.addptr %b, %at_0 : !tt.ptr<bf16>, i32 loc(#loc3)
      %value = tt.load %place : !tt.ptr<bf16> loc(#loc3)
      scf.yield %at_0 : i32 loc(#loc2)
    } loc(#loc2)
"""
    branches = BRANCHES.format(first=indented(WAIT + LOAD_A), second=indented(loop + WAIT))
    assert access(branches, WAIT).reads_early == names("b")


def test_loads_by_descriptors_are_traced() -> None:
    load = """
    %rows = tt.make_tensor_descriptor %a, [%n, %n], [%m, %one] : <f32>, !tt.tensordesc<tensor<8x8xf32>> loc(#loc2)
    %tile = tt.descriptor_load %rows[%n, %n] : !tt.tensordesc<tensor<8x8xf32>> -> tensor<8x8xf32> loc(#loc2)
"""  # noqa: E501
    assert access(load, WAIT, STORE_B).reads_early == names("a")
    assert access(WAIT, load, STORE_B).reads_early == names()


def test_pointers_are_traced_through_numbers() -> None:
    cast = """
    %address = tt.ptr_to_int %a : !tt.ptr<f32> -> i64 loc(#loc2)
    %moved = arith.addi %address, %n : i64 loc(#loc2)
    %pointer = tt.int_to_ptr %moved : i64 -> !tt.ptr<f32> loc(#loc2)
    %x = tt.load %pointer : !tt.ptr<f32> loc(#loc2)
"""
    assert access(cast, WAIT, STORE_B).reads_early == names("a")


def test_wait_before_a_return_in_between_counts_behind_it() -> None:
    branch = """
    cf.cond_br %is_padding, ^bb1, ^bb2 loc(#loc2)
  ^bb1:  // pred: ^bb0
    tt.return loc(#loc2)
  ^bb2:  // pred: ^bb0
"""
    assert access(WAIT, branch, LOAD_A, STORE_B) == KernelAccess(names(), names("b"), False)


def test_wait_in_one_branch_is_none_in_the_other() -> None:
    branches = BRANCHES.format(first=indented(WAIT + STORE_B), second=indented(LOAD_A + WAIT))
    assert access(branches, WAIT) == KernelAccess(names("a"), names("b"), False)
    for parts in ((branches, STORE_B, WAIT), (branches, WAIT.replace("    ", "      "))):
        with pytest.raises(LaunchOrderError):
            access(*parts)


def test_atomics_count_as_writes() -> None:
    atomic = """
    %old = tt.atomic_rmw add, relaxed, gpu, %a, %n, %true : (!tt.ptr<f32>, i32, i1) -> i32 loc(#loc2)
"""
    assert access(WAIT, atomic).writes == names("a")
    with pytest.raises(LaunchOrderError, match=r"kernel: writes \['a'\] before it waits"):
        access(atomic, WAIT)


def test_kernels_that_end_or_write_without_waiting_are_rejected() -> None:
    with pytest.raises(LaunchOrderError, match="kernel: may end without having waited"):
        access(LOAD_A)
    branch = "    scf.if %c {\n      tt.grid_dependency_wait loc(#loc4)\n    } loc(#loc4)\n"
    with pytest.raises(LaunchOrderError, match="before it waits"):
        access(branch, LOAD_A, STORE_B)
    with pytest.raises(LaunchOrderError, match=r"writes \['b'\] before it waits"):
        access(LOAD_A, STORE_B, WAIT)


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
    note_kernel("k3", READER, {"x": other, "out": None})  # nothing is checked any more


class Kernel:
    __name__ = "kernel_of_two_forms"
    arg_names = ("a", "b", "num_rows", "NUM_STEPS")


class Compiled:
    """A compiled kernel, which counts how often its code is read."""

    def __init__(self, *body: str) -> None:
        self.hash, self.num_read = f"{id(self)}", 0
        self._ttir = f"{HEAD}{''.join(body)}{TAIL}"

    @property
    def asm(self) -> dict[str, str]:
        self.num_read += 1
        return {"ttir": self._ttir}


def test_compiled_kernel_is_scanned_once() -> None:
    """Steps of other sizes launch the same compiled kernels."""
    plan, other = torch.zeros(2, 8)
    early, late = Compiled(LOAD_A, WAIT, STORE_B), Compiled(WAIT, LOAD_A, STORE_B)
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


def test_launches_of_other_threads_are_not_checked() -> None:
    plan, other = torch.zeros(2, 8)
    launches, early = Launches(), Compiled(LOAD_A, WAIT, STORE_B)
    launches.add("writer", WRITER, {"out": plan})
    thread = threading.Thread(target=note, args=(launches, Kernel(), early, (plan, other, 4, 1), {}))
    thread.start()
    thread.join()
    note(launches, Kernel(), Compiled(WAIT, LOAD_A, STORE_B), (plan, other, 4, 1), {})


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

    from drift_sdk._kernels.common import launch_order
    from drift_sdk._kernels.slots.input_ring import _advance

    argument = _advance.arg_names[0]
    compiled = _advance.warmup(index, 3, True, grid=(1,), num_warps=1, launch_pdl=True)
    assert launch_order._accesses[compiled.hash] == KernelAccess(names(), names(argument), False)
    launches = Launches()
    early_reader = KernelAccess(names(argument), names(argument), False)
    launches.add("advance", early_reader, {argument: index})
    with pytest.raises(LaunchOrderError):
        launches.add("advance", early_reader, {argument: index})
