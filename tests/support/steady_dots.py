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

__all__ = ["dot", "install"]


def dot(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """The product of a [..., M, K] and b [..., K, N], each number summed by the same loop."""
    columns = np.ascontiguousarray(np.swapaxes(b, -1, -2), dtype=dtype)
    return np.einsum("...mk,...nk->...mn", np.ascontiguousarray(a, dtype=dtype), columns)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the interpreter of this process."""
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def create_steady_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if not np.issubdtype(d.data.dtype, np.floating) or a.data.dtype.itemsize == 1:
            return create_dot(self, a, b, d, *options)

        return interpreter.TensorHandle(dot(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_steady_dot)
