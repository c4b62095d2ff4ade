"""CUDA C++ kernels of this package: compiled by NVRTC, kept on disk, and launched in torch's stream."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import c_float, c_int
from functools import cache, lru_cache
from importlib import resources
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver
from cuda.core import (
    Device,
    LaunchConfig,
    Program,
    ProgramOptions,
    Stream,
    TensorMapDescriptor,
    TensorMapDescriptorOptions,
    launch,
)
from cuda.core.utils import FileStreamProgramCache, StridedMemoryView, make_program_cache_key
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.launch.kernel import cache_folder, uses_pdl
from drift_sdk._kernels.launch.parallel_compile import is_recording, record

log = logging.getLogger("drift_sdk")

MAX_CACHE_BYTES = 2**28
"""Compiled programs take about 50 KB each; those not read for longest are removed."""

MAX_KEPT = 1024
"""Number of settings of launches, and of maps of matrices, that are kept: many graphs share them."""


class CudaKernel(Struct, frozen=True):
    """A kernel of a program that is compiled for chosen macros.

    files: the program, files of `_kernels` one after the other, like "launch/hopper.cu". name: of the kernel,
    which is declared as extern "C". macros: names and values.
    """

    files: tuple[str, ...]
    name: str
    macros: tuple[tuple[str, str], ...]

    def source(self) -> str:
        """The text of the program."""
        folder = resources.files("drift_sdk._kernels")
        return "".join(folder.joinpath(file).read_text("utf-8") for file in self.files)


@cache
def has_compiler() -> bool:
    """Whether NVRTC is installed; warns once if it is not."""
    try:
        program = Program('extern "C" __global__ void nothing() {}', "c++")
    except Exception as error:  # cuda.pathfinder raises its own errors
        log.warning("CUDA C++ kernels are not used, which is slower: %s", str(error).splitlines()[0])
        return False

    program.close()
    return True


class ProgramToCompile(Struct, frozen=True):
    """A program that another process may compile, see parallel_compile.py. arch: of the GPU, like "90"."""

    kernel: CudaKernel
    arch: str

    @property
    def is_compiled(self) -> bool:
        """True if the compiled program is on disk, or cannot be kept there."""
        try:
            return _programs().get(self._key) is not None
        except OSError:
            return True

    def make(self) -> None:
        self.compile()

    def compile(self) -> Any:
        """The program's code, from disk or kept there."""
        program = Program(self.kernel.source(), "c++", program_options(self.kernel, self.arch))
        try:
            return _compiled(program)
        finally:
            program.close()

    @property
    def _key(self) -> bytes:
        """The key of the compiled program on disk, as `Program.compile` makes it."""
        key: bytes = make_program_cache_key(
            code=self.kernel.source(),
            code_type="c++",
            options=program_options(self.kernel, self.arch),
            target_type="cubin",
        )
        return key


def compile_kernel(kernel: CudaKernel, device_index: int, shared_bytes: int) -> Any:
    """The kernel for a GPU, ready for launches with at most `shared_bytes` of dynamic shared memory. Where
    launches are only recorded (parallel_compile.py), its program is recorded too, and None is returned.

    A program is looked up on disk by its text, its options and the compiler's version.
    """
    if is_recording():
        record(ProgramToCompile(kernel, Device(device_index).arch))
        return None

    return _loaded(kernel, device_index, shared_bytes)


@cache
def _loaded(kernel: CudaKernel, device_index: int, shared_bytes: int) -> Any:
    program = ProgramToCompile(kernel, Device(device_index).arch)
    compiled = program.compile().get_kernel(kernel.name)
    if shared_bytes:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, compiled.handle, device_index)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{kernel.files[-1]}: {shared_bytes} bytes of shared memory: {error.name}")

    return compiled


def program_options(kernel: CudaKernel, arch: str) -> ProgramOptions:
    """How a program is compiled. arch: of the GPU, like "90".

    The name has no folder: NVRTC looks for included files there, and cuda.core would not keep it.
    """
    return ProgramOptions(
        name=PurePosixPath(kernel.files[-1]).name,
        std="c++17",
        arch=f"sm_{arch}a" if int(arch) >= 90 else f"sm_{arch}",  # "a": with wgmma
        define_macro=list(kernel.macros) or None,
    )


def _compiled(program: Program) -> Any:
    """The program's code, from disk or kept there. A folder that cannot be written is no error."""
    try:
        return program.compile("cubin", cache=_programs())
    except OSError as error:
        log.warning("compiled CUDA programs cannot be kept on disk: %s", error)
        return program.compile("cubin")


def _programs() -> FileStreamProgramCache:
    """Compiled programs on disk. Raises OSError if the folder cannot be made."""
    return FileStreamProgramCache(cache_folder() / "cuda_programs", max_size_bytes=MAX_CACHE_BYTES)


class Boxes(NamedTuple):
    """A matrix of which a kernel copies boxes to shared memory, by the copy engine of compute capability 9.0.

    A box has `num_columns` columns, at most 64, of `num_rows` rows, swizzled as wgmma reads them. It is not
    larger than the matrix; where it lies outside, numbers become zeros. matrix: bfloat16, contiguous, at a
    multiple of 16 bytes.
    """

    matrix: Tensor
    num_rows: int
    num_columns: int


Argument = Tensor | Boxes | int | float | None


def launch_kernel(
    compiled: Any,
    grid: Sequence[int],
    num_threads: int,
    shared_bytes: int,
    *arguments: Argument,
    cluster: int | None = None,
) -> None:
    """Launch in torch's current stream, with programmatic dependent launch where the GPU has it. Nothing is
    launched where launches are only recorded (parallel_compile.py).

    grid: numbers of CTAs; of clusters of `cluster` CTAs where that is given.
    arguments: tensors as pointers, None as a null pointer, numbers as int and float, boxes as a map.
    """
    if not is_recording():
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        config = _config(tuple(grid), num_threads, shared_bytes, cluster, uses_pdl())
        launch(stream, config, compiled, *map(_argument, arguments))


@lru_cache(MAX_KEPT)
def _config(
    grid: tuple[int, ...], num_threads: int, shared_bytes: int, cluster: int | None, is_dependent: bool
) -> LaunchConfig:
    return LaunchConfig(
        grid=grid,
        cluster=cluster,
        block=num_threads,
        shmem_size=shared_bytes,
        programmatic_stream_serialization=is_dependent,
    )


class _Place(NamedTuple):
    """The place of a matrix of 16-bit numbers. It does not keep the memory allocated, as a tensor would."""

    device: int
    address: int
    shape: tuple[int, ...]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # There is no type for bfloat16.
        return {"version": 3, "shape": self.shape, "typestr": "<u2", "data": (self.address, False)}


@lru_cache(MAX_KEPT)
def _map(place: _Place, num_rows: int, num_columns: int) -> TensorMapDescriptor:
    """The map of a matrix's boxes. It has the address, and stays valid for what is at that address later."""
    options = TensorMapDescriptorOptions(box_dim=(num_rows, num_columns))
    options.swizzle = type(options.swizzle).SWIZZLE_128B  # an enum without a public name
    view = StridedMemoryView.from_cuda_array_interface(place, -1)
    return view.as_tensor_map(options=options)


def _argument(value: Argument) -> Any:
    if value is None:
        return 0

    if isinstance(value, Tensor):
        return value.data_ptr()

    if isinstance(value, Boxes):
        matrix = value.matrix
        place = _Place(matrix.get_device(), matrix.data_ptr(), tuple(matrix.shape))
        return _map(place, value.num_rows, value.num_columns)

    return c_float(value) if isinstance(value, float) else c_int(value)
