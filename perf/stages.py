"""Time of each stage of a decode round, compared with the stage's roofline. Needs a GPU.

python -m perf.stages --scenario single-512 batch4-16k --num-draft-tokens 3 --acceptance-length 3.2
python -m perf.stages --by-active --scenario batch4-16k

Acceptance is simulated. Rounds are launched one at a time without a scheduler, with marks between their
stages, which cost a few microseconds each. --by-active: sequences that end one after the other, and for each
number of active ones the time of a round and the keys and values that its attention reads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType

from drift_sdk.steps import Executor
from perf.harness.active_rounds import ACTIVE_COLUMNS, active_table, measure_by_active, tiles_of
from perf.harness.bandwidth import matmul_tflop_s
from perf.harness.decoding import DecodeOptions, engine_config
from perf.harness.drafting import Drafting
from perf.harness.driven import NUM_WARM_UP_ROUNDS, Driven
from perf.harness.numbers import at_least, over_zero
from perf.harness.record import Run
from perf.harness.recording import Recording, free_memory, parser
from perf.harness.scenario import SCENARIOS, Scenario
from perf.harness.shapes import Model, prepare, prepare_draft
from perf.harness.simulation import checked_acceptance
from perf.harness.stage_timing import StageTiming, staged_executor, time_stages
from perf.harness.stage_work import Work
from perf.harness.table import drafts_of, show, title_of

__all__ = ["STAGE_COLUMNS", "StageRun", "main", "measure_stages", "stage_table"]

ROUND = "round"


class StageRun(Run, kw_only=True):
    """A stage, or the whole round.

    limit_ms: the longer of the times for reading `num_bytes` and for computing `num_flops`;
    `roofline_fraction` is relative to it. share: of the round's time. Only for the whole round: idle_share,
    the share of its time that lies in no stage; cpu_us, CPU time of the thread that launches and collects.
    """

    stage: str
    limit_ms: float
    share: float
    num_bytes: float
    num_flops: float
    draft: str | None = None
    idle_share: float | UnsetType = UNSET
    cpu_us: float | UnsetType = UNSET
    measured_acceptance_length: float | UnsetType = UNSET


def measure_stages(
    driven: Driven,
    executor: Executor,
    take_stages: Callable[[], dict[str, float]],
    scenario: Scenario,
    num_rounds: int,
) -> Iterator[StageRun]:
    """A run for each stage, then one for the whole round.

    take_stages: see `staged_executor`.
    """
    times = time_stages(
        driven.slots(executor),
        take_stages,
        batch=scenario.batch,
        context=scenario.context,
        num_draft_tokens=driven.num_drafts,
        num_rounds=num_rounds,
    )
    mean_context = scenario.context + times.tokens_per_round * (NUM_WARM_UP_ROUNDS + num_rounds / 2)
    work = driven.work(scenario.batch, mean_context)
    for stage, seconds in times.stages.items():
        yield stage_run(driven, scenario, stage, seconds, times, work.get(stage, Work()))

    whole = Work(sum(one.num_bytes for one in work.values()), sum(one.num_flops for one in work.values()))
    run = stage_run(driven, scenario, ROUND, times.round_seconds, times, whole)
    run.tokens_per_s = scenario.batch * times.tokens_per_round / times.round_seconds
    run.idle_share = times.unaccounted_share
    run.cpu_us = times.cpu_seconds * 1e6
    run.measured_acceptance_length = times.tokens_per_round
    yield run


def stage_run(
    driven: Driven, scenario: Scenario, stage: str, seconds: float, times: StageTiming, work: Work
) -> StageRun:
    """The run of a stage that takes `seconds` of a round and must do `work`."""
    limit_s = work.limit_s(driven.bandwidth_tb_s, driven.peak_tflop_s)
    return StageRun(
        **driven.fields(scenario),
        stage=stage,
        ms_per_round=seconds * 1e3,
        limit_ms=limit_s * 1e3,
        share=seconds / times.round_seconds,
        num_bytes=work.num_bytes,
        num_flops=work.num_flops,
        roofline_fraction=limit_s / seconds,
    )


def stage_table(runs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A table row for each run, with STAGE_COLUMNS."""
    return [
        (
            run["scenario"],
            drafts_of(run),
            run["stage"],
            f"{run['ms_per_round'] * 1e3:.1f}",
            f"{run['limit_ms'] * 1e3:.1f}",
            f"{run['roofline_fraction']:.0%}",
            f"{run['share']:.1%}",
            f"{run['idle_share']:.1%}" if "idle_share" in run else "",
            f"{run['cpu_us']:.0f}" if "cpu_us" in run else "",
        )
        for run in runs
    ]


STAGE_COLUMNS = ("scenario", "drafts", "stage", "us", "limit us", "of limit", "of round", "idle", "CPU us")


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--scenario", nargs="+", type=Scenario.parse, default=SCENARIOS, metavar="NAME")
    made.add_argument("--num-draft-tokens", type=at_least(0), default=3, help="0: plain rounds alone")
    made.add_argument("--acceptance-length", type=over_zero, default=3.2, help="to simulate")
    made.add_argument("--draft", help="an EAGLE-3 head, folder or hub id; the default has random weights")
    made.add_argument("--rounds", type=at_least(1), default=32)
    made.add_argument("--by-active", action="store_true", help="of --scenario batch4-16k, if none is named")
    given = made.parse_args(arguments)
    if not given.device.startswith("cuda"):
        made.error(f"device={given.device!r}: stages are marked in CUDA graphs, expected a GPU")

    if given.by_active and given.scenario is SCENARIOS:
        given.scenario = [Scenario.parse("batch4-16k")]
    recording = Recording("active" if given.by_active else "stages", given.device, given.out)
    peak_tflop_s = matmul_tflop_s(given.device)
    num_tokens = most_tokens(given.scenario, given.rounds, given.num_draft_tokens, by_active=given.by_active)
    options = DecodeOptions(
        device=given.device, dtype=given.dtype, executor="graph", lengths=(0, num_tokens + 2)
    )
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder) / given.model)
        for drafting in draftings_of(model, given.draft, given.num_draft_tokens, given.acceptance_length):
            plain = engine_config(model, given.scenario, options)
            config = plain if drafting is None else drafting.config(plain)
            driven = Driven(
                model=model,
                drafting=drafting,
                config=config,
                options=options,
                bandwidth_tb_s=recording.bandwidth_tb_s,
                peak_tflop_s=peak_tflop_s,
            )
            measure_all(recording, driven, given.scenario, given.rounds, by_active=given.by_active)
            free_memory()

    found, title = recording.results.runs, title_of(recording.results)
    if given.by_active:
        show(title, ACTIVE_COLUMNS, active_table(found))
    else:
        show(title, STAGE_COLUMNS, stage_table(found))
    print(f"written to {recording.path}")


def most_tokens(
    scenarios: Sequence[Scenario], num_rounds: int, num_draft_tokens: int, *, by_active: bool
) -> int:
    """Most tokens that a sequence emits in the measured rounds."""
    return num_rounds * (num_draft_tokens + 1) * max(each.batch if by_active else 2 for each in scenarios)


def draftings_of(
    model: Model, draft: str | None, num_draft_tokens: int, acceptance_length: float
) -> list[Drafting | None]:
    """The configurations of measured rounds: plain, then with drafts if drafts are asked for."""
    if not num_draft_tokens:
        return [None]

    drafting = Drafting(
        draft=prepare_draft(model, draft),
        num_draft_tokens=num_draft_tokens,
        acceptance_length=acceptance_length,
    )
    return [None, drafting]


def measure_all(
    recording: Recording, driven: Driven, scenarios: Sequence[Scenario], num_rounds: int, *, by_active: bool
) -> None:
    """Open an executor and measure all scenarios with it."""
    drafting = driven.drafting
    length = drafting.simulated_length if drafting is not None else None
    factory = None if length is None else checked_acceptance(driven.config.replace(executor="graph"), length)
    print(f"opening {driven.model.name}, {driven.num_drafts} drafts a round", flush=True)
    with staged_executor(driven.model.path, driven.config, factory) as (executor, take_stages):
        for scenario in scenarios:
            if not by_active:
                add_all(recording, measure_stages(driven, executor, take_stages, scenario, num_rounds))
                continue

            for has_ended_rows in (False, True):
                runs = measure_by_active(
                    driven,
                    executor,
                    tiles_of(executor),
                    scenario,
                    num_rounds,
                    has_ended_rows=has_ended_rows,
                )
                add_all(recording, runs)


def add_all(recording: Recording, runs: Iterable[Run]) -> None:
    for run in runs:
        recording.add(run)


if __name__ == "__main__":
    main()
