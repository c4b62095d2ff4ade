"""Reads and writes of a compiled kernel of Triton through its arguments, from its Triton IR (TTIR).
launch_order.py checks with them that no kernel reads what may still be written, or writes what is still used.

The result of a scan is kept on disk, for later starts.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from triton.runtime.cache import get_cache_manager

__all__ = ["KernelAccess", "LaunchOrderError", "access_of", "kept_access"]

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
