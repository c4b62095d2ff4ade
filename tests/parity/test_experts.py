"""Engines of models with experts: transformers' tokens, whatever else runs and however prompts are divided.

On a CPU the bits of a row depend on the other rows. A near tie between tokens, or between the last expert
that is chosen and the next one, could be decided either way, so prompts are chosen that lead to none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from expert_zoo import EXPERT_MODELS, make_expert_model, quantise_folder
from tolerances import bound

from drift_sdk import Chain, Engine, EngineConfig, NGram, SamplingParams, Speculation

NUM_TOKENS = 64
LENGTHS = (2, 35)
"""Half the tokens of prompts. The windows have 2 to 20 keys."""

LOGPROB_BOUND = bound(16.0, inner=96, depth=5)
ROUTING_BOUND = bound(8.0, inner=64, depth=6)


def watch_routing(model: Any) -> list[float]:
    """A list that takes, for each call of a router, the least lead of a last chosen expert over the next."""
    leads: list[float] = []

    def watch(router: Any, _: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        ranked = outputs[0].sort(dim=1, descending=True).values
        leads.append(float((ranked[:, router.top_k - 1] - ranked[:, router.top_k]).min()))

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(watch)
    return leads


@torch.inference_mode()
def generate(model: Any, prompt: list[int]) -> tuple[list[int], list[float], float]:
    """transformers' greedy tokens, their log-probabilities, and the smallest lead over the second best."""
    tokens, cache = torch.tensor([prompt]), None
    found, logprobs, lead = [], [], float("inf")
    for _ in range(NUM_TOKENS):
        output = model(tokens, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best, second = output.logits[0, -1].log_softmax(-1).topk(2).values.tolist()
        found.append(int(output.logits[0, -1].argmax()))
        logprobs.append(best)
        lead = min(lead, best - second)
        tokens = torch.tensor([[found[-1]]])
    return found, logprobs, lead


def clear_cases(model: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts with transformers' tokens and log-probabilities, without a near tie.

    The second half of a prompt repeats the first, so that n-grams occur.
    """
    generator = torch.Generator().manual_seed(11)
    routing_leads = watch_routing(model)
    cases = []
    for length in LENGTHS:
        for _ in range(16):
            half = torch.randint(3, model.config.vocab_size, (length,), generator=generator).tolist()
            routing_leads.clear()
            tokens, logprobs, lead = generate(model, half * 2)
            is_clear = lead > 2 * LOGPROB_BOUND and min(routing_leads) > 2 * ROUTING_BOUND
            if is_clear and len(set(tokens)) > 8:
                cases.append((half * 2, tokens, logprobs))
                break
    assert len(cases) == len(LENGTHS), "too few prompts without a near tie"
    return cases


@pytest.mark.parametrize("name", [*EXPERT_MODELS, "mxfp4"])
def test_tokens_equal_transformers_alone_and_together(name: str, tmp_path: Path) -> None:
    """Alone; then all at once, in small chunks, with drafts and cached prefixes."""
    model = make_expert_model("gpt_oss" if name == "mxfp4" else name, tmp_path)
    folder = tmp_path
    if name == "mxfp4":
        folder = tmp_path / "mxfp4"
        quantise_folder(model, tmp_path, folder)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    cases = clear_cases(model)
    config = {"dtype": "float32", "device": "cpu", "max_model_len": 256}

    async def main() -> None:
        async with Engine(folder, EngineConfig(**config, max_num_seqs=1)) as engine:
            for prompt, tokens, logprobs in cases:
                completion = await engine.generate(prompt, params)
                assert list(completion.token_ids) == tokens
                for entry, logprob in zip(completion.logprobs, logprobs, strict=True):
                    assert abs(entry.logprob - logprob) < LOGPROB_BOUND

        drafts = Speculation(draft=NGram(min_length=1), shape=Chain(3), adaptive=False)
        together = EngineConfig(**config, prefill_token_budget=16, block_size=8, speculation=drafts)
        async with Engine(folder, together) as engine:
            streams = [engine.generate(prompt, params) for prompt, _, _ in cases]
            completions = [await stream for stream in streams]
        assert [list(completion.token_ids) for completion in completions] == [
            tokens for _, tokens, _ in cases
        ]
        assert sum(completion.speculation.num_drafted for completion in completions) > 0

    anyio.run(main)
