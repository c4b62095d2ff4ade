"""Which rows a draft computes to take in what became true: of a round, and of a prompt's chunks.

The row that pairs the feature of position p with token p + 1 lies at the token's place: its position here is
p + 1. Bytes: a few words a row; the time is that of a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = ["chunk_rows", "chunk_rows_reference", "round_rows", "round_rows_reference"]

BLOCK = 256


@triton.jit
def _round_rows(
    row_slot, row_position, chosen, emitted, slot_out, token_out, position_out, num_rows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    is_true = row % ROWS < tl.load(emitted + row // ROWS, mask=is_row, other=0)
    slot = tl.load(row_slot + row, mask=is_true, other=-1)
    token = tl.load(chosen + row, mask=is_true, other=-1)
    position = tl.load(row_position + row, mask=is_true, other=0)
    tl.store(slot_out + row, tl.where(token < 0, -1, slot), mask=is_row)
    tl.store(token_out + row, token, mask=is_row)
    tl.store(position_out + row, position + 1, mask=is_row)


@triton.jit
def _chunk_rows(
    row_slot, row_token, row_position, next_token, hits, last_token, slot_out, token_out, position_out,
    num_rows, num_hits, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_hit = (row >= num_rows) & (row < num_rows + num_hits)
    source = tl.load(hits + row - num_rows, mask=is_hit, other=-1)
    source = tl.where(row < num_rows, row, source)
    slot = tl.load(row_slot + source, mask=source >= 0, other=-1)
    is_live = slot >= 0
    # What precedes a hit's row pairs with the row's own token; all others with the token that follows.
    own = tl.load(row_token + source, mask=is_live & is_hit, other=-1)
    following = tl.load(next_token + source, mask=is_live & (is_hit == 0), other=-1)
    sampled = tl.load(last_token + slot, mask=is_live & (following < 0), other=-1)
    token = tl.where(is_hit, own, tl.where(following < 0, sampled, following))
    position = tl.load(row_position + source, mask=is_live, other=0)
    is_row = row < num_rows + num_hits
    tl.store(slot_out + row, tl.where(token < 0, -1, slot), mask=is_row)
    tl.store(token_out + row, token, mask=is_row)
    tl.store(position_out + row, tl.where(is_hit, position, position + 1), mask=is_row)


def round_rows(
    row_slot: Tensor,
    row_position: Tensor,
    chosen: Tensor,
    emitted: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Of a round's rows [R], R / B for each slot, the first emitted[b] of slot b: (slot, token, position).

    chosen [R]: the token behind each row. emitted [B]: 0 for padding. The others get slot -1. All int32.
    Raises ValueError for another shape or type.
    """
    (num_rows,), (num_slots,) = row_slot.shape, emitted.shape
    if num_rows % num_slots:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of {num_slots}")

    for name, tensor in (("row_slot", row_slot), ("row_position", row_position), ("chosen", chosen)):
        check_tensor(name, tensor, (num_rows,), torch.int32)

    check_tensor("emitted", emitted, (num_slots,), torch.int32)
    _check_out(out, num_rows)
    _round_rows[(triton.cdiv(num_rows, BLOCK),)](
        row_slot, row_position, chosen, emitted, *out, num_rows, num_rows // num_slots, BLOCK, uses_pdl(),
        **launch_options(),
    )  # fmt: skip


def chunk_rows(
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
    next_token: Tensor,
    hits: Tensor,
    last_token: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Of a prefill step's rows [N], all with a slot; behind them, for each of hits [C], the row before it.

    next_token [N]: what follows each row, -1: the slot's last_token [S]. hits: rows whose predecessor is to
    be computed, -1: none. out: (slot, token, position) [N + C]; slot -1 for padding. All int32. Raises
    ValueError for another shape or type.
    """
    (num_rows,), (num_hits,) = row_slot.shape, hits.shape
    for name, tensor in (
        ("row_slot", row_slot),
        ("row_token", row_token),
        ("row_position", row_position),
        ("next_token", next_token),
    ):
        check_tensor(name, tensor, (num_rows,), torch.int32)

    check_tensor("hits", hits, (num_hits,), torch.int32)
    check_tensor("last_token", last_token, last_token.shape, torch.int32)
    _check_out(out, num_rows + num_hits)
    _chunk_rows[(triton.cdiv(num_rows + num_hits, BLOCK),)](
        row_slot, row_token, row_position, next_token, hits, last_token, *out, num_rows, num_hits, BLOCK,
        uses_pdl(), **launch_options(),
    )  # fmt: skip


def round_rows_reference(
    row_slot: Tensor, row_position: Tensor, chosen: Tensor, emitted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(slot, token, position) as `round_rows` writes them, but for dead rows' position."""
    num_rows, num_slots = row_slot.shape[0], emitted.shape[0]
    depth = torch.arange(num_rows // num_slots, device=row_slot.device)
    is_true = (depth < emitted[:, None]).flatten() & (chosen >= 0)
    return row_slot.where(is_true, -1), chosen.where(is_true, -1), row_position + 1


def chunk_rows_reference(
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
    next_token: Tensor,
    hits: Tensor,
    last_token: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(slot, token, position) as `chunk_rows` writes them, but for dead rows' token and position."""
    own_slot = row_slot.clamp(min=0).long()
    token = next_token.where(next_token >= 0, last_token[own_slot])
    row = hits.clamp(min=0).long()
    hit_slot = row_slot[row].where(hits >= 0, -1)
    return (
        torch.cat((row_slot, hit_slot)),
        torch.cat((token, row_token[row])),
        torch.cat((row_position + 1, row_position[row])),
    )


def _check_out(out: tuple[Tensor, Tensor, Tensor], num_rows: int) -> None:
    for name, tensor in zip(("slot", "token", "position"), out, strict=True):
        check_tensor(name, tensor, (num_rows,), torch.int32)
