"""Attention to latents: against float64, and bit for bit between decoding, verification and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from references.attention import pack_cache
from slow_cases import slow_rows_after
from tolerances import assert_near

from drift_sdk._kernels.attention import latent
from drift_sdk._kernels.attention.decode import AttentionScratch
from drift_sdk._kernels.attention.latent import latent_attention, latent_config, latent_prompt_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import AttentionPlan, PlannedRows, plan_attention
from drift_sdk._kernels.attention.prefill import TILE_FIELDS, prefill_tiles
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.launch.gpu_limits import HOPPER, gpu_limits, limited_gpu
from drift_sdk.quantised.formats import E4M3, quantise_e4m3

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("steady_dots")]

IS_GPU, BF16 = torch.cuda.is_available(), torch.bfloat16
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if IS_GPU else (torch.float32,)
SMALL = Partitions(narrow=32, narrow_end=64, num_doublings=2, tile=16)
SHAPES = [(5, 24, 4), (1, 12, 2), (3, 16, 8), (20, 48, 16)]
"""Heads, and elements of latents and of rotated parts."""
FORMS = [(SHAPES[0], 8), (SHAPES[1], 64), (SHAPES[0], 64), (SHAPES[1], 8), *product(SHAPES[2:], (8, 64))]
"""A shape, and the keys of a block: less than a tile has, and more."""
NUM_PROGRAMS = 6
"""Programs that an interpreted kernel has for a tile of query rows: few, because each takes its time."""
CHUNKS = [
    [(0, 0, 1)],
    [(2, 0, 34), (0, 37, 17)],
    [(1, 5, 28), (0, 63, 1), (3, 127, 18)],
    [(0, 383, 18)],
]
"""Slot, position of the first row, rows."""
MAX_KEYS = 448
NAN_CODE = 0x7F


class Case:
    """Rows of chunks over a paged cache of latents, whose unseen places are NaN."""

    def __init__(
        self,
        chunks: list[tuple[int, int, int]],
        shape: tuple[int, int, int],
        device: str,
        dtype: torch.dtype = torch.float32,
        *,
        block_size: int = 16,
        max_keys: int = MAX_KEYS,
        first_key: int = 0,
        kv_scale: float | None = None,
    ) -> None:
        """kv_scale: of a cache of e4m3; None: it has numbers of `dtype`."""
        num_heads, self.latent_dim, rotary_dim = shape
        head_dim = self.latent_dim + rotary_dim
        generator = torch.Generator().manual_seed(num_heads + block_size)
        num_slots, max_blocks = 4, -(-max_keys // block_size)
        keys = torch.full((1 + num_slots * max_blocks, 1, block_size, head_dim), torch.nan, dtype=dtype)
        table = 1 + torch.randperm(num_slots * max_blocks, generator=generator).view(num_slots, max_blocks)
        for slot, start, num_rows in chunks:
            position = torch.arange(start + num_rows)
            seen = torch.randn(len(position), head_dim, generator=generator).to(dtype)
            keys[table[slot, position // block_size], 0, position % block_size] = seen
        rows = [(slot, start + row) for slot, start, num_rows in chunks for row in range(num_rows)]
        query = torch.randn(len(rows), num_heads, head_dim, generator=generator).to(dtype)
        self.query, self.keys, self.table = query.to(device), keys.to(device), table.to(device, torch.int32)
        self.slot, self.position = torch.tensor(rows, dtype=torch.int32, device=device).T.contiguous()
        self.chunks, self.device, self.max_keys, self.first_key = chunks, device, max_keys, first_key
        self.scale = None if kv_scale is None else torch.tensor([kv_scale], device=device)
        for slot, position in (
            (slot, position) for slot in range(num_slots) for position in range(first_key)
        ):
            self.keys[self.table[slot, position // block_size].long(), 0, position % block_size] = torch.nan
        self.cache = self.keys
        if self.scale is not None:
            is_written = ~self.keys.isnan()
            codes = quantise_e4m3(self.keys.float(), self.scale).view(torch.uint8)
            codes = torch.where(is_written, codes, NAN_CODE).view(E4M3)
            self.keys = codes.to(torch.float64) * self.scale.double()
            parts = codes[..., : self.latent_dim], codes[..., self.latent_dim :]
            self.cache = torch.cat([pack_cache(part).view(torch.uint8) for part in parts], -1).view(E4M3)

    def layer(self) -> LayerAttention:
        query = self.query
        return LayerAttention(
            query=query,
            out=torch.full(
                (*query.shape[:2], self.latent_dim), torch.nan, dtype=query.dtype, device=self.device
            ),
            kv=LayerKV(self.cache, self.cache, self.scale, self.scale, latent_dim=self.latent_dim),
            block_table=self.table,
            scale=0.3,
            first_key=self.first_key,
        )

    def prompts(self, tile_rows: int = 16, partitions: Partitions = SMALL) -> torch.Tensor:
        """One tile more than is needed."""
        most = sum(-(-num_rows // tile_rows) for _, _, num_rows in self.chunks) + 1
        tiles = np.zeros((most, TILE_FIELDS), dtype=np.int32)
        prefill_tiles(self.chunks, tile_rows, tiles)
        layer = self.layer()
        latent_prompt_attention(layer, torch.from_numpy(tiles).to(self.device), tile_rows, partitions)
        return layer.out

    def decoded(self, rows_per_sequence: int = 1, partitions: Partitions = SMALL) -> torch.Tensor:
        """The same rows, each `rows_per_sequence` of them a sequence to verify."""
        layer, rows = self.layer(), PlannedRows(self.slot, self.position, rows_per_sequence)
        device = torch.device(self.device)
        plan = AttentionPlan(
            rows.num_sequences, self.max_keys, partitions, device, num_rows=rows_per_sequence
        )
        plan_attention(rows, plan)
        scratch = AttentionScratch.allocate(
            plan,
            num_kv_heads=1,
            num_rows=rows_per_sequence,
            group=layer.num_heads,
            head_dim=self.latent_dim,
        )
        for tensor in (scratch.sums, scratch.maxima, scratch.weights):
            tensor.fill_(torch.nan)
        latent_attention(layer, rows, scratch)
        self.num_sums = (~scratch.sums.isnan().any(-1)).any(-1).sum((1, 2)).tolist()
        return layer.out

    def expected(self) -> torch.Tensor:
        """In float64, one row after the other."""
        found = []
        for query, slot, position in zip(self.query, self.slot.tolist(), self.position.tolist(), strict=True):
            if slot < 0:
                found.append(
                    torch.zeros(len(query), self.latent_dim, dtype=torch.float64, device=self.device)
                )
                continue

            seen = torch.arange(self.first_key, position + 1, device=self.device)
            blocks, size = self.table[slot].long(), self.keys.shape[2]
            keys = self.keys[blocks[seen // size], 0, seen % size].double()
            shares = (0.3 * query.double() @ keys.T).softmax(-1)
            found.append(shares @ keys[:, : self.latent_dim])
        return torch.stack(found)

    def assert_near(self, found: torch.Tensor) -> None:
        num_roundings = 0 if found.dtype == torch.float32 else 1
        assert_near(found, self.expected(), inner=self.max_keys, magnitude=5.0, num_roundings=num_roundings)


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    with nullcontext() if IS_GPU else limited_gpu(replace(HOPPER, num_multiprocessors=NUM_PROGRAMS)):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "block_size"), slow_rows_after(len(FORMS) if IS_GPU else 2, FORMS), ids=str
)
def test_prompts_and_decoding_are_near_float64_and_equal(
    shape: tuple[int, int, int], block_size: int, dtype: torch.dtype, device: str
) -> None:
    for chunks in CHUNKS:
        case = Case(chunks, shape, device, dtype, block_size=block_size)
        found = case.prompts()
        case.assert_near(found)
        assert torch.equal(case.decoded(), found)


@pytest.mark.parametrize("first_key", [1, 5])
def test_keys_before_the_first_are_not_seen(first_key: int, device: str) -> None:
    """They are NaN."""
    chunks = [(2, first_key, 1), (0, 14, 20), (1, first_key, 40)]
    case = Case(chunks, (5, 24, 4), device, block_size=8, first_key=first_key)
    found = case.prompts()
    case.assert_near(found)
    assert torch.equal(case.decoded(), found)
    case.first_key = SMALL.tile
    with pytest.raises(ValueError, match="first_key"):
        case.prompts()


def test_bits_do_not_depend_on_rows_beside_a_row(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are decoded alone, verified with others, in tiles of query rows that end inside a row of the step,
    and computed in tiles of a prompt of any size."""
    case = Case([(1, 100, 18), (0, 0, 6)], (5, 24, 8), device, block_size=64)
    expected = case.decoded()
    for rows_per_sequence in (2, 3, 6):
        assert torch.equal(case.decoded(rows_per_sequence), expected), rows_per_sequence
    for tile_rows in (1, 16):
        assert torch.equal(case.prompts(tile_rows), expected), tile_rows
    monkeypatch.setattr(latent, "MAX_TILE_ROWS", 16)
    assert torch.equal(case.decoded(6), expected)
    assert torch.equal(case.prompts(64), expected)


def test_latents_of_several_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part is shorter than the others."""
    monkeypatch.setattr(latent, "MAX_PART_DIM", 16)
    case = Case([(2, 60, 9)], (5, 40, 4), device)
    found = case.prompts()
    case.assert_near(found)
    for rows_per_sequence in (1, 3):
        assert torch.equal(case.decoded(rows_per_sequence), found), rows_per_sequence


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "part_dim"), slow_rows_after(1, [((5, 24, 8), 128), ((1, 80, 4), 16)]), ids=str
)
def test_latents_in_e4m3_have_one_set_of_bits(
    shape: tuple[int, int, int],
    part_dim: int,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoded, verified, and as prompts."""
    monkeypatch.setattr(latent, "MAX_PART_DIM", part_dim)
    case = Case([(1, 130, 12), (0, 0, 6)], shape, device, dtype, block_size=8, kv_scale=0.3)
    found = case.prompts()
    case.assert_near(found)
    assert case.cache.view(torch.uint8).eq(NAN_CODE).any()
    for rows_per_sequence, num_programs in ((1, 2), (3, 2), (2, 1000)):
        with limited_gpu(replace(gpu_limits(), num_multiprocessors=num_programs)):
            assert torch.equal(case.decoded(rows_per_sequence), found), rows_per_sequence
    case.scale = torch.ones(1, device=device)
    assert not torch.equal(case.prompts(), found)


def test_odd_elements_in_e4m3_are_refused(device: str) -> None:
    case = Case([(0, 0, 3)], (3, 16, 8), device, kv_scale=1.0)
    case.latent_dim = 15
    with pytest.raises(ValueError, match="15 and 9 elements of latents and rotated parts: expected even"):
        case.prompts()


def test_a_program_adds_the_partitions_that_a_sequence_begins_with(device: str) -> None:
    """It writes one sum of them, where there are sequences enough for the programs; with the same bits."""
    case = Case([(slot, 300 + 20 * slot, 2) for slot in range(4)], (5, 24, 4), device)
    expected, num_partitions = case.prompts(), [SMALL.count(302 + 20 * slot) for slot in range(4)]
    assert min(num_partitions) > 4
    for num_programs in (1, 3, 7, 24, 25):
        with limited_gpu(replace(HOPPER, num_multiprocessors=num_programs)):
            found = case.decoded(2)
        assert torch.equal(found, expected), num_programs
        written = sums_of_programs(num_partitions, [302 + 20 * slot for slot in range(4)], num_programs)
        assert case.num_sums == (written if num_programs <= 24 else num_partitions), num_programs
        assert num_programs > 1 or case.num_sums == [1] * 4


def sums_of_programs(num_partitions: list[int], num_keys: list[int], num_programs: int) -> list[int]:
    """The sums that are written of each sequence, if a program writes one of those that it begins with."""
    starts = [
        (sequence, SMALL.start(index)) for sequence, end in enumerate(num_partitions) for index in range(end)
    ]
    tiles = [(sequence, key) for sequence, end in enumerate(num_keys) for key in range(0, end, SMALL.tile)]
    ends = [tiles[len(tiles) * share // num_programs] for share in range(num_programs)]
    shares = [max(share for share, end in enumerate(ends) if end <= start) for start in starts]
    firsts = {(sequence, share) for (sequence, key), share in zip(starts, shares, strict=True) if key == 0}
    others = [
        sequence
        for (sequence, _), share in zip(starts, shares, strict=True)
        if (sequence, share) not in firsts
    ]
    return [1 + others.count(sequence) for sequence in range(len(num_keys))]


def test_padding_rows_get_zeros_and_see_nothing(device: str) -> None:
    case = Case([(2, 40, 9)], (3, 16, 8), device)
    case.slot[[0, 4, 8]] = -1
    for rows_per_sequence in (1, 3):
        found = case.decoded(rows_per_sequence)
        assert not found[[0, 4, 8]].any()
        case.assert_near(found)


def test_wrong_layers_are_refused(device: str) -> None:
    case = Case([(0, 0, 3)], (3, 16, 8), device)
    case.latent_dim = 0
    with pytest.raises(ValueError, match="out: "):
        case.decoded()


def test_tiles_follow_from_shared_memory() -> None:
    """GLM-4.7-Flash and DeepSeek-V3 on an H200, and on GPUs with less."""
    config = latent_config(20, 576, BF16, BF16, 64)
    assert (config.tile_rows, config.num_warps, config.num_stages) == (32, 8, 2)
    assert latent_config(128, 576, BF16, BF16, 64) == config
    assert latent_config(20, 576, BF16, E4M3, 64) == replace(config, tile_rows=16)
    assert latent_config(20, 576, torch.float32, torch.float32, 64).tile_rows == 16
    few = replace(HOPPER, shared_bytes=99 * 1024)
    with limited_gpu(few), pytest.raises(ValueError, match="head_dim=576 in torch.float32"):
        latent_config(20, 576, torch.float32, torch.float32, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_scale", [None, 0.02])
@pytest.mark.parametrize("num_heads", [16, 20, 128])
def test_published_shapes_have_one_set_of_bits(num_heads: int, kv_scale: float | None, device: str) -> None:
    chunks = [(0, 0, 5), (1, 0, 300), (2, 2000, 130), (3, 4500, 25)]
    case = Case(chunks, (num_heads, 512, 64), device, BF16, block_size=64, max_keys=5248, kv_scale=kv_scale)
    partitions = case.layer().partitions
    found = case.prompts(64, partitions)
    case.assert_near(found)
    for rows_per_sequence in (1, 2, 4):
        for num_programs in (16, 16_000):  # with the first partitions in one sum, and without
            with limited_gpu(replace(gpu_limits(), num_multiprocessors=num_programs)):
                assert torch.equal(case.decoded(rows_per_sequence, partitions), found), rows_per_sequence
