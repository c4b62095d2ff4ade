"""Checks of what attention on graphs has room for in a GPU's shared memory."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.spec.model import ModelSpec
from drift_sdk.speculation import Chain, Speculation

__all__ = ["check_attention_room", "check_chain", "check_head_size"]


def check_attention_room(
    config: EngineConfig, model: ModelSpec, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ConfigError for heads or chains of drafts that attention has no room for on a GPU."""
    with torch.cuda.device(device) if torch.cuda.is_available() else nullcontext():
        check_head_size(config, model.attention.head_dim, dtype)
        if config.speculation is not None:
            check_chain(_longest_chain(config.speculation), model, dtype)


def _longest_chain(speculation: Speculation) -> int:
    """Most drafts of a round that are no tree."""
    from drift_sdk.execution.rounds.tree_plan import tree_plan

    shape = speculation.shape
    if isinstance(shape, Chain):
        return shape.num_draft_tokens

    return max((number for number in shape.choices if tree_plan(shape, number) is None), default=0)


def check_head_size(config: EngineConfig, head_dim: int, dtype: torch.dtype) -> None:
    """Raise ConfigError for heads in float32 for which attention of chunks has no room on the current GPU."""
    from drift_sdk._kernels.attention.exact_prefill import WIDE_FLOAT32_SHARED_BYTES
    from drift_sdk._kernels.launch.gpu_limits import gpu_limits

    is_wide = dtype == torch.float32 and head_dim > 128
    if is_wide and gpu_limits().shared_bytes < WIDE_FLOAT32_SHARED_BYTES:
        found = f"graphs have no room on this GPU for heads of {head_dim} dimensions in float32"
        raise ConfigError.of("dtype", config.dtype, f'"bfloat16", or executor="eager", here: {found}')


def check_chain(num_drafts: int, model: ModelSpec, dtype: torch.dtype) -> None:
    """Raise ConfigError for a chain of more drafts than attention can verify at once on the current GPU."""
    from drift_sdk._kernels.attention.decode import most_query_rows
    from drift_sdk._kernels.attention.softmax import Partitions

    group = model.attention.group
    most = most_query_rows(model.attention.head_dim, dtype, Partitions().tile) // group - 1
    if num_drafts > max(most, 0):
        reason = f"attention of {num_drafts + 1} rows for {group} heads each has no room on this GPU"
        raise ConfigError.of("num_draft_tokens", num_drafts, f"at most {most} here: {reason}")
