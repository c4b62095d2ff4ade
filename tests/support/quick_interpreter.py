"""Speeds up Triton's interpreter by doing once what it repeats for every launch, call and operation.

It computes the same values. Without this, the tests of kernels take three times as long. The changes are made
for Triton 3.9; with another version, nothing is changed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["install"]


def install() -> None:
    """Change the interpreter of this process, in which all kernels must be interpreted."""
    import triton

    if triton.__version__.split(".")[:2] != ["3", "9"]:
        return

    _patch_language_once()
    _omit_unread_overflows()
    _build_types_once()
    _promote_types_once()
    _omit_checks_of_handles()


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
        function = getattr(member, "__wrapped__", member)

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, builtin)

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


def _build_types_once() -> None:
    """Every operation makes tensors with new types, whose shapes are unwrapped, checked and printed."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    numel_of, unwrap, equal = cache(core.validate_block_shape), core._unwrap_if_constexpr, core.dtype.__eq__
    equal_block = core.block_type.__eq__
    broadcast = TritonSemantic.broadcast_impl_value
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    floats = frozenset(core.dtype.FP_TYPES)

    @cache
    def constants_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    @cache
    def name_of(shape: tuple[int, ...], element: str) -> str:
        return f"<{shape}, {element}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = constants_of(type.shape if type.is_block() else ())

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        shape = tuple(core._unwrap_shape(shape))
        if not shape:
            raise TypeError("0d block_type is forbidden")

        self.element_ty, self.shape, self.numel = element_ty, shape, numel_of(shape)
        self.name = name_of(shape, element_ty.name)

    @cache
    def is_plain(kind: type) -> bool:
        return not issubclass(kind, (list, tuple, core.tuple, core.constexpr))

    def unwrap_quickly(value: Any) -> Any:
        return value if is_plain(type(value)) else unwrap(value)

    @cache
    def block_of(element: Any, shape: tuple[int, ...]) -> Any:
        return core.block_type(element, shape)

    def with_element_type(self: Any, element: Any) -> Any:
        return block_of(element, self.shape)

    def is_equal_block(self: Any, other: Any) -> bool:
        return self is other or equal_block(self, other)

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def broadcast_if_unequal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        lhs_shape = lhs.type.shape if lhs.type.is_block() else ()
        rhs_shape = rhs.type.shape if rhs.type.is_block() else ()
        return (lhs, rhs) if lhs_shape == rhs_shape else broadcast(self, lhs, rhs)

    core.tensor.__init__ = init_tensor
    core.block_type.__init__ = init_block_type
    core._unwrap_if_constexpr = unwrap_quickly
    core.block_type.with_element_ty = with_element_type
    core.block_type.__eq__ = is_equal_block
    core.pointer_type.__hash__ = core.dtype.__hash__
    core.dtype.__eq__ = is_equal
    core.dtype.is_int = lambda self: self.name in integers
    core.dtype.is_floating = lambda self: self.name in floats
    TritonSemantic.broadcast_impl_value = broadcast_if_unequal


def _promote_types_once() -> None:
    """Operands of equal types are checked and converted too, for nothing."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    TritonSemantic.computation_type_impl = cache(TritonSemantic.computation_type_impl)
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    convert = TritonSemantic._cast_to_computation_type

    def is_number(dtype: Any) -> bool:
        return dtype.is_int() or dtype.is_floating()

    def keeps_type(self: Any, dtype: Any, other: Any, is_scalar: bool, div_or_mod: bool) -> bool:
        """True if an operation on a tensor of `dtype` and an operand of type `other` has type `dtype`."""
        return self.computation_type_impl(dtype, False, other, is_scalar, div_or_mod) is dtype

    @cache
    def constant_of(self: Any, kind: type, value: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        constant = convert(self, value, dtype)
        if not shape:
            return constant

        block = core.tensor(None, core.block_type(dtype, list(shape)))
        return broadcast(self, block, constant)[1]

    def check_quickly(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        kind, constant_kind = type(lhs), type(rhs)
        if kind is constant_kind is core.tensor:
            dtype, other = lhs.dtype, rhs.dtype
            if dtype is other and lhs.type == rhs.type and is_number(dtype):
                if not arithmetic_check or keeps_type(self, dtype, other, False, div_or_mod):
                    return lhs, rhs

            if allow_lhs_ptr and dtype.is_ptr() and other.is_int():
                return broadcast(self, lhs, rhs)

        elif kind is core.tensor and constant_kind in (int, float) and arithmetic_check:
            dtype = lhs.dtype
            # Zeros of both signs are equal, but not the same.
            if (rhs or constant_kind is int) and is_number(dtype):
                other = self.to_tensor_type(rhs)
                if keeps_type(self, dtype, other, True, div_or_mod):
                    shape = lhs.type.shape if lhs.type.is_block() else ()
                    return lhs, constant_of(self, constant_kind, rhs, dtype, tuple(shape))

        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    TritonSemantic.binary_op_type_checking_impl = check_quickly


def _omit_checks_of_handles() -> None:
    """Every operation checks that its result has no more bits than its type."""
    from triton.runtime.interpreter import TensorHandle

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    TensorHandle.__init__ = init
