from __future__ import annotations

import pytest

from drift_sdk.pool.pool_state import summed_stats
from drift_sdk.stats import EngineStats


@pytest.mark.parametrize(("other", "expected"), [("fp8", "fp8"), ("bfloat16", "")])
def test_kv_dtype_of_several_engines_is_that_of_all(other: str, expected: str) -> None:
    each = [EngineStats(kv_dtype=name, num_blocks=3) for name in ("fp8", other)]
    found = summed_stats(each)
    assert (found.kv_dtype, found.num_blocks) == (expected, 6)


def test_a_pool_is_paused_when_all_its_engines_are() -> None:
    paused, running = EngineStats(is_paused=True), EngineStats()
    assert summed_stats([paused, paused]).is_paused
    assert not summed_stats([paused, running]).is_paused and not summed_stats([]).is_paused
