"""vLLM as a measured service.

Of this project it imports only the load, because its process has vLLM's own packages on its path.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from perf.service.load import Request

__all__ = ["VllmService"]

SETTINGS = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,  # vLLM's server chooses this on GPUs of 70 GB and more
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "seed": 0,
}
"""Everything else is vLLM's default: CUDA graphs, compilation, asynchronous scheduling."""


class VllmService:
    """AsyncLLM, the engine under vLLM's server. Its core runs in another process.

    Tokens are not detokenised.
    """

    def __init__(self, engine: AsyncLLM, settings: dict[str, Any], start_s: float) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._num_cached_tokens = 0
        cache = engine.vllm_config.cache_config
        self.facts = {
            "engine_version": vllm.__version__,
            "settings": ", ".join(f"{name}={value!r}" for name, value in settings.items()),
            "start_s": round(start_s, 3),
            "max_num_seqs": engine.vllm_config.scheduler_config.max_num_seqs,
            "max_model_len": engine.vllm_config.model_config.max_model_len,
            "kv_cache_tokens": (cache.num_gpu_blocks or 0) * (cache.block_size or 0),
        }

    @classmethod
    async def start(cls, job: dict[str, Any], settings: dict[str, Any]) -> VllmService:
        """Start an engine.

        job:       `model`, and with drafts `draft`, `num_draft_tokens` and `acceptance_length`.
        settings:  arguments of AsyncEngineArgs.
        """
        started_at = time.perf_counter()
        arguments = SETTINGS | {"model": job["model"], "max_model_len": job["max_model_len"]}
        if job["draft"] is not None:
            arguments["speculative_config"] = {
                "method": "eagle3",
                "model": job["draft"],
                "num_speculative_tokens": job["num_draft_tokens"],
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": job["acceptance_length"],
            }
        arguments |= settings
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments), usage_context=UsageContext.OPENAI_API_SERVER
        )
        return cls(engine, arguments, time.perf_counter() - started_at)

    async def stream(self, request: Request, is_sampled: bool) -> AsyncIterator[int]:
        """Generate exactly `request.num_tokens` tokens; yields the number of tokens of each chunk."""
        params = SamplingParams(
            max_tokens=request.num_tokens,
            ignore_eos=True,
            temperature=0.8 if is_sampled else 0.0,
            top_p=0.95 if is_sampled else 1.0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,  # as vLLM's server does
        )
        is_first = True
        outputs = self._engine.generate(tokens_input(request.prompt), params, str(next(self._numbers)))
        async for output in outputs:
            if is_first:
                self._num_cached_tokens += output.num_cached_tokens or 0
                is_first = False
            yield len(output.outputs[0].token_ids)

    def counts(self) -> dict[str, int]:
        """Counts since the engine's start."""
        return {"num_cached_tokens": self._num_cached_tokens}

    async def aclose(self) -> None:
        self._engine.shutdown()
