"""Embedded, async-first LLM inference: an engine inside your own process.

async with Engine("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
    async for chunk in engine.generate("Once upon a time"):
        print(chunk.text, end="")
"""

from __future__ import annotations

from drift_sdk.config import EngineConfig
from drift_sdk.engine import Engine
from drift_sdk.errors import (
    ConfigError,
    DriftError,
    EngineClosed,
    ExecutorError,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    RequestError,
)
from drift_sdk.grammars import JsonSchema, Lark, Regex
from drift_sdk.jobs import Job, JobResult
from drift_sdk.progress import Progress
from drift_sdk.results import (
    Chunk,
    Completion,
    FinishReason,
    SpeculationStats,
    Timing,
    TokenLogprobs,
    ToolCall,
    Usage,
)
from drift_sdk.samples import Samples
from drift_sdk.sampling_params import SamplingOptions, SamplingParams
from drift_sdk.speculation import Chain, NGram, Speculation
from drift_sdk.stats import EngineStats
from drift_sdk.stream import TokenStream
from drift_sdk.sync import SyncEngine, SyncStream

__all__ = [
    "Chain",
    "Chunk",
    "Completion",
    "ConfigError",
    "DriftError",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "ExecutorError",
    "FinishReason",
    "Job",
    "JobResult",
    "JsonSchema",
    "Lark",
    "ModelLoadError",
    "NGram",
    "Progress",
    "PromptTooLong",
    "QueueFull",
    "Regex",
    "RequestError",
    "Samples",
    "SamplingOptions",
    "SamplingParams",
    "Speculation",
    "SpeculationStats",
    "SyncEngine",
    "SyncStream",
    "Timing",
    "TokenLogprobs",
    "TokenStream",
    "ToolCall",
    "Usage",
]

__version__ = "0.1.0"
