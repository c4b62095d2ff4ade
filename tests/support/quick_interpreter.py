"""Triton's interpreter without the work that it repeats at every call of a function.

It replaces triton.language's functions by its own when a kernel is launched, and anew, by a search through
the whole module, whenever the kernel calls another function: a third of the time that these tests took. Here
that is done once a process. Where Triton's internals are others than those of 3.9, nothing is changed.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["install"]


def install() -> None:
    """For this process, in which every kernel is interpreted."""
    import triton.language as tl
    from triton.runtime import interpreter

    names = ("_patch_lang", "_LangPatchScope", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in names):
        return

    patch_lang, np_dtype_of = interpreter._patch_lang, cache(interpreter._get_np_dtype)

    @cache
    def patch_all() -> None:
        # Kernels know the module by the one name, Triton's own functions by the other.
        patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def patch_once(fn: Any) -> Any:
        patch_all()
        return interpreter._LangPatchScope()

    def np_dtype(dtype: Any) -> Any:
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else np_dtype_of(dtype.scalar)

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = np_dtype
