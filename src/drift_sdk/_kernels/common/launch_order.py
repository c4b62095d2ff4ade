"""A check of programmatic dependent launch: no kernel reads, before it waits, what may still be written.

The CTAs of a kernel may be placed as soon as all CTAs of the kernel before it have permitted their dependents
to start. What a kernel reads before `wait_for_producers` must therefore have been written before any kernel
that may still be running: the kernel before it; if that one permitted its dependents to start before it had
itself waited, also the kernel before that; and so on.

Which pointer arguments a kernel reads before it waits, and which it writes, is taken from its Triton IR
(TTIR); which tensors they are, from the launches of a step. CUDA C++ kernels declare theirs, with
`note_kernel`; tests hold the declarations to their PTX. Kernels of torch wait for everything before them,
and let nothing start before they end: `note_library_kernel` adds them to the order of launches. One that is
not noted makes the check stricter.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.kernel import observed_launches
from drift_sdk._kernels.common.launching import is_interpreted, uses_pdl

__all__ = [
    "KernelAccess",
    "LaunchOrderError",
    "Launches",
    "access_of",
    "checked_launches",
    "note_kernel",
    "note_library_kernel",
]

WAIT = re.compile(r"grid_dependency_wait|griddepcontrol\.wait")
TRIGGER = re.compile(r"grid_dependency_launch_dependents|griddepcontrol\.launch_dependents")
CONTROL = "grid"
"""In every line that matches WAIT or TRIGGER."""
OPERATION = re.compile(r"^ *(?:(%[\w.]+)(?::\d+)? = )?\"?([\w.]+)\"?(.*)$")
"""A line of TTIR: its result, if it has one, the operation, and the rest with the operands."""
ARGUMENT = re.compile(r"(%[\w.]+): (!tt\.ptr<[^ ]*|!tt\.tensordesc<[^ ]*)")
TYPE = "!tt."
"""In every line with a pointer or a tensor descriptor."""
OTHER_OPERATION = re.compile(r" *(%[\w.]+) = (?!scf)")
"""The beginning of a line of TTIR, if its operation has one result and no blocks. Most lines begin like this,
and have neither TYPE nor CONTROL."""
LOOP_VALUE = re.compile(r"(%[\w.]+) = (%[\w.]+)")
NAME = re.compile(r"%[\w.]+")
BODY_INDENT = 4
"""Spaces before an operation in the outermost block of a kernel."""


class LaunchOrderError(AssertionError):
    """A kernel reads what a kernel that may still be running writes."""


class KernelAccess(Struct, frozen=True):
    """A kernel's reads and writes through its pointer arguments, by their names in its signature.

    reads_early: those read before the kernel waits. writes: those written. triggers_early: the kernel permits
    its dependents to start before it has waited.
    """

    reads_early: frozenset[str]
    writes: frozenset[str]
    triggers_early: bool


def access_of(ttir: str) -> KernelAccess:
    """Return what a compiled kernel reads and writes, and in which order with respect to its wait.

    A pointer that cannot be traced to its argument, like a result of scf.if, counts as one into any of them.
    Raises LaunchOrderError for a kernel that may end without having waited, or that writes before it waits.
    """
    scan = AccessScan()
    has_casts = "ptr_to_int" in ttir  # numbers may become pointers
    for line in ttir.splitlines():
        is_other = not (has_casts or TYPE in line or CONTROL in line)
        if is_other and (match := OTHER_OPERATION.match(line)):
            scan.visit_other(match[1])
        elif "tt.func" in line:
            scan.enter_function(line)
        elif not line.startswith("#"):  # the name of a location
            scan.visit(line.partition(" loc(")[0])
    return scan.access()


class AccessScan:
    """A pass over the lines of a kernel's TTIR, which traces pointers from arguments to loads and stores."""

    def __init__(self) -> None:
        self._name = "kernel"  # until the function's line
        self._sources: dict[str, set[str]] = {}  # value -> the arguments that a pointer points into
        self._pointers: set[str] = set()  # all pointer arguments
        self._early: set[str] = set()
        self._written: set[str] = set()
        self._wait_indent: int | None = None  # of the outermost wait in the blocks that are open
        self._waits_always = self._triggers_early = False

    def enter_function(self, line: str) -> None:
        """Take the kernel's name and its pointer arguments."""
        if self._name != "kernel":
            raise LaunchOrderError(f"{self._name}: calls a function that is not inlined")

        self._name = line.partition("@")[2].partition("(")[0]
        self._sources |= {found[0]: {found[0][1:]} for found in ARGUMENT.findall(line)}
        self._pointers = set[str]().union(*self._sources.values())

    def visit_other(self, result: str) -> None:
        """Take an operation without pointers, which may have a name that was a pointer in another block."""
        self._sources.pop(result, None)

    def visit(self, line: str) -> None:
        """Take an operation of the kernel's body, without its location.

        Blocks beside each other, as of a condition, may use a name for different values.
        """
        text = line.lstrip()
        indent = len(line) - len(text)
        is_label = text.startswith("^")  # of a block that others branch to
        if self._wait_indent is not None and text and not is_label and indent < self._wait_indent:
            self._wait_indent = None  # the block of the wait has ended
        if CONTROL in line:
            if WAIT.search(line) and self._wait_indent is None:
                self._wait_indent = indent
                self._waits_always |= indent == BODY_INDENT
            if TRIGGER.search(line):
                self._triggers_early |= self._wait_indent is None
        has_waited = self._wait_indent is not None
        match = OPERATION.match(line)
        if match is None:
            for name in NAME.findall(line):  # arguments of a block
                self._sources.pop(name, None)
            return

        result, operation, rest = match.groups()
        operands = NAME.findall(rest)
        if operation in ("scf.for", "scf.while"):
            for inner, outer in LOOP_VALUE.findall(rest):
                self._sources[inner] = set(self._sources.get(outer, ()))
        found = set[str]()
        # The first operand of a load, a store or an atomic operation is its pointer.
        if operation.startswith(("tt.load", "tt.descriptor_load")):
            if not has_waited:
                self._early |= self._arguments_of(operands[0])
        elif operation.startswith(("tt.store", "tt.descriptor_store", "tt.atomic")):
            self._written |= self._arguments_of(operands[0])
            if not has_waited:
                arguments = sorted(self._arguments_of(operands[0]))
                raise LaunchOrderError(f"{self._name}: writes {arguments} before it waits")
        else:
            found = found.union(*(self._sources[name] for name in operands if name in self._sources))
        if found:
            self._sources[result] = found
        else:
            self._sources.pop(result, None)

    def access(self) -> KernelAccess:
        """Return the findings, once all lines were taken."""
        if not self._waits_always:
            raise LaunchOrderError(f"{self._name}: may end without having waited")

        return KernelAccess(frozenset(self._early), frozenset(self._written), self._triggers_early)

    def _arguments_of(self, pointer: str) -> set[str]:
        return self._sources.get(pointer) or self._pointers


LIBRARY = KernelAccess(frozenset(), frozenset({"out"}), False)
"""A kernel of torch's: it waits first, and writes its argument `out`."""


class Launches:
    """The launches of a step, in order: those made by the thread that creates this object."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        # Kernels that may still run when the next one starts, and the memory that they write.
        self._running: list[tuple[str, list[AddressRange]]] = []

    def add(self, kernel: str, access: KernelAccess, arguments: Mapping[str, object]) -> None:
        """Add the next kernel.

        arguments: values by the names that `access` uses. Raises LaunchOrderError if the kernel reads, before
        it waits, what may still be written.
        """
        for name in sorted(access.reads_early):
            read = address_range(arguments[name])
            for writer, written in self._running:
                if read is not None and any(read[0] < end and start < read[1] for start, end in written):
                    raise LaunchOrderError(
                        f"{kernel} reads {name} before it waits: {writer} may still be writing it"
                    )

        written = [found for name in access.writes if (found := address_range(arguments[name])) is not None]
        if not access.triggers_early:
            self._running.clear()
        self._running.append((kernel, written))


AddressRange = tuple[int, int]
"""The first address, and the address after the last."""


def address_range(argument: object) -> AddressRange | None:
    """Return the memory that a tensor spans, or None for other arguments and empty tensors."""
    if not isinstance(argument, Tensor) or argument.numel() == 0:
        return None

    start = argument.data_ptr()
    if argument.is_contiguous():
        return start, start + argument.nbytes

    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
    return start, start + (last + 1) * argument.element_size()


@contextmanager
def checked_launches() -> Iterator[None]:
    """Check the launches of this package's kernels inside a `with` block: a step that is to be captured.

    Raises LaunchOrderError at the launch that breaks the order. Without PDL kernels run one after the other,
    and there is nothing to check.
    """
    if not (uses_pdl() or is_interpreted()):
        yield
        return

    launches = _current.launches = Launches()
    try:
        with observed_launches(partial(note, launches)):
            yield
    finally:
        _current.launches = None


def note_library_kernel(out: Tensor) -> None:
    """Add a kernel of torch's, just launched, to the launches being checked. `out`: the tensor it writes."""
    note_kernel("a kernel of torch", LIBRARY, {"out": out})


def note_kernel(name: str, access: KernelAccess, arguments: Mapping[str, object]) -> None:
    """Add a kernel that is not Triton's, just launched, to the launches being checked.

    arguments: values by the names that `access` uses.
    """
    launches: Launches | None = getattr(_current, "launches", None)
    if launches is not None:
        launches.add(name, access, arguments)


_current = threading.local()
_accesses: dict[str, KernelAccess] = {}
"""By the hash of a compiled kernel."""


def note(
    launches: Launches, kernel: Any, compiled: Any, values: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Add a Triton kernel, just launched; an observer of launches.

    Arguments may be given by position or by name; `options` also holds settings of the launch.
    """
    if launches.thread != threading.get_ident():
        return

    access = _accesses.get(compiled.hash)
    if access is None:
        access = _accesses[compiled.hash] = access_of(compiled.asm["ttir"])
    arguments = {**dict(zip(kernel.arg_names, values, strict=False)), **options}
    launches.add(kernel.__name__, access, arguments)
