"""What an engine is set up with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from drift_sdk._validation import check_bool, check_choice, check_float, check_int, check_str
from drift_sdk.errors import ConfigError
from drift_sdk.speculation import Speculation

__all__ = ["EngineConfig"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
EXECUTORS = ("auto", "eager", "graph")
LOADS = ("auto", "random")


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine runs. Checked when built; a wrong value raises `ConfigError` naming field, value, range.

    device:                   "auto" (the first GPU, else the CPU), "cpu", "cuda" or "cuda:N".
    dtype:                    "auto" (bfloat16 on a GPU, float32 on the CPU), "float32", "bfloat16" or
                              "float16".
    max_num_seqs:             most sequences running at once.
    max_model_len:            most tokens of prompt and completion together; None = the model's own context.
    block_size:               tokens in a KV block, a power of two; None = 64 with graphs, else 16.
    kv_cache_tokens:          tokens the KV cache holds; None = as many as there is memory for, at most what
                              max_num_seqs sequences of full length can use. On a GPU that memory is what
                              gpu_memory_fraction leaves, on a CPU an eighth of what is available.
    gpu_memory_fraction:      share of the GPU's free memory, as measured at start, that this engine may use:
                              weights, graphs and scratch memory are subtracted, the rest holds the KV cache.
                              Of no effect on a CPU; kv_cache_tokens goes before it.
    prefill_token_budget:     most prompt tokens computed in one step; longer prompts are cut into chunks.
    max_queued_requests:      most requests waiting to start, then QueueFull; None = unbounded.
    target_latency_ms_p50:    wanted time between tokens, median; the prefill share of a step shrinks to meet
    target_latency_ms_p95:    it. And the same for the 95th percentile. None = no target.
    prefer_high_throughput:   give prompts the whole budget even while others decode.
    executor:                 "graph" (CUDA graphs, NVIDIA GPUs of compute capability 9.0 or later), "eager"
                              (any device), or "auto" (graphs where they can be had).
    strict_performance:       what would silently be slow fails, see below. False: it is counted.
    step_timeout_s:           seconds the GPU may take for a step; then every stream gets an ExecutorError
                              with process_unusable, and nobody waits for the GPU any more. None = no limit.
                              Graph executor only; the end of a step is then seen some 0.1 ms later.
    exact_prefill:            on the graph executor, prompts get the very bits of decoding: the same tokens
                              however a prompt is cut, cached or preempted, at some speed.
    load:                     "auto" (the model's files) or "random" (weights of the configured shapes).
    revision:                 of a hub id: branch, tag or commit.
    cache_dir:                of the hub; None = the hub's own default.
    local_files_only:         never ask the hub.
    tokenizer:                folder, tokenizer.json, .gguf file or hub id, if not the model's own.
    chat_template:            Jinja text, if not the model's own.
    speculation:              drafts to verify several tokens a step; None = plain decoding.

    With `strict_performance`:
    - Starting raises ConfigError without the graph executor, or where a weight's shape was never measured on
      this kind of GPU or cannot be run as measured, and ModelLoadError for a draft that cannot be had,
      required or not.
    - Submitting raises RequestError for what needs the host in the midst of a step: prompt_logprobs, and a
      grammar on a speculating engine unless its num_draft_tokens is 0.
    - Serving ends with ExecutorError when the host waits for room to pass on a step's input (so much was
      admitted at once), when it copies results to make room, when torch allocates memory of the GPU (anybody
      in the process: it is checked every 256 steps), and when a draft model drafts nothing in a round that
      is not a sequence's last. That the policy drafts less, that a request caps its drafts and that `NGram`
      finds nothing are no losses.
    The same is counted in `EngineStats`, strict or not.
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_num_seqs: int = 256
    max_model_len: int | None = None
    block_size: int | None = None
    kv_cache_tokens: int | None = None
    gpu_memory_fraction: float = 0.9
    prefill_token_budget: int = 2048
    max_queued_requests: int | None = None
    target_latency_ms_p50: float | None = None
    target_latency_ms_p95: float | None = None
    prefer_high_throughput: bool = False
    executor: Literal["auto", "eager", "graph"] = "auto"
    strict_performance: bool = False
    step_timeout_s: float | None = None
    exact_prefill: bool = False
    load: Literal["auto", "random"] = "auto"
    revision: str | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    tokenizer: str | Path | None = None
    chat_template: str | None = None
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        self._check_device()
        check_choice(ConfigError, "dtype", self.dtype, DTYPES)
        check_int(ConfigError, "max_num_seqs", self.max_num_seqs, ge=1, le=4096)
        check_int(ConfigError, "max_model_len", self.max_model_len, ge=2, le=2**24, optional=True)
        check_int(ConfigError, "block_size", self.block_size, ge=1, le=1024, optional=True)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ConfigError.of("block_size", self.block_size, "a power of two from 1 to 1024")
        check_int(ConfigError, "kv_cache_tokens", self.kv_cache_tokens, ge=1, le=2**31 - 1, optional=True)
        check_float(ConfigError, "gpu_memory_fraction", self.gpu_memory_fraction, gt=0.0, le=1.0)
        check_int(ConfigError, "prefill_token_budget", self.prefill_token_budget, ge=1, le=2**20)
        check_int(
            ConfigError, "max_queued_requests", self.max_queued_requests, ge=0, le=2**31 - 1, optional=True
        )
        for name in ("target_latency_ms_p50", "target_latency_ms_p95"):
            check_float(ConfigError, name, getattr(self, name), gt=0.0, le=1e6, optional=True)
        check_bool(ConfigError, "prefer_high_throughput", self.prefer_high_throughput)
        check_choice(ConfigError, "executor", self.executor, EXECUTORS)
        check_bool(ConfigError, "strict_performance", self.strict_performance)
        check_float(ConfigError, "step_timeout_s", self.step_timeout_s, gt=0.0, le=1e6, optional=True)
        check_bool(ConfigError, "exact_prefill", self.exact_prefill)
        check_choice(ConfigError, "load", self.load, LOADS)
        check_str(ConfigError, "revision", self.revision, optional=True)
        self._check_path("cache_dir")
        check_bool(ConfigError, "local_files_only", self.local_files_only)
        self._check_path("tokenizer")
        check_str(ConfigError, "chat_template", self.chat_template, optional=True)
        if self.speculation is not None and not isinstance(self.speculation, Speculation):
            raise ConfigError.of("speculation", self.speculation, "a Speculation or None")

        if isinstance(self.dtype, str) and self.dtype == "float16" and self.device == "cpu":
            raise ConfigError.of("dtype", self.dtype, "float32 or bfloat16 on the CPU")

    def _check_device(self) -> None:
        check_str(ConfigError, "device", self.device)
        # torch takes "cuda:200" for the device of index -56.
        if not re.fullmatch(r"auto|cpu|cuda(:[1-9]?[0-9])?", self.device):
            raise ConfigError.of("device", self.device, '"auto", "cpu", "cuda" or "cuda:N", N from 0 to 99')

    def _check_path(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not (isinstance(value, str | Path) and str(value)):
            raise ConfigError.of(name, value, "a path, a non-empty string or None")

    def replace(self, **changes: object) -> EngineConfig:
        """A copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)
