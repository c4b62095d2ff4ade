"""Products of MXFP4 experts for many rows: near the references, with the bits of the kernel for a few. Here
threads are emulated; test_cuda_products.py compares the kernels on a GPU."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import torch
from emulated_cuda import has_host_compiler, launch_emulated
from expert_matrices import CLAMPED, assert_rows_near, drawn, poisoned, quantised_matrix, routed
from references.experts import expert_multiply_reference, gated_expert_multiply_reference
from slow_cases import slow_rows_after

from drift_sdk._kernels.experts.expert_gemm import ExpertMatrix
from drift_sdk._kernels.experts.routing import ExpertRows

BF16 = torch.bfloat16
# Rows, experts, experts of a row, columns of the output, inner dimension: several tiles of pairs of an
# expert, several of the weight, whole and other chunks, more than one of a part.
SHAPES = (
    (110, 3, 2, 40, 160),
    (90, 2, 1, 150, 1184),
    (70, 5, 3, 128, 256),
)
NUM_CTAS = 2
ASSEMBLY = """
#undef __shared__
#define __shared__ static
static struct { int x, y; } gridDim = {NUM_CTAS, 1};
inline uint4 load_weights(const unsigned char* from) { return *reinterpret_cast<const uint4*>(from); }
template <int SHIFT> std::uint32_t numbers(std::uint32_t word, std::uint32_t factor) {
  const std::uint32_t moved = (word & (0x000F000Fu << SHIFT)) * ((1u << (12 - SHIFT)) + (1u << 6 >> SHIFT));
  std::uint32_t found = 0;
  for (int half = 0; half < 32; half += 16) {
    const float number = __uint_as_float((moved & 0x81C081C0u) >> half << 16);
    const float scale = __uint_as_float(factor >> half << 16);
    found |= static_cast<std::uint32_t>(to_bfloat16(number * scale)) << half;
  }
  return found;
}
"""
LAUNCH = """
extern "C" __global__ void {name}(const u16* x, const u8* values, const u8* scales, const u16* bias,
                                  const int* counts, const int* pairs, const float* shares, void* out,
                                  int num_rows) {
  {product}(
      {x, values, scales, bias, counts, pairs, shares, out, 1.702f, 7.f, num_rows});
}
"""
FILES = (
    "launch/types.cu",
    "experts/common.cu",
    "experts/expert_rows.cu",
    "experts/mxfp4.cu",
    "experts/expert_arguments.cu",
)


def emulated(
    folder: Path, x: torch.Tensor, matrix: ExpertMatrix, rows: ExpertRows, out: torch.Tensor, *, is_wide: bool
) -> None:
    """Fill `out` by emulated threads, with the kernel for many rows or that for a few."""
    root = resources.files("drift_sdk._kernels")
    file, name = (
        ("wide_products.cu", "multiply_many") if is_wide else ("expert_products.cu", "multiply_experts")
    )
    source = root.joinpath("experts", file).read_text("utf-8").partition('extern "C"')[0]
    numbers = out.shape[-1], matrix.inner, rows.num_experts, rows.num_active, *(() if is_wide else (4, 2, 1))
    template = ", ".join(map(str, (str(out.dim() == 2).lower(), *numbers)))
    launch = LAUNCH.replace("{name}", f"run_{name}").replace("{product}", f"{name}<{template}>")
    for file_name, text in (("assembly.cu", ASSEMBLY), ("product.cu", source), ("launch.cu", launch)):
        (folder / file_name).write_text(text)
    assert matrix.scales is not None and matrix.bias is not None
    own = [str(folder / each) for each in ("assembly.cu", "product.cu", "launch.cu")]
    tensors = (x, matrix.values, matrix.scales, matrix.bias, rows.counts, rows.pairs, rows.shares, out)
    files = (FILES[0], own[0], *FILES[1:], *own[1:])
    launch_emulated(
        folder, files, f"run_{name}", {"NUM_CTAS": NUM_CTAS}, (NUM_CTAS, 1), 256, (*tensors, rows.num_rows)
    )


@pytest.mark.skipif(not has_host_compiler(), reason="needs a compiler for the host")
@pytest.mark.parametrize(
    ("shape", "is_gated"),
    slow_rows_after(
        2, [(shape, (index + turn) % 2 == 1) for turn in (0, 1) for index, shape in enumerate(SHAPES)]
    ),
)
def test_emulated_products_have_the_bits_of_those_of_few_rows(
    shape: tuple[int, ...], is_gated: bool, tmp_path: Path
) -> None:
    num_rows, num_experts, num_active, num_columns, inner = shape
    rows = routed(num_rows, num_experts, num_active, "cpu")
    assert max(rows.counts.tolist()) > 32
    x = drawn(num_rows if is_gated else num_rows * num_active, inner, dtype=BF16, device="cpu")
    num_weight_rows = 2 * num_columns if is_gated else num_columns
    matrix, values = quantised_matrix(num_experts, num_weight_rows, inner, BF16, "cpu")
    found = []
    for is_wide in (True, False):
        if is_gated:
            out = poisoned(num_rows * num_active, num_columns, dtype=BF16, device="cpu")
        else:
            out = poisoned(num_active, num_rows, num_columns, dtype=torch.float32, device="cpu")
        folder = tmp_path / str(is_wide)
        folder.mkdir()
        emulated(folder, x, matrix, rows, out, is_wide=is_wide)
        found.append(out.nan_to_num(nan=1e30))
    if is_gated:
        assert_rows_near(
            out, gated_expert_multiply_reference(x, values, matrix.bias, rows.experts, CLAMPED), inner
        )
    else:
        expected = expert_multiply_reference(x, values, matrix.bias, rows.experts, rows.shares)
        assert_rows_near(out.to(BF16), expected.to(BF16), inner)
    assert torch.equal(*found)
