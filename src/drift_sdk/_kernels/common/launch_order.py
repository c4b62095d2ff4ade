"""A check of programmatic dependent launch: before it waits, no kernel reads what may still be written, and
none writes what may still be used.

The CTAs of a kernel may be placed as soon as all CTAs of the kernel before it have permitted their dependents
to start. What a kernel reads before `wait_for_producers` must therefore not be written by any kernel that may
still be running, and what it writes then must not be read or written by them. Those are the kernel before it;
if that one permitted its dependents to start before it had itself waited, also the kernel before that; and so
on.

Which pointer arguments a kernel reads and writes, and which before it waits, is taken from its Triton IR
(kernel_access.py); which tensors they are, from the launches of a step. CUDA C++ kernels declare theirs, with
`note_kernel`; tests hold the declarations to their PTX. Kernels of torch wait for everything before them,
and let nothing start before they end: `note_library_kernel` adds them to the order of launches. What a kernel
writes that is not noted is not checked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.kernel import observed_launches
from drift_sdk._kernels.common.kernel_access import KernelAccess, LaunchOrderError, kept_access
from drift_sdk._kernels.common.launching import is_interpreted, uses_pdl

__all__ = [
    "Launches",
    "checked_launches",
    "note_kernel",
    "note_library_kernel",
]

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
        access = _accesses[compiled.hash] = kept_access(compiled.asm["ttir"])
    arguments = {**dict(zip(kernel.arg_names, values, strict=False)), **options}
    # A tuple may have any tensor.
    has_all = not any(isinstance(value, tuple | list) for value in arguments.values())
    launches.add(kernel.__name__, access, arguments, has_all=has_all)
