"""Choice of partial verification by measured costs: it is used where rounds over views are faster."""

from __future__ import annotations

from drift_sdk.draft_policy import DraftPolicy, ViewCosts, ViewGain
from drift_sdk.steps import DecodeRow, SlotOutput, StepPlan, StepResult, Verification

COSTS = ViewCosts(refresh_tokens=28, view_tokens=4416, refresh_reads=2.5, refresh_costs={1: 0.006, 4: 0.007})
WHOLE = {0: (1.0, 0.004), 3: (2.5, 0.005)}
KEY_SECONDS = 30e-9


def gain_of(num_keys: int, seconds: float) -> ViewGain:
    gain = ViewGain(COSTS)
    gain.record_whole(num_keys, seconds)
    return gain


def test_long_contexts_gain_and_short_ones_do_not() -> None:
    gain = gain_of(16_000, 16_000 * KEY_SECONDS)
    found = [gain.is_faster([length], 1, WHOLE, {}) for length in (5_000, 8_000, 32_000, 64_000, 128_000)]
    assert found == sorted(found)
    assert not found[0]
    assert found[-1]


def test_nothing_is_known_before_a_whole_round_of_long_sequences() -> None:
    gain = ViewGain(COSTS)
    assert not gain.is_faster([128_000], 1, WHOLE, {})
    gain.record_whole(2 * COSTS.view_tokens - 1, 1.0)  # too short: most of it is not the keys' time
    assert not gain.is_faster([128_000], 1, WHOLE, {})
    gain.record_whole(128_000, 128_000 * KEY_SECONDS)
    assert gain.is_faster([128_000], 1, WHOLE, {})


def test_rounds_over_views_that_turn_out_slow_end_their_use() -> None:
    gain = gain_of(64_000, 64_000 * KEY_SECONDS)
    assert gain.is_faster([64_000], 1, WHOLE, {3: 0.005})
    assert not gain.is_faster([64_000], 1, WHOLE, {3: 0.008})


def test_keys_that_cost_nothing_give_no_gain() -> None:
    assert not gain_of(64_000, -0.001).is_faster([128_000], 1, WHOLE, {})


def step(verification: Verification, duration_s: float) -> tuple[StepPlan, StepResult]:
    plan = StepPlan(
        step_id=0,
        assignments=(),
        block_updates=(),
        prefill=(),
        decode=(DecodeRow(slot=0, num_draft_tokens=3),),
        verification=verification,
    )
    output = SlotOutput(token_ids=(1, 2), num_drafted=3, num_accepted=1)
    return plan, StepResult(step_id=0, prefill=(), decode=(output,), duration_s=duration_s)


def test_rounds_over_views_do_not_count_as_whole_ones() -> None:
    costs = {(1, 0): 0.004, (1, 3): 0.005}
    policy = DraftPolicy((3,), costs, is_adaptive=True, view_costs=COSTS)
    assert not policy.wants_views([64_000])
    policy.observe(*step("whole", 0.005 + 64_000 * KEY_SECONDS), num_keys=64_000)
    assert policy.wants_views([64_000])
    before = policy._costs.seconds(1, 3)
    for _ in range(20):
        policy.observe(*step("partial", 0.0052), num_keys=64_000)
        policy.observe(*step("refresh", 0.015), num_keys=64_000)
    assert policy._costs.seconds(1, 3) == before
    assert policy._view_costs.seconds(1, 3) < before
    assert policy.wants_views([64_000])
    for _ in range(100):
        policy.observe(*step("partial", 0.009), num_keys=64_000)
    assert not policy.wants_views([64_000])


def test_views_always_draft_and_are_used_without_measurements() -> None:
    for policy in (
        DraftPolicy((1, 3), is_adaptive=False, view_costs=COSTS),
        DraftPolicy((1, 3), is_adaptive=True, view_costs=ViewCosts(refresh_tokens=28, view_tokens=4416)),
    ):
        assert policy.wants_views([5_000])
        assert all(policy.num_draft_tokens(1, over_views=True) > 0 for _ in range(50))
