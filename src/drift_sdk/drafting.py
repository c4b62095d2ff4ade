"""From a Speculation to a drafter that fits the model."""

from __future__ import annotations

import logging

from drift_sdk.config import EngineConfig
from drift_sdk.drafts import NGram
from drift_sdk.errors import ModelLoadError
from drift_sdk.execution.drafters import Drafter, EagleDrafter, NGramDrafter
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.steps import ExecutorLimits

__all__ = ["open_drafter"]

log = logging.getLogger("drift_sdk")


def open_drafter(config: EngineConfig, target: Decoder, limits: ExecutorLimits) -> Drafter | None:
    """The configured drafter; None without speculation, or if one that is not required cannot be had."""
    speculation = config.speculation
    if speculation is None:
        return None

    if isinstance(speculation.draft, NGram):
        return NGramDrafter(speculation.draft.min_length, speculation.draft.max_length)

    try:
        draft = DraftDecoder.load(
            speculation.draft,
            target,
            aux_layer_convention=speculation.aux_layer_convention,
            cache_dir=config.cache_dir,
            local_files_only=config.local_files_only,
        )
    except ModelLoadError as error:
        if speculation.required:
            raise

        log.warning("decoding without speculation, the draft cannot be used: %s", error)
        return None

    return EagleDrafter(draft, target, limits)
