"""Keys of kernels in Triton's cache on disk: the same in every process, and prepared beside other work.

A key is a hash of a kernel's source, its constants, those of the functions that it calls, and the files of
Triton's installation.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import triton
from triton.runtime.build import platform_key
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable

__all__ = ["hash_installation", "prepare_cache_keys", "settle_cache_key", "wait_for_cache_keys"]

_preparing: list[threading.Thread] = []
"""The latest threads of `prepare_cache_keys`."""


def prepare_cache_keys() -> None:
    """Compute what keys of Triton's cache contain of the machine, on threads: a hash of Triton's
    installation, hundreds of megabytes, and the platform, for which Python asks another process.

    Triton keeps the results.
    """
    threads = [
        threading.Thread(target=each, name="drift-cache-keys", daemon=True)
        for each in (hash_installation, platform_key)
    ]
    for thread in threads:
        thread.start()
    _preparing[:] = threads  # started: another engine's thread may wait for them at any time


def hash_installation() -> str:
    """Return Triton's `triton_key`, for which the largest file is read at once.

    Triton reads it by the MiB, and would wait for the interpreter's lock after each. Hashing does not hold
    the lock.
    """
    module: Any = triton.runtime.cache
    module.open = _open  # instead of the built-in function
    try:
        return str(triton_key())
    finally:
        vars(module).pop("open", None)  # another thread may have hashed at the same time


class _MappedFile(io.FileIO):
    """A file for reading, of which the first read returns everything, in memory that is mapped to it."""

    def read(self, size: int | None = -1, /) -> Any:
        if self.tell() or not self.seek(0, os.SEEK_END):
            return b""

        return mmap.mmap(self.fileno(), 0, access=mmap.ACCESS_READ)


def _open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    is_library = mode == "rb" and Path(file).stem == "libtriton"
    return _MappedFile(file) if is_library else open(file, mode, *arguments, **options)


def wait_for_cache_keys() -> None:
    """Wait for the threads of `prepare_cache_keys`, if there are any."""
    for thread in _preparing:
        thread.join()


def settle_cache_key(function: Any) -> None:
    """Compute the key of a function in Triton's cache, after those of the functions that it calls.

    With Triton 3.6, a key contains the constants of a called function only if that one's key is known. Keys
    would otherwise depend on the order of computing them, and a process would not find what another one has
    compiled.
    """
    if function.hash is not None:
        return

    for name in function.fn.__code__.co_names:
        called = function.__globals__.get(name)
        if isinstance(called, JITCallable) and called is not function:
            settle_cache_key(called)
    function.cache_key  # noqa: B018  # a property that keeps its value
