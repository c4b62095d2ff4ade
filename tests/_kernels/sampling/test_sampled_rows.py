"""Sampling of rows with every kind of rule and filter, against the eager operations."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as replace_fields
from sampling_rows import GREEDY, Group, Rows, make_rows, moved, pack, random_rows
from slow_cases import slow_after
from tolerances import assert_near, bound

from drift_sdk._kernels.sampling import rows as rows_module
from drift_sdk._kernels.sampling.rows import MAX_CANDIDATES, MAX_TOP, SampleBuffers
from drift_sdk._kernels.sampling.sample import sample_rows
from drift_sdk.execution.eager.sampling import filter_logits, gumbel_noise, sample, top_logprobs

pytestmark = pytest.mark.kernel

VOCAB_SIZES = (1, 2, 31, 33, 4095, 4097, 10_000)
# Difference of logits plus noise, the largest of which are at most about 25, that rounding may decide.
NEAR_TIE = 2 * bound(25.0, inner=1, depth=2)
RESULTS = ("chosen", "chosen_logprob", "top_token", "top_logprob")


def run(rows: Rows) -> SampleBuffers:
    """Sample the rows with buffers of one row more. Results are poisoned, other buffers hold old values."""
    num_rows, vocab_size = rows.logits.shape[1:]
    buffers = SampleBuffers.allocate(num_rows + 1, vocab_size, rows.logits.device)
    for name in SampleBuffers.__slots__:
        buffer = getattr(buffers, name)
        if name in RESULTS:
            buffer.fill_(float("nan") if buffer.is_floating_point() else -77)
        else:
            buffer.fill_(1e30 if buffer.is_floating_point() else 0)  # as if left by another step

    sample_rows(
        rows.logits,
        rows.row_slot,
        rows.row_position,
        rows.row_token,
        rows.slots,
        rows.mask_words,
        buffers,
        rows_per_slot=rows.rows_per_slot,
    )
    return buffers


def columns(rows: Rows, live: list[int]) -> dict[str, torch.Tensor]:
    """The arguments of `sample` for these rows."""
    slot = rows.row_slot[live].to(torch.int64)
    slots = rows.slots
    return {
        "temperature": slots.temperature[slot],
        "top_k": slots.top_k[slot].to(torch.int64),
        "top_p": slots.top_p[slot],
        "min_p": slots.min_p[slot],
        "seed": slots.seed[slot],
        "position": rows.row_position[live].to(torch.int64) + 1,
    }


def check(rows: Rows) -> SampleBuffers:
    """Sample the rows, and compare every result with that of the eager operations."""
    raw = rows.logits[0].cpu().clone()
    buffers = moved(run(rows), "cpu")
    rows = moved(rows, "cpu")
    assert torch.equal(rows.logits[0].nan_to_num(nan=7.0), raw.nan_to_num(nan=7.0))
    live = [row for row in range(raw.shape[0]) if rows.row_slot[row] >= 0]
    padding = [row for row in range(raw.shape[0] + 1) if row not in live]
    assert buffers.chosen[padding[:-1]].tolist() == [-1] * (len(padding) - 1)
    assert buffers.chosen[-1] == -77
    for name in RESULTS[1:]:
        untouched = getattr(buffers, name)[padding]
        assert bool((untouched.isnan() if untouched.is_floating_point() else untouched == -77).all()), name

    assert bool(rows.logits[1, padding[:-1]].isnan().all())
    ruled = rows.ruled()
    for row in live:
        if not torch.equal(ruled[row], raw[row]):
            assert torch.equal(rows.logits[1, row], ruled[row]), f"row {row}: {rows.sampling(row)}"

    check_tokens(ruled[live], columns(rows, live), buffers.chosen[live])
    check_logprobs(rows, raw, buffers, live)
    return buffers


def check_tokens(ruled: torch.Tensor, given: dict[str, torch.Tensor], chosen: torch.Tensor) -> None:
    """Tokens are those of `sample`, unless logits plus noise are nearly equal."""
    expected = sample(ruled, **given)
    for row in (chosen != expected).nonzero().flatten().tolist():
        temperature = given["temperature"][row]
        assert temperature > 0, f"row {row}: {chosen[row]}: expected {expected[row]}"
        scaled = (ruled[row] - ruled[row].max()) / temperature
        filters = (given[name][row : row + 1] for name in ("top_k", "top_p", "min_p"))
        kept = filter_logits(scaled[None], *filters)
        noise = gumbel_noise(given["seed"][row : row + 1], given["position"][row : row + 1], ruled.shape[1])
        noisy = (kept + noise)[0]
        assert noisy[chosen[row]] > noisy[expected[row]] - NEAR_TIE, f"row {row}: not a near-tie"


def check_logprobs(rows: Rows, raw: torch.Tensor, buffers: SampleBuffers, live: list[int]) -> None:
    for row in live:
        sampling = rows.sampling(row)
        assert sampling is not None
        if sampling.num_logprobs is None:
            assert bool(buffers.chosen_logprob[row].isnan()) and bool((buffers.top_token[row] == -77).all())
            continue

        token = buffers.chosen[row : row + 1].to(torch.int64)
        chosen, _, values = top_logprobs(raw[row : row + 1], token, sampling.num_logprobs)
        magnitude = raw[row].nan_to_num(0.0, 0.0, 0.0).abs().max().item() + math.log(raw.shape[1])
        found = buffers.chosen_logprob[row : row + 1]
        assert_near(found, chosen, inner=1, depth=2, magnitude=magnitude)
        num_top = values.shape[1]
        # torch.topk gives ids of equal logits in any order; the kernel gives the lowest first.
        order = torch.argsort(raw[row], descending=True, stable=True)[:num_top]
        assert buffers.top_token[row, :num_top].tolist() == order.tolist()
        assert_near(buffers.top_logprob[row, :num_top], values[0], inner=1, depth=2, magnitude=magnitude)
        assert buffers.top_token[row, num_top:].tolist() == [-1] * (MAX_TOP - num_top)
        assert bool((buffers.top_logprob[row, num_top:] == -torch.inf).all())


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_random_rows_equal_eager_sampling(vocab_size: int, device: str) -> None:
    num_groups = 200 if device == "cuda" else 40 if vocab_size < 100 else 16
    check(random_rows(vocab_size, num_groups, vocab_size, device))


@pytest.mark.parametrize("vocab_size", [2, 33, 4097])
def test_penalties_count_drafted_tokens_as_output(vocab_size: int, device: str) -> None:
    num_groups = 100 if device == "cuda" else 8
    check(random_rows(vocab_size + 1, num_groups, vocab_size, device, rows_per_slot=3))


@pytest.mark.parametrize("rows_per_slot", [1, 2])
def test_row_has_the_same_bits_alone_and_in_any_order(rows_per_slot: int, device: str) -> None:
    rows = random_rows(5, 10, 4500, device, rows_per_slot)
    together = run(replace(rows, logits=rows.logits.clone()))
    order = random.Random(0).sample(range(10), 10)
    for groups in ([7], [2], order):
        apart = rows.take(groups)
        found = run(apart)
        expected = [group * rows_per_slot + depth for group in groups for depth in range(rows_per_slot)]
        for name in RESULTS:
            mine, theirs = getattr(found, name)[: len(expected)], getattr(together, name)[expected]
            assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32)), name


@pytest.mark.parametrize("num_programs", [1, 30])
def test_number_of_programs_does_not_change_bits(
    num_programs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(6, 12, 4096 * 4 + 1, device)
    one_each = run(replace(rows, logits=rows.logits.clone()))
    monkeypatch.setattr(rows_module, "MAX_PROGRAMS", num_programs)
    found = run(replace(rows, logits=rows.logits.clone()))
    for name in (*RESULTS, "row_max", "row_threshold"):
        mine, theirs = getattr(found, name), getattr(one_each, name)
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32)), name


def test_sample_rows_of_no_rows(device: str) -> None:
    rows = random_rows(1, 4, 40, device).take([])
    buffers = run(rows)
    assert buffers.chosen.tolist() == [-77]


def one_row(
    logits: list[float] | torch.Tensor,
    device: str,
    masks: tuple[int, ...] | None = None,
    **fields: object,
) -> SampleBuffers:
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    sampling = replace_fields(GREEDY, **fields)  # type: ignore[arg-type]
    words = None if masks is None else (pack(masks, row.shape[1]),)
    return check(make_rows([Group(sampling, (0, 0), (), words)], row, device))


def test_greedy_chooses_the_lowest_of_equal_logits(device: str) -> None:
    logits = torch.zeros(9000)
    logits[[4097, 4100, 8999]] = 2.0
    assert one_row(logits, device).chosen[0] == 4097
    assert one_row(torch.zeros(5000), device).chosen[0] == 0
    assert one_row(torch.full((5000,), -torch.inf), device).chosen[0] == 0


@pytest.mark.parametrize("temperature", [1e-6, 100.0])
@pytest.mark.parametrize(
    "fields",
    [{}, {"top_k": 3}, {"top_p": 1e-9}, {"top_p": 0.999}, {"min_p": 1.0}, {"top_k": 9, "top_p": 0.4}],
    ids=str,
)
def test_sample_rows_at_extreme_temperatures(
    temperature: float, fields: dict[str, float], device: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(24, 5000, generator=generator) * 4
    groups = [
        Group(replace_fields(GREEDY, temperature=temperature, seed=seed, **fields), (0, 0))
        for seed in range(24)
    ]
    check(make_rows(groups[: 24 if device == "cuda" else 4], logits[: 24 if device == "cuda" else 4], device))


@pytest.mark.parametrize("scale", slow_after(1, [1.0, 3.0]))
@pytest.mark.parametrize(
    "fields", [{"top_p": 0.8}, {"top_p": 0.95}, {"top_p": 0.99}, {"top_k": 1000}], ids=str
)
def test_candidates_of_flat_logits_fit_the_buffer(
    fields: dict[str, float], scale: float, device: str
) -> None:
    """With more candidates than fit, one program would go through the whole row many times."""
    logits = torch.randn(128_256, generator=torch.Generator().manual_seed(2)) * scale
    buffers = one_row(logits, device, temperature=0.8, seed=3, **fields)
    assert 0 < buffers.num_candidates[0].max() <= MAX_CANDIDATES

    scaled = (logits - logits.max()) / 0.8
    given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **fields}
    filters = (torch.tensor([value]) for value in given.values())
    kept = filter_logits(scaled[None].double(), *filters)
    num_kept = int((scaled >= buffers.row_threshold[0]).sum())
    assert num_kept == pytest.approx(int(kept.isfinite().sum()), rel=1e-3)


def test_stop_ids_are_allowed_where_no_other_token_is_left(device: str) -> None:
    logits = [1.0, 2.0, 3.0, 4.0]
    short = {"min_length": 9}
    assert one_row(logits, device, stop_token_ids=(3,), **short).chosen[0] == 2
    assert one_row(logits, device, stop_token_ids=(0, 1, 2, 3), **short).chosen[0] == 3
    assert one_row(logits, device, stop_token_ids=(3,), allowed_token_ids=(3,), **short).chosen[0] == 3
    assert one_row(logits, device, stop_token_ids=(3, 0), masks=(3, 0), **short).chosen[0] == 3
    assert one_row(logits, device, stop_token_ids=(3,), masks=(3, 0), **short).chosen[0] == 0
    assert one_row(logits, device, stop_token_ids=(3,), min_length=3).chosen[0] == 2
    assert one_row(logits, device, stop_token_ids=(3,), min_length=2).chosen[0] == 3


def test_constraint_takes_precedence_over_allowed_ids(device: str) -> None:
    logits = [1.0, 2.0, 3.0, 4.0]
    assert one_row(logits, device, allowed_token_ids=(0, 1), masks=(1, 2)).chosen[0] == 1
    assert one_row(logits, device, allowed_token_ids=(0, 3), masks=(1, 2)).chosen[0] == 2
    given = {"allowed_token_ids": (1,), "stop_token_ids": (1,), "min_length": 9}
    assert one_row(logits, device, masks=(0, 1), **given).chosen[0] == 1
    assert one_row(logits, device, masks=(), **given).chosen[0] == 0


def test_bits_behind_the_vocabulary_are_no_tokens(device: str) -> None:
    """The only token left is found beyond the first block of words, and none behind the vocabulary."""
    vocab_size = 33_000
    others = tuple(token for token in range(vocab_size) if token != 32_900)
    logits = torch.linspace(0, 1, vocab_size)
    assert one_row(logits, device, stop_token_ids=others, min_length=9).chosen[0] == 32_900
    everything = tuple(range(vocab_size))
    assert one_row(logits, device, stop_token_ids=everything, min_length=9).chosen[0] == vocab_size - 1


def test_sample_rows_names_wrong_arguments(device: str) -> None:
    rows = random_rows(1, 4, 40, device)
    buffers = SampleBuffers.allocate(4, 40, device)
    fields = ("logits", "row_slot", "row_position", "row_token", "slots", "mask_words")
    given = {name: getattr(rows, name) for name in fields} | {"buffers": buffers}
    with pytest.raises(ValueError, match=r"logits: \[1, 4, 40\]: expected \[2, 4, 40\]"):
        sample_rows(**(given | {"logits": rows.logits[:1]}))
    with pytest.raises(ValueError, match=r"logits: .*float64: expected .*float32"):
        sample_rows(**(given | {"logits": rows.logits.double()}))
    with pytest.raises(ValueError, match=r"row_position: \[4\] torch.int64"):
        sample_rows(**(given | {"row_position": rows.row_position.long()}))
    with pytest.raises(ValueError, match=r"buffers: 3 rows: expected at least 4"):
        sample_rows(**(given | {"buffers": SampleBuffers.allocate(3, 40, device)}))
    with pytest.raises(ValueError, match=r"buffers: 2 chunks: expected 1"):
        sample_rows(**(given | {"buffers": SampleBuffers.allocate(4, 5000, device)}))
    with pytest.raises(ValueError, match=r"row_slot: 4 rows: expected a multiple of 3"):
        sample_rows(**given, rows_per_slot=3)
