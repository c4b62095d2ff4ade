"""References of the kernels of `drift_sdk._kernels.views`."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.views import Retrieval
from drift_sdk.speculation import ViewLayout


def block_shares_reference(
    query: Tensor,
    keys: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    *,
    num_sequences: int,
    scale: float | None = None,
) -> Tensor:
    """The shares in float64, [B, num_kv_heads, max_blocks]; 0 for blocks that no row sees."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = keys.shape[1:3]
    max_blocks, group = block_table.shape[1], num_heads // num_kv_heads
    rows, query_rows = len(row_slot) // num_sequences, len(query) // num_sequences
    scale = head_dim**-0.5 if scale is None else scale
    shares = torch.zeros(num_sequences, num_kv_heads, max_blocks, dtype=torch.float64, device=query.device)
    for sequence in range(num_sequences):
        for depth in range(rows):
            slot = int(row_slot[sequence * rows + depth])
            position = int(row_position[sequence * rows + depth])
            if slot < 0:
                continue

            num_blocks = position // block_size + 1
            blocks = block_table[slot, :num_blocks].long()
            seen = keys[blocks].transpose(1, 2).flatten(0, 1)[: position + 1].double()
            source = sequence * query_rows + query_rows - rows + depth
            own = query[source].double().view(num_kv_heads, group, head_dim)
            weights = (torch.einsum("hgd,phd->hgp", own, seen) * scale).softmax(-1).sum(1)
            padded = torch.nn.functional.pad(weights, (0, num_blocks * block_size - position - 1))
            shares[sequence, :, :num_blocks] += padded.view(num_kv_heads, num_blocks, block_size).sum(-1)

    return shares


def refresh_rows_reference(
    round_rows: tuple[Tensor, Tensor, Tensor],
    retrieval: Retrieval,
    out: tuple[Tensor, Tensor, Tensor],
    *,
    num_sequences: int,
) -> None:
    """`refresh_rows` in plain torch; tokens and positions of rows of slot -1 are those of the kernel too."""
    rows_each, round_rows_each = len(out[0]) // num_sequences, len(round_rows[0]) // num_sequences
    for sequence in range(num_sequences):
        first = sequence * round_rows_each
        slot, position = int(round_rows[0][first]), int(round_rows[2][first])
        pending = int(retrieval.pending[slot]) if slot >= 0 else 0
        num_front = rows_each - round_rows_each
        for row in range(rows_each):
            depth = row - num_front
            values = [-1, -1, max(position + depth, 0)]
            if depth >= 0:
                values[:2] = [int(column[first + depth]) for column in round_rows[:2]]
            elif pending + depth >= 0:
                values[:2] = [slot, int(retrieval.pending_token[slot, pending + depth])]
            for column, value in zip(out, values, strict=True):
                column[sequence * rows_each + row] = value


def note_round_reference(
    rows: tuple[Tensor, Tensor, Tensor],
    emitted: Tensor,
    retrieval: Retrieval,
    layout: ViewLayout,
    *,
    is_refresh: bool,
) -> None:
    """`note_round` in plain torch."""
    rows_per_slot = len(rows[0]) // len(emitted)
    for index, count in enumerate(emitted.tolist()):
        first = index * rows_per_slot
        slot = int(rows[0][first])
        if slot < 0:
            continue

        if is_refresh:
            retrieval.pending[slot] = 0
            retrieval.dropped[slot] = layout.num_dropped(int(rows[2][first]))
            continue

        pending = int(retrieval.pending[slot])
        retrieval.pending_token[slot, pending : pending + count] = rows[1][first : first + count]
        retrieval.pending[slot] = pending + count


def select_blocks_reference(
    shares: Tensor, row_slot: Tensor, row_position: Tensor, selected: Tensor, layout: ViewLayout
) -> None:
    """`select_blocks` in plain torch, one sequence after the other."""
    num_sequences = len(shares)
    rows = len(row_slot) // num_sequences
    for sequence in range(num_sequences):
        slot, position = int(row_slot[sequence * rows]), int(row_position[sequence * rows])
        window_block = layout.first_window_block(position)
        if slot < 0 or window_block <= layout.num_kept:
            continue

        total = torch.zeros(window_block - layout.num_sinks, dtype=torch.float32, device=shares.device)
        for head in shares[sequence]:
            total += head[layout.num_sinks : window_block]
        total = total.nan_to_num(0.0, posinf=float("inf")).clamp(min=0.0)
        order = total.argsort(descending=True, stable=True)[: layout.num_retrieved]
        selected[slot] = (order.sort().values + layout.num_sinks).to(torch.int32)


def view_blocks_reference(
    row_slot: Tensor,
    row_position: Tensor,
    block_table: Tensor,
    retrieval: Retrieval,
    view: Tensor,
    view_position: Tensor,
    layout: ViewLayout,
    *,
    rows_per_sequence: int,
) -> None:
    """`view_blocks` in plain torch, one sequence after the other."""
    max_blocks = block_table.shape[1]
    for first in range(0, len(row_slot), rows_per_sequence):
        rows = slice(first, first + rows_per_sequence)
        slot = int(row_slot[first])
        dropped = int(retrieval.dropped[slot]) if slot >= 0 else 0
        view_position[rows] = row_position[rows] - dropped * layout.block_size
        for layer in range(len(view) if slot >= 0 else 0):
            indices = list(range(max_blocks))
            if dropped:
                chosen = retrieval.selected[layer, slot].tolist()
                indices = [*range(layout.num_sinks), *chosen, *range(layout.num_kept + dropped, max_blocks)]
            indices = indices[: layout.num_blocks]
            view[layer, slot, : len(indices)] = block_table[slot, indices]
