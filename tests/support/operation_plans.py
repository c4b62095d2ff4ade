"""Plans of the operations of Triton's interpreter.

An operation of `triton.language` checks, promotes and broadcasts its operands, by their types alone, and then
calls the interpreter's builder, which computes. The builder's calls are written down when an operation is
executed for the first time with operands of certain types, and repeated from then on: values are the same,
because the same functions compute them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

__all__ = ["planned"]

IMPURE_WORDS = ("program_id", "num_programs", "load", "store", "atomic", "print", "assert", "barrier")
"""Words in the names of those functions of the builder that do more than compute from their arguments."""


class _Unplanned(Exception):
    """An operation has operands or results that plans do not know."""


def planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of the language that plans the builder's calls for each combination of types."""
    from triton.language import core
    from triton.runtime import interpreter

    semantic, builder, tensor = interpreter.interpreter_semantic, interpreter.interpreter_builder, core.tensor
    plans: dict[Any, Callable[..., Any] | None] = {}

    def operation(*args: Any, **kwargs: Any) -> Any:
        if "_semantic" in kwargs:  # a part of an operation
            return function(*args, **kwargs)

        handles: list[Any] = []
        key: list[Any] = []
        try:
            for value in (*args, *kwargs.items()) if kwargs else args:
                if type(value) is tensor:
                    handles.append(value.handle)
                    key.append(value.type.name)
                else:
                    key.append(_key(value, handles))
        except _Unplanned:
            return function(*args, **kwargs, _semantic=semantic)

        if len(handles) > 1 and len({*map(id, handles)}) < len(handles):
            first = [*map(id, handles)]
            key.append(tuple([first.index(one) for one in first]))  # which operands are the same

        place = tuple(key)
        plan = plans.get(place)
        if plan is not None:
            return plan(builder, *handles)

        if place in plans:
            return function(*args, **kwargs, _semantic=semantic)

        plans[place] = None
        semantic.builder = recorder = _Recorder(builder, handles)
        try:
            result = function(*args, **kwargs, _semantic=semantic)
        finally:
            semantic.builder = builder

        plans[place] = recorder.plan(result)
        return result

    return operation


@cache
def _kind(kind: type) -> str | None:
    """Kind of an operand of this type, by which `_key` handles it; None if plans do not know it."""
    from triton.language import core

    if kind in (int, bool, str, type(None)) or issubclass(kind, Enum):
        return "value"

    if issubclass(kind, core.dtype):
        return "type"

    kinds = {core.tensor: "tensor", core.constexpr: "constexpr", float: "float", slice: "slice"}
    return kinds.get(kind, "several" if kind in (tuple, list, core.tuple) else None)


def _key(value: Any, handles: list[Any]) -> Any:
    """Key of an operand: its type, and its value if it is no tensor. Handles of tensors are appended to
    `handles`."""
    kind = type(value)
    how = _kind(kind)
    if how == "value":
        return kind, value

    if how == "constexpr":
        return kind, _key(value.value, handles)

    if how == "tensor":
        handles.append(value.handle)
        return value.type.name

    if how == "several":
        return kind, tuple([_key(one, handles) for one in value])

    if how == "slice":
        return kind, _key((value.start, value.stop, value.step), handles)

    if how == "float":
        return kind, value.hex()  # zeros of both signs differ, and NaN equals itself

    if how == "type":
        return "type", value.name

    raise _Unplanned


class _Recorder:
    """A builder that writes its calls down, as the source of a function of the operands' handles."""

    def __init__(self, builder: Any, handles: list[Any]) -> None:
        self._builder = builder
        self._parameters = [f"h{index}" for index in range(len(handles))]
        self._names = {id(handle): name for handle, name in zip(handles, self._parameters, strict=True)}
        self._constants: dict[str, Any] = {}
        self._kept = [*handles]  # an id stands for one object as long as it exists
        self._lines: list[str] = []
        self._is_known = True

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        if not callable(member):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            result = member(*args, **kwargs)
            try:
                self._note(name, args, kwargs, result)
            except _Unplanned:
                self._is_known = False
            return result

        return call

    def plan(self, result: Any) -> Callable[..., Any] | None:
        """The calls as a function (builder, handles of the operands); None if they are not all known."""
        from triton.language import core

        try:
            if not self._is_known or not (result is None or type(result) is core.tensor):
                return None

            lines = [*self._lines]
            if result is None:
                lines.append("return None")
            else:
                lines.append("result = new(tensor)")
                lines.append(f"result.handle = {self._name(result.handle)}")
                fields = ("type", "dtype", "shape", "numel")
                lines += [f"result.{one} = {self._constant(getattr(result, one))}" for one in fields]
                lines.append("return result")
        except _Unplanned:
            return None

        names = {"new": object.__new__, "tensor": core.tensor, **self._constants}
        source = f"def plan({', '.join(['builder', *self._parameters])}):\n    " + "\n    ".join(lines)
        exec(source, names)
        return names["plan"]

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        from triton.runtime.interpreter import TensorHandle

        self._kept.append((args, result))
        given = [self._argument(arg) for arg in args]
        is_constant = not any(word in name for word in IMPURE_WORDS) and all(
            n in self._constants for n in given
        )
        if kwargs or isinstance(result, (tuple, list)):
            raise _Unplanned

        if isinstance(result, TensorHandle) and id(result) in self._names:
            return  # returned as it was given

        if is_constant:
            if isinstance(result, TensorHandle):
                self._names[id(result)] = self._constant(result)
            return

        call = f"builder.{name}({', '.join(given)})"
        if isinstance(result, TensorHandle):
            self._names[id(result)] = f"r{len(self._lines)}"
            call = f"r{len(self._lines)} = {call}"
        self._lines.append(call)

    def _argument(self, value: Any) -> str:
        """The source of an argument of the builder."""
        from triton.language import core
        from triton.runtime.interpreter import TensorHandle

        if isinstance(value, TensorHandle):
            return self._name(value)

        is_plain = value is None or isinstance(value, (int, float, str, bool, Enum, core.dtype))
        is_shape = isinstance(value, (list, tuple, core.tuple)) and all(
            isinstance(one, (int, core.constexpr)) for one in value
        )
        if is_plain or is_shape or type(value).__module__.startswith("triton._C"):
            return self._constant(value)

        raise _Unplanned

    def _name(self, handle: Any) -> str:
        if handle is None:  # what a store returns
            return "None"

        if id(handle) not in self._names:
            raise _Unplanned

        return self._names[id(handle)]

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name
