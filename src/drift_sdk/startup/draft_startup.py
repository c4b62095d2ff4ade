"""Loading of the configured draft."""

from __future__ import annotations

import logging
from collections.abc import Callable

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError, ModelLoadError
from drift_sdk.execution.drafter_factory import (
    NO_DRAFTER,
    DrafterFactory,
    EagleDrafterFactory,
    HybridDrafterFactory,
    ModelDrafterFactory,
    NGramDrafterFactory,
)
from drift_sdk.loading.source import Source, name_role, resolve
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DraftDecoder, is_whole_model
from drift_sdk.models.mtp import has_mtp, load_mtp, random_mtp
from drift_sdk.progress import Report
from drift_sdk.spec.model import Experts, ModelSpec
from drift_sdk.speculation import MTP, Chain, NGram, Speculation
from drift_sdk.startup.draft_model import load_draft_model

__all__ = ["check_mtp", "open_drafter_factory"]

log: logging.Logger = logging.getLogger("drift_sdk")


def check_mtp(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for `Speculation(draft="mtp")` with a model whose config does not permit it."""
    speculation = config.speculation
    if speculation is None or speculation.draft != MTP:
        return

    if spec.mtp is None:
        raise ConfigError.of("draft", MTP, "a folder, a hub id or NGram(): this model has no MTP layer")

    if speculation.draft_weights is not None and isinstance(spec.mtp.channel, Experts):
        allowed = "None with a mixture of experts in the MTP layer"
        raise ConfigError.of("draft_weights", speculation.draft_weights, allowed)


def open_drafter_factory(
    config: EngineConfig,
    target: Decoder,
    report: Report,
    source: Source | None = None,
    check_bytes: Callable[[int], None] | None = None,
) -> DrafterFactory:
    """The factory of the configured drafter, with the draft's weights loaded.

    source: the target's files; None: a model that drafts is not compared with them, and there is no MTP layer
    in them. check_bytes: as of `Decoder.load`, for a model that drafts.

    NO_DRAFTER without speculation, or with a warning if a draft that is not required cannot be used. A draft
    of a target with random weights gets random weights. Raises ModelLoadError, and ConfigError for a tree
    with more candidates after a token than the draft's vocabulary has, and for settings that concern a head
    alone with a model as the draft.
    """
    speculation = config.speculation
    if (speculation is None or speculation.draft != MTP) and _has_mtp(config, target, source):
        log.info('the model has an MTP layer that is not used; Speculation(draft="mtp") drafts with it')
    if speculation is None:
        return NO_DRAFTER

    choices, is_adaptive = speculation.shape.choices, speculation.adaptive
    if isinstance(speculation.draft, NGram):
        return NGramDrafterFactory(speculation.draft, choices, is_adaptive=is_adaptive)

    try:
        draft = _load_draft(config, speculation, target, report, source, check_bytes)
    except ModelLoadError as error:
        if speculation.required or config.strict_performance:
            raise

        log.warning("decoding without speculation, the draft cannot be used: %s", error)
        return NO_DRAFTER

    factory: DrafterFactory
    if isinstance(draft, Decoder):
        factory = ModelDrafterFactory(draft, choices, is_adaptive=is_adaptive)
    else:
        factory = _eagle_factory(draft, speculation)
    return factory if speculation.ngrams is None else HybridDrafterFactory(factory, speculation.ngrams)


def _eagle_factory(draft: DraftDecoder, speculation: Speculation) -> EagleDrafterFactory:
    tree = None if isinstance(speculation.shape, Chain) else speculation.shape
    if tree is not None and tree.num_candidates > draft.config.draft_vocab_size:
        allowed = f"at most {draft.config.draft_vocab_size} candidates after a token, the draft's vocabulary"
        raise ConfigError.of("shape", tree, allowed)

    choices = speculation.shape.choices
    return EagleDrafterFactory(draft, choices, is_adaptive=speculation.adaptive, tree=tree)


def _load_draft(
    config: EngineConfig,
    speculation: Speculation,
    target: Decoder,
    report: Report,
    source: Source | None,
    check_bytes: Callable[[int], None] | None,
) -> DraftDecoder | Decoder:
    """The draft head or the model that `Speculation.draft` names."""
    assert not isinstance(speculation.draft, NGram)
    if speculation.draft == MTP:
        return _load_mtp(config, speculation, target, source, check_bytes)

    has_weights = config.load == "auto"
    found = resolve(
        speculation.draft,
        role="draft",
        cache_dir=config.cache_dir,
        local_files_only=config.local_files_only,
        report=report,
        has_weights=has_weights,
    )
    if is_whole_model(found):
        with name_role("draft"):
            return load_draft_model(config, speculation, found, target, source, check_bytes)

    load = DraftDecoder.load if has_weights else DraftDecoder.load_random
    return load(
        found.path,
        target,
        form=speculation.draft_weights or "expanded",
        aux_layer_convention=speculation.aux_layer_convention,
        cache_dir=config.cache_dir,
        local_files_only=config.local_files_only,
        report=report,
    )


def _load_mtp(
    config: EngineConfig,
    speculation: Speculation,
    target: Decoder,
    source: Source | None,
    check_bytes: Callable[[int], None] | None,
) -> DraftDecoder:
    """The MTP layer of the target. ConfigError if it has none."""
    check_mtp(config, target.spec)
    if not _has_mtp(config, target, source):
        where = "the model" if source is None else str(source.path)
        allowed = f"a folder, a hub id or NGram(): {where} has no tensor {target.spec.names.mtp.joint}"
        raise ConfigError.of("draft", MTP, allowed)

    form = speculation.draft_weights or "expanded"
    if config.load == "random":
        return random_mtp(target, form=form)

    assert source is not None
    return load_mtp(target, source.tensors(), form=form, check_bytes=check_bytes)


def _has_mtp(config: EngineConfig, target: Decoder, source: Source | None) -> bool:
    """Whether the target has an MTP layer: by its config with random weights, else by its files too."""
    if config.load == "random":
        return target.spec.mtp is not None

    return target.spec.mtp is not None and source is not None and has_mtp(target.spec, source.tensors())
