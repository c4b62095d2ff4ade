"""Routing of vLLM's experts: the weights on which it depends, and counts of the experts.

vLLM sends these functions to its worker by value: they refer to nothing of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import Any

__all__ = ["copying", "counted_passes", "counting", "distinct_tokens", "mean_experts"]

OTHER_NAMES = {"model.embed_tokens.weight": "model.embedding.weight"}
"""vLLM's names of tensors where some of its models differ from files."""


def copying(file: str) -> Callable[[Any], list[str]]:
    """A function that gives a model weights that spread its routing, and returns the names that it lacks.

    It copies the tensors of a file, the engine's embedding, norms, routers and factors of layers, and removes
    the biases of attention.

    vLLM's dummy weights lie within 1e-3 of 0 and are the same in every layer. Attention and experts add so
    little with them that a hidden state depends on its token alone, which spreads the experts of rows with
    distinct tokens. But the biases of attention's output add up over the layers to one direction, as large as
    the embedding of a token. It leads most tokens to the same next one, and soon all sequences have the same
    tokens and the same experts.

    Distinct experts of 128, 4 a row, in 36 layers: in a simulation with random tokens and in this engine
    (gpt-oss-120b, measured).

        rows                                     dummies   without biases   this engine
        eight sequences                              4.3             28.6          28.4
        one sequence, a token and three drafts      14.1             15.2          14.7
        four sequences with three drafts each       40.1             50.8          49.0

    Attention's matrices at this engine's scale spread sequences too (28.8), but not the rows of one sequence
    (5.0), because without the experts' share its context decides. The engine's head without the rest does not
    suffice (11.4). Models without biases (Qwen3) are spread as they are.
    """
    others = dict(OTHER_NAMES)

    def copy(model: Any) -> list[str]:
        import torch

        # The decoder may be a part of a model that reads images too.
        named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        parameters = {name.removeprefix("language_model."): place for name, place in named.items()}
        missing = []
        for name, tensor in torch.load(file, map_location="cpu", mmap=True).items():
            place = parameters.get(name, parameters.get(others.get(name, "")))
            if place is None:
                missing.append(name)
                continue

            # An embedding may have rows of padding.
            place.data[tuple(slice(size) for size in tensor.shape)].copy_(tensor)

        for name, place in parameters.items():
            if "attn." in name and name.endswith(".bias"):
                place.data.zero_()
        return missing

    return copy


def counting(num_active: int) -> Callable[[Any], int]:
    """A function that makes a model count the experts of each pass, and returns the number of its routers.

    `num_active`: experts of a row. They are those with the largest outputs of the router. A model that is
    compiled or runs from graphs counts nothing.

    vLLM's own record of routed experts (enable_return_routed_experts) is 0 everywhere if a kernel both
    chooses and computes experts, as that for MXFP4 weights on a GPU of compute capability 9.0 does.
    """

    def count(model: Any) -> int:
        passes: list[tuple[int, int]] = []

        def note(module: Any, inputs: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            experts = logits.topk(num_active, dim=-1).indices
            passes.append((len(logits), len(experts.unique())))

        routers = [
            module for name, module in model.named_modules() if name.endswith((".router", ".mlp.gate"))
        ]
        for router in routers:
            router.register_forward_hook(note)
        model.counted_passes = passes
        return len(routers)

    return count


def counted_passes() -> Callable[[Any], list[tuple[int, int]]]:
    """A function that returns what a model has counted since the last call: rows and distinct experts of each
    pass through a router."""

    def take(model: Any) -> list[tuple[int, int]]:
        passes = list(model.counted_passes)
        model.counted_passes.clear()
        return passes

    return take


def mean_experts(passes: Iterable[Sequence[int]], num_rows: int) -> float | None:
    """The mean number of distinct experts in passes of `num_rows` rows; None if there is none."""
    found = [num_experts for rows, num_experts in passes if rows == num_rows]
    return mean(found) if found else None


def distinct_tokens(answers: Sequence[Sequence[int]], start: int) -> float:
    """The mean number of distinct tokens of all answers at a place, from place `start` on."""
    return mean(len(set(tokens)) for tokens in zip(*(answer[start:] for answer in answers), strict=True))
