"""CUDA C++ programs as cuda.core takes them. Compiling them needs NVRTC: test_cuda_launch_order.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda.core.utils import make_program_cache_key

from drift_sdk import _kernels
from drift_sdk._kernels.common.cuda_programs import CudaKernel, program_options

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

    files = ("common/hopper.cu", file)
    kernels = [CudaKernel(files, "product", macros) for macros in ((), (("ROWS", "8"),), (("ROWS", "16"),))]
    keys = {key(kernel) for kernel in (*kernels, CudaKernel((file,), "product", ()))}
    assert len(keys | {key(kernels[0], "80")}) == 5
    assert key(CudaKernel(files, "product", ())) == key(kernels[0])
