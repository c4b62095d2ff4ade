"""JSON objects in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from drift_sdk._files import unreadable
from drift_sdk.errors import ModelLoadError

__all__ = ["read_object"]


def read_object(path: Path) -> dict[str, Any]:
    """The contents of a file. Raises ModelLoadError naming it."""
    try:
        return _decoded(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not a JSON object: {error}") from error


def _decoded(content: bytes) -> dict[str, Any]:
    """A JSON object, perhaps with Infinity, -Infinity and NaN: they are not JSON, but Python writes them, and
    transformers reads them."""
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError:
        try:
            settings = json.loads(content)
            msgspec.json.encode(settings)  # raises for lone surrogates, which are not JSON either
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            raise

        return settings
