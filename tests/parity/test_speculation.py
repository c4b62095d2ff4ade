"""Tokens are the same with and without speculation, for drafts of any quality."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import anyio
import numpy as np
import pytest
from draft_zoo import make_draft
from model_zoo import first_layers, logprob_bound, make_model
from near_ties import no_near_ties
from numpy.typing import NDArray
from oracle_drafter import OracleDrafter
from slow_cases import slow_after, slow_rows_after

from drift_sdk import (
    Chain,
    Completion,
    Engine,
    EngineConfig,
    JsonSchema,
    ModelLoadError,
    NGram,
    Regex,
    SamplingParams,
    Speculation,
)
from drift_sdk.execution.drafter_factory import NGramDrafterFactory
from drift_sdk.text.grammar import GrammarConstraint

VOCAB_SIZE = 500
NUM_REQUESTS = 16
MODEL = 0


class Case:
    def __init__(self, rng: random.Random, seed: int, temperature: float) -> None:
        shared = [7 + (5 * i) % 300 for i in range(48)]
        phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(6)]
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        self.prompt = shared[: rng.choice([0, 16, 33, 48])] + own + phrase * rng.choice([0, 3])
        rare = rng.random() < 0.3
        self.params = SamplingParams(
            max_tokens=rng.randint(1, 48),
            temperature=temperature,
            top_p=0.9 if temperature else 1.0,
            seed=seed,
            ignore_eos=rng.random() < 0.7,
            stop_token_ids=tuple(range(100, 130)) if rare else (),
            stop=("z", "q") if rng.random() < 0.3 else (),
            min_tokens=rng.choice([0, 0, 0, 1]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
            logprobs=rng.choice([None, None, 2]),
            num_draft_tokens=rng.choice([None, None, None, 1, 0]),
        )


def cases(temperature: float) -> list[Case]:
    rng = random.Random(int(temperature * 10) + 1)
    return [Case(rng, seed, temperature) for seed in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(MODEL, folder)
    return folder


def config_of(**fields: object) -> EngineConfig:
    return EngineConfig(dtype="float32", device="cpu", max_model_len=256, block_size=8, **fields)


async def run_all(folder: Path, config: EngineConfig, given: list[Case], *, alone: bool) -> list[Completion]:
    completions: dict[int, Completion] = {}
    async with Engine(folder, config) as engine:

        async def ask(index: int) -> None:
            completions[index] = await engine.generate(given[index].prompt, given[index].params)

        async with anyio.create_task_group() as tasks:
            for index in range(len(given)):
                if alone:
                    await ask(index)
                else:
                    tasks.start_soon(ask, index)
        stats = engine.stats()
        assert stats.num_running == stats.num_waiting == 0
    return [completions[index] for index in range(len(given))]


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[float, list[Completion]]:
    with no_near_ties(logprob_bound(MODEL)):
        return {
            temperature: anyio.run(lambda t=temperature: run_all(folder, config_of(), cases(t), alone=True))
            for temperature in (0.0, 0.7, 1.0)
        }


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.token_ids == other.token_ids, f"request {index}"
        assert (one.text, one.finish_reason, one.stop_reason) == (
            other.text,
            other.finish_reason,
            other.stop_reason,
        )
        assert one.speculation is not None
        if one.logprobs is not None:
            for a, b in zip(one.logprobs, other.logprobs, strict=True):
                assert abs(a.logprob - b.logprob) < logprob_bound(MODEL)


VARIANTS = [
    {"prefill_token_budget": 512},
    {"prefill_token_budget": 16},
    {"prefill_token_budget": 32, "kv_cache_tokens": 256},  # small enough for preemption
    {"prefill_token_budget": 64, "max_num_seqs": 1},
]


# All pairs of shape and corruption, of shape and temperature, and of corruption and temperature.
SHAPES = [(1, 0), (2, 1), (3, 2), (4, 0), (5, 2), (3, 3), (5, 1)]
ORACLES = [
    (*shape, (0.0, 0.2, 0.5)[corruption], (0.0, 0.7, 1.0)[(corruption + index) % 3])
    for index, shape in enumerate(SHAPES)
    for corruption in range(3)
]


@pytest.mark.parametrize(
    ("num_draft_tokens", "variant", "corruption", "temperature"), slow_rows_after(6, ORACLES)
)
def test_oracle_drafter(
    folder: Path,
    plain: dict[float, list[Completion]],
    monkeypatch: pytest.MonkeyPatch,
    num_draft_tokens: int,
    corruption: float,
    temperature: float,
    variant: int,
) -> None:
    given = cases(temperature)
    answers = {
        case.params.seed: [*case.prompt, *completion.token_ids]
        for case, completion in zip(given, plain[temperature], strict=True)
    }
    oracle = OracleDrafter(answers, corruption, VOCAB_SIZE)
    monkeypatch.setattr(NGramDrafterFactory, "eager_drafter", lambda *_: oracle)
    speculation = Speculation(draft=NGram(), shape=Chain(num_draft_tokens), adaptive=False)
    config = config_of(speculation=speculation, **{"max_num_seqs": 16, **VARIANTS[variant]})
    found = anyio.run(lambda: run_all(folder, config, given, alone=False))
    assert_same(found, plain[temperature])
    if corruption == 0.0:
        assert all(f.speculation.num_accepted == f.speculation.num_drafted for f in found)


PROMPTS = [[5 + seed, 17, 23 + seed] for seed in range(NUM_REQUESTS)]


async def ask_long(folder: Path, config: EngineConfig) -> list[Completion]:
    async with Engine(folder, config) as engine:
        params = [SamplingParams(max_tokens=120, ignore_eos=True, seed=seed) for seed in range(NUM_REQUESTS)]
        streams = [engine.generate(*pair) for pair in zip(PROMPTS, params, strict=True)]
        return [await stream for stream in streams]


@pytest.fixture(scope="module")
def long_plain(folder: Path) -> list[Completion]:
    return anyio.run(ask_long, folder, config_of())


@pytest.mark.parametrize("corruption", slow_after(1, [0.5, 0.2]))
@pytest.mark.parametrize("num_draft_tokens", slow_after(2, [1, 5, 2, 3, 4]))
def test_every_acceptance_length_occurs(
    folder: Path,
    long_plain: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    num_draft_tokens: int,
    corruption: float,
) -> None:
    expected = long_plain
    answers = {c.seed: [*p, *c.token_ids] for p, c in zip(PROMPTS, expected, strict=True)}
    oracle = OracleDrafter(answers, corruption, VOCAB_SIZE)
    monkeypatch.setattr(NGramDrafterFactory, "eager_drafter", lambda *_: oracle)
    speculation = Speculation(draft=NGram(), shape=Chain(num_draft_tokens), adaptive=False)
    found = anyio.run(ask_long, folder, config_of(speculation=speculation))
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert sorted(oracle.histogram) == list(range(num_draft_tokens + 1)), oracle.histogram
    num_rounds = sum(c.speculation.num_rounds for c in found)
    assert num_rounds == sum(oracle.histogram.values())
    assert sum(c.speculation.num_accepted for c in found) == sum(a * n for a, n in oracle.histogram.items())
    for num_accepted, times in oracle.histogram.items():
        assert sum(c.speculation.acceptance_histogram[num_accepted] for c in found) == times
    print(f"K={num_draft_tokens} corruption={corruption}:", dict(sorted(oracle.histogram.items())))  # noqa: T201


# All pairs of variant and policy, and of variant and temperature.
NGRAM_RUNS = [
    (temperature, index, (index + temperature) % 2 == 1) for temperature in (0, 1) for index in range(4)
]


@pytest.mark.parametrize(("temperature", "variant", "adaptive"), slow_rows_after(4, NGRAM_RUNS))
def test_ngram_drafter(
    folder: Path, plain: dict[float, list[Completion]], temperature: int, variant: int, adaptive: bool
) -> None:
    speculation = Speculation(draft=NGram(min_length=1), shape=Chain(3), adaptive=adaptive)
    config = config_of(speculation=speculation, **VARIANTS[variant])
    found = anyio.run(lambda: run_all(folder, config, cases(temperature), alone=False))
    assert_same(found, plain[temperature])
    assert adaptive or sum(f.speculation.num_drafted for f in found) > 0


@pytest.mark.parametrize("temperature", slow_after(1, [1.0, 0.0]))
def test_ngram_drafter_of_one_request_at_a_time(
    folder: Path, plain: dict[float, list[Completion]], temperature: float
) -> None:
    speculation = Speculation(draft=NGram(min_length=1), shape=Chain(3), adaptive=False)
    config = config_of(speculation=speculation, **VARIANTS[1])
    found = anyio.run(lambda: run_all(folder, config, cases(temperature), alone=True))
    assert_same(found, plain[temperature])
    assert sum(f.speculation.num_drafted for f in found) > 0


@pytest.mark.parametrize(
    ("num_draft_tokens", "variant"), slow_rows_after(1, [(5, 2), (3, 1), (1, 0), (2, 3), (4, 0)])
)
@pytest.mark.parametrize("temperature", slow_after(1, [1.0, 0.0]))
def test_random_eagle_draft(
    folder: Path,
    tmp_path: Path,
    plain: dict[float, list[Completion]],
    num_draft_tokens: int,
    temperature: float,
    variant: int,
) -> None:
    make_draft("reference", tmp_path, folder)
    speculation = Speculation(draft=tmp_path, shape=Chain(num_draft_tokens), adaptive=False)
    config = config_of(speculation=speculation, **VARIANTS[variant])
    found = anyio.run(lambda: run_all(folder, config, cases(temperature), alone=False))
    assert_same(found, plain[temperature])
    assert sum(f.speculation.num_drafted for f in found) > 0


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head with random weights."""
    head = tmp_path_factory.mktemp("head")
    make_draft("reference", head, folder)
    return head


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same vocabulary: the first layers of the model, so that it is often right."""
    small = tmp_path_factory.mktemp("small")
    return first_layers(folder, small, 1)


@pytest.mark.parametrize(
    ("draft", "ngrams", "num_draft_tokens", "variant", "temperature"),
    slow_rows_after(
        3,
        [
            ("small", None, 3, 3, 0.0),
            ("head", NGram(min_length=1), 3, 1, 0.0),
            ("small", NGram(min_length=1), 3, 0, 0.0),
            ("small", None, 4, 2, 0.7),
            ("head", NGram(min_length=1, max_length=3), 2, 2, 1.0),
        ],
    ),
)
def test_small_models_and_ngrams_beside_drafts(
    plain: dict[float, list[Completion]],
    request: pytest.FixtureRequest,
    draft: str,
    ngrams: NGram | None,
    num_draft_tokens: int,
    temperature: float,
    variant: int,
) -> None:
    folder, name = request.getfixturevalue("folder"), request.getfixturevalue(draft)
    shape = Chain(num_draft_tokens)
    is_adaptive = variant == 3
    speculation = Speculation(draft=name, ngrams=ngrams, shape=shape, adaptive=is_adaptive)
    config = config_of(speculation=speculation, **VARIANTS[variant])
    found = anyio.run(lambda: run_all(folder, config, cases(temperature), alone=False))
    assert_same(found, plain[temperature])
    stats = [each.speculation for each in found]
    assert sum(each.num_drafted for each in stats) > 0
    assert (sum(each.num_ngram_drafted for each in stats) > 0) == (ngrams is not None)
    assert all(each.num_ngram_drafted <= each.num_drafted for each in stats)


@pytest.mark.parametrize("variant", slow_after(2, range(4)))
def test_a_model_that_drafts_for_itself_is_always_right(folder: Path, variant: int) -> None:
    """The draft has keys and values of all tokens: after prompts in chunks, prefix hits, preemptions, and
    rounds in which a request drafts fewer tokens than others or none."""
    given = cases(0.0)
    for seed, case in enumerate(given):
        case.params = SamplingParams(
            max_tokens=24,
            ignore_eos=True,
            temperature=seed % 2,
            seed=seed,
            num_draft_tokens=(None, None, 1, 0)[seed % 4],
        )
    speculation = Speculation(draft=folder, shape=Chain(3), adaptive=False)
    config = config_of(speculation=speculation, **VARIANTS[variant])
    found = anyio.run(lambda: run_all(folder, config, given, alone=False))
    stats = [each.speculation for each in found]
    assert sum(each.num_drafted for each in stats) > 150
    assert [each.num_accepted for each in stats] == [each.num_drafted for each in stats]


def test_unusable_draft(folder: Path, tmp_path: Path, plain) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nonsense"]}')

    async def start(required: bool) -> list[Completion]:
        speculation = Speculation(draft=tmp_path, required=required)
        return await run_all(folder, config_of(speculation=speculation), cases(0.0), alone=False)

    with pytest.raises(ModelLoadError):
        anyio.run(start, True)
    for found, expected in zip(anyio.run(start, False), plain[0.0], strict=True):
        assert found.token_ids == expected.token_ids
        assert found.speculation is None


def test_prefix_hit_covers_the_draft(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a hit only uncached tokens are computed, and acceptance is the same as without the hit."""
    make_draft("reference", tmp_path, folder)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(70)] for _ in range(6)]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=seed) for seed in range(6)]
    speculation = Speculation(draft=tmp_path, shape=Chain(3), adaptive=False)

    async def main() -> None:
        async with Engine(folder, config_of(speculation=speculation)) as engine:
            first = [await engine.generate(p, s) for p, s in zip(prompts, params, strict=True)]
            again = [await engine.generate(p, s) for p, s in zip(prompts, params, strict=True)]
            for cold, warm in zip(first, again, strict=True):
                assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 64)
                assert warm.token_ids == cold.token_ids
                assert warm.speculation == cold.speculation
            stats = engine.stats()
            num_undrafted = (
                stats.num_undrafted_by_policy
                + stats.num_undrafted_by_request
                + stats.num_undrafted_for_room
                + stats.num_undrafted_by_drafter
            )
            num_accepted = sum(c.speculation.num_accepted for c in (*first, *again))
            assert stats.num_draft_rounds + num_undrafted + num_accepted == 12 * 39
            assert stats.num_undrafted_for_room > 0 == stats.num_undrafted_by_request
            assert stats.num_draft_rounds == sum(c.speculation.num_rounds for c in (*first, *again))
            assert stats.num_drafted_tokens == sum(c.speculation.num_drafted for c in (*first, *again))
            assert stats.num_accepted_tokens == sum(c.speculation.num_accepted for c in (*first, *again))
            assert stats.speculation.num_rewound == sum(c.speculation.num_rewound for c in (*first, *again))
            each = [c.speculation.acceptance_histogram for c in (*first, *again)]
            assert stats.speculation.acceptance_histogram == tuple(map(sum, zip(*each, strict=True)))

    anyio.run(main)


def test_grammars_that_end_within_a_draft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = [Regex("[a-f]{5,20}"), JsonSchema({"enum": ["abcabcabc", "abcdef"]}), Regex("(ab|cd){2,9}!")]

    def given() -> list[SamplingParams]:
        return [
            SamplingParams(max_tokens=60, seed=seed, temperature=0.9, grammar=grammars[seed % 3])
            for seed in range(12)
        ]

    async def ask_all(config: EngineConfig) -> list[Completion]:
        async with Engine(folder, config) as engine:
            streams = [engine.generate([5 + p.seed, 9, 11], p) for p in given()]
            return [await stream for stream in streams]

    masks_of = GrammarConstraint.masks
    asked: Counter[tuple[GrammarConstraint, int]] = Counter()
    num_outside = 0  # drafts with a token that the grammar forbids

    def masks(constraint: GrammarConstraint, draft_token_ids: Sequence[int]) -> NDArray[np.int32]:
        nonlocal num_outside
        asked[constraint, constraint._num_tokens] += 1
        rows = masks_of(constraint, draft_token_ids)
        num_outside += not rows[-1].any()
        return rows

    expected = anyio.run(ask_all, config_of())
    assert {completion.finish_reason for completion in expected} == {"stop"}
    monkeypatch.setattr(GrammarConstraint, "masks", masks)
    answers = {c.seed: [5 + c.seed, 9, 11, *c.token_ids] for c in expected}
    for corruption in (0.0, 0.3):
        oracle = OracleDrafter(answers, corruption, VOCAB_SIZE)
        monkeypatch.setattr(NGramDrafterFactory, "eager_drafter", lambda *_, oracle=oracle: oracle)
        speculation = Speculation(draft=NGram(), shape=Chain(4), adaptive=False)
        asked.clear()
        num_outside = 0
        found = anyio.run(ask_all, config_of(speculation=speculation))
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        assert [c.parsed for c in found] == [c.parsed for c in expected]
        assert sum(c.speculation.num_accepted for c in found) > 0
        assert set(asked.values()) == {1}  # once for each round, for all its rows
        assert num_outside > 0 or corruption == 0.0
