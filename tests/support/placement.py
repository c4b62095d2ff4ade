"""Where engines under test run: eagerly on the CPU; with `pytest --executor graph` by graphs on a GPU."""

from __future__ import annotations

from typing import Any

from drift_sdk import EngineConfig

__all__ = ["EXECUTORS", "engine_config", "use"]

EXECUTORS = ("eager", "graph")

_defaults: dict[str, Any] = {"device": "cpu", "executor": "eager", "dtype": "float32", "block_size": 16}


def use(executor: str) -> None:
    """For all that `engine_config` makes from now on."""
    _defaults.update(executor=executor, device="cuda" if executor == "graph" else "cpu")


def engine_config(**fields: Any) -> EngineConfig:
    """In float32, so that whatever is compared may be equal; `fields` go first."""
    return EngineConfig(**{**_defaults, **fields})
