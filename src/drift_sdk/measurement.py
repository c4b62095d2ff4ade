"""Speculative decoding at any acceptance, to measure what it costs.

    engine = simulated_engine(folder, config, acceptance_length=3.2)

How fast an engine speculates hangs on how many of its drafts are right, of which random weights say nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from drift_sdk.config import EngineConfig
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError
from drift_sdk.opened_model import OpenedModel
from drift_sdk.validation import check_float

__all__ = ["simulated_engine"]

log = logging.getLogger("drift_sdk")


def simulated_engine(model: str | Path, config: EngineConfig, *, acceptance_length: float) -> Engine:
    """An engine for measuring alone: WHAT IT GENERATES IS NOT THE MODEL'S.

    Drafts are made and verified as ever, but not compared: as many are taken for right as make rounds of
    `acceptance_length` tokens in the mean, the model's own included, with the least variance (3.2: three
    tokens, or four in one round of five). It is from 1 to the shape's num_draft_tokens + 1. A round with
    fewer drafts than that, by the policy's choice or for want of a proposal, takes all it has.

    config: with speculation and executor="graph", whose rounds alone can be simulated. Raises ConfigError.
    """
    return SimulatedEngine(model, config, acceptance_length)


class SimulatedEngine(Engine):
    """An `Engine` that opens its model with a simulated acceptance."""

    def __init__(self, model: str | Path, config: EngineConfig, acceptance_length: float) -> None:
        super().__init__(model, config)
        if self.config.executor != "graph":
            raise ConfigError.of("executor", self.config.executor, '"graph" to simulate acceptance')

        speculation = self.config.speculation
        if speculation is None:
            raise ConfigError.of("speculation", None, "a Speculation whose acceptance to simulate")

        most = speculation.shape.num_draft_tokens + 1
        check_float(ConfigError, "acceptance_length", acceptance_length, ge=1, le=most)
        log.warning(
            "acceptance is simulated at %g tokens a round: what this engine generates is not the model's",
            acceptance_length,
        )
        self._open = partial(open_simulated, model, self.config, float(acceptance_length))


def open_simulated(
    model: str | Path, config: EngineConfig, acceptance_length: float, report: Callable[[str, float], None]
) -> OpenedModel:
    # Imported here, on the engine's thread, for it loads torch.
    from drift_sdk.opening import open_model

    return open_model(model, config, report, acceptance_length)
