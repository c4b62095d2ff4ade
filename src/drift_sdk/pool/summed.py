"""Statistics of several engines as those of one, and of each replica of a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import fields

from drift_sdk.stats import EngineStats, Histogram, Histograms

__all__ = ["ReplicaStats", "summed_histograms", "summed_stats"]


class ReplicaStats(Struct, frozen=True, kw_only=True):
    """A snapshot of a replica of a pool.

    index:         its place in the pool.
    device:        of its config.
    state:         "open"; "drained" (it gets no new requests); "closed" (it was closed or has failed).
    num_requests:  live requests of the pool that it has.
    num_tokens:    tokens of their prompts and completions, as the router counts them: those of a text are
                   estimated.
    num_routed:    requests that it was given.
    num_by_prefix: of them, those whose beginning it had got before.
    num_moved:     unstarted requests that went from it to another replica.
    num_replayed:  started requests that were run again on another replica.
    num_lost:      requests that it ended by failing.
    engine:        its own statistics; None if it is not open.
    """

    index: int
    device: str
    state: Literal["open", "drained", "closed"]
    num_requests: int
    num_tokens: int
    num_routed: int
    num_by_prefix: int
    num_moved: int
    num_replayed: int
    num_lost: int
    engine: EngineStats | None


def summed_stats(each: Sequence[EngineStats]) -> EngineStats:
    """Sums of all counters and of the current state. `mean_active`, `min_active` and `max_active` are sums
    too: of replicas whose steps overlap. `is_paused` and `is_asleep` hold if they hold for all.
    `start_seconds` are those of the replica that took longest, and `kv_dtype` is that of all, if it is the
    same."""
    found: dict[str, Any] = {}
    for field in fields(EngineStats):
        values = [getattr(stats, field.name) for stats in each]
        match field.name:
            case "accepted_at":
                found[field.name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
            case "violations":
                found[field.name] = summed_pairs(values)
            case "start_seconds":
                found[field.name] = max(values, key=lambda stages: sum(s for _, s in stages), default=())
            case "is_paused" | "is_asleep":
                found[field.name] = bool(values) and all(values)
            case "kv_dtype":
                found[field.name] = values[0] if len(set(values)) == 1 else ""
            case _:
                found[field.name] = sum(values)
    return EngineStats(**found)


def summed_pairs(each: Iterable[Iterable[tuple[str, int]]]) -> tuple[tuple[str, int], ...]:
    total: Counter[str] = Counter()
    for pairs in each:
        total.update(dict(pairs))
    return tuple(total.items())


def summed_histograms(each: Iterable[Histograms]) -> Histograms:
    """New histograms with the counts of all."""
    total = Histograms()
    for histograms in each:
        for name in Histograms.__slots__:
            add(getattr(total, name), getattr(histograms, name))
    return total


def add(total: Histogram, other: Histogram) -> None:
    total.counts = [a + b for a, b in zip(total.counts, other.counts, strict=True)]
    total.total += other.total
