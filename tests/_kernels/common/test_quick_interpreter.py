"""The changes to Triton's interpreter keep types, shapes and values."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        torch.cuda.is_available() or not hasattr(TritonSemantic.computation_type_impl, "__wrapped__"),
        reason="the interpreter is not changed",
    ),
]

SIZE = 8


@triton.jit
def _products(x, y, out, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    product = tl.load(x + row)[:, None] * tl.load(y + row)[None, :]
    tl.store(out + row[:, None] * SIZE + row[None, :], product + 1)


@pytest.mark.parametrize(
    "types",
    [*itertools.product((torch.int8, torch.int64, torch.float16, torch.float32), repeat=2)],
    ids=lambda types: f"{types[0]} {types[1]}",
)
def test_values_are_promoted_and_broadcast(types: tuple[torch.dtype, torch.dtype]) -> None:
    x, y = (torch.arange(SIZE).to(dtype) - 3 for dtype in types)
    expected = x[:, None] * y + 1
    out = torch.full_like(expected, 99)
    _products[(1,)](x, y, out, SIZE=SIZE)
    assert torch.equal(out, expected)


def test_results_of_integers_wrap_around() -> None:
    x = torch.full((SIZE,), 2**16, dtype=torch.int32)
    out = torch.zeros((SIZE, SIZE), dtype=torch.int32)
    _products[(1,)](x, x * 2**14, out, SIZE=SIZE)
    assert out.unique().tolist() == [2**46 % 2**32 + 1]


def test_promoted_types_are_those_of_triton() -> None:
    promoted = TritonSemantic.computation_type_impl
    semantic = interpreter.interpreter_semantic
    types = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32)
    num_rejected = 0
    for a, b, *flags in itertools.product(types, types, *[(False, True)] * 3):
        is_scalar_a, is_scalar_b, is_division = flags
        given = (semantic, a, is_scalar_a, b, is_scalar_b, is_division)
        try:
            expected = promoted.__wrapped__(*given)
        except TypeError:
            num_rejected += 1
            with pytest.raises(TypeError, match="different signedness"):
                promoted(*given)
        else:
            assert promoted(*given) == expected
    assert num_rejected > 0


def test_types_of_blocks_compare_by_element_and_shape() -> None:
    block = tl.block_type(tl.int32, [4, tl.constexpr(8)])
    assert (block.shape, block.numel, str(block)) == ((4, 8), 32, "<(4, 8), int32>")
    assert block == tl.block_type(tl.int32, (4, 8))
    assert block != tl.block_type(tl.int32, (8, 4))
    assert block != tl.block_type(tl.uint32, (4, 8))
    assert tl.int32 != tl.uint32 and tl.int32 == tl.constexpr(tl.int32)
    for shape, error in (((), TypeError), ((3,), ValueError)):
        with pytest.raises(error):
            tl.block_type(tl.int32, shape)


SCRIPT = """
import sys

sys.path[:0] = [SUPPORT]
import quick_interpreter
import torch
import triton
import triton.language as tl


@triton.jit
def operations(x_ptr, y_ptr, n_ptr, out_ptr, counts_ptr, scalar, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    x, y, n = tl.load(x_ptr + place), tl.load(y_ptr + place), tl.load(n_ptr + place)
    results = (x + y, x / y, x * -0.0, x * 0.0, x - 2, 2 - x, x + 0.1, x * scalar, tl.where(x > y, x, 1.5))
    for index in tl.static_range(9):
        tl.store(out_ptr + index * SIZE + place, results[index].to(tl.float32))
    counts = (n + n, n // 3, n % 3, n - 1, n * 65536, n + 1073741824, (n > 4).to(tl.int32), -n, n & 6)
    for index in tl.static_range(9):
        tl.store(counts_ptr + index * SIZE + place, counts[index].to(tl.int64))


def results():
    torch.manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x, y = torch.randn(2, 16).to(dtype)
        n = torch.randint(-9, 9, (16,), dtype=torch.int32)
        out, counts = torch.zeros(9, 16), torch.zeros(9, 16, dtype=torch.int64)
        operations[(1,)](x, y, n, out, counts, 0.3, SIZE=16)
        yield out.view(torch.int32).tolist(), counts.tolist()


plain = [*results()]
quick_interpreter.install()
assert [*results()] == plain
print("equal")
"""


def test_results_are_those_of_the_interpreter(tmp_path: Path) -> None:
    """In a process of its own, where it is not installed yet."""
    script = tmp_path / "kernels.py"
    support = Path(__file__).parents[2] / "support"
    script.write_text(SCRIPT.replace("SUPPORT", repr(str(support))))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr
