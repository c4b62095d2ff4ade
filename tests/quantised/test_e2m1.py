"""Rounding to 4-bit floating-point numbers."""

from __future__ import annotations

import math

import torch
from quantised_files import e2m1_table

from drift_sdk.quantised.formats import quantise_e2m1


def test_numbers_become_the_nearest_and_of_two_the_even_code() -> None:
    sizes = e2m1_table()[:8].tolist()
    for code, size in enumerate(sizes):
        assert quantise_e2m1(torch.tensor([size, -size])).tolist() == [code, code + 8]
    for code in range(7):
        middle = (sizes[code] + sizes[code + 1]) / 2
        around = [math.nextafter(middle, 0), middle, math.nextafter(middle, 9)]
        expected = [code, code + code % 2, code + 1]
        found = quantise_e2m1(torch.tensor([*around, *(-x for x in around)], dtype=torch.float64))
        assert found.tolist() == [*expected, *(8 + each for each in expected)]
    assert quantise_e2m1(torch.tensor([7.0, -1e9, math.inf])).tolist() == [7, 15, 7]
