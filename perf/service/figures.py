"""What a driven load says of a service. Standard library alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from perf.harness.host import percentile
from perf.service.driver import Drive, Record

__all__ = ["SHARES", "figures_of", "token_gaps"]

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def figures_of(drive: Drive) -> dict[str, Any]:
    """Throughput, latencies and counts.

    tokens_per_s, prompt_tokens_per_s:  in the window: tokens that came, and tokens of the prompts whose first
                                        token came.
    whole_tokens_per_s:                 of the whole run, from the first request to the last token.
    ttft_ms, e2e_s:                     of the requests sent in the window, whenever they ended.
    itl_ms:                             of the tokens that came in the window, see `token_gaps`.
    num_errors, num_unfinished:         requests that failed; that were cut off.
    """
    records, (begin, end) = drive.records, drive.window
    sent = [record for record in records if begin <= record.sent_at <= end and record.error is None]
    ttfts_s = [record.chunks[0][0] - record.sent_at for record in sent if record.chunks]
    gaps_s = [gap for record in records for at, gap in token_gaps(record) if begin <= at <= end]
    ends_s = [record.ended_at - record.sent_at for record in sent if record.ended_at is not None]
    errors = [record.error for record in records if record.error is not None]
    return {
        "num_requests": len(records),
        "num_errors": len(errors),
        "first_error": errors[0] if errors else None,
        "num_unfinished": sum(record.ended_at is None for record in records),
        "num_window_requests": len(sent),
        "window_s": round(end - begin, 3),
        "total_s": round(drive.total_s, 3),
        "tokens_per_s": num_tokens(records, begin, end) / (end - begin),
        "whole_tokens_per_s": num_tokens(records, 0.0, drive.total_s) / drive.total_s,
        "prompt_tokens_per_s": num_prompt_tokens(records, begin, end) / (end - begin),
        "num_tokens": num_tokens(records, 0.0, drive.total_s),
        "num_prompt_tokens": num_prompt_tokens(records, 0.0, drive.total_s),
        "ttft_ms": percentiles(ttfts_s, 1e3),
        "itl_ms": percentiles(gaps_s, 1e3),
        "e2e_s": percentiles(ends_s),
    }


def token_gaps(record: Record) -> Iterator[tuple[float, float]]:
    """Arrival and inter-token latency of each token after the first chunk's: a chunk of n tokens that comes t
    seconds after the one before counts as n tokens at t/n."""
    for (before, _), (at, number) in pairwise(record.chunks):
        for _ in range(number):
            yield at, (at - before) / number


def num_tokens(records: Sequence[Record], begin: float, end: float) -> int:
    return sum(number for record in records for at, number in record.chunks if begin <= at <= end)


def num_prompt_tokens(records: Sequence[Record], begin: float, end: float) -> int:
    return sum(
        record.num_prompt_tokens
        for record in records
        if record.chunks and begin <= record.chunks[0][0] <= end
    )


def percentiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Of none: 0."""
    return {name: round(percentile(list(values), share) * scale, 4) for name, share in SHARES.items()}
