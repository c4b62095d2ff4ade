"""The engines to measure under a service's load: model, drafts, settings and environment."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from perf.harness.processes import module_command, with_paths
from perf.harness.shapes import Model, prepare, prepare_draft

__all__ = [
    "SCRIPTED",
    "Drafts",
    "Job",
    "MeasuredEngine",
    "drift_engine",
    "find_model",
    "parse_settings",
    "peer_of",
]

PROCESS = "perf.service.process"
SCRIPTED = "scripted"
SCRIPTED_VOCAB_SIZE, SCRIPTED_MODEL_LEN = 256, 1024
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of a service's process (`perf.service.process`).

    service:            "drift" or "vllm".
    model:              the model's folder or file; None for a scripted engine.
    load:               as in EngineConfig.
    warm_ups:           cases to run after the start, as dictionaries.
    draft:              folder of an EAGLE-3 head; None for no drafts.
    num_draft_tokens:   drafted per round.
    acceptance_length:  tokens per round to simulate.
    measures_machine:   whether the process names the GPU and measures its bandwidth.
    cores:              CPU cores to run on; empty for all.
    num_replicas:       engines behind one pool, each on a GPU of its own; of this project's engine alone.
    """

    service: str
    model: str | None
    load: str
    vocab_size: int
    max_model_len: int
    warm_ups: Sequence[dict[str, Any]] = ()
    draft: str | None = None
    num_draft_tokens: int = 0
    acceptance_length: float | None = None
    measures_machine: bool = False
    cores: Sequence[int] = ()
    num_replicas: int = 1

    @property
    def command(self) -> list[str]:
        return module_command(PROCESS, json.dumps(dataclasses.asdict(self)))


@dataclass(frozen=True)
class Drafts:
    """Chains of an EAGLE-3 head of random weights, at a simulated acceptance (tokens per round)."""

    num_draft_tokens: int
    acceptance_length: float


@dataclass(frozen=True)
class MeasuredEngine:
    """An engine, its process and its settings.

    settings:  fields that differ from its default configuration.
    given:     the same as text; None if there are none.
    """

    name: str
    model_name: str
    job: Job
    environment: dict[str, str]
    settings: dict[str, Any]
    given: str | None


def find_model(name: str, folder: Path) -> Model | None:
    """A model of MODELS or of any folder with a config.json; None for a scripted engine.

    A folder without weights gets random ones. Files of MODELS are written to `folder`. Raises ValueError for
    any other name.
    """
    if name == SCRIPTED:
        return None

    path = Path(name)
    if not path.is_dir():
        return prepare(name, folder / name)

    has_weights = any(path.glob("*.safetensors"))
    return Model(
        name=path.name,
        path=path,
        load="auto" if has_weights else "random",
        spec=read_spec(resolve(path).config),
    )


def drift_engine(model: Model | None, drafts: Drafts | None, given: Sequence[str]) -> MeasuredEngine:
    """This project's engine, scripted if there is no model. given: settings as "field=value"."""
    job = Job(
        service="drift",
        model=None,
        load="auto",
        vocab_size=SCRIPTED_VOCAB_SIZE,
        max_model_len=SCRIPTED_MODEL_LEN,
    )
    if model is not None:
        job = dataclasses.replace(
            job,
            model=str(model.path),
            load=model.load,
            vocab_size=model.spec.vocab_size,
            max_model_len=model.spec.max_position_embeddings,
            measures_machine=True,
        )
    if drafts is not None:
        assert model is not None
        job = dataclasses.replace(
            job,
            draft=str(prepare_draft(model).path),
            num_draft_tokens=drafts.num_draft_tokens,
            acceptance_length=drafts.acceptance_length,
        )
    text = " ".join(given)
    name = SCRIPTED if model is None else model.name
    return MeasuredEngine("drift", name, job, with_paths(os.environ), parse_settings(text), text or None)


def peer_of(engine: MeasuredEngine, name: str, path: str | None, given: Sequence[str]) -> MeasuredEngine:
    """The peer with the same model and drafts.

    name: "vllm", imported from the folder `path`, or another scripted engine.
    """
    job, environment = dataclasses.replace(engine.job, measures_machine=False), dict(engine.environment)
    if name == "vllm":
        job = dataclasses.replace(job, service="vllm")
        environment = with_paths(environment | VLLM_ENVIRONMENT, path)
    text = " ".join(given)
    return MeasuredEngine(name, engine.model_name, job, environment, parse_settings(text), text or None)


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from "field=value field=value". A value that is not JSON is taken as text.

    Raises ValueError for a part of another form.
    """
    settings: dict[str, Any] = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not name or not equals:
            raise ValueError(f"setting={part!r}: expected field=value")

        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value

    return settings
