"""Routing: settings of a pool."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from drift_sdk._fields import check_fields
from drift_sdk._keywords import ConfigFields
from drift_sdk.errors import ConfigError

__all__ = ["Routing"]


class Routing(Struct, frozen=True, kw_only=True, metaclass=ConfigFields):
    """Settings of an `EnginePool`. The fields are checked when it is made: a wrong value raises ConfigError.

    affinity: a request goes to the replica that has computed the longest beginning of its prompt, while the
              live tokens of that replica are at most 4,096, or at most so many times those of the least
              loaded replica, 1 to 1,000,000; else to the least loaded one. None = always to the least loaded
              one.
    replay:   a request whose replica has failed after its stream got tokens is run again on another replica,
              and the stream goes on where it was; False = the stream raises ReplicaFailed. The replicas must
              be of one kind: starting raises ConfigError if GPU, versions, tuned table or config differ.
    """

    affinity: Annotated[float, Meta(ge=1.0, le=1e6)] | None = 2.0
    replay: bool = False

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)
