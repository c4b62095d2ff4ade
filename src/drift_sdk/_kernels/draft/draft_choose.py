"""The token a draft proposes: the best of its logits, with the very noise the target will choose by.

`largest of logits + temperature * noise` is that of `logits / temperature + noise`, at any temperature and
at none. The noise is that of the target's id at the token's position, so that draft and target agree often.
Bytes: a row of logits; each program has CHUNK of them, and a second launch finds the best of the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.sampling.gumbel import LAST_ID, arg_max, exponential
from drift_sdk._kernels.sampling.noise import gumbel_noise

__all__ = ["choose_drafts", "choose_drafts_reference", "num_draft_chunks"]

CHUNK = 1024


def num_draft_chunks(vocab_size: int) -> int:
    """How many programs share a row of so many logits."""
    return -(-vocab_size // CHUNK)


@triton.jit
def _noise(seed, position, token_ids):
    """Gumbel variates of any token ids: what `gumbel.gumbel` gives for a run of them."""
    groups = (token_ids // 4).to(tl.uint32)
    zero = groups * 0
    a, b, c, d = tl.philox(seed, groups, zero + position.to(tl.uint32), zero, zero)
    word = token_ids % 4
    bits = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    uniform = bits.to(tl.float32) * 2.0**-32 + 2.0**-33
    return -tl.log(exponential(tl.minimum(uniform, 1.0 - 2.0**-24)))


@triton.jit
def _best_of_chunks(
    logits, target_ids, row_slot, row_position, temperatures, seeds, chunk_value, chunk_token,
    vocab_size, slice_stride,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, NUM_SLICES: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (slots, chunks)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    group, chunk = tl.program_id(0), tl.program_id(1)
    row = group * ROWS + DEPTH
    slot = tl.load(row_slot + row)
    if slot >= 0:
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        is_token = column < vocab_size
        place = logits + group.to(tl.int64) * vocab_size + column
        value = tl.load(place, mask=is_token, other=-float("inf")).to(tl.float32)
        for index in tl.static_range(1, NUM_SLICES):
            value += tl.load(place + index * slice_stride, mask=is_token, other=0.0)

        token_ids = tl.load(target_ids + column, mask=is_token, other=LAST_ID)
        temperature = tl.load(temperatures + slot)
        if temperature > 0:
            position = tl.load(row_position + row)
            value += temperature * _noise(tl.load(seeds + slot), position, token_ids)

        best, token = arg_max(value, token_ids)
        cell = group * tl.num_programs(1) + chunk
        tl.store(chunk_value + cell, best)
        tl.store(chunk_token + cell, token)


@triton.jit
def _place_tokens(
    chunk_value, chunk_token, row_slot, row_token, row_position, slot_out, token_out, position_out,
    num_chunks, DEPTH: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (slots,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    group = tl.program_id(0)
    row = group * ROWS + DEPTH
    slot = tl.load(row_slot + row)
    going = slot
    if DEPTH + 1 < ROWS:
        going = tl.load(row_slot + row + 1)
    token = slot * 0 - 1
    if slot >= 0:
        chunk = tl.arange(0, CHUNKS)
        cell = group * num_chunks + chunk
        is_chunk = chunk < num_chunks
        values = tl.load(chunk_value + cell, mask=is_chunk, other=-float("inf"))
        _, token = arg_max(values, tl.load(chunk_token + cell, mask=is_chunk, other=LAST_ID))
        tl.store(row_token + row, token)

    tl.store(slot_out + group, tl.where(slot >= 0, going, -1))
    tl.store(token_out + group, token)
    tl.store(position_out + group, tl.load(row_position + row))


def choose_drafts(
    logits: Tensor,
    target_ids: Tensor,
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
    temperature: Tensor,
    seed: Tensor,
    chunks: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor, Tensor],
    *,
    depth: int,
) -> None:
    """Choose the tokens of rows b * T + depth, of T rows for each of B slots, and write them to row_token
    [B * T]; rows of slot -1 are left alone.

    logits: of what precedes those rows, over the draft's vocabulary: [B, D] in the storage type, or fp32
    partial sums [num_slices, B, D], added in order. target_ids [D] int32, ascending; ties go to the lowest.
    row_slot, row_position [B * T] int32. temperature [S] fp32, seed [S] int64.
    chunks: room for [B, num_draft_chunks] fp32 and int32. out: (slot, token, position) [B] int32 of the rows
    the draft computes next: slot -1 where row b * T + depth + 1 has none.
    Raises ValueError for another shape or type.
    """
    num_slots, vocab_size = logits.shape[-2:]
    num_slices = logits.shape[0] if logits.dim() == 3 else 1
    num_rows = row_slot.shape[0]
    rows_per_slot = num_rows // num_slots
    num_chunks = num_draft_chunks(vocab_size)
    if num_rows % num_slots or not 1 <= depth < rows_per_slot:
        raise ValueError(
            f"depth={depth}: expected 1 to {rows_per_slot - 1} of {num_rows} rows of {num_slots} slots"
        )

    check_tensor("logits", logits, logits.shape, torch.float32 if logits.dim() == 3 else logits.dtype)
    check_tensor("target_ids", target_ids, (vocab_size,), torch.int32)
    for name, column in (("row_slot", row_slot), ("row_token", row_token), ("row_position", row_position)):
        check_tensor(name, column, (num_rows,), torch.int32)

    check_tensor("temperature", temperature, temperature.shape, torch.float32)
    check_tensor("seed", seed, seed.shape, torch.int64)
    check_tensor("chunks", chunks[0], (num_slots, num_chunks), torch.float32)
    check_tensor("chunks", chunks[1], (num_slots, num_chunks), torch.int32)
    for name, column in zip(("slot", "token", "position"), out, strict=True):
        check_tensor(name, column, (num_slots,), torch.int32)

    _best_of_chunks[(num_slots, num_chunks)](
        logits, target_ids, row_slot, row_position, temperature, seed, *chunks, vocab_size,
        logits.stride(0) if logits.dim() == 3 else 0, depth, rows_per_slot, num_slices, CHUNK, uses_pdl(),
        num_warps=4, **launch_options(),
    )  # fmt: skip
    _place_tokens[(num_slots,)](
        *chunks, row_slot, row_token, row_position, *out, num_chunks, depth, rows_per_slot,
        triton.next_power_of_2(num_chunks), uses_pdl(), num_warps=1, **launch_options(),
    )  # fmt: skip


def choose_drafts_reference(
    logits: Tensor, target_ids: Tensor, position: Tensor, temperature: Tensor, seed: Tensor
) -> Tensor:
    """The target's id for each row of logits [B, D] fp32, from position, temperature and seed [B]: [B]."""
    noise = gumbel_noise(seed, position.long(), int(target_ids[-1]) + 1)[:, target_ids.long()]
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None] + noise
    return target_ids[scaled.where(temperature[:, None] > 0, logits).argmax(-1)]
