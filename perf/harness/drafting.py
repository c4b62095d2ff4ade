"""What drafts in an engine that is measured, and how its acceptance comes about."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from drift_sdk import Chain, EngineConfig, NGram, Speculation
from drift_sdk.measurement import RecordedEngine, recorded_engine, simulated_engine
from perf.decode import DecodeOptions
from perf.harness.scenario import Scenario
from perf.harness.shapes import Draft, Model

__all__ = ["Drafting"]


class Drafting(Struct, frozen=True, kw_only=True):
    """Chains of `num_draft_tokens`. `acceptance_length`: tokens a round to simulate, as far as so many drafts
    can bring them; None: acceptance is real."""

    draft: Draft | NGram
    num_draft_tokens: int
    acceptance_length: float | None = None
    is_adaptive: bool = False

    @property
    def name(self) -> str:
        return "ngram" if isinstance(self.draft, NGram) else Path(self.draft.path).name

    @property
    def acceptance(self) -> Literal["simulated", "real"]:
        return "real" if self.acceptance_length is None else "simulated"

    @property
    def simulated_length(self) -> float | None:
        if self.acceptance_length is None:
            return None

        return min(self.acceptance_length, self.num_draft_tokens + 1.0)

    def round_bytes(self, mean_drafts: float, scenario: Scenario, options: DecodeOptions) -> float:
        """Bytes that a round of so many drafts must read beside the target's."""
        if isinstance(self.draft, NGram):
            return 0.0

        context = scenario.mean_context(options.lengths)
        return self.draft.round_bytes(mean_drafts, scenario.batch, context, options.itemsize)

    def config(self, plain: EngineConfig) -> EngineConfig:
        """The plain one with these drafts."""
        speculation = Speculation(
            draft=self.draft if isinstance(self.draft, NGram) else self.draft.path,
            shape=Chain(self.num_draft_tokens),
            adaptive=self.is_adaptive,
        )
        return plain.replace(speculation=speculation)

    def engine(self, model: Model, plain: EngineConfig) -> RecordedEngine:
        """An engine of the plain config, with these drafts. Raises ConfigError as `simulated_engine`."""
        config = self.config(plain)
        if self.simulated_length is None:
            return recorded_engine(model.path, config)

        return simulated_engine(model.path, config, acceptance=self.simulated_length)
