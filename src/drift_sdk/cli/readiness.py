"""The commands `doctor`, `inspect` and `warm`, for use before a model is served.

`doctor` examines the machine and reports what an engine would find there. `inspect` reports whether a model
can be served on this machine, and what it takes. `warm` compiles the kernels that serving a model needs.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Struct

from drift_sdk.cli.engine_start import hide_progress, show_progress
from drift_sdk.config import EngineConfig
from drift_sdk.engine import Engine, inspect
from drift_sdk.events import Progress

REQUIRED = (
    *("torch", "anyio", "msgspec", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "gguf"),
    *("psutil", "pyyaml"),
)
"""Packages that every engine needs."""
FOR_GPU = ("triton", "cuda-core", "cuda-bindings") if sys.platform == "linux" else ()
"""Packages that an engine on a GPU needs."""
OPTIONAL = {
    "llguidance": "grammar",
    "prometheus-client": "metrics",
    "starlette": "openai",
    "uvicorn": "openai",
}
"""Packages that some requests need, and the extra that installs each."""
MIN_TORCH = (2, 11)
DRIVER_FILE = Path("/proc/driver/nvidia/version")
GIB = 2**30


class Device(Struct, frozen=True, kw_only=True):
    """A GPU as torch sees it. free_memory and total_memory are in bytes; compute_capability is such as
    "9.0"."""

    name: str
    compute_capability: str
    free_memory: int
    total_memory: int


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The findings of `examine`.

    drift_sdk:       version of the installed package; None if it is not installed.
    python:          version of Python.
    platform:        operating system and architecture.
    torch:           version of torch; None if it is not installed.
    torch_cuda:      version of CUDA that torch was built with; None without CUDA, or without torch.
    cuda_driver:     version of the NVIDIA driver; None if there is none.
    devices:         GPUs that torch sees.
    free_memory:     bytes of main memory that are available; None if the system does not tell.
    packages:        version of each package that an engine needs or can use; None if it is not installed.
    executor:        the executor that executor="auto" chooses; None if it cannot be determined.
    executor_reason: why.
    problems:        what keeps an engine from running; empty if nothing does.
    notes:           what does not keep an engine from running and is worth knowing.
    """

    drift_sdk: str | None
    python: str
    platform: str
    torch: str | None
    torch_cuda: str | None
    cuda_driver: str | None
    devices: list[Device]
    free_memory: int | None
    packages: dict[str, str | None]
    executor: str | None
    executor_reason: str
    problems: list[str]
    notes: list[str]

    @property
    def is_usable(self) -> bool:
        """Whether an engine can run here."""
        return not self.problems

    def text(self) -> str:
        """The findings, one a line."""
        driver = self.cuda_driver or "none"
        devices = [
            f"{device.name}, compute {device.compute_capability}, "
            f"{device.free_memory / GIB:.1f} of {device.total_memory / GIB:.1f} GiB free"
            for device in self.devices
        ]
        memory = f"{self.free_memory / GIB:.1f} GiB free" if self.free_memory is not None else "unknown"
        rows = [
            ("drift_sdk", self.drift_sdk or "not installed"),
            ("Python", self.python),
            ("platform", self.platform),
            ("torch", f"{self.torch or 'missing'} (CUDA {self.torch_cuda or 'not built in'})"),
            ("CUDA driver", driver),
            *((f"GPU {index}", line) for index, line in enumerate(devices)),
            ("memory", memory),
            *((name, version or "missing") for name, version in self.packages.items() if name != "torch"),
            ("executor", f"{self.executor or 'none'} ({self.executor_reason})"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines.append("ready to run" if self.is_usable else "not usable")
        return "\n".join(lines)


def examine() -> Diagnosis:
    """Examine Python, packages, driver, GPUs and memory. Initialises CUDA if there is a GPU."""
    packages = {name: version_of(name) for name in (*REQUIRED, *FOR_GPU, *OPTIONAL)}
    problems = [f"{name} is not installed" for name in REQUIRED if packages[name] is None]
    notes = [
        f'without {name}: pip install "drift-engine[{extra}]" adds it'
        for name, extra in OPTIONAL.items()
        if packages[name] is None
    ]
    driver = cuda_driver()
    devices: list[Device] = []
    executor: str | None = None
    reason, torch_cuda = "torch is missing", None
    try:
        import torch
    except ImportError as error:
        problems.append(f"torch cannot be imported: {error}")
    else:
        torch_cuda = torch.version.cuda
        if release(torch.__version__) < MIN_TORCH:
            problems.append(f"torch {torch.__version__}: expected at least {'.'.join(map(str, MIN_TORCH))}")
        if not keeps_bytecode(torch):
            notes.append(
                "there is no bytecode of torch here, so every start compiles torch's modules, which takes "
                f"seconds: python -m compileall -q {Path(torch.__file__).parents[1]} writes it"
            )
        try:
            devices = gpus(torch)
        except Exception as error:
            problems.append(f"CUDA does not work: {error}")
        if driver is not None and not devices:
            notes.append("there is an NVIDIA driver, but torch sees no GPU: the engine runs on the CPU")
        try:
            executor, reason = chosen_executor(torch.device("cuda" if devices else "cpu"))
        except ImportError as error:
            reason = "the engine cannot be imported"
            problems.append(f"{reason}: {error}")

    missing = [name for name in FOR_GPU if packages[name] is None]
    if devices:
        problems += [f"{name} is not installed" for name in missing]
    elif missing:
        notes.append(f"without {', '.join(missing)}: an engine on a GPU needs them, on the CPU it does not")

    return Diagnosis(
        drift_sdk=version_of("drift-engine"),
        python=platform.python_version(),
        platform=platform.platform(),
        torch=packages["torch"],
        torch_cuda=torch_cuda,
        cuda_driver=driver,
        devices=devices,
        free_memory=free_memory(),
        packages=packages,
        executor=executor,
        executor_reason=reason,
        problems=problems,
        notes=notes,
    )


def run_doctor(*, as_json: bool) -> int:
    """Print what `examine` finds, as JSON or as text; the exit status, 1 if no engine can run here."""
    diagnosis = examine()
    if as_json:
        found = {"is_usable": diagnosis.is_usable, **msgspec.to_builtins(diagnosis)}
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(diagnosis.text())

    return 0 if diagnosis.is_usable else 1


def keeps_bytecode(module: ModuleType) -> bool:
    """Whether the bytecode of an imported module is kept: by the installer, or by Python when it was
    imported."""
    cached = None if module.__spec__ is None else module.__spec__.cached
    return cached is None or Path(cached).is_file()


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The leading numbers: (2, 11) of "2.11.0a1+cu130"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def cuda_driver() -> str | None:
    """Version of the NVIDIA driver, as the Linux kernel reports it; None if there is none."""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER_FILE.read_text()) if DRIVER_FILE.exists() else None
    return found.group() if found is not None else None


def gpus(torch: Any) -> list[Device]:
    """The GPUs that torch sees, each after a first operation on it. Raises what torch raises if one fails."""
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}").add_(1).item()
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        devices.append(
            Device(name=name, compute_capability=f"{major}.{minor}", free_memory=free, total_memory=total)
        )

    return devices


def chosen_executor(device: Any) -> tuple[str, str]:
    """The executor that executor="auto" chooses for a torch.device, and why."""
    from drift_sdk.startup.executor_factory import choose_executor

    name, fallback = choose_executor(EngineConfig(), device)
    if fallback is not None:
        return name, fallback

    return name, "no GPU" if device.type == "cpu" else "the fastest for this GPU"


def free_memory() -> int | None:
    """Bytes of main memory that can be allocated without swapping; None if the system does not tell."""
    file = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text()) if file.exists() else None
    return int(found.group(1)) * 1024 if found is not None else None


def run_inspect(model: str | Path, config: EngineConfig, *, as_json: bool) -> int:
    """Print what `inspect` finds, as JSON or as text; the exit status, 1 if the model cannot be served."""
    info = inspect(model, config)
    if as_json:
        found = {"is_supported": info.is_supported, **msgspec.to_builtins(info)}
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(info.text())

    return 0 if info.is_supported else 1


class Warmed(Struct, frozen=True, kw_only=True):
    """An engine that was started and closed so that its kernels are compiled.

    executor:      how it runs steps.
    start_seconds: stages of the start and the seconds that each took, in order.
    kernel_cache:  the folder that holds the compiled kernels; None if the executor has none.
    """

    executor: str
    start_seconds: tuple[tuple[str, float], ...]
    kernel_cache: Path | None

    def text(self) -> str:
        """A line for each stage, and where the kernels are."""
        width = max(len(stage) for stage, _ in self.start_seconds)
        lines = [f"{stage:<{width}}  {seconds:7.2f} s" for stage, seconds in self.start_seconds]
        if self.kernel_cache is None:
            lines.append(f"nothing to compile: the {self.executor} executor runs torch's own kernels")
        else:
            lines.append(f"kernels are in {self.kernel_cache}")

        return "\n".join(lines)


async def warm(
    model: str | Path, config: EngineConfig, on_progress: Callable[[Progress], None] | None = None
) -> Warmed:
    """Start an engine, which compiles every kernel that is not in the cache, and close it. Raises what
    starting the engine raises."""
    async with Engine(model, config, on_progress=on_progress) as engine:
        executor, seconds = engine.executor, engine.stats().start_seconds

    return Warmed(executor=executor, start_seconds=seconds, kernel_cache=kernel_cache(executor))


async def run_warm(model: str | Path, config: EngineConfig) -> int:
    """Run `warm` and print its outcome; the exit status, always 0."""
    warmed = await warm(model, config, show_progress)
    hide_progress()
    print(warmed.text())
    return 0


def kernel_cache(executor: str) -> Path | None:
    """The folder of the kernels that an executor compiles; None if it compiles none."""
    if executor != "graph":
        return None

    from drift_sdk._kernels.launch.kernel import cache_folder  # imported here, for it needs Triton

    return cache_folder()
