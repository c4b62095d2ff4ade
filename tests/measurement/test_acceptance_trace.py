"""Traces of acceptance: made from means, and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drift_sdk import ConfigError
from drift_sdk.measurement import AcceptanceTrace


@pytest.mark.parametrize("mean", [1.0, 1.5, 2.56, 3.2, 4.0, 5.999])
def test_trace_of_a_mean_has_that_mean_and_least_variance(mean: float) -> None:
    trace = AcceptanceTrace.of(mean)
    assert trace.mean == mean
    assert set(trace.lengths) <= {int(mean), -int(-mean // 1)}
    # Long rounds are spread evenly: sums over equally many consecutive rounds differ by one token at most.
    for width in range(1, min(len(trace.lengths), 30)):
        sums = [sum(trace.lengths[at : at + width]) for at in range(len(trace.lengths) - width + 1)]
        assert max(sums) - min(sums) <= 1


def test_trace_of_3_2() -> None:
    assert AcceptanceTrace.of(3.2).lengths == (3, 3, 3, 3, 4)


def test_trace_is_saved_and_loaded(tmp_path: Path) -> None:
    trace = AcceptanceTrace(((3, 1, 4), (2,)))
    trace.save(tmp_path / "trace.json")
    assert AcceptanceTrace.load(tmp_path / "trace.json") == trace
    assert trace.lengths == (3, 1, 4, 2) and trace.mean == 2.5


@pytest.mark.parametrize("sequences", [[["a"]], [], [[]], [[3, 0]], [[2], [-1]]])
def test_file_without_rounds_of_tokens_is_rejected(sequences: list[Any], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"sequences": sequences}))
    with pytest.raises(ConfigError, match=r"other.json'?: expected a file written by AcceptanceTrace.save"):
        AcceptanceTrace.load(tmp_path / "other.json")


@pytest.mark.parametrize("acceptance", [0.5, float("nan"), True, "3", [], [3, 0], [2.5], None])
def test_invalid_acceptance_is_rejected(acceptance: Any) -> None:
    with pytest.raises(ConfigError, match="acceptance="):
        AcceptanceTrace.of(acceptance)
