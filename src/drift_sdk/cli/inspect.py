"""The command `inspect`: reports whether a model can be served on this machine, and what it takes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from drift_sdk.config import EngineConfig
from drift_sdk.inspection import inspect

__all__ = ["run_inspect"]


def run_inspect(model: str | Path, config: EngineConfig, *, as_json: bool) -> int:
    """Print what `inspect` finds, as JSON or as text; the exit status, 1 if the model cannot be served."""
    info = inspect(model, config)
    if as_json:
        found = {"is_supported": info.is_supported, **msgspec.to_builtins(info)}
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(info.text())

    return 0 if info.is_supported else 1
