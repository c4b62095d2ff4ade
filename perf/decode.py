"""Decode rate of the engine, by the difference of two lengths, and what decoding costs the host process.

python -m perf.decode --model llama-3.1-8b --scenario single-512 batch64-512
python -m perf.decode --model smollm2-135m --peer transformers --out decode.json
python -m perf.decode --temperature 0.8 --top-p 0.95
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import replace

from drift_sdk import Engine, EngineConfig, SamplingParams
from perf.harness.host import ENGINE_THREAD, LoopLag, thread_seconds
from perf.harness.record import DecodeRun, Run
from perf.harness.recording import Recording, dtype_name, free_memory, parser
from perf.harness.scenario import LENGTHS, SCENARIOS, Scenario
from perf.harness.shapes import Model, prepare
from perf.harness.table import decode_table, show
from perf.peers import PEERS

__all__ = ["DecodeOptions", "main", "measure"]

IDLE_S = 0.5
BLOCK_SIZE = 64  # the largest that an executor chooses by itself
GREEDY = SamplingParams(ignore_eos=True)
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


class DecodeOptions(Struct, frozen=True, kw_only=True):
    """How the engine is set up and how often what is timed. `lengths`: tokens of the shorter and the longer
    generation. `params`: of every request, save its length."""

    device: str = "cpu"
    dtype: str = "auto"
    executor: str = "auto"
    max_model_len: int | None = None
    repeats: int = 5
    lengths: tuple[int, int] = LENGTHS
    params: SamplingParams = GREEDY

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype, self.device)

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype_name]


async def measure(
    model: Model,
    scenarios: Sequence[Scenario],
    options: DecodeOptions,
    bandwidth_tb_s: float,
    on_run: Callable[[Run], None] = lambda run: None,
) -> list[DecodeRun]:
    """Runs of all scenarios on one engine, each reported as it is done."""
    runs = []
    async with Engine(model.path, engine_config(model, scenarios, options)) as engine:
        for scenario in scenarios:
            runs.append(await measure_one(engine, model, scenario, options, bandwidth_tb_s))
            on_run(runs[-1])

    return runs


def engine_config(model: Model, scenarios: Iterable[Scenario], options: DecodeOptions) -> EngineConfig:
    """Room for the longest sequence, and for the KV of the largest batch with its prompts kept."""
    lengths = [-(-(s.context + options.lengths[1]) // BLOCK_SIZE) * BLOCK_SIZE for s in scenarios]
    most = max(s.batch * length for s, length in zip(scenarios, lengths, strict=True))
    max_model_len = options.max_model_len or max(lengths)
    config: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "executor": options.executor,
        "load": model.load,
        "max_num_seqs": max(s.batch for s in scenarios),
        "max_model_len": max_model_len,
        "kv_cache_tokens": max(most, max_model_len) + BLOCK_SIZE * max(s.batch for s in scenarios),
    }
    return EngineConfig(**config)


async def measure_one(
    engine: Engine, model: Model, scenario: Scenario, options: DecodeOptions, bandwidth_tb_s: float
) -> DecodeRun:
    prompts = scenario.prompts(model.config.vocab_size)
    (short, long), params = options.lengths, options.params
    for num_tokens in (short, long, long):
        await generation_seconds(engine, prompts, num_tokens, params)

    rounds_s = []
    for _ in range(options.repeats):
        short_s = await generation_seconds(engine, prompts, short, params)
        long_s = await generation_seconds(engine, prompts, long, params)
        rounds_s.append((long_s - short_s) / (long - short))

    run = DecodeRun.of_rounds(
        rounds_s,
        model.decode_bytes(scenario.batch, scenario.mean_context(options.lengths), options.itemsize),
        bandwidth_tb_s,
        engine="drift",
        executor=engine.executor,
        model=model.name,
        dtype=options.dtype_name,
        scenario=scenario,
        temperature=params.temperature or UNSET,
        top_p=params.top_p if params.temperature else UNSET,
    )
    await measure_host(engine, prompts, replace(params, max_tokens=long), run)
    return run


async def generation_seconds(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, params: SamplingParams = GREEDY
) -> float:
    """From letting the engine go, with every request in its queue, to the last completion."""
    params = replace(params, max_tokens=num_tokens)
    await engine.pause()
    streams = [engine.generate(prompt, params) for prompt in prompts]
    ends = [asyncio.ensure_future(stream.completion()) for stream in streams]
    # The engine announces neither; a request that is refused has ended.
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


async def measure_host(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, run: DecodeRun
) -> None:
    """Lag and CPU time while every chunk is read; one after the other, since watching the lag takes time."""
    async with LoopLag() as idle:
        await asyncio.sleep(IDLE_S)

    async with LoopLag() as busy:
        await read_chunks(engine, prompts, params)

    engine_s, loop_s, num_steps = thread_seconds(ENGINE_THREAD), time.thread_time(), engine.stats().num_steps
    num_chunks = await read_chunks(engine, prompts, params)
    loop_s = time.thread_time() - loop_s
    if engine_s is not None:
        engine_s = (thread_seconds(ENGINE_THREAD) or 0.0) - engine_s
        engine_s /= engine.stats().num_steps - num_steps

    run.loop_lag_idle_ms_p99 = idle.ms_p99
    run.loop_lag_ms_p99 = busy.ms_p99
    run.engine_cpu_ms_per_round = None if engine_s is None else engine_s * 1e3
    run.loop_cpu_us_per_chunk = loop_s / num_chunks * 1e6


async def read_chunks(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> int:
    """How many chunks came."""

    async def read(prompt: Sequence[int]) -> int:
        return len([chunk async for chunk in engine.generate(prompt, params)])

    return sum(await asyncio.gather(*map(read, prompts)))


def main(arguments: Sequence[str] | None = None) -> None:
    given_parser = parser(__doc__)
    given_parser.add_argument("--scenario", nargs="+", type=Scenario.parse, default=SCENARIOS, metavar="NAME")
    given_parser.add_argument("--max-model-len", type=int, help="the default is what the scenarios need")
    given_parser.add_argument("--peer", nargs="+", choices=PEERS, default=(), help="measured in the same run")
    given_parser.add_argument("--temperature", type=float, default=0.0, help="sampled: another file")
    given_parser.add_argument("--top-p", type=float, default=1.0)
    given = given_parser.parse_args(arguments)
    if given.temperature and given.peer:
        given_parser.error("peers are greedy")

    options = DecodeOptions(
        device=given.device,
        dtype=given.dtype,
        executor=given.executor,
        max_model_len=given.max_model_len,
        repeats=given.repeats,
        params=replace(GREEDY, temperature=given.temperature, top_p=given.top_p),
    )
    recording = Recording(
        "sampled" if given.temperature else "decode", given.device, given.out, "transformers"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder))
        asyncio.run(measure(model, given.scenario, options, recording.bandwidth_tb_s, recording.add))
        for peer in given.peer:
            free_memory()
            for run in PEERS[peer](model, given.scenario, given.repeats, recording.bandwidth_tb_s):
                recording.add(run)

    show(*decode_table(recording.results))
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
