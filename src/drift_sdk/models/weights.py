"""A decoder's weights: their layout in memory, and loading them from named tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.mxfp4 import ScaleCheck
from drift_sdk.loading.quantised_tensors import QuantisedSource
from drift_sdk.loading.tensors import CheckedSource, TensorSource
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.expert_weights import allocate_experts
from drift_sdk.models.experts import ExpertWeights
from drift_sdk.models.filling import fill_places
from drift_sdk.models.kv_numbers import KVForm
from drift_sdk.models.kv_scales import KVScales, KVScaleSource, load_kv_scales
from drift_sdk.models.matrix_reader import PAIRED, QUANTISERS, MatrixReader, WeightForm, quantised_bytes
from drift_sdk.models.spare_tensors import later_layers, zero_biases
from drift_sdk.models.tied_head import EMBEDDING, HEAD, with_stored_head
from drift_sdk.models.weight_memory import memory_named
from drift_sdk.quantised.stacking import stack_rows
from drift_sdk.quantised.weight import Matrix, QuantisedWeight

__all__ = [
    "HEAD",
    "DecoderWeights",
    "LayerWeights",
    "check_tensors",
    "load_weights",
    "meta_weights",
    "odd_columns",
    "others",
    "tensor_shapes",
    "weight_bytes",
]

FINAL_NORM = "model.norm.weight"
QUANTISED_PARTS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""The last part of the names of tensors that quantised weights have in place of "weight", or beside it."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Query, key and value projections are one matrix, gate and up projections
    another. Matrices may be quantised.

    qkv:                    [(num_heads + 2 * num_kv_heads) * head_dim, hidden].
    output:                 [hidden, num_heads * head_dim].
    gate_up:                [2 * intermediate, hidden]. In a layer with experts, intermediate is 0.
    down:                   [hidden, intermediate].
    input_norm, mlp_norm:   [hidden].
    query_norm, key_norm:   [head_dim].
    Biases:                 [rows of their matrix].
    attention_post_norm, mlp_post_norm:  [hidden], of the outputs of attention and MLP.
    sinks:                  [num_heads].
    """

    input_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Matrix
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None
    attention_post_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    experts: ExpertWeights | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. embedding and head: [vocab, hidden], one matrix if tied; they may be quantised.
    final_norm: [hidden]. kv_scales: of a KV cache of e4m3 or NVFP4; None: it is of the model's dtype."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Matrix
    kv_scales: KVScales | None = None


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all tensors that a model of these shapes is stored as."""
    _, places = _allocate(config, torch.device("meta"), torch.float32)
    return {name: tuple(place.shape) for name, place in places.items()}


def weight_bytes(
    config: DecoderConfig,
    dtype: torch.dtype,
    form: WeightForm = "expanded",
    tensors: TensorSource | None = None,
) -> int:
    """Bytes of the weights of a model of these shapes in `dtype` and `form`, MXFP4 experts in their own; of
    weights that are stored quantised, the most that they may take.

    tensors: for the form "stored", the files; little more than their headers is read.
    """
    projections: dict[str, bool] = {}

    def note(name: str, is_projection: bool) -> None:
        projections[name] = is_projection

    _, places = _allocate(config, torch.device("meta"), dtype, note)
    sizes = {name: place.nbytes for name, place in places.items()}
    for name, is_projection in projections.items():
        if form in QUANTISERS and is_projection:
            rows, columns = places[name].shape
            sizes[name] = quantised_bytes(rows, columns, form)
        elif form == "stored" and isinstance(tensors, QuantisedSource):
            num_bytes = tensors.quantised_bytes(name)
            sizes[name] = sizes[name] if num_bytes is None else num_bytes
    return sum(sizes.values())


def odd_columns(config: DecoderConfig, form: WeightForm) -> str:
    """The first matrix with a number of columns that its form cannot have, in words; "" if there is none."""
    if form not in PAIRED:
        return ""

    projections: list[str] = []

    def note(name: str, is_projection: bool) -> None:
        if is_projection:
            projections.append(name)

    _, places = _allocate(config, torch.device("meta"), torch.float32, note)
    for name in projections:
        if places[name].shape[1] % 2:
            return f"{name} has {places[name].shape[1]} columns, an odd number"

    return ""


def load_weights(
    config: DecoderConfig,
    tensors: TensorSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    form: WeightForm = "expanded",
    kv_form: KVForm | None = None,
    on_tensor: Callable[[int, int], None] | None = None,
    check_bytes: Callable[[int], None] | None = None,
) -> DecoderWeights:
    """Weights on `device`, in `dtype` or as `form` says.

    kv_form: of the KV cache; None: it is of `dtype`.
    on_tensor(num_loaded, num_tensors) is called after each tensor.
    check_bytes(num_bytes) is called before memory is allocated, with the amount, and may raise.

    Raises ModelLoadError naming tensor and file: before memory is allocated, for a tensor that is missing,
    unexpected or misshapen; if there is not enough memory; and for a tensor that is not finite in `dtype`.
    """
    check_tensors(config, tensors, kv_form)
    if reason := odd_columns(config, form):
        raise ModelLoadError(f'{tensors.location}: tensor {reason}: expected another form than "{form}"')

    if config.experts is not None and config.experts.is_quantised and dtype == torch.float16:
        raise ModelLoadError(
            f"{tensors.location}: MXFP4 weights in float16: expected bfloat16 or float32, which hold all of "
            "their numbers"
        )

    check_room = check_bytes or _is_enough
    check_room(weight_bytes(config, dtype, form, tensors))
    with memory_named(tensors.location, device, lambda: weight_bytes(config, dtype, form, tensors)):
        stored = with_stored_head(config, tensors)
        if stored != config:
            config = stored
            check_room(weight_bytes(config, dtype, form, tensors))
        weights = _filled(config, tensors, device, dtype, form, on_tensor)

    if kv_form is None:
        return weights

    kv_scales = load_kv_scales(tensors, kv_form, config.num_layers, config.num_kv_heads, device)
    return replace(weights, kv_scales=kv_scales)


def _filled(
    config: DecoderConfig,
    tensors: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    form: WeightForm,
    on_tensor: Callable[[int, int], None] | None,
) -> DecoderWeights:
    """Weights with all tensors read, and known to be finite."""
    num_tensors, num_loaded = len(tensor_shapes(config)), 0

    def count() -> None:
        nonlocal num_loaded
        num_loaded += 1
        if on_tensor is not None:
            on_tensor(num_loaded, num_tensors)

    reader = MatrixReader(tensors, form, device=device, dtype=dtype, on_read=count)
    finite, scales = reader.finite, ScaleCheck(tensors)
    weights, places = _allocate(config, device, dtype, reader.read)
    for name, place in fill_places(places, tensors):
        if place.dtype != torch.uint8:
            finite.add(name, place)
        elif name.endswith("_scales"):
            scales.add(name, place)
        count()

    finite.finish()
    scales.finish()
    return weights


def _is_enough(num_bytes: int) -> None:
    """Any number of bytes is enough."""


def check_tensors(config: DecoderConfig, tensors: TensorSource, kv_form: KVForm | None = None) -> None:
    """Raise ModelLoadError for a tensor that is missing, unexpected or misshapen, and for all else that
    headers show to be wrong, also of scales of a KV cache in `kv_form`."""
    _, places = _allocate(config, torch.device("meta"), torch.float32)
    names = set(tensors.names())
    missing = [name for name in places if name not in names]
    if missing:
        found = f"tensor {missing[0]} of shape {list(places[missing[0]].shape)} is missing{others(missing)}"
        raise ModelLoadError(f"{tensors.location}: {found}{_hint(config, missing[0], names)}")

    # Old files contain the frequencies of the rotation, which are computed from the config.
    extra = sorted(name for name in names - places.keys() if not name.endswith("rotary_emb.inv_freq"))
    if HEAD in extra and config.is_head_tied:
        extra.remove(HEAD)
        places[HEAD] = places[EMBEDDING]

    spare = zero_biases(config, tensors, places, extra) | later_layers(config, tensors, extra)
    extra = [name for name in extra if name not in spare]
    if extra:
        found = f"tensor {extra[0]} of shape {list(tensors.shape(extra[0]))} is not part of this model"
        hint = _hint(config, extra[0], names)
        raise ModelLoadError(f"{tensors.file(extra[0])}: {found}{others(extra)}{hint}")

    for name, place in places.items():
        shape, expected = tensors.shape(name), tuple(place.shape)
        if shape != expected:
            raise ModelLoadError(
                f"{tensors.file(name)}: tensor {name} has shape {list(shape)}, expected {list(expected)}"
            )

    if isinstance(tensors, CheckedSource):
        for name, place in places.items():
            tensors.check(name, place.dtype)
    if kv_form == "fp8" and isinstance(tensors, KVScaleSource):
        tensors.check_kv_scales(config.num_layers, config.num_kv_heads)


def _hint(config: DecoderConfig, name: str, names: Collection[str]) -> str:
    """The reason for a wrong name, as the end of a message, if tensors are those of a quantised weight."""
    prefix = name.rpartition(".")[0]
    found = [f"{prefix}.{part}" for part in QUANTISED_PARTS if f"{prefix}.{part}" in names]
    if not found or config.quantisation is not None:
        return ""

    return f": {found[0]} is of a quantised weight, but config.json has no quantization_config"


def others(names: list[str]) -> str:
    """The number of names after the first, as the end of a message."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def meta_weights(config: DecoderConfig, dtype: torch.dtype) -> DecoderWeights:
    """Weights on torch's "meta" device: shapes and types without memory."""
    return _allocate(config, torch.device("meta"), dtype)[0]


def _no_matrix(name: str, is_projection: bool) -> None:
    """Reads nothing: all matrices are numbers of the model's dtype."""


def _allocate(
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    read: Callable[[str, bool], QuantisedWeight | None] = _no_matrix,
) -> tuple[DecoderWeights, dict[str, torch.Tensor]]:
    """Weights that are not initialised, and for each stored tensor the part of them that it fills.

    read(name, is_projection): a matrix, if it is to be quantised. It takes no part in the second result.

    Longer than other functions: it is the list of all tensors of a model.
    """
    hidden = config.hidden_size
    places: dict[str, torch.Tensor] = {}

    def whole(name: str, *shape: int) -> torch.Tensor:
        places[name] = torch.empty(shape, dtype=dtype, device=device)
        return places[name]

    def matrix(name: str, rows: int, columns: int, *, is_projection: bool = True) -> Matrix:
        weight = read(name, is_projection)
        return whole(name, rows, columns) if weight is None else weight

    def stacked(suffix: str, rows: dict[str, int], *columns: int) -> torch.Tensor:
        tensor = torch.empty((sum(rows.values()), *columns), dtype=dtype, device=device)
        parts = torch.split(tensor, list(rows.values()))
        places.update({f"{name}.{suffix}": part for name, part in zip(rows, parts, strict=True)})
        return tensor

    def projection(prefix: str, fused: str, rows: dict[str, int]) -> Matrix:
        if config.has_fused_projections:
            return matrix(f"{prefix}.{fused}.weight", sum(rows.values()), hidden)

        names = {f"{prefix}.{name}": size for name, size in rows.items()}
        weights = {name: read(f"{name}.weight", True) for name in names}
        if not any(weights.values()):
            return stacked("weight", names, hidden)

        return stack_rows(
            [weights[name] or whole(f"{name}.weight", size, hidden) for name, size in names.items()]
        )

    def projection_bias(prefix: str, fused: str, rows: dict[str, int]) -> torch.Tensor:
        if config.has_fused_projections:
            return whole(f"{prefix}.{fused}.bias", sum(rows.values()))

        return stacked("bias", {f"{prefix}.{name}": size for name, size in rows.items()})

    def empty(shape: tuple[int, ...], of: torch.dtype | None) -> torch.Tensor:
        return torch.empty(shape, dtype=of or dtype, device=device)

    def read_expert(name: str) -> QuantisedWeight | None:
        return read(name, True)

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        experts = config.layer_experts(index)
        has_mlp, has_mlp_bias = experts is None, experts is None and config.has_mlp_bias
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = (attention, "qkv_proj", {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size})
        gate_up = (mlp, "gate_up_proj", {f"{n}_proj": config.intermediate_size for n in ("gate", "up")})
        has_norms, has_post_norms = config.has_qk_norm, config.has_post_norms
        # With post norms, "post_attention_layernorm" is that of the attention's output.
        mlp_norm = "pre_feedforward_layernorm" if has_post_norms else "post_attention_layernorm"
        return LayerWeights(
            input_norm=whole(f"{prefix}.input_layernorm.weight", hidden),
            qkv=projection(*qkv),
            qkv_bias=projection_bias(*qkv) if config.has_qkv_bias else None,
            query_norm=whole(f"{attention}.q_norm.weight", config.head_dim) if has_norms else None,
            key_norm=whole(f"{attention}.k_norm.weight", config.head_dim) if has_norms else None,
            output=matrix(f"{attention}.o_proj.weight", hidden, query_size),
            output_bias=whole(f"{attention}.o_proj.bias", hidden) if config.has_output_bias else None,
            mlp_norm=whole(f"{prefix}.{mlp_norm}.weight", hidden),
            gate_up=projection(*gate_up) if has_mlp else empty((0, hidden), None),
            gate_up_bias=projection_bias(*gate_up) if has_mlp_bias else None,
            down=(
                matrix(f"{mlp}.down_proj.weight", hidden, config.intermediate_size)
                if has_mlp
                else empty((hidden, 0), None)
            ),
            down_bias=whole(f"{mlp}.down_proj.bias", hidden) if has_mlp_bias else None,
            attention_post_norm=(
                whole(f"{prefix}.post_attention_layernorm.weight", hidden) if has_post_norms else None
            ),
            mlp_post_norm=(
                whole(f"{prefix}.post_feedforward_layernorm.weight", hidden) if has_post_norms else None
            ),
            sinks=whole(f"{attention}.sinks", config.num_heads) if config.has_sinks else None,
            experts=None
            if experts is None
            else allocate_experts(experts, hidden, prefix, places, empty, read_expert),
        )

    embedding = matrix(EMBEDDING, config.vocab_size, hidden, is_projection=False)
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=whole(FINAL_NORM, hidden),
        head=embedding
        if config.is_head_tied
        else matrix(HEAD, config.vocab_size, hidden, is_projection=False),
    )
    return weights, places
