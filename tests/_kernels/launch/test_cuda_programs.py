"""CUDA C++ programs as cuda.core takes them. Compiling them needs NVRTC: test_cuda_launch_order.py."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.core.utils import make_program_cache_key
from ptx_access import has_nvrtc

from drift_sdk import _kernels
from drift_sdk._kernels.launch import cuda_programs
from drift_sdk._kernels.launch.cuda_programs import (
    Boxes,
    CudaKernel,
    ProgramToCompile,
    compile_kernel,
    launch_kernel,
    program_options,
)
from drift_sdk._kernels.launch.parallel_compile import missing_kernels, recorded_kernels

FOLDER = Path(_kernels.__file__).parent
PROGRAMS = sorted(
    str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.cu") if "__global__" in file.read_text("utf-8")
)


@pytest.mark.parametrize("file", PROGRAMS)
def test_every_program_has_a_key_of_its_own_on_disk(file: str) -> None:
    def key(kernel: CudaKernel, arch: str = "90") -> bytes:
        made: bytes = make_program_cache_key(
            code=kernel.source(),
            code_type="c++",
            options=program_options(kernel, arch),
            target_type="cubin",
        )
        return made

    files = ("launch/hopper.cu", file)
    kernels = [CudaKernel(files, "product", macros) for macros in ((), (("ROWS", "8"),), (("ROWS", "16"),))]
    keys = {key(kernel) for kernel in (*kernels, CudaKernel((file,), "product", ()))}
    assert len(keys | {key(kernels[0], "80")}) == 5
    assert key(CudaKernel(files, "product", ())) == key(kernels[0])


ADD = CudaKernel(("common/wait.cu",), "add", (("ROWS", "8"),))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Kernels that are loaded, by name, and the architectures that they are compiled for. Compiled programs
    are kept in a folder of their own."""
    loaded: list[tuple[str, str]] = []

    class Compiled:
        def __init__(self, arch: str) -> None:
            self.arch = arch

        def get_kernel(self, name: str) -> str:
            loaded.append((name, self.arch))
            return f"{name} for {self.arch}"

    monkeypatch.setattr(cuda_programs, "Device", lambda index: SimpleNamespace(arch=str(80 + 10 * index)))
    monkeypatch.setattr(cuda_programs, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(CudaKernel, "source", lambda kernel: f"text of {kernel.name}")
    monkeypatch.setattr(ProgramToCompile, "compile", lambda program: Compiled(program.arch))
    cuda_programs._loaded.cache_clear()
    yield loaded
    cuda_programs._loaded.cache_clear()


def test_kernels_are_loaded_once_for_each_gpu(programs: list[tuple[str, str]]) -> None:
    assert [compile_kernel(ADD, index, 0) for index in (0, 1, 0)] == [
        "add for 80",
        "add for 90",
        "add for 80",
    ]
    assert programs == [("add", "80"), ("add", "90")]


def test_programs_of_recorded_launches_are_not_compiled(programs: list[tuple[str, str]]) -> None:
    with recorded_kernels() as kernels:
        for index in (1, 1, 0):
            assert compile_kernel(ADD, index, 0) is None
            launch_kernel(None, (1,), 32, 0, 1)
    assert kernels == [ProgramToCompile(ADD, "90"), ProgramToCompile(ADD, "80")]
    assert programs == []
    assert pickle.loads(pickle.dumps(kernels)) == kernels


def test_a_program_is_compiled_if_it_is_on_disk(
    programs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, other = ProgramToCompile(ADD, "90"), ProgramToCompile(ADD, "80")
    assert missing_kernels([program, other]) == [program, other]
    cuda_programs._programs().update({program._key: b"code"})
    assert missing_kernels([program, other]) == [other]

    def fail(*_: object, **__: object) -> None:
        raise PermissionError("a folder that cannot be made")

    monkeypatch.setattr(cuda_programs, "FileStreamProgramCache", fail)
    assert missing_kernels([program, other]) == [], "a worker could not keep it"


@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC")
def test_a_compiled_program_is_found_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_programs, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(CudaKernel, "source", lambda kernel: 'extern "C" __global__ void add() {}')
    program = ProgramToCompile(ADD, "90")
    assert not program.is_compiled
    program.make()
    assert program.is_compiled
    assert not ProgramToCompile(ADD, "80").is_compiled


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of launches that are made, without the stream and the kernel."""
    found: list[tuple[Any, ...]] = []

    class View:
        """A view of memory of which a map can be made anywhere."""

        def __init__(self, interface: dict[str, Any]) -> None:
            self.interface = interface

        @classmethod
        def from_cuda_array_interface(cls, place: Any, stream: int) -> View:
            return cls(place.__cuda_array_interface__)

        def as_tensor_map(self, *, options: Any) -> tuple[Any, ...]:
            return self.interface["data"][0], self.interface["shape"], options.box_dim, object()

    class CurrentStream:
        cuda_stream = 0

    monkeypatch.setattr(cuda_programs, "StridedMemoryView", View)
    monkeypatch.setattr(cuda_programs, "Stream", type("Stream", (), {"from_handle": lambda handle: None}))
    monkeypatch.setattr(cuda_programs, "launch", lambda _stream, *arguments: found.append(arguments))
    monkeypatch.setattr(cuda_programs, "uses_pdl", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", CurrentStream)
    return found


def test_maps_of_the_same_place_are_made_once(launched: list[tuple[Any, ...]]) -> None:
    matrix = torch.zeros(64, 128, dtype=torch.bfloat16)
    for boxes in (
        Boxes(matrix, 8, 64),
        Boxes(matrix.view(64, 128), 8, 64),
        Boxes(matrix, 16, 64),
        Boxes(matrix[32:], 8, 64),
        Boxes(matrix[:32], 8, 64),
    ):
        launch_kernel(None, (1,), 32, 0, boxes)

    maps = [arguments[-1] for arguments in launched]
    address = matrix.data_ptr()
    assert [each[:3] for each in maps] == [
        (address, (64, 128), (8, 64)),
        (address, (64, 128), (8, 64)),
        (address, (64, 128), (16, 64)),
        (address + 32 * 128 * 2, (32, 128), (8, 64)),
        (address, (32, 128), (8, 64)),
    ]
    assert maps[0] is maps[1]


def test_kept_maps_do_not_keep_memory(launched: list[tuple[Any, ...]]) -> None:
    matrix = torch.zeros(8, 64, dtype=torch.bfloat16)
    storage = weakref.ref(matrix.untyped_storage())
    launch_kernel(None, (1,), 32, 0, Boxes(matrix, 8, 64))
    assert launched[0][-1][0] == matrix.data_ptr()
    assert storage() is not None
    del matrix
    gc.collect()
    assert storage() is None


def test_launches_with_other_sizes_have_other_settings(launched: list[tuple[Any, ...]]) -> None:
    for sizes in (((1, 2), 32, 0), ((2, 1), 32, 0), ((1, 2), 64, 0), ((1, 2), 32, 8)):
        launch_kernel(None, *sizes, 1)

    settings = [arguments[0] for arguments in launched]
    assert [(each.grid, each.block, each.shmem_size) for each in settings] == [
        ((1, 2, 1), (32, 1, 1), 0),
        ((2, 1, 1), (32, 1, 1), 0),
        ((1, 2, 1), (64, 1, 1), 0),
        ((1, 2, 1), (32, 1, 1), 8),
    ]
