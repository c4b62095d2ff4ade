"""The loss of a replica under load: what each stream sees when the replica's process is killed.

    python -m perf.replica_loss --devices cuda:0 cuda:1
    python -m perf.replica_loss --model scripted --devices cpu cpu

Engines in processes of their own behind a pool serve the same requests three times: undisturbed; with replay,
while the process of replica 0 is killed; and without replay, while it is killed again. Half of the requests
are sampled. Exit status: 0 if no stream got a token twice or another one than undisturbed, no stream of the
other replicas was affected, and all streams went on with replay, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from drift_sdk import EngineConfig, ProcessEngine, Routing, SamplingParams
from perf.harness.killed_replica import SCRIPTED, KilledReplica, LossRun, engine_of, requests_of
from perf.harness.numbers import at_least
from perf.harness.record import Results, result_path, write
from perf.harness.shapes import MODELS, prepare
from perf.harness.table import show, title_of

__all__ = ["main", "measure"]

COLUMNS = ("load", "streams", "failed", "replayed", "moved", "tokens before", "longest gap ms", "problems")


async def measure(
    engines: Sequence[ProcessEngine],
    requests: Sequence[tuple[list[int], SamplingParams]],
    num_tokens: int,
    model_name: str,
) -> list[LossRun]:
    """The three loads."""
    bench = KilledReplica(engines, requests, num_tokens, model_name)
    try:
        return [
            await bench.serve(Routing(replay=replay), kills=kills)
            for replay, kills in ((True, False), (True, True), (False, True))
        ]
    finally:
        for engine in engines:
            await engine.aclose()


def loss_table(results: Results) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows of all loads."""
    rows = [
        (
            run["scenario"],
            f"{run['num_killed']} of {run['batch']}",
            str(run["num_failed"]),
            str(run["num_replayed"]),
            str(run["num_moved"]),
            " to ".join(map(str, run["tokens_before"])),
            "{:.0f}, others {:.0f}".format(run["gap_ms"]["max"], run["other_gap_ms"]["max"]),
            "; ".join(run["problems"][:3]) or "none",
        )
        for run in results.runs
    ]
    return title_of(results), COLUMNS, rows


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="llama-3.1-8b", help=f"{', '.join(MODELS)} or {SCRIPTED}")
    made.add_argument("--devices", nargs="+", default=["cuda:0", "cuda:1"], metavar="DEVICE")
    made.add_argument("--streams", type=at_least(1), default=64, metavar="N")
    made.add_argument("--tokens", type=at_least(1), default=256, metavar="N", help="of each stream")
    made.add_argument("--out", type=Path, help="result file (default: perf/results/GPU/replica-loss.json)")
    given = made.parse_args(arguments)
    if len(given.devices) < 2 or given.streams < 2 or given.tokens < 16:
        made.error("--devices and --streams: expected at least 2; --tokens: at least 16")

    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = arguments_of(arguments)
    config = EngineConfig(max_model_len=2048)
    if given.devices[0] == "cpu":
        config = config.replace(num_threads=1, kv_cache_tokens=65_536)
    with tempfile.TemporaryDirectory() as folder:
        model = None if given.model == SCRIPTED else prepare(given.model, Path(folder) / given.model)
        engines = [engine_of(model, device, config) for device in given.devices]
        vocab_size = 128 if model is None else model.spec.vocab_size
        requests = requests_of(given.streams, given.tokens, vocab_size)
        runs = asyncio.run(measure(engines, requests, given.tokens, given.model))

    results = Results.of(given.devices[0], 0.0)
    for run in runs:
        results.add(run)
    path = given.out or result_path("replica-loss", results.gpu)
    write(results, path)
    show(*loss_table(results))
    print(f"written to {path}")
    return 1 if any(run.problems for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
