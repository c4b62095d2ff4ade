"""Qualify a draft head for a model: its files, its arithmetic, its acceptance, its speed; with a report.

    python -m perf.qualify TARGET --draft HEAD
    python -m perf.qualify TARGET --draft HEAD --reference stages.safetensors --text long.txt --out folder

Checks: files (the head fits the model, and its tensors are whole), stages (against a float64 computation, and
against the stages of another engine given by --reference; see perf.compare_stages), acceptance (at
temperatures 0 and 1, under both meanings of the layer ids), single and batch (decoding with 2 to 5 drafts,
compared with decoding without, in contexts that the model has). Nothing is downloaded: hub ids must be in the
cache. The folder receives results/, report.md with pictures, and qualify.json. If the command is interrupted
it goes on with the check that was interrupted. Exit status: 0 if all checks have passed, 1 if one has failed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console

from drift_sdk.errors import ConfigError, DriftError
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from perf.gating.history import Place
from perf.harness import machine
from perf.harness.commands import Command, RunCommand, run_command
from perf.harness.head_files import HeadFiles, check_files
from perf.harness.numbers import at_least
from perf.harness.own_folder import remove_results, result_names
from perf.harness.processes import ROOT
from perf.harness.record import UNFINISHED
from perf.harness.recording import dtype_name
from perf.harness.scenario import LENGTHS, Scenario
from perf.report import REPORT_FILES, markdown, write_report
from perf.suite import STATE, Progress, State, run_topics

__all__ = ["Summary", "checks_of", "main"]

OUT = ROOT / ".cache" / "perf" / "qualify"
TEXT = ROOT / "perf" / "texts" / "tides.txt"
SUMMARY = "qualify.json"
RESULTS = "results"
SCENARIOS = ("single-8k", "single-16k", "single-32k", "batch4-16k")
NUM_DRAFT_TOKENS = (2, 3, 4, 5)
FILES = "files"
STAGE_TOKENS = 512
RESULT_FILES = (STATE, f"{STATE}{UNFINISHED}", *result_names(("draft-stages", "acceptance", "speculative")))
OWN_FILES = {SUMMARY, *REPORT_FILES, *(f"{RESULTS}/{name}" for name in RESULT_FILES)}
"""Names of all files that a folder can hold."""


class Summary(Struct, frozen=True, kw_only=True):
    """The outcome of a qualification, as stored in qualify.json. left_out: checks by the reason for which
    they were not made."""

    place: Place
    head: HeadFiles | None
    checks: dict[str, Progress]
    left_out: dict[str, str]

    @property
    def is_qualified(self) -> bool:
        return self.head is not None and all(check.state == "done" for check in self.checks.values())


def fitting(names: Sequence[str], max_model_len: int) -> tuple[list[str], list[str]]:
    """The scenarios that the target has room for, and the others."""
    longest = {name: Scenario.parse(name).context + LENGTHS[1] for name in names}
    kept = [name for name in names if longest[name] <= max_model_len]
    return kept, [name for name in names if name not in kept]


def checks_of(
    given: argparse.Namespace, target: Path, draft: Path, max_model_len: int, num_masks: int | None = None
) -> tuple[dict[str, tuple[Command, ...]], dict[str, str]]:
    """The commands of each check, and the reasons for which checks and scenarios are left out. num_masks: of
    a DFlash head."""
    model, head = str(target), str(draft)
    both = options(aux_layer_convention=given.aux_layer_convention)
    shared = (
        *options(dtype=dtype_name(given.dtype, given.device)),
        *options(min_cosine=given.min_cosine, min_overlap=given.min_overlap),
        *both,
    )
    sources = [options(text=given.text, max_tokens=min(STAGE_TOKENS, max_model_len))]
    if given.reference is not None:
        sources.append(options(reference=given.reference))
    asked = (
        *options(draft=head, max_tokens=given.max_tokens, prompts=given.prompts, min_length=given.min_length),
        *options(dtype=given.dtype),
        *both,
        *("--temperature", "0", "1"),
    )
    checks = {
        "stages": tuple(
            Command(
                module="perf.compare_stages",
                topic="draft-stages",
                arguments=(model, head, *source, *shared),
            )
            for source in sources
        ),
        "acceptance": (Command(module="perf.acceptance", topic="acceptance", arguments=(model, *asked)),),
    }
    kept, too_long = fitting(given.scenario, max_model_len)
    left_out = dict.fromkeys(too_long, f"the target has a context of {max_model_len} tokens")
    numbers = list(given.num_draft_tokens)
    if num_masks is not None:
        del checks["stages"]
        left_out["stages"] = "stages are compared of heads that take one token after the other"
        numbers = [number for number in numbers if number <= num_masks]
        more = [number for number in given.num_draft_tokens if number > num_masks]
        left_out |= {f"{number} drafts": f"the head has {num_masks} masks" for number in more}
    drafts = (
        *options(model=model, draft=head, text=given.text, repeats=given.repeats, dtype=given.dtype),
        *both,
        *("--num-draft-tokens", *map(str, numbers)),
    )
    for check in ("single", "batch"):
        names = [name for name in kept if name.startswith(check)]
        if names and numbers:
            arguments = (*drafts, "--scenario", *names)
            checks[check] = (Command(module="perf.speculative", topic="speculative", arguments=arguments),)
    return checks, left_out


def options(**given: object) -> tuple[str, ...]:
    """The options of a command line that have a value."""
    pairs = (
        (f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None
    )
    return tuple(chain.from_iterable(pairs))


def qualify_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("target", help="folder, .gguf file or hub id")
    made.add_argument("--draft", required=True, help="a draft head, folder or hub id")
    made.add_argument("--reference", type=Path, help="stages of another engine; see perf.compare_stages")
    made.add_argument("--text", type=Path, default=TEXT, help="UTF-8, of prompts and stages; better long")
    made.add_argument("--prompts", type=Path, help="text, a prompt in each line, for acceptance")
    made.add_argument("--max-tokens", type=at_least(1), default=128, help="of an answer, for acceptance")
    made.add_argument("--scenario", nargs="+", type=scenario_name, default=SCENARIOS, metavar="NAME")
    made.add_argument(
        "--num-draft-tokens", nargs="+", type=at_least(1), default=NUM_DRAFT_TOKENS, metavar="K"
    )
    made.add_argument("--aux-layer-convention", choices=("output", "boundary"), help="as in Speculation")
    made.add_argument("--min-cosine", type=float, help="of stages (default: by dtype)")
    made.add_argument("--min-overlap", type=float, help="top-k, of stages (default: by dtype)")
    made.add_argument("--min-length", type=float, help="least acceptance length, at both temperatures")
    made.add_argument("--repeats", type=at_least(1), default=5, help="timed repeats")
    made.add_argument("--device", default=machine.default_device(), help="cpu, cuda or cuda:N")
    made.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    made.add_argument("--out", type=Path, default=OUT, help="folder of results, logs and report")
    made.add_argument("--fresh", action="store_true", help="remove the folder, if it holds nothing else")
    return made


def scenario_name(text: str) -> str:
    return Scenario.parse(text).name


def main(arguments: Sequence[str] | None = None, run: RunCommand = run_command) -> int:
    made = qualify_parser()
    given = made.parse_args(arguments)
    if given.draft in ("mtp", "ngram"):
        made.error(f"--draft {given.draft}: expected a draft head")

    for name in ("text", "reference", "prompts"):
        if (file := getattr(given, name)) is not None and not file.is_file():
            made.error(f"--{name} {file}: expected a file")

    if given.fresh:
        try:
            remove_results(given.out, OWN_FILES, [SUMMARY, f"{RESULTS}/{STATE}"])
        except ConfigError as error:
            made.error(f"--fresh: {error}")
    place, results = Place.here(machine.commit(), machine.gpu_name(given.device)), given.out / RESULTS
    files, started_at = Progress(state="done"), time.perf_counter()
    try:
        target = resolve(given.target, local_files_only=True)
        draft = resolve(given.draft, role="draft", local_files_only=True)
        head = check_files(target.path, draft.path, given.aux_layer_convention)
    except DriftError as error:
        files = Progress(state="failed", reason=str(error), seconds=time.perf_counter() - started_at)
        return finish(given.out, Summary(place=place, head=None, checks={FILES: files}, left_out={}))

    files.seconds = time.perf_counter() - started_at
    max_model_len = read_spec(target.config).max_position_embeddings
    checks, left_out = checks_of(given, target.path, draft.path, max_model_len, head.num_masks)
    try:
        state = State.load(results, place, identity(head, checks))
    except ValueError as error:
        made.error(str(error))

    run_topics(checks, state, results, given.device, Console(), run=run)
    progress = {FILES: files} | {name: state.topics[name] for name in checks}
    return finish(given.out, Summary(place=place, head=head, checks=progress, left_out=left_out))


def identity(head: HeadFiles, checks: Mapping[str, Sequence[Command]]) -> str:
    """The name of what is measured, which differs for other files and other commands."""
    commands = hashlib.sha256(msgspec.json.encode(checks)).hexdigest()
    return f"{head.target} with {head.draft} (files {head.sha256[:12]}, commands {commands[:8]})"


def finish(out: Path, summary: Summary) -> int:
    """Write qualify.json and the report, print the outcome; returns the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    content = msgspec.to_builtins(summary) | {"is_qualified": summary.is_qualified}
    (out / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    for name, check in summary.checks.items():
        print(f"{name}: {check.reason or check.state}")
    try:
        print(f"written to {write_report(out / RESULTS, out, summary_lines(summary))}")
    except ValueError:
        print("no results to report", file=sys.stderr)
    print("qualified" if summary.is_qualified else "not qualified")
    return 0 if summary.is_qualified else 1


def summary_lines(summary: Summary) -> list[str]:
    """The lines of the report about the head and the checks."""
    head, lines = summary.head, []
    if head is not None:
        proposed = f"{head.draft_vocab_size} of {head.vocab_size} tokens can be proposed"
        layers = ", ".join(map(str, head.aux_layers)) or "none"
        lines = [f"Head `{head.draft}` of `{head.target}`: {head.num_bytes / 2**20:.1f} MiB, {proposed}."]
        lines += [f"Inputs of layers: {layers}. SHA-256 {head.sha256}.", ""]
    rows = [[name, one.state, f"{one.seconds:.0f}", one.reason] for name, one in summary.checks.items()]
    rows += [[name, "left out", "", reason] for name, reason in summary.left_out.items()]
    outcome = "Qualified." if summary.is_qualified else "Not qualified."
    return [*lines, outcome, "", *markdown(("check", "state", "seconds", "reason"), rows)]


if __name__ == "__main__":
    sys.exit(main())
