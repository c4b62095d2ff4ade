"""Measure how many tokens rounds with a draft head emit, under each meaning of the layer ids in its config.

    python -m perf.acceptance TARGET --draft HEAD --out acceptance.json
    python -m perf.acceptance TARGET --draft HEAD --prompts prompts.txt --temperature 0 1

Every round drafts. The measurement is that of `python -m drift_sdk acceptance`, at several temperatures. No
file is downloaded. The exit status is 1 if the head can be loaded under neither meaning, or if the acceptance
length of the one in use is below --min-length at a temperature.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import UNSET, UnsetType

from drift_sdk import Chain, EngineConfig, SamplingParams, Speculation
from drift_sdk.cli.drafts import Measured, measure, read_prompts, verdict
from drift_sdk.errors import DriftError
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.dflash import read_head_config
from perf.harness.machine import default_device
from perf.harness.numbers import at_least
from perf.harness.record import Results, Run, write
from perf.harness.recording import dtype_name
from perf.harness.table import show

__all__ = ["AcceptanceRun", "acceptance_table", "main"]

COLUMNS = ("meaning of layer ids", "layers", "temperature", "AL", "accepted at 1, 2, ...", "rounds", "")


class AcceptanceRun(Run, kw_only=True):
    """Rounds of drafts at a temperature, under one meaning of the layer ids.

    convention:                  "output" or "boundary".
    layers:                      layers whose input the head reads.
    accepted_at:                 share of the rounds in which draft i and all before it were accepted.
    measured_acceptance_length:  mean tokens of a round.
    is_used:                     whether engines use this meaning for the head.
    outcome:                     the reason why the head cannot be loaded so.
    """

    draft: str
    convention: str
    layers: tuple[int, ...]
    temperature: float
    is_used: bool
    num_rounds: int = 0
    accepted_at: tuple[float, ...] | UnsetType = UNSET
    measured_acceptance_length: float | UnsetType = UNSET
    outcome: str = ""


def runs_of(
    found: Sequence[Measured], given: argparse.Namespace, used: tuple[int, ...], temperature: float
) -> list[AcceptanceRun]:
    """The runs of what was measured at a temperature. used: the layers that engines let the head read."""
    runs = []
    for one in found:
        run = AcceptanceRun(
            engine="drift",
            model=Path(given.target).resolve().name,
            dtype=dtype_name(given.dtype, given.device),
            scenario=f"answers, {one.convention}",
            batch=0,
            context=0,
            num_draft_tokens=given.num_draft_tokens,
            acceptance="real",
            draft=Path(given.draft).resolve().name,
            convention=one.convention,
            layers=one.layers,
            temperature=temperature,
            is_used=one.layers == used,
            outcome=one.reason,
        )
        if one.speculation is not None:
            counts = one.speculation
            run.num_rounds, run.accepted_at = counts.num_rounds, counts.rates
            run.acceptance_length = run.measured_acceptance_length = counts.acceptance_length
        runs.append(run)
    return runs


def used_layers(given: argparse.Namespace) -> tuple[int, ...]:
    """The layers that the head reads. Raises ModelLoadError for a head that does not fit."""
    target = read_spec(resolve(given.target, local_files_only=True).config)
    settings = resolve(given.draft, role="draft", local_files_only=True).config
    return read_head_config(settings, target, aux_layer_convention=given.aux_layer_convention).aux_layers


def problem_of(runs: Sequence[AcceptanceRun], min_length: float | None) -> str | None:
    """The reason why a head is not good enough; None for one that is."""
    used = [run for run in runs if run.is_used]
    unloaded = next((run for run in used if run.outcome), None)
    if unloaded is not None or not used:
        return unloaded.outcome if unloaded is not None else "the head was not measured as engines use it"

    length = min(run.acceptance_length or 1.0 for run in used)
    if min_length is not None and length < min_length:
        return f"acceptance length {length:.3f}: expected {min_length:g} or more"

    return None


def acceptance_table(results: Results) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows of measured acceptance."""
    rows = [
        (
            run["convention"],
            ", ".join(map(str, run["layers"])) or "final",
            f"{run['temperature']:g}",
            f"{run['measured_acceptance_length']:.3f}" if run["num_rounds"] else "",
            " ".join(f"{rate:.3f}" for rate in run.get("accepted_at", ())),
            str(run["num_rounds"]),
            run["outcome"] or ("in use" if run["is_used"] else ""),
        )
        for run in results.runs
    ]
    return "", COLUMNS, rows


def acceptance_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("target", help="folder, .gguf file or hub id")
    made.add_argument("--draft", required=True, help="a draft head, folder or hub id")
    made.add_argument("--num-draft-tokens", type=at_least(1), default=3, help="per round")
    made.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    made.add_argument("--prompts", type=Path, help="text, a prompt in each line")
    made.add_argument("--max-tokens", type=at_least(1), default=128, help="of an answer")
    made.add_argument("--aux-layer-convention", choices=("output", "boundary"), help="as in Speculation")
    made.add_argument("--min-length", type=float, help="least acceptance length")
    made.add_argument("--executor", default="auto", help="as in EngineConfig")
    made.add_argument("--device", default=default_device(), help="cpu, cuda or cuda:N")
    made.add_argument("--dtype", default="auto", help="as in EngineConfig")
    made.add_argument("--out", type=Path, required=True, help="result file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    made = acceptance_parser()
    given = made.parse_args(arguments)
    results = Results.of(given.device, 0.0)
    runs: list[AcceptanceRun] = []
    try:
        config = EngineConfig(
            device=given.device,
            dtype=given.dtype,
            executor=given.executor,
            local_files_only=True,
            speculation=Speculation(draft=given.draft, shape=Chain(given.num_draft_tokens)),
        )
        prompts, used = read_prompts(given.prompts), used_layers(given)
        for temperature in given.temperature:
            params = SamplingParams(max_tokens=given.max_tokens, temperature=temperature, seed=0)
            found = asyncio.run(measure(given.target, config, prompts, params))
            runs += runs_of(found, given, used, temperature)
            print(f"temperature {temperature:g}: {verdict(found)}", flush=True)
    except DriftError as error:
        made.error(str(error))

    for run in runs:
        results.add(run)
    write(results, given.out)
    show("", *acceptance_table(results)[1:])
    problem = problem_of(runs, given.min_length)
    if problem is not None:
        print(problem, file=sys.stderr)
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
