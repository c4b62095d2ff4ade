"""Speeds up Triton's interpreter by doing once what it repeats at every call of a function.

The interpreter replaces the functions of triton.language by its own when a kernel is launched, and again, by
searching the whole module, whenever the kernel calls another function. This took a third of the time of the
tests. Here it is done once per process. If Triton's internals differ from those of version 3.9, nothing is
changed.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["install"]


def install() -> None:
    """Change the interpreter of this process, in which all kernels must be interpreted."""
    import triton.language as tl
    from triton.runtime import interpreter

    names = ("_patch_lang", "_LangPatchScope", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in names):
        return

    patch_lang, np_dtype_of = interpreter._patch_lang, cache(interpreter._get_np_dtype)

    @cache
    def patch_all() -> None:
        # Kernels refer to the module as `tl`, Triton's own functions as `core`.
        patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def patch_once(fn: Any) -> Any:
        patch_all()
        return interpreter._LangPatchScope()

    def np_dtype(dtype: Any) -> Any:
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else np_dtype_of(dtype.scalar)

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = np_dtype
