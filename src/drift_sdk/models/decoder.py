"""One decoder for all families of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from msgspec.structs import replace

from drift_sdk.loading.random import RandomFp8Tensors, RandomTensors
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.allocation import WeightForm
from drift_sdk.models.attention import AttentionBatch, LastRows, StepRows
from drift_sdk.models.channels import (
    ExpertWeights,
    ParallelWeights,
    QuantisedMatrices,
    apply_experts,
    apply_mlp,
    apply_parallel,
)
from drift_sdk.models.kv_cache import KVCache, KVForm, StateRows, stored_shape
from drift_sdk.models.layer_inputs import add_input, inputs_of
from drift_sdk.models.layers import embed, linear, normalise, rms_norm, rotary_tables
from drift_sdk.models.mixers.attention import AttentionStep, attend
from drift_sdk.models.mixers.gated_delta import GatedDeltaWeights, apply_gated_delta
from drift_sdk.models.mixers.latent_attention import LatentWeights, attend_latent
from drift_sdk.models.weights import (
    ChannelWeights,
    DecoderWeights,
    MixerWeights,
    load_weights,
    projection_names,
    tensor_shapes,
)
from drift_sdk.spec.model import (
    Attention,
    Channel,
    Experts,
    GatedDelta,
    LatentAttention,
    LayerSpec,
    Mixer,
    Mlp,
    ModelSpec,
    ParallelExperts,
)
from drift_sdk.spec.rope import Rope


class Decoder:
    """A decoder in plain torch: token ids in, residual stream out; logits are computed for selected rows.

    It owns only weights. The rows of a step and the keys they see are given by an AttentionBatch; keys and
    values are kept in a KVCache.

    form: of the weights, when they were loaded.
    embedding_multiplier: the spec's, rounded to the model's dtype where the spec says so.
    """

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, form: WeightForm = "expanded") -> None:
        self.spec = spec
        self.weights = weights
        self.form: WeightForm = form
        self._frequencies = {rope: rope.frequencies().to(self.device) for rope in spec.ropes}
        self.embedding_multiplier = spec.embedding_multiplier
        if spec.has_rounded_multiplier:
            rounded = torch.tensor(spec.embedding_multiplier, dtype=self.dtype, device="cpu")
            self.embedding_multiplier = float(rounded)

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        spec: ModelSpec,
        tensors: TensorSource,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        form: WeightForm = "expanded",
        kv_form: KVForm | None = None,
        on_tensor: Callable[[int, int], None] | None = None,
        check_bytes: Callable[[int], None] | None = None,
    ) -> Decoder:
        """A decoder with weights on `device`, in `dtype` or as `form` says.

        kv_form: of its KV cache, see `KVScales`; None: it is of `dtype`.
        on_tensor(num_loaded, num_tensors) is called after each tensor.
        check_bytes(num_bytes) is called before memory is allocated, and may raise.

        Raises ModelLoadError naming tensor, file, found and expected shape.
        """
        weights = load_weights(
            spec,
            tensors,
            device=torch.device(device),
            dtype=dtype,
            form=form,
            kv_form=kv_form,
            on_tensor=on_tensor,
            check_bytes=check_bytes,
        )
        return cls(spec, weights, form)

    @classmethod
    def random(
        cls,
        spec: ModelSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        form: WeightForm = "expanded",
        kv_form: KVForm | None = None,
        seed: int = 0,
        check_bytes: Callable[[int], None] | None = None,
    ) -> Decoder:
        """A decoder with random weights of the configured shapes, drawn on the device, the same for the same
        seed. `form`, `kv_form` and `check_bytes` as in `load`."""
        tensors = random_tensors(spec, device=torch.device(device), dtype=dtype, seed=seed, form=form)
        return cls.load(
            spec,
            tensors,
            device=device,
            dtype=dtype,
            form=form,
            kv_form=kv_form,
            check_bytes=check_bytes,
        )

    @property
    def device(self) -> torch.device:
        return self.weights.final_norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.final_norm.dtype

    @property
    def kv_form(self) -> KVForm | None:
        """The form of its KV cache; None: it is of `dtype`."""
        return None if self.weights.kv_scales is None else self.weights.kv_scales.form

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of its KV cache."""
        return stored_shape(self.spec.attention.head_dim, self.dtype, self.kv_form)[0]

    def empty_kv_cache(self, num_blocks: int, block_size: int, num_window_blocks: int = 0) -> KVCache:
        """A KV cache for this decoder, not initialised. num_window_blocks: of layers with windows; 0: they
        share the blocks of the others."""
        shapes = [layer.kv for layer in self.spec.layers]
        windows = dict.fromkeys(self.spec.window_layers, num_window_blocks) if num_window_blocks else {}
        scales = self.weights.kv_scales
        return KVCache(shapes, num_blocks, block_size, self.dtype, self.device, scales, num_blocks_of=windows)

    @cached_property
    def max_expert_scale(self) -> int:
        """The largest scale of the experts' MXFP4 weights; 0 without such weights."""
        largest = [
            matrices.scales.amax()
            for layer in self.weights.layers
            if isinstance(layer.channel, ExpertWeights)  # none of files with MXFP4 are in parallel
            for matrices in (layer.channel.gate_up, layer.channel.down)
            if isinstance(matrices, QuantisedMatrices)
        ]
        return int(torch.stack(largest).max()) if largest else 0

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        batch: StepRows,
        cache: KVCache,
        aux_layers: Sequence[int] = (),
        states: Sequence[StateRows] = (),
        last: LastRows | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The residual stream [N, hidden] after the last layer and at each of `aux_layers`, not normalised.

        token_ids:   [N] int64, in the batch's order of rows.
        aux_layers:  j stands for the input of layer j, num_layers for the output of the last layer.
        states:      of a model with recurrent layers, for each sequence of the batch, in order.
        last:        the rows that are wanted, and returned; None: all. The layers from
                     `ModelSpec.first_reader` on compute these alone. `aux_layers` are not behind that layer,
                     and of all rows.

        The rows' keys and values are written to the cache. Raises ValueError for another shape of `token_ids`
        or a layer out of range.
        """
        num_layers = self.spec.num_layers
        if token_ids.shape != (batch.num_rows,):
            raise ValueError(f"token_ids of shape {list(token_ids.shape)}: expected [{batch.num_rows}]")

        first_reader = num_layers if last is None else self.spec.first_reader
        if not all(0 <= aux_layer <= first_reader for aux_layer in aux_layers):
            raise ValueError(f"aux_layers={list(aux_layers)}: expected each from 0 to {first_reader}")

        step = AttentionStep(batch, cache, self._rotary(batch))
        hidden = self.embedded(token_ids)
        aux_hidden, inputs, given = {}, self.spec.layer_inputs, None
        if inputs is not None and self.weights.layer_inputs is not None:
            given = inputs_of(token_ids, hidden, self.weights.layer_inputs, inputs)
        layers = zip(self.spec.layers, self.weights.layers, strict=True)
        for index, (layer, weights) in enumerate(layers):
            if index in aux_layers:
                aux_hidden[index] = hidden

            if last is not None and index == first_reader:
                hidden, given = hidden[last.index], None if given is None else given[last.index]
                if not last.sequences:
                    break

                rows = AttentionBatch(last.sequences, cache)
                step = AttentionStep(rows, cache, self._rotary(rows))
            normed = normalise(hidden, weights.mixer_norm, layer.norm)
            mixed = apply_mixer(normed, weights.mixer, layer.mixer, step, index, states)
            hidden = _add(hidden, mixed, weights.mixer_post_norm, layer)
            normed = normalise(hidden, weights.channel_norm, layer.norm)
            output = apply_channel(normed, hidden, weights.channel, layer.channel)
            hidden = _add(hidden, output, weights.channel_post_norm, layer)
            if given is not None and inputs is not None and weights.input is not None:
                hidden = add_input(hidden, given[:, index], weights.input, inputs)
            if weights.factor is not None:
                hidden = hidden * weights.factor

        aux_hidden[num_layers] = hidden
        if last is not None and first_reader == num_layers:
            hidden = hidden[last.index]
        return hidden, [aux_hidden[aux_layer] for aux_layer in aux_layers]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [M, vocab] of rows [M, hidden] of the residual stream after the last layer, before
        the final norm."""
        logits = linear(self.final_normed(hidden), self.weights.head)
        logits = logits.to(torch.float32).div_(self.spec.logits_divisor)
        cap = self.spec.logits_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def final_normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [M, hidden] of the residual stream after the last layer, normalised."""
        return normalise(hidden, self.weights.final_norm, self.spec.final_norm)

    def _rotary(self, batch: StepRows) -> dict[Rope, tuple[torch.Tensor, torch.Tensor]]:
        """The rotation tables of the rows."""
        return {
            rope: rotary_tables(batch.positions, frequencies, self.dtype, rope.magnitude)
            for rope, frequencies in self._frequencies.items()
        }

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream [N, hidden] before the first layer, of token ids [N] int64."""
        embedded = embed(token_ids, self.weights.embedding, self.dtype)
        embedded = embedded if self.embedding_multiplier == 1.0 else embedded * self.embedding_multiplier
        norm = self.spec.embedding_norm
        return embedded if norm is None else rms_norm(embedded, torch.ones_like(embedded[0]), norm.eps)


def apply_mixer(
    x: torch.Tensor,
    weights: MixerWeights,
    spec: Mixer,
    step: AttentionStep,
    index: int,
    states: Sequence[StateRows] = (),
) -> torch.Tensor:
    """The output [N, hidden] of the mixer of layer `index` for its normalised input [N, hidden]. states: as
    `Decoder.forward` takes them."""
    if isinstance(weights, GatedDeltaWeights):
        assert isinstance(spec, GatedDelta)
        return apply_gated_delta(x, weights, spec, states, index)

    if isinstance(weights, LatentWeights):
        assert isinstance(spec, LatentAttention)
        return attend_latent(x, weights, spec, step, index)

    assert isinstance(spec, Attention)
    return attend(x, weights, spec, step, index)


def apply_channel(
    x: torch.Tensor, stream: torch.Tensor, weights: ChannelWeights, spec: Channel
) -> torch.Tensor:
    """The output [N, hidden] of a channel for its normalised input [N, hidden], and the stream
    [N, hidden]."""
    if isinstance(weights, ParallelWeights):
        assert isinstance(spec, ParallelExperts)
        return apply_parallel(x, stream, weights, spec)

    if isinstance(weights, ExpertWeights):
        assert isinstance(spec, Experts)
        return apply_experts(x, weights, spec)

    assert isinstance(spec, Mlp)
    return apply_mlp(x, weights, spec)


def _add(
    hidden: torch.Tensor, output: torch.Tensor, post_norm: torch.Tensor | None, layer: LayerSpec
) -> torch.Tensor:
    """The residual stream [N, hidden] after the output [N, hidden] of a mixer or channel."""
    if layer.post_norm is not None and post_norm is not None:
        output = normalise(output, post_norm, layer.post_norm)
    return hidden + (output if layer.multiplier == 1.0 else output * layer.multiplier)


def random_tensors(
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    form: WeightForm = "expanded",
) -> RandomTensors:
    """The random weights of a decoder, drawn on a device. form: "stored" has projections in FP8 with a scale
    for each block where that is how the config says that files have them."""
    moments: dict[str, tuple[float, float]] = {}
    names = spec.names.gated_delta
    for index in spec.recurrent_layers:
        prefix, mixer = f"{spec.names.layer.format(index)}.{names.module}", spec.layers[index].mixer
        assert isinstance(mixer, GatedDelta)
        moments[f"{prefix}.{names.decay}"] = -3.0, 1.5  # of states that last from a token to hundreds
        moments[f"{prefix}.{names.norm}.weight"] = 1.0, 0.02
        moments[f"{prefix}.{names.conv}.weight"] = 0.0, mixer.conv_width**-0.5
    experts = spec.names.experts
    norms = (f"{name}.weight" for name in (experts.mlp_post_norm, experts.norm, experts.post_norm))
    factors = (spec.names.factor, experts.input_factors, experts.expert_factors, *norms)
    moments |= {name: (1.0, 0.02) for name in tensor_shapes(spec) if name.endswith(factors)}
    options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "seed": seed,
        "norm_mean": 0.0 if spec.layers[0].norm.kind == "offset" else 1.0,
        "moments": moments,
    }
    blocks = () if spec.quantisation is None or form != "stored" else spec.quantisation.blocks
    if not blocks:
        return RandomTensors(tensor_shapes(spec), **options)

    if spec.experts is not None:  # an expert is quantised by itself
        spec = replace(spec, names=replace(spec.names, experts=replace(experts, layout="each")))
    projections = projection_names(spec)
    return RandomFp8Tensors(tensor_shapes(spec), projections=projections, block=blocks[0], **options)
