"""From a Speculation to a draft that fits the model."""

from __future__ import annotations

import logging

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ModelLoadError
from drift_sdk.execution.eager.drafters import Drafter, EagleDrafter, NGramDrafter
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.progress import Report
from drift_sdk.speculation import NGram
from drift_sdk.steps import ExecutorLimits

__all__ = ["make_drafter", "open_draft"]

log = logging.getLogger("drift_sdk")


def open_draft(config: EngineConfig, target: Decoder, report: Report) -> DraftDecoder | NGram | None:
    """The configured draft; None without speculation, or if one that is not required cannot be had.

    Raises ModelLoadError. Where the target's weights are random, so are the draft's.
    """
    speculation = config.speculation
    if speculation is None:
        return None

    if isinstance(speculation.draft, NGram):
        return speculation.draft

    load = DraftDecoder.load if config.load == "auto" else DraftDecoder.load_random
    try:
        return load(
            speculation.draft,
            target,
            aux_layer_convention=speculation.aux_layer_convention,
            cache_dir=config.cache_dir,
            local_files_only=config.local_files_only,
            report=report,
        )
    except ModelLoadError as error:
        if speculation.required or config.strict_performance:
            raise

        log.warning("decoding without speculation, the draft cannot be used: %s", error)
        return None


def make_drafter(
    draft: DraftDecoder | NGram | None, target: Decoder, limits: ExecutorLimits
) -> Drafter | None:
    """What drafts for the eager executor."""
    if isinstance(draft, NGram):
        return NGramDrafter(draft.min_length, draft.max_length)

    return EagleDrafter(draft, target, limits) if draft is not None else None
