"""EngineKind: what the tokens of a request depend on besides the request."""

from __future__ import annotations

import hashlib
import platform
import sys
from importlib import metadata, resources
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from drift_sdk.config import EngineConfig
from drift_sdk.sampling_params import SamplingParams

__all__ = ["EngineKind"]

LIBRARIES = ("torch", "triton", "cuda-core", "tokenizers", "llguidance")
CPU_INFO = Path("/proc/cpuinfo")


class EngineKind(Struct, frozen=True, kw_only=True):
    """Everything that tokens depend on besides prompt, parameters and seed. Two engines of one kind
    give a request the same tokens, as far as docs/guarantees.md promises it.

    model:          its name, which must name the same files for both.
    settings:       the fields of the config except `device`, as text.
    executor:       "graph", "eager" or "scripted".
    device:         name of the GPU or of the CPU.
    versions:       of this package and of the libraries that compute.
    table:          hash of the tuned table of the GPU; "" if there is none.
    max_model_len:  most tokens of prompt and completion together.
    default_params: parameters of requests that give none.
    is_lossy:       tokens may depend on other requests too, by `PartialVerification`.
    """

    model: str
    settings: dict[str, str]
    executor: str
    device: str
    versions: dict[str, str]
    table: str
    max_model_len: int
    default_params: SamplingParams
    is_lossy: bool = False

    @classmethod
    def of(
        cls,
        model: str,
        config: EngineConfig,
        *,
        executor: str,
        max_model_len: int,
        default_params: SamplingParams,
    ) -> EngineKind:
        """The kind of an open engine of this process."""
        device = device_name(config.device)
        return cls(
            model=model,
            settings={name: repr(value) for name, value in asdict(config).items() if name != "device"},
            executor=executor,
            device=device,
            versions=versions(),
            table=table_hash(device),
            max_model_len=max_model_len,
            default_params=default_params,
            is_lossy=config.speculation is not None and config.speculation.partial_verification is not None,
        )

    def differences(self, other: EngineKind) -> list[str]:
        """The fields in which another kind differs, each with both values; those of mappings one by one."""
        ours, theirs = flat(self), flat(other)
        return [
            f"{name}: {ours.get(name)!r} and {theirs.get(name)!r}"
            for name in dict.fromkeys((*ours, *theirs))
            if ours.get(name) != theirs.get(name)
        ]


def flat(kind: EngineKind) -> dict[str, object]:
    """The fields of a kind by name, and those of its mappings by their own names."""
    found: dict[str, object] = {}
    for name, value in asdict(kind).items():
        found.update(value if isinstance(value, dict) else {name: value})
    return found


def versions() -> dict[str, str]:
    """Versions of this package and of the installed libraries that compute."""
    found = {"drift_sdk": sys.modules["drift_sdk"].__version__}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue

    return found


def device_name(device: str) -> str:
    """The name of the GPU or of the CPU that a config's device stands for."""
    torch = sys.modules.get("torch")  # imported by an engine that computes
    if torch is None or device == "cpu" or not torch.cuda.is_available():
        return cpu_name()

    index = int(device.partition(":")[2] or 0)
    return str(torch.cuda.get_device_properties(index).name)


def cpu_name() -> str:
    """The model of the CPU, where the system tells it, else its architecture."""
    lines = CPU_INFO.read_text(errors="replace").splitlines() if CPU_INFO.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def table_hash(device: str) -> str:
    """Hash of the tuned table of a GPU; "" if it has none."""
    folder = resources.files("drift_sdk._kernels.gemm") / "tuned"
    file = folder / f"{'-'.join(device.lower().split())}.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
