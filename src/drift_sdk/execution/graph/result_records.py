"""Slot outputs from the result words of a replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from drift_sdk._kernels.commit import (
    FINISHED_LENGTH,
    FINISHED_STOP,
    RECORD_HEADER_WORDS,
    record_words,
)
from drift_sdk._kernels.sampling.rows import MAX_TOP
from drift_sdk._kernels.trees.tree_accept import tree_record_words
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES
from drift_sdk.execution.rounds.tree_round import violation_of
from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import SlotOutput

__all__ = ["outputs", "tree_outputs"]

FINISH: dict[int, Literal["stop", "length"]] = {FINISHED_STOP: "stop", FINISHED_LENGTH: "length"}

Words = NDArray[np.int32]


def outputs(
    words: Words, rows_per_slot: int, slots: Sequence[int], num_logprobs: Mapping[int, int]
) -> Iterator[SlotOutput]:
    """An output for each of a replay's `slots`.

    words: the replay's results. rows_per_slot: rows of each slot in the replay. num_logprobs: by slot, how
    many of the most likely tokens it reports; slots that report none are missing.
    """
    size = record_words(rows_per_slot)
    records = words[: len(slots) * size].reshape(-1, size)
    # One conversion for all slots: iterating a list of numbers is much cheaper than an array or many lists.
    headers = records[:, :RECORD_HEADER_WORDS].T.tolist()
    rows = records[:, RECORD_HEADER_WORDS:].reshape(-1, 2 + 2 * MAX_TOP)
    tokens = rows[:, 0].tolist()
    firsts = range(0, len(tokens), rows_per_slot)
    for slot, first, num_tokens, finish, num_drafted, num_accepted, is_ngram in zip(
        slots, firsts, *headers, strict=True
    ):
        end = first + num_tokens
        num_top = num_logprobs.get(slot)
        logprobs = None
        if num_top is not None:
            logprobs = tuple(_logprobs(row, num_top) for row in rows[first:end])
        yield SlotOutput(
            token_ids=tuple(tokens[first:end]),
            finish=FINISH[finish] if finish else None,
            logprobs=logprobs,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            is_ngram=bool(num_drafted and is_ngram),
        )


def tree_outputs(
    words: Words,
    num_trees: int,
    slots: Sequence[int],
    num_logprobs: Mapping[int, int],
    *,
    has_checks: bool,
) -> Iterator[SlotOutput]:
    """An output for each of `slots` of a round of `num_trees` trees, which was checked or not; the rest as of
    `outputs`."""
    first = num_trees * record_words(PATH_ENTRIES)
    paths = words[first : first + len(slots) * PATH_ENTRIES].reshape(-1, PATH_ENTRIES)[:, 1:].tolist()
    flags = [0] * len(slots)
    if has_checks:
        first = tree_record_words(num_trees)
        flags = words[first : first + len(slots)].tolist()
    for output, path, flag in zip(
        outputs(words, PATH_ENTRIES, slots, num_logprobs), paths, flags, strict=True
    ):
        nodes = tuple(node for node in path if node >= 0)
        if flag:
            # A slot that took no part in the round ends with an error, whatever its token is.
            token_ids = output.token_ids or (0,)
            output = structs.replace(output, token_ids=token_ids, violation=violation_of(flag))
        yield structs.replace(output, accepted_nodes=nodes) if nodes else output


def _logprobs(row: Words, num_top: int) -> TokenLogprobs:
    """row: a token's words as `record_words` lays them out."""
    values = row.view(np.float32)
    ids = row[2 : 2 + num_top].tolist()
    top = zip(ids, values[2 + MAX_TOP : 2 + MAX_TOP + num_top].tolist(), strict=True)
    return TokenLogprobs(token_id=int(row[0]), logprob=float(values[1]), top=tuple(top))
