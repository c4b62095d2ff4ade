"""Errors of too little memory for weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from drift_sdk.errors import ModelLoadError, is_out_of_memory

__all__ = ["memory_named"]


@contextmanager
def memory_named(location: str, device: torch.device, num_bytes: Callable[[], int]) -> Iterator[None]:
    """Turn the errors of too little memory into a ModelLoadError that names files, device and amount."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise

        size = f"{num_bytes() / 2**30:.1f} GiB"
        raise ModelLoadError(
            f"{location}: not enough memory on {device} for {size} of weights: {error}"
        ) from error
