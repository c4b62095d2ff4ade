"""The engine against transformers, on small random models of all families."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
from model_zoo import KINDS, NUM_MODELS, logprob_bound, make_model
from slow_cases import slow_after

from drift_sdk import Completion, Engine, EngineConfig, SamplingParams

NUM_TOKENS = 64
FIRST = [*{config_class: index for index, (config_class, *_) in reversed([*enumerate(KINDS)])}.values()]
"""The first model of each family."""


@torch.inference_mode()
def reference(model, prompt: list[int], tokens: Sequence[int]) -> torch.Tensor:
    """transformers' log-probabilities [NUM_TOKENS, V] after the prompt and all tokens but the last."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    return model(ids, logits_to_keep=len(tokens)).logits[0].float().log_softmax(-1)


def compare(model, prompt: list[int], found: Completion, bound: float) -> bool:
    """Compare tokens and log-probabilities with transformers up to the first near tie, which rounding could
    decide either way. True if there is none, and the output is no loop."""
    tokens = found.token_ids
    assert len(tokens) == NUM_TOKENS
    for token, entry, scores in zip(tokens, found.logprobs, reference(model, prompt, tokens), strict=True):
        (best, second), choices = scores.topk(2)
        if best - second <= 2 * bound:
            return False

        assert token == entry.token_id == choices[0]
        assert abs(entry.logprob - best) < bound
    return len(set(tokens)) >= 16


@pytest.mark.parametrize("index", slow_after(len(FIRST), [*FIRST, *sorted({*range(NUM_MODELS)} - {*FIRST})]))
def test_greedy_tokens_and_logprobs_equal_transformers(index: int, tmp_path: Path) -> None:
    model = make_model(index, tmp_path)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    config = EngineConfig(
        dtype="float32", device="cpu", prefill_token_budget=32, block_size=8, max_model_len=256
    )
    generator = torch.Generator().manual_seed(7)

    def drawn(length: int) -> list[int]:
        return torch.randint(3, model.config.vocab_size, (length,), generator=generator).tolist()

    async def main() -> int:
        num_compared = 0
        async with Engine(tmp_path, config) as engine:
            for lengths in ((1, 19, 70), (2, 33, 5), (64, 8, 90)) * 4:
                prompts = [drawn(length) for length in lengths]
                streams = [engine.generate(prompt, params) for prompt in prompts]
                for prompt, stream in zip(prompts, streams, strict=True):
                    num_compared += compare(model, prompt, await stream, logprob_bound(index))
                if num_compared >= 3:
                    break
        return num_compared

    assert anyio.run(main) >= 3, "too few prompts with a varied greedy output"
