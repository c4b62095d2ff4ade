"""The assistant of a Gemma 4 model: a few layers that draft its tokens and attend to its own keys and values.
Config, weights, and the forward pass.

A row joins the target's embedding of a token and a feature, and projects both to the width of the layers. The
first feature of a draft is the target's output after its final norm, of the last token that it has computed;
for more tokens the assistant's own output is projected back to the target's width. No layer has keys and
values: each attends to the keys and values of the target's last layer of its type that keeps some. All rows
of a draft stand at the position of the newest token, and see what a row of the target sees there, but for the
key of that token, which is computed when the draft is verified. So a draft writes nothing to the cache.

In assistants with ordered embeddings, tokens lie in clusters, and tokens of the best clusters alone are
proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from msgspec import Struct
from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.families import read_spec
from drift_sdk.loading.draft import INTEGERS, DraftTensors, read_vector
from drift_sdk.loading.random import RandomTensors
from drift_sdk.loading.source import Source, name_role
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.allocation import (
    Allocation,
    MatrixReader,
    ReadMatrix,
    fill_places,
    memory_named,
    no_matrix,
)
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder, apply_channel
from drift_sdk.models.draft_config import check_vocabulary, is_int, read_flag
from drift_sdk.models.draft_head import DraftForm, check_names, check_pairs
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.layers import linear, normalise, rotary_tables
from drift_sdk.models.mixers.attention import AttentionStep, AttentionWeights, attend
from drift_sdk.models.weights import DecoderWeights, allocate_layer
from drift_sdk.spec.model import Attention, ModelSpec

MODEL_TYPES = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
"""Kinds of assistants, with the kind of their layers."""
ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
PRE, POST = "pre_projection.weight", "post_projection.weight"
CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
QUANTISED = "quantization_config"
"""Stands beside the table of the layers, or in it."""
ABSENT = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")
"""Options of Gemma 4 that no assistant has."""
EQUAL = {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "window": "sliding_window",
    "rope": "rope_parameters",
}
"""What a layer and the one whose keys it reads have in common, with the names of settings."""


class AssistantConfig(Struct, frozen=True, kw_only=True):
    """Shapes and options of the assistant of one target. Names in brackets stand in its config.json.

    shape:              of its layers, norm and vocabulary. The attention of a layer names the target's layer
                        whose keys and values it reads; its window is the target's without the newest token.
    target_hidden_size: width of the target's residual stream (`backbone_hidden_size`).
    num_clusters:       of the vocabulary, all of one size (`num_centroids`); 0: all tokens are proposed.
    num_best_clusters:  whose tokens are proposed after a row (`centroid_intermediate_top_k`).
    """

    shape: ModelSpec
    target_hidden_size: int
    num_clusters: int = 0
    num_best_clusters: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelSpec) -> AssistantConfig:
        """From the contents of a config.json for which `is_assistant` is true.

        Raises ModelLoadError naming the setting that is missing, out of range or not implemented, or both
        values where the assistant does not fit its target.
        """
        shape = _read_shape(config)
        width = config.get("backbone_hidden_size")
        if width != target.hidden_size:
            raise ModelLoadError(
                f"config: backbone_hidden_size={short_repr(width)}, its target has a hidden size of "
                f"{target.hidden_size}: expected the same"
            )

        check_vocabulary(shape.vocab_size, target)
        layers = tuple(
            replace(layer, mixer=_reading(index, layer.mixer, target))
            for index, layer in enumerate(shape.layers)
        )
        number, best = _read_clusters(config, shape.vocab_size)
        return cls(
            shape=replace(shape, layers=layers),
            target_hidden_size=target.hidden_size,
            num_clusters=number,
            num_best_clusters=best,
        )


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes an assistant."""
    architectures = config.get("architectures")
    is_named = isinstance(architectures, list) and any(name in ARCHITECTURES for name in architectures)
    return is_named or config.get("model_type") in tuple(MODEL_TYPES)


def _read_shape(config: Mapping[str, Any]) -> ModelSpec:
    """The layers, as if they had keys and values of their own. Its logits are not capped."""
    text, kind = config.get("text_config"), config.get("model_type", next(iter(MODEL_TYPES)))
    if not isinstance(text, Mapping):
        raise ModelLoadError(f"config: text_config={short_repr(text)}: expected a table of settings")

    expected = MODEL_TYPES.get(kind) if isinstance(kind, str) else None
    if expected is None:
        known = " or ".join(map(repr, MODEL_TYPES))
        raise ModelLoadError(f"config: model_type={short_repr(kind)}: expected {known}")

    if (found := text.get("model_type", expected)) != expected:
        raise ModelLoadError(f"config: text_config: model_type={short_repr(found)}: expected {expected!r}")

    if not read_flag(config, "tie_word_embeddings", default=True):
        raise ModelLoadError("config: tie_word_embeddings=False: only True is implemented in assistants")

    for name in ABSENT:
        if text.get(name):
            raise ModelLoadError(
                f"config: {name}={short_repr(text[name])}: only 0 or false is implemented in assistants"
            )

    num_layers, num_shared = text.get("num_hidden_layers"), text.get("num_kv_shared_layers")
    if num_shared and num_shared != num_layers:
        raise ModelLoadError(
            f"config: num_kv_shared_layers={short_repr(num_shared)}: expected "
            f"{short_repr(num_layers)}, all layers"
        )

    own: dict[str, Any] = {
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "model_type": expected,
    }
    if config.get(QUANTISED) is not None:
        own[QUANTISED] = config[QUANTISED]
    shape = read_spec({name: text[name] for name in text if name != "architectures"} | own)
    if shape.quantisation is not None:
        raise ModelLoadError(
            f"config: assistants with quantised files ({shape.quantisation.name}) are refused"
        )

    return replace(shape, logits_cap=None)


def _reading(index: int, mixer: object, target: ModelSpec) -> Attention:
    """The attention of a layer to keys and values of the target. ModelLoadError if they do not fit."""
    assert isinstance(mixer, Attention)
    source, kept = _kept_layer(index, mixer, target)
    for field, name in EQUAL.items():
        own, other = getattr(mixer, field), getattr(kept, field)
        if own != other:
            raise ModelLoadError(
                f"config: layer {index} has {name}={short_repr(own)}, layer {source} of its target, whose "
                f"keys it reads, {short_repr(other)}: expected the same"
            )

    window = mixer.window
    if window is None:
        return replace(mixer, kv_of=source)

    if window < 2:
        raise ModelLoadError(f"config: sliding_window={window}: expected 2 or more in assistants")

    return replace(mixer, kv_of=source, window=window - 1)


def _kept_layer(index: int, mixer: Attention, target: ModelSpec) -> tuple[int, Attention]:
    """The target's last layer of the type of layer `index` that keeps keys and values."""
    has_window = mixer.window is not None
    for number in reversed(range(target.num_layers)):
        found = target.layers[number].mixer
        if isinstance(found, Attention) and found.kv_of is None and (found.window is not None) == has_window:
            return number, found

    kind = "sliding_attention" if has_window else "full_attention"
    raise ModelLoadError(
        f"config: layer {index} is of type {kind!r}: expected a target that has layers of this type"
    )


def _read_clusters(config: Mapping[str, Any], vocab_size: int) -> tuple[int, int]:
    if not read_flag(config, "use_ordered_embeddings"):
        return 0, 0

    number: Any = config.get("num_centroids")
    best: Any = config.get("centroid_intermediate_top_k")
    if not is_int(number) or number < 1 or vocab_size % number:
        raise ModelLoadError(
            f"config: num_centroids={short_repr(number)}: expected a divisor of vocab_size={vocab_size}"
        )

    if not is_int(best) or not 1 <= best <= number:
        raise ModelLoadError(
            f"config: centroid_intermediate_top_k={short_repr(best)}: expected 1 to {number}, num_centroids"
        )

    return number, best


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantWeights(DecoderWeights):
    """The weights of an assistant: of its layers, with the head as the embedding, and of what is around them.

    pre:       [hidden, 2 * target_hidden], of embedding and feature.
    post:      [target_hidden, hidden], of the next feature.
    centroids: [num_clusters, hidden]; None: there are no clusters.
    clusters:  [vocab] int32, the cluster of each token; None: there are none.
    """

    pre: torch.Tensor
    post: torch.Tensor
    centroids: torch.Tensor | None
    clusters: torch.Tensor | None


def assistant_shapes(config: AssistantConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of an assistant's tensors of numbers."""
    return {name: tuple(place.shape) for name, place in _meta_places(config).items()}


def _meta_places(config: AssistantConfig, read: ReadMatrix = no_matrix) -> dict[str, torch.Tensor]:
    """The tensors of files, without memory. read: as in Allocation."""
    allocation = Allocation(torch.device("meta"), torch.float32, read)
    _allocate(config, allocation, None)
    return allocation.places


def _allocate(
    config: AssistantConfig, allocation: Allocation, clusters: torch.Tensor | None
) -> AssistantWeights:
    """Weights that are not initialised but for those given. All outside of layers are dense."""
    shape, width, target_width = config.shape, config.shape.hidden_size, config.target_hidden_size
    names, centroids = shape.names, None
    head = allocation.tensor(names.embedding, shape.vocab_size, width)
    if config.num_clusters:
        centroids = allocation.tensor(CENTROIDS, config.num_clusters, width)
    return AssistantWeights(
        embedding=head,
        layers=tuple(
            allocate_layer(layer, names, names.layer.format(index), width, allocation)
            for index, layer in enumerate(shape.layers)
        ),
        final_norm=allocation.tensor(names.final_norm, width),
        head=head,
        pre=allocation.tensor(PRE, width, 2 * target_width),
        post=allocation.tensor(POST, target_width, width),
        centroids=centroids,
        clusters=clusters,
    )


def load_assistant_weights(
    config: AssistantConfig,
    tensors: TensorSource,
    clusters: torch.Tensor | None,
    target: Decoder,
    form: DraftForm = "expanded",
) -> AssistantWeights:
    """Weights on the target's device, in its dtype; as `form` says, the matrices of layers are quantised.

    clusters: as AssistantWeights has them, on any device. Errors as of `load_draft_weights`.
    """
    required, names = assistant_shapes(config), config.shape.names
    copy = {names.head: required[names.embedding]}  # which is not read
    ordering = {ORDERING: (config.shape.vocab_size,)} if config.num_clusters else {}
    check_names(tensors, required, copy | ordering)
    projections: list[str] = []
    _meta_places(config, lambda name, is_projection: projections.append(name))
    for name in projections:
        check_pairs(tensors, name, form)

    num_bytes = sum(torch.Size(shape).numel() for shape in required.values()) * target.dtype.itemsize
    with memory_named(tensors.location, target.device, lambda: num_bytes):
        reader = MatrixReader(tensors, form, device=target.device, dtype=target.dtype, on_read=lambda: None)
        allocation = Allocation(target.device, target.dtype, reader.read)
        own = None if clusters is None else clusters.to(target.device, torch.int32)
        weights = _allocate(config, allocation, own)
        for name, place in fill_places(allocation.places, tensors):
            reader.finite.add(name, place)
        reader.finite.finish()
        allocation.finish()
    return weights


def read_cluster_ids(config: AssistantConfig, tensors: TensorSource) -> torch.Tensor | None:
    """The cluster of each token, [vocab] int64 on the CPU; None: there are no clusters.

    Files list the tokens of all clusters, one cluster after the other. Raises ModelLoadError naming tensor
    and value for one that is missing, of another shape or type, or that does not list every token once.
    """
    if not config.num_clusters:
        return None

    size = config.shape.vocab_size
    if ORDERING not in tensors.names():
        raise ModelLoadError(f"{tensors.location}: tensor {ORDERING} of shape [{size}] is missing")

    order = read_vector(tensors, ORDERING, size, INTEGERS).to(torch.int64)
    if not torch.equal(order.sort().values, torch.arange(size, device="cpu")):
        raise ModelLoadError(
            f"{tensors.file(ORDERING)}: tensor {ORDERING} has values from {int(order.min())} to "
            f"{int(order.max())}, {len(order.unique())} different ones: expected each of 0 to {size - 1} once"
        )

    clusters = torch.empty_like(order)
    clusters[order] = torch.arange(size, device="cpu") // (size // config.num_clusters)
    return clusters


class NewestRows(AttentionBatch):
    """A row for each sequence at the position of its newest token, whose key and value are not known yet: it
    sees the keys before it, and has none itself."""

    def __init__(self, sequences: Sequence[SequenceRows], cache: KVCache) -> None:
        """sequences: one row each, at the position before the newest token's."""
        super().__init__(sequences, cache)
        self.positions = self.positions + 1


class AssistantDecoder:
    """The assistant of one target. It owns weights only, in the dtype and on the device of its target.

    layers: its layers and head, a decoder that cannot be run by itself.
    """

    def __init__(self, config: AssistantConfig, weights: AssistantWeights, target: Decoder) -> None:
        self.config = config
        self.layers = Decoder(config.shape, weights)
        self._target = target
        self._frequencies = {rope: rope.frequencies().to(self.device) for rope in config.shape.ropes}

    @classmethod
    @torch.inference_mode()
    def load(
        cls, source: Source, target: Decoder, *, form: DraftForm = "expanded", has_weights: bool = True
    ) -> Self:
        """An assistant from its files. has_weights: else the weights are random.

        form: as in `load_assistant_weights`. Raises ModelLoadError that says it is about the draft and names
        the file: for a file that is missing or broken, for a setting that is not implemented, and for an
        assistant that does not fit the target.
        """
        with name_role("draft"):
            settings = source.config  # its errors name the file
            try:
                config = AssistantConfig.from_hf(settings, target.spec)
            except ModelLoadError as error:
                raise ModelLoadError(f"{source.path}: {error}") from error

            if not has_weights:
                return cls.random(config, target, form=form)

            tensors = DraftTensors(source.path)
            clusters = read_cluster_ids(config, tensors)
            return cls(config, load_assistant_weights(config, tensors, clusters, target, form), target)

    @classmethod
    @torch.inference_mode()
    def random(
        cls, config: AssistantConfig, target: Decoder, seed: int = 0, *, form: DraftForm = "expanded"
    ) -> Self:
        """An assistant with random weights, the same for the same seed. Tokens lie in clusters in order."""
        shapes, clusters = assistant_shapes(config), None
        factors = {name: (1.0, 0.02) for name in shapes if name.endswith(config.shape.names.factor)}
        tensors = RandomTensors(shapes, device=target.device, dtype=target.dtype, seed=seed, moments=factors)
        if config.num_clusters:
            size = config.shape.vocab_size
            clusters = torch.arange(size, device="cpu") // (size // config.num_clusters)
            shapes[ORDERING] = (size,)
        return cls(config, load_assistant_weights(config, tensors, clusters, target, form), target)

    @property
    def weights(self) -> AssistantWeights:
        weights = self.layers.weights
        assert isinstance(weights, AssistantWeights)
        return weights

    @property
    def device(self) -> torch.device:
        return self.layers.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers.dtype

    @torch.inference_mode()
    def forward(
        self, features: torch.Tensor, token_ids: torch.Tensor, batch: NewestRows, cache: KVCache
    ) -> torch.Tensor:
        """The output [N, hidden] of rows, after the final norm: the input of `logits` and `next_features`.

        features:   [N, target_hidden], of the positions before the tokens'.
        token_ids:  [N] int64.
        cache:      the target's. Nothing is written.
        """
        rotary = {
            rope: rotary_tables(batch.positions, frequencies, self.dtype, rope.magnitude)
            for rope, frequencies in self._frequencies.items()
        }
        step, weights = AttentionStep(batch, cache, rotary), self.weights
        hidden = linear(torch.cat((self._target.embedded(token_ids), features), dim=-1), weights.pre)
        for index, (layer, own) in enumerate(zip(self.config.shape.layers, weights.layers, strict=True)):
            assert isinstance(layer.mixer, Attention) and isinstance(own.mixer, AttentionWeights)
            assert own.mixer_post_norm is not None and own.channel_post_norm is not None
            assert layer.post_norm is not None and own.factor is not None
            normed = normalise(hidden, own.mixer_norm, layer.norm)
            mixed = attend(normed, own.mixer, layer.mixer, step, index)
            hidden = hidden + normalise(mixed, own.mixer_post_norm, layer.post_norm)
            normed = normalise(hidden, own.channel_norm, layer.norm)
            output = apply_channel(normed, hidden, own.channel, layer.channel)
            hidden = hidden + normalise(output, own.channel_post_norm, layer.post_norm)
            hidden = hidden * own.factor

        return self.layers.final_normed(hidden)

    @torch.inference_mode()
    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Float32 logits [M, vocab] of rows [M, hidden] that `forward` returned; -inf for tokens outside of
        the best clusters."""
        weights = self.weights
        logits = linear(output, weights.head).to(torch.float32)
        if weights.centroids is None or weights.clusters is None:
            return logits

        scores = linear(output, weights.centroids).to(torch.float32)
        is_best = torch.zeros_like(scores, dtype=torch.bool)
        is_best.scatter_(1, scores.topk(self.config.num_best_clusters).indices, True)
        return logits.masked_fill_(~is_best[:, weights.clusters.to(torch.int64)], -torch.inf)

    @torch.inference_mode()
    def next_features(self, output: torch.Tensor) -> torch.Tensor:
        """The features [M, target_hidden] of the rows after those [M, hidden] that `forward` returned."""
        return linear(output, self.weights.post)
