"""Compare a draft's arithmetic with a plain float64 computation from the same files, stage by stage, and with
the stages of another engine.

    python -m perf.compare_stages TARGET DRAFT --text prompt.txt --dtype bfloat16
    python -m perf.compare_stages TARGET DRAFT --tokens 1 5 9 12 --json
    python -m perf.compare_stages TARGET DRAFT --reference stages.safetensors --min-cosine 0.999

The target runs once; both computations start from its residual streams. The stages are fc, attention and mlp
of each layer, pre_head (the input of the head) and logits. Figures are over all rows: mean and largest
difference, smallest cosine, and the share of the reference's k largest entries that are among the draft's k
largest. The exit status is 1 if the smallest cosine or that share is below the threshold in any stage.

A reference is a safetensors file with `token_ids` [N + 1] of integers and stages [N, width] by the names
above, all or some; names of layers carry their index, as in attention.0. With `aux_hidden`
[features, N, hidden] in it, the draft starts from these residual streams, so that differences of the target
do not count. --save writes the stages of this engine in that form.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec import structs, to_builtins

from drift_sdk.errors import DriftError
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.decoder import Decoder
from perf.harness.draft_stages import Reference, StageDifference, compare, compare_reference, own_reference
from perf.harness.numbers import at_least
from perf.harness.record import Results, Run, write

__all__ = ["PLAIN", "StageRun", "main", "stage_table"]

PLAIN = "float64"
THRESHOLDS = {"float32": (0.9999, 0.98), "bfloat16": (0.99, 0.9), "float16": (0.999, 0.95)}
"""Smallest cosine and least share of common largest entries, by the dtype of the computation."""
STAGE_COLUMNS = ("compared with", "stage", "mean", "largest", "cosine", "top-k", "")


class StageRun(Run, kw_only=True):
    """A stage compared with that of `reference`: PLAIN, or the name of a file."""

    draft: str
    stage: str
    reference: str
    mean_difference: float
    max_difference: float
    min_cosine: float
    top_k_overlap: float
    is_good: bool


def stage_table(results: Results) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows of compared stages."""
    rows = [
        (
            run["reference"],
            run["stage"],
            f"{run['mean_difference']:.2e}",
            f"{run['max_difference']:.2e}",
            f"{run['min_cosine']:.6f}",
            f"{run['top_k_overlap']:.1%}",
            "" if run["is_good"] else "too far",
        )
        for run in results.runs
    ]
    return "", STAGE_COLUMNS, rows


def stages_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("target", help="folder, .gguf file or hub id")
    made.add_argument("draft", type=Path, help="folder")
    tokens = made.add_mutually_exclusive_group(required=True)
    tokens.add_argument("--tokens", type=at_least(0), nargs="+", help="token ids, two or more")
    tokens.add_argument("--text", type=Path, help="a file of text")
    tokens.add_argument("--reference", type=Path, help="stages of another engine, with their token ids")
    made.add_argument("--max-tokens", type=at_least(1), default=512, help="of the text, from its start")
    made.add_argument("--device", default="cpu")
    made.add_argument("--dtype", choices=tuple(THRESHOLDS), default="float32")
    made.add_argument("--aux-layer-convention", choices=("output", "boundary"))
    made.add_argument("--top-k", type=at_least(1), default=10)
    made.add_argument("--min-cosine", type=float, help="least cosine (default: by dtype)")
    made.add_argument("--min-overlap", type=float, help="least share of the largest k (default: by dtype)")
    made.add_argument("--save", type=Path, help="file for the stages of this engine")
    made.add_argument("--out", type=Path, help="result file")
    made.add_argument("--json", action="store_true")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    made = stages_parser()
    options = made.parse_args(arguments)
    try:
        found = found_differences(options)
    except (ValueError, DriftError) as error:
        made.error(str(error))

    cosine, overlap = THRESHOLDS[options.dtype]
    cosine = cosine if options.min_cosine is None else options.min_cosine
    overlap = overlap if options.min_overlap is None else options.min_overlap
    runs = [
        stage_run(
            options,
            reference,
            num_rows,
            each,
            is_good=each.min_cosine >= cosine and each.top_k_overlap >= overlap,
        )
        for reference, (num_rows, rows) in found.items()
        for each in rows
    ]
    if options.out is not None:
        results = Results.of(options.device, 0.0)
        for run in runs:
            results.add(run)
        write(results, options.out)
    show_runs(runs, is_json=options.json)
    bad = next((run for run in runs if not run.is_good), None)
    if bad is not None:
        figures = f"cosine {bad.min_cosine:.6f}, top-k {bad.top_k_overlap:.3f}"
        expected = f"expected {cosine:g} and {overlap:g} or more"
        print(f"{bad.stage} differs from {bad.reference}: {figures}: {expected}", file=sys.stderr)
    return 0 if bad is None else 1


def found_differences(options: argparse.Namespace) -> dict[str, tuple[int, list[StageDifference]]]:
    """The number of rows and the differences by what the stages are compared with. Raises ValueError for
    tokens or a reference that do not fit."""
    source = resolve(options.target)
    reference = None if options.reference is None else Reference.read(options.reference)
    token_ids: Sequence[int] = options.tokens or ()
    if reference is not None:
        token_ids = reference.token_ids.tolist()
    elif options.text is not None:
        text = options.text.read_text(encoding="utf-8")
        token_ids = source.tokenizer().encode(text)[: options.max_tokens]
    if len(token_ids) < 2:
        raise ValueError(f"{len(token_ids)} tokens: expected 2 or more")

    config = read_spec(source.config)
    dtype = getattr(torch, options.dtype)
    target = Decoder.load(config, source.tensors(), device=options.device, dtype=dtype)
    given = {"top_k": options.top_k, "aux_layer_convention": options.aux_layer_convention}
    num_rows = len(token_ids) - 1
    found = {PLAIN: (num_rows, compare(target, options.draft, token_ids, **given))}
    if reference is not None:
        found[options.reference.name] = num_rows, compare_reference(target, options.draft, reference, **given)
    if options.save is not None:
        convention = options.aux_layer_convention
        own = own_reference(target, options.draft, token_ids, aux_layer_convention=convention)
        own.write(options.save)
    return found


def stage_run(
    options: argparse.Namespace, reference: str, num_rows: int, found: StageDifference, *, is_good: bool
) -> StageRun:
    return StageRun(
        **structs.asdict(found),
        engine="drift",
        model=Path(options.target).name,
        dtype=options.dtype,
        scenario=f"text-{num_rows}",
        batch=1,
        context=num_rows,
        draft=options.draft.resolve().name,
        reference=reference,
        is_good=is_good,
    )


def show_runs(runs: Sequence[StageRun], *, is_json: bool) -> None:
    fields = ("stage", "mean_difference", "max_difference", "min_cosine", "top_k_overlap")
    if is_json:
        kept = [
            {name: value for name, value in to_builtins(run).items() if name in (*fields, "reference")}
            for run in runs
        ]
        print(json.dumps(kept, indent=2))
        return

    for reference in dict.fromkeys(run.reference for run in runs):
        if reference != PLAIN:
            print(f"compared with {reference}:")
        print(f"{'stage':<14}{'mean':>12}{'max':>12}{'cosine':>12}{'top-k':>8}")
        for row in (run for run in runs if run.reference == reference):
            numbers = f"{row.mean_difference:>12.3e}{row.max_difference:>12.3e}{row.min_cosine:>12.8f}"
            print(f"{row.stage:<14}{numbers}{row.top_k_overlap:>8.3f}")


if __name__ == "__main__":
    sys.exit(main())
