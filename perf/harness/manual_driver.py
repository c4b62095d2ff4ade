"""The manual driver: runs an executor step by step, without queue and scheduler, for measurements."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise

from drift_sdk.errors import ConfigError
from drift_sdk.steps import (
    MAX_CHUNKS,
    BlockUpdate,
    DecodeRow,
    Executor,
    PrefillChunk,
    SlotAssignment,
    SlotSampling,
    StepPlan,
    StepResult,
    Verification,
)

__all__ = ["ManualDriver"]


class ManualDriver:
    """Greedy sequences of random tokens, one in each of an executor's first slots.

    Each sequence has the KV blocks of its whole length from the start. A step is collected before the next is
    launched. A prompt may wait in the slot behind them, for chunks that are computed beside rounds.
    """

    def __init__(self, executor: Executor, *, prefill_token_budget: int) -> None:
        """prefill_token_budget: the most prompt tokens of a step."""
        self._executor, self._budget = executor, prefill_token_budget
        self._num_steps = 0
        self.active: list[int] = []
        """Slots whose sequences have not ended."""
        self._waiting: Iterator[PrefillChunk] = iter(())

    def fill(self, context: int, max_lengths: Sequence[int], *, waiting: Sequence[int] = ()) -> None:
        """Start new sequences with prompts of `context` random tokens, and prefill them.

        Sequence i, in slot i, ends at max_lengths[i] tokens, the prompt included.
        waiting: the tokens of each chunk of a prompt that is not prefilled. Raises ConfigError if the
        executor has too few slots or blocks, or too short a context.
        """
        num_filled = len(max_lengths)
        if waiting:
            max_lengths = [*max_lengths, sum(waiting) + 2]
        limits, batch = self._executor.limits, len(max_lengths)
        blocks_each = [-(-(length + 1) // limits.block_size) for length in max_lengths]
        for field, most, needed in (
            ("max_num_seqs", limits.max_num_seqs, batch),
            ("max_model_len", limits.max_model_len, max(max_lengths)),
            ("kv_cache_tokens", limits.num_blocks * limits.block_size, sum(blocks_each) * limits.block_size),
        ):
            if needed > most:
                raise ConfigError.of(field, most, f"at least {needed}, for {batch} sequences")

        rng = random.Random(0)
        lengths = [context] * num_filled + [sum(waiting) + 1] * bool(waiting)
        prompts = [[rng.randrange(limits.vocab_size) for _ in range(length)] for length in lengths]
        assignments = [
            SlotAssignment(slot=slot, sampling=_greedy(len(prompt), length))
            for slot, (prompt, length) in enumerate(zip(prompts, max_lengths, strict=True))
        ]
        updates, first = [], 0
        for slot, count in enumerate(blocks_each):
            blocks = tuple(range(first, first + count))
            updates.append(BlockUpdate(slot=slot, first_index=0, block_ids=blocks))
            first += count
        first_chunks, *others = _prefill_steps(prompts[:num_filled], self._budget)
        self._step(assignments=tuple(assignments), block_updates=tuple(updates), prefill=tuple(first_chunks))
        for chunks in others:
            self._step(prefill=tuple(chunks))
        self.active = list(range(num_filled))
        self._waiting = _chunks_of(num_filled, prompts[num_filled:], waiting)

    def round(
        self,
        num_draft_tokens: int,
        slots: Sequence[int] | None = None,
        *,
        max_depth: int | None = None,
        verification: Verification = "whole",
    ) -> StepResult:
        """Run a decode round with `num_draft_tokens` drafts a slot, of these slots or of all active ones, and
        the next chunk of the prompt that waits, while there is one.

        max_depth: most drafts on a path if they form trees; None: they are chains. verification: see
        `StepPlan`. Slots whose sequences end in it are removed from `active`.
        """
        rows = self.active if slots is None else slots
        result = self._step(
            prefill=(*islice(self._waiting, 1),),
            decode=tuple(
                DecodeRow(slot=slot, num_draft_tokens=num_draft_tokens, max_depth=max_depth) for slot in rows
            ),
            verification=verification,
        )
        ended = {slot for slot, output in zip(rows, result.decode, strict=True) if output.finish}
        self.active = [slot for slot in self.active if slot not in ended]
        return result

    def _step(
        self,
        *,
        assignments: tuple[SlotAssignment, ...] = (),
        block_updates: tuple[BlockUpdate, ...] = (),
        prefill: tuple[PrefillChunk, ...] = (),
        decode: tuple[DecodeRow, ...] = (),
        verification: Verification = "whole",
    ) -> StepResult:
        plan = StepPlan(
            step_id=self._num_steps,
            assignments=assignments,
            block_updates=block_updates,
            prefill=prefill,
            decode=decode,
            verification=verification,
        )
        self._num_steps += 1
        self._executor.launch(plan)
        return self._executor.collect()


def _greedy(num_prompt_tokens: int, max_length: int) -> SlotSampling:
    return SlotSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        stop_token_ids=(),
        num_prompt_tokens=num_prompt_tokens,
        max_length=max_length,
    )


def _chunks_of(slot: int, prompts: Sequence[Sequence[int]], sizes: Sequence[int]) -> Iterator[PrefillChunk]:
    """The chunks of these sizes of the prompt in a slot, which has at least a token more; of none, none."""
    for prompt in prompts:
        for start, end in pairwise([0, *accumulate(sizes)]):
            tokens = tuple(prompt[start:end])
            yield PrefillChunk(slot=slot, start=start, token_ids=tokens, next_token_id=prompt[end])


def _prefill_steps(prompts: Sequence[Sequence[int]], budget: int) -> Iterator[list[PrefillChunk]]:
    """The chunks of each prefill step: prompts one after the other, up to `budget` tokens a step."""
    chunks: list[PrefillChunk] = []
    room = budget
    for slot, prompt in enumerate(prompts):
        start = 0
        while start < len(prompt):
            end = min(start + room, len(prompt))
            following = prompt[end] if end < len(prompt) else None
            chunks.append(
                PrefillChunk(
                    slot=slot, start=start, token_ids=tuple(prompt[start:end]), next_token_id=following
                )
            )
            room -= end - start
            start = end
            if room == 0 or len(chunks) == MAX_CHUNKS:
                yield chunks
                chunks, room = [], budget
    if chunks:
        yield chunks
