"""The thresholds of filters: the whole set of tokens kept, not only the token chosen from it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from msgspec.structs import replace
from sampling_rows import GREEDY, Group, make_rows, moved

from drift_sdk._kernels.sampling.logits import NEGLIGIBLE_LOGIT
from drift_sdk._kernels.sampling.rows import CHUNK_TOKENS, MAX_CANDIDATES, SampleBuffers
from drift_sdk._kernels.sampling.sample import sample_rows
from drift_sdk.steps import SlotSampling

pytestmark = pytest.mark.kernel


SLACK = 1e-5
"""Tokens closer to a limit than this may be kept or not: rounding decides."""


def check(logits: torch.Tensor, samplings: list[dict[str, float]], device: str) -> None:
    """Sample rows of logits [R, V] with these fields each, and check which tokens their thresholds keep."""
    groups = [Group(replace(GREEDY, **{"temperature": 1.0, **fields}), (0,)) for fields in samplings]
    rows = make_rows(groups, logits, device)
    num_rows, vocab_size = logits.shape
    buffers = SampleBuffers.allocate(num_rows, vocab_size, device)
    args = (rows.logits, rows.row_slot, rows.row_position, rows.row_token, rows.slots, rows.mask_words)
    sample_rows(*args, buffers)
    rows, buffers = moved(rows, "cpu"), moved(buffers, "cpu")
    for row, group in enumerate(groups):
        sampling, row_logits = group.sampling, rows.logits[0, row]
        assert buffers.row_max[row] == row_logits.max()
        scaled = (row_logits - row_logits.max()) / sampling.temperature
        must_stay, must_go = limits(scaled.double(), sampling)
        is_kept = scaled >= buffers.row_threshold[row]
        can_win = scaled > NEGLIGIBLE_LOGIT.value
        assert not bool((must_stay & can_win & ~is_kept).any()), (
            f"row {row}: too few tokens are kept: {sampling}"
        )
        assert not bool((must_go & can_win & is_kept).any()), (
            f"row {row}: too many tokens are kept: {sampling}"
        )


def limits(scaled: torch.Tensor, sampling: SlotSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens that the filters must keep, tokens that they must cut off), bool [V] each, of scaled logits
    [V]."""
    levels, level = scaled.unique(return_inverse=True)
    number = torch.bincount(level, minlength=len(levels)).double()
    num_larger = (number.sum() - number.cumsum(0))[level]
    is_top = num_larger < (sampling.top_k or len(scaled))
    mass = torch.zeros_like(levels).index_add_(0, level, torch.where(is_top, scaled.exp(), 0))
    larger = ((mass.sum() - mass.cumsum(0)) / mass.sum())[level]
    floor = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    is_filtered = sampling.top_p < 1
    must_stay = is_top & ((not is_filtered) | (larger < sampling.top_p - SLACK)) & (scaled > floor + SLACK)
    must_go = ~is_top | (is_filtered & (larger > sampling.top_p + SLACK)) | (scaled < floor - SLACK)
    return must_stay | (scaled == 0), must_go & (scaled < 0)


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 33, 4097, 9000])
def test_random_filters_keep_the_right_tokens(vocab_size: int, device: str) -> None:
    rng = random.Random(vocab_size)
    num_rows = 24 if vocab_size < 1000 or device == "cuda" else 8
    samplings = [
        {
            "temperature": rng.choice([1.0, 0.5, 2.0]),
            "top_k": rng.choice([0, 1, 2, 40, vocab_size - 1, vocab_size + 1]),
            "top_p": rng.choice([1.0, 0.999, 0.9, 0.3, 1e-7]),
            "min_p": rng.choice([0.0, 0.0, 0.02, 1.0]),
        }
        for _ in range(num_rows)
    ]
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4
    logits[::3] = (logits[::3] * 2).round() / 2
    logits[1::4, 1::2] = -torch.inf
    check(logits, samplings, device)


@pytest.mark.parametrize("spread", [1e-30, 1e-6, 1.0, 1e4])
@pytest.mark.parametrize("fields", [{"top_k": 7}, {"top_p": 0.6}, {"top_k": 50, "top_p": 0.8}], ids=str)
def test_filters_of_logits_of_any_spread(spread: float, fields: dict[str, float], device: str) -> None:
    """Brackets close on logits that are nearly equal and on logits that are far apart."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(3)) * spread
    check(logits, [fields, fields], device)


@pytest.mark.parametrize("spread", [1.0, 1e-3])
@pytest.mark.parametrize("num_near", [MAX_CANDIDATES - 1, MAX_CANDIDATES, MAX_CANDIDATES + 1])
def test_filters_with_more_candidates_than_are_collected(num_near: int, spread: float, device: str) -> None:
    """With more than MAX_CANDIDATES in a chunk the kernel reads the whole row."""
    logits = torch.full((2, MAX_CANDIDATES + 900), -50.0)
    near = torch.linspace(0.0, spread, num_near)
    logits[:, 450 : 450 + num_near] = near
    check(logits, [{"top_k": num_near - 5}, {"top_p": 0.99}], device)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_filters_of_a_ramp_at_every_share_and_count(temperature: float, device: str) -> None:
    """Logits lie densely, and the best of each chunk at another level."""
    ramp = torch.linspace(-30.0, 0.0, 9000)
    top_p = [
        {"temperature": temperature, "top_p": share} for share in torch.linspace(0.01, 0.99, 40).tolist()
    ]
    top_k = [{"temperature": temperature, "top_k": number} for number in range(1, 9000, 300)]
    samplings = [*top_p, *top_k] if device == "cuda" else [*top_p[::4], *top_k[::6]]
    check(ramp.repeat(len(samplings), 1), samplings, device)


def test_chunk_below_all_levels_but_the_lowest_is_weighed(device: str) -> None:
    """A quarter of the mass kept lies between the lowest two levels, in a chunk without larger logits."""
    logits = torch.full((1, 3 * CHUNK_TOKENS), -50.0)
    logits[0, 0] = 0.0
    logits[0, CHUNK_TOKENS : 2 * CHUNK_TOKENS] = -9.3
    logits[0, 2 * CHUNK_TOKENS : 2 * CHUNK_TOKENS + 1000] = -10.0
    check(logits, [{"top_p": 0.95}], device)


def test_filters_keep_ties_with_the_last_token_kept(device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    check(logits, [{"top_k": 1}, {"top_p": 0.2}], device)
