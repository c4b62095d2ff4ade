"""Writing a model of random weights as a checkpoint, as its publisher would."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from torch import Tensor

from drift_sdk.loading.random import RandomTensors
from drift_sdk.loading.safetensors import INDEX_FILE
from drift_sdk.models.weights import tensor_shapes
from perf.harness.shapes import Model

__all__ = ["write_checkpoint"]

QUANTISED_PARTS = ("_blocks", "_scales")
SHARD_BYTES = 2**32
EMBEDDING_DEVIATION = 2.0
"""Standard deviation of an embedding's elements. The output of a layer has one of about 1, so that the
embedding remains a large part of the residual stream."""
GROUP_LOGIT = 4.0
"""Logit of a router for the experts of a token's group, in the first layer."""
ROUTER_NOISE = 0.5
"""Factor of the random part of routers: the standard deviation of the logits that it adds."""


def write_checkpoint(model: Model, device: str, head_gain: float) -> None:
    """Write the random weights of a model into its folder, in bfloat16 and MXFP4.

    device: on which they are drawn. head_gain: a factor of the head, a power of two. The logits of random
    weights have a standard deviation of about 1, and their largest ones lie close together; the factor sets
    them apart. Routers of a mixture of experts are made to choose by a wide margin; see `ExpertGroups`.
    Raises ValueError for a model that has weights.
    """
    if model.load != "random":
        raise ValueError(f"{model.path}: expected a model with random weights: its files would be replaced")

    shapes = tensor_shapes(model.spec)
    source = RandomTensors(shapes, device=torch.device(device), dtype=torch.bfloat16, seed=0)
    groups = ExpertGroups(model, device) if model.spec.experts is not None else None
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def write() -> None:
        file = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(shard, model.path / file)
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        dtype = torch.uint8 if name.endswith(QUANTISED_PARTS) else torch.bfloat16
        tensor = torch.empty(shape, dtype=dtype, device=device)
        source.read_into(name, tensor)
        if groups is not None:
            tensor = groups.applied(name, tensor)
        if name == model.spec.names.head:
            tensor *= head_gain
        shard[name] = tensor.cpu()
        if sum(each.nbytes for each in shard.values()) >= SHARD_BYTES:
            write()
    if shard:
        write()
    (model.path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))


class ExpertGroups:
    """Groups of experts that routers choose together: as many in each as compute a row.

    A router of random weights often prefers its last chosen expert by less than a computation in bfloat16
    errs, and each other choice leads to more of them. So each group has a direction, orthogonal to the
    others, which is part of the embeddings of its tokens and of the rows of its experts in every router;
    token t belongs to group t modulo their number, and each layer assigns other experts to a group. The head
    sees nothing of the directions, so that logits depend on what the layers compute.
    """

    def __init__(self, model: Model, device: str) -> None:
        experts = model.spec.experts
        assert experts is not None
        self._names = model.spec.names
        self._router = f".{self._names.experts.router}.weight"
        self._num_active = experts.num_active
        generator = torch.Generator(device).manual_seed(0)
        size = model.spec.hidden_size, experts.num_experts // experts.num_active
        numbers = torch.randn(size, generator=generator, device=device)
        self._directions: Tensor = torch.linalg.qr(numbers).Q.T.contiguous()  # [groups, hidden], of length 1

    def applied(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the model, with the directions added to the embedding and routers, and removed from the
        head; other tensors are unchanged."""
        num_groups, hidden = self._directions.shape
        if name == self._names.embedding:
            scale = EMBEDDING_DEVIATION * hidden**0.5
            group = torch.arange(len(tensor), device=tensor.device) % num_groups
            changed: Tensor = scale * (tensor + self._directions[group])
        elif name == self._names.head:
            changed = tensor - tensor.float() @ self._directions.T @ self._directions
        elif name.endswith(self._router):
            # A normalised row has half of its square in its direction.
            signal = GROUP_LOGIT * (2 / hidden) ** 0.5
            layer = int(name.split(".layers.")[1].split(".")[0])
            experts = torch.arange(len(tensor), device=tensor.device)
            group = (experts // self._num_active + layer) % num_groups
            changed = ROUTER_NOISE * tensor + signal * self._directions[group]
        else:
            changed = tensor
        return changed.to(tensor.dtype)
