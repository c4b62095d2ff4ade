"""Tensors that the package makes without values hold NaN in the tests."""

from __future__ import annotations

import pytest
import torch
from poisoned_memory import DTYPES, MIN_BYTES, can_map, map_nan

from drift_sdk.models.kv_cache import KVCache
from drift_sdk.spec.model import KVShape


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str))
def test_all_numbers_are_nan_and_of_this_tensor_alone(dtype: torch.dtype) -> None:
    first, second = (map_nan((size, 3), dtype) for size in (MIN_BYTES, 2 * MIN_BYTES))
    assert first.dtype == dtype and first.shape == (MIN_BYTES, 3)
    first[-1] = 1.0
    assert second.to(torch.float32).isnan().all()
    assert first[:-1].to(torch.float32).isnan().all()
    assert (first[-1].to(torch.float32) == 1.0).all()


@pytest.mark.parametrize("num_slots", [16, 2**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_cache_of_any_size_begins_as_nan(num_slots: int, dtype: torch.dtype) -> None:
    keys, values = KVCache([KVShape(2, 8, 8)] * 2, num_slots // 16, 16, dtype, "cpu").tensors
    assert can_map(keys) == (num_slots > 16)
    for tensor in (keys, values):
        assert tensor.isnan().all()
    keys.zero_()
    assert values.isnan().all()
