"""Inputs of layers that depend on a row's token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from references.layers import gate_input_reference, make_inputs_reference

from drift_sdk._kernels.layers.layer_inputs import gate_input, make_inputs
from drift_sdk.models.layer_inputs import LayerInputWeights, embedding_factor, inputs_of
from drift_sdk.spec.model import Activation, LayerInputs, Norm

pytestmark = pytest.mark.kernel

EPS = 1e-5
# The interpreter truncates to bfloat16 instead of rounding, so it tests float16 in its place.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
# Rows, layers, numbers of a layer.
SHAPES = [(1, 3, 1), (7, 2, 6), (4, 5, 80), (3, 2, 256)]
VOCAB_SIZE = 11


def drawn(*shape: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


class Inputs:
    """Arguments of `make_inputs`. Every third row is padding, whose product may be NaN."""

    def __init__(self, shape: tuple[int, int, int], num_slices: int, dtype: torch.dtype, device: str) -> None:
        num_rows, num_layers, size = shape
        slices, kind = ((num_slices,), torch.float32) if num_slices else ((), dtype)
        self.product = drawn(*slices, num_rows, num_layers * size, dtype=kind, device=device, seed=1)
        self.product[..., 5::3, :] = torch.nan
        self.embedding = drawn(VOCAB_SIZE, num_layers * size, dtype=dtype, device=device, seed=2)
        self.norm = drawn(size, dtype=dtype, device=device, seed=3)
        row = torch.arange(num_rows, dtype=torch.int32)
        self.token = torch.where(row % 3 == 2, -1, row % VOCAB_SIZE).to(device)
        self.slot = torch.where(row % 6 == 4, -1, row).to(device)
        self.out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.options: dict[str, Any] = {"eps": EPS, "embedding_factor": 1.7, "product_factor": 0.3}

    def arguments(self, rows: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        return self.product[..., rows, :], self.token[rows], self.slot[rows], self.embedding, self.norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("num_slices", "norm_kind"), [(0, "wide"), (1, "rounded"), (3, "offset")])
def test_inputs_are_near_the_reference(
    shape: tuple[int, int, int], num_slices: int, norm_kind: str, dtype: torch.dtype, device: str
) -> None:
    """A row has the bits that it has alone, and rows of padding are zeros."""
    case = Inputs(shape, num_slices, dtype, device)
    options = case.options | {"norm_kind": norm_kind}
    make_inputs(*case.arguments(), case.out, **options)
    expected = make_inputs_reference(*case.arguments(), shape[1], **options)
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 4)
    torch.testing.assert_close(case.out, expected, rtol=tolerance, atol=4 * tolerance)
    assert not case.out[(case.token < 0) | (case.slot < 0)].any()
    last = slice(shape[0] - 1, shape[0])
    alone = torch.full_like(case.out[last], torch.nan)
    make_inputs(*case.arguments(last), alone, **options)
    assert torch.equal(alone, case.out[last])


def test_the_reference_equals_the_decoder(device: str) -> None:
    spec, hidden, (num_rows, num_layers, size) = LayerInputs(size=6, norm=Norm(EPS, "wide")), 20, (7, 2, 6)
    case = Inputs((num_rows, num_layers, size), 0, torch.float32, device)
    embedded = drawn(num_rows, hidden, dtype=torch.float32, device=device, seed=4)
    projection = drawn(num_layers * size, hidden, dtype=torch.float32, device=device, seed=5)
    case.token = case.slot = torch.arange(num_rows, dtype=torch.int32, device=device)
    case.product = embedded @ projection.T
    weights = LayerInputWeights(case.embedding, projection, case.norm)
    expected = inputs_of(case.token.long(), embedded, weights, spec)
    found = make_inputs_reference(
        *case.arguments(),
        num_layers,
        eps=EPS,
        embedding_factor=embedding_factor(spec, torch.float32),
        product_factor=hidden**-0.5,
        norm_kind="wide",
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("num_rows", "size", "num_slices"), [(1, 1, 0), (5, 70, 2), (3, 256, 1), (2, 1030, 3)]
)
def test_gated_inputs_are_near_the_reference(
    num_rows: int, size: int, num_slices: int, activation: Activation, dtype: torch.dtype, device: str
) -> None:
    """Inputs are parts of rows."""
    slices, kind = ((num_slices,), torch.float32) if num_slices else ((), dtype)
    gate = drawn(*slices, num_rows, size, dtype=kind, device=device, seed=1)
    given = drawn(num_rows, 3, size, dtype=dtype, device=device, seed=2)[:, 1]
    output = torch.full((num_rows, size), torch.nan, dtype=dtype, device=device)
    gate_input(gate, given, output, activation)
    expected = gate_input_reference(gate, given, activation)
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 4)
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=4 * tolerance)


def test_errors_name_the_argument(device: str) -> None:
    case = Inputs((4, 5, 80), 2, torch.float32, device)
    product, token, slot, embedding, norm = case.arguments()
    for arguments, message in (
        (
            (product[..., 1:], token, slot, embedding, norm),
            r"product: \[2, 4, 399\] .*: expected \[2, 4, 400\]",
        ),
        ((product, token[1:], slot, embedding, norm), r"row_token: \[3\] torch.int32: expected \[4\]"),
        ((product, token, slot.long(), embedding, norm), "row_slot: .*torch.int64: expected .*torch.int32"),
        ((product, token, slot, embedding[:, 1:], norm), r"embedding: .*: expected \[11, 400\]"),
        ((product, token, slot, embedding, norm.half()), "norm: .*float16: expected .*float32"),
    ):
        with pytest.raises(ValueError, match=message):
            make_inputs(*arguments, case.out, **case.options)
    output = torch.zeros(4, 80, device=device)
    with pytest.raises(ValueError, match=r"given: \[4, 79\] torch.float32: expected \[4, 80\]"):
        gate_input(output, output[:, 1:], output, "silu")
    with pytest.raises(ValueError, match=r"gate: \[3, 80\] torch.float32: expected \[4, 80\]"):
        gate_input(output[1:], output, output, "silu")
