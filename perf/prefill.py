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

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from drift_sdk import Engine, EngineConfig, SamplingParams
from drift_sdk.config import PREFILL_TOKEN_BUDGETS
from perf.harness.bandwidth import matmul_tflop_s
from perf.harness.decoding import slow_paths
from perf.harness.numbers import at_least
from perf.harness.record import PrefillRun, Run
from perf.harness.recording import Recording, add_weights, dtype_name, free_memory, parser
from perf.harness.scenario import random_tokens
from perf.harness.shapes import FP8_BLOCKS, Model, prepare
from perf.harness.table import prefill_table, show
from perf.peers import vllm

__all__ = ["PrefillOptions", "main", "measure"]

NUM_WARM_UPS = 2
PEER_WEIGHTS = None, "fp8", FP8_BLOCKS
"""Forms of weights that vLLM has too."""


class PrefillOptions(Struct, frozen=True, kw_only=True):
    """Settings as in EngineConfig, and the number of timed repeats."""

    device: str = "cpu"
    dtype: str = "auto"
    executor: str = "auto"
    prefill_token_budget: int = PREFILL_TOKEN_BUDGETS["cuda"]
    strict_performance: bool = False
    fast_prompts: bool = False
    repeats: int = 5

    @property
    def config_name(self) -> str | UnsetType:
        """The `config` of runs: fields that runs are compared by and that differ from the defaults."""
        return "fast_prompts=true" if self.fast_prompts else UNSET


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
        "strict_performance": options.strict_performance,
        "fast_prompts": options.fast_prompts,
    }
    async with Engine(model.path, EngineConfig(**settings)) as engine:
        for num_tokens in lengths:
            times = [
                await first_token_seconds(
                    engine, random_tokens(model.spec.vocab_size, num_tokens, next(seeds))
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
                config=options.config_name,
                slow_paths=slow_paths(engine.stats()),
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
        "--tokens", type=at_least(1), nargs="+", default=(8192, 32_768), help="prompt lengths"
    )
    arguments_parser.add_argument(
        "--prefill-token-budget", type=at_least(1), default=PREFILL_TOKEN_BUDGETS["cuda"]
    )
    arguments_parser.add_argument(
        "--peer", nargs="+", choices=("vllm",), default=(), help="engines to measure in the same run"
    )
    arguments_parser.add_argument("--strict-performance", action="store_true", help="as in EngineConfig")
    arguments_parser.add_argument(
        "--fast-prompts", action="store_true", help="measure prompts with it too, as in EngineConfig"
    )
    add_weights(arguments_parser)
    given = arguments_parser.parse_args(arguments)
    if given.peer and (given.weights not in PEER_WEIGHTS or given.kv_dtype):
        arguments_parser.error(
            "--peer: expected no --kv-dtype, and --weights fp8, fp8-blocks or none, as the peer has them"
        )
    if given.fast_prompts and (not given.device.startswith("cuda") or given.executor == "eager"):
        arguments_parser.error("--fast-prompts: expected the graph executor: the eager one has one way")
    options = PrefillOptions(
        device=given.device,
        dtype=given.dtype,
        executor=given.executor,
        prefill_token_budget=given.prefill_token_budget,
        strict_performance=given.strict_performance,
        repeats=given.repeats,
    )
    recording = Recording("prefill", given.device, given.out)
    peak_tflop_s = matmul_tflop_s(given.device)
    free_memory()
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder), given.weights, given.kv_dtype)
        for is_fast in (False, True) if given.fast_prompts else (False,):
            own = replace(options, fast_prompts=is_fast)
            asyncio.run(measure(model, given.tokens, own, peak_tflop_s, recording.add))
            free_memory()

        if given.peer:
            for run in vllm.measure_prompts(model, given.tokens, given.repeats, peak_tflop_s):
                recording.add(run)

    show(*prefill_table(recording.results))
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
