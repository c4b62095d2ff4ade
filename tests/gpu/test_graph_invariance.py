"""In bfloat16, a request gets the same tokens and log-probabilities in a batch as alone, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from loops import until
from random_folder import make_random_folder

from drift_sdk import Completion, Engine, EngineConfig, SamplingParams
from drift_sdk._kernels.gemm import tuning
from drift_sdk._kernels.gemm.gemm import GemmTiles
from drift_sdk._kernels.gemm.tuning import TunedTable, TunedTiles
from drift_sdk.execution.graph import buckets
from drift_sdk.execution.graph.graph_executor import GraphExecutor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MAX_SEQS = 64
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
GROUPS = (1, 2, 3, 4, 7, 8, 13, 16, 32, 64)
"""Numbers of requests that run together, one group after the other: every bucket, full and not full."""
NUM_TOKENS = 40
PROMPT = 64
"""Tokens of a prompt that fills a prefill step."""

Case = tuple[list[int], SamplingParams]

# Spread over CTAs for a few rows, summed by one for many: two or four slices either way.
SLICED = TunedTiles(
    (
        (4, GemmTiles(True, 64, 16, 128, 4, 4)),
        (16, GemmTiles(True, 128, 16, 64, 3, 4)),
        (64, GemmTiles(False, 64, 64, 64, 4, 4)),
        (2**31, GemmTiles(False, 128, 128, 64, 3, 8)),
    )
)
SLICED_TABLE = TunedTable(gemms=dict.fromkeys(("1536x1024", "1024x1024", "1024x2816"), SLICED))
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def params_of(index: int, rng: random.Random, vocab_size: int) -> SamplingParams:
    """Greedy decoding and all kinds of sampling in turn."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 40, "min_p": 0.02},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.6},
        {"temperature": 1.4, "top_p": 0.95, "top_k": 5000, "repetition_penalty": 0.8},
        {"temperature": 0.6, "min_p": 0.1, "frequency_penalty": -0.3},
        {
            "temperature": 0.9,
            "logit_bias": {rng.randrange(vocab_size): rng.uniform(-4, 4) for _ in range(50)},
        },
    ]
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        seed=rng.randrange(2**63),
        logprobs=index % 4,
        **ways[index % len(ways)],
    )


@dataclass
class Model:
    """A model's folder, requests, and the answers to them when each runs alone; `weights` of EngineConfig."""

    folder: Path
    vocab_size: int
    groups: tuple[int, ...]
    weights: Literal["fp8", "int4"] | None = None

    def engine(self, **fields: Any) -> Engine:
        fields = {"max_num_seqs": MAX_SEQS, "prefill_token_budget": 512} | fields
        config = EngineConfig(
            device="cuda",
            executor="graph",
            load="random",
            dtype="bfloat16",
            max_model_len=384,
            block_size=16,
            weights=self.weights,
            **{"kv_cache_tokens": 32_768, **fields},
        )
        return Engine(self.folder, config)

    def cases(self, seed: int, lengths: Sequence[int]) -> list[Case]:
        """A case for each place in the groups; all prompts begin differently."""
        rng = random.Random(seed)
        return [
            (
                [rng.randrange(3, self.vocab_size) for _ in range(rng.choice(lengths))],
                params_of(index, rng, self.vocab_size),
            )
            for index in range(sum(self.groups))
        ]

    @cached_property
    def varied(self) -> list[Case]:
        return self.cases(1, (1, 2, 15, 17, 30, 64, 65, 100, 129, 250, 300))

    @cached_property
    def uniform(self) -> list[Case]:
        return self.cases(2, (PROMPT,))

    @cached_property
    def exact_alone(self) -> list[Completion]:
        return anyio.run(self.alone, self.varied, {})

    @cached_property
    def plain_alone(self) -> list[Completion]:
        return anyio.run(self.alone, self.uniform, {"prefill_token_budget": PROMPT, "fast_prompts": True})

    async def alone(self, cases: list[Case], fields: dict[str, Any]) -> list[Completion]:
        async with self.engine(max_num_seqs=1, **fields) as engine:
            return [await engine.generate(*case) for case in cases]


@pytest.fixture(scope="module", params=["llama", "qwen3", "windows", "llama 8b", "llama fp8", "qwen3 int4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model of two families, one whose layers but the last have windows, and two layers of an 8B model's
    shapes with the configurations measured for them."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "llama":
            make_random_folder(folder, "llama")
            patch.setattr(tuning, "table_for", lambda gpu: SLICED_TABLE)
            yield Model(folder, 32_000, GROUPS)
        elif request.param == "qwen3":
            make_random_folder(folder, "qwen3", tie_word_embeddings=True)
            yield Model(folder, 32_000, GROUPS)
        elif request.param == "windows":
            layer_types = ["sliding_attention"] * 3 + ["full_attention"]
            windows = {"use_sliding_window": True, "sliding_window": 100, "layer_types": layer_types}
            make_random_folder(folder, "qwen3", tie_word_embeddings=True, **windows)
            yield Model(folder, 32_000, (1, 3, 16, 64))
        elif request.param == "llama fp8":
            make_random_folder(folder, "llama")
            yield Model(folder, 32_000, (1, 3, 16, 64), "fp8")
        elif request.param == "qwen3 int4":
            make_random_folder(folder, "qwen3", tie_word_embeddings=True)
            yield Model(folder, 32_000, (1, 3, 16, 64), "int4")
        else:
            make_random_folder(folder, "llama", **LLAMA_8B)
            yield Model(folder, 128_256, (1, 3, 16, 64))


class Sizes:
    """Records the numbers of rows and the chunk lengths of all steps of graph executors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decode: set[int] = set()
        self.chunks: set[int] = set()
        launch = GraphExecutor.launch

        def recording(executor: GraphExecutor, plan: Any) -> None:
            self.decode.add(len(plan.decode))
            self.chunks |= {len(chunk.token_ids) for chunk in plan.prefill}
            launch(executor, plan)

        monkeypatch.setattr(GraphExecutor, "launch", recording)

    @property
    def buckets(self) -> set[int]:
        return {next(size for size in BUCKETS if size >= number) for number in self.decode if number}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    return Sizes(monkeypatch)


async def at_once(engine: Engine, cases: Sequence[Case]) -> list[Completion]:
    """Submit all cases before the scheduler plans its next step."""
    await engine.pause()
    num_submitted = engine.stats().num_submitted
    streams = [engine.generate(*case) for case in cases]
    await until(lambda: engine.stats().num_submitted - num_submitted == engine.stats().num_waiting)
    await engine.resume()
    return [await stream for stream in streams]


async def in_groups(engine: Engine, cases: list[Case], groups: Sequence[int]) -> list[Completion]:
    left = iter(cases)
    return [completion for size in groups for completion in await at_once(engine, list(islice(left, size)))]


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Compare tokens and texts, and log-probabilities bit for bit."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.token_ids == other.token_ids, f"request {index}"
        assert one.logprobs == other.logprobs, f"request {index}"
        assert len(one.token_ids) == NUM_TOKENS and one.text == other.text


def test_requests_have_varied_answers(model: Model) -> None:
    """Otherwise equal answers would not show much: requests differ, and few answers repeat a token."""
    answers = [completion.token_ids for completion in model.exact_alone]
    assert len(set(answers)) > 0.9 * len(answers)
    assert sum(len(set(answer)) > NUM_TOKENS / 2 for answer in answers) > 0.8 * len(answers)


def test_batched_equals_alone(model: Model, sizes: Sizes) -> None:
    """In groups of every bucket, then all together with their prompts in the prefix cache."""

    async def main() -> None:
        async with model.engine() as engine:
            assert_same(await in_groups(engine, model.varied, model.groups), model.exact_alone)
            found = await at_once(engine, model.varied)
            assert_same(found, model.exact_alone)
            assert sum(completion.usage.cached_tokens for completion in found) > 1000

    expected = model.exact_alone
    assert len(expected) == sum(model.groups)
    sizes.decode.clear()
    anyio.run(main)
    assert sizes.buckets >= {1, 4, 16, 64}
    assert len(model.groups) < len(GROUPS) or sizes.buckets == set(BUCKETS)


def test_batched_equals_alone_with_fast_whole_prompts(
    model: Model, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fast prompts, each prompt is one prefill step, whatever other requests decode. Mixed steps
    compute chunks in decoding's order, so they are switched off."""
    monkeypatch.setattr(buckets, "MIXED_ROWS", ())
    expected = model.plain_alone
    sizes.decode.clear()
    sizes.chunks.clear()

    async def main() -> None:
        fields = {"fast_prompts": True, "prefill_token_budget": PROMPT, "prefer_high_throughput": True}
        async with model.engine(**fields) as engine:
            assert_same(await in_groups(engine, model.uniform, model.groups), expected)

    anyio.run(main)
    assert sizes.chunks == {PROMPT}
    assert sizes.buckets >= {1, 16, 32, 64}


@pytest.mark.parametrize(("budget", "kv_cache_tokens"), [(16, 32_768), (200, 768)])
def test_cut_cached_and_preempted_prompts(
    model: Model, sizes: Sizes, budget: int, kv_cache_tokens: int
) -> None:
    """The same requests twice: the second time prompts are in the cache if there was room."""
    cases, expected = model.varied[-60:], model.exact_alone[-60:]
    sizes.chunks.clear()

    async def main() -> None:
        fields = {"max_num_seqs": 16, "prefill_token_budget": budget, "kv_cache_tokens": kv_cache_tokens}
        async with model.engine(**fields) as engine:
            num_cached = 0
            for _ in range(2):
                found = await at_once(engine, cases)
                assert_same(found, expected)
                num_cached += sum(completion.usage.cached_tokens for completion in found)
            stats = engine.stats()
            # The small cache keeps no blocks of finished requests, and running requests are preempted.
            assert (num_cached > 0) == (kv_cache_tokens > 768)
            assert (stats.num_preemptions > 0) == (kv_cache_tokens == 768)
            assert stats.num_running == stats.num_waiting == 0

    anyio.run(main)
    assert max(sizes.chunks) <= budget and len(sizes.chunks) > 5


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_different_reduction_tree_is_detected(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in other slices give other bits, so the tests above can detect them."""
    expected = model.exact_alone[:6]
    monkeypatch.setattr(tuning, "num_slices", lambda num_columns, inner, *, is_whole: 1 if is_whole else 8)

    async def main() -> None:
        async with model.engine(max_num_seqs=1) as engine:
            found = [await engine.generate(*case) for case in model.varied[:6]]
        assert all(
            one.logprobs != each.logprobs for one, each in zip(found, expected, strict=True) if one.logprobs
        )

    anyio.run(main)
