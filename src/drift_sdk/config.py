"""Configuration of an engine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack, get_args

from msgspec import Meta, Struct

from drift_sdk._fields import (
    ConfigFields,
    check_field_names,
    check_fields,
    check_str,
    read_environment,
    replace_fields,
)
from drift_sdk.errors import ConfigError
from drift_sdk.speculation import MAX_VIEW_BLOCK_SIZE, Speculation

__all__ = ["PREFILL_TOKEN_BUDGETS", "EngineConfig", "EngineOptions", "prefill_token_budget"]

PREFILL_TOKEN_BUDGETS = {"cpu": 256, "cuda": 2048}
"""Most prompt tokens in a step by default, by type of device. On a CPU, a step takes long, and its end is
waited for by other sequences, by cancelling and by closing."""

ToolFormat = Literal[
    "auto",
    "json",
    "hermes",
    "qwen3_coder",
    "glm",
    "gemma4",
    "llama3_json",
    "pythonic",
    "mistral",
    "deepseek",
    "granite",
    "phi4_mini",
    "harmony",
]
ReasoningFormat = Literal["auto", "think", "mistral", "granite", "gemma4", "harmony"]
TOOL_FORMATS, REASONING_FORMATS = get_args(ToolFormat), get_args(ReasoningFormat)


class EngineOptions(TypedDict, total=False):
    """Fields of `EngineConfig` as keyword arguments, for the annotation `**options:
    Unpack[EngineOptions]`."""

    device: str
    tensor_parallel: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    max_num_seqs: int
    max_model_len: int | None
    block_size: int | None
    kv_cache_tokens: int | None
    gpu_memory_fraction: float
    prefill_token_budget: int | None
    max_queued_requests: int | None
    target_latency_ms_p50: float | None
    target_latency_ms_p95: float | None
    prefer_high_throughput: bool
    executor: Literal["auto", "eager", "graph"]
    strict_performance: bool
    step_timeout_s: float | None
    tuning: Literal["off", "short", "full"]
    shape_log: str | Path | None
    fast_prompts: bool
    num_threads: int | None
    weights: Literal["stored", "expanded", "fp8", "int4", "nvfp4"] | None
    kv_dtype: Literal["fp8", "nvfp4"] | None
    load: Literal["auto", "random"]
    revision: str | None
    cache_dir: str | Path | None
    local_files_only: bool
    tokenizer: str | Path | None
    chat_template: str | None
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    speculation: Speculation | None


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=ConfigFields):
    """Settings of an engine. The fields are checked when it is made: a wrong value raises `ConfigError`,
    which names field, value and range.

    device:                   "auto" (the first GPU, else the CPU), "cpu", "cuda" or "cuda:N", N from 0 to 99.
    tensor_parallel:          GPUs that a model is divided between, 1 to 64: those from `device` on, of one
                              kind, which reach each other's memory. Each holds a part of the layers and of
                              the KV cache. Graph executor, and weights of `dtype` alone; no mixture of
                              experts, no fast_prompts. See docs/deployment/scaling.md.
    dtype:                    "auto" (bfloat16 on a GPU, float32 on the CPU), "float32", "bfloat16" or
                              "float16"; float16 is rejected on the CPU.
    max_num_seqs:             most sequences running at once, 1 to 4,096; fewer, with a warning, if the memory
                              does not hold the recurrent states of so many.
    max_model_len:            most tokens of prompt and completion together, at least 2; None = the model's
                              own context.
    block_size:               tokens in a KV block, a power of two from 1 to 1,024; None = 64 with graphs,
                              else 16.
    kv_cache_tokens:          tokens that the KV cache holds, at least 2; None = as many as there is memory
                              for, at most as many as max_num_seqs sequences of full length can use. On a GPU
                              that memory is what gpu_memory_fraction leaves, on a CPU an eighth of what is
                              available. Layers with windows keep fewer, in proportion.
    gpu_memory_fraction:      share of the GPU's free memory, as measured at start, that this engine may use,
                              over 0 to 1. Weights, graphs and scratch memory are subtracted; the rest holds
                              the KV cache. Without effect on a CPU. kv_cache_tokens takes precedence.
    prefill_token_budget:     most prompt tokens computed in one step, 1 to 2**20; longer prompts are cut into
                              chunks. Cancelling and closing wait for the end of a step. None = 2,048 on a
                              GPU, 256 on a CPU.
    max_queued_requests:      most requests waiting to start, at least 0; further ones raise QueueFull. None =
                              unbounded.
    target_latency_ms_p50:    target for the median time between tokens, in milliseconds, over 0: the prefill
                              share of a step shrinks to meet it. None = no target.
    target_latency_ms_p95:    the same for the 95th percentile, over 0.
    prefer_high_throughput:   give prompts the whole budget even while other sequences decode.
    executor:                 "graph" (CUDA graphs; NVIDIA GPUs of compute capability 8.0 or later), "eager"
                              (any device), or "auto" (CUDA graphs where supported, else eager).
    strict_performance:       raise an error instead of running on a slow path; see below. If False, slow
                              paths are counted.
    step_timeout_s:           most seconds that the GPU may take for a step, over 0. After that every stream
                              raises ExecutorError with process_unusable, and the engine stops waiting for the
                              GPU. None = no limit. With the eager executor it is refused on a GPU, and has no
                              effect on a CPU.
    tuning:                   measurement of launch configurations of products when the engine starts: "short"
                              (weights without an entry in the tables; up to a minute, once on each machine,
                              most of it compiling), "full" (all weights of the model, minutes) or "off". Kept
                              in the user's cache folder. It changes no token. Graph executor only.
    shape_log:                JSON file to which the engine adds, when it is closed, the shapes of the
                              products that it ran and how often, for `python -m drift_sdk tune --log`; None =
                              none. Graph executor only.
    fast_prompts:             on the graph executor, compute prompts in the orders of summation that are
                              fastest. Long prompts take up to a tenth less time, and tokens are no longer a
                              function of the request alone: near ties may resolve differently when a prompt
                              is cut, cached, preempted, or computed beside others. See docs/guarantees.md.
    num_threads:              threads over which torch splits an operation on the CPU, 1 to 1,024, for the
                              engine's thread alone; None = as torch finds it, one per core by default.
    weights:                  form of the weights in memory: "stored" (quantised weights stay as the files
                              have them), "expanded" (all weights are numbers of `dtype`), "fp8", "int4" or
                              "nvfp4" (the projections of the layers are quantised when they are loaded, from
                              files that are not quantised). None = "stored" for quantised files where
                              kernels multiply by their weights (CUDA graphs, compute capability 9.0,
                              bfloat16, one GPU), else "expanded". Quantised weights take less
                              memory. Where kernels do not multiply by them, a weight is dequantised at each
                              use: that costs speed. With load="random", "stored" draws weights in blocks of
                              FP8 where the model's files have them; other formats are expanded.
    kv_dtype:                 numbers of the KV cache: None (those of `dtype`) or "fp8" (e4m3, a byte each,
                              with the scales of the files, else 1). The cache holds twice the tokens of
                              bfloat16 and attention reads half of the bytes; what is stored is rounded to
                              three bits of mantissa, so tokens may differ. The KV cache of a draft remains
                              of `dtype`. "nvfp4" (4.5 bits a number) needs the eager executor, and rounds to
                              one bit of mantissa.
    load:                     "auto" (the model's files) or "random" (random weights of the configured
                              shapes).
    revision:                 branch, tag or commit of the model's hub id; None = the hub's default.
    cache_dir:                folder of the hub's cache; None = the hub's own default.
    local_files_only:         never contact the hub.
    tokenizer:                folder, tokenizer.json, .gguf file or hub id; None = the model's own.
    chat_template:            text of a Jinja template, or the name of one of the model's templates, which is
                              then used with and without tools; None = the model's own: "default", and
                              "tool_use" for messages with tools if the model has one.
    tool_format:              format in which the model writes tool calls: "auto" (as its chat template
                              shows), "json" (<tool_call> tags or bare JSON), "hermes", "qwen3_coder",
                              "glm", "gemma4", "llama3_json", "pythonic", "mistral", "deepseek", "granite",
                              "phi4_mini" or "harmony"; None = tool calls stay in the text.
    reasoning_format:         format in which it marks reasoning: "auto", "think" (<think> tags), "mistral",
                              "granite", "gemma4" or "harmony"; None = reasoning stays in the text. "harmony"
                              is the format of both or of neither.
    speculation:              draft several tokens and verify them in one step; None = plain decoding.

    With `strict_performance`:
    - Starting raises ConfigError without the graph executor, and where the shape of a weight was never
      measured on this kind of GPU or cannot be run as measured; ModelLoadError for a draft that cannot be
      loaded, required or not.
    - Submitting raises RequestError for requests that need the host in the middle of a step: prompt_logprobs,
      and a grammar on a speculating engine unless its num_draft_tokens is 0.
    - Serving ends with ExecutorError when the host waits for room to pass on a step's input (so much was
      admitted at once), when it copies results to make room, when torch allocates memory of the GPU (in the
      whole process; checked every 256 steps), and when a draft model drafts nothing in a round that is not a
      sequence's last. It is not an error that the policy drafts less, that a request limits its drafts, or
      that `NGram` finds nothing.
    All of this is counted in `EngineStats`, strict or not.
    """

    device: str = "auto"
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 256
    max_model_len: Annotated[int, Meta(ge=2, le=2**24)] | None = None
    block_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    kv_cache_tokens: Annotated[int, Meta(ge=2, le=2**31 - 1)] | None = None
    gpu_memory_fraction: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9
    prefill_token_budget: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    max_queued_requests: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    target_latency_ms_p50: Annotated[float, Meta(gt=0.0, le=1e6)] | None = None
    target_latency_ms_p95: Annotated[float, Meta(gt=0.0, le=1e6)] | None = None
    prefer_high_throughput: bool = False
    executor: Literal["auto", "eager", "graph"] = "auto"
    strict_performance: bool = False
    step_timeout_s: Annotated[float, Meta(gt=0.0, le=1e6)] | None = None
    tuning: Literal["off", "short", "full"] = "off"
    shape_log: str | Path | None = None
    fast_prompts: bool = False
    num_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    weights: Literal["stored", "expanded", "fp8", "int4", "nvfp4"] | None = None
    kv_dtype: Literal["fp8", "nvfp4"] | None = None
    load: Literal["auto", "random"] = "auto"
    revision: str | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    tokenizer: str | Path | None = None
    chat_template: str | None = None
    tool_format: ToolFormat | None = "auto"
    reasoning_format: ReasoningFormat | None = "auto"
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        self._check_device()
        check_fields(ConfigError, self)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ConfigError.of("block_size", self.block_size, "a power of two from 1 to 1024")

        self._check_formats()
        if self.speculation is not None and not isinstance(self.speculation, Speculation):
            allowed = "a Speculation (in plain data a mapping) or None"
            raise ConfigError.of("speculation", self.speculation, allowed)

        self._check_partial_verification()
        if self.dtype == "float16" and self.device == "cpu":
            raise ConfigError.of("dtype", self.dtype, "float32 or bfloat16 on the CPU")

    def _check_device(self) -> None:
        allowed = '"auto", "cpu", "cuda" or "cuda:N", N from 0 to 99'
        if not isinstance(self.device, str):
            kind = type(self.device)
            is_torch_device = (kind.__module__, kind.__name__) == ("torch", "device")
            hint = f', here "{self.device}"' if is_torch_device else ""
            raise ConfigError.of("device", self.device, f"a string{hint}: {allowed}")

        # The upper bound: torch takes "cuda:200" for the device of index -56.
        if not re.fullmatch(r"auto|cpu|cuda(:[1-9]?[0-9])?", self.device):
            raise ConfigError.of("device", self.device, allowed)

    def _check_partial_verification(self) -> None:
        if self.speculation is None or self.speculation.partial_verification is None:
            return

        if self.tensor_parallel > 1:
            raise ConfigError.of("tensor_parallel", self.tensor_parallel, "1 with partial_verification")

        if self.kv_dtype is not None:
            raise ConfigError.of("kv_dtype", self.kv_dtype, "None with partial_verification")

        if self.block_size is not None and self.block_size > MAX_VIEW_BLOCK_SIZE:
            allowed = f"at most {MAX_VIEW_BLOCK_SIZE} with partial_verification"
            raise ConfigError.of("block_size", self.block_size, allowed)

    def _check_formats(self) -> None:
        formats = {self.tool_format, self.reasoning_format}
        if "harmony" in formats and not formats <= {"harmony", "auto"}:
            name = "tool_format" if self.reasoning_format == "harmony" else "reasoning_format"
            allowed = '"auto" or "harmony": it is the format of both or of neither'
            raise ConfigError.of(name, getattr(self, name), allowed)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Make a config from plain data, such as a decoded JSON or TOML file. `speculation` may be a mapping,
        as `Speculation.from_dict` takes it. ConfigError for a wrong value, and for an unknown field, with the
        name of the most similar one."""
        check_field_names(ConfigError, cls, settings)
        speculation = settings.get("speculation")
        if isinstance(speculation, Mapping):
            settings = {**settings, "speculation": Speculation.from_dict(speculation)}

        return cls(**settings)

    @classmethod
    def from_env(cls, prefix: str = "DRIFT_") -> EngineConfig:
        """Make a config from environment variables: `prefix` and the name of a field in upper case, such as
        DRIFT_MAX_NUM_SEQS. Fields without a variable, or with an empty one, keep their defaults.

        Flags are true or false, 1 or 0; "none" is None where a field takes it; DRIFT_SPECULATION is a JSON
        object, as `from_dict` takes it.
        ConfigError names the variable that has a wrong value, or that has the prefix and no field.
        """
        check_str(ConfigError, "prefix", prefix)
        settings = read_environment(ConfigError, cls, prefix, os.environ)
        try:
            return cls.from_dict(settings)
        except ConfigError as error:
            field = error.field if error.field in cls.__struct_fields__ else "speculation"
            variable = f"{prefix}{field.upper()}"
            raise ConfigError(
                f"{variable}: {error}", field=variable, value=error.value, allowed=error.allowed
            ) from error

    def replace(self, **changes: Unpack[EngineOptions]) -> EngineConfig:
        """A copy with some fields changed, checked like a new one: ConfigError for a wrong value, and for an
        unknown field, with the name of the most similar one."""
        return replace_fields(ConfigError, self, changes)


def prefill_token_budget(config: EngineConfig, device_type: str) -> int:
    """The most prompt tokens in a step of an engine on a device of a type."""
    return config.prefill_token_budget or PREFILL_TOKEN_BUDGETS[device_type]
