"""Embedded, async-first LLM inference: an engine inside your own process.

async with Engine("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
    async for chunk in engine.generate("Once upon a time"):
        print(chunk.text, end="")
"""

from __future__ import annotations

from drift_sdk.base_engine import BaseEngine
from drift_sdk.config import EngineConfig, EngineOptions
from drift_sdk.conversation import Message, ToolSpec
from drift_sdk.engine import Engine, inspect
from drift_sdk.errors import (
    ConfigError,
    DriftError,
    EngineClosed,
    ExecutorError,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    ReplicaFailed,
    RequestError,
)
from drift_sdk.events import Download, Progress
from drift_sdk.grammars import JsonSchema, Lark, Regex
from drift_sdk.jobs import Job, JobDone, JobFailed, JobResult
from drift_sdk.model_info import ModelInfo, RemoteFile
from drift_sdk.pool.engine_pool import EnginePool
from drift_sdk.pool.pool_state import ReplicaStats
from drift_sdk.pool.routing import Routing
from drift_sdk.processors import TokenBias, TokenMachine, TokenState
from drift_sdk.remote.remote_engine import ProcessEngine
from drift_sdk.results import (
    Chunk,
    Completion,
    Decision,
    Embedding,
    FinishReason,
    PromptStates,
    SpeculationStats,
    Timing,
    TokenLogprobs,
    ToolCall,
    Usage,
)
from drift_sdk.sampling_params import SamplingOptions, SamplingParams
from drift_sdk.speculation import (
    Chain,
    DynamicTree,
    NGram,
    PartialVerification,
    Speculation,
    StaticTree,
    load_tree,
)
from drift_sdk.stats import EngineStats
from drift_sdk.stream import Samples, TokenStream
from drift_sdk.sync import SyncEngine, SyncStream

__all__ = [
    "BaseEngine",
    "Chain",
    "Chunk",
    "Completion",
    "ConfigError",
    "Decision",
    "Download",
    "DriftError",
    "DynamicTree",
    "Embedding",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineOptions",
    "EnginePool",
    "EngineStats",
    "ExecutorError",
    "FinishReason",
    "Job",
    "JobDone",
    "JobFailed",
    "JobResult",
    "JsonSchema",
    "Lark",
    "Message",
    "ModelInfo",
    "ModelLoadError",
    "NGram",
    "PartialVerification",
    "ProcessEngine",
    "Progress",
    "PromptStates",
    "PromptTooLong",
    "QueueFull",
    "Regex",
    "RemoteFile",
    "ReplicaFailed",
    "ReplicaStats",
    "RequestError",
    "Routing",
    "Samples",
    "SamplingOptions",
    "SamplingParams",
    "Speculation",
    "SpeculationStats",
    "StaticTree",
    "SyncEngine",
    "SyncStream",
    "Timing",
    "TokenBias",
    "TokenLogprobs",
    "TokenMachine",
    "TokenState",
    "TokenStream",
    "ToolCall",
    "ToolSpec",
    "Usage",
    "inspect",
    "load_tree",
]

__version__ = "0.1.0"
