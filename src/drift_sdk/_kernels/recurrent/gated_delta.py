"""The gated delta rule with border states, in CUDA C++: of rows that are decoded or verified, and of prompts.

    u_t = rate_t (v_t - e^G_t k_t^T S - sum over s < t of e^(G_t - G_s) (k_t . k_s) u_s)
    o_t = e^G_t q_t^T S + sum over s <= t of e^(G_t - G_s) (q_t . k_s) u_s
    S of the next border = e^G_last S + sum over s of e^(G_last - G_s) k_s u_s^T

Positions are cut at multiples of BORDER. S is the state at the border before a row, and s and t are rows from
there on; G is the sum of the logarithms of their decays. A slot stores S and, in rings, k, u and the decay of
the rows since: rejected rows are overwritten, and a row uses the same S and the same earlier rows whatever is
computed beside it.

Order of summation, in which no bit depends on the other rows, or on the division of a prompt:

- k_t^T S and q_t^T S by tensor cores, keys in ascending order, 16 at a time, with S split in two parts of
  bfloat16, of which the high one comes first. Keys and queries are exact; their lengths are divided out in
  float32 afterwards. k_t . k_s and q_t . k_s likewise.
- Sums over earlier rows by fused multiply-adds in float32, in ascending order.
- G by a scan of BORDER lanes. Powers by ex2.approx.
- The next S by tensor cores, 16 rows at a time, with the updates split in two parts of bfloat16.

Bytes: the state once, 4 * key_dim * value_dim a head, and half of BORDER rows of 4 * value_dim a head; it is
written once in BORDER rows. In prompts the state stays in registers.

Dependent launch: `advance_rows` reads states, rings and the rows' places before it waits, and may store a
folded state then; the kernel before has to wait before it permits its dependents, and to use none of them.
`advance_prompts` waits first.

Keys, their factors, and decays of the last rows of prompts, which are added to the rings of slots.

A launch of its own behind the one that computes the rows: its CTAs read the keys before a run from the ring,
in which these rows may take their places.

Grid: (runs, key heads). A program owns a key head of a run, and the decays of its value heads.

Bytes: at most BORDER - 1 rows of a run, read and written.

Dependent launch: the kernel waits first, then permits its dependents to start.

The positions of stored states, by slot.

A border moves with what stores the state: before a step whose prompts store it at their ends, and after a
round, which stored it at the last border up to its first rows. Grid: one program.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.launch.arguments import cdiv, check_range, check_tensor, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.launch.launch_order import KernelAccess, note_kernel
from drift_sdk.spec.model import BORDER, GatedDelta, num_ring_rows


@kernel
def _keep_rows(
    runs_ptr,  # [M, 4] int32
    mixed_ptr,  # [N, NUM_CHANNELS], storage type
    scales_ptr,  # [N, 2 * NUM_KEY_HEADS] fp32
    gates_ptr,  # [N, 2 * NUM_VALUE_HEADS] fp32
    keys_ptr,  # [S, NUM_KEY_HEADS, RING, KEY_DIM], storage type, written
    key_scales_ptr,  # [S, NUM_KEY_HEADS, RING] fp32, written
    decays_ptr,  # [S, NUM_VALUE_HEADS, RING] fp32, written
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    RING: tl.constexpr,
    BORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (run, key head)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    run, key_head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(runs_ptr + run * 4)
    start = tl.load(runs_ptr + run * 4 + 1)
    first_row = tl.load(runs_ptr + run * 4 + 2)
    end = start + tl.load(runs_ptr + run * 4 + 3)
    position = end // BORDER * BORDER + tl.arange(0, BORDER)
    slots = tl.where(position >= start, slot, -1).to(tl.int64)
    is_row = (slots >= 0) & (position < end)
    row = tl.where(is_row, first_row + position - start, 0).to(tl.int64)
    place = tl.where(is_row, position, 0) % RING
    column = tl.arange(0, PADDED_DIM)
    mask = is_row[:, None] & (column < KEY_DIM)[None, :]
    channel = (NUM_KEY_HEADS + key_head) * KEY_DIM + column
    keys = tl.load(mixed_ptr + (row[:, None] * NUM_CHANNELS + channel[None, :]), mask=mask, other=0.0)
    ring = (slots * NUM_KEY_HEADS + key_head) * RING + place
    tl.store(keys_ptr + (ring[:, None] * KEY_DIM + column[None, :]), keys, mask=mask)
    scale_ptrs = scales_ptr + (row * (2 * NUM_KEY_HEADS) + NUM_KEY_HEADS + key_head)
    tl.store(key_scales_ptr + ring, tl.load(scale_ptrs, mask=is_row, other=0.0), mask=is_row)
    member = tl.arange(0, PADDED_GROUP)
    head = key_head * GROUP + member
    is_decay = is_row[:, None] & (member < GROUP)[None, :]
    gate_ptrs = gates_ptr + (row[:, None] * (2 * NUM_VALUE_HEADS) + head[None, :])
    ring = (slots[:, None] * NUM_VALUE_HEADS + head[None, :]) * RING + place[:, None]
    tl.store(decays_ptr + ring, tl.load(gate_ptrs, mask=is_decay, other=0.0), mask=is_decay)


def keep_rows(
    spec: GatedDelta,
    runs: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    rings: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the rows of runs [M, 4] since the last border to the rings of their slots.

    rows: mixed, scales and gates of `MixedRows`. rings: keys, key_scales and decays of `LayerStates`. Their
    shapes, types and layouts were checked.
    """
    mixed, scales, gates = rows
    keys, key_scales, decays = rings
    _keep_rows[(runs.shape[0], spec.num_key_heads)](
        runs_ptr=runs,
        mixed_ptr=mixed,
        scales_ptr=scales,
        gates_ptr=gates,
        keys_ptr=keys,
        key_scales_ptr=key_scales,
        decays_ptr=decays,
        NUM_KEY_HEADS=spec.num_key_heads,
        NUM_VALUE_HEADS=spec.num_value_heads,
        NUM_CHANNELS=spec.num_channels,
        KEY_DIM=spec.key_dim,
        PADDED_DIM=next_power_of_2(spec.key_dim),
        GROUP=spec.group,
        PADDED_GROUP=next_power_of_2(spec.group),
        RING=keys.shape[2],
        BORDER=BORDER,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )


MAX_ROWS = 17
"""Most rows of a sequence that are verified at once."""
MAX_KEY_DIM = 128
FEW_SLOTS = 16
"""Most sequences for which CTAs of 4 warps are faster than CTAs of 8 (48 heads of 128 x 128, H200)."""

COMMON = ("launch/types.cu", "launch/dependent_launch.cu", "recurrent/gated_delta.cu")
ROWS, PROMPTS = (*COMMON, "recurrent/gated_delta_rows.cu"), (*COMMON, "recurrent/gated_delta_prompts.cu")
STATES = frozenset({"state", "keys", "key_scales", "updates", "decays"})
ROWS_ACCESS = KernelAccess(
    STATES | {"row_slot", "row_position", "borders"}, STATES | {"out"}, False, frozenset({"state"})
)
PROMPTS_ACCESS = KernelAccess(frozenset(), frozenset({"state", "updates", "out", "checkpoints"}), False)


class LayerStates(Struct, frozen=True):
    """States of a layer for S slots, and rings of their last rows, R each.

    state [S, num_value_heads, value_dim / 16, key_dim / 8, 32, 4] float32: at the slot's border, in the order
    in which warps read it. keys [S, num_key_heads, R, key_dim] bfloat16. key_scales [S, num_key_heads, R]:
    their inverse lengths. updates [S, num_value_heads, R, value_dim]. decays [S, num_value_heads, R]:
    logarithms, base 2. float32 but for the keys.
    """

    state: Tensor
    keys: Tensor
    key_scales: Tensor
    updates: Tensor
    decays: Tensor

    @classmethod
    def empty(
        cls,
        spec: GatedDelta,
        sizes: tuple[int, ...],
        num_rows: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> LayerStates:
        """Uninitialised. sizes: slots, behind other dimensions. num_rows: of the rings, see `num_ring_rows`.
        dtype: of keys, which kernels have in bfloat16."""

        def take(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((*sizes, *shape), dtype=dtype, device=device)

        return cls(
            state=take(*state_shape(spec)),
            keys=take(spec.num_key_heads, num_rows, spec.key_dim, dtype=dtype),
            key_scales=take(spec.num_key_heads, num_rows),
            updates=take(spec.num_value_heads, num_rows, spec.value_dim),
            decays=take(spec.num_value_heads, num_rows),
        )

    def check(self, spec: GatedDelta) -> None:
        """Raise ValueError for another shape, type or layout."""
        num_slots, heads, num_rows, _ = self.updates.shape
        key_heads = spec.num_key_heads
        check_tensor("state", self.state, (num_slots, *state_shape(spec)), torch.float32)
        check_tensor("keys", self.keys, (num_slots, key_heads, num_rows, spec.key_dim), torch.bfloat16)
        check_tensor("key_scales", self.key_scales, (num_slots, key_heads, num_rows), torch.float32)
        check_tensor("updates", self.updates, (num_slots, heads, num_rows, spec.value_dim), torch.float32)
        check_tensor("decays", self.decays, (num_slots, heads, num_rows), torch.float32)
        check_range("rows of the rings", num_rows, num_ring_rows(1))


class MixedRows(Struct, frozen=True):
    """What a layer computes of N rows.

    mixed [N, num_channels] bfloat16: queries, keys and values. scales [N, 2 * num_key_heads]: factors of
    queries, then of keys. gates [N, 2 * num_value_heads]: logarithms (base 2) of decays, then rates. float32.
    out [N, num_value_heads * value_dim] bfloat16, written.
    """

    mixed: Tensor
    scales: Tensor
    gates: Tensor
    out: Tensor

    def check(self, spec: GatedDelta) -> None:
        """Raise ValueError for another shape, type or layout."""
        num_rows = self.mixed.shape[0]
        check_tensor("mixed", self.mixed, (num_rows, spec.num_channels), torch.bfloat16)
        check_tensor("scales", self.scales, (num_rows, 2 * spec.num_key_heads), torch.float32)
        check_tensor("gates", self.gates, (num_rows, 2 * spec.num_value_heads), torch.float32)
        check_tensor("out", self.out, (num_rows, spec.output_size), torch.bfloat16)


class PromptRuns(Struct, frozen=True):
    """Runs of rows of prompts, each of another slot.

    runs [M, 4] int32: slot, position of the first row, the row's number among the step's rows, and number of
    rows. Slot -1 or no rows: nothing to compute. The rows of run m come before those of run m + 1.
    places [N // BORDER + M + 1] int32: the places of checkpoints; for the borders behind the first row of
    run m, in order, from entry first_row // BORDER + m on. -1: no checkpoint there.
    """

    runs: Tensor
    places: Tensor


def state_shape(spec: GatedDelta) -> tuple[int, ...]:
    """The shape of a slot's state: value v, key k of a head is at [v // 16, k // 8, lane, i], with
    lane = v % 8 * 4 + k % 8 // 2 and i = v % 16 // 8 * 2 + k % 2."""
    return (spec.num_value_heads, spec.value_dim // 16, spec.key_dim // 8, 32, 4)


def check_spec(spec: GatedDelta) -> None:
    """Raise ValueError for a layer that the kernels do not compute."""
    if spec.key_dim % 32 or spec.key_dim > MAX_KEY_DIM:
        raise ValueError(f"key_dim={spec.key_dim}: expected a multiple of 32, at most {MAX_KEY_DIM}")

    if spec.value_dim % 16:
        raise ValueError(f"value_dim={spec.value_dim}: expected a multiple of 16")


def advance_rows(
    spec: GatedDelta,
    rows: MixedRows,
    states: LayerStates,
    borders: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    *,
    rows_per_slot: int,
    num_warps: int | None = None,
) -> None:
    """Fill `rows.out` and add the rows to the rings.

    row_slot, row_position [N] int32: `rows_per_slot` rows of each of B slots, no two of which are the same;
    slot -1 behind a sequence's last row. borders [S] int32: the positions of the stored states. Where the
    first row is BORDER or more behind it, the state is advanced by BORDER; the caller then moves the border,
    after all layers. num_warps: of a CTA, each of which has 16 values of a head.

    Raises ValueError for another shape, type or layout.
    """
    check_spec(spec)
    rows.check(spec)
    states.check(spec)
    check_range("rows_per_slot", rows_per_slot, 1, MAX_ROWS)
    num_rows, num_ring = rows.mixed.shape[0], states.updates.shape[2]
    num_slots = num_rows // rows_per_slot
    check_tensor("borders", borders, (states.state.shape[0],), torch.int32)
    check_tensor("row_slot", row_slot, (num_slots * rows_per_slot,), torch.int32)
    check_tensor("row_position", row_position, (num_slots * rows_per_slot,), torch.int32)
    check_range("rows of the rings", num_ring, num_ring_rows(rows_per_slot))
    tiles = -(-rows_per_slot // 4)
    warps = num_warps or _warps_of_rows(spec, num_slots)
    stride, values = spec.key_dim + 8, 16 * warps
    halves = BORDER * stride + 4 * tiles * stride + 32
    floats = BORDER * values + 2 * BORDER * 4 * tiles + 2 * BORDER + warps * BORDER + 8 * tiles
    # Up to 168 registers a thread, so that few are spilled; with 8 warps 128, for more CTAs at once.
    macros = {"TILES": tiles, "MIN_CTAS": 2 if warps == 8 else 12 // warps}
    arguments = {**_state_arguments(rows, states), "row_slot": row_slot, "row_position": row_position}
    arguments["borders"] = borders
    _launch(
        ROWS,
        spec,
        num_ring,
        warps,
        macros,
        num_slots,
        2 * halves + 4 * floats,
        *arguments.values(),
        rows_per_slot,
    )
    note_kernel("the gated delta rule of rows", ROWS_ACCESS, arguments)


def advance_prompts(
    spec: GatedDelta,
    rows: MixedRows,
    states: LayerStates,
    runs: PromptRuns,
    checkpoints: Tensor,
    *,
    num_warps: int | None = None,
) -> None:
    """Fill `rows.out`, and leave in each slot the state at the last border, with the rows since in its rings.

    The stored state of a slot has to be the one at the last border up to the run's first row; it is not read
    for position 0. checkpoints [P, *state_shape] float32, written at the places of `runs`; its first
    dimension may have any stride. Raises ValueError for another shape, type or layout.
    """
    check_spec(spec)
    rows.check(spec)
    states.check(spec)
    num_runs = runs.runs.shape[0]
    check_tensor("runs", runs.runs, (num_runs, 4), torch.int32)
    check_tensor("places", runs.places, (rows.mixed.shape[0] // BORDER + num_runs + 1,), torch.int32)
    check_tensor("checkpoints", checkpoints[:1], (len(checkpoints[:1]), *state_shape(spec)), torch.float32)
    warps = num_warps or _warps_of_prompts(spec)
    stride, values = spec.key_dim + 8, 16 * warps
    chunk = 2 * (2 * BORDER * stride + 64 + BORDER * (values + 8)) + 4 * 4 * BORDER
    shared_bytes = 2 * chunk + 4 * (2 * BORDER * BORDER + 2 * warps * BORDER)
    arguments = {**_state_arguments(rows, states), "runs": runs.runs, "places": runs.places}
    arguments["checkpoints"] = checkpoints
    _launch(
        PROMPTS,
        spec,
        states.updates.shape[2],
        warps,
        {"MIN_CTAS": max(1, 8 // warps)},
        num_runs,
        shared_bytes,
        *arguments.values(),
        checkpoints.stride(0) if len(checkpoints) else 0,
    )
    note_kernel("the gated delta rule of prompts", PROMPTS_ACCESS, arguments)
    keep_rows(
        spec,
        runs.runs,
        (rows.mixed, rows.scales, rows.gates),
        (states.keys, states.key_scales, states.decays),
    )


def _warps_of_rows(spec: GatedDelta, num_slots: int) -> int:
    """Warps of a CTA: few sequences are divided among more CTAs."""
    return _most_warps(spec, 8 if num_slots > FEW_SLOTS else 4)


def _warps_of_prompts(spec: GatedDelta) -> int:
    return _most_warps(spec, 4)


def _most_warps(spec: GatedDelta, most: int) -> int:
    """The largest divisor of a head's warps, at most `most`."""
    count = spec.value_dim // 16
    return max(number for number in range(1, most + 1) if count % number == 0)


def _state_arguments(rows: MixedRows, states: LayerStates) -> dict[str, Tensor]:
    return {
        "mixed": rows.mixed,
        "scales": rows.scales,
        "gates": rows.gates,
        "state": states.state,
        "keys": states.keys,
        "key_scales": states.key_scales,
        "updates": states.updates,
        "decays": states.decays,
        "out": rows.out,
    }


def _launch(
    files: tuple[str, ...],
    spec: GatedDelta,
    num_ring: int,
    warps: int,
    macros: dict[str, int],
    num_rows: int,
    shared_bytes: int,
    *arguments: Tensor | int,
) -> None:
    """num_rows: of the grid, whose columns are parts of value heads."""
    tensor = arguments[0]
    assert isinstance(tensor, Tensor)
    if tensor.is_meta:  # kernels are compiled for a GPU that is not here
        return

    # Imported here: cuda.core is installed where there is a GPU.
    from drift_sdk._kernels.launch.cuda_programs import CudaKernel, compile_kernel, launch_kernel

    sizes = {
        "DK": spec.key_dim,
        "DV": spec.value_dim,
        "NUM_KEY_HEADS": spec.num_key_heads,
        "NUM_VALUE_HEADS": spec.num_value_heads,
        "RING": num_ring,
        "WARPS": warps,
    }
    options = tuple((name, str(value)) for name, value in {**sizes, **macros}.items())
    name = "gated_delta_rows" if files is ROWS else "gated_delta_prompts"
    kernel = CudaKernel(files, name, options)
    launch_kernel(
        compile_kernel(kernel, tensor.device.index or 0, shared_bytes),
        (spec.num_value_heads * (spec.value_dim // (16 * warps)), num_rows),
        32 * warps,
        shared_bytes,
        *arguments,
    )


BLOCK = 256


@kernel
def _move_borders(
    slot_ptr,  # int32, every `stride`-th one: slots, -1: none
    position_ptr,  # likewise
    count_ptr,  # likewise, added to the position; or None
    borders_ptr,  # [S] int32, written
    number,
    stride,
    BLOCK: tl.constexpr,
    BORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_producers(PDL)
    start_dependents(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + place * stride, mask=place < number, other=-1)
    position = tl.load(position_ptr + place * stride, mask=slot >= 0, other=0)
    if count_ptr is not None:
        position += tl.load(count_ptr + place * stride, mask=slot >= 0, other=0)
    tl.store(borders_ptr + slot, position // BORDER * BORDER, mask=slot >= 0)


def move_borders_of_rows(borders: Tensor, row_slot: Tensor, row_position: Tensor, rows_per_slot: int) -> None:
    """Move the borders [S] int32 of slots to the last one up to their first rows.

    row_slot, row_position [N] int32, contiguous: `rows_per_slot` rows of each of some slots. Raises
    ValueError for another shape, type or layout.
    """
    check_range("rows_per_slot", rows_per_slot, 1)
    number = row_slot.shape[0] // rows_per_slot
    check_tensor("row_slot", row_slot, (number * rows_per_slot,), torch.int32)
    check_tensor("row_position", row_position, (number * rows_per_slot,), torch.int32)
    _move(borders, row_slot, row_position, None, number, rows_per_slot)


def move_borders_of_prompts(borders: Tensor, runs: Tensor) -> None:
    """Move the borders [S] int32 of slots to the last one up to the end of their runs [M, 4], see PromptRuns.
    A run without rows may be of a prompt that goes on in a round of the same step. Raises ValueError for
    another shape, type or layout."""
    num_runs = runs.shape[0]
    check_tensor("runs", runs, (num_runs, 4), torch.int32)
    slot, start, _, count = runs.unbind(1)
    _move(borders, slot, start, count, num_runs, 4)


def _move(
    borders: Tensor, slot: Tensor, position: Tensor, count: Tensor | None, number: int, stride: int
) -> None:
    check_tensor("borders", borders, (borders.numel(),), torch.int32)
    _move_borders[(cdiv(number, BLOCK),)](
        slot_ptr=slot,
        position_ptr=position,
        count_ptr=count,
        borders_ptr=borders,
        number=number,
        stride=stride,
        BLOCK=BLOCK,
        BORDER=BORDER,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )
