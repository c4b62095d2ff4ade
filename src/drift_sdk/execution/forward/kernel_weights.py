"""Quantised weights of a model, arranged for the kernels of the graph executor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drift_sdk._kernels.experts.packed_products import PackedExperts, stack_experts
from drift_sdk._kernels.quantised.packing import (
    INT4_ZERO,
    MIN_GROUP,
    PackedWeight,
    can_pack,
    dequantise,
    pack_weight,
)
from drift_sdk.models.channels import ExpertMatrices, ExpertWeights, MlpWeights, ParallelWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashDecoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.models.layer_inputs import LayerInputWeights
from drift_sdk.models.weights import ChannelWeights, DecoderWeights, LayerWeights
from drift_sdk.quantised.formats import NVFP4_GROUP, Fp8Weight, Int4Weight, Nvfp4Weight
from drift_sdk.quantised.weight import GroupedIntegers, Matrix, QuantisedWeight, dequantised
from drift_sdk.spec.model import Channel, Experts, experts_of


@dataclass(frozen=True, slots=True)
class KernelWeight(QuantisedWeight):
    """A quantised matrix as the kernels take it.

    packed: on a GPU.
    """

    packed: PackedWeight

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.num_columns, self.packed.inner

    def tensors(self) -> tuple[Tensor, ...]:
        return self.packed.tensors()

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        dequantise(self.packed, out)
        return out

    def rows(self, index: Tensor) -> QuantisedWeight:
        raise NotImplementedError("rows of arranged weights are not looked up")

    def to(self, device: torch.device) -> KernelWeight:
        if device != self.device:
            raise NotImplementedError("arranged weights stay on their device")

        return self


@dataclass(frozen=True, slots=True)
class KernelExperts(QuantisedWeight):
    """A quantised matrix of each expert as the kernels take them.

    packed: on a GPU.
    """

    packed: PackedExperts

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.weight.num_columns, self.packed.weight.inner

    def tensors(self) -> tuple[Tensor, ...]:
        return self.packed.weight.tensors()

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError("arranged experts are not expanded")

    def rows(self, index: Tensor) -> QuantisedWeight:
        raise NotImplementedError("rows of arranged experts are not looked up")

    def to(self, device: torch.device) -> KernelExperts:
        if device != self.device:
            raise NotImplementedError("arranged experts stay on their device")

        return self


@torch.inference_mode()
def arrange_decoder(decoder: Decoder, draft: DraftDecoder | DFlashDecoder | Decoder | None = None) -> None:
    """Replace the quantised matrices of a decoder and its draft by arranged ones, which the kernels read.

    Layer by layer, so that one layer at a time is in memory twice. A matrix of a format or a shape that the
    kernels do not have is expanded to the decoder's dtype, and so is an embedding, which is looked up by
    rows. A draft that shares its target's embedding or head still does.
    """
    if isinstance(draft, Decoder):
        arrange_decoder(draft)
    weights, dtype = decoder.weights, decoder.dtype
    layers, channels = list(weights.layers), [layer.channel for layer in decoder.spec.layers]
    embedding = dequantised(weights.embedding, dtype)
    is_tied = weights.head is weights.embedding
    head = embedding if is_tied else arrange_matrix(weights.head, dtype, is_whole=True)
    inputs = None if weights.layer_inputs is None else _arrange_inputs(weights.layer_inputs, dtype)
    arranged = replace(weights, embedding=embedding, head=head, layer_inputs=inputs, layers=())
    if isinstance(draft, DraftDecoder):
        _arrange_draft(draft, weights, arranged)
    elif isinstance(draft, DFlashDecoder):
        _arrange_dflash(draft, weights, arranged)
    decoder.weights = arranged
    del weights
    for index, channel in enumerate(channels):
        layers[index] = arrange_layer(layers[index], dtype, channel)
    decoder.weights = replace(decoder.weights, layers=tuple(layers))


def _arrange_draft(draft: DraftDecoder, target: DecoderWeights, arranged: DecoderWeights) -> None:
    """Replace the quantised matrices of a draft. target, arranged: its target's embedding and head, before
    and after."""
    weights, dtype = draft.weights, draft.dtype
    shares_embedding, shares_head = weights.embedding is target.embedding, weights.head is target.head
    draft.weights = replace(
        weights,
        embedding=arranged.embedding if shares_embedding else dequantised(weights.embedding, dtype),
        head=arranged.head if shares_head else arrange_matrix(weights.head, dtype),
        fc=None if weights.fc is None else arrange_matrix(weights.fc, dtype),
        joint=None if weights.joint is None else arrange_matrix(weights.joint, dtype),
        layers=tuple(arrange_layer(layer, dtype, draft.config.layer.channel) for layer in weights.layers),
    )


def _arrange_dflash(draft: DFlashDecoder, target: DecoderWeights, arranged: DecoderWeights) -> None:
    """`_arrange_draft` for a head whose own embedding is never quantised."""
    weights, dtype = draft.weights, draft.dtype
    draft.weights = replace(
        weights,
        head=arranged.head if weights.head is target.head else arrange_matrix(weights.head, dtype),
        fc=arrange_matrix(weights.fc, dtype),
        layers=tuple(arrange_layer(layer, dtype, spec.channel) for spec, layer in draft.layers()),
    )


def arrange_part(weights: Any, dtype: torch.dtype, channel: Channel | None) -> Any:
    """A part of a decoder's weights with arranged matrices. channel: of a layer."""
    if isinstance(weights, LayerWeights):
        assert channel is not None
        return arrange_layer(weights, dtype, channel)

    return _arrange_inputs(weights, dtype) if isinstance(weights, LayerInputWeights) else weights


def _arrange_inputs(inputs: LayerInputWeights, dtype: torch.dtype) -> LayerInputWeights:
    return replace(
        inputs,
        embedding=dequantised(inputs.embedding, dtype),
        projection=arrange_matrix(inputs.projection, dtype),
    )


def arrange_layer(layer: LayerWeights, dtype: torch.dtype, spec: Channel) -> LayerWeights:
    """The weights of a layer with arranged matrices. spec: of its channel."""
    matrices: dict[str, Any] = {
        name: arrange_matrix(matrix, dtype) for name, matrix in layer.mixer.matrices.items()
    }
    mixer = replace(layer.mixer, **matrices)
    given = layer.input
    if given is not None:
        gate, projection = (arrange_matrix(matrix, dtype) for matrix in (given.gate, given.projection))
        given = replace(given, gate=gate, projection=projection)
    return replace(layer, mixer=mixer, channel=_arrange_channel(layer.channel, dtype, spec), input=given)


def _arrange_channel(channel: ChannelWeights, dtype: torch.dtype, spec: Channel) -> ChannelWeights:
    experts = experts_of(spec)
    if isinstance(channel, ParallelWeights):
        assert experts is not None
        return replace(
            channel,
            mlp=_arrange_mlp(channel.mlp, dtype),
            experts=_arrange_experts(channel.experts, dtype, experts),
        )

    if isinstance(channel, ExpertWeights):
        assert experts is not None
        return _arrange_experts(channel, dtype, experts)

    return _arrange_mlp(channel, dtype)


def _arrange_mlp(mlp: MlpWeights, dtype: torch.dtype) -> MlpWeights:
    return replace(
        mlp,
        gate_up=arrange_matrix(mlp.gate_up, dtype, is_gated=True),
        down=arrange_matrix(mlp.down, dtype),
    )


def _arrange_experts(experts: ExpertWeights, dtype: torch.dtype, spec: Experts) -> ExpertWeights:
    """The kernels of gates in a quantised format have silu alone. A joined expert of another format than the
    others becomes an MLP of its own again."""
    if experts.num_joined and not _are_alike(experts, dtype):
        experts = _separated(experts)
    gate_up = experts.gate_up
    if spec.activation != "silu" and isinstance(gate_up, tuple):
        gate_up = torch.stack([dequantised(matrix, dtype) for matrix in gate_up])
    return replace(
        experts,
        shared=None if experts.shared is None else _arrange_mlp(experts.shared, dtype),
        gate_up=arrange_experts(gate_up, dtype, is_gated=True),
        down=arrange_experts(experts.down, dtype),
    )


def _are_alike(experts: ExpertWeights, dtype: torch.dtype) -> bool:
    """Whether the kernels have the last expert, which is joined, in the format of the first one."""
    for matrices, is_gated in ((experts.gate_up, True), (experts.down, False)):
        if not isinstance(matrices, tuple):
            continue

        arranged = [
            arrange_matrix(matrix, dtype, is_gated=is_gated, is_whole=True)
            for matrix in (matrices[0], matrices[-1])
        ]
        packed = [matrix.packed for matrix in arranged if isinstance(matrix, KernelWeight)]
        if packed and (len(packed) == 1 or stack_experts(packed) is None):
            return False

    return True


def _separated(experts: ExpertWeights) -> ExpertWeights:
    """The weights with the joined expert, whose matrices are one by one, as an MLP of its own."""
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, tuple) and isinstance(down, tuple)
    return replace(
        experts,
        gate_up=gate_up[:-1],
        down=down[:-1],
        shared=MlpWeights(gate_up=gate_up[-1], gate_up_bias=None, down=down[-1], down_bias=None),
        num_joined=0,
    )


def arrange_experts(
    matrices: ExpertMatrices, dtype: torch.dtype, *, is_gated: bool = False
) -> ExpertMatrices:
    """The matrices of experts as the kernels take them: those that are quantised one by one as one weight, or
    expanded to `dtype` if the kernels do not have their format, or experts have several."""
    if not isinstance(matrices, tuple):
        return matrices

    arranged = [arrange_matrix(matrix, dtype, is_gated=is_gated, is_whole=True) for matrix in matrices]
    packed = [matrix.packed for matrix in arranged if isinstance(matrix, KernelWeight)]
    experts = stack_experts(packed) if len(packed) == len(arranged) else None
    if experts is not None:
        return KernelExperts(experts)

    return torch.stack([dequantised(matrix, dtype) for matrix in matrices])


def arrange_matrix(
    matrix: Matrix, dtype: torch.dtype, *, is_gated: bool = False, is_whole: bool = False
) -> Matrix:
    """A matrix as the kernels take it: a dense one as it is, a quantised one arranged, or expanded to `dtype`
    if the kernels do not have its format. is_gated, is_whole: as in `pack_weight`."""
    if isinstance(matrix, Tensor | KernelWeight):
        return matrix

    rows, columns = matrix.shape
    if isinstance(matrix, Fp8Weight) and can_pack(rows, matrix.block[1], columns, is_gated=is_gated):
        scales = matrix.scales.repeat_interleave(matrix.block[0], dim=0)[:rows].contiguous()
        codes, zeros, group_size = matrix.values.view(torch.uint8), None, matrix.block[1]
        packed = pack_weight(
            codes,
            scales,
            zeros,
            "e4m3",
            group_size=None if scales.shape[1] == 1 else group_size,
            is_gated=is_gated,
            is_whole=is_whole,
        )
        return KernelWeight(packed)

    if isinstance(matrix, Int4Weight) and can_pack(rows, matrix.group_size, columns, is_gated=is_gated):
        packed = pack_weight(
            torch.stack((matrix.codes & 15, matrix.codes >> 4), dim=2).view(rows, columns),
            matrix.scales,
            matrix.zeros,
            "int4",
            group_size=None if matrix.scales.shape[1] == 1 else matrix.group_size,
            is_gated=is_gated,
            is_whole=is_whole,
        )
        return KernelWeight(packed)

    if isinstance(matrix, Nvfp4Weight) and can_pack(rows, NVFP4_GROUP, columns, is_gated=is_gated):
        packed = pack_weight(
            torch.stack((matrix.codes & 15, matrix.codes >> 4), dim=2).view(rows, columns),
            matrix.group_scales(),
            None,
            "e2m1",
            group_size=NVFP4_GROUP,
            is_gated=is_gated,
            is_whole=is_whole,
        )
        return KernelWeight(packed)

    integers = matrix.integers() if can_pack(rows, MIN_GROUP, columns, is_gated=is_gated) else None
    if integers is not None:
        return KernelWeight(_packed_integers(integers, is_gated=is_gated, is_whole=is_whole))

    return matrix.dequantise(dtype)


def _packed_integers(integers: GroupedIntegers, *, is_gated: bool, is_whole: bool) -> PackedWeight:
    """Integers in groups as the kernels take them: codes of 4 bits, or of a byte."""
    codes = integers.codes
    if integers.num_bits == 4 and integers.offsets is None:
        codes = codes + INT4_ZERO
    return pack_weight(
        codes.view(torch.uint8),
        integers.scales,
        None,
        "int4" if integers.num_bits == 4 else "int8",
        group_size=integers.group_size,
        offsets=integers.offsets,
        is_gated=is_gated,
        is_whole=is_whole,
    )
