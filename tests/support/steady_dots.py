"""Dots of Triton's interpreter whose bits depend on their row and column alone, on every CPU.

The interpreter multiplies by the CPU's library, which on some CPUs sums a row in another order if it is at
another place of a matrix, or if there are more rows. Tensor cores do not; tests compare bits of rows that are
computed alone and among others. They take a few times as long as the library's, so only tests whose rows
change their places use them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

__all__ = ["chained_dot", "dot", "install"]

MMA_SIZE = 16
"""Numbers whose products tensor cores add at once."""


def dot(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """The product of a [..., M, K] and b [..., K, N], each number summed by the same loop."""
    columns = np.ascontiguousarray(np.swapaxes(b, -1, -2), dtype=dtype)
    return np.einsum("...mk,...nk->...mn", np.ascontiguousarray(a, dtype=dtype), columns)


def chained_dot(a: np.ndarray, b: np.ndarray, first: np.ndarray) -> np.ndarray:
    """first + the product of a [M, K] and b [K, N]: the products of MMA_SIZE numbers are added at a time. The
    sum is the same if another dot continues it."""
    found = first
    for start in range(0, a.shape[1], MMA_SIZE):
        part = slice(start, start + MMA_SIZE)
        found = found + dot(a[:, part], b[part], first.dtype)
    return found


def install(monkeypatch: pytest.MonkeyPatch, *, is_chained: bool = False) -> None:
    """Change the interpreter of this process. is_chained: sums are those of `chained_dot`."""
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def create_steady_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if not np.issubdtype(d.data.dtype, np.floating) or a.data.dtype.itemsize == 1:
            return create_dot(self, a, b, d, *options)

        chains = is_chained and a.data.ndim == 2
        found = chained_dot(a.data, b.data, d.data) if chains else dot(a.data, b.data, d.data.dtype) + d.data
        return interpreter.TensorHandle(found, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_steady_dot)
