"""The policy against simulated devices and drafts: what it costs, and what it gains."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from drift_sdk.draft_policy.policy import DraftPolicy
from drift_sdk.draft_policy.round_costs import RoundCosts
from drift_sdk.steps import DecodeRow, PrefillChunk, SlotOutput, StepPlan, StepResult

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Milliseconds of rounds as an 8B model has them, those without drafts and those with three; 1, 8 and 64
# measured on one GPU, the others in between or beyond.
PLAIN_MS = (4.15, 4.2, 4.3, 4.47, 4.7, 5.1, 5.92, 8.0, 12.5)
THREE_MS = (4.88, 4.95, 5.05, 5.27, 6.3, 8.4, 12.8, 23.0, 44.0)
SHARE_OF_THREE = {0: 0.0, 1: 0.4, 3: 1.0, 5: 1.75}
CHOICES = [(1, 3), (1, 3, 5)]
FLIGHT = 2  # rounds are chosen before the result of the one before is known

Rates = Sequence[float]


def round_seconds(bucket: int, num_drafts: int) -> float:
    index = BUCKETS.index(bucket)
    return (PLAIN_MS[index] + SHARE_OF_THREE[num_drafts] * (THREE_MS[index] - PLAIN_MS[index])) / 1e3


def round_costs(choices: Sequence[int]) -> dict[tuple[int, int], float]:
    return {(bucket, k): round_seconds(bucket, k) for bucket in BUCKETS for k in (0, *choices)}


def even_rates(acceptance_length: float) -> Rates:
    """Of drafts each as likely to be right as the one before, so that rounds of three have that length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        is_short = 1 + rate + rate**2 + rate**3 < acceptance_length
        low, high = (rate, high) if is_short else (low, rate)

    return [low] * 5


def falling_rates(acceptance_length: float) -> Rates:
    """Of drafts right up to a place, and wrong behind it."""
    return [min(max(acceptance_length - 1 - index, 0.0), 1.0) for index in range(5)]


def tokens_of(rates: Rates, num_drafts: int) -> float:
    total = reached = 1.0
    for rate in rates[:num_drafts]:
        reached *= rate
        total += reached

    return total


class Outcome(Struct):
    """Seconds that rounds took, and that the tokens of each would have taken without drafts and at the best
    number of them: known only in a simulation. Of the rounds after `num_learning`, how often each number was
    chosen."""

    taken: float = 0.0
    plain: float = 0.0
    late_taken: float = 0.0
    late_best: float = 0.0
    chosen: Counter[int] = Counter()

    @property
    def against_plain(self) -> float:
        return self.plain / self.taken

    @property
    def against_best(self) -> float:
        return self.late_best / self.late_taken


def play(
    policy: DraftPolicy,
    choices: Sequence[int],
    num_rounds: int,
    num_slots: Callable[[int], int],
    rates: Callable[[int], Rates],
    *,
    attention: Callable[[int, int], float] = lambda number, slots: 20e-6 * slots,
    num_learning: int = 200,
    noise: Callable[[random.Random], float] = lambda rng: rng.gauss(1.0, 0.02),
) -> Outcome:
    """Rounds whose costs the policy knows but for `attention(round, slots)` seconds and 3% of it a draft."""
    rng, in_flight = random.Random(7), deque()
    outcome = Outcome(chosen=Counter())
    for number in range(num_rounds):
        slots, now = num_slots(number), rates(number)
        bucket = BUCKETS[bisect_left(BUCKETS, slots)]
        extra = attention(number, slots)
        true = {k: round_seconds(bucket, k) + extra * (1 + 0.03 * k) for k in (0, *choices)}
        k = policy.num_draft_tokens(slots)
        accepted = [(k, accepted_drafts(rng, now[:k])) for _ in range(slots)]
        in_flight.append((slots, k, true[k] * noise(rng), accepted))
        if len(in_flight) > FLIGHT:
            policy.record(*in_flight.popleft())

        emitted = tokens_of(now, k)
        outcome.taken += true[k]
        outcome.plain += emitted * true[0]
        if number >= num_learning:
            outcome.late_taken += true[k]
            outcome.late_best += emitted * min(true[k] / tokens_of(now, k) for k in true)
            outcome.chosen[k] += 1

    return outcome


def accepted_drafts(rng: random.Random, rates: Rates) -> int:
    return next((index for index, rate in enumerate(rates) if rng.random() >= rate), len(rates))


def adaptive(choices: Sequence[int], *, is_measured: bool = True) -> DraftPolicy:
    costs = round_costs(choices) if is_measured else {}
    return DraftPolicy(choices, is_adaptive=True, round_costs=costs)


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("profile", [even_rates, falling_rates])
@pytest.mark.parametrize("length", [1.0, 1.5, 2.5, 3.2])
def test_never_much_slower_than_plain_and_soon_nearly_the_best(
    choices: Sequence[int], profile: Callable[[float], Rates], length: float
) -> None:
    for slots in (1, 3, *BUCKETS[2:]):
        policy, rates = adaptive(choices), profile(length)
        found = play(policy, choices, 600, lambda _, slots=slots: slots, lambda _, rates=rates: rates)
        assert found.against_plain >= 0.98, (slots, found)
        assert found.against_best >= 0.97, (slots, found)
        assert set(found.chosen) >= {0, choices[0]}, (slots, found)  # never permanently off, or on


@pytest.mark.parametrize("length", [1.5, 2.5, 3.2])
def test_nothing_has_to_be_tried_when_costs_are_known(length: float) -> None:
    for slots in BUCKETS:
        rates = even_rates(length)
        found = play(adaptive((1, 3)), (1, 3), 30, lambda _, slots=slots: slots, lambda _, rates=rates: rates)
        assert found.against_plain >= 0.97, (slots, found)


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("length", [1.0, 1.5, 2.5, 3.2])
def test_without_measured_costs_it_finds_them_out(choices: Sequence[int], length: float) -> None:
    for slots in BUCKETS:
        policy, rates = adaptive(choices, is_measured=False), even_rates(length)
        found = play(policy, choices, 600, lambda _, slots=slots: slots, lambda _, rates=rates: rates)
        assert found.against_plain >= 0.96, (slots, found)
        assert found.against_best >= 0.97, (slots, found)


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("period", [100, 400, 2000])
def test_drafts_that_turn_good_and_bad(choices: Sequence[int], period: int) -> None:
    good, bad = even_rates(3.2), even_rates(1.1)
    for slots in (1, 8, 16, 64, 256):
        found = play(
            adaptive(choices),
            choices,
            2400,
            lambda _, slots=slots: slots,
            lambda number: good if number // period % 2 else bad,
        )
        assert found.against_plain >= 0.99, (slots, found)
        assert found.against_best >= 0.88, (slots, found)


@pytest.mark.parametrize("slots", [1, 16, 64])
def test_from_off_it_comes_back(slots: int) -> None:
    # Of what pays at all: at 64 sequences only a good draft does.
    policy, good = adaptive((1, 3)), even_rates(3.8)
    off = play(policy, (1, 3), 600, lambda _: slots, lambda _: [0.0] * 5)
    assert off.chosen[0] > 0.9 * off.chosen.total()
    on = play(policy, (1, 3), 1200, lambda _: slots, lambda _: good, num_learning=800)
    assert on.chosen[3] > 0.9 * on.chosen.total()


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("length", [1.1, 1.5, 2.5, 3.2])
def test_batches_of_any_size_in_turn(choices: Sequence[int], length: float) -> None:
    rng = random.Random(5)
    sizes: list[int] = []
    while len(sizes) < 1500:
        sizes += [rng.randint(1, 256) if rng.random() < 0.5 else rng.randint(1, 9)] * rng.choice((1, 5, 50))
    rates = even_rates(length)
    found = play(adaptive(choices), choices, 1500, sizes.__getitem__, lambda _: rates)
    assert found.against_plain >= 0.985
    assert found.against_best >= 0.97


@pytest.mark.parametrize("length", [1.5, 2.5, 3.2])
def test_contexts_that_grow_and_end(length: float) -> None:
    """Attention takes up to three times as long as all the rest of a round, and suddenly nothing again."""
    rates = even_rates(length)
    for slots in (1, 8, 64, 256):
        plain_s = round_seconds(slots, 0)
        found = play(
            adaptive((1, 3)),
            (1, 3),
            2000,
            lambda _, slots=slots: slots,
            lambda _: rates,
            attention=lambda number, _, plain_s=plain_s: 3 * plain_s * (number % 500) / 500,
        )
        assert found.against_plain >= 0.98, (slots, found)
        assert found.against_best >= 0.97, (slots, found)


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize("length", [1.0, 3.2])
def test_rounds_that_are_held_up(is_measured: bool, length: float) -> None:
    """The first round and 1 in 50 take twenty times as long, whatever was drafted: it must not be held
    against the number of drafts."""
    rates = even_rates(length)
    for slots in (1, 64):
        stalls = iter([20.0])
        found = play(
            adaptive((1, 3), is_measured=is_measured),
            (1, 3),
            1500,
            lambda _, slots=slots: slots,
            lambda _: rates,
            noise=lambda rng, stalls=stalls: next(stalls, 20.0 if rng.random() < 0.02 else 1.0),
        )
        assert found.against_plain >= 0.95, (slots, found)
        assert found.against_best >= 0.93, (slots, found)


@settings(max_examples=30, deadline=None)
@given(
    slots=st.integers(1, 64),
    rates=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
    dearness=st.floats(0.0, 4.0),
)
def test_any_draft_and_any_attention(slots: int, rates: list[float], dearness: float) -> None:
    found = play(
        adaptive((1, 3)),
        (1, 3),
        400,
        lambda _: slots,
        lambda _: rates,
        attention=lambda number, slots: dearness * 100e-6 * slots,
    )
    assert found.against_plain >= 0.96


def test_without_adapting_the_chain_is_always_drafted() -> None:
    policy = DraftPolicy([1, 3], is_adaptive=False, round_costs=round_costs((1, 3)))
    assert set(play(policy, (1, 3), 50, lambda _: 4, lambda _: [0.0] * 5, num_learning=0).chosen) == {3}


def plan_of(drafts: Sequence[int], *, has_chunk: bool = False) -> StepPlan:
    chunk = PrefillChunk(slot=9, start=0, token_ids=(1,), next_token_id=None)
    rows = tuple(DecodeRow(slot=slot, num_draft_tokens=number) for slot, number in enumerate(drafts))
    return StepPlan(step_id=0, assignments=(), block_updates=(), prefill=(chunk,) * has_chunk, decode=rows)


def result_of(outputs: Sequence[SlotOutput], duration_s: float) -> StepResult:
    return StepResult(step_id=0, prefill=(), decode=tuple(outputs), duration_s=duration_s)


class Recording(DraftPolicy):
    def record(self, *args: object) -> None:
        self.recorded = args
        super().record(*args)


def test_what_a_step_tells() -> None:
    policy = Recording([1, 3], is_adaptive=True, round_costs=round_costs((1, 3)))
    outputs = [
        SlotOutput(token_ids=(5, 6), num_drafted=2, num_accepted=1),
        SlotOutput(token_ids=(5,)),  # nothing was proposed: drafted in vain
        SlotOutput(token_ids=(5, 6), finish="stop", num_drafted=2, num_accepted=2),  # the end cuts it short
        SlotOutput(),  # it had finished before
    ]
    policy.observe(plan_of([2, 2, 2, 2]), result_of(outputs, 0.005))
    assert policy.recorded == (4, 2, 0.005, [(2, 1), (2, 0)])
    policy.observe(plan_of([1, 0, 1, 0], has_chunk=True), result_of(outputs, 0.1))
    assert policy.recorded[:3] == (4, 1, None)  # the prompt's time is not the round's


def test_caps_of_requests_do_not_confuse_costs() -> None:
    """A batch of rows that may have two drafts runs rounds of three."""
    policy = DraftPolicy([1, 3], is_adaptive=True)
    for k, seconds in ((0, 1.0), (1, 1.1), (2, 1.2)):
        policy.record(4, k, seconds, [(k, k)] * 4)
    assert [policy._costs.seconds(4, k) for k in (0, 1, 3)] == [1.0, 1.1, 1.2]


def test_buckets_are_the_executors() -> None:
    """Batches of 33 to 48 run in the largest graphs there are."""
    costs = {(bucket, k): 0.005 for bucket in (1, 2, 4, 8, 16, 32, 48) for k in (0, 3)}
    costs[48, 3] = 1.0
    policy = DraftPolicy([3], is_adaptive=True, round_costs=costs)
    assert (policy.num_draft_tokens(32), policy.num_draft_tokens(33)) == (3, 0)


def test_the_first_round_tells_what_contexts_cost() -> None:
    """All numbers of drafts alike; a faster one later is believed at once too."""
    costs = RoundCosts({(8, 0): 0.004, (8, 3): 0.005})
    costs.record(8, 3, 0.015)
    assert (costs.seconds(8, 3), costs.seconds(8, 0)) == pytest.approx((0.015, 0.014))
    costs.record(8, 0, 0.005)
    assert costs.seconds(8, 0) == pytest.approx(0.005)
