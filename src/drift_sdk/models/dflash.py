"""DFlash: a head that drafts several tokens in one pass, from an anchor and masks. Config, weights, and the
forward pass.

The anchor is the newest token; a mask stands for each token after it. A few layers, built like Qwen3's,
compute the rows of anchor and masks together. In each layer they see each other, and keys and values of all
positions before the anchor, which are projections of the target's features: the fused residual stream at some
of its layers. The row of a mask predicts the token at its own position.

Files of z-lab and SpecForge are flat, with a table `dflash_config`; those of the speculators library have a
table `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from msgspec import Struct, structs

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.families import read_spec
from drift_sdk.loading.draft import DraftTensors, read_target_ids
from drift_sdk.loading.random import RandomTensors
from drift_sdk.loading.source import Source
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.allocation import (
    Allocation,
    MatrixReader,
    ReadMatrix,
    fill_places,
    memory_named,
    no_matrix,
)
from drift_sdk.models.attention import AttentionBatch, ParallelAttentionBatch
from drift_sdk.models.decoder import Decoder, apply_channel
from drift_sdk.models.draft_config import (
    DraftConfig,
    algorithm,
    check_convention,
    check_layers,
    check_vocabulary,
    draft_settings,
    is_int,
    layers_of_ids,
    read_draft_vocab_size,
    read_flag,
    read_mask_token,
    read_table,
)
from drift_sdk.models.draft_head import (
    EMBEDDING,
    FC,
    FINAL_NORM,
    HEAD,
    DraftForm,
    check_names,
    check_pairs,
    explain_errors,
)
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.layers import embed, linear, normalise, rotary_tables
from drift_sdk.models.mixers.attention import AttentionStep, AttentionWeights, attend, project
from drift_sdk.models.weights import DecoderWeights, LayerWeights, allocate_layer
from drift_sdk.quantised.weight import Matrix, take_rows
from drift_sdk.spec.model import Attention, LayerSpec, ModelSpec

HIDDEN_NORM = "hidden_norm.weight"
TABLE = "dflash_config"
FLAT_IDS, NESTED_IDS = "target_layer_ids", "aux_hidden_state_layer_ids"
"""Layers whose output is meant, and layers whose input is."""
# Options of which one value is implemented.
FIXED_OPTIONS: dict[str, bool | float | str] = {
    "attention_value_scale": 1.0,
    "logit_scale": 1.0,
    "projector_type": "dflash",
    "sample_from_anchor": False,
}
KNOWN = ("block_size", "causal", "mask_token_id", "num_target_layers", "swa_window_size", FLAT_IDS)
"""What a `dflash_config` may have beside FIXED_OPTIONS."""
REFUSED = {
    "dspark": "DSpark, whose Markov head chooses the tokens of a draft one after the other",
    "dflash2": "DFlash 2, whose layers have convolutions",
    "domino": "Domino, whose recurrent network sees the tokens of a draft one after the other",
    "xpress": "XPress, whose refiner passes over the tokens of a draft several times",
}
MAX_MASKS = 255


class DFlashConfig(Struct, frozen=True, kw_only=True):
    """Shapes and options of a head of one target. Names in brackets are those of its config.json.

    shape:             of its layers, norm and vocabulary, of which the target has as many tokens.
    draft_vocab_size:  number of tokens it can propose.
    aux_layers:        layers of the target whose input the features are made of, low to high, as of
                       `DraftConfig`. In flat files an id is a layer whose output is meant
                       (`target_layer_ids`), in those of the speculators library one whose input is
                       (`aux_hidden_state_layer_ids`).
    target_hidden_size: width of the target's residual stream.
    num_masks:         tokens that a pass drafts (`block_size` - 1).
    mask_token_id:     the token whose embedding is a mask's.
    is_causal:         of each layer, whether a row sees no rows after its own.
    """

    shape: ModelSpec
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    num_masks: int
    mask_token_id: int
    is_causal: tuple[bool, ...]

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], target: ModelSpec, *, aux_layer_convention: str | None = None
    ) -> DFlashConfig:
        """From the contents of a config.json for which `is_dflash` is true.

        aux_layer_convention: as of `DraftConfig.from_hf`; None: the one of the file's format.

        Raises ModelLoadError naming the setting that is missing or not implemented, or both values where the
        head does not fit its target.
        """
        settings = draft_settings(config)
        _check_options(config, settings)
        shape = _read_shape(settings, target)
        check_vocabulary(shape.vocab_size, target)
        _check_number(settings, "target_hidden_size", target.hidden_size)
        _check_number(settings, "num_target_layers", target.num_layers)
        return cls(
            shape=shape,
            draft_vocab_size=read_draft_vocab_size(settings, shape.vocab_size),
            target_hidden_size=target.hidden_size,
            aux_layers=_aux_layers(settings, target.num_layers, aux_layer_convention),
            num_masks=_num_masks(settings),
            mask_token_id=read_mask_token(settings, ["mask_token_id"], shape.vocab_size),
            is_causal=_read_causal(settings, shape),
        )


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a head of this kind, implemented or not."""
    names = (*REFUSED, "dflash")
    architectures = config.get("architectures")
    found = [str(name).lower() for name in architectures] if isinstance(architectures, list) else []
    is_named = any(name in architecture for architecture in found for name in names)
    return is_named or TABLE in config or algorithm(config) in names


def read_head_config(
    config: Mapping[str, Any], target: ModelSpec, *, aux_layer_convention: str | None = None
) -> DraftConfig | DFlashConfig:
    """Of a head of any kind, from the contents of its config.json; arguments and errors as of `from_hf`."""
    kind = DFlashConfig if is_dflash(config) else DraftConfig
    return kind.from_hf(config, target, aux_layer_convention=aux_layer_convention)


def _check_options(config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    architectures = settings["architectures"]
    if architectures is not None and not isinstance(architectures, list):
        raise ModelLoadError(
            f"config: architectures={short_repr(architectures)}: expected a list of one name"
        )

    found = [algorithm(config), settings.get("projector_type"), *(architectures or ())]
    for name, reason in REFUSED.items():
        if any(name in str(each).lower() for each in found):
            raise ModelLoadError(f"config: {reason}, is not implemented")

    model_type = (config.get("transformer_layer_config") or config).get("model_type")
    if model_type != "qwen3":
        raise ModelLoadError(f"config: model_type={short_repr(model_type)}: expected 'qwen3'")

    for name, implemented in FIXED_OPTIONS.items():
        value = settings.get(name, implemented)
        if value != implemented or isinstance(value, bool) != isinstance(implemented, bool):
            raise ModelLoadError(
                f"config: {name}={short_repr(value)}: only {short_repr(implemented)} is implemented"
            )

    for name, value in read_table(config, TABLE).items():
        if name not in KNOWN and name not in FIXED_OPTIONS:
            raise ModelLoadError(f"config: {TABLE} has {name}={short_repr(value)}, which is not known")

    for name in ("block_size", "mask_token_id"):
        if name not in settings:
            raise ModelLoadError(f"config: {name} is missing")


def _read_shape(settings: Mapping[str, Any], target: ModelSpec) -> ModelSpec:
    """The layers, which are Qwen3's. The rotation is computed from positions, so the head's own context is no
    limit."""
    layers: dict[str, Any] = {"max_position_embeddings": target.max_position_embeddings, **settings}
    if isinstance(types := settings.get("layer_types"), list):
        layers["use_sliding_window"] = "sliding_attention" in types
    if "swa_window_size" in settings:
        layers["sliding_window"] = settings["swa_window_size"]
    shape = read_spec(layers | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    check_layers(shape)
    return shape


def _num_masks(settings: Mapping[str, Any]) -> int:
    size = settings["block_size"]
    if not is_int(size) or not 2 <= size <= MAX_MASKS + 1:
        raise ModelLoadError(f"config: block_size={short_repr(size)}: expected 2 to {MAX_MASKS + 1}")

    return int(size) - 1


def _read_causal(settings: Mapping[str, Any], shape: ModelSpec) -> tuple[bool, ...]:
    """Without a setting, layers with windows are causal and others are not."""
    given = {name: read_flag(settings, name) for name in ("is_causal", "causal") if name in settings}
    if len(set(given.values())) > 1:
        raise ModelLoadError(
            f"config: is_causal={given['is_causal']}, but causal={given['causal']}: expected the same"
        )

    for is_causal in given.values():
        return (is_causal,) * shape.num_layers

    has_causal = not read_flag(settings, "sliding_window_non_causal")
    return tuple(has_causal and window is not None for window in shape.windows)


def _aux_layers(settings: Mapping[str, Any], num_layers: int, convention: str | None) -> tuple[int, ...]:
    check_convention(convention)
    names = [name for name in (FLAT_IDS, NESTED_IDS) if name in settings]
    if len(names) != 1:
        found = " and ".join(names) or "no layers of the target"
        raise ModelLoadError(f"config: {found}: expected {FLAT_IDS} or {NESTED_IDS}")

    name = names[0]
    own = "output" if name == FLAT_IDS else "boundary"
    layers = layers_of_ids(name, settings[name], num_layers, convention or own)
    if not layers:
        raise ModelLoadError(f"config: {name}=[]: expected one layer or more")

    return tuple(layers)


def _check_number(settings: Mapping[str, Any], name: str, expected: int) -> None:
    if (value := settings.get(name, expected)) != expected:
        raise ModelLoadError(
            f"config: {name}={short_repr(value)}, its target has {expected}: expected the same"
        )


@dataclass(frozen=True, slots=True)
class DFlashWeights:
    """The weights of a head. Matrices may be quantised.

    embedding:                [vocab, hidden]; None: the target's, with what the target does to it.
    fc:                       [hidden, num_features * target_hidden].
    hidden_norm, final_norm:  [hidden], of features, and after the layers.
    head:                     [draft_vocab, hidden].
    target_ids:               [draft_vocab] int64, the target's token id for each of the draft's.
    """

    embedding: torch.Tensor | None
    fc: Matrix
    hidden_norm: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Matrix
    target_ids: torch.Tensor

    def context_projection(self, index: int) -> tuple[Matrix, torch.Tensor | None, int]:
        """What layer `index` makes keys and values of features with: a matrix, its bias, and how many of its
        first rows have another use. These are the queries', in a quantised matrix, which is not divided."""
        mixer = self.layers[index].mixer
        assert isinstance(mixer, AttentionWeights)
        num_rows, bias = mixer.output.shape[1], mixer.qkv_bias
        if not isinstance(mixer.qkv, torch.Tensor):
            return mixer.qkv, bias, num_rows

        return mixer.qkv[num_rows:], None if bias is None else bias[num_rows:], 0


def dflash_shapes(config: DFlashConfig, *, has_tables: bool = True) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a head's tensors. has_tables: with embedding and head, which may be the
    target's if both have one width."""
    shapes = {name: tuple(place.shape) for name, place in _meta_places(config).items()}
    return shapes | _table_shapes(config) if has_tables else shapes


def _table_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    width = config.shape.hidden_size
    return {EMBEDDING: (config.shape.vocab_size, width), HEAD: (config.draft_vocab_size, width)}


def _meta_places(config: DFlashConfig, read: ReadMatrix = no_matrix) -> dict[str, torch.Tensor]:
    """The tensors of files, without memory, but for embedding and head. read: as in Allocation."""
    allocation = Allocation(torch.device("meta"), torch.float32, read)
    unknown = allocation.empty(0)
    _allocate(config, allocation, None, unknown, unknown)
    return allocation.places


def _allocate(
    config: DFlashConfig,
    allocation: Allocation,
    embedding: torch.Tensor | None,
    head: Matrix,
    target_ids: torch.Tensor,
) -> DFlashWeights:
    """Weights that are not initialised but for those given."""
    shape, width = config.shape, config.shape.hidden_size
    return DFlashWeights(
        embedding=embedding,
        fc=allocation.matrix(FC, width, len(config.aux_layers) * config.target_hidden_size),
        hidden_norm=allocation.tensor(HIDDEN_NORM, width),
        layers=tuple(
            allocate_layer(layer, shape.names, f"layers.{index}", width, allocation)
            for index, layer in enumerate(shape.layers)
        ),
        final_norm=allocation.tensor(FINAL_NORM, width),
        head=head,
        target_ids=target_ids,
    )


def load_dflash_weights(
    config: DFlashConfig,
    tensors: TensorSource,
    target_ids: torch.Tensor,
    target: Decoder,
    form: DraftForm = "expanded",
) -> DFlashWeights:
    """Weights on the target's device, in its dtype; arguments and errors as of `load_draft_weights`."""
    width = config.shape.hidden_size
    tables, required = _table_shapes(config), dflash_shapes(config, has_tables=False)
    check_names(tensors, required if width == config.target_hidden_size else required | tables, tables)
    projections: list[str] = []
    _meta_places(config, lambda name, is_projection: projections.append(name))
    for name in projections:
        check_pairs(tensors, name, form)

    names, ids = set(tensors.names()), target_ids.to(target.device)
    num_bytes = sum(torch.Size(shape).numel() for shape in required.values()) * target.dtype.itemsize
    with memory_named(tensors.location, target.device, lambda: num_bytes):
        reader = MatrixReader(tensors, form, device=target.device, dtype=target.dtype, on_read=lambda: None)
        allocation = Allocation(target.device, target.dtype, reader.read)
        embedding = allocation.tensor(EMBEDDING, *tables[EMBEDDING]) if EMBEDDING in names else None
        head: Matrix
        if HEAD in names:
            head = allocation.matrix(HEAD, *tables[HEAD])
        elif embedding is not None and config.shape.is_head_tied:
            head = embedding
        else:
            whole = target.weights.head
            head = whole if len(ids) == whole.shape[0] else take_rows(whole, ids)
        weights = _allocate(config, allocation, embedding, head, ids)
        for name, place in fill_places(allocation.places, tensors):
            reader.finite.add(name, place)
        reader.finite.finish()
        allocation.finish()
    return weights


class DFlashDecoder:
    """A head of one target. It owns weights only, in the dtype and on the device of its target.

    Keys and values of a position lie at the KV slot of its token, as the target's do. They are projections of
    the position's feature, so they depend on the tokens up to it and on no other row of the head.
    """

    def __init__(self, config: DFlashConfig, weights: DFlashWeights, target: Decoder) -> None:
        self.config = config
        self.weights = weights
        self._target = target
        self._frequencies = {rope: rope.frequencies().to(self.device) for rope in config.shape.ropes}

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        source: Source,
        target: Decoder,
        *,
        form: DraftForm = "expanded",
        aux_layer_convention: str | None = None,
        has_weights: bool = True,
    ) -> Self:
        """A head from its files. has_weights: else the weights are random. Other arguments and errors as of
        `DraftDecoder.load`."""
        with explain_errors(source):
            settings = source.config  # its errors name the file
            try:
                config = DFlashConfig.from_hf(
                    settings, target.spec, aux_layer_convention=aux_layer_convention
                )
            except ModelLoadError as error:
                raise ModelLoadError(f"{source.path}: {error}") from error

            if not has_weights:
                return cls.random(config, target, form=form)

            tensors = DraftTensors(source.path)
            ids = read_target_ids(tensors, config.shape.vocab_size, config.draft_vocab_size)
            return cls(config, load_dflash_weights(config, tensors, ids, target, form), target)

    @classmethod
    @torch.inference_mode()
    def random(
        cls, config: DFlashConfig, target: Decoder, seed: int = 0, *, form: DraftForm = "expanded"
    ) -> Self:
        """A head with random weights, the same for the same seed, with an embedding and a head of its own. A
        reduced vocabulary is spread evenly over the target's."""
        shapes = dflash_shapes(config)
        tensors = RandomTensors(shapes, device=target.device, dtype=target.dtype, seed=seed)
        number = config.draft_vocab_size
        ids = torch.arange(number, device="cpu") * config.shape.vocab_size // number
        return cls(config, load_dflash_weights(config, tensors, ids, target, form), target)

    @property
    def device(self) -> torch.device:
        return self.weights.final_norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.final_norm.dtype

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose input `features` takes, low to high."""
        return self.config.aux_layers

    @property
    def target_ids(self) -> torch.Tensor:
        """The target's token id for each of the draft's, [draft_vocab] int64."""
        return self.weights.target_ids

    def decoder(self) -> Decoder:
        """The layers as a decoder: from tokens, embedded as `forward` does, to the input of `logits`."""
        shape, weights, target = self.config.shape, self.weights, self._target
        embedding: Matrix | None = weights.embedding
        if embedding is None:
            embedding, given = target.weights.embedding, target.spec
            shape = structs.replace(
                shape,
                embedding_multiplier=given.embedding_multiplier,
                has_rounded_multiplier=given.has_rounded_multiplier,
                embedding_norm=given.embedding_norm,
            )
        return Decoder(shape, DecoderWeights(embedding, weights.layers, weights.final_norm, weights.head))

    def empty_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """A KV cache for this head, not initialised."""
        shapes = [layer.kv for layer in self.config.shape.layers]
        return KVCache(shapes, num_blocks, block_size, self.dtype, self.device)

    @torch.inference_mode()
    def features(self, aux_hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Features [N, hidden] of the target's residual stream at `aux_layers`, [N, target_hidden] each."""
        fused = linear(torch.cat(tuple(aux_hidden), dim=-1), self.weights.fc)
        return normalise(fused, self.weights.hidden_norm, self.config.shape.final_norm)

    @torch.inference_mode()
    def store(self, features: torch.Tensor, batch: AttentionBatch, cache: KVCache) -> None:
        """Write the keys and values of features [N, hidden], those of the batch's positions, to the cache."""
        step = self._step(batch, cache)
        for index, (layer, weights) in enumerate(self.layers()):
            assert isinstance(layer.mixer, Attention) and isinstance(weights.mixer, AttentionWeights)
            _, key, value, _ = project(features, weights.mixer, layer.mixer, step)
            cache.store(index, batch.slot_mapping, key, value)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, batch: ParallelAttentionBatch, cache: KVCache) -> torch.Tensor:
        """The output [N, hidden] of anchors and masks, the input of `logits`.

        token_ids:  [N] int64, `mask_token_id` for masks.
        cache:      has keys and values of all positions before the anchors; nothing is written.
        """
        step = self._step(batch, cache)
        embedding = self.weights.embedding
        if embedding is None:
            hidden = self._target.embedded(token_ids)
        else:
            hidden = embed(token_ids, embedding, self.dtype)
        for index, (layer, weights) in enumerate(self.layers()):
            assert isinstance(layer.mixer, Attention) and isinstance(weights.mixer, AttentionWeights)
            normed = normalise(hidden, weights.mixer_norm, layer.norm)
            hidden = hidden + attend(normed, weights.mixer, layer.mixer, step, index)
            normed = normalise(hidden, weights.channel_norm, layer.norm)
            hidden = hidden + apply_channel(normed, hidden, weights.channel, layer.channel)

        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [M, draft_vocab] of rows [M, hidden] that `forward` returned: of the tokens at the
        rows' own positions."""
        normed = normalise(hidden, self.weights.final_norm, self.config.shape.final_norm)
        return linear(normed, self.weights.head).to(torch.float32)

    def layers(self) -> Iterator[tuple[LayerSpec, LayerWeights]]:
        """The description and the weights of each layer."""
        return zip(self.config.shape.layers, self.weights.layers, strict=True)

    def _step(self, batch: AttentionBatch | ParallelAttentionBatch, cache: KVCache) -> AttentionStep:
        rotary = {
            rope: rotary_tables(batch.positions, frequencies, self.dtype, rope.magnitude)
            for rope, frequencies in self._frequencies.items()
        }
        return AttentionStep(batch, cache, rotary)
