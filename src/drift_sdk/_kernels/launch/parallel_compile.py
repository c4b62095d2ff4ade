"""Compilation of kernels by several processes, before they are launched.

Triton holds the interpreter's lock while it compiles, so threads would not compile at the same time.
`recorded_kernels` finds out which kernels a piece of code would launch, without compiling or launching them.
`compile_kernels` has worker processes compile those that are not in a cache on disk, from which the launches
then load them. Nothing depends on it: a kernel that no worker has compiled is compiled when it is launched.

Kernels of Triton are recorded here, programs in CUDA C++ by cuda_programs.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import triton
from msgspec import Struct
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, get_cache_key, make_backend
from triton.runtime.cache import get_cache_manager

from drift_sdk._kernels.launch.kernel import (
    launch_key,
    launched_kernels,
    settle_cache_key,
    wait_for_cache_keys,
    whole_cache_entries,
)

log = logging.getLogger("drift_sdk")

MAX_PROCESSES = 16
WORKER = "drift_sdk._kernels.launch.compile_worker"
DONE = b"."

_recording = threading.local()
_recording_lock = threading.Lock()


class Compilation(Protocol):
    """A kernel or a program that a worker may compile. It is pickled, and its `repr` tells it from others."""

    @property
    def is_compiled(self) -> bool:
        """True if the result is in the cache on disk."""

    def make(self) -> None:
        """Compile into the cache on disk."""


class KernelToCompile(Struct, frozen=True, kw_only=True):
    """Arguments of `triton.compile` for a kernel.

    module, name: of the kernel. signature: types by argument. constants: of its constexpr arguments, by path.
    attributes: such as divisibility, by path. backend, arch, warp_size: of the target. options: of the
    launch.
    """

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    backend: str
    arch: int
    warp_size: int
    options: dict[str, Any]

    @property
    def target(self) -> GPUTarget:
        return GPUTarget(self.backend, self.arch, self.warp_size)

    def source(self) -> ASTSource:
        """Return what Triton compiles; imports the kernel's module."""
        kernel = getattr(sys.modules[self.module], self.name)
        settle_cache_key(kernel)
        return ASTSource(kernel, self.signature, self.constants, self.attributes)

    def cache_file(self) -> str | None:
        """Return the path of the compiled kernel's metadata in Triton's cache; None if it is not compiled."""
        source, backend = self.source(), make_backend(self.target)
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        name = f"{source.name[:150]}.json"
        group = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name)
        return None if group is None else group.get(name)

    @property
    def is_compiled(self) -> bool:
        return self.cache_file() is not None

    def make(self) -> None:
        importlib.import_module(self.module)
        self.compile_launcher(self.compile())

    def compile(self) -> Any:
        """Compile the kernel into Triton's cache, and return it."""
        with whole_cache_entries():
            return triton.compile(self.source(), target=self.target, options=dict(self.options))

    def compile_launcher(self, compiled: Any) -> None:
        """Compile what launches the compiled kernel into Triton's cache: a module in C for each kernel with
        Triton 3.6, nothing with later versions, which would only start the GPU's driver in this process."""
        from triton.backends.nvidia import driver

        if hasattr(driver, "make_launcher"):
            driver.CudaLauncher(self.source(), compiled.metadata)


def is_recording() -> bool:
    """Whether this thread is inside `recorded_kernels`, where launches of this package compute nothing."""
    return getattr(_recording, "found", None) is not None


def record(compilation: Compilation) -> None:
    """Add what a launch needs to those that this thread records; see `is_recording`."""
    _recording.found.append(compilation)


@contextlib.contextmanager
def recorded_kernels() -> Iterator[list[Compilation]]:
    """Record the launches that this thread makes inside a `with` block instead of compiling and starting
    them.

    Yields the kernels of Triton that this process has not compiled or loaded yet, and all programs, each once
    when the block has ended. Kernels of torch run as always.
    """
    found: list[Compilation] = []
    kernels = launched_kernels()
    with _recording_lock:
        hook_before = triton.knobs.runtime.jit_cache_hook
        _recording.found = found
        for kernel in kernels:
            kernel.run = _record_or_run(kernel)
        triton.knobs.runtime.jit_cache_hook = _note_compilation(hook_before)
        try:
            yield found
        finally:
            triton.knobs.runtime.jit_cache_hook = hook_before
            for kernel in kernels:
                del kernel.run
            _recording.found = None
    found[:] = _unique(found)


def _record_or_run(kernel: Any) -> Callable[..., Any]:
    """What launches a kernel meanwhile. Layers and steps repeat launches, and Triton takes long to find out
    what it would compile, so it is asked once for each."""
    run, noted = type(kernel).run, set[tuple[Any, ...]]()

    def recorded(*values: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if warmup or not is_recording():
            return run(kernel, *values, grid=grid, warmup=warmup, **options)

        key = (triton.runtime.driver.active.get_current_device(), *launch_key(values, options))
        if key not in noted:
            run(kernel, *values, grid=grid, warmup=True, **options)
            noted.add(key)
        return None

    return recorded


def _note_compilation(hook_before: Any) -> Callable[..., Any]:
    """A hook that Triton calls before it compiles a kernel. True: the kernel is not compiled."""

    def hook(**found: Any) -> Any:
        if not is_recording():
            return hook_before(**found) if hook_before is not None else None

        details, target = found["compile"], triton.runtime.driver.active.get_current_target()
        stored = json.loads(details["specialization_data"])
        options = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in stored["options"].items()
        }
        record(
            KernelToCompile(
                module=found["fn"].module,
                name=found["fn"].jit_function.__name__,
                signature=details["signature"],
                constants=details["constants"],
                attributes=details["configs"][0],
                backend=target.backend,
                arch=target.arch,
                warp_size=target.warp_size,
                options=options,
            )
        )
        return True

    return hook


def missing_kernels(kernels: Sequence[Compilation]) -> list[Compilation]:
    """Return those of the kernels that are not in a cache on disk, each once."""
    wait_for_cache_keys()
    return [kernel for kernel in _unique(kernels) if not kernel.is_compiled]


def _unique(kernels: Sequence[Compilation]) -> list[Compilation]:
    """Each kernel once, by its `repr`: constants may be of types without a hash."""
    return list({repr(kernel): kernel for kernel in kernels}.values())


def compile_kernels(
    kernels: Sequence[Compilation],
    *,
    num_processes: int | None = None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Have worker processes compile kernels into the caches on disk, and wait for them.

    num_processes: None: one for each CPU that this process may use, 16 at most. on_progress: called on this
    thread with the fraction that is done. Nothing is raised for a kernel that does not compile, or for
    workers that cannot be started.
    """
    if not kernels or not sys.executable:
        return

    most = min(available_cpus(), MAX_PROCESSES) if num_processes is None else num_processes
    todo: queue.SimpleQueue[Compilation] = queue.SimpleQueue()
    for kernel in kernels:
        todo.put(kernel)
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    with ThreadPoolExecutor(min(most, len(kernels)), thread_name_prefix="drift-compile") as threads:
        workers = [threads.submit(_feed_worker, todo, done) for _ in range(min(most, len(kernels)))]
        num_done = 0
        while num_done < len(kernels) and not all(worker.done() for worker in workers):
            with contextlib.suppress(queue.Empty):
                done.get(timeout=0.1)
                num_done += 1
                on_progress(num_done / len(kernels))


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _feed_worker(todo: queue.SimpleQueue[Compilation], done: queue.SimpleQueue[None]) -> None:
    """Start a worker and have it compile one kernel after the other, until there is none left."""
    # The path is that of this process, and nothing of the working directory comes before it.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(triton.knobs.cache.dir),
    }
    command = [sys.executable, "-P", "-m", WORKER]
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        log.debug("a worker that compiles kernels cannot be started: %s", error)
        return

    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            while not todo.empty():
                pickle.dump(todo.get_nowait(), process.stdin)
                process.stdin.flush()
                if process.stdout.read(1) != DONE:
                    break
                done.put(None)
        except (OSError, queue.Empty, pickle.PicklingError, TypeError, AttributeError) as error:
            log.debug("a worker that compiles kernels has ended: %r", error)
        finally:
            process.stdin.close()
