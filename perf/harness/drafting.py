"""The drafts of a measured engine, and whether their acceptance is simulated or real."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from drift_sdk import Chain, EngineConfig, NGram, Speculation
from drift_sdk.measurement import AcceptanceTrace, RecordedEngine, recorded_engine
from perf.harness.decoding import DecodeOptions
from perf.harness.mtp_draft import Assistant, MtpDraft
from perf.harness.scenario import Scenario
from perf.harness.shapes import Draft, MaskDraft, Model
from perf.harness.simulation import simulated_engine

__all__ = ["Drafting"]


class Drafting(Struct, frozen=True, kw_only=True):
    """Chains of drafted tokens.

    draft:              a head, a small model, the model's MTP layer or assistant, or n-grams.
    ngrams:             beside the draft, see `Speculation`.
    num_draft_tokens:   tokens drafted per round; the most if adaptive.
    acceptance_length:  tokens per round to simulate, limited to `num_draft_tokens + 1`; None for real
                        acceptance.
    is_adaptive:        whether the policy chooses the number of drafts.
    trace:              the recorded rounds to simulate, in place of a mean.
    """

    draft: Draft | MaskDraft | Model | MtpDraft | Assistant | NGram
    ngrams: NGram | None = None
    num_draft_tokens: int
    acceptance_length: float | None = None
    is_adaptive: bool = False
    trace: AcceptanceTrace | None = None

    @property
    def name(self) -> str:
        if isinstance(self.draft, NGram):
            return "ngram"

        weights = f" {self._weights}" if self._weights else ""
        return Path(self.draft.path).resolve().name + weights + (" and ngrams" if self.ngrams else "")

    @property
    def _weights(self) -> Literal["fp8", "int4"] | None:
        weights = None if isinstance(self.draft, NGram) else self.draft.weights
        return weights if weights == "fp8" or weights == "int4" else None

    @property
    def acceptance(self) -> Literal["simulated", "real"]:
        return "real" if self.simulated_length is None else "simulated"

    @property
    def simulated_length(self) -> float | None:
        """Mean tokens per round to simulate; None for real acceptance."""
        if self.trace is not None:
            return round(self.trace.mean, 4)

        if self.acceptance_length is None:
            return None

        return min(self.acceptance_length, self.num_draft_tokens + 1.0)

    @property
    def fields(self) -> dict[str, Any]:
        """Fields that all runs with these drafts have."""
        return {
            "draft": self.name,
            "num_draft_tokens": self.num_draft_tokens,
            "acceptance": self.acceptance,
            "acceptance_length": self.simulated_length,
        }

    def round_bytes(self, mean_drafts: float, scenario: Scenario, options: DecodeOptions) -> float:
        """Bytes that a round with `mean_drafts` drafts must read in addition to the target's."""
        if isinstance(self.draft, NGram):
            return 0.0

        context = scenario.mean_context(options.lengths)
        return self.draft.round_bytes(mean_drafts, scenario.batch, context, options.itemsize)

    def config(self, plain: EngineConfig) -> EngineConfig:
        """The configuration `plain` with these drafts."""
        speculation = Speculation(
            draft=self.draft if isinstance(self.draft, NGram) else self.draft.path,
            shape=Chain(self.num_draft_tokens),
            adaptive=self.is_adaptive,
            draft_weights=self._weights,
            ngrams=self.ngrams,
            aux_layer_convention=self.draft.aux_layer_convention
            if isinstance(self.draft, Draft | MaskDraft)
            else None,
        )
        return plain.replace(speculation=speculation)

    def engine(self, model: Model, plain: EngineConfig) -> RecordedEngine:
        """An engine with the configuration `plain` and these drafts.

        Raises ConfigError as `simulated_engine`.
        """
        config = self.config(plain)
        if self.simulated_length is None:
            return recorded_engine(model.path, config)

        acceptance = self.simulated_length if self.trace is None else self.trace.lengths
        return simulated_engine(model.path, config, acceptance=acceptance)
