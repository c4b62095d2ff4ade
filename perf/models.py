"""Measure the decode rates of several models of published shapes, one after the other in one process.

What decoding costs the host process is not measured.

python -m perf.models --models qwen2.5-7b qwen3-8b --scenario single-512 batch64-512
python -m perf.models --topic untuned --models llama-2-7b --peer vllm
python -m perf.models --models llama-2-7b --tuning short
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from drift_sdk import Engine
from perf.decode import PEERS, measure_rate
from perf.harness.decoding import DecodeOptions, engine_config
from perf.harness.machine import default_device
from perf.harness.numbers import at_least
from perf.harness.record import DecodeRun
from perf.harness.recording import Recording, free_memory
from perf.harness.scenario import LENGTHS, Scenario
from perf.harness.shapes import MODELS, Model, prepare
from perf.harness.table import decode_table, show

__all__ = ["DENSE", "main", "measure"]

DENSE = (
    "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-4b", "qwen3-8b",
    "qwen3-14b", "smollm2-135m-random",
)  # fmt: skip
"""The models that are measured by default."""
BATCHES = tuple(map(Scenario.parse, ("single-512", "batch8-512", "batch32-512", "batch64-512")))
TOPICS = ("models", "untuned")


async def measure(
    model: Model,
    scenarios: Sequence[Scenario],
    options: DecodeOptions,
    bandwidth_tb_s: float,
    on_run: Callable[[DecodeRun], None],
) -> None:
    """Measure all scenarios of a model on one engine."""
    async with Engine(model.path, engine_config(model, scenarios, options)) as engine:
        for scenario in scenarios:
            run = await measure_rate(engine, model, scenario, options, bandwidth_tb_s)
            if options.tuning != "off":
                run.config = f"tuning={options.tuning}"
            on_run(run)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=DENSE, metavar="NAME")
    parser.add_argument("--scenario", nargs="+", type=Scenario.parse, default=BATCHES, metavar="NAME")
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=(), help="engines to measure beside it")
    parser.add_argument("--tuning", default="off", help="as in EngineConfig")
    parser.add_argument(
        "--topic",
        choices=TOPICS,
        default="models",
        help="untuned: models of 4B and more without measured products of this GPU, which gates judge",
    )
    parser.add_argument("--device", default=default_device(), help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, help="timed repeats; the result is their median"
    )
    parser.add_argument("--out", type=Path, help="result file (default: perf/results/GPU/TOPIC.json)")
    given = parser.parse_args(arguments)

    recording = Recording(given.topic, given.device, given.out, "transformers")
    options = DecodeOptions(device=given.device, tuning=given.tuning, repeats=given.repeats, lengths=LENGTHS)
    bandwidth = recording.bandwidth_tb_s
    for name in given.models:
        with tempfile.TemporaryDirectory() as folder:
            model = prepare(name, Path(folder))
            asyncio.run(measure(model, given.scenario, options, bandwidth, recording.add))
            free_memory()
            if given.peer and model.load != "random":
                print(f"{name}: not measured with {', '.join(given.peer)}, which take random weights alone")
                continue

            for peer in given.peer:
                for run in PEERS[peer](model, given.scenario, given.repeats, bandwidth):
                    recording.add(run)

    title, columns, rows = decode_table(recording.results)
    models = [run["model"] for run in recording.results.runs]
    show(title, ("model", *columns), [(name, *row) for name, row in zip(models, rows, strict=True)])
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
