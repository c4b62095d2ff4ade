"""Which executor runs a model on a device, and making it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from drift_sdk.config import EngineConfig
from drift_sdk.drafts import NGram
from drift_sdk.errors import ConfigError
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.steps import Executor, ExecutorLimits

__all__ = ["choose_executor", "open_graph_executor"]

MIN_CAPABILITY = (9, 0)


def choose_executor(config: EngineConfig, device: torch.device) -> tuple[str, str | None]:
    """The executor's name, and why "auto" has to make do with a slower one than the device's kind allows.

    Raises ConfigError for an executor that cannot run there.
    """
    if config.executor == "eager" or (config.executor == "auto" and device.type == "cpu"):
        return "eager", None

    obstacle = _obstacle(config, device)
    if obstacle is None:
        return "graph", None

    if config.executor == "graph":
        raise ConfigError.of("executor", config.executor, f'"eager" or "auto" here: {obstacle}')

    return "eager", obstacle


def open_graph_executor(
    config: EngineConfig,
    decoder: Decoder,
    limits: ExecutorLimits,
    draft: DraftDecoder | NGram | None,
    report: Callable[[str, float], None],
    simulated_length: float | None = None,
) -> Executor:
    """Captures everything; ExecutorError if that fails."""
    # Only here, for they need Triton and the driver.
    from drift_sdk._kernels.tuning import gpu_key, table_for
    from drift_sdk.execution.device import GpuDevice
    from drift_sdk.execution.graph import GraphExecutor

    choices = config.speculation.shape.choices if config.speculation is not None else ()
    return GraphExecutor(
        GpuDevice(decoder.device.index or 0),
        decoder,
        limits,
        table_for(gpu_key(torch.cuda.get_device_name(decoder.device))),
        prefill_token_budget=config.prefill_token_budget,
        exact_prefill=config.exact_prefill,
        draft=draft,
        draft_choices=choices if draft is not None else (),
        simulated_length=simulated_length,
        report=report,
    )


def _obstacle(config: EngineConfig, device: torch.device) -> str | None:
    """Why there can be no graphs."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "CUDA graphs need an NVIDIA GPU"

    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found = ".".join(map(str, capability))
        return f"the kernels need compute capability 9.0, {torch.cuda.get_device_name(device)} has {found}"

    missing = [package for package in ("triton", "cuda.core") if not _is_installed(package)]
    if missing:
        return f"{' and '.join(missing)} not installed"

    return None


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
