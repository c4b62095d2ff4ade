"""The token budget against simulated step times."""

from __future__ import annotations

import random
from statistics import quantiles

import pytest

from drift_sdk.scheduling.planning import TokenBudget

MANY = 10**6


class Machine:
    """A simulated device: a step takes decode time plus time per prefill token, with log-normal noise."""

    def __init__(self, budget: TokenBudget, *, decode_s: float = 0.008, token_s: float = 2e-5) -> None:
        self.budget = budget
        self.decode_s = decode_s
        self.token_s = token_s
        self.overhead_s = 0.001  # of a prefill part of any size
        self.noise = 0.1
        self._random = random.Random(7)

    def step(self, num_decode_rows: int = 8, num_waiting_tokens: int = MANY) -> float:
        num_tokens = min(self.budget.num_tokens(num_decode_rows, num_waiting_tokens), num_waiting_tokens)
        duration_s = self.decode_s * bool(num_decode_rows)
        duration_s += num_tokens * self.token_s + self.overhead_s * bool(num_tokens)
        duration_s *= self._random.lognormvariate(0.0, self.noise)
        self.budget.observe(num_tokens, num_decode_rows, num_decode_rows, duration_s)
        return duration_s

    def percentiles_ms(self, num_steps: int, num_waiting_tokens: int = MANY) -> tuple[float, float]:
        durations = [self.step(num_waiting_tokens=num_waiting_tokens) for _ in range(num_steps)]
        cuts = quantiles(durations, n=20)
        return cuts[9] * 1e3, cuts[18] * 1e3


def make(p50: float | None = None, p95: float | None = None, *, throughput: bool = False) -> TokenBudget:
    return TokenBudget(
        max_tokens=2048,
        block_size=16,
        target_latency_ms_p50=p50,
        target_latency_ms_p95=p95,
        prefer_high_throughput=throughput,
    )


def test_budget_without_targets_is_a_quarter_while_decoding() -> None:
    """Prompts have a pass of their own; the number of waiting tokens does not matter."""
    assert [make().num_tokens(rows, MANY) for rows in (0, 1)] == [2048, 512]
    assert [make(throughput=True).num_tokens(rows, MANY) for rows in (0, 1)] == [2048, 2048]
    assert make().num_tokens(1, 10) == 512


def test_waiting_tokens_are_spread_over_steps_by_the_decode_rows() -> None:
    """Rounded up to a size of the pass that computes them."""
    mixed = {0: ((16, (120, 504)), (64, (64, 192, 320, 448)))}
    budget = TokenBudget(max_tokens=2048, block_size=16, mixed_tokens=mixed)
    found = [budget.num_tokens(64, waiting) for waiting in (512, 513, 853, 854, 1194, 1195, MANY)]
    assert found == [192, 320, 320, 448, 448, 448, 448]
    assert [budget.num_tokens(32, waiting) for waiting in (256, 257, 426, 427)] == [192, 320, 320, 448]
    assert [budget.num_tokens(rows, waiting) for rows in (1, 16) for waiting in (120, 121)] == [120, 504] * 2
    assert [budget.num_tokens(0, 1), budget.num_tokens(65, 1)] == [2048, 512]


def test_few_waiting_tokens_are_not_spread() -> None:
    """Small steps take longer for a token."""
    mixed = {0: ((64, (64, 192, 448)),)}
    budget = TokenBudget(max_tokens=2048, block_size=16, mixed_tokens=mixed)
    assert [budget.num_tokens(64, waiting) for waiting in (0, 1, 64, 65, 192, 193)] == [64] * 3 + [192] * 3


def test_rounds_of_several_tokens_spread_prompts_over_fewer_steps() -> None:
    """Prompts wait for as many tokens of the others, not for as many steps."""
    mixed = {0: ((64, (192, 448)),), 3: ((64, (256, 512, 768)),)}
    budget = TokenBudget(max_tokens=2048, block_size=16, mixed_tokens=mixed)
    assert [budget.num_tokens(64, waiting, 3) for waiting in (682, 683)] == [256, 512]
    for _ in range(100):
        budget.observe(0, 64, 128, 0.012)
    assert [budget.num_tokens(64, waiting, 3) for waiting in (340, 345, 700)] == [256, 512, 768]
    for _ in range(100):
        budget.observe(0, 64, 640, 0.012)
    assert [budget.num_tokens(64, waiting, 3) for waiting in (256, 257, 513)] == [256, 512, 768]
    assert budget.num_tokens(64, MANY, 1) == 2048  # a pass of its own
    assert budget.num_tokens(64, 256, None) == 2048


def test_shared_pass_is_at_most_half_of_the_budget() -> None:
    mixed = {0: ((64, (64, 192, 448)),)}
    found = [
        TokenBudget(max_tokens=max_tokens, block_size=16, mixed_tokens=mixed).num_tokens(3, MANY)
        for max_tokens in (2048, 600, 100, 20, 8)
    ]
    assert found == [448, 300, 50, 16, 8]


def test_share_grows_with_the_tokens_of_a_round() -> None:
    """The share is one for each token that a decoding sequence gets, not for each step."""
    budget = make()
    for _ in range(100):
        budget.observe(0, 8, 25, 0.012)
    assert budget.num_tokens(8, MANY) == pytest.approx(512 * 25 / 8, abs=1)
    for _ in range(100):
        budget.observe(0, 8, 40, 0.012)
    assert budget.num_tokens(8, MANY) == 2048  # at most max_tokens
    for _ in range(100):
        budget.observe(0, 0, 0, 0.012)
        budget.observe(512, 8, 8, 0.02)
    assert budget.num_tokens(8, MANY) == pytest.approx(512, abs=1)


@pytest.mark.parametrize(("max_tokens", "block_size", "share"), [(40, 16, 16), (8, 16, 8), (1, 1, 1)])
def test_share_is_between_a_block_and_the_budget(max_tokens: int, block_size: int, share: int) -> None:
    assert TokenBudget(max_tokens=max_tokens, block_size=block_size).num_tokens(3, MANY) == share


@pytest.mark.parametrize("throughput", [False, True])
@pytest.mark.parametrize("knows_decode_time", [False, True])
def test_median_target_is_met(throughput: bool, knows_decode_time: bool) -> None:
    machine = Machine(make(p50=20.0, throughput=throughput))
    if knows_decode_time:
        for _ in range(5):
            machine.step(num_waiting_tokens=0)

    machine.percentiles_ms(200)
    p50, _ = machine.percentiles_ms(400)
    assert p50 == pytest.approx(20.0, rel=0.1)


def test_median_of_three_steps_is_the_second() -> None:
    """Steps take 1.2, 2 and 3 times what was predicted: one of 40 ms has to be predicted as one of 20."""
    budget = make(p50=40.0)
    budget.observe(0, 8, 8, 0.01)
    token_s = 0.0
    for ratio in (1.2, 2.0, 3.0):
        duration_s = ratio * (0.01 + 100 * token_s)
        budget.observe(100, 8, 8, duration_s)
        measured_s = (duration_s - 0.01) / 100
        token_s = token_s + 0.1 * (measured_s - token_s) if token_s else measured_s
    assert budget.num_tokens(8, MANY) == pytest.approx((0.04 / 2.0 - 0.01) / token_s, abs=1)


def test_p95_target_is_met() -> None:
    machine = Machine(make(p95=30.0))
    machine.percentiles_ms(200)
    _, p95 = machine.percentiles_ms(400)
    assert p95 == pytest.approx(30.0, rel=0.1)


@pytest.mark.parametrize(("p50", "p95"), [(20.0, 60.0), (40.0, 25.0)])
def test_stricter_of_two_targets_is_met(p50: float, p95: float) -> None:
    machine = Machine(make(p50=p50, p95=p95))
    machine.percentiles_ms(200)
    found = machine.percentiles_ms(400)
    assert max(found[0] / p50, found[1] / p95) == pytest.approx(1.0, rel=0.1)


def test_budget_without_decode_rows_is_whole() -> None:
    budget = make(p50=20.0)
    machine = Machine(budget)
    machine.percentiles_ms(100)
    assert budget.num_tokens(8, MANY) < 1000
    assert budget.num_tokens(0, MANY) == 2048


def test_budget_of_an_unreachable_target_is_the_minimum() -> None:
    budget = make(p50=5.0)
    machine = Machine(budget)
    machine.percentiles_ms(100)
    assert budget.num_tokens(8, MANY) == 16


def test_budget_of_a_loose_target_is_whole() -> None:
    budget = make(p50=1000.0, p95=1000.0)
    machine = Machine(budget)
    machine.percentiles_ms(50)
    assert budget.num_tokens(8, MANY) == 2048


@pytest.mark.parametrize("has_pauses", [False, True])
def test_budget_recovers_from_a_slow_phase(has_pauses: bool) -> None:
    budget = make(p50=20.0)
    machine = Machine(budget)
    machine.percentiles_ms(200)
    usual = budget.num_tokens(8, MANY)
    machine.decode_s, machine.token_s = 0.05, 2e-4
    for _ in range(100):
        machine.step()
        if has_pauses:
            machine.step(num_waiting_tokens=0)

    assert budget.num_tokens(8, MANY) == 16
    machine.decode_s, machine.token_s = 0.008, 2e-5
    machine.percentiles_ms(300)
    assert budget.num_tokens(8, MANY) == pytest.approx(usual, rel=0.2)
    assert machine.percentiles_ms(300)[0] == pytest.approx(20.0, rel=0.1)


def test_outdated_decode_time_does_not_limit_the_budget() -> None:
    budget = make(p50=20.0)
    machine = Machine(budget, decode_s=0.05)
    for _ in range(20):
        machine.step(num_waiting_tokens=0)

    # From here on every step has prefill tokens, so none shows the decode time alone.
    machine.decode_s = 0.008
    machine.percentiles_ms(200)
    assert machine.percentiles_ms(300)[0] == pytest.approx(20.0, rel=0.1)


def test_outlier_does_not_change_the_budget() -> None:
    budget = make(p50=20.0)
    machine = Machine(budget)
    machine.noise = 0.0
    machine.percentiles_ms(200)
    usual = budget.num_tokens(8, MANY)
    budget.observe(usual, 8, 8, 0.2)
    machine.percentiles_ms(60)
    assert budget.num_tokens(8, MANY) == pytest.approx(usual, rel=0.05)


def test_empty_step_does_not_change_the_budget() -> None:
    budget = make(p50=20.0)
    Machine(budget).percentiles_ms(50)
    before = budget.num_tokens(8, MANY)
    budget.observe(0, 0, 0, 10.0)
    assert budget.num_tokens(8, MANY) == before


def test_budget_before_the_first_prefill_is_the_share() -> None:
    budget = make(p50=20.0)
    for _ in range(5):
        budget.observe(0, 8, 8, 0.008)

    assert budget.num_tokens(8, MANY) == 512
