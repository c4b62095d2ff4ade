"""The dots that tests of the interpreter use have the same bits at every place of a matrix."""

from __future__ import annotations

import numpy as np
import pytest
from steady_dots import dot


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("shape", [(1, 16, 1), (5, 64, 7), (16, 128, 33)], ids=str)
def test_bits_depend_on_row_and_column_alone(shape: tuple[int, int, int], dtype: type) -> None:
    numbers, (num_rows, inner, num_columns) = np.random.default_rng(1), shape
    a = numbers.standard_normal((num_rows, inner)).astype(dtype)
    b = numbers.standard_normal((inner, num_columns)).astype(dtype)
    found = dot(a, b, np.float32)
    np.testing.assert_allclose(found, a.astype(np.float64) @ b.astype(np.float64), atol=1e-5 * inner)
    rows, columns = numbers.permutation(num_rows), numbers.permutation(num_columns)
    assert np.array_equal(dot(a[rows], b[:, columns], np.float32), found[rows][:, columns])
    for row in range(num_rows):
        assert np.array_equal(dot(a[row : row + 1], b, np.float32), found[row : row + 1])
