"""Routing of rows to experts, and for each expert the list of its rows.

    choose_experts: the experts of a row with the largest scores, largest first, and their weights
    list_rows:      the pairs (row, rank) of each expert, in ascending order of rows

Scores and weights, of logits l, by the kind of router:

    softmax:  the score of an expert is l; weights are softmax(l), over the chosen or over all experts
    wide:     likewise, times the router's scale; it has no groups here
    sigmoid:  the score is sigmoid(l) + correction_bias; weights are sigmoid(l), divided by
              (their sum over the chosen + 1e-20) where they are normalised, times the router's scale

Where experts have factors, weights are multiplied by them at the end.

Groups of experts: only experts of the groups with the largest sums of two scores are chosen.

A joined expert is one that all rows have, the last of E and the first of a row's K; K - 1 are chosen among
the others. Its weight is 1; or the sigmoid of a product of its gate and a row x, which are both rounded to
the storage type, as in gates.py. The product is summed in an order that depends on the length of x alone.

A pair is the number row * K + rank: the rank-th expert of a row. Of equal scores, that of the lower expert
or group comes first; NaN counts as the lowest number, so that a row always has K different experts, and the
weights that are made of it are NaN. A padding row has no experts (-1).

Grid: `_choose_experts` (rows): a program owns a row. `_list_rows` (experts): a program owns an expert's list,
and reads the experts of all pairs. Neither uses atomics: lists have a fixed order.

Bytes: the logits once, a row of x for a gate, and 4 * R * K for each expert, which come from the L2 cache.

Dependent launch: both kernels wait before their first read of what changes. `_choose_experts` follows a
product, so it permits its dependents to start at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.launch.arguments import check_range, check_tensor, check_tensors, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk.spec.model import Router

MAX_BLOCK_PAIRS, WARP_PAIRS = 1_024, 256
"""The most pairs that a program of `_list_rows` reads at a time, and those of a warp: 8 for each thread."""

GATE_BLOCK = 1_024
"""Elements of a gate that a warp multiplies at a time: 32 for each thread. Part of the result's bits."""

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)

NORM_OFFSET = tl.constexpr(1e-20)
"""Added to the sum of sigmoids by which they are divided, as in the models: all of them may be 0."""

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class ExpertRows(Struct, frozen=True):
    """The experts of R rows, K for each, and the rows of E experts.

    experts [R, K] int32: the experts of each row; -1 for a padding row.
    shares [R, K] fp32: their weights; undefined for a padding row.
    pairs [E, R] int32: the pairs of each expert; undefined behind its count.
    counts [E] int32: the number of pairs of each expert.
    """

    experts: Tensor
    shares: Tensor
    pairs: Tensor
    counts: Tensor

    @classmethod
    def take(
        cls,
        take: Callable[[str, tuple[int, ...], torch.dtype], Tensor],
        num_rows: int,
        num_experts: int,
        num_active: int,
    ) -> ExpertRows:
        """Uninitialised; take(name, shape, dtype) allocates a buffer."""
        return cls(
            experts=take("row_experts", (num_rows, num_active), torch.int32),
            shares=take("row_shares", (num_rows, num_active), torch.float32),
            pairs=take("expert_pairs", (num_experts, num_rows), torch.int32),
            counts=take("expert_counts", (num_experts,), torch.int32),
        )

    @property
    def num_rows(self) -> int:
        return self.experts.shape[0]

    @property
    def num_active(self) -> int:
        return self.experts.shape[1]

    @property
    def num_experts(self) -> int:
        return self.counts.shape[0]


@device_function
def _close_groups(
    key,  # [PADDED_EXPERTS] fp32: scores, none below LOWEST
    expert,  # [PADDED_EXPERTS]
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    NUM_ACTIVE_GROUPS: tl.constexpr,
):
    """Return the key with -inf for the experts of all but the best groups."""
    group = expert // (NUM_EXPERTS // NUM_GROUPS)
    group_range = tl.arange(0, PADDED_GROUPS)
    group_key = tl.full((PADDED_GROUPS,), -float("inf"), tl.float32)
    for group_index in tl.static_range(NUM_GROUPS):
        members = tl.where(group == group_index, key, -float("inf"))
        largest = tl.max(members, axis=0)
        first = tl.min(tl.where(members == largest, expert, PADDED_EXPERTS), axis=0)
        second = tl.max(tl.where(expert == first, -float("inf"), members), axis=0)
        known = tl.maximum(largest + second, LOWEST)  # two of the lowest add up to -inf
        group_key = tl.where(group_range == group_index, known, group_key)

    is_open = expert < 0  # none
    for _ in tl.static_range(NUM_ACTIVE_GROUPS):
        best = tl.max(group_key, axis=0)
        first = tl.min(tl.where(group_key == best, group_range, PADDED_GROUPS), axis=0)
        group_key = tl.where(group_range == first, -float("inf"), group_key)
        is_open = is_open | (group == first)

    return tl.where(is_open, key, -float("inf"))


@device_function
def _gate(
    x_ptr,  # [SIZE], storage type
    weight_ptr,  # [SIZE], likewise
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return the sigmoid of the product in fp32."""
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_SIZE,), tl.float32)
    for first in tl.static_range(0, SIZE, BLOCK_SIZE):
        inner = first + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + inner, mask=inner < SIZE, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + inner, mask=inner < SIZE, other=0.0).to(tl.float32)
        total = tl.fma(x, weight, total)
    logit = tl.sum(total, axis=0).to(dtype).to(tl.float32)
    return (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)


@kernel
def _choose_experts(
    logits_ptr,  # [NUM_SLICES, R, NUM_EXPERTS] fp32: partial sums
    bias_ptr,  # [NUM_EXPERTS], DTYPE; or None
    correction_ptr,  # [NUM_EXPERTS] fp32: added to sigmoids for the choice; or None
    factors_ptr,  # [NUM_EXPERTS]: weights are multiplied by them; or None
    x_ptr,  # [R, GATE_SIZE], storage type; or None
    gate_ptr,  # [GATE_SIZE], storage type: of the joined expert; or None
    row_slot_ptr,  # [R] int32
    experts_ptr,  # [R, NUM_JOINED + NUM_ACTIVE] int32, written
    shares_ptr,  # [R, NUM_JOINED + NUM_ACTIVE] fp32, written
    slice_stride,
    NUM_SLICES: tl.constexpr,
    NUM_JOINED: tl.constexpr,  # 0 or 1; not counted by the following
    GATE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # elements of x at a time
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    PADDED_ACTIVE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    NUM_ACTIVE_GROUPS: tl.constexpr,
    KIND: tl.constexpr,  # see spec.model.Router, as for IS_NORMALISED and SCALE
    IS_NORMALISED: tl.constexpr,
    SCALE: tl.constexpr,
    DTYPE: tl.constexpr,  # to which logits are rounded
    PDL: tl.constexpr,
):
    """Program (row): one row. Longer than other kernels by its signature."""
    start_dependents(PDL)
    wait_for_producers(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED_EXPERTS)
    is_expert = expert < NUM_EXPERTS
    rank_range = tl.arange(0, PADDED_ACTIVE)
    chosen = tl.full((PADDED_ACTIVE,), -1, tl.int32)
    ranked = tl.full((PADDED_ACTIVE,), -float("inf"), tl.float32)
    is_live = tl.load(row_slot_ptr + row) >= 0
    if is_live:
        logits_ptrs = logits_ptr + (row * NUM_EXPERTS + expert)
        logits = tl.load(logits_ptrs, mask=is_expert, other=0.0)
        for slice_index in tl.static_range(1, NUM_SLICES):
            logits += tl.load(logits_ptrs + slice_index * slice_stride, mask=is_expert, other=0.0)

        if bias_ptr is not None:
            logits += tl.load(bias_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)

        logits = logits.to(DTYPE).to(tl.float32)
        if KIND == "sigmoid":
            values = 1.0 / (1.0 + tl.exp(-logits))
        else:
            values = logits
        scores = values
        if correction_ptr is not None:
            scores += tl.load(correction_ptr + expert, mask=is_expert, other=0.0)
        known = tl.where(scores > LOWEST, scores, LOWEST)  # NaN is not larger
        key = tl.where(is_expert, known, -float("inf"))
        if NUM_GROUPS > 1:
            key = _close_groups(
                key, expert, NUM_EXPERTS, PADDED_EXPERTS, NUM_GROUPS, PADDED_GROUPS, NUM_ACTIVE_GROUPS
            )
        for rank in tl.static_range(NUM_ACTIVE):
            best = tl.max(key, axis=0)
            first = tl.min(tl.where(key == best, expert, PADDED_EXPERTS), axis=0)
            is_first = expert == first
            key = tl.where(is_first, -float("inf"), key)
            chosen = tl.where(rank_range == rank, first, chosen)
            ranked = tl.where(rank_range == rank, tl.sum(tl.where(is_first, values, 0.0), axis=0), ranked)

        if KIND == "sigmoid":
            if IS_NORMALISED:
                total = tl.sum(tl.where(rank_range < NUM_ACTIVE, ranked, 0.0), axis=0)
                ranked = ranked / (total + NORM_OFFSET)
            ranked = ranked * SCALE
        else:
            highest = tl.max(ranked, axis=0)
            exponentials = tl.exp(ranked - highest)
            if IS_NORMALISED:
                norm = tl.sum(exponentials, axis=0)
            else:
                norm = tl.sum(tl.where(is_expert, tl.exp(logits - highest), 0.0), axis=0)
            ranked = exponentials / norm
            if SCALE != 1.0:
                ranked = ranked * SCALE
        if factors_ptr is not None:
            factors = tl.load(factors_ptr + chosen, mask=rank_range < NUM_ACTIVE, other=1.0)
            ranked = ranked * factors.to(tl.float32)

    first_pair = row * (NUM_JOINED + NUM_ACTIVE)
    if NUM_JOINED > 0:
        share = 1.0
        if gate_ptr is not None:
            share = _gate(x_ptr + row * GATE_SIZE, gate_ptr, GATE_SIZE, BLOCK_SIZE)
        tl.store(experts_ptr + first_pair, tl.where(is_live, NUM_EXPERTS, -1))
        tl.store(shares_ptr + first_pair, share)
    pair = first_pair + NUM_JOINED + rank_range
    is_rank = rank_range < NUM_ACTIVE
    tl.store(experts_ptr + pair, chosen, mask=is_rank)
    tl.store(shares_ptr + pair, ranked, mask=is_rank)


@kernel(do_not_specialize=["num_pairs", "num_rows"])
def _list_rows(
    experts_ptr,  # [R, NUM_ACTIVE] int32
    pairs_ptr,  # [NUM_EXPERTS, R] int32, written
    counts_ptr,  # [NUM_EXPERTS] int32, written
    num_pairs,  # R * NUM_ACTIVE
    num_rows,  # R
    BLOCK_PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (expert): one list."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    expert = tl.program_id(0)
    list_ptr = pairs_ptr + expert.to(tl.int64) * num_rows
    count = 0
    for first in range(0, num_pairs, BLOCK_PAIRS):
        pair = first + tl.arange(0, BLOCK_PAIRS)
        is_mine = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) == expert
        one = is_mine.to(tl.int32)
        # A row has different experts, so a list never has more than num_rows pairs.
        tl.store(list_ptr + (count + tl.cumsum(one, axis=0) - one), pair, mask=is_mine)
        count += tl.sum(one, axis=0)

    tl.store(counts_ptr + expert, count)


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    row_slot: Tensor,
    rows: ExpertRows,
    router: Router,
    *,
    dtype: torch.dtype,
    correction_bias: Tensor | None = None,
    factors: Tensor | None = None,
    num_joined: int = 0,
    gate: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Fill `rows.experts` and `rows.shares`.

    logits: fp32 partial sums [num_slices, R, E], added in order, then bias [E] of type `dtype`, then rounded
    to `dtype`, which is float32 for a router whose logits are not rounded. row_slot: [R] int32, -1 for a
    padding row. correction_bias: [E] float32, for a router of sigmoids: added for the choice, and no part of
    the weights. factors: [E] of any floating-point type: weights are multiplied by them. num_joined: 1 if the
    last expert of `rows` is joined, and none of these E. gate: x [R, H] and weight [H] of its gate, in one
    storage type. Raises ValueError for another shape, type or layout, and for groups without experts enough.
    """
    num_slices = logits.shape[0]
    check_range("num_joined", num_joined, 0, 1)
    num_rows, num_experts = rows.num_rows, rows.num_experts - num_joined
    num_active = rows.num_active - num_joined
    check_range("num_slices", num_slices, 1)
    check_range("num_active", num_active, 1, num_experts)
    check_tensor("logits", logits, (num_slices, num_rows, num_experts), torch.float32)
    check_tensors((num_experts,), dtype, bias=bias)
    check_tensors((num_experts,), torch.float32, correction_bias=correction_bias)
    if factors is not None:
        check_tensor("factors", factors, (num_experts,), factors.dtype)
    _check_router(router, num_experts, num_active, correction_bias)
    x, weight = (None, None) if gate is None else gate
    gate_size = 0 if weight is None else len(weight)
    if x is not None and weight is not None:
        check_range("num_joined", num_joined, 1)
        check_tensor("gate weight", weight, (gate_size,), x.dtype)
        check_tensor("x", x, (num_rows, gate_size), x.dtype)
    check_tensor("row_slot", row_slot, (num_rows,), torch.int32)
    check_tensor("experts", rows.experts, (num_rows, rows.num_active), torch.int32)
    check_tensor("shares", rows.shares, (num_rows, rows.num_active), torch.float32)
    _choose_experts[(num_rows,)](
        logits_ptr=logits,
        bias_ptr=bias,
        correction_ptr=correction_bias,
        factors_ptr=factors,
        x_ptr=x,
        gate_ptr=weight,
        row_slot_ptr=row_slot,
        experts_ptr=rows.experts,
        shares_ptr=rows.shares,
        slice_stride=logits.stride(0),
        NUM_SLICES=num_slices,
        NUM_JOINED=num_joined,
        GATE_SIZE=gate_size,
        BLOCK_SIZE=min(next_power_of_2(max(gate_size, 1)), GATE_BLOCK),
        NUM_EXPERTS=num_experts,
        PADDED_EXPERTS=next_power_of_2(num_experts),
        NUM_ACTIVE=num_active,
        PADDED_ACTIVE=next_power_of_2(num_active),
        NUM_GROUPS=router.num_groups,
        PADDED_GROUPS=next_power_of_2(router.num_groups),
        NUM_ACTIVE_GROUPS=router.num_active_groups,
        KIND=router.kind,
        IS_NORMALISED=router.is_normalised,
        SCALE=router.scale,
        DTYPE=TRITON_DTYPES[dtype],
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


def _check_router(router: Router, num_experts: int, num_active: int, correction_bias: Tensor | None) -> None:
    if router.kind == "softmax" and correction_bias is not None:
        raise ValueError("correction_bias: given for softmax: expected None")

    if router.num_groups == 1 == router.num_active_groups:
        return

    check_range("num_groups", router.num_groups, 1, num_experts // 2)  # a group has two scores to add
    if num_experts % router.num_groups:
        raise ValueError(f"num_groups={router.num_groups}: expected a divisor of {num_experts} experts")

    group_size = num_experts // router.num_groups
    check_range(
        "num_active_groups", router.num_active_groups, -(-num_active // group_size), router.num_groups
    )


def list_rows(rows: ExpertRows) -> None:
    """Fill `rows.pairs` and `rows.counts` from `rows.experts`, in which a row names an expert at most once.

    Raises ValueError for another shape, type or layout than ExpertRows states.
    """
    check_rows(rows)
    num_rows, num_experts, num_active = rows.num_rows, rows.num_experts, rows.num_active
    block_pairs = min(max(next_power_of_2(num_rows * num_active), WARP_PAIRS), MAX_BLOCK_PAIRS)
    _list_rows[(num_experts,)](
        experts_ptr=rows.experts,
        pairs_ptr=rows.pairs,
        counts_ptr=rows.counts,
        num_pairs=num_rows * num_active,
        num_rows=num_rows,
        BLOCK_PAIRS=block_pairs,
        PDL=uses_pdl(),
        num_warps=block_pairs // WARP_PAIRS,
        **launch_options(),
    )


def check_rows(rows: ExpertRows) -> None:
    num_rows, num_experts, num_active = rows.num_rows, rows.num_experts, rows.num_active
    check_range("num_active", num_active, 1, num_experts)
    check_tensor("experts", rows.experts, (num_rows, num_active), torch.int32)
    check_tensor("shares", rows.shares, (num_rows, num_active), torch.float32)
    check_tensor("pairs", rows.pairs, (num_experts, num_rows), torch.int32)
    check_tensor("counts", rows.counts, (num_experts,), torch.int32)
