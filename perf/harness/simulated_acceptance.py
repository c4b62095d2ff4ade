"""The acceptance of a given number of drafts, to measure what a round costs at any acceptance.

It takes the place of the comparison of drafts with the tokens chosen. THE TOKENS EMITTED ARE NOT THE MODEL'S.

`commit_simulated` does what `commit` does, with two differences: a trace gives the number of tokens of each
round, and drafts are not compared with the tokens chosen. As many drafts as the trace gives are accepted, or
all that there are if these are fewer, and replace the tokens chosen before them. A stop id and the length
limit end a slot as in `commit`. Grid, ownership, bytes and programmatic dependent launch: as of `commit`, and
three words a slot more.

`simulate_choices` has choices follow drafts of trees. Round r of a slot accepts as many drafts as
`SimulatedRounds` gives, or as the path has. The path leads from the root to the last child of each node, so
that as many rows as possible have to be moved. The tokens chosen behind its nodes become the drafts of their
children; behind its last node, none of them. Grid: (trees,). A program owns the rows of its tree. Bytes: 16 a
row. Programmatic dependent launch: the kernel waits for its producers before its first read and, being short,
lets its dependents start right after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.commit import (
    HEADER_SIZE,
    ROW_SIZE,
    CommitTensors,
    commit,
    emit_token,
    find_record,
    record_words,
    write_empty_record,
    write_slot,
)
from drift_sdk._kernels.launch.arguments import check_tensor, check_tensors, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.sampling.logits import PENALTIES
from drift_sdk._kernels.slots import entry_after
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

__all__ = ["SimulatedAcceptance", "SimulatedRounds", "commit_simulated", "simulate_choices"]

GOLDEN_SECTION = 0.618
"""(sqrt(5) - 1) / 2: multiples of it, modulo 1, are spread evenly, however many there are."""


class SimulatedRounds(Struct, frozen=True):
    """Numbers of tokens that rounds emit, in turn, and the number of rounds that each slot has had.

    Round r of slot s takes entry (r + s * stride) % n of the trace.
    """

    trace: Tensor
    """int32 [n]: tokens of a round, the model's own included, so 1 or more."""
    num_rounds: Tensor
    """int32 [S]: rounds of each slot so far; counted up by the kernel."""

    @property
    def stride(self) -> int:
        """The golden section of the trace: neighbouring slots stand far apart in it."""
        return max(1, round(GOLDEN_SECTION * self.trace.shape[0]))


@kernel
def _commit_simulated(
    # The rows of the step, and what was chosen behind them.
    row_slot_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    chosen_ptr,  # [R] int32, written: an accepted draft replaces the token behind the row before it
    chosen_logprob_ptr,  # [R] fp32
    top_token_ptr,  # [R, MAX_TOP] int32
    top_logprob_ptr,  # [R, MAX_TOP] fp32
    # The slots.
    length_ptr,  # [S] int32, read and written
    last_token_ptr,  # [S] int32, written
    finish_ptr,  # [S] int32, written
    max_length_ptr,  # [S] int32
    flags_ptr,  # [S] int32
    num_logprobs_ptr,  # [S] int32
    stop_bits_ptr,  # [S, W] int32
    counts_ptr,  # [S, V] int32, counted up
    is_ngram_ptr,  # [B] int32, or None
    # The results.
    emitted_ptr,  # [B] int32, written
    output_ring_ptr,  # [num_entries, entry_words] int32, pinned, written
    current_entry_ptr,  # [1] int32
    next_entry_ptr,  # [1] int32, read and written
    # The trace.
    trace_ptr,  # [n] int32
    num_rounds_ptr,  # [S] int32, counted up
    # Sizes.
    num_entries,
    entry_words,
    vocab_size,  # V
    num_words,  # W
    trace_length,  # n
    trace_stride,
    ROWS_PER_SLOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): a program a slot of the step. As `_commit`, except where marked as simulated. Longer than
    other kernels by its lists of arguments."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    slot_index = tl.program_id(0)
    first_row = slot_index * ROWS_PER_SLOT
    slot = tl.load(row_slot_ptr + first_row)
    record_ptr = find_record(output_ring_ptr, current_entry_ptr, slot_index, entry_words, ROWS_PER_SLOT)
    if slot_index == 0:
        tl.store(next_entry_ptr, entry_after(tl.load(next_entry_ptr), num_entries))
    if slot < 0:
        write_empty_record(record_ptr, emitted_ptr + slot_index)
    else:
        slot_stop_bits_ptr = stop_bits_ptr + slot.to(tl.int64) * num_words
        slot_counts_ptr = counts_ptr + slot.to(tl.int64) * vocab_size
        start = tl.load(length_ptr + slot)
        max_length = tl.load(max_length_ptr + slot)
        is_counted = (tl.load(flags_ptr + slot) & PENALTIES) != 0
        has_logprobs = tl.load(num_logprobs_ptr + slot) >= 0
        # Changed in branches below, so tensors of `start`'s type from the beginning.
        num_tokens = start * 0
        num_drafted = start * 0
        num_accepted = start * 0
        finish = start * 0
        newest = start * 0
        is_walking = start >= 0
        # Simulated: the trace gives the number of right drafts.
        num_rounds = tl.load(num_rounds_ptr + slot)
        tl.store(num_rounds_ptr + slot, num_rounds + 1)
        num_right = tl.load(trace_ptr + (num_rounds + slot * trace_stride) % trace_length) - 1
        for depth in tl.static_range(ROWS_PER_SLOT):
            row = first_row + depth
            token = tl.load(chosen_ptr + row, mask=is_walking, other=0)
            if depth + 1 < ROWS_PER_SLOT:
                is_drafted = tl.load(row_slot_ptr + row + 1) >= 0
                draft = tl.load(row_token_ptr + row + 1)
                # Simulated: the draft replaces the token chosen before it.
                token = tl.where(is_drafted & (depth < num_right), draft, token)
                tl.store(chosen_ptr + row, token)
            if is_walking:
                newest = token
                num_tokens += 1
                finish = emit_token(
                    token,
                    row,
                    start + num_tokens,
                    max_length,
                    is_counted,
                    has_logprobs,
                    slot_stop_bits_ptr,
                    slot_counts_ptr,
                    chosen_logprob_ptr,
                    top_token_ptr,
                    top_logprob_ptr,
                    record_ptr + HEADER_SIZE + depth * ROW_SIZE,
                )
            if depth + 1 < ROWS_PER_SLOT:
                # Simulated: a draft beyond the trace's number is wrong, whatever was chosen.
                is_right = is_walking & is_drafted & (draft == token) & (depth < num_right)
                num_drafted += is_drafted.to(tl.int32)
                num_accepted += is_right.to(tl.int32)
                is_walking = is_right & (finish == 0)

        write_slot(
            length_ptr + slot,
            last_token_ptr + slot,
            finish_ptr + slot,
            emitted_ptr + slot_index,
            record_ptr,
            start + num_tokens,
            newest,
            finish,
            num_tokens,
            num_drafted,
            num_accepted,
            num_tokens * 0 if is_ngram_ptr is None else tl.load(is_ngram_ptr + slot_index),
        )


def commit_simulated(tensors: CommitTensors, rounds: SimulatedRounds) -> None:
    """`commit` with as many right drafts as `rounds` says.

    buffers.chosen is written: it holds the tokens emitted; rows behind the last token emitted are undefined.
    Rounds of one row have no drafts: they are committed as by `commit`, and not counted in `rounds`.

    Raises ValueError for another shape or type.
    """
    rows_per_slot = tensors.rows_per_slot
    if rows_per_slot == 1:
        commit(tensors)
        return

    arguments = tensors.kernel_arguments(tensors.num_slots * record_words(rows_per_slot))
    check_tensor("trace", rounds.trace, rounds.trace.shape, torch.int32)
    check_tensor("num_rounds", rounds.num_rounds, tensors.state.length.shape, torch.int32)
    _commit_simulated[(tensors.num_slots,)](
        **arguments,
        trace_ptr=rounds.trace,
        num_rounds_ptr=rounds.num_rounds,
        trace_length=rounds.trace.shape[0],
        trace_stride=rounds.stride,
        ROWS_PER_SLOT=rows_per_slot,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


@kernel
def _simulate_choices(
    row_slot_ptr,  # [R] int32
    row_parent_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    chosen_ptr,  # [R] int32, read and written
    trace_ptr,  # [n] int32
    num_rounds_ptr,  # [S] int32, counted up
    trace_length,  # n
    trace_stride,
    NUM_NODES: tl.constexpr,
    PADDED_NODES: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    first_row = tl.program_id(0) * NUM_NODES
    slot = tl.load(row_slot_ptr + first_row)
    if slot >= 0:
        node = tl.arange(0, PADDED_NODES)
        is_draft = (node > 0) & (node < NUM_NODES)
        is_draft &= tl.load(row_slot_ptr + first_row + node, mask=is_draft, other=-1) >= 0
        parent = tl.load(row_parent_ptr + first_row + node, mask=is_draft, other=-1)
        token = tl.load(row_token_ptr + first_row + node, mask=is_draft, other=-1)
        num_rounds = tl.load(num_rounds_ptr + slot)
        tl.store(num_rounds_ptr + slot, num_rounds + 1)
        num_right = tl.load(trace_ptr + (num_rounds + slot * trace_stride) % trace_length) - 1
        current = slot * 0
        is_walking = slot >= 0
        for depth in range(NUM_PATH_ENTRIES):
            if is_walking:
                is_child = is_draft & (parent == current)
                child = tl.max(tl.where(is_child, node, -1), 0)
                draft = tl.sum(tl.where(is_child & (node == child), token, 0), 0)
                chosen = tl.load(chosen_ptr + first_row + current)
                # A token that no child has: one of as many as there are children, and one more.
                is_taken = tl.sum((is_child & (token == chosen)).to(tl.int32), 0) > 0
                for other in range(NUM_NODES):
                    if is_taken:
                        chosen = other + slot * 0
                        is_taken = tl.sum((is_child & (token == chosen)).to(tl.int32), 0) > 0
                is_right = (child >= 0) & (depth < num_right)
                tl.store(chosen_ptr + first_row + current, tl.where(is_right, draft, chosen))
                current = child
                is_walking = is_right


def simulate_choices(
    row_slot: Tensor,
    row_parent: Tensor,
    row_token: Tensor,
    chosen: Tensor,
    rounds: SimulatedRounds,
    *,
    nodes_per_tree: int,
) -> None:
    """Overwrite what was chosen behind the nodes of B trees of T nodes, and count the rounds of their slots.

    row_slot, row_parent, row_token [B * T]: as of `tree_accept`. chosen [B * T], all int32. Raises ValueError
    for another shape or type.
    """
    (num_rows,) = row_slot.shape
    if num_rows % nodes_per_tree:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of {nodes_per_tree}")

    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_parent=row_parent, row_token=row_token)
    check_tensor("chosen", chosen, (num_rows,), torch.int32)
    check_tensor("trace", rounds.trace, rounds.trace.shape, torch.int32)
    check_tensor("num_rounds", rounds.num_rounds, rounds.num_rounds.shape, torch.int32)
    _simulate_choices[(num_rows // nodes_per_tree,)](
        row_slot,
        row_parent,
        row_token,
        chosen,
        rounds.trace,
        rounds.num_rounds,
        rounds.trace.shape[0],
        rounds.stride,
        NUM_NODES=nodes_per_tree,
        PADDED_NODES=next_power_of_2(nodes_per_tree),
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


class SimulatedAcceptance:
    """Accepts as many drafts as a trace says, in place of the comparison: an `Acceptance`."""

    def __init__(self, trace: Sequence[int], num_slots: int, device: torch.device) -> None:
        """trace: tokens that rounds emit in turn, over and over."""
        self._rounds = SimulatedRounds(
            trace=torch.tensor(trace, dtype=torch.int32, device=device),
            num_rounds=torch.zeros(num_slots, dtype=torch.int32, device=device),
        )
        self.commit = partial(commit_simulated, rounds=self._rounds)

    def choose(
        self, row_slot: Tensor, row_parent: Tensor, row_token: Tensor, chosen: Tensor, *, nodes_per_tree: int
    ) -> None:
        simulate_choices(row_slot, row_parent, row_token, chosen, self._rounds, nodes_per_tree=nodes_per_tree)
