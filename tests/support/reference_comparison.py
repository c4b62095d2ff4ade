"""Answers of engines beside transformers' log-probabilities of the same tokens, on a GPU."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import torch
from torch import Tensor

from drift_sdk import Completion, Engine, EngineConfig, SamplingParams

__all__ = ["Comparison", "ask_all", "compare", "graph_config", "in_bfloat16", "joined", "random_prompts"]


def graph_config(**fields: Any) -> EngineConfig:
    fields = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_tokens": 2048} | fields
    return EngineConfig(device="cuda", executor="graph", **fields)


@torch.inference_mode()
def scores_after(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """transformers' log-probabilities before each of the tokens, [len(tokens), vocab] float32."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.float().log_softmax(-1)


def in_bfloat16(model: Any) -> Any:
    """A copy with bfloat16 weights; the rotation frequencies keep their type."""
    rough = copy.deepcopy(model)
    for parameter in rough.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return rough


class Comparison(NamedTuple):
    """Differences from transformers in float32 at each generated position.

    regret: log-probability of transformers' best token minus that of the chosen token. error: error of the
    chosen token's log-probability. reference_error: the same error of transformers in bfloat16.
    """

    regret: Tensor
    error: Tensor
    reference_error: Tensor


def compare(exact: Any, rough: Any, prompt: Sequence[int], completion: Completion) -> Comparison:
    tokens = torch.tensor(completion.token_ids, device="cuda")[:, None]
    scores = scores_after(exact, prompt, completion.token_ids)
    chosen = scores.gather(1, tokens)[:, 0]
    assert completion.logprobs is not None
    found = torch.tensor([entry.logprob for entry in completion.logprobs], device="cuda")
    rough_chosen = scores_after(rough, prompt, completion.token_ids).gather(1, tokens)[:, 0]
    regret = scores.max(-1).values - chosen
    return Comparison(regret, (found - chosen).abs(), (rough_chosen - chosen).abs())


def joined(comparisons: list[Comparison]) -> Comparison:
    return Comparison(*(torch.cat(parts) for parts in zip(*comparisons, strict=True)))


def ask_all(
    model: str | Path, config: EngineConfig, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Completion]:
    async def main() -> list[Completion]:
        async with Engine(model, config) as engine:
            streams = [engine.generate(prompt, params) for prompt in prompts]
            return [await stream for stream in streams]

    return anyio.run(main)


def random_prompts(index: int) -> list[list[int]]:
    rng = random.Random(index)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in (1, 19, 70)]
