"""The engine against transformers, on small random models of all families."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import torch
from model_zoo import NUM_MODELS, logprob_bound, make_model

from drift_sdk import Engine, EngineConfig, SamplingParams

NUM_TOKENS = 64


@torch.inference_mode()
def reference(model, prompt: list[int]) -> tuple[list[int], list[float], float]:
    """Greedy tokens, their log-probabilities, and the smallest gap between the best and second best token."""
    tokens = torch.tensor([prompt])
    found, logprobs, gap, cache = [], [], float("inf"), None
    for _ in range(NUM_TOKENS):
        output = model(tokens, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        scores = output.logits[0, -1].float().log_softmax(-1)
        best, second = scores.topk(2).values.tolist()
        gap = min(gap, best - second)
        token = int(scores.argmax())
        found.append(token)
        logprobs.append(float(scores[token]))
        tokens = torch.tensor([[token]])
    return found, logprobs, gap


def varied_prompts(model, tie_gap: float) -> list[tuple[list[int], list[int], list[float]]]:
    """Three prompts with transformers' tokens and log-probabilities, such that the output is no loop and
    contains no near tie, which rounding could decide either way."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for length in (1, 19, 70, 2, 33, 5, 64, 8, 90) * 4:
        prompt = torch.randint(3, model.config.vocab_size, (length,), generator=generator).tolist()
        tokens, logprobs, gap = reference(model, prompt)
        if len(set(tokens)) >= 16 and gap > tie_gap:
            found.append((prompt, tokens, logprobs))
        if len(found) == 3:
            return found

    raise AssertionError("too few prompts with a varied greedy output")


@pytest.mark.parametrize("index", range(NUM_MODELS))
def test_greedy_tokens_and_logprobs_equal_transformers(index: int, tmp_path: Path) -> None:
    model = make_model(index, tmp_path)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    config = EngineConfig(
        dtype="float32", device="cpu", prefill_token_budget=32, block_size=8, max_model_len=256
    )

    async def main() -> None:
        async with Engine(tmp_path, config) as engine:
            cases = varied_prompts(model, tie_gap=2 * logprob_bound(index))
            streams = [engine.generate(prompt, params) for prompt, _, _ in cases]
            for stream, (_, tokens, logprobs) in zip(streams, cases, strict=True):
                completion = await stream
                assert list(completion.token_ids) == tokens
                for entry, logprob in zip(completion.logprobs, logprobs, strict=True):
                    assert abs(entry.logprob - logprob) < logprob_bound(index)

    anyio.run(main)
