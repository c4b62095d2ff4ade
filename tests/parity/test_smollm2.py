"""A real model through the whole engine, against transformers on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
from tolerances import tie_gap

from drift_sdk import Engine, EngineConfig, SamplingParams

EOS = (2,)
LENGTHS = [10, 60, 500]
NUM_TOKENS = 24

CONFIG = EngineConfig(dtype="float32", device="cpu", kv_cache_tokens=16_384)


@torch.inference_mode()
def num_near_ties(model, prompt: list[int], tokens: Sequence[int]) -> int:
    """The number of tokens that differ from transformers' greedy choice after the same tokens. AssertionError
    if such a token is no near tie with that choice."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    logits = model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].float()
    config = model.config
    gap = tie_gap(logits, inner=config.intermediate_size, depth=config.num_hidden_layers + 1)
    behind = logits.max(-1).values - logits[torch.arange(len(tokens)), list(tokens)]
    assert behind.max() <= min(gap, 0.05), f"{behind.max():.3g} behind: a near tie is at most {gap:.3g}"
    return int((behind > 0).sum())


@pytest.mark.slow
def test_greedy_tokens_equal_transformers(smollm2_file: Path, smollm2_reference) -> None:
    model, tokenizer = smollm2_reference
    text = Path(torch.nn.__file__).parent.joinpath("functional.py").read_text()[:40_000]
    ids = tokenizer(text).input_ids
    prompts = [ids[7 * index : 7 * index + length] for index, length in enumerate(LENGTHS)]

    async def main() -> list[tuple[int, ...]]:
        async with Engine(smollm2_file, CONFIG) as engine:
            streams = [engine.generate(prompt, SamplingParams(max_tokens=NUM_TOKENS)) for prompt in prompts]
            return [(await stream).token_ids for stream in streams]

    found = anyio.run(main)
    num_ties = 0
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == NUM_TOKENS or tokens[-1] in EOS
        num_ties += num_near_ties(model, prompt, tokens)
    assert num_ties <= sum(map(len, found)) // 100


@pytest.mark.slow
def test_chat_answers_paris(smollm2_file: Path, smollm2_reference) -> None:
    model, tokenizer = smollm2_reference
    messages = [{"role": "user", "content": "What is the capital of France?"}]

    async def main() -> None:
        async with Engine(smollm2_file, CONFIG) as engine:
            completion = await engine.chat(messages, SamplingParams(max_tokens=128))
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert completion.usage.prompt_tokens == len(prompt)
            assert num_near_ties(model, prompt, list(completion.token_ids)) <= 1
            assert completion.token_ids[-1] in EOS
            assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            assert "Paris" in completion.text

    anyio.run(main)
