"""Engines with a KV cache of e4m3 on CUDA graphs: a request gets the same tokens and log-probabilities, to
the last bit, alone and in a batch, with prompts cut, cached and preempted, and with any drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from random_folder import make_random_draft_folder, make_random_folder

from drift_sdk import (
    Chain,
    Completion,
    DynamicTree,
    Engine,
    EngineConfig,
    NGram,
    SamplingParams,
    Speculation,
    StaticTree,
)
from drift_sdk.models import weights
from drift_sdk.models.kv_cache import KVForm, KVScales, kv_heads
from drift_sdk.spec.model import ModelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

VOCAB_SIZE = 8000
LENGTHS = (1, 2, 15, 17, 63, 64, 65, 130, 250, 700, 1300)
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
)
STATIC = StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]])
DYNAMIC = DynamicTree(top_k=4, depth=3, num_draft_tokens=11)

Case = tuple[list[int], SamplingParams]


def varied_scales(_tensors: object, _form: KVForm, spec: ModelSpec, device: torch.device) -> KVScales:
    """Scales that differ between layers and heads, and between keys and values."""
    sizes = spec.num_layers, max(kv_heads(spec).values())
    count = torch.arange(sizes[0] * sizes[1], device=device).view(sizes)
    return KVScales(0.01 * (1 + count / 7), 0.013 * (1 + count / 5))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A target and a draft."""
    folder = tmp_path_factory.mktemp("models")
    target = make_random_folder(folder / "target", "llama", vocab_size=VOCAB_SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "load_kv_scales", varied_scales)
        yield target, make_random_draft_folder(folder / "draft", target)


def engine_of(folders: tuple[Path, Path], speculation: Speculation | None = None, **fields: Any) -> Engine:
    settings: dict[str, Any] = {
        "device": "cuda",
        "executor": "graph",
        "load": "random",
        "dtype": "bfloat16",
        "kv_dtype": "fp8",
        "max_num_seqs": 32,
        "max_model_len": 1536,
        "prefill_token_budget": 512,
        "kv_cache_tokens": 32_768,
    }
    return Engine(folders[0], EngineConfig(**settings | fields, speculation=speculation))


def cases() -> list[Case]:
    rng = random.Random(3)
    return [
        (
            [rng.randrange(3, VOCAB_SIZE) for _ in range(LENGTHS[index % len(LENGTHS)])],
            SamplingParams(
                max_tokens=80,
                ignore_eos=True,
                seed=rng.randrange(2**62),
                logprobs=1,
                **WAYS[index % len(WAYS)],
            ),
        )
        for index in range(22)
    ]


async def at_once(engine: Engine, cases: Sequence[Case]) -> list[Completion]:
    streams = [engine.generate(*case) for case in cases]
    return [await stream for stream in streams]


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.token_ids == other.token_ids, f"request {index}"
        assert one.logprobs == other.logprobs, f"request {index}"


@pytest.fixture(scope="module")
def alone(folders: tuple[Path, Path]) -> list[Completion]:
    """The answers to requests one after the other, nothing of which is cached."""

    async def main() -> list[Completion]:
        async with engine_of(folders, max_num_seqs=1) as engine:
            return [await engine.generate(*case) for case in cases()]

    return anyio.run(main)


def test_batched_and_cached_equals_alone(folders: tuple[Path, Path], alone: list[Completion]) -> None:
    async def main() -> None:
        async with engine_of(folders) as engine:
            assert_same(await at_once(engine, cases()), alone)
            found = await at_once(engine, cases())
            assert_same(found, alone)
            assert sum(completion.usage.cached_tokens for completion in found) > 1000
            assert engine.stats().kv_dtype == "fp8"

    anyio.run(main)
    answers = [completion.token_ids for completion in alone]
    assert len(set(answers)) == len(answers)


@pytest.mark.parametrize(("budget", "block_size"), [(16, 64), (200, 16)])
def test_cut_and_preempted_prompts_equal_alone(
    folders: tuple[Path, Path], alone: list[Completion], budget: int, block_size: int
) -> None:
    sizes = {
        "max_num_seqs": 16,
        "max_model_len": 1408,
        "kv_cache_tokens": 1408,
        "block_size": block_size,
    }

    async def main() -> None:
        async with engine_of(folders, prefill_token_budget=budget, **sizes) as engine:
            assert_same(await at_once(engine, cases()), alone)
            assert engine.stats().num_preemptions > 0

    anyio.run(main)


@pytest.mark.parametrize(
    "shape", [Chain(3), STATIC, DYNAMIC, None], ids=["chain", "static", "dynamic", "ngram"]
)
def test_drafts_change_nothing(folders: tuple[Path, Path], alone: list[Completion], shape: Any) -> None:
    draft: Any = NGram() if shape is None else folders[1]
    speculation = Speculation(draft=draft, shape=shape or Chain(3), adaptive=False)

    async def main() -> None:
        async with engine_of(folders, speculation) as engine:
            assert_same(await at_once(engine, cases()), alone)
            assert engine.stats().num_drafted_tokens > 0

    anyio.run(main)


def test_decoding_beside_others_equals_alone_with_fast_prompts(folders: tuple[Path, Path]) -> None:
    """Prompts of one step each, which are computed by themselves."""
    same = [(tokens * 64, params) for tokens, params in cases() if len(tokens) == 1]
    prompts = [([n, *prompt[1:]], params) for n in range(4) for prompt, params in same]

    async def main() -> tuple[list[Completion], list[Completion]]:
        fields = {"fast_prompts": True, "prefill_token_budget": 64, "prefer_high_throughput": True}
        async with engine_of(folders, max_num_seqs=1, **fields) as engine:
            expected = [await engine.generate(*case) for case in prompts]
        async with engine_of(folders, **fields) as engine:
            await engine.pause()
            streams = [engine.generate(*case) for case in prompts]
            await engine.resume()
            return [await stream for stream in streams], expected

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drift_sdk.execution.graph.buckets.MIXED_ROWS", ())
        assert_same(*anyio.run(main))


def test_tokens_depend_on_kv_dtype_and_scales(folders: tuple[Path, Path], alone: list[Completion]) -> None:
    """The cache is rounded, with the scales that the model has."""

    async def main(**fields: Any) -> list[Completion]:
        async with engine_of(folders, max_num_seqs=1, **fields) as engine:
            return [await engine.generate(*case) for case in cases()[-6:]]

    found = [alone[-6:], anyio.run(lambda: main(kv_dtype=None))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            weights,
            "load_kv_scales",
            lambda *given: KVScales(*(torch.ones_like(varied_scales(*given).keys),) * 2),
        )
        found.append(anyio.run(main))
    for one in found:
        for other in found:
            assert one is other or [each.logprobs for each in one] != [each.logprobs for each in other]
