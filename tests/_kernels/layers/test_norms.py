"""The residual stream: embedding it, adding to it, normalising it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from references.layers import (
    add_norm_reference,
    add_normed_reference,
    embed_norm_reference,
    rms_norm_reference,
)

from drift_sdk._kernels.layers.norm import NormKind, add_norm, add_normed, embed_norm
from drift_sdk.models.layers import offset_rms_norm, rms_norm

pytestmark = pytest.mark.kernel

EPS = 1e-5
# The interpreter truncates to bfloat16 instead of rounding, so it tests float16 in its place.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
SHAPES = [(1, 64), (3, 576), (17, 80), (2, 4096), (1, 1)]


def random(*shape: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def assert_normed(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The sum of squares has another order, which may change the last bit before the weight."""
    tolerance = torch.finfo(expected.dtype).eps * (16 if expected.dtype == torch.float32 else 2)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=16 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
@pytest.mark.parametrize("num_slices", [None, 0, 1, 2, 5])
def test_add_norm_is_near_the_reference(
    num_rows: int, size: int, num_slices: int | None, dtype: torch.dtype, device: str
) -> None:
    """num_slices: None without a delta, 0 for a delta in the storage type."""
    hidden = random(num_rows, size, dtype=dtype, device=device, seed=1)
    weight = random(size, dtype=dtype, device=device, seed=2)
    delta = bias = None
    if num_slices == 0:
        delta = random(num_rows, size, dtype=dtype, device=device, seed=3)
        bias = random(size, dtype=dtype, device=device, seed=4) if num_rows == 3 else None
    elif num_slices:
        delta = random(num_slices, num_rows, size, dtype=torch.float32, device=device, seed=3)
        bias = random(size, dtype=dtype, device=device, seed=4) if num_slices > 1 else None

    expected_hidden, expected = add_norm_reference(hidden, delta, weight, eps=EPS, bias=bias)
    normed, aux_hidden = (poisoned(num_rows, size, dtype=dtype, device=device) for _ in range(2))
    add_norm(hidden, delta, weight, normed, eps=EPS, bias=bias, aux_hidden=aux_hidden)
    assert torch.equal(hidden, expected_hidden)
    assert torch.equal(aux_hidden, expected_hidden)
    assert_normed(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_equals_the_decoder(dtype: torch.dtype, device: str) -> None:
    hidden = random(17, 576, dtype=dtype, device=device, seed=1)
    delta = random(17, 576, dtype=dtype, device=device, seed=2)
    weight = random(576, dtype=dtype, device=device, seed=3)
    found_hidden, found = add_norm_reference(hidden, delta, weight, eps=EPS)
    assert torch.equal(found_hidden, hidden + delta)
    assert torch.equal(found, rms_norm(hidden + delta, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
@pytest.mark.parametrize(
    ("has_norm", "multiplier", "norm_kind", "num_slices", "delta_eps"),
    [
        (True, 1.0, "offset", 3, None),
        (True, 0.3, "rounded", 1, None),
        (False, 0.22, "wide", 2, None),
        (True, 1.0, "offset", 2, 3.0),
        (False, 0.22, "wide", 2, 3.0),
    ],
)
def test_changed_deltas_are_near_the_reference(
    num_rows: int,
    size: int,
    has_norm: bool,
    multiplier: float,
    norm_kind: NormKind,
    num_slices: int,
    delta_eps: float | None,
    dtype: torch.dtype,
    device: str,
) -> None:
    hidden = random(num_rows, size, dtype=dtype, device=device, seed=1)
    delta = random(num_slices, num_rows, size, dtype=torch.float32, device=device, seed=3)
    weight, bias, norm = (random(size, dtype=dtype, device=device, seed=seed) for seed in (2, 4, 5))
    change = {
        "bias": bias,
        "delta_norm": norm if has_norm else None,
        "delta_eps": delta_eps,
        "delta_multiplier": multiplier,
        "norm_kind": norm_kind,
    }
    expected_hidden, expected = add_norm_reference(hidden, delta, weight, eps=EPS, **change)
    normed = poisoned(num_rows, size, dtype=dtype, device=device)
    add_norm(hidden, delta, weight, normed, eps=EPS, **change)
    # A normalised delta may be rounded to a neighbour, and its sum with the stream may be small.
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 4)
    torch.testing.assert_close(hidden, expected_hidden, rtol=tolerance, atol=4 * tolerance)
    expected = rms_norm_reference(hidden, weight, EPS, norm_kind=norm_kind)
    assert_normed(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
def test_streams_with_a_factor_equal_the_reference(
    num_rows: int, size: int, dtype: torch.dtype, device: str
) -> None:
    """Bit for bit: the sum is rounded, then its product with the factor. The copy has it too."""
    hidden = random(num_rows, size, dtype=dtype, device=device, seed=1)
    delta = random(2, num_rows, size, dtype=torch.float32, device=device, seed=3)
    weight = random(size, dtype=dtype, device=device, seed=2)
    factor = torch.tensor([0.37], dtype=dtype, device=device)
    expected_hidden, expected = add_norm_reference(hidden, delta, weight, eps=EPS, factor=factor)
    normed, aux_hidden = (poisoned(num_rows, size, dtype=dtype, device=device) for _ in range(2))
    add_norm(hidden, delta, weight, normed, eps=EPS, factor=factor, aux_hidden=aux_hidden)
    assert torch.equal(hidden, expected_hidden) and torch.equal(aux_hidden, expected_hidden)
    assert_normed(normed, expected)
    with pytest.raises(ValueError, match="factor: given without delta: expected None"):
        add_norm(hidden, None, weight, normed, eps=EPS, factor=factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
@pytest.mark.parametrize(
    ("slices", "norm_kind", "has_bias"), [((2, 3), "wide", False), ((0, 1), "offset", True)]
)
def test_outputs_that_are_normalised_and_added_are_near_the_reference(
    num_rows: int,
    size: int,
    slices: tuple[int, int],
    norm_kind: NormKind,
    has_bias: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    """A row has the bits that it has alone."""

    def drawn(number: int, seed: int) -> torch.Tensor:
        if number == 0:
            return random(num_rows, size, dtype=dtype, device=device, seed=seed)

        return random(number, num_rows, size, dtype=torch.float32, device=device, seed=seed)

    first, second = drawn(slices[0], 1), drawn(slices[1], 2)
    weight, norm, bias = (random(size, dtype=dtype, device=device, seed=seed) for seed in (3, 4, 5))
    options: dict[str, Any] = {"eps": EPS, "bias": bias if has_bias else None, "norm_kind": norm_kind}
    out = poisoned(num_rows, size, dtype=dtype, device=device)
    add_normed(first, second, weight, norm, out, **options)
    expected = add_normed_reference(first, second, weight, norm, **options)
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 4)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=8 * tolerance)
    alone = poisoned(1, size, dtype=dtype, device=device)
    last = slice(num_rows - 1, num_rows)
    add_normed(first[..., last, :], second[..., last, :], weight, norm, alone, **options)
    assert torch.equal(alone[0], out[-1])


def test_epsilon_of_the_delta_is_not_the_other(device: str) -> None:
    """Each value is exact in float32."""
    for delta_eps, added in ((None, 2.0), (12.0, 1.0)):
        hidden = torch.tensor([[0.0, 2.0]], device=device)
        delta = torch.tensor([[2.0, -2.0]], device=device)
        weight, norm = torch.ones(2, device=device), torch.full((2,), 2.0, device=device)
        normed = torch.zeros_like(hidden)
        add_norm(hidden, delta, weight, normed, eps=0.0, delta_norm=norm, delta_eps=delta_eps)
        assert hidden.tolist() == [[added, 2.0 - added]]
        assert torch.equal(normed, rms_norm_reference(hidden, weight, 0.0))


def test_multiplier_of_the_normed_rows_is_applied_once(device: str) -> None:
    """A power of two changes no other bit; both kernels apply it."""
    hidden = random(2, 80, dtype=torch.float16, device=device, seed=1)
    weight = random(80, dtype=torch.float16, device=device, seed=2)
    row = torch.arange(2, dtype=torch.int32, device=device)
    usual, added, embedded = (poisoned(2, 80, dtype=torch.float16, device=device) for _ in range(3))
    add_norm(hidden, None, weight, usual, eps=EPS)
    add_norm(hidden, None, weight, added, eps=EPS, normed_multiplier=1 / 8)
    embed_norm(row, row, hidden, weight, hidden.clone(), embedded, eps=EPS, normed_multiplier=1 / 8)
    assert torch.equal(added, usual / 8) and torch.equal(embedded, usual / 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_kind", ["wide", "offset"])
def test_other_norms_are_rounded_once(norm_kind: NormKind, dtype: torch.dtype, device: str) -> None:
    hidden = random(17, 576, dtype=dtype, device=device, seed=1)
    weight = random(576, dtype=dtype, device=device, seed=3)
    _, expected = add_norm_reference(hidden, None, weight, eps=EPS, norm_kind=norm_kind)
    if norm_kind == "offset":
        assert torch.equal(expected, offset_rms_norm(hidden, weight, EPS))
    normed = torch.zeros_like(hidden)
    add_norm(hidden, None, weight, normed, eps=EPS, norm_kind=norm_kind)
    exact = hidden.double() / (hidden.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    exact *= weight.double() + (norm_kind == "offset")
    # One rounding: half an eps, and something for the sum of squares.
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 0.51)
    for found in (normed, expected):
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=1e-6)


def test_normalised_values_are_rounded_before_the_weight(device: str) -> None:
    """All values are exact except for the one rounding that is tested."""
    hidden = torch.tensor([[3.0, 4.0]], dtype=torch.float16, device=device)
    weight = torch.tensor([1001.0, 999.0], dtype=torch.float16, device=device)
    normed = torch.zeros_like(hidden)
    add_norm(hidden, None, weight, normed, eps=0.0)
    unrounded = hidden.double() / hidden.double().square().mean().sqrt()
    assert torch.equal(normed, unrounded.to(torch.float16) * weight)
    assert not torch.equal(normed, (unrounded * weight.double()).to(torch.float16))


def test_slices_are_rounded_once_and_in_order(device: str) -> None:
    partials = torch.tensor([[[1.0]], [[2.0**-24]], [[2.0**-24]]], device=device)
    hidden, normed = torch.zeros(1, 1, device=device), torch.zeros(1, 1, device=device)
    weight = torch.ones(1, device=device)
    add_norm(hidden, partials, weight, normed, eps=EPS)
    assert hidden.item() == 1.0
    hidden.zero_()
    add_norm(hidden, partials.flip(0), weight, normed, eps=EPS)
    assert hidden.item() == 1.0 + 2.0**-23


def test_rows_may_have_any_stride_and_do_not_change_each_other(device: str) -> None:
    wide = poisoned(5, 200, dtype=torch.float32, device=device)
    hidden, aux_hidden, normed = wide[1:4, :64], wide[1:4, 64:128], wide[1:4, 130:194]
    hidden.copy_(random(3, 64, dtype=torch.float32, device=device, seed=1))
    hidden[1] = torch.nan
    partials = poisoned(2, 8, 64, dtype=torch.float32, device=device)
    partials[:, :3] = random(2, 3, 64, dtype=torch.float32, device=device, seed=2)
    weight = random(64, dtype=torch.float32, device=device, seed=3)
    expected_hidden, expected = add_norm_reference(hidden.clone(), partials[:, :3], weight, eps=EPS)
    add_norm(hidden, partials[:, :3], weight, normed, eps=EPS, aux_hidden=aux_hidden)
    for row in (0, 2):
        assert torch.equal(hidden[row], expected_hidden[row])
        assert torch.equal(aux_hidden[row], expected_hidden[row])
        assert_normed(normed[row], expected[row])

    written = torch.zeros_like(wide, dtype=torch.bool)
    for columns in (slice(0, 64), slice(64, 128), slice(130, 194)):
        written[1:4, columns] = True

    assert wide[~written].isnan().all()


def test_bits_of_a_row_do_not_depend_on_other_rows(device: str) -> None:
    hidden = random(17, 1000, dtype=torch.float32, device=device, seed=1)
    partials = random(3, 17, 1000, dtype=torch.float32, device=device, seed=2)
    weight = random(1000, dtype=torch.float32, device=device, seed=3)
    together, normed = hidden.clone(), torch.zeros_like(hidden)
    add_norm(together, partials, weight, normed, eps=EPS)
    for row in (0, 8, 16):
        alone, alone_normed = hidden[row : row + 1].clone(), torch.zeros(1, 1000, device=device)
        add_norm(alone, partials[:, row : row + 1], weight, alone_normed, eps=EPS)
        assert torch.equal(alone[0], together[row])
        assert torch.equal(alone_normed[0], normed[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
@pytest.mark.parametrize("change", [{}, {"multiplier": 7.3, "norm_kind": "offset"}], ids=["plain", "changed"])
def test_embed_norm_is_near_the_reference(
    num_rows: int, size: int, change: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    embedding = random(11, size, dtype=dtype, device=device, seed=1)
    weight = random(size, dtype=dtype, device=device, seed=2)
    row_token = torch.tensor([10, -1, 0, 3] * 5, dtype=torch.int32, device=device)[:num_rows]
    row_slot = torch.tensor([0, 1, -1, 7] * 5, dtype=torch.int32, device=device)[:num_rows]
    tables = (row_token, row_slot, embedding, weight)
    expected_hidden, expected = embed_norm_reference(*tables, eps=EPS, **change)
    hidden, normed = (poisoned(num_rows, size, dtype=dtype, device=device) for _ in range(2))
    embed_norm(*tables, hidden, normed, eps=EPS, **change)
    assert torch.equal(hidden, expected_hidden)
    assert_normed(normed, expected)
    assert torch.equal(hidden[0], embedding[10] * change.get("multiplier", 1.0))
    assert not hidden[1:3].any() and not normed[1:3].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
@pytest.mark.parametrize(("multiplier", "embedding_eps"), [(1.0, 1e-6), (0.7, 0.3)])
def test_embedded_rows_are_normalised(
    num_rows: int, size: int, multiplier: float, embedding_eps: float, dtype: torch.dtype, device: str
) -> None:
    """Rounded once; and the next norm is that of the rounded rows."""
    embedding = random(11, size, dtype=dtype, device=device, seed=1)
    embedding[7] = torch.nan
    weight = random(size, dtype=dtype, device=device, seed=2)
    row_token = torch.tensor([10, -1, 7, 3] * 5, dtype=torch.int32, device=device)[:num_rows]
    row_slot = torch.tensor([0, 1, -1, 7] * 5, dtype=torch.int32, device=device)[:num_rows]
    tables = (row_token, row_slot, embedding, weight)
    change = {"eps": EPS, "embedding_eps": embedding_eps, "multiplier": multiplier}
    hidden, normed = (poisoned(num_rows, size, dtype=dtype, device=device) for _ in range(2))
    embed_norm(*tables, hidden, normed, **change)
    assert_normed(hidden, embed_norm_reference(*tables, **change)[0])
    assert not hidden[1:3].any() and not normed[1:3].any()
    live = (row_token >= 0) & (row_slot >= 0)
    assert_normed(normed[live], rms_norm_reference(hidden[live], weight, EPS))
    embedded = (embedding[row_token[live]] * multiplier).double()
    exact = embedded / (embedded.square().mean(-1, keepdim=True) + embedding_eps).sqrt()
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 0.51)
    torch.testing.assert_close(hidden[live].double(), exact, rtol=tolerance, atol=1e-6)


# The interpreter warns of the norm of zeros.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_padding_rows_are_zeros_without_an_epsilon(device: str) -> None:
    row = torch.tensor([-1, 0], dtype=torch.int32, device=device)
    embedding, weight = torch.full((1, 8), -3.0, device=device), torch.ones(8, device=device)
    hidden, normed = (poisoned(2, 8, dtype=torch.float32, device=device) for _ in range(2))
    embed_norm(row, row, embedding, weight, hidden, normed, eps=0.0, embedding_eps=0.0)
    for found in (hidden, normed):
        torch.testing.assert_close(found, torch.tensor([[0.0], [-1.0]], device=device).expand(2, 8))


def test_errors_name_the_argument(device: str) -> None:
    hidden, weight = torch.zeros(3, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match=r"weight: \[7\] torch.float32: expected \[8\] torch.float32"):
        add_norm(hidden, None, weight[:7], hidden.clone(), eps=EPS)

    with pytest.raises(ValueError, match=r"delta: \[2, 3, 8\] torch.float16: expected .* torch.float32"):
        add_norm(hidden, torch.zeros(2, 3, 8, device=device).half(), weight, hidden.clone(), eps=EPS)

    with pytest.raises(ValueError, match="bias: given without delta"):
        add_norm(hidden, None, weight, hidden.clone(), eps=EPS, bias=weight)

    with pytest.raises(ValueError, match="delta_norm: given without delta"):
        add_norm(hidden, None, weight, hidden.clone(), eps=EPS, delta_norm=weight)

    with pytest.raises(ValueError, match="normed: strides"):
        add_norm(hidden, None, weight, torch.zeros(8, 3, device=device).T, eps=EPS)

    with pytest.raises(ValueError, match=r"row_slot: \[2\]"):
        tokens = torch.zeros(3, dtype=torch.int32, device=device)
        embed_norm(tokens, tokens[:2], torch.zeros(5, 8, device=device), weight, hidden, hidden, eps=EPS)
