"""A check of programmatic dependent launch: no kernel reads, before it waits, what may still be written.

A kernel's CTAs may be placed as soon as all CTAs of the kernel before have let their dependents start. What a
kernel reads before `wait_for_producers` must be older than every kernel that may then still be running:
the one before; and, where that one let dependents start before it had itself waited, the one before it, and
so on.

Which arguments a kernel reads before it waits, and which it writes, is read off its Triton IR; which tensors
they are, off the launches of a step. Torch's own kernels wait for everything before them and let nothing
start before they end: `note_library_kernel` tells of them. One that is not told of makes the check stricter.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from msgspec import Struct
from torch import Tensor

__all__ = [
    "KernelAccess",
    "LaunchOrderError",
    "Launches",
    "access_of",
    "checked_launches",
    "note_library_kernel",
]

WAIT = re.compile(r"grid_dependency_wait|griddepcontrol\.wait")
TRIGGER = re.compile(r"grid_dependency_launch_dependents|griddepcontrol\.launch_dependents")
OPERATION = re.compile(r"^ *(?:(%[\w.]+)(?::\d+)? = )?\"?([\w.]+)\"?(.*)$")
ARGUMENT = re.compile(r"(%[\w.]+): (!tt\.ptr<[^ ]*|!tt\.tensordesc<[^ ]*)")
LOOP_VALUE = re.compile(r"(%[\w.]+) = (%[\w.]+)")
NAME = re.compile(r"%[\w.]+")
BODY_INDENT = 4  # of a line in a kernel's outermost block


class LaunchOrderError(AssertionError):
    """A kernel reads what a kernel that may still be running writes."""


class KernelAccess(Struct, frozen=True):
    """reads_early: pointer arguments read before the kernel waits; writes: those written.

    triggers_early: it lets its dependents start before it has waited.
    """

    reads_early: frozenset[str]
    writes: frozenset[str]
    triggers_early: bool


def access_of(ttir: str) -> KernelAccess:
    """What a compiled kernel reads and writes, and in which order with respect to its wait.

    A pointer that cannot be followed to its argument, like a result of scf.if, may point into any of them.
    Raises LaunchOrderError for a kernel that may end without having waited, or writes before it waits.
    """
    sources: dict[str, set[str]] = {}  # value -> the arguments that a pointer points into
    pointers: set[str] = set()
    early: set[str] = set()
    written: set[str] = set()
    name = "kernel"
    has_waited = waits_always = triggers_early = False
    for line in ttir.splitlines():
        code = line.partition(" loc(")[0] if "tt.func" not in line else line
        if "tt.func" in code:
            if name != "kernel":
                raise LaunchOrderError(f"{name}: calls a function that is not inlined")
            name = code.partition("@")[2].partition("(")[0]
            sources |= {found[0]: {found[0][1:]} for found in ARGUMENT.findall(code)}
            pointers = set[str]().union(*sources.values())
            continue

        if WAIT.search(code):
            has_waited = True
            waits_always |= len(code) - len(code.lstrip()) == BODY_INDENT
        if TRIGGER.search(code):
            triggers_early |= not has_waited
        match = OPERATION.match(code)
        if match is None:
            continue

        result, operation, rest = match.groups()
        operands = NAME.findall(rest)
        is_read = operation.startswith(("tt.load", "tt.descriptor_load"))
        is_write = operation.startswith(("tt.store", "tt.descriptor_store", "tt.atomic"))
        # Of a load, of a store and of an atomic operation, the place is the first operand.
        places = (sources.get(operands[0]) or pointers) if is_read or is_write else set[str]()
        if operation == "scf.for" or operation == "scf.while":
            for inner, outer in LOOP_VALUE.findall(rest):
                sources.setdefault(inner, set()).update(sources.get(outer, ()))
        if is_read:
            if not has_waited:
                early |= places
        elif is_write:
            written |= places
            if not has_waited:
                raise LaunchOrderError(f"{name}: writes {sorted(places)} unwaited")
        elif result is not None:
            found = set[str]().union(*(sources.get(operand, set()) for operand in operands))
            if found:
                sources.setdefault(result, set()).update(found)

    if not waits_always:
        raise LaunchOrderError(f"{name}: may end without having waited")

    return KernelAccess(frozenset(early), frozenset(written), triggers_early)


LIBRARY = KernelAccess(frozenset(), frozenset({"out"}), False)


class Launches:
    """A step's launches, in order: those of the thread that makes this."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.is_compiling = False
        self._running: list[tuple[str, list[Span]]] = []  # what the next kernel may overtake, and its writes

    def add(self, kernel: str, access: KernelAccess, arguments: Mapping[str, object]) -> None:
        """The next kernel; LaunchOrderError if it reads early what may still be written."""
        for name in sorted(access.reads_early):
            read = span_of(arguments[name])
            for writer, spans in self._running:
                if read is not None and any(read[0] < end and start < read[1] for start, end in spans):
                    raise LaunchOrderError(
                        f"{kernel} reads {name} before it waits: {writer} may still be writing it"
                    )

        spans = [span for name in access.writes if (span := span_of(arguments[name])) is not None]
        if not access.triggers_early:
            self._running.clear()
        self._running.append((kernel, spans))


Span = tuple[int, int]
"""First address, and the one behind the last."""


def span_of(argument: object) -> Span | None:
    if not isinstance(argument, Tensor) or argument.numel() == 0:
        return None

    first = argument.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
    return first, first + (last + 1) * argument.element_size()


@contextmanager
def checked_launches() -> Iterator[None]:
    """Check the launches of this package's kernels in this block, which is a step that is to be captured."""
    launches = _current.launches = Launches()
    kernels = [
        (kernel, partial(note, launches, kernel))
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("drift_sdk._kernels.")
        for kernel in vars(module).values()
        if hasattr(kernel, "pre_run_hooks") and getattr(kernel, "__module__", None) == module_name
    ]
    for kernel, hook in kernels:
        kernel.add_pre_run_hook(hook)
    try:
        yield
    finally:
        _current.launches = None
        for kernel, hook in kernels:
            kernel.pre_run_hooks.remove(hook)


def note_library_kernel(out: Tensor) -> None:
    """Tell of a kernel of torch's that was just launched, and of what it writes."""
    launches: Launches | None = getattr(_current, "launches", None)
    if launches is not None:
        launches.add("a kernel of torch", LIBRARY, {"out": out})


_current = threading.local()
_accesses: dict[tuple[Any, ...], KernelAccess] = {}


def note(launches: Launches, kernel: Any, *values: Any, **options: Any) -> None:
    """A hook that Triton calls before each launch of a kernel."""
    if launches.is_compiling or launches.thread != threading.get_ident():
        return

    names: Sequence[str] = kernel.arg_names
    arguments = dict(zip(names, values, strict=False)) | {
        key: options[key] for key in names if key in options
    }
    settings = [value if not isinstance(value, Tensor) else value.dtype for value in arguments.values()]
    key = kernel, *settings, options.get("num_warps")
    access = _accesses.get(key)
    if access is None:
        launches.is_compiling = True
        warmup: Callable[..., Any] = kernel.warmup
        compiled = warmup(*values, grid=(1,), **options)
        launches.is_compiling = False
        access = _accesses[key] = access_of(compiled.asm["ttir"])
    launches.add(kernel.__name__, access, arguments)
