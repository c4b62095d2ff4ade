"""The changes to Triton's interpreter keep types, shapes and values."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import quick_interpreter
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        torch.cuda.is_available() or interpreter._patch_attr.__module__ != quick_interpreter.__name__,
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


SCRIPT = """
import sys

sys.path[:0] = [SUPPORT]
import quick_interpreter
import torch
import triton
import triton.language as tl

SIZE, NUM_PROGRAMS = 16, 3


@triton.jit
def halved(x, BY: tl.constexpr):
    return x / BY


@triton.jit
def operations(x_ptr, y_ptr, n_ptr, out_ptr, counts_ptr, scalar, SIZE: tl.constexpr):
    program = tl.program_id(0)
    place = tl.arange(0, SIZE)
    x, y, n = tl.load(x_ptr + place), tl.load(y_ptr + place), tl.load(n_ptr + place)
    table = x[:, None].to(tl.float32) * y[None, :].to(tl.float32) + tl.zeros((1, SIZE), tl.float32)
    results = (
        x + x, x + y, y + x, y - x, x / y, x * -0.0, x * 0.0, x * 0, x * False, x * True, x - 2, 2 - x,
        x + 0.1, x * scalar, x + program, x * float("nan"), -x, tl.abs(x), tl.maximum(x, y),
        tl.where(x > y, x, 1.5), tl.where(x > x, x, 1.5), halved(x, 2), halved(x, 4),
        tl.load(x_ptr + place, mask=n > 2, other=-0.0), tl.load(x_ptr + place, mask=n > 2, other=0.0),
        x.to(tl.bfloat16), (x * 1e-38).to(tl.bfloat16), (x * 1e38).to(tl.bfloat16), x.to(tl.float16),
        tl.sum(table, axis=0), tl.max(table, axis=1), tl.cumsum(x.to(tl.float32), axis=0),
        tl.exp(x.to(tl.float32)), tl.sum(tl.trans(table) * table, axis=1),
        tl.sum(tl.dot(table, table), axis=1),
        tl.sum(tl.reshape(table, (2 * SIZE, SIZE // 2)), axis=1).reshape((SIZE, 2)).sum(axis=1),
    )
    NUM: tl.constexpr = len(results)
    for index in tl.static_range(NUM):
        tl.store(out_ptr + (program * NUM + index) * SIZE + place, results[index].to(tl.float32))
    counts = (
        n + n, n // 3, n % 3, n - 1, n * 65536, n + 1073741824, -n, ~n, n & 6, n | 1, n ^ n, n << 2, n >> 1,
        n * n, n == n, n != program, (n > 0) & (n < 3), (n > 4).to(tl.int32), n.to(tl.int8), n.to(tl.uint8),
        n.to(tl.uint32) >> 1, tl.atomic_add(counts_ptr + SIZE * 999 + place, n), tl.argmax(table, axis=1),
    )
    NUM_COUNTS: tl.constexpr = len(counts)
    for index in tl.static_range(NUM_COUNTS):
        mask = place != program
        count_ptrs = counts_ptr + (program * NUM_COUNTS + index) * SIZE + place
        tl.store(count_ptrs, counts[index].to(tl.int64), mask=mask)


def results():
    torch.manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x, y = torch.randn(2, SIZE).to(dtype)
        x[3], y[4], x[5], x[6] = torch.inf, torch.nan, -0.0, 1e-40
        n = torch.randint(-9, 9, (SIZE,), dtype=torch.int32)
        out, counts = torch.zeros(200, SIZE), torch.zeros(1000, SIZE, dtype=torch.int64)
        operations[(NUM_PROGRAMS,)](x, y, n, out, counts, 0.3, SIZE=SIZE)
        yield out.view(torch.int32).tolist(), counts.tolist()


plain = [*results()]
quick_interpreter.install()
for _ in range(2):  # plans are made, and followed
    for found, expected in zip(results(), plain, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            differing = [place for place, (a, b) in enumerate(zip(ours, theirs)) if a != b]
            assert not differing, differing
print("equal")
"""


def test_results_are_those_of_the_interpreter(tmp_path: Path) -> None:
    """In a process of its own, where it is not installed yet."""
    script = tmp_path / "kernels.py"
    support = Path(__file__).parents[2] / "support"
    script.write_text(SCRIPT.replace("SUPPORT", repr(str(support))))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr
