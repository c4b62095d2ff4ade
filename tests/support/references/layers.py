"""References of the kernels of `drift_sdk._kernels.layers`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerKV
from drift_sdk._kernels.layers.norm import NormKind
from drift_sdk._kernels.layers.rope_store import Projected
from drift_sdk.quantised.formats import quantise_e4m3
from drift_sdk.spec.model import Activation
from references.attention import pack_cache


def activate_reference(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation of x, rounded to its type."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


def embed_norm_reference(
    row_token: Tensor,
    row_slot: Tensor,
    embedding: Tensor,
    weight: Tensor,
    *,
    eps: float,
    embedding_eps: float | None = None,
    multiplier: float = 1.0,
    norm_kind: NormKind = "rounded",
) -> tuple[Tensor, Tensor]:
    """Return (hidden, normed) as `embed_norm` writes them, in new tensors."""
    is_live = ((row_token >= 0) & (row_slot >= 0))[:, None]
    hidden = torch.where(is_live, embedding[row_token.clamp(min=0).to(torch.int64)], 0) * multiplier
    if embedding_eps is not None:
        hidden = F.rms_norm(hidden.to(torch.float32), hidden.shape[-1:], eps=embedding_eps).to(hidden.dtype)

    normed = rms_norm_reference(hidden, weight, eps, norm_kind=norm_kind)
    return hidden, torch.where(is_live, normed, 0)


def add_normed_reference(
    first: Tensor,
    second: Tensor,
    first_norm: Tensor,
    second_norm: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    norm_kind: NormKind = "rounded",
) -> Tensor:
    """Return what `add_normed` writes."""
    total, other = (each if each.dim() == 2 else _sum_in_order(each) for each in (first, second))
    if bias is not None:
        total = total.to(torch.float32) + bias.to(torch.float32)
    normed = [
        rms_norm_reference(each.to(weight.dtype), weight, eps, norm_kind=norm_kind)
        for each, weight in ((total, first_norm), (other, second_norm))
    ]
    return normed[0] + normed[1]


def make_inputs_reference(
    product: Tensor,
    row_token: Tensor,
    row_slot: Tensor,
    embedding: Tensor,
    norm: Tensor,
    num_layers: int,
    *,
    eps: float,
    embedding_factor: float,
    product_factor: float,
    norm_kind: NormKind = "rounded",
) -> Tensor:
    """Return what `make_inputs` writes: [R, num_layers, D]."""
    total = product if product.dim() == 2 else _sum_in_order(product)
    scaled = (total.to(norm.dtype) * product_factor).unflatten(-1, (num_layers, -1))
    normed = rms_norm_reference(scaled, norm, eps, norm_kind=norm_kind)
    own = embedding[row_token.clamp(min=0).long()] * embedding_factor
    made = (normed + own.view_as(normed)) * 0.5**0.5
    is_live = (row_token >= 0) & (row_slot >= 0)
    return torch.where(is_live[:, None, None], made, 0)


def gate_input_reference(gate: Tensor, given: Tensor, activation: Activation) -> Tensor:
    """Return what `gate_input` writes: [R, D]."""
    total = gate if gate.dim() == 2 else _sum_in_order(gate)
    return activate_reference(total.to(given.dtype), activation) * given


def glu_reference(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate) * up, each rounded to the storage type: [R, I] for gate_up [R, 2 * I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate_reference(gate, activation) * up


def gate_rows_reference(x: Tensor, weight: Tensor, activated: Tensor) -> Tensor:
    """Return activated [R, I] times the sigmoid of x [R, H] . weight [H].

    The logit, its sigmoid and the product are each rounded to the storage type.
    """
    logit = (x.to(torch.float32) @ weight.to(torch.float32)).to(x.dtype)
    return activated * logit.sigmoid()[:, None]


def add_norm_reference(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    delta_norm: Tensor | None = None,
    delta_eps: float | None = None,
    delta_multiplier: float = 1.0,
    factor: Tensor | None = None,
    norm_kind: NormKind = "rounded",
) -> tuple[Tensor, Tensor]:
    """Return (hidden, normed) as `add_norm` writes them, in new tensors."""
    if delta is not None:
        total = delta if delta.dim() == 2 else _sum_in_order(delta)
        if bias is not None:
            total = total.to(torch.float32) + bias.to(torch.float32)

        total = total.to(hidden.dtype)
        if delta_norm is not None:
            total = rms_norm_reference(
                total, delta_norm, eps if delta_eps is None else delta_eps, norm_kind=norm_kind
            )

        hidden = hidden + total * delta_multiplier

    if factor is not None:
        hidden = hidden * factor

    return hidden, rms_norm_reference(hidden, weight, eps, norm_kind=norm_kind)


def _sum_in_order(partials: Tensor) -> Tensor:
    """Return the sum of partial sums [num_slices, ...], added in ascending order."""
    total = partials[0]
    for part in partials[1:]:
        total = total + part

    return total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, norm_kind: NormKind = "rounded") -> Tensor:
    """Return x [..., H] over its root mean square times weight [H], in x's type."""
    normed = F.rms_norm(x.to(torch.float32), (x.shape[-1],), eps=eps)
    if norm_kind == "rounded":
        return weight * normed.to(x.dtype)

    wide = weight.to(torch.float32)
    return (normed * (1.0 + wide if norm_kind == "offset" else wide)).to(x.dtype)


def rotate_and_store_reference(
    qkv: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    block_table: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    query_out: Tensor,
    kv: LayerKV,
    *,
    bias: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_kind: NormKind = "rounded",
    row_kv_slot: Tensor | None = None,
    query_scale: Tensor | None = None,
    projected: Projected = "qkv",
    has_value_norm: bool = False,
) -> None:
    """Write what `rotate_and_store` writes, row by row."""
    num_rows, num_heads, head_dim = query_out.shape
    num_kv_heads, block_size = kv.num_heads, kv.block_size
    if qkv.dim() == 3:
        total = qkv[0]
        for part in qkv[1:]:
            total = total + part

        qkv = total

    if bias is not None:
        qkv = qkv.to(torch.float32) + bias.to(torch.float32)

    heads = qkv.to(query_out.dtype).view(num_rows, -1, head_dim)
    query, *others = torch.split(heads, [num_heads, *[num_kv_heads] * (len(projected) - 1)], dim=1)
    key, value = (others[0], others[-1]) if others else (query[:, :num_kv_heads],) * 2
    if has_value_norm:
        value = rms_norm_reference(value, torch.ones_like(value[0, 0]), eps)
    if query_norm is not None:
        query = rms_norm_reference(query, query_norm, eps, norm_kind=norm_kind)
    if key_norm is not None:
        key = rms_norm_reference(key, key_norm, eps, norm_kind=norm_kind)

    query_out.zero_()
    for row in range(num_rows):
        slot, position = int(row_slot[row]), int(row_position[row])
        if slot >= 0:
            own = int(block_table[slot, position // block_size]) * block_size + position % block_size
            block, place = divmod(own if row_kv_slot is None else int(row_kv_slot[row]), block_size)
            if cos is not None and sin is not None:
                query_out[row] = _rotated(query[row], cos[position], sin[position])
                rotated = _rotated(key[row], cos[position], sin[position])
            else:
                query_out[row], rotated = query[row], key[row]
            if query_scale is not None:
                query_out[row] *= query_scale[position]
            if projected == "q":
                continue

            _put(kv.keys[block, :, place], rotated, kv.key_scale)
            _put(kv.values[block, :, place], value[row], kv.value_scale)


def _put(place: Tensor, heads: Tensor, scale: Tensor | None) -> None:
    """Write heads [num_kv_heads, head_dim] to their place in a cache."""
    if scale is None:
        place.copy_(heads)
    else:
        codes = pack_cache(quantise_e4m3(heads, scale[:, None]))
        place.view(torch.uint8).copy_(codes.view(torch.uint8))


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [num_heads, head_dim] of one position, their first elements rotated by cos and sin
    [D / 2]."""
    half = cos.shape[0]
    low, high, rest = heads.split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    return torch.cat((low * cos + high * -sin, high * cos + low * sin, rest), dim=-1)


def gate_attention_reference(attended: Tensor, gate: Tensor) -> Tensor:
    """Return attended [R, W] times sigmoid(gate), each rounded to the storage type."""
    total = gate if gate.dim() == 2 else _sum_in_order(gate)
    return attended * torch.sigmoid(total.to(attended.dtype))


def soft_cap_reference(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap) in the type of logits."""
    return cap * torch.tanh(logits / cap)
