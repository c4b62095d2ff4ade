"""Draft heads: one or a few layers that predict the target's next feature. Weights and forward pass.

In EAGLE-3 ("Scaling up Inference Acceleration of Large Language Models via Training-Time Test", arXiv
2503.01840) a feature is made of the target's residual stream at a few layers, and layers are Llama's. Some
weights may be shared with the target.

In MTP the head is a layer of the target's own files that predicts one more token. The feature of a position
is the target's output after its final norm. Feature and the embedding of the next token are normalised,
joined and projected; one layer like the target's follows, then a norm. Embedding and head are the target's.
For more tokens the layer is repeated, with its own output as the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError
from drift_sdk.events import Report
from drift_sdk.loading.draft import OFFSETS, PROPOSABLE, DraftTensors, read_target_ids
from drift_sdk.loading.random import RandomFp8Tensors, RandomTensors
from drift_sdk.loading.source import Source, name_role, resolve
from drift_sdk.loading.tensors import FiniteCheck, TensorSource, check_dtype
from drift_sdk.models.allocation import (
    PAIRED,
    QUANTISERS,
    Allocation,
    MatrixReader,
    ReadMatrix,
    WeightForm,
    fill_places,
    memory_named,
    no_matrix,
)
from drift_sdk.models.attention import StepRows
from drift_sdk.models.channels import MlpWeights
from drift_sdk.models.decoder import Decoder, apply_channel, apply_mixer
from drift_sdk.models.draft_config import DraftConfig, is_model_config
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.layers import embed, linear, normalise, rotary_tables
from drift_sdk.models.mixers.attention import AttentionStep, AttentionWeights
from drift_sdk.models.weights import DecoderWeights, LayerWeights, allocate_layer, others, stored_layout
from drift_sdk.quantised.weight import Matrix, take_rows
from drift_sdk.spec.model import Attention, Experts, Mlp, ModelSpec

DraftForm = Literal["expanded", "fp8", "int4"]
"""Form of a draft's weights in memory, see WeightForm."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
FC, INPUT_NORM, FINAL_NORM = "fc.weight", "input_norm.weight", "norm.weight"
HIDDEN_NORM = "layers.0.hidden_norm.weight"
MASK = "mask_hidden"


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The weights of a draft. In EAGLE-3 the first layer's qkv has 2 * hidden columns, those for the
    embedding first; in MTP `joint` does. Matrices may be quantised.

    embedding:                [vocab, hidden].
    fc:                       [hidden, num_features * target_hidden].
    input_norm:               [num_features * target_hidden].
    feature_norms:            [target_hidden] each.
    embedding_norm, hidden_norm, final_norm: [hidden], of embeddings, of features, and after the layers.
    joint:                    [hidden, 2 * hidden].
    head:                     [draft_vocab, hidden].
    target_ids:               [draft_vocab] int64, the target's token id for each of the draft's.
    mask:                     [1, 1, num_features * target_hidden], in the place of the target's hidden states
                              that are not known yet (P-EAGLE).
    """

    embedding: Matrix
    fc: Matrix | None
    input_norm: torch.Tensor | None
    feature_norms: tuple[torch.Tensor, ...]
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Matrix
    target_ids: torch.Tensor
    joint: Matrix | None = None
    mask: torch.Tensor | None = None


def required_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that every draft of this config must store."""
    hidden, num_features = config.hidden_size, len(config.aux_layers)
    shapes: dict[str, tuple[int, ...]] = {}
    if config.aux_layers:
        shapes[FC] = (hidden, num_features * config.target_hidden_size)

    if config.has_input_norm:
        shapes[INPUT_NORM] = (num_features * config.target_hidden_size,)

    if config.has_feature_norms:
        shapes |= {_feature_norm(index): (config.target_hidden_size,) for index in range(num_features)}

    shapes[HIDDEN_NORM] = (hidden,)
    for index in range(config.num_layers):
        shapes |= _layer_shapes(config, index)

    if config.mask_token_id is not None:  # the embedding of the mask is not the target's
        shapes[MASK] = (1, 1, num_features * config.target_hidden_size)
        shapes[EMBEDDING] = (config.vocab_size, hidden)

    return shapes | {FINAL_NORM: (hidden,)}


def shareable_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that a draft of the target's width may share with it instead."""
    return {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        HEAD: (config.draft_vocab_size, config.hidden_size),
    }


def load_draft_weights(
    config: DraftConfig,
    tensors: TensorSource,
    target_ids: torch.Tensor,
    target: DecoderWeights,
    form: DraftForm = "expanded",
) -> DraftWeights:
    """Weights on the target's device, in its dtype; as `form` says, the draft's own matrices but the
    embedding are quantised.

    target_ids: as DraftWeights has them, on any device. Embedding and head are the target's if `tensors` has
    none; of the head, only the rows of `target_ids`.

    Raises ModelLoadError naming tensor, file, found and expected shape for a tensor that is missing,
    unexpected, misshapen or not finite, of an odd number of columns for "int4", and if there is not enough
    memory.
    """
    required, shareable = required_shapes(config), shareable_shapes(config)
    if config.hidden_size != config.target_hidden_size:
        # The target's embedding and head have another width.
        required |= shareable

    check_names(tensors, required, shareable)
    reader = _Reader(tensors, target.final_norm, form)
    names = tensors.names()
    embedding = reader.read(EMBEDDING) if EMBEDDING in names else target.embedding
    ids = target_ids.to(target.final_norm.device)
    if HEAD in names:
        head = reader.read_matrix(HEAD)
    else:
        whole = embedding if config.is_head_tied and EMBEDDING in names else target.head
        head = whole if len(ids) == whole.shape[0] else take_rows(whole, ids)

    feature_norms = range(len(config.aux_layers) if config.has_feature_norms else 0)
    layers = tuple(_read_layer(config, reader, index) for index in range(config.num_layers))
    weights = DraftWeights(
        embedding=embedding,
        fc=reader.read_matrix(FC) if config.aux_layers else None,
        input_norm=reader.read(INPUT_NORM) if config.has_input_norm else None,
        feature_norms=tuple(reader.read(_feature_norm(index)) for index in feature_norms),
        embedding_norm=layers[0].mixer_norm,
        hidden_norm=reader.read(HIDDEN_NORM),
        layers=layers,
        final_norm=reader.read(FINAL_NORM),
        head=head,
        target_ids=ids,
        mask=None if config.mask_token_id is None else reader.read(MASK),
    )
    reader.finite.finish()
    return weights


class _Reader:
    """Reads tensors into the dtype and onto the device of `like`, matrices as `form` says, and collects them
    for a check of finiteness."""

    def __init__(self, tensors: TensorSource, like: torch.Tensor, form: DraftForm) -> None:
        self._form: WeightForm = form
        self.finite = FiniteCheck(tensors)
        self._tensors = tensors
        self._like = like

    def read(self, name: str) -> torch.Tensor:
        """A copy of a tensor; ModelLoadError naming it for a wrong dtype or lack of memory."""
        tensor = self._tensors.get(name)
        check_dtype(self._tensors, name, tensor.dtype)
        try:
            tensor = tensor.to(device=self._like.device, dtype=self._like.dtype, copy=True)
        except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError
            file = self._tensors.file(name)
            raise ModelLoadError(f"{file}: no memory for tensor {name}: {error}") from error

        self.finite.add(name, tensor)
        return tensor

    def read_matrix(self, *names: str) -> Matrix:
        """One matrix of the rows of several tensors; ModelLoadError naming the first for a number of columns
        that the form cannot have."""
        check_pairs(self._tensors, names[0], self._form)
        parts = [self.read(name) for name in names]
        matrix = parts[0] if len(parts) == 1 else torch.cat(parts)
        quantise = QUANTISERS.get(self._form)
        return matrix if quantise is None else quantise(matrix)

    def read_projection(self, prefix: str, modules: str) -> Matrix:
        """One matrix of the rows of several modules' projections."""
        return self.read_matrix(*(f"{prefix}.{module}_proj.weight" for module in modules.split()))

    def read_biases(self, prefix: str, modules: str) -> torch.Tensor:
        """The biases of several modules' projections, as one."""
        return torch.cat([self.read(f"{prefix}.{module}_proj.bias") for module in modules.split()])


def _read_layer(config: DraftConfig, reader: _Reader, index: int) -> LayerWeights:
    prefix = f"layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    has_bias, has_mlp_bias = config.attention.has_bias, _mlp_of(config).has_bias
    has_norms = _has_head_norms(config)
    return LayerWeights(
        mixer_norm=reader.read(f"{prefix}.input_layernorm.weight"),
        mixer=AttentionWeights(
            qkv=reader.read_projection(attention, "q k v"),
            qkv_bias=reader.read_biases(attention, "q k v") if has_bias else None,
            query_norm=reader.read(f"{attention}.q_norm.weight") if has_norms else None,
            key_norm=reader.read(f"{attention}.k_norm.weight") if has_norms else None,
            output=reader.read_matrix(f"{attention}.o_proj.weight"),
            output_bias=reader.read(f"{attention}.o_proj.bias") if has_bias else None,
        ),
        channel_norm=reader.read(f"{prefix}.post_attention_layernorm.weight"),
        channel=MlpWeights(
            gate_up=reader.read_projection(mlp, "gate up"),
            gate_up_bias=reader.read_biases(mlp, "gate up") if has_mlp_bias else None,
            down=reader.read_matrix(f"{mlp}.down_proj.weight"),
            down_bias=reader.read(f"{mlp}.down_proj.bias") if has_mlp_bias else None,
        ),
    )


def _layer_shapes(config: DraftConfig, index: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors of one layer, without the hidden norm of the first."""
    prefix, hidden = f"layers.{index}", config.hidden_size
    query_size = config.attention.output_size
    kv_size = config.attention.num_kv_heads * config.attention.head_dim
    width = 2 * hidden if index == 0 else hidden
    attention = {
        "q": (query_size, width),
        "k": (kv_size, width),
        "v": (kv_size, width),
        "o": (hidden, query_size),
    }
    size = _mlp_of(config).intermediate_size
    mlp = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    if _has_head_norms(config):
        dim = config.attention.head_dim
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (dim,) for name in ("q", "k")}
    for part, modules, has_bias in (
        ("self_attn", attention, config.attention.has_bias),
        ("mlp", mlp, _mlp_of(config).has_bias),
    ):
        for module, shape in modules.items():
            shapes[f"{prefix}.{part}.{module}_proj.weight"] = shape
            if has_bias:
                shapes[f"{prefix}.{part}.{module}_proj.bias"] = shape[:1]

    return shapes


def _mlp_of(config: DraftConfig) -> Mlp:
    assert isinstance(config.layer.channel, Mlp)
    return config.layer.channel


def _has_head_norms(config: DraftConfig) -> bool:
    return isinstance(config.attention, Attention) and config.attention.head_norm is not None


def _feature_norm(index: int) -> str:
    return f"fc_norm.{index}.weight"


def check_pairs(tensors: TensorSource, name: str, form: WeightForm) -> None:
    """Raise ModelLoadError for a matrix of an odd number of columns in a form that has two in a byte."""
    num_columns = tensors.shape(name)[-1]
    if form in PAIRED and num_columns % 2:
        found = f"tensor {name} has {num_columns} columns, an odd number"
        raise ModelLoadError(f'{tensors.file(name)}: {found}: expected draft_weights other than "{form}"')


def check_names(
    tensors: TensorSource,
    required: Mapping[str, tuple[int, ...]],
    shareable: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise ModelLoadError for a tensor that is missing, unexpected or misshapen.

    required, shareable: names and shapes of the tensors that a draft must and may store.
    """
    names = set(tensors.names())
    missing = [name for name in required if name not in names]
    if missing:
        found = f"tensor {missing[0]} of shape {list(required[missing[0]])} is missing"
        raise ModelLoadError(f"{tensors.location}: {found}{others(missing)}")

    extra = names - required.keys() - shareable.keys() - {OFFSETS, PROPOSABLE}
    # Old files contain the frequencies of the rotation, which are computed from the config.
    extra = {name for name in extra if not name.endswith("rotary_emb.inv_freq")}
    if extra:
        name = min(extra)
        found = f"tensor {name} of shape {list(tensors.shape(name))} is not part of this draft"
        raise ModelLoadError(f"{tensors.file(name)}: {found}{others(sorted(extra))}")

    for name, expected in (dict(required) | dict(shareable)).items():
        if name in names and tensors.shape(name) != expected:
            found = f"tensor {name} has shape {list(tensors.shape(name))}, expected {list(expected)}"
            raise ModelLoadError(f"{tensors.file(name)}: {found}")


DRAFT_KV_OFFSET = 1
"""Draft row i combines the feature of position i with token i + 1. Its keys and values lie at KV slot i + 1,
so that the draft's KV in a block depends only on the tokens of that block and of those before it."""


class DraftDecoder:
    """A draft head of one target.

    Draft row i takes the feature of position i and token i + 1, and returns the next feature, from which
    `logits` predicts token i + 2.

    It owns weights only, in the dtype and on the device of its target; some are shared with the target. What
    rows see comes in an AttentionBatch made with `slot_offset=DRAFT_KV_OFFSET`; keys and values are kept in a
    KVCache of `num_layers` layers.

    mask_feature: [1, hidden], in the place of a feature that is not known yet; None: of a head that drafts
    one token after the other.
    """

    def __init__(self, config: DraftConfig, weights: DraftWeights, target: Decoder) -> None:
        self.config = config
        self.weights = weights
        self._target = target
        rope = config.attention.rope
        assert rope is not None
        self._rope, self._frequencies = rope, rope.frequencies().to(self.device)
        self.mask_feature: torch.Tensor | None = None
        if weights.mask is not None:
            parts = weights.mask.view(len(self.aux_layers), 1, -1).unbind(0)
            self.mask_feature = self.fuse(parts, parts[0])

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        name: str | Path,
        target: Decoder,
        *,
        form: DraftForm = "expanded",
        aux_layer_convention: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        report: Report | None = None,
    ) -> Self:
        """A draft from a folder or, for a str alone, a hub id.

        `form` as in `load_draft_weights`, `aux_layer_convention` as in DraftConfig.from_hf. `report` is
        called with (stage, fraction) while files are downloaded.

        Raises ModelLoadError that says it is about the draft and names the file: for a file that is missing
        or broken, for a setting that is not implemented, for a draft that does not fit the target, and for a
        whole model in place of a draft head.
        """
        source = resolve(
            name, role="draft", cache_dir=cache_dir, local_files_only=local_files_only, report=report
        )
        with explain_errors(source):
            config = _read_config(source, target, aux_layer_convention)
            tensors = DraftTensors(source.path)
            ids = read_target_ids(tensors, config.vocab_size, config.draft_vocab_size)
            return cls(config, load_draft_weights(config, tensors, ids, target.weights, form), target)

    @classmethod
    @torch.inference_mode()
    def random(
        cls, config: DraftConfig, target: Decoder, seed: int = 0, *, form: DraftForm = "expanded"
    ) -> Self:
        """A draft with random weights, the same for the same seed, with an embedding and a head that are not
        shared with the target. A reduced vocabulary is spread evenly over the target's."""
        shapes = required_shapes(config) | shareable_shapes(config)
        tensors = RandomTensors(shapes, device=target.device, dtype=target.dtype, seed=seed)
        ids = (
            torch.arange(config.draft_vocab_size, device="cpu") * config.vocab_size // config.draft_vocab_size
        )
        return cls(config, load_draft_weights(config, tensors, ids, target.weights, form), target)

    @classmethod
    def load_random(
        cls,
        name: str | Path,
        target: Decoder,
        *,
        form: DraftForm = "expanded",
        aux_layer_convention: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        report: Report | None = None,
    ) -> Self:
        """A draft with random weights and the config of a folder or hub id; arguments and errors as in
        `load`.

        The folder needs no weights.
        """
        source = resolve(
            name, role="draft", cache_dir=cache_dir, local_files_only=local_files_only, report=report
        )
        with explain_errors(source):
            config = _read_config(source, target, aux_layer_convention)
        return cls.random(config, target, form=form)

    @property
    def device(self) -> torch.device:
        return self.weights.final_norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.final_norm.dtype

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose input `fuse` takes, low to high; see DraftConfig."""
        return self.config.aux_layers

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def target_ids(self) -> torch.Tensor:
        """The target's token id for each of the draft's, [draft_vocab] int64."""
        return self.weights.target_ids

    def empty_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """A KV cache for this draft, not initialised."""
        shapes = [self.config.attention.kv] * self.config.num_layers
        return KVCache(shapes, num_blocks, block_size, self.dtype, self.device)

    @torch.inference_mode()
    def fuse(self, aux_hidden: Sequence[torch.Tensor], final_hidden: torch.Tensor) -> torch.Tensor:
        """Features [N, hidden] from what the target's `forward` returns.

        aux_hidden:    the residual stream at `aux_layers`, [N, target_hidden] each.
        final_hidden:  the residual stream after the last layer, [N, target_hidden].

        Neither is normalised yet. A row that the draft returns for its own next input is a feature already
        and is not passed to this function. Raises ValueError for a wrong number of tensors in `aux_hidden`.
        """
        if len(aux_hidden) != len(self.aux_layers):
            raise ValueError(f"aux_hidden: {len(aux_hidden)} tensors: expected {len(self.aux_layers)}")

        weights, norm = self.weights, self.config.norm
        if weights.fc is None:
            return self._target.final_normed(final_hidden)

        if weights.feature_norms:
            pairs = zip(aux_hidden, weights.feature_norms, strict=True)
            aux_hidden = [normalise(feature, weight, norm) for feature, weight in pairs]

        features = torch.cat(tuple(aux_hidden), dim=-1)
        if weights.input_norm is not None:
            features = normalise(features, weights.input_norm, norm)

        return linear(features, weights.fc)

    @torch.inference_mode()
    def forward(
        self, features: torch.Tensor, token_ids: torch.Tensor, batch: StepRows, cache: KVCache
    ) -> torch.Tensor:
        """The next features [N, hidden]: input of `logits`, and of the next call together with the tokens
        chosen from those logits.

        features:   [N, hidden], of positions i.
        token_ids:  [N] int64 in the target's vocabulary, of positions i + 1.
        batch:      has the positions i. The rows' keys and values are written to the cache.

        Raises ValueError for other shapes.
        """
        expected = (batch.num_rows, self.config.hidden_size)
        if features.shape != expected or token_ids.shape != expected[:1]:
            raise ValueError(
                f"features of shape {list(features.shape)} and token_ids of {list(token_ids.shape)}: "
                f"expected {list(expected)} and [{expected[0]}]"
            )

        weights, norm = self.weights, self.config.norm
        rope = self._rope
        tables = rotary_tables(batch.positions, self._frequencies, self.dtype, rope.magnitude)
        step = AttentionStep(batch, cache, {rope: tables})
        embedded = embed(token_ids, weights.embedding, self.dtype)
        normed = normalise(features, weights.hidden_norm, norm)
        inputs = torch.cat((normalise(embedded, weights.embedding_norm, norm), normed), dim=-1)
        hidden = normed if self.config.is_residual_normed else features
        if weights.joint is not None:
            hidden = linear(inputs, weights.joint)
        for index, layer in enumerate(weights.layers):
            if index > 0 or weights.joint is not None:
                inputs = normalise(hidden, layer.mixer_norm, norm)
            hidden = hidden + self._attention(index, inputs, step)
            hidden = hidden + self._mlp(index, normalise(hidden, layer.channel_norm, norm))

        return normalise(hidden, weights.final_norm, norm) if self.config.is_output_normed else hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [M, draft_vocab] of rows [M, hidden] that `forward` returned."""
        return linear(self._head_input(hidden), self.weights.head).to(torch.float32)

    def _attention(self, index: int, inputs: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """The output [N, hidden] of the attention of layer `index`, for its normalised input."""
        return apply_mixer(inputs, self.weights.layers[index].mixer, self.config.attention, step, index)

    def _mlp(self, index: int, normed: torch.Tensor) -> torch.Tensor:
        """The output [N, hidden] of the MLP or the experts of layer `index`, for its normalised input."""
        # No draft has a channel that reads the stream.
        return apply_channel(normed, normed, self.weights.layers[index].channel, self.config.layer.channel)

    def _head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.is_output_normed:
            return hidden

        return normalise(hidden, self.weights.final_norm, self.config.norm)


def _read_config(source: Source, target: Decoder, aux_layer_convention: str | None) -> DraftConfig:
    """The draft's config; ModelLoadError naming the folder or its config.json."""
    settings = source.config  # its errors name the file
    try:
        return DraftConfig.from_hf(settings, target.spec, aux_layer_convention=aux_layer_convention)
    except ModelLoadError as error:
        raise ModelLoadError(f"{source.path}: {error}") from error


@contextmanager
def explain_errors(source: Source) -> Iterator[None]:
    """Make a ModelLoadError say that it is about the draft, and whether the source is a whole model."""
    with name_role("draft"):
        try:
            yield
        except ModelLoadError as error:
            if not is_whole_model(source):
                raise

            raise ModelLoadError(f"{source.path}: holds a whole model, expected a draft head") from error


def is_whole_model(source: Source) -> bool:
    """Return True if a source is a language model: a .gguf file is one, a folder by the names of its tensors,
    or by its config if it has none."""
    if source.path.is_file():
        return True

    try:
        return any(name.startswith("model.") for name in DraftTensors(source.path).names())
    except ModelLoadError:
        pass

    try:
        return is_model_config(source.config)
    except ModelLoadError:
        return False


def has_mtp(spec: ModelSpec, tensors: TensorSource) -> bool:
    """Whether a model's files have the layer that its config describes."""
    return spec.mtp is not None and spec.names.mtp.joint in tensors.names()


def mtp_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors of the layer that `spec.mtp` describes."""
    return {name: tuple(place.shape) for name, place in _mtp_places(spec).items()}


@torch.inference_mode()
def load_mtp(
    target: Decoder,
    tensors: TensorSource,
    *,
    form: WeightForm = "expanded",
    check_bytes: Callable[[int], None] | None = None,
) -> DraftDecoder:
    """The draft head in a model's files, on the model's device and in its dtype, with its embedding and head.

    tensors: of the model, whose spec has a layer of this kind. form: of the head's own matrices; "stored": as
    the files have them, quantised or not.
    check_bytes(num_bytes) is called before memory is allocated, and may raise.

    Raises ModelLoadError naming tensor, file, found and expected shape for a tensor that is missing,
    unexpected, misshapen or not finite, of an odd number of columns for "int4", and if there is not enough
    memory.
    """
    spec = _with_stored_layout(target.spec, tensors)
    _check_mtp(spec, tensors, form)
    num_bytes = sum(place.numel() for place in _mtp_places(spec).values()) * target.dtype.itemsize
    if check_bytes is not None:
        check_bytes(num_bytes)

    device, dtype = target.device, target.dtype
    with memory_named(tensors.location, device, lambda: num_bytes):
        reader = MatrixReader(tensors, form, device=device, dtype=dtype, on_read=lambda: None)
        allocation = Allocation(device, dtype, reader.read)
        weights = _allocate_mtp(spec, allocation, target.weights)
        for name, place in fill_places(allocation.places, tensors):
            reader.finite.add(name, place)
        reader.finite.finish()
        allocation.finish()
    return DraftDecoder(DraftConfig.of_mtp(spec), weights, target)


def random_mtp(target: Decoder, seed: int = 0, *, form: WeightForm = "expanded") -> DraftDecoder:
    """The draft head of a model with random weights, the same for the same seed. form: "stored" has the
    layer's matrices in FP8 with a scale for each block where that is how the config says that files have
    them."""
    spec = target.spec
    assert spec.mtp is not None
    options: dict[str, Any] = {
        "device": target.device,
        "dtype": target.dtype,
        "seed": seed,
        "norm_mean": 0.0 if spec.mtp.norm.kind == "offset" else 1.0,
    }
    blocks = () if spec.quantisation is None or form != "stored" else spec.quantisation.blocks
    if not blocks:
        return load_mtp(target, RandomTensors(mtp_shapes(spec), **options), form=form)

    if isinstance(spec.mtp.channel, Experts):  # an expert is quantised by itself
        names = spec.names
        spec = replace(spec, names=replace(names, experts=replace(names.experts, layout="each")))
    projections: list[str] = []

    def note(name: str, is_projection: bool) -> None:
        if is_projection:
            projections.append(name)

    _mtp_places(spec, note)
    tensors = RandomFp8Tensors(mtp_shapes(spec), projections=projections, block=blocks[0], **options)
    return load_mtp(target, tensors, form=form)


def _allocate_mtp(spec: ModelSpec, allocation: Allocation, target: DecoderWeights | None) -> DraftWeights:
    """Weights that are not initialised; without a target, its own are left out."""
    assert spec.mtp is not None
    names, hidden = spec.names.mtp, spec.hidden_size
    unknown = allocation.empty(0)
    return DraftWeights(
        embedding=unknown if target is None else target.embedding,
        fc=None,
        input_norm=None,
        feature_norms=(),
        embedding_norm=allocation.tensor(names.embedding_norm, hidden),
        hidden_norm=allocation.tensor(names.hidden_norm, hidden),
        layers=(allocate_layer(spec.mtp, spec.names, names.layer, hidden, allocation),),
        final_norm=allocation.tensor(names.final_norm, hidden),
        head=unknown if target is None else target.head,
        target_ids=torch.arange(spec.vocab_size, device=unknown.device),
        joint=allocation.matrix(names.joint, hidden, 2 * hidden),
    )


def _mtp_places(spec: ModelSpec, read: ReadMatrix = no_matrix) -> dict[str, torch.Tensor]:
    """The tensors of files, without memory. read: as in Allocation."""
    allocation = Allocation(torch.device("meta"), torch.float32, read)
    _allocate_mtp(spec, allocation, None)
    return allocation.places


def _with_stored_layout(spec: ModelSpec, tensors: TensorSource) -> ModelSpec:
    """The spec, with the layout of the layer's experts in files, which may differ from the other layers."""
    assert spec.mtp is not None
    channel, names = spec.mtp.channel, spec.names
    if not isinstance(channel, Experts):
        return spec

    experts = stored_layout(names.experts, channel, names.mtp.layer, spec.hidden_size, tensors)
    return replace(spec, names=replace(names, experts=experts))


def _check_mtp(spec: ModelSpec, tensors: TensorSource, form: WeightForm) -> None:
    """Raise ModelLoadError for a tensor that is missing, unexpected or misshapen, or cannot have the form."""
    projections: list[str] = []

    def note(name: str, is_projection: bool) -> None:
        projections.append(name)

    places, names = _mtp_places(spec, note), set(tensors.names())
    missing = [name for name in places if name not in names]
    if missing:
        found = f"tensor {missing[0]} of shape {list(places[missing[0]].shape)} is missing"
        raise ModelLoadError(f"{tensors.location}: {found}{others(missing)}")

    own = spec.names.mtp
    copies = {own.embedding: spec.names.embedding, own.head: spec.names.head}
    unread = {name for name in names if name in copies or name.endswith("rotary_emb.inv_freq")}
    extra = sorted(name for name in names - places.keys() - unread if name.startswith(own.prefix))
    if extra and spec.quantisation is None:
        found = f"tensor {extra[0]} of shape {list(tensors.shape(extra[0]))} is not part of this draft"
        raise ModelLoadError(f"{tensors.file(extra[0])}: {found}{others(extra)}")

    for name, place in places.items():
        if (shape := tensors.shape(name)) != tuple(place.shape):
            found = f"tensor {name} has shape {list(shape)}, expected {list(place.shape)}"
            raise ModelLoadError(f"{tensors.file(name)}: {found}")

    expected = [spec.vocab_size, spec.hidden_size]
    for name in sorted(copies.keys() & names):
        if (copy := list(tensors.shape(name))) != expected:
            found = f"tensor {name} has shape {copy}, expected {expected}, as {copies[name]}"
            raise ModelLoadError(f"{tensors.file(name)}: {found}")

    for name in projections:
        check_pairs(tensors, name, form)
