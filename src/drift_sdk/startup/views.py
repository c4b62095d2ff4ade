"""Partial verification of an opened model: its layout, its costs, and what it cannot be used with."""

from __future__ import annotations

from collections.abc import Mapping

from drift_sdk.config import EngineConfig
from drift_sdk.draft_policy.policy import ViewCosts
from drift_sdk.errors import ConfigError
from drift_sdk.partial_verification import PartialVerification, ViewLayout
from drift_sdk.spec.model import ModelSpec
from drift_sdk.steps import ExecutorLimits

__all__ = ["check_views", "view_costs", "view_layout"]

SCORING_READS = 0.5
"""Reads of keys and values by which a refresh chooses blocks: the keys, which are half of them, once."""


def _configured(config: EngineConfig) -> PartialVerification | None:
    """The configured partial verification, if any."""
    return None if config.speculation is None else config.speculation.partial_verification


def check_views(config: EngineConfig, model: ModelSpec) -> None:
    """Raise ConfigError if partial verification is configured and the model has layers with windows, which
    read few keys anyway."""
    partial = _configured(config)
    if partial is not None and any(window is not None for window in model.windows):
        allowed = "None for a model with sliding windows"
        raise ConfigError.of("partial_verification", partial, allowed)


def view_layout(
    config: EngineConfig, limits: ExecutorLimits, draft_choices: tuple[int, ...]
) -> ViewLayout | None:
    """The layout of views; None without partial verification, if nothing is drafted, or if no sequence can be
    longer than a view."""
    partial = _configured(config)
    if partial is None or not draft_choices:
        return None

    layout = partial.layout(limits.block_size, draft_choices[-1])
    return layout if layout.capacity < limits.max_model_len else None


def view_costs(layout: ViewLayout, model: ModelSpec, refresh_costs: Mapping[int, float]) -> ViewCosts:
    """The costs of partial verification. refresh_costs: as measured, empty if they were not."""
    num_tiles, _ = layout.refresh_tiles(model.attention.group)
    return ViewCosts(
        refresh_tokens=layout.refresh_tokens,
        view_tokens=layout.capacity,
        refresh_reads=num_tiles + SCORING_READS,
        refresh_costs=refresh_costs,
    )
