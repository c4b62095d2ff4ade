"""References of the kernels of `drift_sdk._kernels.draft`."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.draft.draft_rows import Residual
from drift_sdk._kernels.layers.norm import NormKind
from drift_sdk.execution.eager.sampling import gumbel_noise
from references.layers import rms_norm_reference


def choose_drafts_reference(
    logits: Tensor, target_ids: Tensor, position: Tensor, temperature: Tensor, seed: Tensor
) -> Tensor:
    """The target's ids [B] that logits [B, D] fp32 propose, at position, temperature and seed [B] each."""
    noise = gumbel_noise(seed, position.long(), int(target_ids[-1]) + 1)[:, target_ids.long()]
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None] + noise
    return target_ids[scaled.where(temperature[:, None] > 0, logits).argmax(-1)]


def draft_inputs_reference(
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
    features: Tensor,
    embedding: Tensor,
    token_norm: Tensor,
    feature_norm: Tensor,
    *,
    eps: float,
    residual: Residual,
    norm_kind: NormKind = "rounded",
    block_table: Tensor,
    block_features: Tensor | None = None,
    block_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """(hidden, inputs) as `draft_inputs` writes them; block_features are updated in place."""
    is_live = (row_token >= 0) & (row_slot >= 0)
    given = (features.sum(0) if features.dim() == 3 else features).to(embedding.dtype)
    rows = [given[row] if row < len(given) else given[0] * 0 for row in range(len(row_slot))]
    if block_features is not None:
        for row in is_live.nonzero().flatten().tolist():
            position = int(row_position[row])
            block = block_table[row_slot[row], (position - 1) // block_size]
            if row >= len(given):
                rows[row] = block_features[block].clone()
            elif position % block_size == 0:
                block_features[block] = rows[row]

    feature = torch.stack(rows).where(is_live[:, None], 0)
    embedded = embedding[row_token.clamp(min=0).long()].where(is_live[:, None], 0)
    normed = rms_norm_reference(feature, feature_norm, eps, norm_kind=norm_kind).where(is_live[:, None], 0)
    token = rms_norm_reference(embedded, token_norm, eps, norm_kind=norm_kind).where(is_live[:, None], 0)
    hidden = {"feature": feature, "normed": normed, "zeros": torch.zeros_like(feature)}[residual]
    return hidden, torch.cat((token, normed), dim=1)


def round_rows_reference(
    row_slot: Tensor, row_position: Tensor, chosen: Tensor, emitted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(slot, token, position) as `round_rows` writes them, except the position of rows with slot -1."""
    num_rows, num_slots = row_slot.shape[0], emitted.shape[0]
    depth = torch.arange(num_rows // num_slots, device=row_slot.device)
    is_emitted = (depth < emitted[:, None]).flatten() & (chosen >= 0)
    return row_slot.where(is_emitted, -1), chosen.where(is_emitted, -1), row_position + 1


def anchor_rows_reference(
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
    num_slots: int,
    *,
    num_masks: int,
    mask_token: int,
    first_kv_slot: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(slot, token, position, last seen, KV slot) as `anchor_rows` writes them, except what rows of slot -1
    have beside it and the KV slot. num_slots: of the round."""
    slot = row_slot.view(num_slots, -1)[:, 1:2].expand(-1, 1 + num_masks)
    token = torch.full_like(slot, mask_token)
    token[:, 0] = row_token.view(num_slots, -1)[:, 0]
    number = torch.arange(1 + num_masks, device=row_slot.device, dtype=torch.int32)
    position = row_position.view(num_slots, -1)[:, :1].where(slot[:, :1] >= 0, 0) + number
    kv_slot = first_kv_slot + torch.arange(slot.numel(), device=row_slot.device)
    columns = (slot, token, position, position + num_masks)
    return (*(column.reshape(-1) for column in columns), kv_slot)  # type: ignore[return-value]


def draft_attention_reference(
    layer: LayerAttention, rows: tuple[Tensor, Tensor, Tensor], *, num_masks: int, is_causal: bool
) -> Tensor:
    """The attention of anchors and masks to the keys of their sequences before the anchor and to each other,
    in float64: [R, num_heads, head_dim]. rows: slot, position and KV slot [R]. A window counts from a row's
    own position."""
    slot, position, kv_slot = (column.tolist() for column in rows)
    size, out = layer.kv.block_size, torch.zeros_like(layer.query, dtype=torch.float64)
    for row in range(len(slot)):
        if slot[row] < 0:
            continue

        first = row - row % (1 + num_masks)
        table = layer.block_table[slot[row]].tolist()
        places = [table[at // size] * size + at % size for at in range(position[first])]
        places += kv_slot[first : first + 1 + num_masks]
        end = position[row] + 1 if is_causal else len(places)
        begin = max(position[row] - layer.window + 1, 0) if layer.window else 0
        seen = torch.tensor(places[begin:end], device=out.device)
        key, value = (
            cache[seen // size, :, seen % size].double().repeat_interleave(layer.group, dim=1)
            for cache in (layer.kv.keys, layer.kv.values)
        )
        scores = torch.einsum("hd,nhd->hn", layer.query[row].double(), key) * layer.score_scale
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), value)

    return out


def chunk_rows_reference(
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
    next_token: Tensor,
    hits: Tensor,
    last_token: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(slot, token, position) as `chunk_rows` writes them, except token and position of rows with slot -1."""
    own_slot = row_slot.clamp(min=0).long()
    token = next_token.where(next_token >= 0, last_token[own_slot])
    row = hits.clamp(min=0).long()
    hit_slot = row_slot[row].where(hits >= 0, -1)
    return (
        torch.cat((row_slot, hit_slot)),
        torch.cat((token, row_token[row])),
        torch.cat((row_position + 1, row_position[row])),
    )


def keep_last_rows_reference(row_slot: Tensor, output: Tensor, state: Tensor) -> None:
    """`keep_last_rows` in plain torch, one row after the other."""
    for row, slot in enumerate(row_slot.tolist()):
        if slot >= 0:
            state[slot] = output[row]


def draft_tiles_reference(
    row_slot: Tensor, row_position: Tensor, *, num_single: int, tile_rows: int
) -> list[list[int]]:
    """The tiles in use that `draft_tiles` writes, in order, each a list of its fields."""
    slots, positions = row_slot.tolist(), row_position.tolist()
    num_rows = len(slots) - num_single
    runs: list[list[int]] = []
    for row in range(num_rows):
        if slots[row] < 0:
            continue

        if row % tile_rows and slots[row] == slots[row - 1]:
            runs[-1][2] += 1
        else:
            runs.append([slots[row], row, 1, positions[row]])

    single = [[slots[row], row, 1, positions[row]] for row in range(num_rows, len(slots)) if slots[row] >= 0]
    return single + runs[::-1]


def append_history_reference(
    row_slot: Tensor,
    row_position: Tensor,
    row_token: Tensor,
    history: Tensor,
    *,
    emitted: Tensor | None = None,
) -> None:
    """`append_history` in plain torch."""
    is_appended = row_slot >= 0
    if emitted is not None:
        depth = torch.arange(len(row_slot) // len(emitted), device=row_slot.device)
        is_appended &= (depth < emitted[:, None]).flatten()
    history[row_slot[is_appended].long(), row_position[is_appended].long()] = row_token[is_appended]


def keep_best_clusters_reference(
    logits: torch.Tensor, scores: torch.Tensor, clusters: torch.Tensor, num_best: int
) -> torch.Tensor:
    """Logits [B, V], -inf outside of the num_best clusters with the largest of scores [B, C]; of equal ones
    the lowest. clusters [V]: of each token."""
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_best]
    is_best = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    return torch.where(is_best[:, clusters.long()], logits, -torch.inf)
