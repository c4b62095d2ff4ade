"""Engines in actors of Ray: arguments, and connections that fail. Needs the extra `ray`."""

from __future__ import annotations

from typing import Any

import pytest

from drift_sdk import ConfigError, ModelLoadError

ray = pytest.importorskip("ray")

from drift_sdk.ray import (  # noqa: E402
    Placement,
    RayEngine,
    connect,
    ray_pool,
)

pytestmark = pytest.mark.filterwarnings("default")


def test_wrong_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **options: Any) -> None:
        raise ConnectionError("no cluster")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigError, match=r"address='auto': expected a cluster that is running"):
        connect("auto")


def test_failure_to_start_a_cluster_is_a_load_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **options: Any) -> None:
        raise ConnectionError("no cluster") if address == "auto" else RuntimeError("timed out")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ModelLoadError, match="Ray cannot be started on this machine: timed out"):
        connect("local")


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_gpus": -1.0},
        {"num_gpus": 2.0},
        {"num_cpus": -1.0},
        {"timeout_s": 0.0},
        {"resources": {"": 1.0}},
        {"resources": {"a": 0.0}},
        {"resources": 3},
    ],
)
def test_wrong_placements_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Placement(**wrong)


def test_wrong_arguments_are_refused() -> None:
    for options in ({"address": ""}, {"placement": 3}, {"open_model": 3}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            RayEngine("m", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_replicas=0"):
        ray_pool("m", num_replicas=0)
    assert len(ray_pool("m", num_replicas=3).engines) == 3
