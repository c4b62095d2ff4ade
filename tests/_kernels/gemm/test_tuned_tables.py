"""Products of every entry of the shipped tables have the bits of products without a table."""

from __future__ import annotations

from importlib import resources

import pytest
import torch
from msgspec.structs import replace

from drift_sdk._kernels.gemm.gemm import GemmConfig, fastest_gated_multiply, fastest_multiply
from drift_sdk._kernels.gemm.heuristic import GemmShape, has_equal_shares
from drift_sdk._kernels.gemm.slices import num_slices
from drift_sdk._kernels.gemm.tuning import TunedTable, shape_of_key, table_for
from drift_sdk._kernels.launch.gpu_limits import HOPPER

MAX_ROWS = 1024
TABLES = sorted(
    path.name.removesuffix(".json")
    for path in (resources.files("drift_sdk._kernels.gemm") / "tuned").iterdir()
    if path.name.endswith(".json")
)
WEIGHTS = sorted({key for gpu in TABLES for key in table_for(gpu).gemms})


@pytest.mark.kernel
def test_every_table_has_entries() -> None:
    assert TABLES == ["nvidia-h100-80gb-hbm3", "nvidia-h200"]
    assert all(table_for(gpu).gemms for gpu in TABLES)


@pytest.mark.kernel
@pytest.mark.parametrize("key", WEIGHTS)
def test_entries_are_usable_for_any_number_of_slices(key: str) -> None:
    """A part of a weight may have the shape of a whole one, and fewer slices."""
    num_columns, inner, is_gated = shape_of_key(key)
    for gpu in TABLES:
        for slices in (None, 1) if is_gated else (None, 1, 2):
            tuned = table_for(gpu).gemm(num_columns, inner, is_gated=is_gated, slices=slices)
            for num_rows in (1, 64, 100, 256, 512, 4096):
                config = tuned.config(num_rows)
                assert config.num_slices == tuned.num_slices
                assert config.num_partials in (1, config.num_slices)


@pytest.mark.kernel
def test_multiprocessors_share_gate_and_up_of_few_rows_equally() -> None:
    for gpu in TABLES:
        for key, entry in table_for(gpu).gemms.items():
            num_columns, inner, is_gated = shape_of_key(key)
            shape = GemmShape(num_columns=num_columns, inner=inner, is_gated=is_gated)
            for _, tiles in entry.by_rows if is_gated else ():
                assert tiles.tile_m > 16 or has_equal_shares(shape, tiles, HOPPER), f"{gpu}: {key}"


@pytest.mark.gpu
@pytest.mark.kernel
@pytest.mark.parametrize("key", WEIGHTS)
def test_tuned_products_have_the_bits_of_untuned_ones(key: str, device: str) -> None:
    """For one number of rows of each entry, and one less. What is compared with is computed by the tiles of
    one number of rows: a row's bits do not depend on the others."""
    num_columns, inner, is_gated = shape_of_key(key)
    generator = torch.Generator(device).manual_seed(inner)
    weight = torch.randn(num_columns, inner, generator=generator, device=device).mul_(inner**-0.5).bfloat16()
    rows = torch.randn(MAX_ROWS, inner, generator=generator, device=device)
    # Numbers of several magnitudes, whose sums depend most on their order.
    rows[1::2] *= torch.exp2(torch.randint(-6, 7, rows[1::2].shape, generator=generator, device=device))
    x = rows.bfloat16()

    def product(config: GemmConfig, num_rows: int) -> torch.Tensor:
        if not is_gated:
            partials = torch.full((config.num_partials, num_rows, num_columns), torch.nan, device=device)
            fastest_multiply(x[:num_rows], weight, partials, config)
            return in_order(partials)

        out = torch.full((num_rows, num_columns // 2), torch.nan, dtype=torch.bfloat16, device=device)
        gate_up = x.new_empty(num_rows, num_columns) if config.is_library else None
        fastest_gated_multiply(x[:num_rows], weight, out, config, gate_up)
        return out

    own = num_slices(num_columns, inner, is_whole=is_gated)
    for slices in {own, max(1, own // 2)}:  # of a whole weight, and of half of a larger one
        untuned = TunedTable().gemm(num_columns, inner, is_gated=is_gated, slices=slices)
        expected = product(replace(untuned.config(64), is_library=False), MAX_ROWS)
        for gpu in TABLES:
            tuned = table_for(gpu).gemm(num_columns, inner, is_gated=is_gated, slices=slices)
            counts = {min(most, MAX_ROWS) - less for most, _ in tuned.tiles.by_rows for less in (0, 1)}
            for num_rows in sorted(counts - {0}):
                config = tuned.config(num_rows)
                assert torch.equal(product(config, num_rows), expected[:num_rows]), f"{gpu}: {config}"


def in_order(partials: torch.Tensor) -> torch.Tensor:
    """The sum of partial sums [slices, rows, columns], as the next kernel adds them."""
    total = partials[0].clone()
    for partial in partials[1:]:
        total += partial
    return total
