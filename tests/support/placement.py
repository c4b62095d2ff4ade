"""The executor of engines under test: eager on the CPU, or graphs on a GPU with `pytest --executor graph`."""

from __future__ import annotations

from typing import Any

from drift_sdk import EngineConfig

__all__ = ["EXECUTORS", "engine_config", "use"]

EXECUTORS = ("eager", "graph")

_defaults: dict[str, Any] = {"device": "cpu", "executor": "eager", "dtype": "float32", "block_size": 16}


def use(executor: str) -> None:
    """Set the executor of all configurations that `engine_config` returns from now on."""
    _defaults.update(executor=executor, device="cuda" if executor == "graph" else "cpu")


def engine_config(**fields: Any) -> EngineConfig:
    """A configuration in float32, so that results can be compared for equality.

    `fields` override defaults.
    """
    return EngineConfig(**{**_defaults, **fields})
