"""The gated delta rule in CUDA C++: near float64, the same bits however rows are computed. Without a GPU,
threads are emulated, and sizes are small."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from emulated_cuda import has_host_compiler, launch_emulated
from msgspec import Struct
from slow_cases import slow_after, slow_rows_after
from torch import Tensor

from drift_sdk._kernels.launch import cuda_programs
from drift_sdk._kernels.launch.cuda_programs import CudaKernel
from drift_sdk._kernels.recurrent.gated_delta import (
    LayerStates,
    MixedRows,
    PromptRuns,
    advance_prompts,
    advance_rows,
    state_shape,
)
from drift_sdk.spec.model import BORDER, GatedDelta, Norm, num_ring_rows

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
pytestmark = (
    pytest.mark.gpu
    if IS_GPU
    else pytest.mark.skipif(not has_host_compiler(), reason="needs a GPU or a compiler of C++")
)
NUM_SLOTS = 5


def layer(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> GatedDelta:
    return GatedDelta(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=4,
        norm=Norm(eps=1e-6),
    )


LAYERS = (layer(2, 6, 128, 128), layer(1, 1, 32, 16), layer(2, 4, 64, 48), layer(4, 4, 96, 128))
if not IS_GPU:
    LAYERS = (layer(1, 2, 32, 32), layer(1, 1, 64, 16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of what is compiled for the CPU."""
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(autouse=True)
def emulation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, programs are compiled for the CPU."""
    if IS_GPU:
        return

    def launch(
        kernel: CudaKernel,
        grid: tuple[int, int],
        num_threads: int,
        shared_bytes: int,
        *arguments: Tensor | int,
    ) -> None:
        macros = {name: int(value) for name, value in kernel.macros}
        launch_emulated(folder, kernel.files, kernel.name, macros, grid, num_threads, arguments)

    monkeypatch.setattr(cuda_programs, "compile_kernel", lambda kernel, *_: kernel)
    monkeypatch.setattr(cuda_programs, "launch_kernel", launch)


class Drawn(Struct):
    """Rows of a sequence: mixed [N, num_channels], scales and gates."""

    mixed: Tensor
    scales: Tensor
    gates: Tensor

    def rows(self, spec: GatedDelta, first: int, last: int) -> MixedRows:
        return joined(spec, [(self, first, last)])


def joined(spec: GatedDelta, parts: Iterable[tuple[Drawn, int, int]], padding: int = 0) -> MixedRows:
    """Rows `first` to `last` of sequences, one after the other; then rows of NaN."""
    parts = list(parts)

    def cat(name: str) -> Tensor:
        found = torch.cat([getattr(each, name)[first:last] for each, first, last in parts])
        return torch.cat((found, torch.full_like(found[:1], torch.nan).expand(padding, -1))).contiguous()

    mixed = cat("mixed")
    out = torch.full((mixed.shape[0], spec.output_size), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    return MixedRows(mixed, cat("scales"), cat("gates"), out)


def drawn(spec: GatedDelta, num_rows: int, seed: int) -> Drawn:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    mixed = normal(num_rows, spec.num_channels).to(torch.bfloat16)
    size = spec.num_key_heads * spec.key_dim
    lengths = mixed[:, : 2 * size].float().unflatten(1, (-1, spec.key_dim)).square().sum(2)
    scales = torch.rsqrt(lengths + 1e-6)
    scales[:, : spec.num_key_heads] *= spec.key_dim**-0.5
    decays = -torch.exp(normal(num_rows, spec.num_value_heads) - 2)
    decays[::7] *= 20
    rates = normal(num_rows, spec.num_value_heads).sigmoid()
    return Drawn(mixed.to(DEVICE), scales.to(DEVICE), torch.cat((decays, rates), 1).to(DEVICE))


class Slots:
    """The states of a layer, poisoned, and the rows' places as an engine keeps them."""

    def __init__(self, spec: GatedDelta, max_rows: int = 8, num_checkpoints: int = 4) -> None:
        self.spec = spec
        device = torch.device(DEVICE)
        self.states = LayerStates.empty(spec, (NUM_SLOTS,), num_ring_rows(max_rows), device)
        for name in self.states.__struct_fields__:
            getattr(self.states, name).fill_(torch.nan)
        self.borders = torch.full((NUM_SLOTS,), -9, dtype=torch.int32, device=device)
        shape = (num_checkpoints, *state_shape(spec))
        self.checkpoints = torch.full(shape, torch.nan, device=device)

    def prompts(
        self,
        parts: Sequence[tuple[int, Drawn, int, int]],
        *,
        places: dict[tuple[int, int], int] | None = None,
        **options: int,
    ) -> Tensor:
        """Rows of (slot, sequence, first, last). places: of checkpoints, by number of part and position."""
        rows = joined(self.spec, [part[1:] for part in parts], padding=3)
        first_row, runs = 0, []
        table = torch.full((rows.mixed.shape[0] // BORDER + len(parts) + 2,), -1, dtype=torch.int32)
        for number, (slot, _, first, last) in enumerate(parts):
            runs.append((slot, first, first_row, last - first))
            for (part, position), place in (places or {}).items():
                if part == number:
                    assert first < position <= last and position % BORDER == 0
                    entry = first_row // BORDER + number + position // BORDER - (first // BORDER + 1)
                    assert table[entry] == -1
                    table[entry] = place
            first_row += last - first
        runs.append((-1, 0, 0, 0))
        runs_tensor = torch.tensor(runs, dtype=torch.int32, device=DEVICE)
        prompt_runs = PromptRuns(runs_tensor, table.to(DEVICE))
        advance_prompts(self.spec, rows, self.states, prompt_runs, self.checkpoints, **options)
        for slot, _, _, last in parts:
            self.borders[slot] = last // BORDER * BORDER
        return rows.out[:first_row]

    def decode(
        self, parts: Sequence[tuple[int, Drawn, int, int]], rows_per_slot: int, **options: int
    ) -> list[Tensor]:
        """At most `rows_per_slot` rows of each part, then padding."""
        count = (len(parts) + 1) * rows_per_slot
        sources, slots, positions = [], [], []
        for slot, sequence, first, last in parts:
            more = rows_per_slot - (last - first)
            sources += [(sequence, first, last), *[(sequence, 0, 1)] * more]
            slots += [slot] * (last - first) + [-1] * more
            positions += [*range(first, last), *[0] * more]
        rows = joined(self.spec, sources, padding=rows_per_slot)
        slots += [-1] * (count - len(slots))
        positions += [-5] * (count - len(positions))
        row_slot = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        row_position = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
        advance_rows(
            self.spec,
            rows,
            self.states,
            self.borders,
            row_slot,
            row_position,
            rows_per_slot=rows_per_slot,
            **options,
        )
        for slot, _, first, _ in parts:
            self.borders[slot] = first // BORDER * BORDER
        found = rows.out.split(rows_per_slot)
        return [out[: last - first] for out, (_, _, first, last) in zip(found, parts, strict=False)]

    def live(self, slot: int, length: int) -> list[Tensor]:
        """What the slot has of a sequence of `length` rows, from its border on."""
        border = int(self.borders[slot])
        places = torch.arange(border, length) % self.states.updates.shape[2]
        rings = (self.states.keys, self.states.key_scales, self.states.updates, self.states.decays)
        live = [ring[slot][:, places.to(DEVICE)] for ring in rings]
        return [self.states.state[slot], *live] if border else live


def reference(spec: GatedDelta, sequence: Drawn) -> Tensor:
    """Outputs [N, output_size] row by row, in float64."""
    keys_size = spec.num_key_heads * spec.key_dim
    sizes = (keys_size, keys_size, spec.output_size)
    queries, keys, values = sequence.mixed.double().split(sizes, dim=1)
    query_scales, key_scales = sequence.scales.double().chunk(2, dim=1)
    decays, rates = sequence.gates.double().chunk(2, dim=1)

    def by_head(x: Tensor, scales: Tensor) -> Tensor:
        heads = x.unflatten(1, (spec.num_key_heads, spec.key_dim)) * scales[:, :, None]
        return heads.repeat_interleave(spec.group, dim=1)

    queries, keys = by_head(queries, query_scales), by_head(keys, key_scales)
    values = values.unflatten(1, (spec.num_value_heads, spec.value_dim))
    state = torch.zeros(
        spec.num_value_heads, spec.key_dim, spec.value_dim, dtype=torch.float64, device=DEVICE
    )
    outputs = []
    for query, key, value, decay, rate in zip(queries, keys, values, decays, rates, strict=True):
        state = state * torch.exp2(decay)[:, None, None]
        update = rate[:, None] * (value - torch.einsum("hkv,hk->hv", state, key))
        state = state + key[:, :, None] * update[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, query).flatten())
    return torch.stack(outputs)


def whole(spec: GatedDelta, sequence: Drawn, length: int | None = None) -> tuple[Tensor, list[Tensor]]:
    """The outputs of a sequence computed at once, and what its slot has then."""
    slots = Slots(spec)
    length = length or len(sequence.mixed)
    out = slots.prompts([(0, sequence, 0, length)])
    return out, slots.live(0, length)


def has_warps(spec: GatedDelta, num_warps: int) -> bool:
    """Whether a CTA may have so many warps: a divisor of the warps of a head."""
    return spec.value_dim // 16 % num_warps == 0


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("spec", LAYERS, ids=lambda spec: f"{spec.key_dim}-{spec.value_dim}")
@pytest.mark.parametrize("num_rows", slow_after(4, [1, 31, 33, 300, 2, 16, 32, 64]))
def test_prompts_are_near_float64(spec: GatedDelta, num_rows: int) -> None:
    sequence = drawn(spec, num_rows, 1)
    out, _ = whole(spec, sequence)
    expected = reference(spec, sequence)
    assert out.isfinite().all()
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 3e-3  # bfloat16 outputs


@pytest.mark.parametrize(
    ("spec", "num_warps"),
    slow_rows_after(
        1, [(spec, warps) for warps in (1, 2, 4, 8) for spec in LAYERS if has_warps(spec, warps)]
    ),
    ids=str,
)
def test_prompts_have_the_same_bits_however_they_are_cut(spec: GatedDelta, num_warps: int) -> None:
    sequence, draw = drawn(spec, 260, 2), random.Random(3)
    expected, live = whole(spec, sequence)
    for number in range(6):
        slots, slot = Slots(spec), number % NUM_SLOTS
        cuts = sorted({0, 260, *draw.sample(range(1, 260), number * 3)})
        parts = [
            slots.prompts([(slot, sequence, first, last)], num_warps=num_warps)
            for first, last in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        assert torch.equal(torch.cat(parts), expected)
        assert same(slots.live(slot, 260), live)


@pytest.mark.parametrize(
    ("spec", "rows_per_slot", "num_warps"),
    slow_rows_after(
        5,
        [
            (spec, rows, warps)
            for rows, warps in ((3, None), (4, 2), (1, 1), (8, None), (1, None), (5, None))
            for spec in LAYERS
            if has_warps(spec, warps or 1)
        ],
    ),
    ids=str,
)
@pytest.mark.parametrize("start", slow_after(1, [31, 0, 1, 32, 45]))
def test_decoding_has_the_bits_of_prompts(
    spec: GatedDelta, rows_per_slot: int, num_warps: int | None, start: int
) -> None:
    """With rows that are rejected, and of as many as are verified any number accepted."""
    sequence, wrong, draw = drawn(spec, 140, 4), drawn(spec, 140, 5), random.Random(6)
    expected, _ = whole(spec, sequence)
    slots, options = Slots(spec, rows_per_slot), {} if num_warps is None else {"num_warps": num_warps}
    if start:
        slots.prompts([(2, sequence, 0, start)])
    else:
        slots.borders[2] = 0
    length, rejected = start, 0
    while length < 140:
        count = min(rows_per_slot, 140 - length, draw.randint(1, rows_per_slot))
        accepted = draw.randint(1, count)
        mixture = Drawn(
            *[
                torch.cat(
                    (getattr(sequence, name)[: length + accepted], getattr(wrong, name)[length + accepted :])
                )
                for name in sequence.__struct_fields__
            ]
        )
        (out,) = slots.decode([(2, mixture, length, length + count)], rows_per_slot, **options)
        assert torch.equal(out[:accepted], expected[length : length + accepted]), f"rows from {length} on"
        length += accepted
        rejected += count - accepted
    assert rows_per_slot == 1 or rejected > 10
    more = drawn(spec, 1, 7)
    long = Drawn(
        *[torch.cat((getattr(sequence, name), getattr(more, name))) for name in more.__struct_fields__]
    )
    expected, live = whole(spec, long)
    (out,) = slots.decode([(2, long, 140, 141)], rows_per_slot, **options)
    assert torch.equal(out, expected[140:])
    assert same(slots.live(2, 141), live)


def test_rows_have_the_same_bits_alone_and_in_a_crowd() -> None:
    spec = LAYERS[0]
    sequences = [drawn(spec, 100, seed) for seed in range(NUM_SLOTS)]
    starts = [5, 32, 63, 64, 90]
    expected = [whole(spec, sequence)[0] for sequence in sequences]
    slots = Slots(spec)
    prompts = [(slot, sequences[slot], 0, starts[slot]) for slot in range(NUM_SLOTS)]
    out = slots.prompts(prompts)
    assert torch.equal(out, torch.cat([expected[slot][: starts[slot]] for slot in range(NUM_SLOTS)]))
    for step in range(0, 10, 2):
        parts = [
            (slot, sequences[slot], starts[slot] + step, starts[slot] + step + 2) for slot in (4, 0, 2, 1, 3)
        ]
        for (slot, _, first, last), rows in zip(parts, slots.decode(parts, 4), strict=True):
            assert torch.equal(rows, expected[slot][first:last])


def test_sequences_go_on_from_checkpoints_with_the_same_bits() -> None:
    spec = LAYERS[0]
    sequence, other = drawn(spec, 200, 8), drawn(spec, 70, 9)
    expected, live = whole(spec, sequence)
    slots = Slots(spec)
    slots.prompts([(1, sequence, 0, 7)])
    places = {(0, 32): 2, (1, 64): 0, (1, 192): 3}
    slots.prompts([(0, other, 0, 70), (1, sequence, 7, 200)], places=places)
    assert slots.checkpoints[1].isnan().all(), "written without a place"
    for position, place in ((64, 0), (192, 3)):
        slots.states.state[4] = slots.checkpoints[place]
        slots.borders[4] = position
        out = slots.prompts([(4, sequence, position, 200)])
        assert torch.equal(out, expected[position:])
        assert same(slots.live(4, 200), live)
    slots.states.state[4] = slots.checkpoints[2]
    slots.borders[4] = 32
    (out,) = slots.decode([(4, other, 32, 36)], 4)
    assert torch.equal(out, whole(spec, other)[0][32:36])
