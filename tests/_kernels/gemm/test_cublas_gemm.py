from __future__ import annotations

import logging

import pytest
import torch

from drift_sdk._kernels.gemm import gemm
from drift_sdk._kernels.gemm.gemm import (
    GemmConfig,
    fastest_gated_multiply,
    fastest_multiply,
    gated_multiply,
    library_gated_multiply,
    library_product,
    multiply,
)
from drift_sdk._kernels.gemm.tuning import table_for

pytestmark = pytest.mark.kernel

SLICED = GemmConfig(True, 64, 16, 64, 3, 4, is_library=True, num_slices=2)


def inputs(
    shape: tuple[int, int, int], device: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_columns, inner = shape
    generator = torch.Generator(device).manual_seed(num_columns)
    x = torch.randn(num_rows, inner, generator=generator, device=device, dtype=dtype)
    weight = torch.randn(num_columns, inner, generator=generator, device=device, dtype=dtype)
    return x, weight.mul_(inner**-0.5)


def poisoned(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def test_float32_products_never_use_the_library(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gemm, "library_multiply")
    x, weight = inputs((3, 20, 140), device)
    found, expected = (poisoned(2, 3, 20, device=device) for _ in range(2))
    fastest_multiply(x, weight, found, SLICED)
    multiply(x, weight, expected, SLICED)
    assert torch.equal(found, expected)
    found, expected = (poisoned(3, 10, device=device) for _ in range(2))
    fastest_gated_multiply(x, weight, found, GemmConfig(is_library=True), poisoned(3, 20, device=device))
    gated_multiply(x, weight, expected, GemmConfig())
    assert torch.equal(found, expected)


def test_the_library_requires_spread_slices() -> None:
    with pytest.raises(ValueError, match="expected slices that are spread"):
        GemmConfig(False, is_library=True, num_slices=2)


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch for GPUs asks the driver for the library's workspace",
)
def test_library_state_changes_with_settings_and_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine of the process may run with another backend, other settings or another workspace."""
    states = {gemm.library_state()}
    for variable in gemm.WORKSPACE_VARIABLES:
        monkeypatch.setenv(variable, ":16:8")
        states.add(gemm.library_state())
    matmul = torch.backends.cuda.matmul
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        before = getattr(matmul, name)
        try:
            setattr(matmul, name, not before)
            states.add(gemm.library_state())
        finally:
            setattr(matmul, name, before)
    assert len(states) == 6


def test_bits_are_compared_at_several_magnitudes() -> None:
    rows = gemm._random_rows(torch.empty(8, 4096, dtype=torch.bfloat16))
    assert rows.dtype == torch.bfloat16 and rows.isfinite().all()
    spread = rows.float().abs().log2().clamp(min=-20).std(dim=1)
    assert (spread[1::2] > 2 * spread[::2]).all()


@pytest.mark.gpu
def test_a_changed_library_is_compared_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_ways", {})
    x, weight = inputs((256, 640, 576), device, torch.bfloat16)
    out = poisoned(2, 256, 640, device=device)
    for num_comparisons, size in ((1, None), (1, None), (2, ":4096:2")):
        if size is not None:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", size)
        fastest_multiply(x, weight, out, SLICED)
        assert len(gemm._ways) == num_comparisons


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 100, 256, 384, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_equal_those_of_the_kernel(num_rows: int, dtype: torch.dtype, device: str) -> None:
    """Whether the library has the same bits or not."""
    for num_columns, inner, config in ((6144, 4096, SLICED), (640, 576, SLICED), (1000, 2048, GemmConfig())):
        config = GemmConfig(True, 128, 64, 64, 3, 4, is_library=True, num_slices=config.num_slices)
        x, weight = inputs((num_rows, num_columns, inner), device, dtype)
        found, expected = (
            poisoned(config.num_slices, num_rows, num_columns, device=device) for _ in range(2)
        )
        fastest_multiply(x, weight, found, config)
        multiply(x, weight, expected, config)
        assert torch.equal(found, expected)

        gated = GemmConfig(True, 64, 64, 64, 3, 4, is_library=True, num_slices=1)
        shape = num_rows, num_columns // 2
        found, expected = (poisoned(*shape, device=device, dtype=dtype) for _ in range(2))
        gate_up = poisoned(num_rows, num_columns, device=device, dtype=dtype)
        fastest_gated_multiply(x, weight, found, gated, gate_up)
        gated_multiply(x, weight, expected, gated)
        assert torch.equal(found, expected)


@pytest.mark.gpu
def test_tuned_shapes_use_the_library_where_the_table_names_it(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library has the kernel's bits for all shapes of the table, on the GPU they were measured on."""
    caplog.set_level(logging.WARNING, "drift_sdk")
    monkeypatch.setattr(gemm, "_ways", {})
    table = table_for("nvidia-h200")
    for num_columns, inner in ((6144, 4096), (4096, 4096), (4096, 14_336), (128_256, 4096)):
        config = table.gemm(num_columns, inner).config(384)
        assert config.is_library
        x, weight = inputs((384, num_columns, inner), device, torch.bfloat16)
        fastest_multiply(x, weight, poisoned(config.num_slices, 384, num_columns, device=device), config)
    config = table.gemm(28_672, 4096, is_gated=True).config(384)
    x, weight = inputs((384, 28_672, 4096), device, torch.bfloat16)
    out = poisoned(384, 14_336, device=device, dtype=torch.bfloat16)
    fastest_gated_multiply(x, weight, out, config, torch.empty(384, 28_672, device=device).to(torch.bfloat16))
    assert all(gemm._ways.values())
    assert len(gemm._ways) == 5
    assert not caplog.records


@pytest.mark.gpu
def test_a_library_with_other_bits_is_not_used(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gemm, "_ways", {})

    def one_bit_off(
        x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: GemmConfig, way: str
    ) -> None:
        multiply(x, weight, out, config)
        out.view(torch.int32)[..., 0] ^= 1

    monkeypatch.setattr(gemm, "library_multiply", one_bit_off)
    x, weight = inputs((256, 640, 576), device, torch.bfloat16)
    found, expected = (poisoned(2, 256, 640, device=device) for _ in range(2))
    for _ in range(2):
        fastest_multiply(x, weight, found, SLICED)
    multiply(x, weight, expected, SLICED)
    assert torch.equal(found, expected)
    assert [record.getMessage() for record in caplog.records] == [
        "256 rows by 640x576: the library's bits differ: using the kernel, which is slower"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [200, 512, 768])
def test_a_batch_of_slices_is_right(num_rows: int, device: str) -> None:
    """Each partial sum is that of its slice, up to the order of summation."""
    for num_columns, inner in ((6144, 4096), (640, 512)):
        x, weight = inputs((num_rows, num_columns, inner), device, torch.bfloat16)
        found, expected = (poisoned(2, num_rows, num_columns, device=device) for _ in range(2))
        gemm.library_multiply(x, weight, found, SLICED, "batch")
        gemm.library_multiply(x, weight, expected, SLICED, "slices")
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4)


@pytest.mark.gpu
def test_slices_follow_each_other_where_their_batch_has_other_bits(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "_ways", {})
    library_multiply = gemm.library_multiply

    def other_bits(
        x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: GemmConfig, way: str
    ) -> None:
        if way == "slices":
            library_multiply(x, weight, out, config, "slices")
        else:
            out.zero_()

    monkeypatch.setattr(gemm, "library_multiply", other_bits)
    config = table_for("nvidia-h200").gemm(6144, 4096).config(384)
    x, weight = inputs((384, 6144, 4096), device, torch.bfloat16)
    found, expected = (poisoned(2, 384, 6144, device=device) for _ in range(2))
    assert fastest_multiply(x, weight, found, config)
    multiply(x, weight, expected, config)
    assert torch.equal(found, expected)
    assert [*gemm._ways.values()] == ["slices"]


@pytest.mark.parametrize(
    ("num_rows", "inner", "num_slices", "ways"),
    [
        (512, 4096, 2, ("batch", "slices")),
        (4096, 4096, 2, ("slices",)),
        (512, 4096, 1, ("slices",)),
        (512, 576, 2, ("slices",)),
    ],
)
def test_equal_slices_of_some_rows_are_a_batch(
    num_rows: int, inner: int, num_slices: int, ways: tuple[str, ...]
) -> None:
    config = GemmConfig(True, 64, 16, 64, 3, 4, is_library=True, num_slices=num_slices)
    assert gemm._possible_ways(num_rows, inner, config) == ways


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_the_library_are_seen_by_the_check_of_launch_order(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias, out = torch.randn(3, 4), torch.randn(6, 4), torch.randn(6), torch.empty(3, 6)
    noted: list[torch.Tensor] = []
    monkeypatch.setattr(gemm, "note_library_kernel", noted.append)
    library_product(x, weight.T, bias if has_bias else None, out)
    assert torch.equal(out, torch.addmm(bias, x, weight.T) if has_bias else x @ weight.T)
    assert len(noted) == 1 and noted[0] is out


def test_the_gated_product_of_the_library_is_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[torch.Tensor] = []
    monkeypatch.setattr(gemm, "note_library_kernel", noted.append)
    monkeypatch.setattr(gemm, "glu", lambda gate_up, out, activation: None)
    gate_up = torch.empty(3, 6)
    library_gated_multiply(torch.randn(3, 4), torch.randn(6, 4), torch.empty(3, 3), gate_up)
    assert len(noted) == 1 and noted[0] is gate_up
