"""The order of launches of CUDA C++ kernels: what they declare is what their PTX does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_matrices import CLAMPED, drawn, poisoned, quantised_matrix, routed
from prompt_chunks import Prompt
from ptx_access import access_of_ptx, has_nvrtc, ptx_of
from quantised_cases import FORMATS, QuantisedFormat, draw

from drift_sdk import _kernels
from drift_sdk._kernels.attention.prefill import cuda_prefill_attention
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.experts import packed_products
from drift_sdk._kernels.experts.cuda_experts import (
    AnyTiles,
    CudaTiles,
    RingTiles,
    WideTiles,
    cuda_expert_multiply,
    cuda_gated_expert_multiply,
    cuda_route,
)
from drift_sdk._kernels.gemm.gemm import GemmConfig, few_rows_multiply
from drift_sdk._kernels.launch import cuda_programs, launch_order
from drift_sdk._kernels.launch.cuda_programs import CudaKernel
from drift_sdk._kernels.launch.gpu_limits import HOPPER
from drift_sdk._kernels.launch.launch_order import KernelAccess, LaunchOrderError
from drift_sdk._kernels.quantised import packing, quantised_gemm
from drift_sdk._kernels.recurrent.gated_delta import (
    MAX_ROWS,
    LayerStates,
    MixedRows,
    PromptRuns,
    advance_prompts,
    advance_rows,
    state_shape,
)
from drift_sdk.spec.model import BORDER, GatedDelta, Norm, Router, RouterKind, num_ring_rows

pytestmark = pytest.mark.kernel
BF16 = torch.bfloat16

HEAD = """
.visible .entry kernel(
  .param .u64 a, .param .u64 .ptr .align 1 b, .param .u32 n, .param .align 64 .b8 map[128]
)
.maxntid 320, 1, 1
{
  .reg .b64 %rd<9>;
  .loc 1 20 3
  ld.param.u64 %rd1, [a];  // of a warp that copies
  ld.param.u64 %rd2, [b];
  ld.param.u32 %r9, [n];
  cvta.to.global.u64 %rd3, %rd1;
  mul.wide.s32 %rd4, %r1, 4;
  add.s64 %rd5, %rd3, %rd4;
"""
LOAD_A = "ld.global.v2.u32 {%r2, %r3}, [%rd5+8];\n"
COPY_A = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd5], %r5, [%r6];\n"
STORE_B = "@%p1 st.global.u32 [%rd2], %r2;\n"
WAIT, TRIGGER, END = "griddepcontrol.wait;\n", "griddepcontrol.launch_dependents;\n", "ret;\n"
POLL = "{.reg .pred done; AGAIN: mbarrier.try_wait.b64 done, [%r4], %r5; @done bra END; bra AGAIN; END:}\n"
ROLES = "@%p1 bra $COPY;\n"
"""A branch by the warp's role; the other role begins at the label $COPY."""


def access(*parts: str) -> KernelAccess:
    return access_of_ptx("".join((HEAD, *parts, "}\n")))


def names(*values: str) -> frozenset[str]:
    return frozenset(values)


@pytest.mark.parametrize("read", [LOAD_A, COPY_A])
def test_reads_before_the_wait_are_early(read: str) -> None:
    assert access(read, WAIT, TRIGGER, STORE_B, END) == KernelAccess(names("a"), names("b"), False)
    assert access(POLL, WAIT, POLL, TRIGGER, read, STORE_B, END) == KernelAccess(names(), names("b"), False)


def test_trigger_of_one_thread_that_has_not_waited_is_early() -> None:
    copier = ROLES + WAIT + STORE_B + TRIGGER + END + "$COPY:\n" + COPY_A
    assert access(copier, WAIT, TRIGGER, END) == KernelAccess(names("a"), names("b"), False)
    assert access(copier, TRIGGER, WAIT, END) == KernelAccess(names("a"), names("b"), True)


def test_wait_of_some_threads_is_none_behind_it() -> None:
    for some in ("@%p1 " + WAIT, "@%p2 bra $SKIP;\n" + WAIT + "$SKIP:\n"):
        assert access(some, TRIGGER, WAIT, END).triggers_early
        assert access(some, LOAD_A, WAIT, END).reads_early == names("a")


def test_writes_before_the_wait_are_early() -> None:
    assert access(STORE_B, WAIT, END) == KernelAccess(names(), names("b"), False, names("b"))
    assert access("@%p2 bra $SKIP;\n" + WAIT + "$SKIP:\n", STORE_B, WAIT, END).writes_early == names("b")


def test_threads_that_end_without_waiting_are_rejected() -> None:
    with pytest.raises(LaunchOrderError, match="kernel: may end without having waited"):
        access(ROLES, WAIT, END, "$COPY:\n", COPY_A, END)
    with pytest.raises(LaunchOrderError, match="kernel: may end without having waited"):
        access("@%p1 exit;\n", WAIT, END)
    with pytest.raises(LaunchOrderError, match="expected a kernel without calls"):
        access("call.uni other, ();\n", WAIT, END)


def test_addresses_are_traced_through_loops_and_counted_when_they_cannot_be() -> None:
    loop = (
        "$LOOP:\nld.global.u32 %r2, [%rd6];\nmov.b64 %rd6, %rd7;\nadd.s64 %rd7, %rd5, 8;\n@%p2 bra $LOOP;\n"
    )
    assert access(loop, WAIT, END).reads_early == names("a")
    loaded = "ld.global.u64 %rd8, [%rd5];\nld.global.u32 %r2, [%rd8];\n"
    assert access(loaded, WAIT, END).reads_early == names("a", "b", "map")
    boxes = "mov.b64 %rd7, map;\ncvta.param.u64 %rd8, %rd7;\n"
    copy = "cp.async.bulk.tensor.2d.shared::cluster.global.tile [%r4], [%rd8, {%r7, %r8}], [%r6];\n"
    assert access(boxes, copy, WAIT, END).reads_early == names("map")


Launch = tuple[CudaKernel, tuple[Any, ...], KernelAccess, Mapping[str, object], bool]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Launches of CUDA C++ kernels with what they declare. None is made."""
    made: list[tuple[CudaKernel, tuple[Any, ...]]] = []
    found: list[Launch] = []

    class Recorder:
        def add(
            self, name: str, declared: KernelAccess, arguments: Mapping[str, object], *, has_all: bool
        ) -> None:
            kernel, values = made.pop()
            found.append((kernel, values, declared, arguments, has_all))
            assert not has_all or memory(values) <= memory(arguments.values()), kernel

    def launch(kernel: CudaKernel, grid: object, threads: int, shared: int, *values: Any, **_: Any) -> None:
        made.append((kernel, values))

    for module in (cuda_programs, quantised_gemm, packing, packed_products):
        monkeypatch.setattr(module, "compile_kernel", lambda kernel, *_: kernel)
        monkeypatch.setattr(module, "launch_kernel", launch)
    for module in (quantised_gemm, packing, packed_products):
        monkeypatch.setattr(module, "has_programs", lambda *_: True)
    for module in (cuda_programs, quantised_gemm, packed_products):
        monkeypatch.setattr(module, "Boxes", lambda matrix, *_: matrix)
    if not torch.cuda.is_available():
        properties = SimpleNamespace(multi_processor_count=HOPPER.num_multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(launch_order._current, "launches", Recorder(), raising=False)
    yield found
    assert found and not made


def memory(values: Iterable[object]) -> set[int]:
    """Addresses of the tensors among values."""
    return {value.data_ptr() for value in values if isinstance(value, torch.Tensor)}


def assert_declared(launches: list[Launch]) -> None:
    """What kernels read early, write, and write early is what they declare, tensor by tensor."""
    for kernel, values, declared, arguments, _ in launches:
        found = access_of_ptx(ptx_of(kernel), [str(i) for i in range(len(values))])
        assert found.triggers_early == declared.triggers_early, kernel
        for of_ptx, of_python in (
            (found.reads_early, declared.reads_early),
            (found.writes, declared.writes),
            (found.writes_early, declared.writes_early),
        ):
            own = memory(values[int(i)] for i in of_ptx)
            assert own == memory(arguments[name] for name in of_python), kernel


def test_every_program_is_compared() -> None:
    """The programs of the tests below. A new one needs a test here."""
    files = Path(_kernels.__file__).parent.rglob("*.cu")
    programs = {file.name for file in files if "__global__" in file.read_text("utf-8")}
    assert programs == {
        "multiply.cu",
        "dequantise.cu",
        "few_rows.cu",
        "gated_delta_prompts.cu",
        "gated_delta_rows.cu",
        "prefill_kernel.cu",
        "expert_products.cu",
        "wide_products.cu",
        "ring_products.cu",
        "packed_products.cu",
        "route_rows.cu",
    }


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC")


@needs_nvrtc
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_quantised_products_wait_as_they_declare(
    kind: QuantisedFormat, launches: list[Launch], device: str
) -> None:
    for num_columns, inner in ((64, 448), (16_896, 64)):  # two warpgroups share a panel; one has it
        weight, _ = draw(kind, num_columns, inner, device)
        for num_rows in (1, 64):
            x = drawn(num_rows, inner, dtype=BF16, device=device)
            out = torch.empty(weight.num_slices, num_rows, num_columns, device=device)
            quantised_gemm.quantised_multiply(x, weight, out)
    gated, _ = draw(kind, 64, 448, device, is_gated=True)
    gate_up, bias = drawn(2, 64, dtype=BF16, device=device), drawn(64, dtype=BF16, device=device)
    out = torch.empty(2, 32, dtype=BF16, device=device)
    quantised_gemm.quantised_gated_multiply(
        x[:2, :1].expand(2, 448).contiguous(), gated, out, gate_up, bias=bias
    )
    packing.dequantise(gated, torch.empty(64, 448, dtype=BF16, device=device))
    assert_declared(launches)


@needs_nvrtc
def test_products_of_few_rows_wait_as_they_declare(launches: list[Launch], device: str) -> None:
    x, weight = (drawn(rows, 2880, dtype=BF16, device=device) for rows in (4, 5120))
    few_rows_multiply(x, weight, torch.empty(2, 4, 5120, device=device), GemmConfig(num_slices=2))
    assert_declared(launches)


@needs_nvrtc
@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("partitions", [None, Partitions()], ids=["whole", "partitions"])
def test_attention_of_prompts_waits_as_it_declares(
    partitions: Partitions | None, head_dim: int, tile_rows: int, launches: list[Launch], device: str
) -> None:
    prompt = Prompt([(0, 0, 70)], (2, 1, head_dim), 64, device, BF16, has_sinks=True)
    cuda_prefill_attention(prompt.layer(), prompt.tiles(tile_rows), tile_rows, partitions)
    assert_declared(launches)
    kernel, *_, has_all = launches[0]
    assert has_all  # the next kernel may write early
    ptx = ptx_of(kernel)
    assert (
        ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents") < ptx.index("wgmma")
    )


@needs_nvrtc
@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("tiles", [CudaTiles(), RingTiles(), WideTiles()], ids=["registers", "ring", "wide"])
def test_products_of_experts_wait_as_they_declare(
    num_rows: int, tiles: AnyTiles, launches: list[Launch], device: str
) -> None:
    rows = routed(num_rows, 8, 2, device)
    matrix, _ = quantised_matrix(8, 64, 64, BF16, device)
    x = drawn(num_rows, 64, dtype=BF16, device=device)
    cuda_gated_expert_multiply(
        x, matrix, rows, poisoned(num_rows * 2, 32, dtype=BF16, device=device), CLAMPED, tiles
    )
    x = drawn(num_rows * 2, 64, dtype=BF16, device=device)
    out = poisoned(2, num_rows, 64, dtype=torch.float32, device=device)
    cuda_expert_multiply(x, matrix, rows, out, tiles)
    assert_declared(launches)


@needs_nvrtc
@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_products_of_quantised_experts_wait_as_they_declare(
    kind: QuantisedFormat, num_rows: int, launches: list[Launch], device: str
) -> None:
    rows = routed(num_rows, 4, 2, device)
    for is_gated in (True, False):
        parts = [draw(kind, 64, 192, device, is_gated=is_gated, is_whole=True)[0]] * 4
        experts = packed_products.stack_experts(parts)
        assert experts is not None
        x = drawn(num_rows * (1 if is_gated else 2), 192, dtype=BF16, device=device)
        if is_gated:
            gated = poisoned(num_rows * 2, 32, dtype=BF16, device=device)
            packed_products.packed_gated_expert_multiply(x, experts, rows, gated)
        else:
            out = poisoned(2, num_rows, 64, dtype=torch.float32, device=device)
            packed_products.packed_expert_multiply(x, experts, rows, out)
    assert_declared(launches)


@needs_nvrtc
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("num_rows", "num_joined"), [(1, 0), (16, 0), (16, 1)])
def test_routing_waits_as_it_declares(
    num_rows: int, num_joined: int, kind: RouterKind, launches: list[Launch], device: str
) -> None:
    rows = routed(num_rows, 32 + num_joined, 4 + num_joined, device)
    x, weight = (drawn(count, 64, dtype=BF16, device=device) for count in (num_rows, 32))
    slot = torch.zeros(num_rows, dtype=torch.int32, device=device)
    bias = drawn(32, dtype=BF16, device=device) if kind == "softmax" else None
    correction = drawn(32, dtype=torch.float32, device=device) if kind == "sigmoid" else None
    cuda_route(x, weight, bias, slot, rows, Router(kind=kind), correction, num_joined)
    assert_declared(launches)


def recurrent_rows(
    sizes: tuple[int, int, int, int], num_rows: int, device: str
) -> tuple[GatedDelta, MixedRows, LayerStates]:
    """A layer with rows of a step, and the states of three slots."""
    key_heads, value_heads, key_dim, value_dim = sizes
    spec = GatedDelta(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=4,
        norm=Norm(eps=1e-6),
    )
    mixed, out = (
        poisoned(num_rows, size, dtype=BF16, device=device) for size in (spec.num_channels, spec.output_size)
    )
    scales, gates = (
        poisoned(num_rows, 2 * heads, dtype=torch.float32, device=device)
        for heads in (key_heads, value_heads)
    )
    states = LayerStates.empty(spec, 3, num_ring_rows(MAX_ROWS), torch.device(device))
    return spec, MixedRows(mixed, scales, gates, out), states


RECURRENT_SIZES = [(2, 6, 128, 128), (1, 1, 32, 16), (2, 4, 96, 48)]


@needs_nvrtc
@pytest.mark.parametrize("sizes", RECURRENT_SIZES, ids=lambda sizes: f"{sizes[2]}-{sizes[3]}")
@pytest.mark.parametrize("rows_per_slot", [1, 5, MAX_ROWS])
def test_recurrent_layers_of_rows_wait_as_they_declare(
    rows_per_slot: int, sizes: tuple[int, int, int, int], launches: list[Launch], device: str
) -> None:
    """They read what earlier steps left, and advance the stored state, before they wait."""
    spec, rows, states = recurrent_rows(sizes, 2 * rows_per_slot, device)
    borders, slot, position = (
        torch.zeros(size, dtype=torch.int32, device=device)
        for size in (3, 2 * rows_per_slot, 2 * rows_per_slot)
    )
    advance_rows(spec, rows, states, borders, slot, position, rows_per_slot=rows_per_slot)
    assert_declared(launches)
    _, _, declared, arguments, _ = launches[0]
    early = memory(arguments[name] for name in declared.writes_early)
    assert early == {states.state.data_ptr()}


@needs_nvrtc
@pytest.mark.parametrize("sizes", RECURRENT_SIZES, ids=lambda sizes: f"{sizes[2]}-{sizes[3]}")
def test_recurrent_layers_of_prompts_wait_as_they_declare(
    sizes: tuple[int, int, int, int], launches: list[Launch], device: str
) -> None:
    spec, rows, states = recurrent_rows(sizes, 70, device)
    runs = torch.tensor([[0, 0, 0, 70]], dtype=torch.int32, device=device)
    places = torch.full((70 // BORDER + 2,), -1, dtype=torch.int32, device=device)
    checkpoints = torch.empty(2, *state_shape(spec), device=device)
    advance_prompts(spec, rows, states, PromptRuns(runs, places), checkpoints)
    assert_declared(launches)
    assert access_of_ptx(ptx_of(launches[0][0])).reads_early == frozenset()
