"""Loading of the configured draft."""

from __future__ import annotations

import logging

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError, ModelLoadError
from drift_sdk.execution.drafter_factory import (
    NO_DRAFTER,
    DrafterFactory,
    EagleDrafterFactory,
    NGramDrafterFactory,
)
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.progress import Report
from drift_sdk.speculation import Chain, NGram, Speculation

__all__ = ["open_drafter_factory"]

log = logging.getLogger("drift_sdk")


def open_drafter_factory(config: EngineConfig, target: Decoder, report: Report) -> DrafterFactory:
    """The factory of the configured drafter, with the draft's weights loaded.

    NO_DRAFTER without speculation, or with a warning if a draft that is not required cannot be used. A draft
    of a target with random weights gets random weights. Raises ModelLoadError, and ConfigError for a tree
    with more candidates after a token than the draft's vocabulary has.
    """
    speculation = config.speculation
    if speculation is None:
        return NO_DRAFTER

    choices, is_adaptive = speculation.shape.choices, speculation.adaptive
    if isinstance(speculation.draft, NGram):
        return NGramDrafterFactory(speculation.draft, choices, is_adaptive=is_adaptive)

    try:
        draft = _load_draft(config, speculation, target, report)
    except ModelLoadError as error:
        if speculation.required or config.strict_performance:
            raise

        log.warning("decoding without speculation, the draft cannot be used: %s", error)
        return NO_DRAFTER

    tree = None if isinstance(speculation.shape, Chain) else speculation.shape
    if tree is not None and tree.num_candidates > draft.config.draft_vocab_size:
        allowed = f"at most {draft.config.draft_vocab_size} candidates after a token, the draft's vocabulary"
        raise ConfigError.of("shape", tree, allowed)

    return EagleDrafterFactory(draft, choices, is_adaptive=is_adaptive, tree=tree)


def _load_draft(
    config: EngineConfig, speculation: Speculation, target: Decoder, report: Report
) -> DraftDecoder:
    assert not isinstance(speculation.draft, NGram)
    load = DraftDecoder.load if config.load == "auto" else DraftDecoder.load_random
    return load(
        speculation.draft,
        target,
        form=speculation.draft_weights or "expanded",
        aux_layer_convention=speculation.aux_layer_convention,
        cache_dir=config.cache_dir,
        local_files_only=config.local_files_only,
        report=report,
    )
