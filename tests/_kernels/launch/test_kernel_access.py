from __future__ import annotations

import hashlib
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
from triton.runtime.cache import FileCacheManager
from ttir import HEAD, LOAD_A, OLD_WAIT, STORE_B, TAIL, TRIGGER, WAIT

from drift_sdk._kernels.launch import launch_order
from drift_sdk._kernels.launch.launch_order import (
    KernelAccess,
    LaunchOrderError,
    access_of,
    kept_access,
    ttir_of,
)


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
    both = names("a", "b")
    assert access(chosen, store, WAIT) == KernelAccess(names(), both, False, both)


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


def test_gathers_and_scatters_by_descriptors_are_traced() -> None:
    rows = "    %rows = tt.make_tensor_descriptor %a, [%n], [%m] : <f32>, !tt.tensordesc<8xf32> loc(#loc2)\n"
    gather = (
        "    %x = tt.descriptor_gather %rows[%i, %n] : (!tt.tensordesc<8xf32>) -> tensor<8xf32> loc(#loc2)\n"
    )
    scatter = (
        "    tt.descriptor_scatter %rows[%i, %n], %x : !tt.tensordesc<8xf32>, tensor<8xf32> loc(#loc2)\n"
    )
    reduce = "    tt.descriptor_reduce add, %rows[%n], %x : !tt.tensordesc<8xf32>, tensor<8xf32> loc(#loc2)\n"
    assert access(rows, gather, WAIT) == KernelAccess(names("a"), names(), False)
    for write in (scatter, reduce):
        assert access(rows, write, WAIT) == KernelAccess(names(), names("a"), False, names("a"))


def test_early_writes_through_several_arguments_add_up() -> None:
    store_a = "    tt.store %a, %value : !tt.ptr<f32> loc(#loc2)\n"
    assert access(store_a, STORE_B, WAIT).writes_early == names("a", "b")


def test_pointers_are_traced_through_numbers() -> None:
    cast = """
    %address = tt.ptr_to_int %a : !tt.ptr<f32> -> i64 loc(#loc2)
    %moved = arith.addi %address, %n : i64 loc(#loc2)
    %pointer = tt.int_to_ptr %moved : i64 -> !tt.ptr<f32> loc(#loc2)
    %x = tt.load %pointer : !tt.ptr<f32> loc(#loc2)
"""
    assert access(cast, WAIT, STORE_B).reads_early == names("a")
    assert access(cast, WAIT, STORE_B).has_addresses
    assert not access(WAIT, STORE_B).has_addresses


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
    assert access(branches, STORE_B, WAIT).writes_early == names("b")
    with pytest.raises(LaunchOrderError):
        access(branches, WAIT.replace("    ", "      "))


def test_atomics_count_as_writes() -> None:
    atomic = """
    %old = tt.atomic_rmw add, relaxed, gpu, %a, %n, %true : (!tt.ptr<f32>, i32, i1) -> i32 loc(#loc2)
"""
    assert access(WAIT, atomic) == KernelAccess(names(), names("a"), False)
    assert access(atomic, WAIT) == KernelAccess(names(), names("a"), False, names("a"))


def test_stores_before_the_wait_are_early_writes() -> None:
    assert access(LOAD_A, STORE_B, WAIT) == KernelAccess(names("a"), names("b"), False, names("b"))
    assert access(WAIT, LOAD_A, STORE_B, WAIT).writes_early == names()


def test_kernels_that_end_without_waiting_are_rejected() -> None:
    branch = "    scf.if %c {\n      tt.grid_dependency_wait loc(#loc4)\n    } loc(#loc4)\n"
    for parts in ((LOAD_A,), (branch, LOAD_A, STORE_B)):
        with pytest.raises(LaunchOrderError, match="kernel: may end without having waited"):
            access(*parts)


EARLY_TTIR = "".join((HEAD, LOAD_A, WAIT, STORE_B, TAIL))
EARLY = KernelAccess(names("a"), names("b"), False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """TTIR that was scanned."""
    found: list[str] = []

    def scan(ttir: str) -> KernelAccess:
        found.append(ttir)
        return access_of(ttir)

    monkeypatch.setattr(launch_order, "access_of", scan)
    return found


def test_access_of_a_kernel_is_kept_on_disk(folder: Path, scanned: list[str]) -> None:
    kernels = {
        EARLY_TTIR: EARLY,
        "".join((HEAD, WAIT, LOAD_A, STORE_B, TAIL)): KernelAccess(names(), names("b"), False),
        "".join((HEAD, TRIGGER, LOAD_A, WAIT, STORE_B, TAIL)): KernelAccess(names("a"), names("b"), True),
        "".join((HEAD, STORE_B, WAIT, TAIL)): KernelAccess(names(), names("b"), False, names("b")),
    }
    for _ in range(2):
        assert {ttir: kept_access(ttir) for ttir in kernels} == kernels
    assert scanned == [*kernels]
    assert len([*folder.rglob(launch_order.FILE)]) == 4


def test_access_found_by_another_scan_is_not_used(
    folder: Path, scanned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch_order.SCAN == hashlib.sha256(Path(launch_order.__file__).read_bytes()).hexdigest()
    for scan in ("one", "another"):
        monkeypatch.setattr(launch_order, "SCAN", scan)
        assert kept_access(EARLY_TTIR) == EARLY
    assert len(scanned) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        b'{"reads_early":["\xff"],"writes":[],"triggers_early":false}',
        b'{"x":' + b"[" * 200_000,
    ],
    ids=["empty", "without fields", "number", "no text", "no text inside", "deep"],
)
def test_file_with_something_else_is_replaced(folder: Path, scanned: list[str], content: bytes) -> None:
    kept_access(EARLY_TTIR)
    (file,) = folder.rglob(launch_order.FILE)
    file.write_bytes(content)
    for _ in range(2):
        assert kept_access(EARLY_TTIR) == EARLY
    assert len(scanned) == 2


def test_access_is_found_without_a_folder_to_keep_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "file"))
    assert kept_access(EARLY_TTIR) == EARLY


@pytest.mark.parametrize("call", ["get_file", "put"])
def test_access_is_found_in_a_folder_without_permission(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(FileCacheManager, call, refuse)
    assert kept_access(EARLY_TTIR) == EARLY


def test_nothing_is_kept_of_a_kernel_that_breaks_the_order(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(LaunchOrderError):
            kept_access("".join((HEAD, LOAD_A, STORE_B, TAIL)))
    assert not [*folder.rglob(launch_order.FILE)]


def test_kernel_of_which_only_the_binary_is_kept_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options that it had: files of metadata have lists in place of tuples."""
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    knobs, calls = triton.knobs.compilation, []

    def compile_whole(source: object, *, target: object, options: object) -> SimpleNamespace:
        calls.append((source, target, options, knobs.store_binary_only, knobs.always_compile))
        return SimpleNamespace(asm={"ttir": EARLY_TTIR})

    monkeypatch.setattr(triton, "compile", compile_whole)
    metadata = namedtuple("KernelMetadata", ["num_warps", "dtypes", "target"])(4, ["e4m3", "e5m2"], "sm_90")
    found = ttir_of(SimpleNamespace(asm={"cubin": b""}, src="source", metadata=metadata))
    assert found == EARLY_TTIR and knobs.store_binary_only and not knobs.always_compile
    options = {"num_warps": 4, "dtypes": ("e4m3", "e5m2"), "target": "sm_90"}
    assert calls == [("source", "sm_90", options, False, True)]
    assert ttir_of(SimpleNamespace(asm={"ttir": TAIL})) == TAIL and len(calls) == 1
