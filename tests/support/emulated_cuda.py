"""Programs in CUDA C++ compiled for the CPU, where their threads run one after the other."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["has_host_compiler", "launch_emulated"]

HEADER = Path(__file__).with_name("emulated_cuda.h")
FUNCTION = r"^(?:template <[^\n]*>\n)?__device__ __forceinline__ [\w ]+?[ *](\w+)\("


def has_host_compiler() -> bool:
    return shutil.which("g++") is not None


def launch_emulated(
    folder: Path,
    files: Sequence[str],
    kernel: str,
    macros: Mapping[str, int],
    grid: tuple[int, int],
    num_threads: int,
    arguments: Sequence[Tensor | int],
) -> None:
    """Run a kernel of a program of `_kernels` on tensors of the CPU. folder: for what is compiled."""
    run = _compiled(folder, tuple(files), kernel, tuple(macros.items()))
    values: list[Any] = [
        ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else ctypes.c_int(each)
        for each in arguments
    ]
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    run(*grid, num_threads, places)


@cache
def _compiled(folder: Path, files: tuple[str, ...], kernel: str, macros: tuple[tuple[str, int], ...]) -> Any:
    root = resources.files("drift_sdk._kernels")
    program = "".join(_without_assembly(root.joinpath(file).read_text("utf-8")) for file in files)
    defined = "".join(f"#define {name} {value}\n" for name, value in macros)
    parameters = re.search(rf"\b{kernel}\((.*?)\) {{", program, re.DOTALL)
    assert parameters is not None
    types = [each.strip().rpartition(" ")[0] for each in parameters[1].replace("\n", " ").split(",")]
    given = ", ".join(f"*static_cast<{kind}*>(arguments[{place}])" for place, kind in enumerate(types))
    entry = (
        'extern "C" void run(int x, int y, int threads, void** arguments) {\n'
        f"  emulated::run(x, y, threads, [&] {{ {kernel}({given}); }});\n}}\n"
    )
    name = f"{kernel}-{abs(hash((program, macros)))}"
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(f'{defined}#include "{HEADER}"\n{program}{entry}')
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library)).run


def _without_assembly(text: str) -> str:
    """The text without functions that have assembly in them: the header has its own."""
    kept, end = [], 0
    for found in re.finditer(FUNCTION, text, re.MULTILINE):
        if found.start() < end:
            continue

        close = text.index("{", found.end())
        depth = 1
        while depth:
            close += 1
            depth += {"{": 1, "}": -1}.get(text[close], 0)
        if re.search(r"\basm\b|__cvta", text[found.start() : close]):
            kept.append(text[end : found.start()])
            end = close + 1
    return "".join([*kept, text[end:]])
