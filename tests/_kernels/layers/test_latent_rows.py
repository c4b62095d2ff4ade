"""Latents that are put in the cache, and queries that are taken apart, against plain torch."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from references.attention import pack_cache
from tolerances import assert_near

from drift_sdk._kernels.attention.layer_attention import LayerKV
from drift_sdk._kernels.layers.latent_rows import split_queries, store_latents
from drift_sdk.models.layers import half_tables, rms_norm, rotary_tables, rotate
from drift_sdk.quantised.formats import E4M3, quantise_e4m3
from drift_sdk.spec.rope import Rope

pytestmark = pytest.mark.kernel

DTYPES = (torch.float32, torch.bfloat16) if torch.cuda.is_available() else (torch.float32,)
SHAPES = [(0, 12, 2), (20, 16, 8), (28, 24, 16)]
"""Numbers of latents of queries, of latents, and rotated elements."""
SLOTS, POSITIONS = [2, -1, 0, 2, 1], [5, 9, 0, 19, 33]
NUM_ROWS, BLOCK_SIZE, EPS = 5, 8, 1e-6


class Case:
    def __init__(self, shape: tuple[int, int, int], num_slices: int, dtype: torch.dtype, device: str) -> None:
        self.rank, self.latent_dim, rotary_dim = shape
        self.head_dim, self.dtype = self.latent_dim + rotary_dim, dtype
        generator = torch.Generator().manual_seed(num_slices)

        def randn(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(sizes, generator=generator).to(device, dtype)

        rope, positions = Rope(theta=500.0, rotary_dim=rotary_dim), torch.tensor(POSITIONS, device=device)
        self.randn = randn
        self.width = (self.rank or 30) + self.head_dim
        self.cos, self.sin = half_tables(rope, torch.arange(40, device=device), dtype)
        self.tables = rotary_tables(positions, rope.frequencies().to(device), dtype)
        self.slot = torch.tensor(SLOTS, dtype=torch.int32, device=device)
        self.position = positions.int()
        self.block_table = torch.randperm(15, generator=generator).view(3, 5).to(device, torch.int32)
        self.num_slices = num_slices

    def sums(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial sums, or a sum in the storage type, with rows of a wider tensor; and the sum."""
        if self.num_slices == 0:
            whole = self.randn(NUM_ROWS, width + 7)[:, :width]
            return whole, whole.float()

        parts = self.randn(self.num_slices, NUM_ROWS, width, dtype=torch.float32)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return parts, total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_slices", [0, 1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_latents_are_stored(
    shape: tuple[int, int, int], num_slices: int, has_bias: bool, dtype: torch.dtype, device: str
) -> None:
    case = Case(shape, num_slices, dtype, device)
    sums, total = case.sums(case.width)
    bias = case.randn(case.width) if has_bias else None
    total = (total if bias is None else total + bias.float()).to(dtype)
    weight, query_weight = case.randn(case.latent_dim), case.randn(case.rank) if case.rank else None
    keys = torch.full((15, 1, BLOCK_SIZE, case.head_dim), torch.nan, dtype=dtype, device=device)
    found = torch.full((NUM_ROWS, case.rank), torch.nan, dtype=dtype, device=device) if case.rank else None
    store_latents(
        sums,
        case.slot,
        case.position,
        case.block_table,
        case.cos,
        case.sin,
        LayerKV(keys, keys, latent_dim=case.latent_dim),
        weight,
        bias=bias,
        query_norm=query_weight,
        query_latent=found,
        eps=EPS,
    )
    latent, rotated = total[:, -case.head_dim :].split((case.latent_dim, shape[2]), dim=1)
    rotated = rotate(rotated[:, None], *case.tables)[:, 0]
    expected = torch.cat((rms_norm(latent, weight, EPS), rotated), dim=1)
    places = [
        (case.block_table[slot, position // BLOCK_SIZE].item(), position % BLOCK_SIZE)
        for slot, position in zip(SLOTS, POSITIONS, strict=True)
    ]
    for row, (block, place) in enumerate(places):
        if SLOTS[row] >= 0:
            stored = keys[block, 0, place]
            assert_near(stored, expected[row], inner=case.latent_dim, num_roundings=dtype != torch.float32)
            keys[block, 0, place] = torch.nan
    assert keys.isnan().all(), "padding rows are stored nowhere"
    if found is not None and query_weight is not None:
        wanted = rms_norm(total[:, : case.rank], query_weight, EPS)
        assert_near(found, wanted, inner=case.rank, num_roundings=dtype != torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_are_those_of_stored_numbers(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    """Bit for bit: the e4m3 codes of what a cache of numbers would hold."""
    case = Case(shape, 2, dtype, device)
    sums, _ = case.sums(case.width)
    weight, scale = case.randn(case.latent_dim), torch.tensor([0.03], device=device)
    size = (15, 1, BLOCK_SIZE, case.head_dim)
    keys = torch.full(size, torch.nan, dtype=dtype, device=device)
    cache = torch.full(size, 0x7F, dtype=torch.uint8, device=device).view(E4M3)
    for kv in (LayerKV(keys, keys), LayerKV(cache, cache, scale, scale)):
        kv = replace(kv, latent_dim=case.latent_dim)
        rows = case.slot, case.position, case.block_table, case.cos, case.sin
        store_latents(sums, *rows, kv, weight, eps=EPS)
    is_stored = ~keys.isnan()
    assert is_stored.sum() == 4 * case.head_dim
    codes = quantise_e4m3(keys.float(), scale).view(torch.uint8)
    assert len(codes[is_stored].unique()) > 20
    codes = torch.where(is_stored, codes, 0x7F)
    parts = codes[..., : case.latent_dim], codes[..., case.latent_dim :]
    found = [pack_cache(part).view(torch.uint8) for part in parts]
    assert torch.equal(cache.view(torch.uint8), torch.cat(found, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_slices", [0, 2])
@pytest.mark.parametrize(("num_heads", "plain_dim"), [(1, 6), (5, 16), (20, 24)])
def test_queries_are_taken_apart(
    num_heads: int, plain_dim: int, num_slices: int, dtype: torch.dtype, device: str
) -> None:
    """Bit for bit. Other columns of the product, and other elements of queries, are left alone."""
    case = Case((20, 12, 8), num_slices, dtype, device)
    sums, total = case.sums(num_heads * (plain_dim + 8) + 11)
    heads = total.to(dtype)[:, : num_heads * (plain_dim + 8)].view(NUM_ROWS, num_heads, -1)
    plain = torch.full((NUM_ROWS, num_heads, plain_dim), torch.nan, dtype=dtype, device=device)
    query = torch.full((NUM_ROWS, num_heads, case.head_dim), torch.nan, dtype=dtype, device=device)
    split_queries(sums, case.slot, case.position, case.cos, case.sin, plain, query)
    is_live = (case.slot >= 0)[:, None, None]
    assert torch.equal(plain, heads[..., :plain_dim] * is_live)
    assert torch.equal(query[..., -8:], rotate(heads[..., plain_dim:], *case.tables) * is_live)
    assert query[..., :-8].isnan().all()


def test_wrong_arguments_are_refused(device: str) -> None:
    case = Case((20, 12, 8), 1, torch.float32, device)
    sums, _ = case.sums(40)
    plain, query = case.randn(NUM_ROWS, 5, 6), case.randn(NUM_ROWS, 5, 20)
    with pytest.raises(
        ValueError, match="product: 40 columns, query: 20 elements: expected at least 70 and 8"
    ):
        split_queries(sums, case.slot, case.position, case.cos, case.sin, plain, query)
