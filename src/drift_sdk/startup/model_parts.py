"""Weights of a model and of its draft on the devices: form in memory, division between GPUs, and loading."""

from __future__ import annotations

import filecmp
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import permutations

import msgspec
import torch
from msgspec import Struct

from drift_sdk._files import has_file
from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError, ModelLoadError, short_repr
from drift_sdk.events import Report
from drift_sdk.execution.device.memory import return_freed_memory
from drift_sdk.execution.drafter_factory import (
    NO_DRAFTER,
    AssistantDrafterFactory,
    DFlashDrafterFactory,
    DrafterFactory,
    EagleDrafterFactory,
    HybridDrafterFactory,
    ModelDrafterFactory,
    NGramDrafterFactory,
)
from drift_sdk.loading.source import TOKENIZER_FILE, Source, name_role, read_config, resolve
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.allocation import QUANTISERS, WeightForm
from drift_sdk.models.assistant import AssistantDecoder, is_assistant
from drift_sdk.models.decoder import Decoder, random_tensors
from drift_sdk.models.dflash import DFlashDecoder, is_dflash
from drift_sdk.models.draft_head import DraftDecoder, has_mtp, is_whole_model, load_mtp, random_mtp
from drift_sdk.models.shard import Shard, cut_head, load_shard, shard_obstacles
from drift_sdk.models.weights import odd_columns, weight_bytes
from drift_sdk.quantised.scheme import Scheme
from drift_sdk.spec.model import Attention, Experts, ModelSpec
from drift_sdk.speculation import DRAFT_FILES, MTP, Chain, NGram, Speculation
from drift_sdk.startup.sizing import DeviceMemory, opening_lock

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
        raise ConfigError.of("draft", MTP, f"{DRAFT_FILES}, or NGram(): this model has no MTP layer")

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
    elif isinstance(draft, DFlashDecoder):
        factory = _dflash_factory(draft, speculation)
    elif isinstance(draft, AssistantDecoder):
        factory = AssistantDrafterFactory(draft, choices, is_adaptive=is_adaptive)
    else:
        factory = _eagle_factory(draft, speculation)
    return factory if speculation.ngrams is None else HybridDrafterFactory(factory, speculation.ngrams)


def _dflash_factory(draft: DFlashDecoder, speculation: Speculation) -> DFlashDrafterFactory:
    shape, most = speculation.shape, draft.config.num_masks
    if not isinstance(shape, Chain) or shape.num_draft_tokens > most:
        raise ConfigError.of(
            "shape", shape, f"a Chain of at most {most} with this head, which drafts so many"
        )

    return DFlashDrafterFactory(draft, shape.choices, is_adaptive=speculation.adaptive)


def _eagle_factory(draft: DraftDecoder, speculation: Speculation) -> EagleDrafterFactory:
    tree = None if isinstance(speculation.shape, Chain) else speculation.shape
    if tree is not None and draft.config.mask_token_id is not None:
        raise ConfigError.of("shape", tree, "a Chain with a P-EAGLE head, which drafts in one pass")

    attention = draft.config.attention
    if tree is not None and isinstance(attention, Attention) and attention.window is not None:
        raise ConfigError.of("shape", tree, "a Chain with a head whose layers have windows")

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
) -> DraftDecoder | DFlashDecoder | AssistantDecoder | Decoder:
    """The draft head, the assistant or the model that `Speculation.draft` names."""
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
    if _is_assistant(found):
        _check_assistant(speculation)
        form = speculation.draft_weights or "expanded"
        return AssistantDecoder.load(found, target, form=form, has_weights=has_weights)

    if is_whole_model(found):
        with name_role("draft"):
            return load_draft_model(config, speculation, found, target, source, check_bytes)

    with name_role("draft"):
        has_masks = is_dflash(found.config)
    if has_masks:
        return DFlashDecoder.load(
            found,
            target,
            form=speculation.draft_weights or "expanded",
            aux_layer_convention=speculation.aux_layer_convention,
            has_weights=has_weights,
        )

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


def _is_assistant(source: Source) -> bool:
    """Whether a source is a folder of an assistant, whose tensors have names of a whole model's."""
    with name_role("draft"):
        return not source.path.is_file() and is_assistant(source.config)


def _check_assistant(speculation: Speculation) -> None:
    """Raise ConfigError for settings that an assistant as the draft does not have."""
    if not isinstance(speculation.shape, Chain):
        raise ConfigError.of("shape", speculation.shape, "a Chain with an assistant as the draft")

    convention = speculation.aux_layer_convention
    if convention is not None:
        raise ConfigError.of("aux_layer_convention", convention, "None with an assistant as the draft")


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
        allowed = f"{DRAFT_FILES}, or NGram(): {where} has no tensor {target.spec.names.mtp.joint}"
        raise ConfigError.of("draft", MTP, allowed)

    form = speculation.draft_weights or ("stored" if config.weights == "stored" else "expanded")
    if config.load == "random":
        return random_mtp(target, form=form)

    assert source is not None
    return load_mtp(target, source.tensors(), form=form, check_bytes=check_bytes)


def _has_mtp(config: EngineConfig, target: Decoder, source: Source | None) -> bool:
    """Whether the target has an MTP layer: by its config with random weights, else by its files too."""
    if config.load == "random":
        return target.spec.mtp is not None

    return target.spec.mtp is not None and source is not None and has_mtp(target.spec, source.tensors())


def with_weight_form(
    config: EngineConfig, model: ModelSpec, executor: str, device: torch.device, dtype: torch.dtype
) -> EngineConfig:
    """The config with the form of the weights that `EngineConfig.weights` = None stands for: "stored" if
    kernels multiply by the quantised weights of the files, which takes the least time and memory; else
    "expanded", because dequantising a weight at each use takes longer than a step of decoding does."""
    if config.weights is not None:
        return config

    is_multiplied = (
        stored_scheme(config, model) is not None
        and config.tensor_parallel == 1
        and executor == "graph"
        and _has_products(device, dtype)
    )
    return msgspec.structs.replace(config, weights="stored" if is_multiplied else "expanded")


def _has_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels multiply by quantised weights on a device, for a model of `dtype`."""
    from drift_sdk._kernels.quantised.packing import (
        programs_run,  # needs the packages of a GPU  # needs the packages of a GPU
    )

    return programs_run(device, dtype)


def choose_weight_form(config: EngineConfig, model: ModelSpec) -> WeightForm:
    """The form of a model's weights, for a config of `with_weight_form` or for what is known before: None
    counts as "expanded".

    Raises ConfigError for quantising a model whose files are quantised, or whose matrices cannot have the
    form.
    """
    form = config.weights or "expanded"
    scheme = stored_scheme(config, model)
    if form in QUANTISERS and scheme is not None:
        allowed = f'None, "stored" or "expanded": the files are quantised ({scheme.name})'
        raise ConfigError.of("weights", form, allowed)

    if reason := odd_columns(model, form):
        raise ConfigError.of("weights", form, f'None, "expanded" or "fp8": {reason}')

    return form


def bytes_without_files(config: EngineConfig, model: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of weights that do not depend on files: of all but those that files store quantised. Raises
    ConfigError as `choose_weight_form`."""
    form = choose_weight_form(config, model)
    if config.load == "random" and form == "stored":
        tensors = random_tensors(model, device=torch.device("cpu"), dtype=dtype, form=form)
        return weight_bytes(model, dtype, form, tensors)

    return weight_bytes(model, dtype, form)


def stored_scheme(config: EngineConfig, model: ModelSpec) -> Scheme | None:
    """The scheme of the files that are loaded; None if they have no quantised weights but MXFP4 experts."""
    scheme = model.quantisation
    # A scheme without storages has scales of the KV cache alone.
    return scheme if config.load == "auto" and scheme is not None and scheme.storages else None


POLL_S = 0.05
MOST_SUGGESTED = 64
"""The largest number of GPUs that an error names as possible."""


def shards_of(config: EngineConfig) -> list[Shard | None]:
    """The part of each GPU, in order of rank; None: the whole model."""
    size = config.tensor_parallel
    return [None] if size == 1 else [Shard(rank=rank, size=size) for rank in range(size)]


def check_division(config: EngineConfig, model: ModelSpec, executor: str) -> None:
    """Raise ConfigError if the model, with these settings, cannot be divided between so many GPUs."""
    if config.tensor_parallel == 1:
        return

    if config.fast_prompts:
        raise ConfigError.of("fast_prompts", True, "False for a model divided between GPUs")

    size, form = config.tensor_parallel, choose_weight_form(config, model)
    if form != "expanded":
        raise ConfigError.of("tensor_parallel", size, f'1 for weights="{form}"')

    obstacles = " and ".join(shard_obstacles(model, size))
    if obstacles:
        sizes = [each for each in range(2, MOST_SUGGESTED + 1) if not any(shard_obstacles(model, each))]
        allowed = f"{', '.join(map(str, [1, *sizes]))} for this model: it has {obstacles}"
        raise ConfigError.of("tensor_parallel", size, allowed)

    if executor != "graph":
        raise ConfigError.of("tensor_parallel", size, f"1 for executor {executor}")


def parallel_devices(config: EngineConfig, first: torch.device) -> Sequence[torch.device]:
    """The GPUs of an engine, the first one given. Raises ConfigError if this machine lacks one of them, or if
    they differ or do not reach each other's memory."""
    size = config.tensor_parallel
    if size == 1:
        return [first]

    if first.type != "cuda":
        raise ConfigError.of("tensor_parallel", size, f"1 on {first}")

    index, number = first.index or 0, torch.cuda.device_count()
    if index + size > number:
        allowed = f"at most {number - index} from {first} on: this machine has {number} GPUs"
        raise ConfigError.of("tensor_parallel", size, allowed)

    indices = range(index, index + size)
    names = {torch.cuda.get_device_name(each) for each in indices}
    if len(names) > 1:
        found = " and ".join(sorted(names))
        raise ConfigError.of("tensor_parallel", size, f"1, or GPUs of one kind; here {found}")

    for one, other in permutations(indices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            allowed = f"1, or GPUs that reach each other's memory: cuda:{one} does not reach cuda:{other}"
            raise ConfigError.of("tensor_parallel", size, allowed)

    return [torch.device("cuda", each) for each in indices]


@contextmanager
def opening_locks(devices: Sequence[torch.device], check: Callable[[], object]) -> Iterator[None]:
    """The `opening_lock` of all devices, which are in ascending order.

    check: called again and again while it waits for a lock; what it raises ends the waiting. Another engine
           may have the lock for as long as its draft is downloaded.
    """
    with ExitStack() as stack:
        for device in devices:
            lock = opening_lock(device)
            while not lock.acquire(timeout=POLL_S):
                check()
            stack.callback(lock.release)
        yield


class ModelPart(Struct, frozen=True, kw_only=True):
    """A model on a device, or the part of one that a GPU has, and its draft. memory: of the device."""

    decoder: Decoder
    memory: DeviceMemory
    drafter_factory: DrafterFactory


class StoredWeights(Struct, frozen=True):
    """Source, configuration and dtype of the decoder's weights, the part of them to load (None: all), and the
    memory of the device to load them on."""

    source: Source
    spec: ModelSpec
    dtype: torch.dtype
    shard: Shard | None
    memory: DeviceMemory

    @property
    def device(self) -> torch.device:
        return self.memory.device


def load_part(weights: StoredWeights, config: EngineConfig, report: Report) -> ModelPart:
    """Load the decoder, or its part, and the draft on a device."""
    memory = weights.memory
    decoder = _load_decoder(weights, config, memory, report)
    drafter_factory = open_drafter_factory(config, decoder, report, weights.source, memory.check_weights)
    if weights.shard is not None:
        cut_head(decoder, weights.shard)
    if weights.device.type == "cpu":  # of tensors that were quantised or converted: the KV cache may have it
        return_freed_memory(weights.device)
    return ModelPart(decoder=decoder, memory=memory, drafter_factory=drafter_factory)


def _load_decoder(
    weights: StoredWeights, config: EngineConfig, memory: DeviceMemory, report: Report
) -> Decoder:
    report("load weights", 0.0)
    form = choose_weight_form(config, weights.spec)
    if weights.shard is not None:
        return _load_shard(weights, weights.shard, config, memory, report)

    if config.load == "random":
        return Decoder.random(
            weights.spec,
            device=weights.device,
            dtype=weights.dtype,
            form=form,
            kv_form=config.kv_dtype,
            check_bytes=memory.check_weights,
        )

    return Decoder.load(
        weights.spec,
        weights.source.tensors(),
        device=weights.device,
        dtype=weights.dtype,
        form=form,
        kv_form=config.kv_dtype,
        on_tensor=lambda done, total: report("load weights", done / total),
        check_bytes=memory.check_weights,
    )


def _load_shard(
    weights: StoredWeights, shard: Shard, config: EngineConfig, memory: DeviceMemory, report: Report
) -> Decoder:
    tensors: TensorSource
    if config.load == "random":
        tensors = random_tensors(weights.spec, device=weights.device, dtype=weights.dtype)
    else:
        tensors = weights.source.tensors()
    return load_shard(
        weights.spec,
        tensors,
        shard,
        device=weights.device,
        dtype=weights.dtype,
        kv_form=config.kv_dtype,
        on_tensor=lambda done, total: report("load weights", (shard.rank + done / total) / shard.size),
        check_bytes=memory.check_weights,
    )
