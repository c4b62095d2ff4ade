"""The convolution of recurrent layers: rows of a step, of rings and of checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec import Struct
from references.recurrent import keep_inputs_reference, mix_rows_reference, scales_reference
from slow_cases import slow_after
from tolerances import assert_near
from torch import Tensor

from drift_sdk._kernels.recurrent.gated_delta import MixedRows, PromptRuns
from drift_sdk._kernels.recurrent.rows import keep_inputs, mix_rows
from drift_sdk.spec.model import BORDER, GatedDelta, Norm, num_input_rows

pytestmark = pytest.mark.kernel

# The interpreter truncates to bfloat16 instead of rounding: that changes a rounding by less than one place.
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_SLOTS = 8
MORE_COLUMNS = 5
"""Of a product, behind the channels."""


def layer(key_heads: int, value_heads: int, key_dim: int, value_dim: int, conv_width: int) -> GatedDelta:
    return GatedDelta(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=conv_width,
        norm=Norm(eps=1e-6),
    )


SIZES = [(1, 3, 32, 16), (2, 4, 96, 48), (2, 2, 128, 128)]
"""The latter two have more channels than a program of `keep_inputs`."""
WIDTHS = [2, 4]

Part = tuple[int, int, int]
"""Slot, position of the first row, and number of rows. Slot -1: padding."""
PARTS: dict[str, list[Part]] = {
    "one row": [(2, 9, 1)],
    "first row": [(0, 0, 1)],
    "padding": [(-1, 0, 3)],
    "no rows": [],
    "block": [(7, 30, 8)],
    # The third to fifth are neighbours whose positions go on, but whose slots differ; the sixth lies in three
    # blocks of 8 rows.
    "several": [(3, 40, 5), (-1, 0, 2), (0, 1, 1), (6, 2, 1), (1, 3, 3), (5, 0, 11), (-1, 0, 1), (2, 63, 9)],
}


def eighths(*shape: int, seed: int) -> Tensor:
    """Multiples of 1/8, of which sums are exact in each type."""
    return torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)) / 8


def poisoned_product(
    spec: GatedDelta, num_rows: int, num_slices: int, dtype: torch.dtype, device: str, seed: int
) -> Tensor:
    """A product as a part of one with more rows and columns, NaN like what lies behind the channels.
    num_slices: 0 for one in the storage type."""
    slices = [num_slices] if num_slices else []
    wide_dtype = torch.float32 if num_slices else dtype
    shape = (*slices, num_rows + 3, spec.num_channels + MORE_COLUMNS + 2)
    wide = torch.full(shape, torch.nan, dtype=wide_dtype, device=device)
    product = wide[..., 2 : 2 + num_rows, : spec.num_channels + MORE_COLUMNS]
    product[..., : spec.num_channels] = eighths(*slices, num_rows, spec.num_channels, seed=seed)
    return product


def channels_of(spec: GatedDelta, product: Tensor) -> Tensor:
    return product[..., : spec.num_channels]


def drawn_weight(spec: GatedDelta, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(spec.num_channels, 1, spec.conv_width, generator=generator) / 2).to(dtype).to(device)


def poisoned_ring(spec: GatedDelta, num_kept: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full((NUM_SLOTS, num_kept, spec.num_channels), torch.nan, dtype=dtype, device=device)


def filled_ring(
    spec: GatedDelta, num_kept: int, parts: Sequence[Part], dtype: torch.dtype, device: str
) -> Tensor:
    """A ring with the rows before the first one of each part, and NaN elsewhere."""
    ring = poisoned_ring(spec, num_kept, dtype, device)
    for slot, first, _ in parts:
        for position in range(max(first - spec.conv_width + 1, 0), first):
            if slot >= 0:
                row = eighths(spec.num_channels, seed=1000 * slot + position)
                ring[slot, position % num_kept] = row
    return ring


def rows_of(parts: Sequence[Part], device: str) -> tuple[Tensor, Tensor]:
    """row_slot and row_position, with any positions of padding."""
    slots = [slot for slot, _, count in parts for _ in range(count)]
    positions = [first + row if slot >= 0 else -7 for slot, first, count in parts for row in range(count)]
    found = (torch.tensor(values, dtype=torch.int32, device=device) for values in (slots, positions))
    slot, position = found
    return slot, position


class Outputs(Struct):
    """Rows for `mix_rows` to fill, within larger tensors of NaN."""

    rows: MixedRows
    wide: tuple[Tensor, Tensor]

    @classmethod
    def poisoned(cls, spec: GatedDelta, num_rows: int, dtype: torch.dtype, device: str) -> Outputs:
        mixed = torch.full((num_rows + 2, spec.num_channels), torch.nan, dtype=dtype, device=device)
        scales = torch.full((num_rows + 2, 2 * spec.num_key_heads), torch.nan, device=device)
        unused = torch.empty(0, device=device)
        return cls(MixedRows(mixed[1:-1], scales[1:-1], unused, unused), (mixed, scales))

    def assert_rest_is_poisoned(self) -> None:
        for wide in self.wide:
            wide[1:-1] = torch.nan
            assert wide.isnan().all()


def same(left: Tensor, right: Tensor) -> bool:
    """Whether tensors are equal, NaN included."""
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("dtype", slow_after(2, DTYPES))
@pytest.mark.parametrize("num_slices", slow_after(2, [0, 3, 1]))
@pytest.mark.parametrize("conv_width", WIDTHS)
@pytest.mark.parametrize("sizes", slow_after(2, SIZES), ids=lambda sizes: f"{sizes[2]}-{sizes[3]}")
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "read"])
def test_rows_are_near_float64(
    is_kept: bool,
    sizes: tuple[int, int, int, int],
    conv_width: int,
    num_slices: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    """num_slices: 0 for a product in the storage type. The sum of the taps and silu are rounded."""
    spec = layer(*sizes, conv_width)
    weight = drawn_weight(spec, dtype, device)
    for name, parts in PARTS.items():
        slot, position = rows_of(parts, device)
        num_rows = len(slot)
        product = poisoned_product(spec, num_rows, num_slices, dtype, device, seed=1)
        product[..., slot < 0, :] = torch.nan
        most = max((count for _, _, count in parts), default=1)
        num_kept = num_input_rows(spec, most if is_kept else 1)
        ring = filled_ring(spec, num_kept, parts, dtype, device)
        expected_ring = ring.clone()
        outputs = Outputs.poisoned(spec, num_rows, dtype, device)
        mix_rows(spec, product, weight, slot, position, ring, outputs.rows, is_kept=is_kept)

        given = (slot, position, expected_ring.double())
        exact = mix_rows_reference(spec, product.double(), weight.double(), *given, is_kept=False)
        sizes_of = product.double().abs(), weight.double().abs(), slot, position, expected_ring.double().abs()
        magnitude = mix_rows_reference(spec, *sizes_of, is_kept=False).max().item() if num_rows else 0.0
        expected = mix_rows_reference(spec, product, weight, slot, position, expected_ring, is_kept=is_kept)
        mixed, scales = outputs.rows.mixed, outputs.rows.scales
        for each in (exact, expected):
            roundings = 2 if dtype != torch.float32 else 0
            assert_near(
                mixed,
                each,
                inner=conv_width,
                depth=2,
                magnitude=magnitude,
                num_roundings=roundings,
                name=name,
            )
        assert not mixed[slot < 0].any()
        assert same(ring, expected_ring), f"ring of {name}"
        exact_scales = scales_reference(spec, mixed.double())[slot >= 0]
        assert_near(scales[slot >= 0], exact_scales, inner=spec.key_dim, name=f"scales of {name}")
        outputs.assert_rest_is_poisoned()


def test_each_step_is_rounded(device: str) -> None:
    """The sum of the slices, that of the taps, and silu. The second slice is less than half of the last place
    of the first; the product with a power of two is exact."""
    spec = layer(1, 1, 32, 16, 2)
    coarse = torch.linspace(1, 4, 2 * spec.num_channels, device=device).half().view(2, -1)
    product = torch.stack((coarse.float(), torch.full_like(coarse, 4e-4).float()))
    weight = torch.tensor([0.0625, 1.0], device=device).half().expand(spec.num_channels, 1, 2).contiguous()
    slot, position = rows_of([(1, 0, 2)], device)
    sums = torch.stack((coarse[0].double(), coarse[1].double() + coarse[0].double() / 16))
    expected = torch.nn.functional.silu(sums.half().double()).half()
    assert not torch.equal(expected, torch.nn.functional.silu(sums).half())
    for each in (coarse, product):
        outputs, ring = (
            Outputs.poisoned(spec, 2, torch.float16, device),
            poisoned_ring(spec, 3, torch.float16, device),
        )
        mix_rows(spec, each, weight, slot, position, ring, outputs.rows, is_kept=True)
        assert_near(outputs.rows.mixed, expected, inner=1)
        assert torch.equal(ring[1, :2], coarse)


# The interpreter warns of exponentials that overflow.
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_slices_and_taps_are_added_in_order(device: str) -> None:
    spec = layer(1, 1, 32, 16, 4)
    large = torch.tensor([1e8, -1e8, 1.0, 0.0], device=device)
    slot, position = rows_of([(1, 0, 4)], device)

    def mixed(product: Tensor, weight: Tensor) -> list[float]:
        outputs = Outputs.poisoned(spec, 4, torch.float32, device)
        ring = poisoned_ring(spec, 7, torch.float32, device)
        weights = weight.expand(spec.num_channels, 1, 4).contiguous()
        mix_rows(spec, product, weights, slot, position, ring, outputs.rows, is_kept=False)
        values = outputs.rows.mixed
        assert (values == values[:, :1]).all()
        return [float(value) for value in values[:, 0]]

    ones = torch.ones(4, spec.num_channels, device=device)
    silu = pytest.approx(torch.nn.functional.silu(torch.tensor(1.0)).item())
    assert mixed(ones, large)[3] == silu
    assert mixed(ones, large.roll(1))[3] == silu  # 0, 1e8, -1e8, 1
    assert mixed(ones, large.roll(2))[3] == 0.0  # 1, 0, 1e8, -1e8
    last = torch.tensor([0.0, 0.0, 0.0, 1.0], device=device)
    slices = large[:3, None, None].expand(3, 4, spec.num_channels).contiguous()
    assert mixed(slices, last) == [silu] * 4
    assert mixed(slices.roll(1, 0), last) == [0.0] * 4


# The interpreter warns of exponentials that overflow.
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_large_sums_do_not_overflow(device: str) -> None:
    spec = layer(1, 1, 32, 16, 2)
    product = torch.zeros(1, spec.num_channels, device=device)
    product[0, :4] = torch.tensor([1e4, -1e4, -80.0, 90.0])
    weight = torch.ones(spec.num_channels, 1, 2, device=device)
    outputs, ring = (
        Outputs.poisoned(spec, 1, torch.float32, device),
        poisoned_ring(spec, 2, torch.float32, device),
    )
    mix_rows(spec, product, weight, *rows_of([(0, 0, 1)], device), ring, outputs.rows, is_kept=False)
    assert outputs.rows.mixed[0, :4].tolist() == [1e4, 0.0, pytest.approx(-80 * 1.8e-35, rel=0.01), 90.0]
    assert outputs.rows.scales[0, 1].item() == pytest.approx(1000.0)  # keys of length 0


class Sequences:
    """Sequences of inputs, computed piece by piece, and the rings and checkpoints that they leave."""

    def __init__(self, spec: GatedDelta, dtype: torch.dtype, device: str, *, max_rows: int = 1) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        generator = torch.Generator().manual_seed(5)
        shape = (2, NUM_SLOTS, 120, spec.num_channels)
        self.inputs = torch.randn(shape, generator=generator).to(device)
        """[num_slices, slots, positions, channels]"""
        self.weight = drawn_weight(spec, dtype, device)
        self.ring = poisoned_ring(spec, num_input_rows(spec, max_rows), dtype, device)
        shape = (3, spec.conv_width - 1, spec.num_channels)
        self.checkpoints = torch.full(shape, torch.nan, dtype=dtype, device=device)

    def product(self, parts: Sequence[Part], sources: Sequence[int] | None = None) -> Tensor:
        """sources: the sequences whose inputs parts have; None: those of their slots."""
        found = [
            self.inputs[:, source, first : first + count]
            if source >= 0
            else self.inputs[:, 0, :count] * torch.nan
            for (_, first, count), source in zip(parts, sources or [slot for slot, *_ in parts], strict=True)
        ]
        return torch.cat(found, dim=1)

    def mix(
        self, parts: Sequence[Part], *, is_kept: bool, sources: Sequence[int] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """mixed and scales of each part."""
        slot, position = rows_of(parts, self.device)
        outputs = Outputs.poisoned(self.spec, len(slot), self.dtype, self.device)
        product = self.product(parts, sources)
        mix_rows(self.spec, product, self.weight, slot, position, self.ring, outputs.rows, is_kept=is_kept)
        counts = [count for _, _, count in parts]
        return list(zip(outputs.rows.mixed.split(counts), outputs.rows.scales.split(counts), strict=True))

    def prompts(
        self,
        parts: Sequence[Part],
        places: dict[tuple[int, int], int] | None = None,
        sources: Sequence[int] | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        found = self.mix(parts, is_kept=False, sources=sources)
        runs = runs_of(parts, places or {}, self.device)
        keep_inputs(self.spec, self.product(parts, sources), runs, self.ring, self.checkpoints)
        return found


def runs_of(parts: Sequence[Part], places: dict[tuple[int, int], int], device: str) -> PromptRuns:
    """places: of checkpoints, by number of part and position."""
    first_row, runs = 0, []
    num_rows = sum(count for _, _, count in parts)
    table = torch.full((num_rows // BORDER + len(parts) + 1,), -1, dtype=torch.int32)
    for number, (slot, first, count) in enumerate(parts):
        runs.append((slot, first, first_row, count))
        for (part, position), place in places.items():
            if part == number:
                assert first < position <= first + count and position % BORDER == 0
                entry = first_row // BORDER + number + position // BORDER - first // BORDER - 1
                assert table[entry] == -1
                table[entry] = place
        first_row += count
    found = torch.tensor(runs, dtype=torch.int32, device=device).view(-1, 4)
    return PromptRuns(found, table.to(device))


def joined(pieces: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    mixed, scales = zip(*pieces, strict=True)
    return torch.cat(mixed), torch.cat(scales)


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for name, left, right in zip(("mixed", "scales"), found, expected, strict=True):
        assert left.isfinite().all() and torch.equal(left, right), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("conv_width", WIDTHS)
def test_rows_have_the_same_bits_however_prompts_are_cut(
    conv_width: int, dtype: torch.dtype, device: str
) -> None:
    """Alone and beside others, in pieces of one row and more, in any order of slots."""
    spec, draw = layer(1, 2, 96, 48, conv_width), random.Random(7)
    whole = [Sequences(spec, dtype, device).prompts([(slot, 0, 45)])[0] for slot in range(3)]
    sequences = Sequences(spec, dtype, device)
    pieces: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
    ends = [0, 0, 0]
    while min(ends) < 45:
        order = draw.sample(range(3), draw.randint(1, 3))
        counts = [min(draw.choice((1, 1, 2, 3, 9, 20)), 45 - ends[slot]) for slot in order]
        parts = [(slot, ends[slot], count) for slot, count in zip(order, counts, strict=True)]
        parts.insert(draw.randint(0, len(parts)), (-1, 0, draw.randint(0, 2)))
        for (slot, _, count), found in zip(parts, sequences.prompts(parts), strict=True):
            if slot >= 0:
                pieces[slot].append(found)
                ends[slot] += count
    for found, expected in zip(pieces, whole, strict=True):
        assert len(found) > 3
        assert_same(joined(found), expected)


@pytest.mark.parametrize("conv_width", WIDTHS)
@pytest.mark.parametrize("start", slow_after(2, [2, 31, 0, 1]))
def test_verified_rows_have_the_bits_of_prompts(start: int, conv_width: int, device: str) -> None:
    """Of three rows any number is accepted; the others are computed again, from other inputs."""
    spec, draw = layer(1, 1, 32, 16, conv_width), random.Random(start)
    expected = Sequences(spec, torch.float32, device).prompts([(2, 0, 60)])[0]
    sequences = Sequences(spec, torch.float32, device, max_rows=3)
    sequences.prompts([(2, 0, start), (4, 0, 50)])
    length, rejected = start, 0
    while length < 60:
        count = min(3, 60 - length)
        accepted = draw.randint(1, count)
        parts = [
            (4, 50, 1),
            (2, length, accepted),
            (2, length + accepted, count - accepted),
            (-1, 0, 3 - count),
        ]
        found = sequences.mix(parts, is_kept=True, sources=[4, 2, 5, -1])[1]
        assert_same(found, (expected[0][length : length + accepted], expected[1][length : length + accepted]))
        length += accepted
        rejected += count - accepted
    assert rejected > 5


@pytest.mark.parametrize("conv_width", WIDTHS)
def test_sequences_go_on_from_checkpoints_with_the_same_bits(conv_width: int, device: str) -> None:
    spec = layer(1, 1, 32, 16, conv_width)
    expected = Sequences(spec, torch.float32, device).prompts([(1, 0, 100)])[0]
    sequences = Sequences(spec, torch.float32, device)
    sequences.prompts([(1, 0, 31)])
    sequences.prompts([(0, 0, 40), (1, 31, 69)], {(0, 32): 1, (1, 32): 0, (1, 96): 2})
    for position, place in ((32, 0), (96, 2)):
        for number in range(conv_width - 1):
            to = (position - conv_width + 1 + number) % sequences.ring.shape[1]
            sequences.ring[6, to] = sequences.checkpoints[place, number]
        (found,) = sequences.prompts([(6, position, 100 - position)], sources=[1])
        assert_same(found, (expected[0][position:], expected[1][position:]))


RUNS: dict[str, tuple[list[Part], dict[tuple[int, int], int]]] = {
    "one row": ([(3, 0, 1)], {}),
    "border behind the first row": ([(3, 31, 1)], {(0, 32): 2}),
    "padding": ([(-1, -1, 0), (-1, 7, 0)], {}),
    "no runs": ([], {}),
    # Shorter than the window at the beginning and later; ends before, at and behind borders; a slot that is
    # none; no rows; borders without a place between those with one; places of runs that begin in one block.
    "several": (
        [
            (2, 0, 1),
            (0, 31, 1),
            (4, 32, 32),
            (-1, 30, 5),
            (1, 30, 1),
            (3, 64, 0),
            (5, 5, 125),
            (6, 62, 3),
            (7, 29, 2),
            (-1, -1, 0),
        ],
        {(1, 32): 4, (2, 64): 0, (6, 32): 5, (6, 128): 1, (7, 64): 6},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_slices", slow_after(2, [0, 3, 1]))
@pytest.mark.parametrize("conv_width", WIDTHS)
@pytest.mark.parametrize("sizes", slow_after(2, SIZES), ids=lambda sizes: f"{sizes[2]}-{sizes[3]}")
@pytest.mark.parametrize("max_rows", [1, 4])
def test_rings_and_checkpoints_keep_the_last_rows(
    max_rows: int,
    sizes: tuple[int, int, int, int],
    conv_width: int,
    num_slices: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    """All other entries of them stay as they were. num_slices: 0 for a product in the storage type."""
    spec = layer(*sizes, conv_width)
    for name, (parts, places) in RUNS.items():
        num_rows = sum(count for _, _, count in parts)
        product = poisoned_product(spec, num_rows, num_slices, dtype, device, seed=2)
        first_row = 0
        for slot, _, count in parts:
            if slot < 0:
                product[..., first_row : first_row + count, :] = torch.nan
            first_row += count
        runs = runs_of(parts, places, device)
        ring = filled_ring(spec, num_input_rows(spec, max_rows), parts, dtype, device)
        shape = (8, conv_width + 1, spec.num_channels)
        wide = torch.full(shape, torch.nan, dtype=dtype, device=device)
        checkpoints = wide[:7, 1:-1]
        expected_ring, expected_wide = ring.clone(), wide.clone()
        keep_inputs_reference(spec, product, runs, expected_ring, expected_wide[:7, 1:-1])
        keep_inputs(spec, product, runs, ring, checkpoints)
        assert same(ring, expected_ring), f"ring of {name}"
        assert same(wide, expected_wide), f"checkpoints of {name}"
        written = ~checkpoints.isnan().flatten(1).any(1)
        assert written.nonzero().flatten().tolist() == sorted(places.values())


def test_no_checkpoints_are_needed(device: str) -> None:
    spec, dtype = layer(1, 1, 32, 16, 4), torch.float32
    product = poisoned_product(spec, 70, 0, dtype, device, seed=2)
    runs, ring = runs_of([(1, 0, 70)], {}, device), poisoned_ring(spec, 4, dtype, device)
    keep_inputs(spec, product, runs, ring, torch.empty(0, 3, spec.num_channels, device=device))
    for position in (67, 68, 69):
        assert torch.equal(ring[1, position % 4], channels_of(spec, product)[position])


def test_errors_name_the_argument(device: str) -> None:
    spec, dtype = layer(1, 2, 32, 16, 4), torch.float16
    size = spec.num_channels
    slot, position = rows_of([(0, 0, 3), (2, 5, 2)], device)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    outputs = Outputs.poisoned(spec, 5, dtype, device).rows
    good: dict[str, Any] = {
        "product": zeros(5, size + 1),
        "weight": zeros(size, 1, 4),
        "row_slot": slot,
        "row_position": position,
        "ring": zeros(NUM_SLOTS, 4, size),
        "rows": outputs,
    }
    kept: dict[str, Any] = {
        "product": good["product"],
        "runs": runs_of([(0, 0, 3), (2, 5, 2)], {}, device),
        "ring": good["ring"],
        "checkpoints": zeros(2, 3, size),
    }

    def mixed(**change: Tensor) -> MixedRows:
        given = {name: getattr(outputs, name) for name in outputs.__struct_fields__}
        return MixedRows(**{**given, **change})

    of_both: list[tuple[str, dict[str, Any]]] = [
        (rf"product: \[4, {size + 1}\] torch.float16: expected \[5, ", {"product": zeros(5, size + 1)[1:]}),
        ("product: .*float32: expected .*float16", {"product": zeros(5, size, dtype=torch.float32)}),
        ("product: .*float16: expected .*float32", {"product": zeros(2, 5, size)}),
        ("product: strides", {"product": zeros(size, 5).T}),
        (f"columns of the product={size - 1}: expected {size}", {"product": zeros(5, size - 1)}),
        ("rows of the ring=3: expected 4 or more", {"ring": zeros(NUM_SLOTS, 3, size)}),
        (rf"ring: .*{size + 1}\] torch.float16: expected", {"ring": zeros(NUM_SLOTS, 4, size + 1)}),
        ("ring: strides", {"ring": zeros(NUM_SLOTS, 5, size)[:, 1:]}),
    ]
    of_mix: list[tuple[str, dict[str, Any]]] = [
        (rf"weight: \[{size}, 4\]", {"weight": zeros(size, 4)}),
        ("weight: .*float32: expected", {"weight": zeros(size, 1, 4, dtype=torch.float32)}),
        ("weight: strides", {"weight": zeros(size, 1, 8)[..., ::2]}),
        (r"row_slot: \[5\] torch.int64", {"row_slot": slot.long()}),
        (r"row_position: \[4\]", {"row_position": position[1:]}),
        ("row_position: strides", {"row_position": position.repeat_interleave(2)[::2]}),
        ("ring: .*float32|product: .*float16", {"ring": good["ring"].float()}),
        (r"mixed: \[5, \d+\] torch.float32", {"rows": mixed(mixed=outputs.mixed.float())}),
        ("mixed: strides", {"rows": mixed(mixed=zeros(5, size + 1)[:, 1:])}),
        (r"scales: \[5, 2\] torch.float16", {"rows": mixed(scales=outputs.scales.half())}),
        (r"scales: \[4, 2\]", {"rows": mixed(scales=outputs.scales[1:])}),
    ]
    mix_rows(spec, **good, is_kept=False)
    for message, change in (*of_both, *of_mix):
        with pytest.raises(ValueError, match=message):
            mix_rows(spec, **{**good, **change}, is_kept=False)

    runs = kept["runs"]
    of_keep: list[tuple[str, dict[str, Any]]] = [
        (r"runs: \[2, 3\]", {"runs": PromptRuns(runs.runs[:, 1:], runs.places)}),
        (r"runs: \[2, 4\] torch.int64", {"runs": PromptRuns(runs.runs.long(), runs.places)}),
        ("runs: strides", {"runs": PromptRuns(runs.runs.repeat(1, 2)[:, ::2], runs.places)}),
        (r"places: \[2\] torch.int32: expected \[3\]", {"runs": PromptRuns(runs.runs, runs.places[1:])}),
        (r"checkpoints: \[1, 2, \d+\]", {"checkpoints": zeros(2, 2, size)}),
        ("checkpoints: .*float32", {"checkpoints": kept["checkpoints"].float()}),
        ("checkpoints: strides", {"checkpoints": zeros(2, 3, size + 1)[..., 1:]}),
        (r"checkpoints: \[0, 2, \d+\]", {"checkpoints": zeros(0, 2, size)}),
    ]
    keep_inputs(spec, **kept)
    for message, change in (*of_both[1:], *of_keep):  # runs may have fewer rows than the product
        with pytest.raises(ValueError, match=message):
            keep_inputs(spec, **{**kept, **change})
