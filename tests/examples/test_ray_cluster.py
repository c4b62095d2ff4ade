"""The example of a Ray cluster. Needs the extra `ray`: `make ray-test`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from ray_example import LIMIT_S, chat_model, running


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")
def test_ray_cluster_answers_by_two_actors(tmp_path: Path) -> None:
    with running("ray_cluster", chat_model(tmp_path), "--device", "cpu") as process:
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert "replica 0: open, 4 requests" in out
    assert "replica 1: open, 4 requests" in out
    assert "8 streams in" in out
