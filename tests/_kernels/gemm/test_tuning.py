"""Tuned tables do not change bits: slices follow from shapes, whatever a table says."""

from __future__ import annotations

import json
from importlib import resources

import msgspec
import pytest
import torch
from order_probe import expected_sum, probe_row

from drift_sdk._kernels.gemm.gemm import GemmConfig, GemmTiles, multiply
from drift_sdk._kernels.gemm.heuristic import (
    ROW_COUNTS,
    GemmShape,
    default_tiles,
    fits,
    has_equal_shares,
    shared_bytes,
)
from drift_sdk._kernels.gemm.slices import num_slices, slice_size
from drift_sdk._kernels.gemm.tuner import FULL, candidates, tiles_of
from drift_sdk._kernels.gemm.tuning import TunedTable, TunedTiles, WatchedTable, shape_of_key, table_for
from drift_sdk._kernels.launch.gpu_limits import HOPPER, GpuLimits, limited_gpu
from drift_sdk.families import read_spec
from drift_sdk.models.weights import meta_weights
from drift_sdk.startup.graph_startup import weights_to_tune
from perf.harness.published import PUBLISHED

TUNED = table_for("nvidia-h200")
UNTUNED = TunedTable()
SHAPES = [
    (6144, 4096, False),
    (4096, 14_336, False),
    (28_672, 4096, True),
    (128_256, 4096, False),
    (576, 576, False),
    (576, 1536, False),
    (3584, 18_944, False),
    (1000, 333, False),
    (48, 32, True),
]
"""Columns and inner dimension of weights, and whether they are gated. Some have entries in the table."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tuned_and_untuned_weights_have_the_same_slices(shape: tuple[int, int, bool]) -> None:
    num_columns, inner, is_gated = shape
    expected = num_slices(num_columns, inner, is_whole=is_gated)
    for table in (TUNED, UNTUNED):
        gemm = table.gemm(num_columns, inner, is_gated=is_gated)
        assert {gemm.config(rows).num_slices for rows in (1, 7, 64, 65, 384, 8192)} == {expected}
        assert table.gemm(num_columns, inner, is_whole=True).config(1).num_partials == 1


def gemm_shape(num_columns: int, inner: int, is_gated: bool, **fields: int) -> GemmShape:
    slices = num_slices(num_columns, inner, is_whole=is_gated)
    return GemmShape(num_columns=num_columns, inner=inner, num_slices=slices, is_gated=is_gated, **fields)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_candidates_keep_the_slices_and_are_allowed_in_tables(shape: tuple[int, int, bool]) -> None:
    """And what was measured is what the table gives back."""
    num_columns, inner, is_gated = shape
    for rows in FULL.row_counts:
        tried = list(candidates(gemm_shape(*shape), rows, HOPPER))
        assert len(set(tried)) == len(tried) > 4
        near = list(candidates(gemm_shape(*shape), rows, HOPPER, all_candidates=False))
        assert near[0] == tried[0] and set(near) <= set(tried)
        for config in tried:
            key = f"{num_columns}x{inner}{' gated' if is_gated else ''}"
            table = TunedTable(gemms={key: TunedTiles(((rows, tiles_of(config)),))})
            assert table.gemm(num_columns, inner, is_gated=is_gated).config(rows) == config


SMALL_GPU = GpuLimits(
    capability=(8, 6),
    num_multiprocessors=28,
    shared_bytes=99 * 1024,
    multiprocessor_shared_bytes=100 * 1024,
    l2_bytes=3 * 2**20,
)


@pytest.mark.parametrize("limits", [HOPPER, SMALL_GPU], ids=["hopper", "small"])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heuristic_tiles_fit_the_gpu_for_any_shape(
    shape: tuple[int, int, bool], element_bytes: int, limits: GpuLimits
) -> None:
    weight = gemm_shape(*shape, element_bytes=element_bytes)
    for rows in (1, 7, *ROW_COUNTS):
        tiles = default_tiles(weight, rows, limits)
        assert shared_bytes(weight, tiles) < limits.shared_bytes
        TunedTiles(((rows, tiles),))  # allowed in a table
        if tiles.is_library:
            GemmConfig(num_slices=weight.num_slices, **msgspec.structs.asdict(tiles))


@pytest.mark.parametrize("intermediate", [8960, 9728, 11008, 13824, 14336, 17408, 18944, 25600])
@pytest.mark.parametrize("inner", [2560, 3584, 5120])
def test_multiprocessors_share_gate_and_up_of_few_rows_equally(inner: int, intermediate: int) -> None:
    """CTAs that find a multiprocessor free take no more of it than their share."""
    shape = GemmShape(num_columns=2 * intermediate, inner=inner, is_gated=True)
    for num_rows in (1, 16):
        assert has_equal_shares(shape, default_tiles(shape, num_rows, HOPPER), HOPPER)


@pytest.mark.parametrize(
    ("num_columns", "tile_n", "num_stages", "is_equal"),
    [
        (34_816, 64, 4, True),  # 272 CTAs, room for three of them on each of 132 multiprocessors
        (34_816, 64, 3, False),  # room for four
        (34_816, 128, 3, True),  # 136 CTAs, room for two
        (8192, 64, 3, True),  # fewer CTAs than multiprocessors
        (65_536, 64, 3, True),  # 512 CTAs: some follow others
    ],
)
def test_room_for_an_equal_share(num_columns: int, tile_n: int, num_stages: int, is_equal: bool) -> None:
    shape = GemmShape(num_columns=num_columns, inner=5120, is_gated=True)
    assert has_equal_shares(shape, GemmTiles(True, tile_n, 16, 64, num_stages, 4), HOPPER) == is_equal


def test_heuristic_chooses_what_measurements_chose() -> None:
    """Up to 64 rows on the GPU of the shipped table: the same tiles for 4 of 5 entries, and one stage more or
    less at most for 9 of 10. The others differ by a few percent of time. Beyond, the library for large
    weights."""
    same_tiles, near_stages = [], []
    for key, entry in TUNED.gemms.items():
        shape = gemm_shape(*shape_of_key(key))
        for rows, measured in entry.by_rows:
            tiles = default_tiles(shape, rows, HOPPER)
            if rows <= 64:
                names = ("tile_n", "tile_m", "tile_k", "num_warps")
                same_tiles.append(all(getattr(tiles, name) == getattr(measured, name) for name in names))
                near_stages.append(abs(tiles.num_stages - measured.num_stages) <= 1)
    assert sum(same_tiles) >= 0.8 * len(same_tiles)
    assert sum(near_stages) >= 0.9 * len(near_stages)


DENSE = [
    "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-4b", "qwen3-8b",
    "qwen3-14b", "smollm2-shapes",
]  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_shipped_table_has_the_products_of_models_and_their_heads(name: str) -> None:
    """EAGLE-3 heads of models whose hidden size is 2048 or more."""
    spec = read_spec(PUBLISHED[name])
    wanted = {weight.key for weight in weights_to_tune(meta_weights(spec, torch.bfloat16), None)}
    hidden = spec.hidden_size
    if hidden >= 2048:
        attention = spec.attention
        qkv = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
        wanted |= {f"{qkv}x{2 * hidden}", f"{hidden}x{3 * hidden}", f"32000x{hidden}"}
    assert wanted <= set(TUNED.gemms)


@pytest.mark.parametrize(
    "key, tiles",
    [
        ("4096x14336", (64, 128, 128, 4)),
        ("6144x8192", (128, 64, 64, 4)),
        ("2560x9728", (128, 64, 64, 4)),
        ("5120x17408", (128, 64, 64, 4)),
        ("28672x4096 gated", (128, 128, 64, 4)),
        ("128256x4096", (128, 128, 64, 3)),
    ],
)
def test_heuristic_for_128_rows(key: str, tiles: tuple[int, ...]) -> None:
    """Columns, rows, inner indices and stages that were measured as the fastest ones on an H200."""
    found = default_tiles(gemm_shape(*shape_of_key(key)), 128, HOPPER)
    assert (found.tile_n, found.tile_m, found.tile_k, found.num_stages) == tiles


@pytest.mark.parametrize(
    "changes",
    [
        {"num_warps": 2},
        {"num_warps": 1},
        {"num_warps": 16},
        {"tile_n": 32},
        {"tile_n": 512},
        {"tile_m": 8},
        {"tile_k": 16},
        {"num_stages": 0},
        {"num_stages": 99},
    ],
    ids=str,
)
def test_tables_refuse_tiles_whose_instruction_could_differ(changes: dict[str, int]) -> None:
    """Two warps or 32 columns would make Triton choose mma.sync on Hopper, whose sums have other bits."""
    entry = json.loads(msgspec.json.encode(TunedTiles(((16, GemmTiles()),))))
    assert msgspec.convert(entry, TunedTiles).tiles(1) == GemmTiles()
    entry["by_rows"][0][1] |= changes
    with pytest.raises(msgspec.ValidationError, match=next(iter(changes))):
        msgspec.convert(entry, TunedTiles)


@pytest.mark.parametrize("counts", [(), (0,), (-1, 4), (4, 4), (16, 4), range(1, 66)], ids=str)
def test_tables_refuse_rows_out_of_order(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="by_rows"):
        TunedTiles(tuple((count, GemmTiles()) for count in counts))


def test_entry_that_does_not_fit_the_gpu_is_not_used() -> None:
    """Measured elsewhere, or for a storage type of fewer bytes: the weight counts as not tuned."""
    large = TunedTiles(((2**31, GemmTiles(True, 128, 128, 64, 4, 8)),))
    gemms = {"4096x4096": large}
    table = WatchedTable(gemms=gemms)
    assert table.gemm(4096, 4096).tiles is large and table.untuned == set()
    assert table.used == {"4096x4096"}
    for watched, limits in (
        (WatchedTable(gemms=gemms), SMALL_GPU),
        (WatchedTable(gemms=gemms, element_bytes=4), HOPPER),
    ):
        with limited_gpu(limits):
            found = watched.gemm(4096, 4096)
        shape = gemm_shape(4096, 4096, False, element_bytes=watched.element_bytes)
        assert found.num_slices == 2 and fits(shape, found.config(128), limits)
        assert watched.untuned == watched.used == {"4096x4096"}


def test_tables_that_choose_slices_are_rejected() -> None:
    """Such a table was written when slices were still tuned."""
    file = resources.files("drift_sdk._kernels.gemm") / "tuned" / "nvidia-h200.json"
    table = json.loads(file.read_bytes())
    assert msgspec.convert(table, TunedTable) == TUNED
    table["gemms"]["6144x4096"]["by_rows"][0][1]["num_slices"] = 2
    with pytest.raises(msgspec.ValidationError, match="num_slices"):
        msgspec.convert(table, TunedTable)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(576, 1536), (576, 576), (4096, 512)], ids=str)
def test_products_add_the_slices_of_the_rule_in_order(shape: tuple[int, int], device: str) -> None:
    """Tuned and untuned, for every number of rows of the table."""
    num_columns, inner = shape
    number = num_slices(num_columns, inner)
    size = slice_size(inner, number)
    x = probe_row(inner, range(size, inner, size)).to(device)[None]
    weight = torch.ones(64, inner, device=device)
    rows = (1, 32, 384)
    tables = [WatchedTable(gemms=table.gemms, element_bytes=4) for table in (TUNED, UNTUNED)]
    for config in {table.gemm(*shape).config(num) for table in tables for num in rows}:
        out = torch.full((config.num_partials, 1, 64), torch.nan, device=device)
        multiply(x, weight, out, config)
        total = out[0]
        for part in out[1:]:
            total = total + part
        assert torch.equal(total, torch.full_like(total, expected_sum(number))), config


@pytest.mark.kernel
@pytest.mark.parametrize("num_slices", [1, 2, 8])
def test_other_slices_give_another_sum(num_slices: int, device: str) -> None:
    """So the test above detects them."""
    x = probe_row(1536, (384, 768, 1152)).to(device)[None]
    out = torch.full((1, 1, 64), torch.nan, device=device)
    config = GemmConfig(False, 64, 16, 64, 3, 4, num_slices=num_slices)
    multiply(x, torch.ones(64, 1536, device=device), out, config)
    assert (out != expected_sum(4)).all()
