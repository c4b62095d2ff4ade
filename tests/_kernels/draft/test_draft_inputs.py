"""The input of a draft's first layer, against the reference."""

from __future__ import annotations

import pytest
import torch
from references.draft import draft_inputs_reference

from drift_sdk._kernels.draft.draft_rows import Residual, draft_inputs
from drift_sdk._kernels.layers.norm import NormKind

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZE = 4
SLOTS = [1, 1, -1, 0, 0, 2, 1, 0]
TOKENS = [5, 6, 7, -1, 3, 0, 8, 9]
POSITIONS = [4, 5, 8, 8, 9, 12, 16, 4]


class Case:
    """Rows of three slots, of which rows 2 and 3 are dead; whatever must not be read is NaN."""

    def __init__(self, dtype: torch.dtype, device: str, size: int, num_slices: int | None, num_features: int):
        generator = torch.Generator().manual_seed(size)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device)

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.rows = (ints(SLOTS), ints(TOKENS), ints(POSITIONS))
        shape = (num_features, size) if num_slices is None else (num_slices, num_features, size)
        self.features = randn(*shape).to(dtype if num_slices is None else torch.float32)
        dead = [row for row in range(num_features) if SLOTS[row] < 0]
        self.features[..., dead, :] = torch.nan
        self.weights = randn(10, size).to(dtype), 1 + randn(size).to(dtype), 1 + randn(size).to(dtype)
        self.blocks = torch.full((12, size), torch.nan, dtype=dtype, device=device)
        self.block_table = torch.randperm(12, generator=generator).view(3, 4).int().to(device)
        for row in range(num_features, len(SLOTS)):
            self.blocks[self.block_table[SLOTS[row], (POSITIONS[row] - 1) // BLOCK_SIZE]] = randn(size).to(
                dtype
            )
        self.hidden = torch.full((8, size), torch.nan, dtype=dtype, device=device)
        self.inputs = torch.full((8, 2 * size), torch.nan, dtype=dtype, device=device)

    def run(self, *, residual: Residual, has_blocks: bool, norm_kind: NormKind = "rounded") -> None:
        """Compute the inputs, and compare hidden, inputs and block features with the reference's."""
        options = {
            "eps": 1e-5,
            "residual": residual,
            "norm_kind": norm_kind,
            "block_table": self.block_table,
            "block_size": BLOCK_SIZE,
        }
        blocks, expected_blocks = (self.blocks, self.blocks.clone()) if has_blocks else (None, None)
        arguments = (*self.rows, self.features, *self.weights)
        hidden, inputs = draft_inputs_reference(*arguments, **options, block_features=expected_blocks)
        draft_inputs(*arguments, self.hidden, self.inputs, **options, block_features=blocks)
        tolerance = torch.finfo(hidden.dtype).eps * (16 if hidden.dtype == torch.float32 else 2)
        torch.testing.assert_close(self.hidden, hidden, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(self.inputs, inputs, rtol=tolerance, atol=tolerance)
        assert self.hidden[[2, 3]].eq(0).all() and self.inputs[[2, 3]].eq(0).all()
        if has_blocks:
            assert expected_blocks is not None
            torch.testing.assert_close(
                self.blocks, expected_blocks, rtol=tolerance, atol=tolerance, equal_nan=True
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "num_slices", "residual", "norm_kind"),
    [
        (64, None, "feature", "rounded"),
        (20, 1, "normed", "rounded"),
        (20, 3, "feature", "wide"),
        (20, None, "zeros", "offset"),
    ],
)
def test_draft_inputs_equal_reference(
    size: int,
    num_slices: int | None,
    residual: Residual,
    norm_kind: NormKind,
    dtype: torch.dtype,
    device: str,
) -> None:
    case = Case(dtype, device, size, num_slices, num_features=6)
    case.run(residual=residual, norm_kind=norm_kind, has_blocks=True)
    # Positions 4 and 12 end a block of slots 1 and 2; rows 6 and 7 were read from blocks; dead rows end none.
    written = case.block_table[[1, 2, 1, 0], [0, 2, 3, 0]].long()
    others = [block for block in range(12) if block not in written.tolist()]
    assert not case.blocks[written].isnan().any() and case.blocks[others].isnan().all()


def test_draft_inputs_without_block_features(device: str) -> None:
    case = Case(torch.float32, device, 64, None, num_features=8)
    case.run(residual="feature", has_blocks=False)


def test_draft_inputs_with_hidden_in_place_of_features(device: str) -> None:
    case = Case(torch.float32, device, 64, None, num_features=8)
    case.hidden = case.features
    case.run(residual="normed", has_blocks=False)


def test_draft_inputs_name_wrong_arguments(device: str) -> None:
    case = Case(torch.float32, device, 64, None, num_features=6)
    with pytest.raises(ValueError, match="features: 6 rows: expected 8, or fewer with block_features"):
        case.run(residual="feature", has_blocks=False)

    case.inputs = case.inputs[:, :64].contiguous()
    with pytest.raises(ValueError, match=r"inputs: \[8, 64\] .*: expected \[8, 128\]"):
        case.run(residual="feature", has_blocks=True)
