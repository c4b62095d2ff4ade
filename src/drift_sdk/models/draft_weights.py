"""A draft head's weights, and those of EAGLE-3: names, shapes, and loading. Some may be shared with the
target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.draft import OFFSETS, PROPOSABLE
from drift_sdk.loading.tensors import FiniteCheck, TensorSource, check_dtype
from drift_sdk.models.channels.mlp import MlpWeights
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.matrix_reader import PAIRED, QUANTISERS, WeightForm
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.models.weights import DecoderWeights, LayerWeights, others
from drift_sdk.quantised.weight import Matrix, take_rows
from drift_sdk.spec.model import Mlp

__all__ = ["DraftForm", "DraftWeights", "load_draft_weights", "required_shapes", "shareable_shapes"]

DraftForm = Literal["expanded", "fp8", "int4"]
"""Form of a draft's weights in memory, see WeightForm."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
FC, INPUT_NORM, FINAL_NORM = "fc.weight", "input_norm.weight", "norm.weight"
HIDDEN_NORM = "layers.0.hidden_norm.weight"


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
    _check_names(config, tensors)
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
        num_columns = self._tensors.shape(names[0])[-1]
        if self._form in PAIRED and num_columns % 2:
            found = f"tensor {names[0]} has {num_columns} columns, an odd number"
            raise ModelLoadError(
                f'{self._tensors.file(names[0])}: {found}: expected draft_weights other than "{self._form}"'
            )

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
    return LayerWeights(
        mixer_norm=reader.read(f"{prefix}.input_layernorm.weight"),
        mixer=AttentionWeights(
            qkv=reader.read_projection(attention, "q k v"),
            qkv_bias=reader.read_biases(attention, "q k v") if has_bias else None,
            query_norm=None,
            key_norm=None,
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


def _feature_norm(index: int) -> str:
    return f"fc_norm.{index}.weight"


def _check_names(config: DraftConfig, tensors: TensorSource) -> None:
    """Raise ModelLoadError for a tensor that is missing, unexpected or misshapen."""
    required, own = required_shapes(config), shareable_shapes(config)
    if config.hidden_size != config.target_hidden_size:
        # The target's embedding and head have another width.
        required |= own

    names = set(tensors.names())
    missing = [name for name in required if name not in names]
    if missing:
        found = f"tensor {missing[0]} of shape {list(required[missing[0]])} is missing"
        raise ModelLoadError(f"{tensors.location}: {found}{others(missing)}")

    extra = names - required.keys() - own.keys() - {OFFSETS, PROPOSABLE}
    # Old files contain the frequencies of the rotation, which are computed from the config.
    extra = {name for name in extra if not name.endswith("rotary_emb.inv_freq")}
    if extra:
        name = min(extra)
        found = f"tensor {name} of shape {list(tensors.shape(name))} is not part of this draft"
        raise ModelLoadError(f"{tensors.file(name)}: {found}{others(sorted(extra))}")

    for name, expected in (required | own).items():
        if name in names and tensors.shape(name) != expected:
            found = f"tensor {name} has shape {list(tensors.shape(name))}, expected {list(expected)}"
            raise ModelLoadError(f"{tensors.file(name)}: {found}")
