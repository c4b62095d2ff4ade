from __future__ import annotations

from typing import Any

import pytest
import torch
from references.layers import rotate_and_store_reference

from drift_sdk._kernels.attention.layer_attention import LayerKV
from drift_sdk._kernels.layers import rope_store
from drift_sdk._kernels.layers.norm import NormKind
from drift_sdk._kernels.layers.rope_store import Projected, rotate_and_store
from drift_sdk.models.layers import half_tables, offset_rms_norm, rms_norm, rotary_tables, rotate
from drift_sdk.quantised.formats import E4M3
from drift_sdk.spec.rope import Rope

pytestmark = pytest.mark.kernel

EPS = 1e-6
MAX_POSITIONS = 130
# The interpreter truncates to bfloat16 instead of rounding, so it tests float16 in its place.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
# num_rows, num_heads, num_kv_heads, head_dim, block_size
SHAPES = [(1, 9, 3, 64, 16), (3, 4, 4, 80, 1), (17, 8, 2, 16, 4), (2, 16, 2, 128, 64), (3, 3, 1, 256, 16)]


class Step:
    """Reproducible arguments of a step. The blocks of all slots are shuffled over the pool."""

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        device: str,
        *,
        num_slices: int = 0,
        has_bias: bool = False,
        has_norms: bool = False,
        norm_kind: NormKind = "rounded",
        rotary_dim: int | None = None,
        kv_dtype: torch.dtype | None = None,
        has_query_scale: bool = False,
        projected: Projected = "qkv",
        has_value_norm: bool = False,
    ) -> None:
        """rotary_dim: elements of a head that are rotated; 0: no tables; None: all. kv_dtype: of the cache;
        None: dtype."""
        self.num_rows, num_heads, num_kv_heads, head_dim, block_size = shape
        generator = torch.Generator().manual_seed(sum(shape))

        def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        num_slots, max_blocks = 5, -(-MAX_POSITIONS // block_size)
        width = (num_heads + (len(projected) - 1) * num_kv_heads) * head_dim
        blocks = torch.randperm(num_slots * max_blocks, generator=generator).view(num_slots, -1)
        self.block_table = blocks.to(torch.int32).to(device)
        slots = torch.randint(num_slots, (self.num_rows,), generator=generator)
        slots[1::3] = -1
        self.row_slot = slots.to(torch.int32).to(device)
        # Every row has another position, so that no two write the same place.
        positions = torch.randperm(MAX_POSITIONS, generator=generator)[: self.num_rows]
        positions[0] = MAX_POSITIONS - 1
        positions[1::3] = 2**31 - 1
        self.row_position = positions.to(torch.int32).to(device)
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        rope = Rope(theta=10_000.0, rotary_dim=rotary_dim)
        self.cos, self.sin = (
            table.to(device) if rotary_dim else None
            for table in half_tables(rope, torch.arange(MAX_POSITIONS, dtype=torch.float32), dtype)
        )
        if num_slices:
            self.qkv = random(num_slices, self.num_rows, width, dtype=torch.float32)
        else:
            self.qkv = random(self.num_rows, width)

        self.qkv[..., 4::3, :] = torch.nan  # padding rows but the first
        self.options: dict[str, Any] = {
            "bias": random(width) if has_bias else None,
            "eps": EPS,
            "norm_kind": norm_kind,
            "projected": projected,
            "has_value_norm": has_value_norm,
        }
        if has_norms:
            self.options["query_norm"] = random(head_dim)
            self.options["key_norm"] = random(head_dim) if projected != "q" else None

        if has_query_scale:
            self.options["query_scale"] = random(MAX_POSITIONS) + 2

        cache = (num_slots * max_blocks, num_kv_heads, block_size, head_dim)
        self.outputs = (self.num_rows, num_heads, head_dim), cache, cache
        self.dtype, self.device, self.kv_dtype = dtype, device, kv_dtype or dtype
        self.scales: list[torch.Tensor] = []
        if self.kv_dtype == E4M3:
            self.scales = [
                (torch.rand(num_kv_heads, generator=generator) + 0.003).to(device) for _ in range(2)
            ]

    def poisoned(self) -> tuple[torch.Tensor, ...]:
        dtypes = self.dtype, self.kv_dtype, self.kv_dtype
        return tuple(
            torch.full(shape, torch.nan, device=self.device).to(dtype)
            for shape, dtype in zip(self.outputs, dtypes, strict=True)
        )

    def run(self, operation: Any) -> tuple[torch.Tensor, ...]:
        """Return (query_out, keys, values), all filled with NaN before."""
        outputs = query_out, keys, values = self.poisoned()
        tables = (self.row_slot, self.row_position, self.block_table, self.cos, self.sin)
        operation(self.qkv, *tables, query_out, LayerKV(keys, values, *self.scales), **self.options)
        return outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_slices", [0, 1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_output_equals_the_reference(
    shape: tuple[int, int, int, int, int], num_slices: int, has_bias: bool, dtype: torch.dtype, device: str
) -> None:
    """Bit for bit. Nothing else is written: places of no live row are NaN in both."""
    step = Step(shape, dtype, device, num_slices=num_slices, has_bias=has_bias)
    expected = step.run(rotate_and_store_reference)
    for name, found, wanted in zip(
        ("query", "keys", "values"), step.run(rotate_and_store), expected, strict=True
    ):
        assert torch.equal(found.isnan(), wanted.isnan()), name
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num()), name

    assert not expected[0][step.row_slot < 0].any()
    num_live = int((step.row_slot >= 0).sum())
    assert int((~expected[1].isnan()).any(-1).all(1).sum()) == num_live


@pytest.mark.parametrize("dtype", DTYPES[-1:])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"), [(shape, None) for shape in SHAPES] + [(SHAPES[0], 48), (SHAPES[2], 0)]
)
def test_codes_of_e4m3_equal_the_reference(
    shape: tuple[int, int, int, int, int], rotary_dim: int | None, dtype: torch.dtype, device: str
) -> None:
    """Bit for bit, and nothing else is written. Scales differ between heads, and some keys saturate."""
    step = Step(shape, dtype, device, num_slices=2, rotary_dim=rotary_dim, kv_dtype=E4M3)
    found, expected = (step.run(each) for each in (rotate_and_store, rotate_and_store_reference))
    assert torch.equal(found[0], expected[0])
    for codes, wanted in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
        assert (~wanted.float().isnan()).any(-1).all(1).sum() == (step.row_slot >= 0).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_normalised_heads_are_near_the_reference(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    """Sums of squares have another order, which may change the last bit of a normalised value."""
    step = Step(shape, dtype, device, num_slices=2, has_bias=True, has_norms=True)
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 4)
    for found, wanted in zip(step.run(rotate_and_store), step.run(rotate_and_store_reference), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=4 * tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES[-2:])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"), [(SHAPES[0], 48), (SHAPES[1], 2), (SHAPES[2], 6), (SHAPES[4], 0)]
)
@pytest.mark.parametrize("has_norms", [False, True])
def test_parts_of_heads_are_rotated_as_in_the_reference(
    shape: tuple[int, int, int, int, int], rotary_dim: int, has_norms: bool, dtype: torch.dtype, device: str
) -> None:
    """Bit for bit without norms. Without tables, nothing is rotated."""
    step = Step(shape, dtype, device, num_slices=2, has_bias=True, has_norms=has_norms, rotary_dim=rotary_dim)
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 4) if has_norms else 0.0
    for found, wanted in zip(step.run(rotate_and_store), step.run(rotate_and_store_reference), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=4 * tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_slices", [0, 2])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"), [(SHAPES[0], None), (SHAPES[1], 48), ((5, 3, 1, 512, 16), None), (SHAPES[2], 0)]
)
@pytest.mark.parametrize(
    ("projected", "has_value_norm"), [("qkv", True), ("qk", True), ("qk", False), ("q", False)]
)
def test_values_that_are_normalised_or_keys_are_near_the_reference(
    projected: Projected,
    has_value_norm: bool,
    shape: tuple[int, int, int, int, int],
    rotary_dim: int | None,
    num_slices: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Values that are not normalised are equal. Of queries alone, nothing is stored."""
    step = Step(
        shape,
        dtype,
        device,
        num_slices=num_slices,
        has_bias=True,
        has_norms=True,
        norm_kind="wide",
        rotary_dim=rotary_dim,
        projected=projected,
        has_value_norm=has_value_norm,
    )
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 4)
    found, expected = step.run(rotate_and_store), step.run(rotate_and_store_reference)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=4 * tolerance, equal_nan=True)
    num_stored = int((~found[2].isnan()).any(-1).all(1).sum())
    assert num_stored == (0 if projected == "q" else int((step.row_slot >= 0).sum()))
    if not has_value_norm:
        assert torch.equal(found[2].nan_to_num(), expected[2].nan_to_num())
    elif num_stored:
        live = found[2][~found[2].isnan()].view(-1, shape[3]).float()
        torch.testing.assert_close(live.square().mean(-1), torch.ones_like(live[:, 0]), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize(
    ("shape", "rotary_dim", "num_slices", "has_norms"),
    [
        (SHAPES[0], None, 0, False),
        (SHAPES[1], None, 2, True),
        (SHAPES[2], 6, 2, True),
        (SHAPES[0], 48, 3, False),
        (SHAPES[2], 0, 1, False),
        (SHAPES[1], 0, 2, True),
    ],
)
def test_queries_are_scaled_by_position_after_they_are_rounded(
    shape: tuple[int, int, int, int, int],
    rotary_dim: int | None,
    num_slices: int,
    has_norms: bool,
    kv_dtype: torch.dtype | None,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Bit for bit the product of the usual queries in the storage type. Keys and values are as usual."""
    step = Step(
        shape,
        dtype,
        device,
        num_slices=num_slices,
        has_bias=True,
        has_norms=has_norms,
        rotary_dim=rotary_dim,
        kv_dtype=kv_dtype,
        has_query_scale=True,
    )
    found = step.run(rotate_and_store)
    expected = step.run(rotate_and_store_reference)
    query_scale = step.options.pop("query_scale")
    usual = step.run(rotate_and_store)
    live = step.row_slot >= 0
    by_row = query_scale[step.row_position[live].to(torch.int64)]
    assert torch.equal(found[0][live], usual[0][live] * by_row[:, None, None])
    assert not torch.equal(found[0], usual[0])
    for cached, wanted in zip(found[1:], usual[1:], strict=True):
        assert torch.equal(cached.view(torch.uint8), wanted.view(torch.uint8))
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 4) if has_norms else 0.0
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=16 * tolerance)
    assert not found[0][~live].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("has_norms", "norm_kind", "rotary_dim"),
    [
        (False, "rounded", 64),
        (True, "rounded", 64),
        (True, "offset", 64),
        (False, "rounded", 48),
        (True, "rounded", 0),
    ],
)
def test_the_reference_equals_the_decoder(
    has_norms: bool, norm_kind: NormKind, rotary_dim: int, dtype: torch.dtype, device: str
) -> None:
    shape = (17, 8, 2, 64, 16)
    step = Step(shape, dtype, device, has_norms=has_norms, norm_kind=norm_kind, rotary_dim=rotary_dim)
    live = step.row_slot >= 0
    heads = step.qkv[live].view(-1, 12, 64)
    query, key, value = heads[:, :8], heads[:, 8:10], heads[:, 10:]
    if has_norms:
        norm = offset_rms_norm if norm_kind == "offset" else rms_norm
        query = norm(query, step.options["query_norm"], EPS)
        key = norm(key, step.options["key_norm"], EPS)

    positions = step.row_position[live].to(torch.int64)
    if rotary_dim:
        tables = (step.cos[positions, None], step.sin[positions, None])
        cos, sin = torch.cat((tables[0],) * 2, dim=-1), torch.cat((-tables[1], tables[1]), dim=-1)
        if device == "cpu":
            frequencies = Rope(theta=10_000.0, rotary_dim=rotary_dim).frequencies()
            decoder_cos, decoder_sin = rotary_tables(positions, frequencies, dtype)
            assert torch.equal(cos, decoder_cos) and torch.equal(sin, decoder_sin)

        query, key = rotate(query, cos, sin), rotate(key, cos, sin)

    query_out, keys, values = step.run(rotate_and_store_reference)
    blocks = step.block_table[step.row_slot[live].to(torch.int64), positions // 16].to(torch.int64)
    assert torch.equal(query_out[live], query)
    assert torch.equal(keys[blocks, :, positions % 16], key)
    assert torch.equal(values[blocks, :, positions % 16], value)


def test_bits_of_a_row_do_not_depend_on_other_rows(device: str) -> None:
    step = Step((17, 8, 2, 64, 16), torch.float32, device, num_slices=2, has_norms=True)
    together, keys, values = step.run(rotate_and_store)
    for row in (0, 5, 12):
        alone = Step((17, 8, 2, 64, 16), torch.float32, device, num_slices=2, has_norms=True)
        alone.qkv = step.qkv[:, row : row + 1]
        alone.row_slot, alone.row_position = step.row_slot[row : row + 1], step.row_position[row : row + 1]
        alone.outputs = ((1, 8, 64), *step.outputs[1:])
        query, own_keys, own_values = alone.run(rotate_and_store)
        assert torch.equal(query[0], together[row])
        is_own = ~own_keys.isnan()
        assert is_own.any() and torch.equal(own_keys[is_own], keys[is_own])
        assert torch.equal(own_values[is_own], values[is_own])


def test_bits_of_a_head_do_not_depend_on_how_many_there_are(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two GPUs has half of the heads."""
    launches = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            def launch(**arguments: Any) -> None:
                launches.append(arguments)
                kernel[grid](**arguments)

            return launch

    kernel = rope_store._rotate_and_store
    monkeypatch.setattr(rope_store, "_rotate_and_store", Recorded())
    whole = Step((5, 8, 2, 128, 16), torch.float32, device, num_slices=2, has_norms=True)
    expected = whole.run(rotate_and_store)
    heads = whole.qkv.unflatten(-1, (12, 128))
    for rank in range(2):
        part = Step((5, 4, 1, 128, 16), torch.float32, device, num_slices=2, has_norms=True)
        chosen = [*range(4 * rank, 4 * rank + 4), 8 + rank, 10 + rank]
        part.qkv = heads[..., chosen, :].flatten(-2)
        part.row_slot, part.row_position = whole.row_slot, whole.row_position
        part.block_table, part.options = whole.block_table, whole.options
        query, keys, values = part.run(rotate_and_store)
        assert torch.equal(query, expected[0][:, 4 * rank : 4 * rank + 4])
        for found, wanted in ((keys, expected[1]), (values, expected[2])):
            torch.testing.assert_close(found, wanted[:, rank : rank + 1], rtol=0, atol=0, equal_nan=True)
    assert len({launch["TILE_HEADS"] for launch in launches}) == 1


def test_rows_may_have_any_stride(device: str) -> None:
    step = Step((3, 4, 2, 64, 16), torch.float32, device, num_slices=2)
    expected = step.run(rotate_and_store)
    wide = torch.full((2, 8, 600), torch.nan, device=device)
    wide[:, :3, :512] = step.qkv
    step.qkv = wide[:, :3, :512]
    for found, wanted in zip(step.run(rotate_and_store), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_errors_name_the_argument(device: str) -> None:
    step = Step((3, 4, 2, 64, 16), torch.float32, device)
    step.options["query_norm"] = torch.ones(64, device=device)
    with pytest.raises(ValueError, match="query_norm, key_norm: one of them is None"):
        step.run(rotate_and_store)

    step = Step((3, 4, 2, 64, 16), torch.float32, device, has_norms=True, projected="q")
    step.options["key_norm"] = step.options["query_norm"]
    with pytest.raises(ValueError, match="key_norm: given without keys: expected None"):
        step.run(rotate_and_store)

    step = Step((3, 4, 2, 64, 16), torch.float32, device)
    step.options["projected"] = "qk"
    with pytest.raises(ValueError, match=r"qkv: \[3, 512\] torch.float32: expected \[3, 384\]"):
        step.run(rotate_and_store)

    step = Step((3, 4, 2, 64, 16), torch.float32, device)
    step.qkv = step.qkv[:, :-1]
    with pytest.raises(ValueError, match=r"qkv: \[3, 511\] torch.float32: expected \[3, 512\]"):
        step.run(rotate_and_store)

    step = Step((3, 4, 2, 64, 16), torch.float32, device)
    step.cos = None
    with pytest.raises(ValueError, match="cos, sin: one of them is None"):
        step.run(rotate_and_store)

    step.cos = step.sin = torch.zeros(MAX_POSITIONS, 33, device=device)
    with pytest.raises(ValueError, match=r"cos.shape\[1\]=33: expected 1 to 32"):
        step.run(rotate_and_store)

    step = Step((3, 4, 2, 64, 16), torch.float32, device, has_query_scale=True)
    step.options["query_scale"] = step.options["query_scale"][1:]
    with pytest.raises(
        ValueError, match=r"query_scale: \[129\] torch.float32: expected \[130\] torch.float32"
    ):
        step.run(rotate_and_store)

    step = Step((3, 4, 2, 64, 16), torch.float16, device, rotary_dim=0)
    step.options["query_scale"] = torch.ones(7, device=device)
    with pytest.raises(ValueError, match=r"query_scale: \[7\] torch.float32: expected \[7\] torch.float16"):
        step.run(rotate_and_store)

    step = Step((3, 4, 2, 64, 3), torch.float32, device)
    with pytest.raises(ValueError, match="block_size=3: expected a power of two"):
        step.run(rotate_and_store)
