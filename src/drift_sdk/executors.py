"""Which executor runs a model on a device, and making it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.drafts import NGram
from drift_sdk.errors import ConfigError, FieldError
from drift_sdk.execution.stages import NO_STAGES, Stages
from drift_sdk.execution.strict import StrictExecutor
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.steps import Executor, ExecutorLimits

__all__ = ["OpenedExecutor", "choose_executor", "open_graph_executor"]

MIN_CAPABILITY = (9, 0)


class OpenedExecutor(Struct, frozen=True, kw_only=True):
    """An executor, and what came to light when it was made. `untuned`: weight shapes that run without
    measured configurations. `round_costs`: seconds by (slots, drafts), if somebody may choose."""

    executor: Executor
    untuned: tuple[str, ...] = ()
    round_costs: dict[tuple[int, int], float] = {}


def choose_executor(config: EngineConfig, device: torch.device) -> tuple[str, str | None]:
    """The executor's name, and why "auto" has to make do with a slower one than the device's kind allows.

    Raises ConfigError for an executor that cannot run there.
    """
    if config.executor == "eager":
        obstacle: str | None = 'executor="eager"'
    else:
        obstacle = _obstacle(config, device)
        if obstacle is None:
            return "graph", None

    if config.executor == "graph":
        raise ConfigError.of("executor", config.executor, f'"eager" or "auto" here: {obstacle}')

    if config.strict_performance:
        raise ConfigError.of("strict_performance", True, f"executor graph; here {obstacle}")

    if config.step_timeout_s is not None:
        # An eager step is over when it returns: nobody is there to give it up.
        raise ConfigError.of("step_timeout_s", config.step_timeout_s, f"executor graph; here {obstacle}")

    return "eager", obstacle if config.executor == "auto" and device.type == "cuda" else None


def open_graph_executor(
    config: EngineConfig,
    decoder: Decoder,
    limits: ExecutorLimits,
    draft: DraftDecoder | NGram | None,
    report: Callable[[str, float], None],
    acceptance_trace: Sequence[int] | None = None,
    stages: Stages | None = None,
) -> OpenedExecutor:
    """Captures everything; ExecutorError if that fails, ConfigError if it would be slower than is allowed.
    `stages`: for measuring, see there."""
    # Only here, for they need Triton and the driver.
    from drift_sdk._kernels.tuning import WatchedTable, gpu_key, table_for
    from drift_sdk.execution.device import GpuDevice
    from drift_sdk.execution.graph import GraphExecutor

    choices = config.speculation.shape.choices if config.speculation is not None else ()
    gpu = gpu_key(torch.cuda.get_device_name(decoder.device))
    table = WatchedTable(gemms=table_for(gpu).gemms)
    executor = GraphExecutor(
        GpuDevice(decoder.device.index or 0),
        decoder,
        limits,
        table,
        prefill_token_budget=config.prefill_token_budget,
        exact_prefill=config.exact_prefill,
        draft=draft,
        draft_choices=choices if draft is not None else (),
        acceptance_trace=acceptance_trace,
        stages=stages or NO_STAGES,
        step_timeout_s=config.step_timeout_s,
        report=report,
    )
    untuned = tuple(sorted(table.untuned))
    if untuned and config.strict_performance:
        executor.close()
        raise untuned_error(gpu, untuned)

    round_costs = {}
    if draft is not None and config.speculation is not None and config.speculation.adaptive:
        report("measure rounds", 0.0)
        round_costs = executor.round_costs()
    return OpenedExecutor(
        executor=StrictExecutor(executor, must_draft=isinstance(draft, DraftDecoder))
        if config.strict_performance
        else executor,
        untuned=untuned,
        round_costs=round_costs,
    )


def untuned_error(gpu: str, untuned: Sequence[str]) -> FieldError:
    shapes = " ".join(shape.replace(" ", ":") for shape in untuned)
    command = f"python perf/tune.py --out src/drift_sdk/_kernels/tuned/{gpu}.json {shapes}"
    allowed = f"measured configurations of all weights; {gpu} lacks {', '.join(untuned)}: run {command}"
    return ConfigError.of("strict_performance", True, allowed)


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
