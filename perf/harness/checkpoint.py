"""Writing a model of random weights as a checkpoint, as its publisher would."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from drift_sdk.loading.random import RandomTensors
from drift_sdk.loading.safetensors import INDEX_FILE
from drift_sdk.models.weights import HEAD, tensor_shapes
from perf.harness.shapes import Model

__all__ = ["write_checkpoint"]

QUANTISED_PARTS = ("_blocks", "_scales")
SHARD_BYTES = 2**32


def write_checkpoint(model: Model, device: str, head_gain: float) -> None:
    """Write the random weights of a model into its folder, in bfloat16 and MXFP4.

    device: on which they are drawn. head_gain: a factor of the head, a power of two. The logits of random
    weights have a standard deviation of about 1, and their largest ones lie close together; the factor sets
    them apart.
    """
    shapes = tensor_shapes(model.config)
    source = RandomTensors(shapes, device=torch.device(device), dtype=torch.bfloat16, seed=0)
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write() -> None:
        file = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(shard, model.path / file)
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        dtype = torch.uint8 if name.endswith(QUANTISED_PARTS) else torch.bfloat16
        tensor = torch.empty(shape, dtype=dtype, device=device)
        source.read_into(name, tensor)
        if name == HEAD:
            tensor *= head_gain
        shard[name] = tensor.cpu()
        if sum(each.nbytes for each in shard.values()) >= SHARD_BYTES:
            write()
    if shard:
        write()
    (model.path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
