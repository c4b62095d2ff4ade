"""Launches of kernels: compiled or interpreted, one after the other or overlapping.

On a GPU kernels are compiled; without one, Triton's interpreter runs them on the CPU.

Programmatic dependent launch (PDL) lets the CTAs of a kernel be placed on multiprocessors while the kernel
before it still runs. Two device functions control it:

- `wait_for_producers` blocks until every earlier kernel has finished and its writes are visible. Every CTA
  calls it before it ends, also one without any work: otherwise later kernels could start while an earlier one
  still runs. In CUDA C++, every thread does.
- `start_dependents` permits the CTAs of the next kernel to be placed: once a thread of every CTA has called
  it, or the CTA has ended. A product or another long kernel calls it when it is nearly done, since waiting
  CTAs would occupy the multiprocessors that it needs. A short kernel that always follows a long one calls it
  first, even before it waits. Kernels whose CTAs are all placed at once may call it as soon as they have
  waited, and so may one beside which the next kernel shall run; the permission takes effect when the last CTA
  has been placed.

Before it waits, a kernel may read what no kernel that may still run writes, and write what none of them uses.
Those are the kernel before it and, if that one permitted its dependents before it had waited, those before
that. Early loads bypass the L1 cache (`cache_modifier=".cg"`), which may hold earlier contents; data that
never changes, like a weight, may be read through L1.

These rules are checked when a step is captured, see launch_order.py.

The decorator of kernels that are launched: Triton's, with less time to import and to launch again.

A step launches each of its kernels once a layer, and many steps are captured when an engine starts. At every
launch, Triton finds the compiled kernel again, by what arguments are specialised on, by options, and by
constants that may have changed. Little of that differs between layers: the compiled kernel is kept under a
key that takes less time to make.

Triton reads the source of a kernel when it is decorated. Here it does so when the kernel is first used: a
process uses few of the kernels that it imports.

The decorator of functions that kernels call: Triton's, with less time to import.

Triton takes the source of a function from `inspect`, which finds its last line by tokenising it, in about
half a millisecond for one that kernels call. The last line of a function of a module is found here by its
indentation.

Keys of kernels in Triton's cache on disk: the same in every process, and prepared beside other work.

A key is a hash of a kernel's source, its constants, those of the functions that it calls, and the files of
Triton's installation.
"""

from __future__ import annotations

import inspect
import io
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
import triton.runtime.jit
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.build import platform_key
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable, JITFunction

from drift_sdk._kernels.launch.gpu_limits import gpu_limits

PACKAGE = __name__.partition(".")[0]
BEFORE = frozenset("@ \t)")
"""First characters of the lines of decorators."""
INSIDE = frozenset(" \t\r\n\f#)")
"""First characters of the lines of a function after its first `def`, of comments, and of empty lines."""
_inspect = triton.runtime.jit.inspect


def device_function(function: Callable[..., Any]) -> Any:
    """`triton.jit` for a function that kernels call. Functions that are launched have `kernel`."""
    with quick_sources():
        return triton.jit(function)


@contextmanager
def quick_sources() -> Iterator[None]:
    """Have Triton take the sources of this package's functions from `source_lines` in a `with` block.

    Other threads may do so at the same time, and take sources of other functions as ever.
    """
    module: Any = triton.runtime.jit
    module.inspect = _quick_inspect
    try:
        yield
    finally:
        module.inspect = _inspect


def source_lines(function: Any) -> tuple[list[str], int]:
    """Return what `inspect.getsourcelines` returns: the source of a function with its decorators, and the
    number of the first line.

    Found by indentation for a function of a module whose lines are indented but for those of decorators and
    the end of its signature; by `inspect` for functions that begin otherwise.
    """
    lines, index = inspect.findsource(function)
    length = 0
    while index + length < len(lines) and lines[index + length][0] in BEFORE:
        length += 1
    line = "".join(lines[index + length : index + length + 1])
    if lines[index][0] not in "@d" or not line.startswith(f"def {function.__name__}("):
        return inspect.getsourcelines(function)

    length += 1
    while index + length < len(lines) and lines[index + length][0] in INSIDE:
        length += 1
    while lines[index + length - 1].startswith("#") or lines[index + length - 1].isspace():
        length -= 1
    return lines[index : index + length], index + 1


class _QuickInspect(ModuleType):
    """The module `inspect` with quick sources of this package's functions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getsourcelines(self, function: Any) -> tuple[list[str], int]:
        is_own = str(function.__module__).partition(".")[0] == PACKAGE
        return source_lines(function) if is_own else inspect.getsourcelines(function)


_quick_inspect = _QuickInspect(inspect.__name__)


@cache
def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU. Decided when kernels are decorated."""
    return bool(triton.knobs.runtime.interpret)


def cache_folder() -> Path:
    """The folder that keeps compiled kernels from one process to the next."""
    return Path(triton.knobs.cache.dir)


def uses_pdl() -> bool:
    """Whether kernels are compiled for PDL and launched with it: on GPUs that have it, from compute
    capability 9.0 on. On others each kernel starts when the one before it has ended."""
    return not is_interpreted() and gpu_limits().has_pdl


def launch_options() -> dict[str, bool]:
    """Keyword arguments of every launch."""
    return {"launch_pdl": True} if uses_pdl() else {}


@device_function
def wait_for_producers(PDL: tl.constexpr):
    """Block until every earlier kernel has finished and its writes are visible."""
    if PDL:
        gdc_wait()


@device_function
def start_dependents(PDL: tl.constexpr):
    """Permit the next kernel's CTAs to be placed as soon as there is room."""
    if PDL:
        gdc_launch_dependents()


@device_function
def prefetch(pointers, PDL: tl.constexpr):
    """Load the 128-byte lines that a tile of pointers points into to the L2 cache, without waiting for them.

    Called before `wait_for_producers`, for data that never changes. The result of the assembly is a dummy.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


_preparing: list[threading.Thread] = []
"""The latest threads of `prepare_cache_keys`."""


def prepare_cache_keys() -> None:
    """Compute what keys of Triton's cache contain of the machine, on threads: a hash of Triton's
    installation, hundreds of megabytes, and the platform, for which Python asks another process.

    Triton keeps the results.
    """
    threads = [
        threading.Thread(target=each, name="drift-cache-keys", daemon=True)
        for each in (hash_installation, platform_key)
    ]
    for thread in threads:
        thread.start()
    _preparing[:] = threads  # started: another engine's thread may wait for them at any time


def hash_installation() -> str:
    """Return Triton's `triton_key`, for which the largest file is read at once.

    Triton reads it by the MiB, and would wait for the interpreter's lock after each. Hashing does not hold
    the lock.
    """
    module: Any = triton.runtime.cache
    module.open = _open  # instead of the built-in function
    try:
        return str(triton_key())
    finally:
        vars(module).pop("open", None)  # another thread may have hashed at the same time


class _MappedFile(io.FileIO):
    """A file for reading, of which the first read returns everything, in memory that is mapped to it."""

    def read(self, size: int | None = -1, /) -> Any:
        if self.tell() or not self.seek(0, os.SEEK_END):
            return b""

        return mmap.mmap(self.fileno(), 0, access=mmap.ACCESS_READ)


def _open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    is_library = mode == "rb" and Path(file).stem == "libtriton"
    return _MappedFile(file) if is_library else open(file, mode, *arguments, **options)


def wait_for_cache_keys() -> None:
    """Wait for the threads of `prepare_cache_keys`, if there are any."""
    for thread in _preparing:
        thread.join()


def settle_cache_key(function: Any) -> None:
    """Compute the key of a function in Triton's cache, after those of the functions that it calls.

    With Triton 3.6, a key contains the constants of a called function only if that one's key is known. Keys
    would otherwise depend on the order of computing them, and a process would not find what another one has
    compiled.
    """
    if function.hash is not None:
        return

    for name in function.fn.__code__.co_names:
        called = function.__globals__.get(name)
        if isinstance(called, JITCallable) and called is not function:
            settle_cache_key(called)
    function.cache_key  # noqa: B018  # a property that keeps its value


Observer = Callable[[Any, Any, Sequence[Any], dict[str, Any]], None]
"""Gets a kernel that was launched, what it was compiled to, and its arguments by position and by name."""

_kernels: list[Any] = []
"""All kernels of the process, by time of definition."""
_observers: list[Observer] = []
_reading = threading.RLock()
"""Held while Triton reads a kernel's source."""

DEFAULT_OPTIONS = {"enable_fp_fusion": True}
"""Options of launches that do not give them. Triton's own default depends on its version and on the
environment, and bits would depend on it."""
ALIGNMENT = 16
"""Bytes: Triton specialises kernels on pointers that are multiples of it."""


def kernel(
    function: Callable[..., None] | None = None,
    *,
    do_not_specialize: Sequence[str] = (),
    do_not_specialize_on_alignment: Sequence[str] = (),
) -> Any:
    """`triton.jit` for a function that is launched. Functions that kernels call have `device_function`.

    do_not_specialize, do_not_specialize_on_alignment: names of arguments, as for Triton.
    """
    options = {
        "do_not_specialize": do_not_specialize,
        "do_not_specialize_on_alignment": do_not_specialize_on_alignment,
    }

    def decorated(function: Callable[..., None]) -> Any:
        made = (triton.jit if is_interpreted() else RepeatedKernel)(function, **options)
        _kernels.append(made)
        return made

    return decorated if function is None else decorated(function)


@contextmanager
def whole_cache_entries() -> Iterator[None]:
    """Have Triton's cache keep all of what is compiled inside, also with TRITON_STORE_BINARY_ONLY."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.store_binary_only = False
        yield


def launched_kernels() -> list[Any]:
    """Return all kernels that imported modules define by the decorator `kernel`."""
    return list(_kernels)


@contextmanager
def observed_launches(observer: Observer) -> Iterator[None]:
    """Have an observer called after each launch of a compiled kernel, by any thread, in a `with` block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class RepeatedKernel(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A kernel whose compiled variants are found by a key of its own, once Triton has launched them.

    The key has what Triton may specialise on: of tensors the type and whether the pointer is aligned, of
    other arguments and of options the value. Constants of modules are not in it: they are constant.
    """

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        # Without these two, those of the class would be found.
        self.__doc__, self.__module__ = function.__doc__, function.__module__
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._init_triton: Callable[[], None] | None = partial(super().__init__, function, **options)

    def __getattr__(self, name: str) -> Any:
        """An attribute that Triton's constructor sets, which is called when the first one is asked for."""
        with _reading:
            if (init := self.__dict__.get("_init_triton")) is not None:
                self._init_triton = None  # the constructor may ask for attributes, too
                try:
                    with quick_sources():
                        init()
                except BaseException:
                    self._init_triton = init
                    raise
        return super().__getattribute__(name)

    def run(self, *values: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        """Launch the kernel and return it compiled; with `warmup`, only compile it.

        values, options: arguments by position; arguments by name, and Triton's options of the launch. All
        arguments are given.
        """
        if warmup:
            settle_cache_key(self)
            return super().run(*values, grid=grid, warmup=True, **DEFAULT_OPTIONS | options)

        key = (torch.cuda.current_device(), *launch_key(values, options))
        compiled = self._compiled.get(key)
        if compiled is None:
            settle_cache_key(self)
            compiled = super().run(*values, grid=grid, warmup=False, **DEFAULT_OPTIONS | options)
            if compiled is None:  # a hook of Triton's has kept it from being compiled
                return None

            self._compiled[key] = compiled
        else:
            named = [options[name] for name in self.arg_names[len(values) :]]
            compiled[(*grid, 1, 1)[:3]](*values, *named)
        # Nothing is launched for an empty grid. Other threads may change the observers.
        for observe in tuple(_observers) if all(grid) else ():
            observe(self, compiled, values, options)
        return compiled


def launch_key(values: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return what identifies the compiled kernel of a launch, among those for one device."""
    given = (*values, *options.values())
    kinds = tuple(map(type, given))  # 1 equals True
    tensors, floats, others = places_of(kinds)
    pointers = [given[place] for place in tensors]
    return (
        *options,
        kinds,
        others(given),
        *[repr(given[place]) for place in floats],  # 0.0 equals -0.0
        *[tensor.dtype for tensor in pointers],
        *[tensor.data_ptr() % ALIGNMENT == 0 for tensor in pointers],
    )


@cache
def places_of(kinds: tuple[type, ...]) -> tuple[list[int], list[int], Callable[[Sequence[Any]], Any]]:
    """Return the places of tensors and of floats among arguments of these types, and a function that returns
    the other arguments."""
    tensors = [place for place, kind in enumerate(kinds) if issubclass(kind, Tensor)]
    floats = [place for place, kind in enumerate(kinds) if kind is float]
    others = [place for place in range(len(kinds)) if place not in (*tensors, *floats)]
    return tensors, floats, itemgetter(*others) if others else len
