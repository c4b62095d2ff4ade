"""Loading of the configured draft: an EAGLE-3 head, the model's own MTP layer, or a small model."""

from __future__ import annotations

import filecmp
import logging
from collections.abc import Callable
from functools import partial

from drift_sdk._files import has_file
from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError, ModelLoadError, short_repr
from drift_sdk.execution.drafter_factory import (
    NO_DRAFTER,
    DrafterFactory,
    EagleDrafterFactory,
    HybridDrafterFactory,
    ModelDrafterFactory,
    NGramDrafterFactory,
)
from drift_sdk.loading.source import TOKENIZER_FILE, Source, name_role, resolve
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder, is_whole_model
from drift_sdk.models.mtp import has_mtp, load_mtp, random_mtp
from drift_sdk.progress import Report
from drift_sdk.spec.model import Experts, ModelSpec
from drift_sdk.speculation import MTP, Chain, NGram, Speculation
from drift_sdk.startup.model_config import read_config

log: logging.Logger = logging.getLogger("drift_sdk")


def load_draft_model(
    config: EngineConfig,
    speculation: Speculation,
    source: Source,
    target: Decoder,
    target_source: Source | None,
    check_bytes: Callable[[int], None] | None,
) -> Decoder:
    """The decoder of a model that drafts for `target`, on its device and in its dtype.

    source, target_source: the files of either model. check_bytes: as of `Decoder.load`.

    Raises ModelLoadError for a vocabulary other than the target's, and what `Decoder.load` raises.
    ConfigError for settings of `Speculation` that only a draft head has.
    """
    model = read_config(source, config)
    _check_settings(speculation, model)
    if model.vocab_size != target.spec.vocab_size:
        raise ModelLoadError(
            f"{source.path}: vocab_size={model.vocab_size}: expected {target.spec.vocab_size}, "
            "the vocabulary of the model that it drafts for"
        )

    if target_source is not None:
        _check_tokens(source, target_source)
    longest = config.max_model_len or target.spec.max_position_embeddings
    if model.max_position_embeddings < longest:
        log.warning(
            "the draft %s has a context of %d tokens: behind that, its drafts are accepted less often",
            source.path,
            model.max_position_embeddings,
        )
    form = speculation.draft_weights or "expanded"
    tensors = source.tensors() if config.load == "auto" else None
    load = Decoder.random if tensors is None else partial(Decoder.load, tensors=tensors)
    return load(model, device=target.device, dtype=target.dtype, form=form, check_bytes=check_bytes)


def _check_settings(speculation: Speculation, model: ModelSpec) -> None:
    """Raise ConfigError for settings that a model as the draft does not have."""
    if not isinstance(speculation.shape, Chain):
        raise ConfigError.of("shape", speculation.shape, "a Chain with a model as the draft")

    if model.recurrent_layers:
        raise ConfigError.of("draft", speculation.draft, "a model without recurrent layers")

    if model.has_latents:
        raise ConfigError.of("draft", speculation.draft, "a model without latent attention")

    convention, weights = speculation.aux_layer_convention, speculation.draft_weights
    if convention is not None:
        raise ConfigError.of("aux_layer_convention", convention, "None with a model as the draft")

    if weights is not None and model.quantisation is not None:
        allowed = f"None: the draft's files are quantised ({model.quantisation.name})"
        raise ConfigError.of("draft_weights", weights, allowed)

    if weights is not None and model.experts is not None:
        raise ConfigError.of("draft_weights", weights, "None with a mixture of experts as the draft")


def _check_tokens(source: Source, target: Source) -> None:
    """Raise ModelLoadError naming a token id that stands for other tokens in the two models. Models of which
    one has no tokenizer are not compared."""
    if not source.has_tokenizer or not target.has_tokenizer:
        return

    file, target_file = (each.path / TOKENIZER_FILE for each in (source, target))
    if has_file(file) and has_file(target_file) and filecmp.cmp(file, target_file, shallow=False):
        return  # to read large vocabularies takes a second

    own, others = source.tokenizer().tokens_by_id(), target.tokenizer().tokens_by_id()
    for token_id in sorted(own.keys() & others.keys()):
        if own[token_id] != others[token_id]:
            found, expected = short_repr(own[token_id]), short_repr(others[token_id])
            raise ModelLoadError(
                f"{source.path}: token {token_id} is {found}: expected {expected}, "
                "as in the vocabulary of the model that it drafts for"
            )


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
