"""First runs of steps, whose results are ignored: a few layers of each kind are enough for them.

They compile and load kernels, allocate memory and check the order of launches. All layers of a kind launch
the same kernels with the same sizes. Whoever computes layers asks `is_first_run` and may leave some out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["first_run", "is_first_run"]

_is_first_run: ContextVar[bool] = ContextVar("is_first_run", default=False)


def is_first_run() -> bool:
    """Whether the caller runs inside `first_run`."""
    return _is_first_run.get()


@contextmanager
def first_run() -> Iterator[None]:
    """Steps that run in a `with` block, on this thread, have their results ignored."""
    token = _is_first_run.set(True)
    try:
        yield
    finally:
        _is_first_run.reset(token)
