"""Timed generations of a batch, as all measurements of decoding use them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from drift_sdk import Engine, EngineConfig, EngineStats, SamplingParams
from drift_sdk.processors import LogitsProcessor
from perf.harness.recording import dtype_name
from perf.harness.scenario import LENGTHS, Scenario, Text
from perf.harness.shapes import Model

__all__ = ["BLOCK_SIZE", "GREEDY", "DecodeOptions", "engine_config", "generation_seconds", "slow_paths"]

BLOCK_SIZE = 64  # the largest that an executor chooses by itself
GREEDY = SamplingParams(ignore_eos=True)
PROCESSED_EVERY = 8
SLOW_PATHS = (
    "num_untuned_shapes", "num_host_waits", "num_split_rounds", "num_host_copies", "num_allocations",
)  # fmt: skip
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


class DecodeOptions(Struct, frozen=True, kw_only=True):
    """Settings of the engine, and what is timed how often.

    device, dtype, executor, max_model_len, strict_performance, tensor_parallel, tuning:  as in EngineConfig.
    repeats:  number of timed repeats.
    lengths:  tokens of the shorter and of the longer generation.
    params:   of every request, except its length.
    processor: of every eighth request; None: of none.
    compares_gpus: whether the number of GPUs tells runs apart.
    text:     what prompts are taken from; None for random prompts.
    """

    device: str = "cpu"
    dtype: str = "auto"
    executor: str = "auto"
    max_model_len: int | None = None
    strict_performance: bool = False
    tensor_parallel: int = 1
    tuning: str = "off"
    repeats: int = 5
    lengths: tuple[int, int] = LENGTHS
    params: SamplingParams = GREEDY
    processor: LogitsProcessor | None = None
    compares_gpus: bool = False
    text: Text | None = None

    def prompts(self, scenario: Scenario, vocab_size: int) -> list[list[int]]:
        """The prompts of a scenario."""
        return scenario.prompts(vocab_size) if self.text is None else scenario.text_prompts(self.text)

    @property
    def dtype_name(self) -> str:
        """The dtype that the engine uses for "auto", or the given one."""
        return dtype_name(self.dtype, self.device)

    @property
    def itemsize(self) -> int:
        """Bytes of a number of this dtype."""
        return ITEMSIZES[self.dtype_name]


def engine_config(model: Model, scenarios: Iterable[Scenario], options: DecodeOptions) -> EngineConfig:
    """A configuration that fits the scenarios.

    It has room for the longest sequence, and for the KV of the largest batch while its prompts stay in the
    prefix cache.
    """
    lengths = [-(-(s.context + options.lengths[1]) // BLOCK_SIZE) * BLOCK_SIZE for s in scenarios]
    most = max(s.batch * length for s, length in zip(scenarios, lengths, strict=True))
    max_model_len = options.max_model_len or max(lengths)
    config: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "executor": options.executor,
        "strict_performance": options.strict_performance,
        "tensor_parallel": options.tensor_parallel,
        "tuning": options.tuning,
        "load": model.load,
        "weights": model.weights,
        "kv_dtype": model.kv_dtype,
        "max_num_seqs": max(s.batch for s in scenarios),
        "max_model_len": max_model_len,
        "kv_cache_tokens": max(most, max_model_len) + BLOCK_SIZE * max(s.batch for s in scenarios),
    }
    return EngineConfig(**config)


def slow_paths(stats: EngineStats) -> dict[str, int]:
    """The counters of slow paths that are not 0, by name."""
    return {name: getattr(stats, name) for name in SLOW_PATHS if getattr(stats, name)}


async def generation_seconds(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    params: SamplingParams = GREEDY,
    processor: LogitsProcessor | None = None,
) -> float:
    """Seconds from resuming the engine, with all requests in its queue, to the last completion.

    processor: of the first and then of every eighth request.

    Raises RuntimeError if a completion does not have `num_tokens` tokens.
    """
    params = replace(params, max_tokens=num_tokens)
    processed = params if processor is None else replace(params, logits_processors=(processor,))
    await engine.pause()
    streams = [
        engine.generate(prompt, params if index % PROCESSED_EVERY else processed)
        for index, prompt in enumerate(prompts)
    ]
    ends = [asyncio.ensure_future(stream.completion()) for stream in streams]
    # There is no event for a request being queued. A rejected request ends without being queued.
    while engine.stats().num_queued < len(ends) and not any(end.done() for end in ends):  # noqa: ASYNC110
        await asyncio.sleep(0.001)

    started_at = time.perf_counter()
    await engine.resume()
    completions = await asyncio.gather(*ends)
    taken = time.perf_counter() - started_at
    lengths = {len(completion.token_ids) for completion in completions}
    if lengths != {num_tokens}:
        raise RuntimeError(f"completions of {sorted(lengths)} tokens: expected {num_tokens} each")

    return taken
