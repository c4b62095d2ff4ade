"""Eager engines with a KV cache of e4m3: the same tokens alone and in a batch, from a prefix cache, after
preemption, and with drafts."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from draft_zoo import make_draft
from model_zoo import make_model
from near_ties import no_near_ties
from safetensors.torch import load_file, save_file

from drift_sdk import (
    Chain,
    Completion,
    Engine,
    EngineConfig,
    NGram,
    SamplingParams,
    Speculation,
    StaticTree,
    inspect,
)

TIE_BOUND = 0.003
"""The largest difference of logits that counts as a tie. A key between two codes may be rounded to either, by
the last bits of a product's sum."""
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
CONFIG = EngineConfig(device="cpu", dtype="float32", kv_dtype="fp8", kv_cache_tokens=1024, max_model_len=128)


LLAMA, GEMMA4 = 1, 33
"""Models of the zoo. The second has heads of two sizes, windows, and layers with the keys of others."""


@pytest.fixture(scope="module", params=[LLAMA, GEMMA4], ids=["llama", "gemma4"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model whose files have scales, and a draft of it."""
    root = tmp_path_factory.mktemp("models")
    make_model(request.param, root / "model")
    config = json.loads((root / "model/config.json").read_text())
    tensors = load_file(root / "model/model.safetensors")
    for layer in range(config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)):
        for number, part in enumerate(("k_scale", "v_scale")):
            tensors[f"model.layers.{layer}.self_attn.{part}"] = torch.tensor(
                [0.01 * (1 + layer + 2 * number)]
            )
    save_file(tensors, root / "model/model.safetensors")
    settings = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    }
    (root / "model/config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    make_draft("specforge", root / "draft", root / "model")
    return root


def cases() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 400) for _ in range(32)]
    return [
        (
            [*shared[: 32 * (index % 2)], *(rng.randrange(3, 400) for _ in range(3 + 5 * index))],
            SamplingParams(
                max_tokens=16, temperature=0.8 * (index % 3), seed=index, ignore_eos=True, logprobs=0
            ),
        )
        for index in range(5)
    ]


async def at_once(engine: Engine) -> list[Completion]:
    streams = [engine.generate(*case) for case in cases()]
    return [await stream for stream in streams]


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def answers(folder: Path, **fields: Any) -> list[list[Completion]]:
    """The answers to all requests at once, twice."""

    async def main() -> list[list[Completion]]:
        async with Engine(folder / "model", CONFIG.replace(**fields)) as engine:
            return [await at_once(engine) for _ in range(2)]

    return anyio.run(main)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Completion]:
    async def main() -> list[Completion]:
        found = []
        for case in cases():
            async with Engine(folder / "model", CONFIG) as engine:
                found.append(await engine.generate(*case))
        return found

    with no_near_ties(TIE_BOUND):
        return anyio.run(main)


@pytest.mark.parametrize("fields", [{}, {"kv_cache_tokens": 160, "prefill_token_budget": 11}], ids=str)
def test_batched_cached_and_preempted_requests_have_their_tokens(
    folder: Path, alone: list[Completion], fields: dict[str, Any]
) -> None:
    first, second = answers(folder, **fields)
    assert tokens_of(first) == tokens_of(second) == tokens_of(alone)
    assert sum(completion.usage.cached_tokens for completion in second) > 0


@pytest.mark.parametrize("shape", [Chain(3), TREE, None], ids=["chain", "tree", "ngram"])
def test_drafts_change_nothing(folder: Path, alone: list[Completion], shape: Any) -> None:
    draft: Any = NGram() if shape is None else folder / "draft"
    speculation = Speculation(draft=draft, shape=shape or Chain(3), adaptive=False)
    first, second = answers(folder, speculation=speculation)
    assert tokens_of(first) == tokens_of(second) == tokens_of(alone)


def test_cache_is_rounded(folder: Path, alone: list[Completion]) -> None:
    first, _ = answers(folder, kv_dtype=None)
    wide, narrow = ([completion.logprobs[1].logprob for completion in each] for each in (first, alone))
    assert all(abs(one - other) > 1e-4 for one, other in zip(wide, narrow, strict=True))


def test_cache_holds_four_times_the_tokens_of_float32(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = CONFIG.replace(kv_cache_tokens=None)
    wide, narrow = (inspect(folder / "model", config.replace(kv_dtype=kind)) for kind in (None, "fp8"))
    assert (wide.kv_dtype, narrow.kv_dtype) == ("float32", "fp8")
    assert wide.kv_bytes_per_token == 4 * (narrow.kv_bytes_per_token or 0)
    assert "fp8, " in narrow.text()

    async def main() -> None:
        with caplog.at_level(logging.INFO, logger="drift_sdk"):
            async with Engine(folder / "model", CONFIG) as engine:
                assert engine.stats().kv_dtype == "fp8"

    anyio.run(main)
    assert "KV cache: 1024 tokens in fp8, " in caplog.text
