from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from msgspec.structs import replace as replace_fields
from tolerances import assert_near

from drift_sdk.loading.stored_formats import dequantise_mxfp4
from drift_sdk.models.channels import (
    ExpertWeights,
    MlpWeights,
    QuantisedMatrices,
    apply_experts,
    choose_by_score,
    choose_experts,
    gated,
)
from drift_sdk.spec.model import ClampedGate, Experts, Mlp, Router

HIDDEN, INTERMEDIATE, NUM_EXPERTS = 64, 32, 6
CLAMPED = ClampedGate(alpha=1.702, limit=7.0)


def experts_spec(**changes: object) -> Experts:
    options = {
        "num_experts": NUM_EXPERTS,
        "num_active": 3,
        "intermediate_size": INTERMEDIATE,
        "router": Router(),
        "has_bias": True,
        "clamped_gate": CLAMPED,
    }
    return Experts(**options | changes)


def random_weights(spec: Experts, *, is_quantised: bool = False) -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def matrices(rows: int, columns: int) -> torch.Tensor | QuantisedMatrices:
        if not is_quantised:
            return draw(NUM_EXPERTS, rows, columns)

        shape = NUM_EXPERTS, rows, columns // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        return QuantisedMatrices(
            blocks, torch.randint(118, 123, shape, generator=generator, dtype=torch.uint8)
        )

    def bias(*shape: int) -> torch.Tensor | None:
        return draw(*shape) if spec.has_bias else None

    return ExpertWeights(
        router=draw(NUM_EXPERTS, HIDDEN),
        router_bias=bias(NUM_EXPERTS),
        gate_up=matrices(2 * INTERMEDIATE, HIDDEN),
        gate_up_bias=bias(NUM_EXPERTS, 2 * INTERMEDIATE),
        down=matrices(HIDDEN, INTERMEDIATE),
        down_bias=bias(NUM_EXPERTS, HIDDEN),
    )


def reference(x: torch.Tensor, weights: ExpertWeights, spec: Experts) -> torch.Tensor:
    """The formula, row by row and expert by expert, in float64."""

    def matrix(matrices: torch.Tensor | QuantisedMatrices, expert: int) -> torch.Tensor:
        if isinstance(matrices, QuantisedMatrices):
            matrices = dequantise_mxfp4(matrices.blocks, matrices.scales, torch.float32)
        return matrices[expert].double()

    def bias(biases: torch.Tensor | None, expert: int) -> torch.Tensor | float:
        return 0.0 if biases is None else biases[expert].double()

    rows = []
    for row in x.double():
        logits = [
            float(weights.router[e].double() @ row + bias(weights.router_bias, e)) for e in range(NUM_EXPERTS)
        ]
        chosen = sorted(range(NUM_EXPERTS), key=lambda e: (-logits[e], e))[: spec.num_active]
        among = chosen if spec.router.is_normalised else range(NUM_EXPERTS)
        norm = sum(math.exp(logits[e]) for e in among)
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert in chosen:
            projected = matrix(weights.gate_up, expert) @ row + bias(weights.gate_up_bias, expert)
            if spec.clamped_gate is None:
                gate, up = projected[:INTERMEDIATE], projected[INTERMEDIATE:]
                activated = gate * torch.sigmoid(gate) * up
            else:
                gate, up = projected[0::2].clamp(max=7.0), projected[1::2].clamp(-7.0, 7.0)
                activated = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            output = matrix(weights.down, expert) @ activated + bias(weights.down_bias, expert)
            total += math.exp(logits[expert]) / norm * output
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("changes", "is_quantised"),
    [
        ({}, False),
        ({}, True),
        ({"clamped_gate": None, "has_bias": False}, False),
        (
            {
                "clamped_gate": None,
                "has_bias": False,
                "router": Router(is_normalised=False),
                "num_active": 1,
            },
            False,
        ),
        ({"num_active": NUM_EXPERTS}, False),
    ],
    ids=str,
)
def test_output_is_near_the_formula(changes: dict[str, object], is_quantised: bool) -> None:
    spec = experts_spec(**changes)
    weights = random_weights(spec, is_quantised=is_quantised)
    x = 4 * torch.randn(23, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = reference(x, weights, spec)
    assert_near(apply_experts(x, weights, spec), expected, inner=HIDDEN, depth=3)


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_expert_has_the_output_of_an_mlp(dtype: torch.dtype, has_gate: bool) -> None:
    """The same bits without a gate. With one, a product is not rounded that is where they are apart."""
    like = Mlp(intermediate_size=INTERMEDIATE)
    spec = experts_spec(has_bias=False, clamped_gate=None, shared=like, has_shared_gate=has_gate)
    assert spec.num_joinable == 1
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "router": (NUM_EXPERTS, HIDDEN),
        "shared_gate": (1, HIDDEN),
        "gate_up": (NUM_EXPERTS + 1, 2 * INTERMEDIATE, HIDDEN),
        "down": (NUM_EXPERTS + 1, HIDDEN, INTERMEDIATE),
    }
    drawn = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    router, gate, gate_up, down = (tensor.to(dtype) for tensor in drawn.values())
    joined = ExpertWeights(
        router=router,
        router_bias=None,
        gate_up=gate_up,
        gate_up_bias=None,
        down=down,
        down_bias=None,
        shared_gate=gate if has_gate else None,
        num_joined=1,
    )
    shared = MlpWeights(gate_up[-1], None, down[-1], None)
    parts = {"gate_up": gate_up[:NUM_EXPERTS], "down": down[:NUM_EXPERTS]}
    apart = replace(joined, **parts, shared=shared, num_joined=0)
    x = torch.randn(9, HIDDEN, generator=generator).to(dtype)
    found, expected = apply_experts(x, joined, spec), apply_experts(x, apart, spec)
    if has_gate:
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
    else:
        assert torch.equal(found, expected)
    without = apply_experts(x, replace(apart, shared=None), spec)
    assert (found - without).abs().max() > 0.1 * expected.abs().max()


def test_only_an_mlp_like_an_expert_can_be_joined() -> None:
    shared = Mlp(intermediate_size=INTERMEDIATE)
    plain = experts_spec(has_bias=False, clamped_gate=None, shared=shared)
    assert plain.num_joinable == 1
    wide, other = Mlp(intermediate_size=2 * INTERMEDIATE), replace_fields(shared, activation="gelu_tanh")
    for changes in (
        {"shared": None},
        {"shared": wide},
        {"shared": other},
        {"shared": replace_fields(shared, has_bias=True)},
        {"has_bias": True},
        {"clamped_gate": CLAMPED},
    ):
        assert replace_fields(plain, **changes).num_joinable == 0


@pytest.mark.parametrize("is_normalised", [True, False])
def test_equal_logits_go_to_the_lowest_experts(is_normalised: bool) -> None:
    """More experts than a vector register holds, and ties at the border of those chosen."""
    logits = torch.zeros(3, 128)
    logits[1, [70, 5, 127, 33]] = 2.0
    logits[2, [9, 4]] = 1.0
    experts, shares = choose_experts(logits, 3, is_normalised=is_normalised)
    assert experts.tolist() == [[0, 1, 2], [5, 33, 70], [4, 9, 0]]
    assert torch.equal(shares[:2], shares[:2, :1].expand(2, 3))
    norm = shares.double().sum(dim=1)
    assert torch.allclose(norm, torch.ones(3, dtype=torch.float64)) == is_normalised


def test_weights_of_experts_that_are_not_normalised_are_shares_of_all() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), 0.0, 0.0]])
    experts, shares = choose_experts(logits, 2, is_normalised=False)
    assert experts.tolist() == [[1, 0]]
    assert torch.allclose(shares, torch.tensor([[0.5, 1 / 6]]))
    assert torch.allclose(choose_experts(logits, 2, is_normalised=True)[1], torch.tensor([[0.75, 0.25]]))


def test_the_clamped_gate_clamps_gates_from_above_and_up_on_both_sides() -> None:
    gate_up = torch.tensor([[9.0, 0.0, -9.0, 9.0, 7.0, -9.0, 1.0, -1.0]])

    def gate(value: float) -> float:
        return value / (1 + math.exp(-1.702 * value))

    expected = [gate(7.0), 8 * gate(-9.0), -6 * gate(7.0), 0.0]
    assert gated(gate_up, CLAMPED)[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_experts_equal_their_dequantised_twins(dtype: torch.dtype) -> None:
    spec = experts_spec(has_bias=False)
    weights = random_weights(spec, is_quantised=True)
    weights = replace(weights, router=weights.router.to(dtype))
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    dense = replace(
        weights,
        gate_up=dequantise_mxfp4(weights.gate_up.blocks, weights.gate_up.scales, dtype),
        down=dequantise_mxfp4(weights.down.blocks, weights.down.scales, dtype),
    )
    found = apply_experts(x, weights, spec)
    assert found.dtype == dtype
    assert torch.equal(found, apply_experts(x, dense, spec))


@pytest.mark.parametrize("kind", ["sigmoid", "wide"])
def test_experts_of_other_groups_are_never_chosen(kind: Literal["sigmoid", "wide"]) -> None:
    """Also where a correction makes all scores of the active groups negative."""
    router = Router(kind=kind, is_normalised=False, scale=3.0, num_groups=4, num_active_groups=2)
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.3, 0.2, 0.2, 0.6, 0.0]])
    correction = torch.full((8,), -1.0)
    experts, shares = choose_by_score(scores, correction, 4, router)
    # Sums of two are 0.5, 0.6, 0.4 and 0.6; the largest are 0.4, 0.3, 0.2 and 0.6.
    expected = [6, 2, 3, 7] if kind == "sigmoid" else [6, 1, 0, 7]
    assert experts.tolist() == [expected]
    assert torch.equal(shares, 3.0 * scores[:, expected])
    assert torch.equal(choose_by_score(scores, None, 4, router)[0], experts)
