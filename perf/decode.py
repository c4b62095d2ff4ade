"""Measure the decode rate of the engine and the cost of decoding for the host process.

The rate is taken from the difference between generating two numbers of tokens.

python -m perf.decode --model llama-3.1-8b --scenario single-512 batch64-512
python -m perf.decode --model smollm2-135m --peer transformers --out decode.json
python -m perf.decode --temperature 0.8 --top-p 0.95
python -m perf.decode --weights fp8 --scenario single-512 batch64-512 --peer vllm vllm-marlin
python -m perf.decode --model qwen3.6-27b --weights fp8-blocks --peer vllm
python -m perf.decode --scenario batch64-512 --processor machine bias
python -m perf.decode --kv-dtype fp8 --scenario single-32k batch4-16k
python -m perf.decode --model llama-3.1-8b --tensor-parallel 1 2 --peer vllm
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from drift_sdk import Engine, SamplingParams, TokenBias, TokenMachine, TokenState
from drift_sdk.processors import LogitsProcessor
from perf.harness.decoding import GREEDY, DecodeOptions, engine_config, generation_seconds, slow_paths
from perf.harness.experts import measured_experts
from perf.harness.host import ENGINE_THREAD, LoopLag, thread_seconds
from perf.harness.numbers import at_least
from perf.harness.record import DecodeRun, Run
from perf.harness.recording import Recording, add_tensor_parallel, add_weights, free_memory, parser
from perf.harness.scenario import SCENARIOS, Scenario
from perf.harness.shapes import FP8_BLOCKS, Model, prepare
from perf.harness.table import decode_table, show
from perf.peers import transformers, vllm

__all__ = ["PEERS", "main", "measure", "measure_rate"]

IDLE_S = 0.5
PEERS: dict[str, Callable[[Model, Sequence[Scenario], int, float], Iterator[DecodeRun]]] = {
    "transformers": transformers.measure,
    "vllm": vllm.measure,
    "vllm-marlin": partial(vllm.measure, linear_backend="marlin"),
}
"""Name -> measure(model, scenarios, repeats, read bandwidth in TB/s), which yields a run per scenario."""
QUANTISED_PEERS = {None: ("transformers", "vllm"), "fp8": ("vllm", "vllm-marlin"), FP8_BLOCKS: ("vllm",)}
"""Peers that can be measured, by the form of the weights."""
PROCESSORS: dict[str, LogitsProcessor] = {
    "machine": TokenMachine(
        (TokenState(forbidden=(1,), otherwise=1), TokenState(forbidden=(2,), otherwise=0))
    ),
    "bias": TokenBias(dict.fromkeys(range(100), -1.0)),
    "function": lambda token_ids, logits: None,
}
"""One of each kind. Functions are for `--executor eager`."""


async def measure(
    model: Model,
    scenarios: Sequence[Scenario],
    options: DecodeOptions,
    bandwidth_tb_s: float,
    on_run: Callable[[Run], None] = lambda run: None,
) -> list[DecodeRun]:
    """Measure all scenarios on one engine. `on_run` is called with each run as soon as it has ended."""
    runs = []
    async with Engine(model.path, engine_config(model, scenarios, options)) as engine:
        for scenario in scenarios:
            runs.append(await measure_one(engine, model, scenario, options, bandwidth_tb_s))
            on_run(runs[-1])

    return runs


async def measure_one(
    engine: Engine, model: Model, scenario: Scenario, options: DecodeOptions, bandwidth_tb_s: float
) -> DecodeRun:
    """Measure one scenario: rate, and without a processor lag of the event loop and CPU time."""
    run = await measure_rate(engine, model, scenario, options, bandwidth_tb_s)
    if options.processor is not None:
        return run

    prompts = scenario.prompts(model.spec.vocab_size)
    await measure_host(engine, prompts, replace(options.params, max_tokens=options.lengths[1]), run)
    run.slow_paths = slow_paths(engine.stats())
    return run


async def measure_rate(
    engine: Engine, model: Model, scenario: Scenario, options: DecodeOptions, bandwidth_tb_s: float
) -> DecodeRun:
    """Measure the rate of one scenario, and count slow paths."""
    prompts = scenario.prompts(model.spec.vocab_size)
    (short, long), params = options.lengths, options.params
    seconds = partial(generation_seconds, engine, prompts, params=params, processor=options.processor)
    for num_tokens in (short, long, long):
        await seconds(num_tokens)

    rounds_s = []
    for _ in range(options.repeats):
        short_s = await seconds(short)
        long_s = await seconds(long)
        rounds_s.append((long_s - short_s) / (long - short))

    num_experts = await measured_experts(engine, model, scenario, options)
    context = scenario.mean_context(options.lengths)
    return DecodeRun.of_rounds(
        rounds_s,
        model.decode_bytes(scenario.batch, context, options.itemsize, num_experts) / options.tensor_parallel,
        bandwidth_tb_s,
        engine="drift",
        executor=engine.executor,
        model=model.name,
        dtype=model.dtype_name or options.dtype_name,
        scenario=scenario,
        num_experts=UNSET if num_experts is None else num_experts,
        temperature=params.temperature or UNSET,
        top_p=params.top_p if params.temperature else UNSET,
        num_gpus=options.tensor_parallel if options.compares_gpus else UNSET,
        config=processor_config(options.processor),
        slow_paths=slow_paths(engine.stats()),
    )


def processor_config(processor: LogitsProcessor | None) -> str | UnsetType:
    """The `config` of runs in which every eighth request has a logits processor."""
    found = [f"processor={name}" for name, each in PROCESSORS.items() if each is processor]
    return found[0] if found else UNSET


async def measure_host(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, run: DecodeRun
) -> None:
    """Measure lag and CPU time while every chunk is read, and store them in `run`.

    They are measured in separate generations, because measuring the lag takes CPU time.
    """
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
    """Generate once and read every chunk; returns the number of chunks."""

    async def read(prompt: Sequence[int]) -> int:
        return len([chunk async for chunk in engine.generate(prompt, params)])

    return sum(await asyncio.gather(*map(read, prompts)))


def main(arguments: Sequence[str] | None = None) -> None:
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument(
        "--scenario", nargs="+", type=Scenario.parse, default=SCENARIOS, metavar="NAME"
    )
    arguments_parser.add_argument("--strict-performance", action="store_true", help="as in EngineConfig")
    arguments_parser.add_argument(
        "--max-model-len", type=at_least(1), help="default: what the scenarios need"
    )
    arguments_parser.add_argument(
        "--peer", nargs="+", choices=PEERS, default=(), help="engines to measure in the same run"
    )
    arguments_parser.add_argument(
        "--temperature", type=float, default=0.0, help="above 0: sampled, written to another file"
    )
    arguments_parser.add_argument("--top-p", type=float, default=1.0)
    arguments_parser.add_argument(
        "--processor",
        nargs="+",
        choices=PROCESSORS,
        default=(),
        help="measure with logits processors too: every eighth request has one",
    )
    add_weights(arguments_parser)
    add_tensor_parallel(arguments_parser)
    given = arguments_parser.parse_args(arguments)
    if given.temperature and given.peer:
        arguments_parser.error("--temperature: expected 0 with --peer, because peers are greedy")
    allowed = QUANTISED_PEERS.get(given.weights, ())
    for peer in given.peer:
        if peer not in allowed:
            form = f"with --weights {given.weights}" if given.weights else "without --weights"
            arguments_parser.error(f"--peer {peer}: expected {' or '.join(allowed) or 'none'} {form}")
    if given.kv_dtype and given.peer:
        arguments_parser.error("--peer: expected no --kv-dtype, because peers do not quantise the cache")

    options = DecodeOptions(
        device=given.device,
        dtype=given.dtype,
        executor=given.executor,
        max_model_len=given.max_model_len,
        strict_performance=given.strict_performance,
        compares_gpus=bool(given.tensor_parallel),
        tuning=given.tuning,
        repeats=given.repeats,
        params=replace(GREEDY, temperature=given.temperature, top_p=given.top_p),
    )
    topic = "tensor-parallel" if given.tensor_parallel else "decode"
    if given.temperature:
        topic = "sampled"
    recording = Recording(topic, given.device, given.out, "transformers")
    peers = dict(PEERS)
    if given.tensor_parallel:
        peers["vllm"] = partial(vllm.measure, num_gpus=max(given.tensor_parallel))
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder), given.weights, given.kv_dtype)
        for num_gpus in given.tensor_parallel or (1,):
            for name in (None, *given.processor):
                processor = None if name is None else PROCESSORS[name]
                settings = replace(options, tensor_parallel=num_gpus, processor=processor)
                asyncio.run(measure(model, given.scenario, settings, recording.bandwidth_tb_s, recording.add))
                free_memory()
        for peer in given.peer:
            for run in peers[peer](model, given.scenario, given.repeats, recording.bandwidth_tb_s):
                recording.add(run)

    show(*decode_table(recording.results))
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
