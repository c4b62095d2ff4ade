"""Prompts for models with experts, with the tokens that transformers generates from them.

A near tie between tokens, or between the last expert that is chosen for a row and the next one, could be
decided either way by rounding, so prompts are chosen that lead to none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from expert_zoo import QUANTISED, make_expert_model, quantise_folder
from tolerances import bound

from perf.peers.transformers import cache_parameter

__all__ = ["LOGPROB_BOUND", "NUM_TOKENS", "clear_cases", "make_folder"]

NUM_TOKENS = 64
LENGTHS = (2, 35)
"""Half the tokens of prompts. The windows have 2 to 20 keys."""

LOGPROB_BOUND = bound(16.0, inner=96, depth=5)
ROUTING_BOUND = bound(8.0, inner=64, depth=6)


def make_folder(name: str, folder: Path) -> tuple[Any, Path]:
    """A model of the zoo, or "mxfp4" for the one with quantised experts, and its folder."""
    model = make_expert_model(QUANTISED if name == "mxfp4" else name, folder)
    if name != "mxfp4":
        return model, folder

    quantise_folder(model, folder, folder / "mxfp4")
    return model, folder / "mxfp4"


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
    tokens, cache, name = torch.tensor([prompt], device=model.device), None, cache_parameter(model)
    found, logprobs, lead = [], [], float("inf")
    for _ in range(NUM_TOKENS):
        output = model(tokens, **{name: cache}, use_cache=True)
        cache = output[name]
        best, second = output.logits[0, -1].log_softmax(-1).topk(2).values.tolist()
        found.append(int(output.logits[0, -1].argmax()))
        logprobs.append(best)
        lead = min(lead, best - second)
        tokens = torch.tensor([[found[-1]]], device=model.device)
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
