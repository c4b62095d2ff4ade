"""Measure prompt tokens per second, with one request at a time and a new prompt for each.

python -m perf.prefill --model llama-3.1-8b --tokens 8192 32768 --peer vllm
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from drift_sdk import Engine, EngineConfig, SamplingParams
from perf.harness.bandwidth import matmul_tflop_s
from perf.harness.record import PrefillRun, Run
from perf.harness.recording import Recording, add_weights, dtype_name, free_memory, parser
from perf.harness.scenario import random_tokens
from perf.harness.shapes import Model, prepare
from perf.harness.table import prefill_table, show
from perf.peers import vllm

__all__ = ["PrefillOptions", "main", "measure"]

NUM_WARM_UPS = 2


class PrefillOptions(Struct, frozen=True, kw_only=True):
    """Settings as in EngineConfig, and the number of timed repeats."""

    device: str = "cpu"
    dtype: str = "auto"
    executor: str = "auto"
    prefill_token_budget: int = EngineConfig().prefill_token_budget
    repeats: int = 5


async def measure(
    model: Model,
    lengths: Sequence[int],
    options: PrefillOptions,
    peak_tflop_s: float,
    on_run: Callable[[Run], None] = lambda run: None,
) -> list[PrefillRun]:
    """Measure all prompt lengths, in tokens, on one engine.

    `on_run` is called with each run as soon as it has ended.
    """
    runs = []
    seeds = itertools.count()
    settings: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "executor": options.executor,
        "load": model.load,
        "weights": model.weights,
        "kv_dtype": model.kv_dtype,
        "max_num_seqs": 1,
        "max_model_len": max(lengths) + 1,
        "prefill_token_budget": options.prefill_token_budget,
    }
    async with Engine(model.path, EngineConfig(**settings)) as engine:
        for num_tokens in lengths:
            times = [
                await first_token_seconds(
                    engine, random_tokens(model.config.vocab_size, num_tokens, next(seeds))
                )
                for _ in range(NUM_WARM_UPS + options.repeats)
            ][NUM_WARM_UPS:]
            run = PrefillRun.of_times(
                times,
                num_tokens,
                model.prefill_flops(num_tokens),
                engine="drift",
                executor=engine.executor,
                model=model.name,
                dtype=model.dtype_name or dtype_name(options.dtype, options.device),
                prefill_token_budget=options.prefill_token_budget,
                matmul_tflop_s=peak_tflop_s,
            )
            runs.append(run)
            on_run(run)

    return runs


async def first_token_seconds(engine: Engine, prompt: Sequence[int]) -> float:
    """Seconds from the call to the first token. Raises RuntimeError if part of the prompt was cached."""
    started_at = time.perf_counter()
    completion = await engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    taken = time.perf_counter() - started_at
    if completion.usage.cached_tokens:
        raise RuntimeError(
            f"{completion.usage.cached_tokens} tokens of the prompt were cached: expected none"
        )

    return taken


def main(arguments: Sequence[str] | None = None) -> None:
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument(
        "--tokens", type=int, nargs="+", default=(8192, 32_768), help="prompt lengths"
    )
    arguments_parser.add_argument(
        "--prefill-token-budget", type=int, default=EngineConfig().prefill_token_budget
    )
    arguments_parser.add_argument(
        "--peer", nargs="+", choices=("vllm",), default=(), help="engines to measure in the same run"
    )
    add_weights(arguments_parser)
    given = arguments_parser.parse_args(arguments)
    if (given.weights or given.kv_dtype) and given.peer:
        arguments_parser.error("--peer: expected no --weights and no --kv-dtype, as peers do not quantise")
    options = PrefillOptions(
        device=given.device,
        dtype=given.dtype,
        executor=given.executor,
        prefill_token_budget=given.prefill_token_budget,
        repeats=given.repeats,
    )
    recording = Recording("prefill", given.device, given.out)
    peak_tflop_s = matmul_tflop_s(given.device)
    free_memory()
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder), given.weights, given.kv_dtype)
        asyncio.run(measure(model, given.tokens, options, peak_tflop_s, recording.add))

        if given.peer:
            free_memory()
            for run in vllm.measure_prompts(model, given.tokens, given.repeats, peak_tflop_s):
                recording.add(run)

    show(*prefill_table(recording.results))
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
