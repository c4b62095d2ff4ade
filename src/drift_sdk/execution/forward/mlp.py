"""The MLP of a forward pass."""

from __future__ import annotations

from torch import Tensor

from drift_sdk._kernels.exchange.peer_memory import PeerSums
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.products import Products
from drift_sdk.models.channels.mlp import MlpWeights
from drift_sdk.spec.model import Mlp

__all__ = ["MlpForward", "take_activated"]


class MlpForward:
    """Kernels that compute the MLP of R rows in a layer."""

    def __init__(self, normed: Tensor, workspace: Workspace, products: Products) -> None:
        """normed [R, hidden]: the rows that `run` reads."""
        self._normed, self._workspace, self._products = normed, workspace, products

    def run(self, weights: MlpWeights, spec: Mlp, index: int) -> tuple[Tensor | PeerSums, Tensor | None]:
        """The output in layer `index`, as `Products` return it."""
        activated = take_activated(self._workspace, self._normed, spec)
        products = self._products
        products.activate(self._normed, weights.gate_up, weights.gate_up_bias, spec.activation, activated)
        return products.multiply_down(activated, weights.down, weights.down_bias, 2 * index + 1)


def take_activated(workspace: Workspace, normed: Tensor, spec: Mlp) -> Tensor:
    """A buffer [R, intermediate] for the gated activation of rows [R, hidden]."""
    return workspace.take("activated", (normed.shape[0], spec.intermediate_size), normed.dtype)
