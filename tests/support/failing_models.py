"""Functions that fail to open a model, or do not end. Another process imports them fast."""

from __future__ import annotations

import os
import time
from typing import Any, NoReturn

from drift_sdk import ModelLoadError

__all__ = ["end_process", "fail_to_open", "hang"]


def fail_to_open(report: Any, limits: Any = None) -> NoReturn:
    raise ModelLoadError("no such file")


def end_process(report: Any, limits: Any = None) -> NoReturn:
    os._exit(7)


def hang(report: Any, limits: Any = None) -> NoReturn:
    while True:
        time.sleep(1.0)
