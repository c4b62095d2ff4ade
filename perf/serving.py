"""A service's load on this engine, in its default configuration, and on a peer, each on its own GPU.

python -m perf.serving --peer vllm --devices 0 1 --swap --repeats 2 --cases closed-64 prefix open-20
python -m perf.serving --peer vllm --draft
python -m perf.serving --cases closed-64 --compare-set "" --compare-set "block_size=32"
python -m perf.serving --devices 0 1 --replicas 2 --cases closed-128 --compare-set "" --compare-set replicas=1

Cases: closed-N and sampled-N (N clients, greedy or sampled), open-R (R requests a second), prefix and
prefix-N (8 or N shared prefixes).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from perf.harness.numbers import at_least, over_zero
from perf.harness.shapes import MODELS
from perf.harness.table import show
from perf.service.benchmark import WARM_UPS, Benchmark, Plan
from perf.service.engines import SCRIPTED, Drafts, drift_engine, find_model, parse_settings, peer_of
from perf.service.load import CASES, Case
from perf.service.runs import comparison_table, ratio_table

__all__ = ["main"]


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options. Exits with an error if they do not fit together."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    num_engines = 1 if given.peer is None else 2
    if given.replicas > 1:
        if given.peer is not None:
            parser.error("--replicas is for this engine alone: expected no --peer")
        if given.model != SCRIPTED and len(given.devices) != given.replicas:
            parser.error(f"--devices {given.devices}: expected {given.replicas}, one for each replica")
    elif len(given.devices) not in (1, num_engines):
        parser.error(f"--devices {given.devices}: expected one, or {num_engines}")
    if given.compare_set and given.peer is not None:
        parser.error("--compare-set compares configurations of this engine: expected no --peer")
    if given.peer is not None and (given.model == SCRIPTED) != (given.peer == SCRIPTED):
        parser.error(f"--model {given.model}, --peer {given.peer}: expected both {SCRIPTED}, or none")
    if given.model == SCRIPTED and given.draft:
        parser.error(f"--model {SCRIPTED}: expected no --draft")

    for text in (*given.set, *given.peer_set, *(given.compare_set or ())):
        try:
            parse_settings(text)
        except ValueError as error:
            parser.error(str(error))

    return given


def make_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--model", default="llama-3.1-8b", help=f"{', '.join(MODELS)}, {SCRIPTED} (a dry run) or a folder"
    )
    made.add_argument("--cases", nargs="+", type=Case.parse, default=CASES, metavar="NAME")
    made.add_argument("--num-requests", type=at_least(1), help="per case; default: about 20 s on an H200")
    made.add_argument("--seconds", type=over_zero, default=40.0, help="limit for a case")
    made.add_argument("--repeats", type=at_least(1), default=1, help="each repeat draws new requests")
    made.add_argument("--seed", default="0")
    made.add_argument("--draft", action="store_true", help="EAGLE-3 drafts of random weights on all engines")
    made.add_argument("--num-draft-tokens", type=at_least(1), default=3, metavar="K")
    made.add_argument("--acceptance-length", type=over_zero, default=3.2, help="simulated tokens per round")
    made.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of EngineConfig")
    made.add_argument(
        "--compare-set", action="append", metavar='"FIELD=VALUE ..."', help="a configuration; repeatable"
    )
    made.add_argument("--peer", choices=("vllm", SCRIPTED))
    made.add_argument("--peer-path", default=os.environ.get("VLLM_PATH"), help="folder to import vLLM from")
    made.add_argument("--peer-set", nargs="+", default=[], metavar="FIELD=VALUE", help="AsyncEngineArgs")
    made.add_argument(
        "--replicas",
        type=at_least(1),
        default=1,
        metavar="N",
        help="engines behind one pool, each on a GPU of its own",
    )
    made.add_argument(
        "--devices",
        nargs="+",
        type=at_least(0),
        default=[0],
        help="GPUs: one per engine, or one for all in turn",
    )
    made.add_argument("--swap", action="store_true", help="engines swap GPUs after each repeat")
    made.add_argument("--logs", type=Path, help="folder for the engines' output (default: temporary)")
    made.add_argument("--out", type=Path, help="result file (default: perf/results/GPU/serving.json)")
    return made


def benchmark_of(given: argparse.Namespace, folder: Path) -> Benchmark:
    """The benchmark that the options describe.

    folder: for models and logs. Raises ValueError for a model that the peer cannot be given.
    """
    model = find_model(given.model, folder)
    if given.peer == "vllm" and (model is None or model.load != "random"):
        raise ValueError(f"model={given.model!r}: expected one with random weights to compare with vllm")

    drafts = Drafts(given.num_draft_tokens, given.acceptance_length) if given.draft else None
    engines = [drift_engine(model, drafts, given.set)]
    job = dataclasses.replace(engines[0].job, num_replicas=given.replicas)
    engines[0] = dataclasses.replace(engines[0], job=job)
    if given.peer is not None:
        engines.append(peer_of(engines[0], given.peer, given.peer_path, given.peer_set))

    def fitted(case: Case) -> Case:
        fits = case.fitted(engines[0].job.max_model_len)
        if drafts is not None:
            fits = fits.with_drafts()
        if given.num_requests is not None:
            fits = dataclasses.replace(fits, num_requests=given.num_requests)
        return fits

    logs = given.logs or folder
    logs.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        cases=[fitted(case) for case in given.cases],
        warm_ups=[case.fitted(engines[0].job.max_model_len) for case in WARM_UPS],
        devices=given.devices,
        logs=logs,
        out=given.out,
        repeats=given.repeats,
        swap=given.swap,
        configs=given.compare_set or ("",),
        seconds=given.seconds,
        seed=given.seed,
    )
    return Benchmark(plan, engines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table. Exits with 1 if an engine failed; results measured before are written."""
    given = arguments_of(arguments)
    # Leaving the `with` blocks kills the engines' processes, so SIGTERM must raise instead of ending at once.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory() as folder:
            benchmark = benchmark_of(given, Path(folder))
            benchmark.measure()
    finally:
        signal.signal(signal.SIGTERM, previous)

    if benchmark.results is not None:
        if given.peer is not None:
            show(*ratio_table(benchmark.results, given.peer))
        else:
            show(*comparison_table(benchmark.results))
        print(f"written to {benchmark.path}")
    if benchmark.num_failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
