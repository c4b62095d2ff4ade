"""CUDA C++ kernels of this package: compiled by NVRTC, kept on disk, and launched in torch's stream."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int
from functools import cache
from importlib import resources
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch
from cuda.core.utils import FileStreamProgramCache
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.launching import cache_folder

__all__ = ["CudaKernel", "compile_program", "launch_kernel", "load_kernel"]

MAX_CACHE_BYTES = 2**28
"""Compiled programs take about 50 KB each; those not read for longest are removed."""


class CudaKernel(Struct, frozen=True):
    """A kernel of a program that is compiled for chosen macros.

    file: the program, a file of the package `drift_sdk._kernels.quantised`. name: of the kernel, which is
    declared as extern "C". macros: names and values.
    """

    file: str
    name: str
    macros: tuple[tuple[str, str], ...]


def compile_program(kernel: CudaKernel, arch: str) -> Any:
    """The program of a kernel, compiled for an architecture like "90a".

    It is looked up on disk by its text, its options and the compiler's version.
    """
    source = resources.files("drift_sdk._kernels.quantised").joinpath(kernel.file).read_text("utf-8")
    options = ProgramOptions(
        name=kernel.file, std="c++17", arch=f"sm_{arch}", define_macro=list(kernel.macros)
    )
    programs = FileStreamProgramCache(cache_folder() / "cuda_programs", max_size_bytes=MAX_CACHE_BYTES)
    program = Program(source, "c++", options)
    try:
        return program.compile("cubin", cache=programs)
    finally:
        program.close()


@cache
def load_kernel(kernel: CudaKernel, device_index: int, shared_bytes: int) -> Any:
    """The kernel on a GPU, ready for launches with at most `shared_bytes` of dynamic shared memory."""
    loaded = compile_program(kernel, f"{Device(device_index).arch}a").get_kernel(kernel.name)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, loaded.handle, device_index)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{kernel.file}: {shared_bytes} bytes of shared memory: {error.name}")

    return loaded


def launch_kernel(
    kernel: Any, grid: Sequence[int], num_threads: int, shared_bytes: int, *arguments: Tensor | int | None
) -> None:
    """Launch in torch's current stream, with programmatic dependent launch.

    arguments: tensors as pointers, None as a null pointer, numbers as int.
    """
    config = LaunchConfig(
        grid=tuple(grid), block=num_threads, shmem_size=shared_bytes, programmatic_stream_serialization=True
    )
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    launch(stream, config, kernel, *map(_value, arguments))


def _value(argument: Tensor | int | None) -> object:
    """An argument of a kernel as cuda.core takes it: a pointer as int, an int of C as c_int."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()

    return 0 if argument is None else c_int(argument)
