"""Functions that fail to open a model. Another process imports them fast."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from drift_sdk import ModelLoadError

__all__ = ["end_process", "fail_to_open"]


def fail_to_open(report: Any, limits: Any = None) -> NoReturn:
    raise ModelLoadError("no such file")


def end_process(report: Any, limits: Any = None) -> NoReturn:
    os._exit(7)
