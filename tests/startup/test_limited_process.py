"""Starts in a process that lacks file descriptors or address space: typed errors state the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from model_zoo import make_model

SUPPORT = Path(__file__).parents[1] / "support"
WAIT_S = 300.0


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_limits_of_the_process_are_reasons(tmp_path: Path) -> None:
    make_model(18, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "large").mkdir()
    large = settings | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8}
    large |= {"layer_types": ["full_attention"] * 8, "max_window_layers": 8}
    (tmp_path / "large" / "config.json").write_text(json.dumps(large))
    command = [sys.executable, SUPPORT / "limited_start.py", tmp_path / "model", tmp_path / "large"]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=WAIT_S)
    found = json.loads(done.stdout)

    for name, outcome in found.items():
        if name.startswith("descriptors"):
            is_refused = outcome.startswith("ModelLoadError") and "Too many open files" in outcome
            assert is_refused or outcome.startswith("done"), (name, outcome)
    assert found["descriptors, start, 0"].startswith("ModelLoadError: the engine cannot be started: ")
    assert found["KV cache"].startswith("ConfigError: kv_cache_tokens=10000000: expected at most ")
    assert found["weights"].startswith("ConfigError: dtype='auto': expected a smaller one")
    assert "the weights take" in found["inspect"] and "are available" in found["inspect"]
