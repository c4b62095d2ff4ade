"""Speeds up Triton's interpreter by doing once what it repeats for every launch, call and operation.

It computes the same values. Without this, the tests of kernels take several times as long. The changes are
made for Triton 3.9; with another version, nothing is changed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from operation_plans import planned

__all__ = ["install"]


def install() -> None:
    """Change the interpreter of this process, in which all kernels must be interpreted."""
    import triton

    if triton.__version__.split(".")[:2] != ["3", "9"]:
        return

    _patch_language_once()
    _omit_unread_overflows()
    _omit_checks_of_handles()
    _call_functions_at_once()
    _view_quickly()
    _convert_bfloat16_quickly()


def _patch_language_once() -> None:
    """The interpreter replaces the functions of triton.language by its own when a kernel is launched, and
    again, by searching the whole module, whenever the kernel calls another function."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang, np_dtype_of = interpreter._patch_lang, cache(interpreter._get_np_dtype)

    @cache
    def patch_all() -> None:
        # Kernels refer to the module as `tl`, Triton's own functions as `core`.
        patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def patch_once(fn: Any) -> Any:
        patch_all()
        return interpreter._LangPatchScope()

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # What a builtin wraps, without the check that it is called inside of a kernel.
        scope.set_attr(obj, name, planned(getattr(member, "__wrapped__", member)))

    def np_dtype(dtype: Any) -> Any:
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else np_dtype_of(dtype.scalar)

    interpreter._patch_lang = patch_once
    interpreter._patch_attr = patch_attr
    interpreter._get_np_dtype = np_dtype


def _omit_unread_overflows() -> None:
    """The interpreter computes for every operation of integers whether it overflows, and asserts that it does
    not; but without the option `debug`, which it does not set, the assertion does nothing."""
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


def _omit_checks_of_handles() -> None:
    """Every operation checks that its result has no more bits than its type."""
    from triton.runtime.interpreter import TensorHandle

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    TensorHandle.__init__ = init


def _call_functions_at_once() -> None:
    """The language is replaced and a function is rewritten whenever a kernel calls it."""
    from triton.runtime.interpreter import InterpretedFunction, InterpreterError

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = self.rewritten_fn.get(self.fn) or self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    InterpretedFunction.__call__ = call


def _view_quickly() -> None:
    """Views of NumPy arrays without the checks of NumPy's functions."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    broadcast = InterpreterBuilder.create_broadcast

    @cache
    def strides_of(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> Any:
        is_same_rank = len(shape) == len(wanted)
        if not is_same_rank or any(size not in (1, want) for size, want in zip(shape, wanted, strict=True)):
            return None

        sizes = zip(shape, strides, wanted, strict=True)
        return tuple(stride if size == want else 0 for size, stride, want in sizes)

    def create_expand_dims(self: Any, arg: Any, axis: int) -> Any:
        data = arg.data
        return TensorHandle(data.reshape(*data.shape[:axis], 1, *data.shape[axis:]), arg.dtype.scalar)

    def create_broadcast(self: Any, arg: Any, shape: Any) -> Any:
        data, wanted = arg.data, tuple(shape)
        strides = strides_of(data.shape, data.strides, wanted) if data.flags.c_contiguous else None
        if strides is None:
            return broadcast(self, arg, shape)

        return TensorHandle(np.ndarray(wanted, data.dtype, data, 0, strides), arg.dtype.scalar)

    InterpreterBuilder.create_expand_dims = create_expand_dims
    InterpreterBuilder.create_broadcast = create_broadcast


def _convert_bfloat16_quickly() -> None:
    """bfloat16 is the upper half of float32, which the interpreter takes apart and puts together again."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_quickly(data: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if rounding is None and given is tl.float32 and wanted is tl.bfloat16:
            bits = data.view(np.uint32)
            if not ((bits & 0x7F800000 == 0) & (bits & 0x7FFFFF != 0)).any():  # subnormal numbers
                return (bits >> 16).astype(np.uint16)

        if rounding is None and given is tl.bfloat16 and wanted is tl.float32:
            bits = data.view(np.uint16)
            if not ((bits & 0x7F80 == 0) & (bits & 0x7F != 0)).any():
                return bits.astype(np.uint32) << 16

        return convert(data, given, wanted, rounding)

    interpreter._convert_float = convert_quickly
