"""The number of experts that the rows of a round have, as the device counted them, and the weights that
decide it."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import Any

import torch

from drift_sdk import Engine
from drift_sdk.execution.forward.channels import take_counts
from drift_sdk.models.decoder import random_tensors
from drift_sdk.spec.model import experts_of
from perf.harness.decoding import DecodeOptions, generation_seconds
from perf.harness.scenario import Scenario
from perf.harness.shapes import EXPERTS, Model

__all__ = ["distinct_experts", "measured_experts", "write_routing_weights"]

POLL_S = 0.003
ROUTERS = (".router.", ".mlp.gate.", "norm.weight", "norm_1.weight", "norm_2.weight", ".layer_scalar")
"""Parts of the names of routers, norms and factors of layers."""


def distinct_experts(executor: Any, model: Model, num_rows: int) -> float | None:
    """The mean number of experts of a layer in the latest pass, over the layers in which it had `num_rows`
    rows; None if there is none. The device may be at work on a pass, whose later layers are then those of the
    pass before."""
    experts = model.spec.experts
    assert experts is not None
    # Read from private attributes: only measurements need to know.
    workspace = getattr(executor, "_executor", executor)._resources.workspace
    counts = take_counts(workspace, model.spec.num_layers, experts)[:, : experts.num_experts].cpu()
    used = [
        int((layer > 0).sum())
        for spec, layer in zip(model.spec.layers, counts, strict=True)
        if experts_of(spec.channel) is not None
        and int(layer.sum()) == num_rows * experts.num_active
        and int(layer.max()) <= num_rows
    ]
    return statistics.mean(used) if used else None


async def measured_experts(
    engine: Engine, model: Model, scenario: Scenario, options: DecodeOptions, num_drafts: int = 0
) -> float | None:
    """The mean number of experts of a layer that the rows of a round have: `num_drafts` + 1 of each sequence.

    A generation of its own, during which the device's counts are read. None for a model without experts, for
    the eager executor, and if no full round was seen.
    """
    if model.spec.experts is None or engine.executor != "graph":
        return None

    executor = engine._running_driver()._executor
    prompts = options.prompts(scenario, model.spec.vocab_size)
    generation = asyncio.ensure_future(
        generation_seconds(engine, prompts, options.lengths[1], options.params)
    )
    found: list[float] = []
    while not generation.done():
        await asyncio.sleep(POLL_S)
        distinct = distinct_experts(executor, model, scenario.batch * (num_drafts + 1))
        if distinct is not None:
            found.append(distinct)

    await generation
    return statistics.mean(found) if found else None


def write_routing_weights(model: Model, file: Path) -> None:
    """Write the random weights on which routing depends most, in bfloat16: embedding, norms, routers, and
    factors of whole layers.

    A peer that is given them has the engine's routers. They are drawn on the device on which the engine draws
    them, because generators of devices differ.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = random_tensors(model.spec, device=device, dtype=torch.bfloat16)
    names = [
        name
        for name in tensors.names()
        if EXPERTS not in name
        and (name == model.spec.names.embedding or any(part in name for part in ROUTERS))
    ]
    torch.save({name: tensors.get(name).cpu() for name in names}, file)
