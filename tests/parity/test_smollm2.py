"""A real model, end to end: text in, tokens and text out, equal to transformers on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch

from drift_sdk import Engine, EngineConfig, SamplingParams

EOS = (2,)
LENGTHS = [10, 12, 15, 19, 24, 30, 38, 48, 60, 76, 96, 120, 152, 192, 242, 306, 386, 486, 1000, 2000]
NUM_TOKENS = 24

CONFIG = EngineConfig(dtype="float32", device="cpu", kv_cache_tokens=16_384)


@torch.inference_mode()
def greedy_after(model, prompt: list[int], tokens: Sequence[int]) -> list[int]:
    """transformers' greedy choice after the prompt and after each of the tokens but the last: equal to the
    tokens themselves if and only if greedy decoding gives just them."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    logits = model(ids, use_cache=False, logits_to_keep=len(tokens)).logits
    return logits[0].argmax(-1).tolist()


@pytest.mark.timeout(600)
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
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == NUM_TOKENS or tokens[-1] in EOS
        assert list(tokens) == greedy_after(model, prompt, tokens), f"prompt of {len(prompt)} tokens"


def test_the_demo_names_paris(smollm2_file: Path, smollm2_reference) -> None:
    model, tokenizer = smollm2_reference
    messages = [{"role": "user", "content": "What is the capital of France?"}]

    async def main() -> None:
        async with Engine(smollm2_file, CONFIG) as engine:
            completion = await engine.chat(messages, SamplingParams(max_tokens=128))
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert completion.usage.prompt_tokens == len(prompt)
            assert list(completion.token_ids) == greedy_after(model, prompt, completion.token_ids)
            assert completion.token_ids[-1] in EOS
            assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            assert "Paris" in completion.text

    anyio.run(main)
