"""Tokens sampled with speculation follow the distribution of plain sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from oracle_drafter import OracleDrafter
from slow_cases import slow_after
from torch import Tensor

from drift_sdk.execution.eager import eager_executor as eager
from drift_sdk.execution.eager.drafters import Drafter, NGramDrafter
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.models.decoder import Decoder
from drift_sdk.spec.model import Attention, LayerSpec, Mlp, ModelSpec, Norm
from drift_sdk.spec.rope import Rope
from drift_sdk.steps import (
    BlockUpdate,
    DecodeRow,
    ExecutorLimits,
    PrefillChunk,
    SlotAssignment,
    SlotSampling,
    StepPlan,
)
from drift_sdk.trees import Draft

VOCAB_SIZE = 12
PROMPT = (3, 7, 1)
NUM_SEQUENCES = 512
NUM_TOKENS = 100  # of each sequence: 51,200 in a sample
NUM_DRAFT_TOKENS = 4
BLOCK_SIZE = 16
NUM_PERMUTATIONS = 999

Sequences = list[list[int]]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    attention = Attention(
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        value_dim=8,
        scale=8**-0.5,
        rope=Rope(theta=10_000.0, rotary_dim=8),
    )
    norm = Norm(1e-5)
    spec = ModelSpec(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        layers=(LayerSpec(mixer=attention, channel=Mlp(intermediate_size=24), norm=norm),) * 2,
        max_position_embeddings=512,
        final_norm=norm,
        is_head_tied=False,
    )
    decoder = Decoder.random(spec, device="cpu", dtype=torch.float32, seed=1)
    with torch.inference_mode():
        decoder.weights.embedding.mul_(3)  # makes the next token depend strongly on the last one
    return decoder


def generate(
    decoder: Decoder, seeds: Sequence[int], drafter: Drafter | None = None
) -> tuple[Sequences, Counter[int]]:
    """NUM_TOKENS or more sampled tokens for each seed, all in one batch, and the number of rounds by accepted
    tokens."""
    max_length = len(PROMPT) + NUM_TOKENS
    blocks_each = -(-(max_length + NUM_DRAFT_TOKENS) // BLOCK_SIZE)
    limits = ExecutorLimits(
        max_num_seqs=len(seeds),
        max_model_len=max_length,
        num_blocks=len(seeds) * blocks_each,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
    )
    executor = EagerExecutor(decoder, limits, drafter)
    slots = range(len(seeds))
    assignments, updates = [], []
    for slot, seed in enumerate(seeds):
        sampling = SlotSampling(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=seed,
            stop_token_ids=(),
            num_prompt_tokens=len(PROMPT),
            max_length=max_length,
        )
        assignments.append(SlotAssignment(slot=slot, sampling=sampling))
        block_ids = tuple(range(slot * blocks_each, (slot + 1) * blocks_each))
        updates.append(BlockUpdate(slot=slot, first_index=0, block_ids=block_ids))

    prompts = tuple(PrefillChunk(slot=slot, start=0, token_ids=PROMPT, next_token_id=None) for slot in slots)
    rows = tuple(
        DecodeRow(slot=slot, num_draft_tokens=0 if drafter is None else NUM_DRAFT_TOKENS) for slot in slots
    )
    executor.launch(
        StepPlan(
            step_id=0,
            assignments=tuple(assignments),
            block_updates=tuple(updates),
            prefill=prompts,
            decode=(),
        )
    )
    sequences = [list(output.token_ids) for output in executor.collect().prefill]
    num_accepted: Counter[int] = Counter()
    while any(len(sequence) < NUM_TOKENS for sequence in sequences):
        executor.launch(StepPlan(step_id=1, assignments=(), block_updates=(), prefill=(), decode=rows))
        for sequence, output in zip(sequences, executor.collect().decode, strict=True):
            sequence.extend(output.token_ids)
            if output.num_drafted == NUM_DRAFT_TOKENS:
                num_accepted[output.num_accepted] += 1

    executor.close()
    return sequences, num_accepted


def pair_counts(sequences: Sequences) -> Tensor:
    """Counts of each token behind each token in each sequence: [num_sequences, VOCAB_SIZE, VOCAB_SIZE]."""
    tokens = torch.tensor(sequences)
    pairs = tokens[:, :-1] * VOCAB_SIZE + tokens[:, 1:]
    counts = torch.zeros(len(sequences), VOCAB_SIZE**2, dtype=torch.float64)
    counts.scatter_add_(1, pairs, torch.ones_like(pairs, dtype=torch.float64))
    return counts.view(-1, VOCAB_SIZE, VOCAB_SIZE)


def chi_square(one: Tensor, other: Tensor) -> Tensor:
    """The chi-square statistic of homogeneity [...] of two samples' histograms [..., V, V] of the next token,
    summed over the token before. It has V * (V - 1) degrees of freedom."""
    both = one + other
    total = torch.zeros(one.shape[:-2], dtype=torch.float64)
    for counts in (one, other):
        expected = both * counts.sum(-1, keepdim=True) / both.sum(-1, keepdim=True)
        assert expected.min() > 5, "too few expected pairs for the chi-square distribution"
        total += ((counts - expected) ** 2 / expected).sum((-2, -1))

    return total


def p_values(one: Sequences, other: Sequences) -> tuple[float, float]:
    """Two p-values of the chi-square statistic: from the chi-square distribution, which assumes that a token
    depends only on the token before it, and from a permutation test over the sequences, which assumes
    nothing."""
    counts = torch.cat([pair_counts(one), pair_counts(other)])
    found = chi_square(counts[: len(one)].sum(0), counts[len(one) :].sum(0))
    half_degrees = torch.tensor(VOCAB_SIZE * (VOCAB_SIZE - 1) / 2, dtype=torch.float64)
    by_distribution = torch.special.gammaincc(half_degrees, found / 2)

    generator = torch.Generator().manual_seed(5)
    is_in_one = torch.zeros(NUM_PERMUTATIONS, len(counts), dtype=torch.float64)
    for row in is_in_one:
        row[torch.randperm(len(counts), generator=generator)[: len(one)]] = 1.0
    permuted = (is_in_one @ counts.flatten(1)).view(-1, VOCAB_SIZE, VOCAB_SIZE)
    is_larger = chi_square(permuted, counts.sum(0) - permuted) >= found
    return by_distribution.item(), (1 + int(is_larger.sum())) / (1 + NUM_PERMUTATIONS)


SEEDS = range(NUM_SEQUENCES)
OTHER_SEEDS = range(NUM_SEQUENCES, 2 * NUM_SEQUENCES)


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> Sequences:
    return generate(decoder, SEEDS)[0]


@pytest.fixture(scope="module")
def plain_of_other_seeds(decoder: Decoder) -> Sequences:
    return generate(decoder, OTHER_SEEDS)[0]


@pytest.fixture(scope="module", params=slow_after(1, ["ngram", "oracle"]))
def speculative(
    request: pytest.FixtureRequest, decoder: Decoder, plain: Sequences
) -> tuple[Sequences, Counter[int]]:
    return generate(decoder, SEEDS, drafter_of(request.param, plain))


def drafter_of(kind: str, plain: Sequences) -> Drafter:
    if kind == "ngram":
        return NGramDrafter(min_length=1, max_length=3)

    answers = {seed: [*PROMPT, *tokens] for seed, tokens in zip(SEEDS, plain, strict=True)}
    return OracleDrafter(answers, corruption=0.3, vocab_size=VOCAB_SIZE)


def test_distribution_equals_plain_sampling(
    speculative: tuple[Sequences, Counter[int]], plain_of_other_seeds: Sequences
) -> None:
    sequences, num_accepted = speculative
    assert sum(map(len, sequences)) >= 50_000
    assert sorted(num_accepted) == list(range(NUM_DRAFT_TOKENS + 1))
    assert min(p_values(sequences, plain_of_other_seeds)) > 0.01


def test_tokens_of_each_seed_equal_plain_sampling(
    speculative: tuple[Sequences, Counter[int]], plain: Sequences
) -> None:
    assert speculative[0] == plain


class EqualToAny(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class AlwaysAccepted(NGramDrafter):
    """Fault: every draft token equals any token, so rows with a wrong context are accepted."""

    def propose(self, slots, limits) -> list[Draft]:
        drafts = super().propose(slots, limits)
        return [Draft.chain([EqualToAny(token) for token in draft.token_ids]) for draft in drafts]


@pytest.mark.parametrize("fault", slow_after(1, ["everything is accepted", "noise is used twice"]))
def test_planted_bias_is_found(
    decoder: Decoder, plain_of_other_seeds: Sequences, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    drafter = NGramDrafter(min_length=1, max_length=3)
    if fault == "everything is accepted":
        drafter = AlwaysAccepted(min_length=1, max_length=3)
    else:
        choose = eager.choose
        monkeypatch.setattr(
            eager, "choose", lambda logits, of, positions: choose(logits, of, [p // 2 * 2 for p in positions])
        )
    sequences, _ = generate(decoder, SEEDS, drafter)
    by_distribution, by_permutation = p_values(sequences, plain_of_other_seeds)
    assert by_distribution < 1e-6
    assert by_permutation == 1 / (1 + NUM_PERMUTATIONS)
