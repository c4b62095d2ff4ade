"""A check of programmatic dependent launch: before it waits, no kernel reads what may still be written, and
none writes what may still be used.

The CTAs of a kernel may be placed as soon as all CTAs of the kernel before it have permitted their dependents
to start. What a kernel reads before `wait_for_producers` must therefore not be written by any kernel that may
still be running, and what it writes then must not be read or written by them. Those are the kernel before it;
if that one permitted its dependents to start before it had itself waited, also the kernel before that; and so
on.

Which pointer arguments a kernel reads and writes, and which before it waits, is taken from its Triton IR;
which tensors they are, from the launches of a step. CUDA C++ kernels declare theirs, with
`note_kernel`; tests hold the declarations to their PTX. Kernels of torch wait for everything before them,
and let nothing start before they end: `note_library_kernel` adds them to the order of launches. What a kernel
writes that is not noted is not checked.

Reads and writes of a compiled kernel of Triton through its arguments, from its Triton IR (TTIR).

The result of a scan is kept on disk, for later starts.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import triton
from msgspec import Struct
from torch import Tensor
from triton.runtime.cache import get_cache_manager

from drift_sdk._kernels.launch.kernel import (
    is_interpreted,
    observed_launches,
    uses_pdl,
    whole_cache_entries,
)

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
WRITES = ("tt.store", "tt.descriptor_store", "tt.descriptor_scatter", "tt.descriptor_reduce", "tt.atomic")
LOOP_VALUE = re.compile(r"(%[\w.]+) = (%[\w.]+)")
NAME = re.compile(r"%[\w.]+")
BODY_INDENT = 4
"""Spaces before an operation in the outermost block of a kernel."""

FILE = "access.json"
SCAN = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
"""A hash of this module: another one may find more in a kernel."""


class LaunchOrderError(AssertionError):
    """A kernel reads what a kernel that may still be running writes, or writes what that one uses."""


class KernelAccess(Struct, frozen=True):
    """A kernel's reads and writes through its pointer arguments, by their names in its signature.

    reads_early: those read before the kernel waits. writes: those written. triggers_early: the kernel permits
    its dependents to start before it has waited. writes_early: those written before it waits. has_addresses:
    it makes pointers of numbers, so that it may use other memory, too.
    """

    reads_early: frozenset[str]
    writes: frozenset[str]
    triggers_early: bool
    writes_early: frozenset[str] = frozenset()
    has_addresses: bool = False


def access_of(ttir: str) -> KernelAccess:
    """Return what a compiled kernel reads and writes, and in which order with respect to its wait.

    A pointer that cannot be traced to its argument, like a result of scf.if, counts as one into any of them.
    Raises LaunchOrderError for a kernel that may end without having waited.
    """
    scan = AccessScan()
    scan.has_addresses = "int_to_ptr" in ttir
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
        self._written_early: set[str] = set()
        self._wait_indent: int | None = None  # of the outermost wait in the blocks that are open
        self._waits_always = self._triggers_early = False
        self.has_addresses = False

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
        if operation.startswith(("tt.load", "tt.descriptor_load", "tt.descriptor_gather")):
            if not has_waited:
                self._early |= self._arguments_of(operands[0])
        elif operation.startswith(WRITES):
            self._written |= self._arguments_of(operands[0])
            if not has_waited:
                self._written_early |= self._arguments_of(operands[0])
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

        return KernelAccess(
            frozenset(self._early),
            frozenset(self._written),
            self._triggers_early,
            frozenset(self._written_early),
            self.has_addresses,
        )

    def _arguments_of(self, pointer: str) -> set[str]:
        return self._sources.get(pointer) or self._pointers


def ttir_of(compiled: Any) -> str:
    """Return the Triton IR of a compiled kernel.

    Compiles it again if Triton's cache has nothing but its binary, as with TRITON_STORE_BINARY_ONLY, and
    leaves the IR there.
    """
    code = compiled.asm
    if "ttir" in code:
        return str(code["ttir"])

    # Lists of the metadata's file are tuples in the options of the first compilation, whose key has both.
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in compiled.metadata._asdict().items()
    }
    with whole_cache_entries():
        triton.knobs.compilation.always_compile = True
        whole = triton.compile(compiled.src, target=compiled.metadata.target, options=options)
    return str(whole.asm["ttir"])


def kept_access(ttir: str) -> KernelAccess:
    """Return the access of a compiled kernel, from Triton's cache or kept there.

    A folder that cannot be read or written, and a file with something else, are no errors.
    """
    key = hashlib.sha256(f"{SCAN}{ttir}".encode()).hexdigest()
    with suppress(OSError, ValueError, RecursionError, msgspec.DecodeError):
        if (path := get_cache_manager(key).get_file(FILE)) is not None:
            return msgspec.json.decode(Path(path).read_bytes(), type=KernelAccess)

    access = access_of(ttir)
    with suppress(OSError):
        get_cache_manager(key).put(msgspec.json.encode(access), FILE)
    return access


LIBRARY = KernelAccess(frozenset(), frozenset({"out"}), False)
"""A kernel of torch's: it waits first, and writes its argument `out`."""


class Running(Struct, frozen=True):
    """A kernel that may still run when the next one starts.

    has_all: whether all memory that it uses is among its arguments.
    """

    kernel: str
    access: KernelAccess
    arguments: Mapping[str, object]
    has_all: bool

    def may_write(self, argument: object) -> bool:
        """Return True if the kernel may write memory of an argument of another one."""
        return overlaps(argument, address_ranges(self.arguments[name] for name in self.access.writes))

    def may_use(self, argument: object) -> bool:
        """Return True if the kernel may read or write memory of an argument of another one."""
        return not self.has_all or overlaps(argument, address_ranges(self.arguments.values()))


class Launches:
    """The launches of a step, in order: those made by the thread that creates this object."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._running: list[Running] = []

    def add(
        self, kernel: str, access: KernelAccess, arguments: Mapping[str, object], *, has_all: bool = False
    ) -> None:
        """Add the next kernel.

        arguments: values by the names that `access` uses; with `has_all`, all tensors that the kernel reads
        and writes are among them, unless it makes pointers of numbers. Raises LaunchOrderError if the kernel
        reads, before it waits, what may still be written, or writes what may still be used.
        """
        for name in sorted(access.reads_early):
            for other in self._running:
                if other.may_write(arguments[name]):
                    raise LaunchOrderError(
                        f"{kernel} reads {name} before it waits: {other.kernel} may still be writing it"
                    )

        for name in sorted(access.writes_early):
            for other in self._running:
                if other.may_use(arguments[name]):
                    raise LaunchOrderError(
                        f"{kernel} writes {name} before it waits: {other.kernel} may still be using it"
                    )

        if not access.triggers_early:
            self._running.clear()
        self._running.append(Running(kernel, access, arguments, has_all and not access.has_addresses))


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


def address_ranges(arguments: Iterable[object]) -> list[AddressRange]:
    """Return the memory of the tensors among arguments."""
    return [found for each in arguments if (found := address_range(each)) is not None]


def overlaps(argument: object, ranges: Sequence[AddressRange]) -> bool:
    """Return True if a tensor has memory in one of the ranges; False for other arguments."""
    own = address_range(argument)
    return own is not None and any(own[0] < end and start < own[1] for start, end in ranges)


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


def note_kernel(
    name: str, access: KernelAccess, arguments: Mapping[str, object], *, has_all: bool = False
) -> None:
    """Add a kernel that is not Triton's, just launched, to the launches being checked.

    arguments, has_all: as of `Launches.add`.
    """
    launches: Launches | None = getattr(_current, "launches", None)
    if launches is not None:
        launches.add(name, access, arguments, has_all=has_all)


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
        access = _accesses[compiled.hash] = kept_access(ttir_of(compiled))
    arguments = {**dict(zip(kernel.arg_names, values, strict=False)), **options}
    # A tuple may have any tensor.
    has_all = not any(isinstance(value, tuple | list) for value in arguments.values())
    launches.add(kernel.__name__, access, arguments, has_all=has_all)
