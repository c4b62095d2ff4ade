"""This project's engine as a measured service."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from drift_sdk import (
    BaseEngine,
    Chain,
    Engine,
    EngineConfig,
    EnginePool,
    ProcessEngine,
    Routing,
    SamplingParams,
    Speculation,
)
from drift_sdk.testing import ScriptedModel
from perf.harness.scripted import next_character
from perf.harness.simulation import simulated_engine
from perf.service.load import Request

__all__ = ["DriftService", "engine_config"]

SCRIPTED = "scripted"


class DriftService:
    """An engine with its default configuration, except for the given settings, or a pool of such engines."""

    def __init__(self, engine: BaseEngine, start_s: float) -> None:
        self._engine = engine
        self.facts = {
            "executor": engine.executor,
            "num_replicas": len(engine.engines) if isinstance(engine, EnginePool) else 1,
            "start_s": round(start_s, 3),
            "max_num_seqs": engine.config.max_num_seqs,
            "max_model_len": engine.max_model_len,
            "kv_cache_tokens": engine.stats().num_blocks * block_size(engine),
        }

    @classmethod
    async def start(cls, job: dict[str, Any], settings: dict[str, Any]) -> DriftService:
        """Start an engine.

        job:       `model`, `load`, `num_replicas`, and with drafts `draft`, `num_draft_tokens` and
                   `acceptance_length`.
        settings:  fields of EngineConfig; `replicas`, in place of the job's; `affinity` of `Routing`;
                   `processes`: whether each engine is in a process of its own; `step_s`: seconds of a step of
                   a scripted engine.
        """
        started_at = time.perf_counter()
        fields = dict(settings)
        num_replicas = fields.pop("replicas", job["num_replicas"])
        routing = Routing(affinity=fields.pop("affinity", Routing().affinity))
        make = make_process_engine if fields.pop("processes", False) else make_engine
        engines = [make(job, fields, index) for index in range(num_replicas)]
        engine: BaseEngine = EnginePool(engines, routing) if num_replicas > 1 else engines[0]
        await engine.start()
        return cls(engine, time.perf_counter() - started_at)

    async def stream(self, request: Request, is_sampled: bool) -> AsyncIterator[int]:
        """Generate exactly `request.num_tokens` tokens; yields the number of tokens of each chunk."""
        params = SamplingParams(
            max_tokens=request.num_tokens,
            ignore_eos=True,
            temperature=0.8 if is_sampled else 0.0,
            top_p=0.95 if is_sampled else 1.0,
        )
        async for chunk in self._engine.generate(request.prompt, params):
            yield len(chunk.token_ids)

    def counts(self) -> dict[str, int]:
        """Counts since the engine's start."""
        stats = self._engine.stats()
        names = (
            "num_preemptions", "num_cached_tokens", "num_steps", "num_draft_rounds", "num_accepted_tokens",
            "num_checkpoint_hits", "num_recomputed_tokens",
        )  # fmt: skip
        return {name: getattr(stats, name) for name in names}

    async def aclose(self) -> None:
        await self._engine.aclose()


def make_engine(job: dict[str, Any], settings: dict[str, Any], index: int) -> Engine:
    """The engine of a replica, on the visible GPU of this index."""
    if job["model"] is None:
        model = scripted_model(job, settings)
        return Engine(SCRIPTED, model.config, open_model=model)

    config = replica_config(job, settings, index)
    if config.speculation is None:
        return Engine(Path(job["model"]), config)

    return simulated_engine(Path(job["model"]), config, acceptance=job["acceptance_length"])


def make_process_engine(job: dict[str, Any], settings: dict[str, Any], index: int) -> ProcessEngine:
    """The engine of a replica in a process of its own. It does not simulate acceptance."""
    if job["model"] is None:
        model = scripted_model(job, settings)
        return ProcessEngine(SCRIPTED, model.config, open_model=model)

    return ProcessEngine(Path(job["model"]), replica_config(job, settings, index))


def scripted_model(job: dict[str, Any], settings: dict[str, Any]) -> ScriptedModel:
    """The model of a scripted engine."""
    fields = dict(settings)
    step_s = fields.pop("step_s", 0.0)
    config = ScriptedModel().config.replace(**{"max_model_len": job["max_model_len"]} | fields)
    return ScriptedModel(next_character, config=config, step_s=step_s)


def replica_config(job: dict[str, Any], settings: dict[str, Any], index: int) -> EngineConfig:
    """`engine_config` for the visible GPU of this index."""
    config = engine_config(job, settings)
    return config.replace(device=f"cuda:{index}") if config.device == "auto" and index else config


def engine_config(job: dict[str, Any], settings: dict[str, Any]) -> EngineConfig:
    """The default configuration with the job's drafts and the settings.

    Drafts select the graph executor, because only it simulates acceptance. Raises ConfigError for a wrong
    value, TypeError for an unknown field.
    """
    fields: dict[str, Any] = {"load": job["load"]}
    if job["draft"] is not None:
        fields["executor"] = "graph"
        fields["speculation"] = Speculation(draft=Path(job["draft"]), shape=Chain(job["num_draft_tokens"]))
    return EngineConfig(**fields | settings)


def block_size(engine: BaseEngine) -> int:
    """Tokens per KV block: the config's, or what the executor chooses by default."""
    return engine.config.block_size or (64 if engine.executor == "graph" else 16)
