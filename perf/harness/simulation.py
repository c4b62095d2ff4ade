"""Engines with simulated acceptance of drafts.

The speed of speculative decoding depends on how many drafts are right, which random weights tell nothing
about. So acceptance can be simulated, by a mean or by a recorded trace:

    engine = simulated_engine(folder, config, acceptance=3.2)

    engine = recorded_engine(folder, config)
    ...
    engine.rounds.trace().save("trace.json")
    again = simulated_engine(folder, config, acceptance=AcceptanceTrace.load("trace.json").lengths)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drift_sdk import Chain, ConfigError, EngineConfig
from drift_sdk.execution.device.stages import Acceptance, AcceptanceFactory
from drift_sdk.measurement import AcceptanceTrace, RecordedEngine, check_graphs

if TYPE_CHECKING:
    import torch

__all__ = ["acceptance_of", "checked_acceptance", "simulated_engine"]

log = logging.getLogger(__name__)


def acceptance_of(acceptance: float | Sequence[int]) -> AcceptanceFactory:
    """Accept as many drafts as make rounds of `acceptance` tokens, see `simulated_engine`."""
    trace = AcceptanceTrace.of(acceptance)

    def make(num_slots: int, device: torch.device) -> Acceptance:
        # Imported on the engine's thread, because it loads Triton.
        from perf.harness.simulated_acceptance import SimulatedAcceptance

        return SimulatedAcceptance(trace.lengths, num_slots, device)

    return make


def checked_acceptance(config: EngineConfig, acceptance: float | Sequence[int]) -> AcceptanceFactory:
    """`acceptance_of`, for an executor of this configuration. Raises ConfigError as `simulated_engine`."""
    factory = acceptance_of(acceptance)
    check_graphs(config, "to simulate acceptance")
    if config.speculation is None:
        raise ConfigError.of("speculation", None, "a Speculation, whose acceptance is to be simulated")

    shape = config.speculation.shape
    most = (shape.num_draft_tokens if isinstance(shape, Chain) else shape.depth) + 1
    if not isinstance(acceptance, Sequence) and acceptance > most:
        raise ConfigError.of("acceptance", acceptance, f"at most {most}, the tokens of a round")

    log.warning(
        "acceptance is simulated at %g tokens a round: what this engine generates is not the model's output",
        AcceptanceTrace.of(acceptance).mean,
    )
    return factory


def simulated_engine(
    model: str | Path, config: EngineConfig, *, acceptance: float | Sequence[int]
) -> RecordedEngine:
    """An engine for measurements only: WHAT IT GENERATES IS NOT THE MODEL'S OUTPUT.

    Drafts are made and verified as usual, but not compared with the model's tokens: as many are accepted as
    make rounds of `acceptance` tokens, the model's own included.

    acceptance: a sequence gives the number of tokens of each round in turn, over and over, as
    `recorded_engine` has recorded them. A number is their mean, with the least variance (3.2: three tokens,
    or four in one round of five), from 1 to the most tokens that a round may emit. Each slot starts at
    another place in the sequence. A round with fewer drafts, because the policy chose so or the drafter
    proposed fewer, accepts all that there are; a round without drafts by the policy's choice is not counted.

    config: with speculation, and with executor="graph", the only executor whose rounds can be simulated.
    Raises ConfigError for another config or acceptance.
    """
    return RecordedEngine(model, config, checked_acceptance(config, acceptance))
