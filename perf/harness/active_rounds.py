"""Time of decode rounds while the sequences of a batch end one after the other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk.steps import Executor
from perf.harness.driven import NUM_WARM_UP_ROUNDS, Driven
from perf.harness.record import Run
from perf.harness.scenario import Scenario
from perf.harness.table import drafts_of

__all__ = ["ACTIVE_COLUMNS", "ActiveRun", "active_table", "measure_by_active", "tiles_of"]

ACTIVE_COLUMNS = (
    "scenario",
    "drafts",
    "active",
    "ended rows",
    "rounds",
    "ms",
    "of limit",
    "tiles",
    "GB of KV",
)


class ActiveRun(Run, kw_only=True):
    """Rounds of a batch in which `active_sequences` sequences have not ended.

    has_ended_rows: rows of the ended sequences are still planned, as in steps that are launched before the
    end is read. num_tiles: of the attention plan, read from the device. tile_bytes: keys and values in these
    tiles, of all layers. attention_bytes: keys and values that the active sequences must read.
    """

    active_sequences: int
    has_ended_rows: bool
    num_rounds: int
    num_tiles: float
    tile_bytes: float
    attention_bytes: float
    bytes_per_round: float
    draft: str | None = None


def measure_by_active(
    driven: Driven,
    executor: Executor,
    num_tiles: Callable[[], int],
    scenario: Scenario,
    num_rounds: int,
    *,
    has_ended_rows: bool,
) -> Iterator[ActiveRun]:
    """A run for each number of active sequences, of a batch in which a sequence ends about every `num_rounds`
    rounds.

    num_tiles: see `tiles_of`. has_ended_rows: see `ActiveRun`.
    """
    slots, all_slots = driven.slots(executor), range(scenario.batch)
    gap = num_rounds * (driven.num_drafts + 1)
    first = scenario.context + 1
    slots.fill(scenario.context, [first + gap * (index + 1) for index in all_slots])
    for _ in range(NUM_WARM_UP_ROUNDS):
        slots.round(driven.num_drafts)
    seconds: dict[int, list[float]] = {}
    tiles: dict[int, list[int]] = {}
    contexts: dict[int, list[int]] = {}
    lengths = dict.fromkeys(all_slots, 0)
    while slots.active:
        rows = list(all_slots) if has_ended_rows else slots.active
        result = slots.round(driven.num_drafts, rows)
        emitted = {
            slot: len(output.token_ids)
            for slot, output in zip(rows, result.decode, strict=True)
            if output.token_ids
        }
        for slot, number in emitted.items():
            lengths[slot] += number
        seconds.setdefault(len(emitted), []).append(result.duration_s)
        tiles.setdefault(len(emitted), []).append(num_tiles())
        contexts.setdefault(len(emitted), []).append(sum(lengths[slot] for slot in emitted))

    token_bytes = driven.model.num_cached_per_token * driven.options.itemsize
    for active, durations in seconds.items():
        mean_context = first + statistics.mean(contexts[active]) / active
        num_bytes = sum(one.num_bytes for one in driven.work(active, mean_context).values())
        round_s = statistics.median(durations)
        mean_tiles = statistics.mean(tiles[active])
        yield ActiveRun(
            **driven.fields(scenario),
            active_sequences=active,
            has_ended_rows=has_ended_rows,
            num_rounds=len(durations),
            num_tiles=mean_tiles,
            tile_bytes=mean_tiles * Partitions().tile * token_bytes,
            attention_bytes=active * mean_context * token_bytes,
            bytes_per_round=num_bytes,
            ms_per_round=round_s * 1e3,
            roofline_fraction=num_bytes / (driven.bandwidth_tb_s * 1e12) / round_s,
        )


def tiles_of(executor: Any) -> Callable[[], int]:
    """A function that reads from the device how many tiles of attention the latest round had."""
    # Read from a private attribute: only measurements need to know.
    attention = executor._graphs._steps.attention
    scratches = [scratch for each in attention.scratches.values() for scratch in each]
    return lambda: sum(int(scratch.plan.num_tiles.item()) for scratch in scratches)


def active_table(runs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A table row for each run, with ACTIVE_COLUMNS."""
    return [
        (
            run["scenario"],
            drafts_of(run),
            str(run["active_sequences"]),
            "kept" if run["has_ended_rows"] else "dropped",
            str(run["num_rounds"]),
            f"{run['ms_per_round']:.3f}",
            f"{run['roofline_fraction']:.1%}",
            f"{run['num_tiles']:.0f}",
            f"{run['tile_bytes'] / 1e9:.2f} ({run['attention_bytes'] / 1e9:.2f})",
        )
        for run in runs
    ]
