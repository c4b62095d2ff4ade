"""Engines with simulated acceptance: which configurations and acceptances they take."""

from __future__ import annotations

import pytest

from drift_sdk import ConfigError, EngineConfig, NGram, Speculation
from perf.harness.simulation import simulated_engine


def test_simulated_engine_needs_speculation_and_graphs() -> None:
    speculation = Speculation(draft=NGram())
    with pytest.raises(ConfigError, match="executor='auto'"):
        simulated_engine("folder", EngineConfig(speculation=speculation), acceptance=2.0)
    with pytest.raises(ConfigError, match="speculation=None"):
        simulated_engine("folder", EngineConfig(executor="graph"), acceptance=2.0)

    config = EngineConfig(executor="graph", speculation=speculation)
    most = speculation.shape.num_draft_tokens + 1
    with pytest.raises(ConfigError, match=rf"acceptance={most + 0.5}: expected at most {most}"):
        simulated_engine("folder", config, acceptance=most + 0.5)
    simulated_engine("folder", config, acceptance=[1, most + 3])
