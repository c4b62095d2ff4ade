"""Loading of a small model that drafts for another one."""

from __future__ import annotations

import filecmp
import logging
from collections.abc import Callable
from functools import partial

from drift_sdk._files import has_file
from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError, ModelLoadError, short_repr
from drift_sdk.loading.source import TOKENIZER_FILE, Source
from drift_sdk.models.decoder import Decoder
from drift_sdk.spec.model import ModelSpec
from drift_sdk.speculation import Chain, Speculation
from drift_sdk.startup.model_config import read_config

__all__ = ["load_draft_model"]

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
