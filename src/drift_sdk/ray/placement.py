"""Placement: what an actor reserves of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

from drift_sdk._fields import check_fields
from drift_sdk._frozen_mapping import FrozenMapping
from drift_sdk._validation import check_float
from drift_sdk.errors import ConfigError

__all__ = ["Placement"]

MOST = 1e6


class Placement(Struct, frozen=True, kw_only=True):
    """Resources of a cluster that the actor of an engine reserves; a wrong value raises ConfigError.

    num_gpus:  0 to 1; less than 1 lets engines share a GPU (`EngineConfig.gpu_memory_fraction` must fit). The
               actor sees no other GPUs. None = none if the config's device is "cpu", else 1.
    num_cpus:  0 to 1,000,000.
    resources: resources of nodes that Ray knows by name, and how much of each, over 0 to 1,000,000.
    timeout_s: seconds, over 0 to 1,000,000, after which a start is given up that found no node.
    """

    num_gpus: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    num_cpus: Annotated[float, Meta(ge=0.0, le=MOST)] = 1.0
    resources: Mapping[str, float] = field(default_factory=lambda: FrozenMapping({}))
    timeout_s: Annotated[float, Meta(gt=0.0, le=MOST)] = 300.0

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)
        if not isinstance(self.resources, Mapping) or not all(
            isinstance(name, str) and name for name in self.resources
        ):
            raise ConfigError.of("resources", self.resources, "a mapping of names to numbers")

        for value in self.resources.values():
            check_float(ConfigError, "resources", value, gt=0.0, le=MOST)
        force_setattr(self, "resources", FrozenMapping(dict(self.resources)))
