"""Settings of measurements that launch rounds without a scheduler."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from drift_sdk import EngineConfig
from drift_sdk.config import prefill_token_budget
from drift_sdk.steps import Executor
from perf.harness.decoding import DecodeOptions
from perf.harness.drafting import Drafting
from perf.harness.manual_driver import ManualDriver
from perf.harness.scenario import Scenario
from perf.harness.shapes import Draft, Model
from perf.harness.stage_work import Work, stage_work

__all__ = ["NUM_WARM_UP_ROUNDS", "Driven"]

NUM_WARM_UP_ROUNDS = 3


class Driven(Struct, frozen=True, kw_only=True):
    """An executor to be measured, the model and drafts that it runs, and the limits of the machine.

    bandwidth_tb_s: memory bandwidth of the device. peak_tflop_s: its matrix product throughput.
    """

    model: Model
    drafting: Drafting | None
    config: EngineConfig
    options: DecodeOptions
    bandwidth_tb_s: float
    peak_tflop_s: float

    @property
    def num_drafts(self) -> int:
        """Tokens drafted in a round; 0 without speculation."""
        return self.drafting.num_draft_tokens if self.drafting is not None else 0

    @property
    def draft(self) -> Draft | None:
        """The EAGLE-3 draft; None without one."""
        draft = self.drafting.draft if self.drafting is not None else None
        return draft if isinstance(draft, Draft) else None

    def fields(self, scenario: Scenario) -> dict[str, Any]:
        """Fields that all runs of a scenario have."""
        fields: dict[str, Any] = {
            "engine": "drift",
            "model": self.model.name,
            "dtype": self.model.dtype_name or self.options.dtype_name,
            "scenario": scenario.name,
            "batch": scenario.batch,
            "context": scenario.context,
        }
        if self.drafting is not None:
            fields |= self.drafting.fields
        return fields

    def slots(self, executor: Executor) -> ManualDriver:
        """A driver that launches steps of `executor`."""
        return ManualDriver(executor, prefill_token_budget=prefill_token_budget(self.config, "cuda"))

    def work(self, batch: int, mean_context: float) -> dict[str, Work]:
        """The work of each stage, see `stage_work`."""
        return stage_work(
            self.model,
            self.draft,
            num_drafts=self.num_drafts,
            batch=batch,
            mean_context=mean_context,
            itemsize=self.options.itemsize,
        )
