"""The eager executor: plain torch on any device, one operation after the other.

Tests compare other executors with it. A step runs when it is collected, not when it is launched: plans are
still made before earlier results are known, as on every executor, but a result does not wait for the step
launched after it.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from drift_sdk.errors import ExecutorError
from drift_sdk.execution.eager.drafters import Drafter, Span
from drift_sdk.execution.eager.logits_processors import LogitsProcessors, apply_processors
from drift_sdk.execution.eager.sampling import choose, token_logprobs
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.steps import DecodeRow, ExecutorLimits, PrefillChunk, SlotOutput, StepPlan, StepResult

__all__ = ["EagerExecutor"]

LOGITS_ROWS = 256
"""Prompt positions whose logits are computed at a time: those of a long prompt would take much memory."""


class _SlotRows(NamedTuple):
    """The rows of one slot in a decode part: its newest token and the draft tokens after it.

    start:      position of the first row.
    token_id:   the newest token, the input of the first row.
    draft:      draft tokens, the inputs of the rows after it.
    first_row:  index of the first row in the tensors of the step.
    """

    slot: Slot
    start: int
    token_id: int
    draft: list[int]
    first_row: int


class EagerExecutor:
    """The `Executor` that runs a `Decoder` over a paged KV cache of `limits.num_blocks` blocks.

    With a drafter, a decode row verifies draft tokens: the target computes the newest token and all draft
    tokens in one forward pass, samples its own token after each of them, and continues as long as it equals
    the next draft token.
    """

    def __init__(self, decoder: Decoder, limits: ExecutorLimits, drafter: Drafter | None = None) -> None:
        self.limits = limits
        self._decoder: Decoder | None = decoder
        config = decoder.config
        self._cache: KVCache | None = KVCache(
            num_layers=config.num_layers,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self._device = decoder.device
        self._drafter = drafter
        self._slots: dict[int, Slot] = {}
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Run the oldest launched step. Raises ExecutorError for a step launched after `close`."""
        plan = self._launched.popleft()
        started_at = time.perf_counter()
        self._update_slots(plan)
        prefill = self._prefill(plan.prefill)
        decode = self._decode(plan.decode)
        duration_s = time.perf_counter() - started_at
        return StepResult(step_id=plan.step_id, prefill=prefill, decode=decode, duration_s=duration_s)

    def close(self) -> None:
        self._launched.clear()
        self._slots.clear()
        self._decoder = self._cache = self._drafter = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _update_slots(self, plan: StepPlan) -> None:
        for assignment in plan.assignments:
            rules = LogitsProcessors.of(assignment, self.limits.vocab_size, self._device)
            slot = self._slots[assignment.slot] = Slot(assignment.sampling, rules)
            if self._drafter is not None:
                self._drafter.enter(slot, assignment.cached_token_ids)
        for update in plan.block_updates:
            self._slots[update.slot].place_blocks(update.first_index, update.block_ids)

    def _prefill(self, chunks: tuple[PrefillChunk, ...]) -> tuple[SlotOutput, ...]:
        """Run the prefill part: an output for each chunk, with a token for each last one."""
        if not chunks:
            return ()

        rows = [
            SequenceRows(self._slots[chunk.slot].block_table, chunk.start, len(chunk.token_ids))
            for chunk in chunks
        ]
        hidden, aux_hidden = self._forward([token for chunk in chunks for token in chunk.token_ids], rows)
        last_rows, last_slots = [], []
        first_row = 0
        for chunk in chunks:
            slot = self._slots[chunk.slot]
            slot.length = chunk.start + len(chunk.token_ids)
            if slot.rules is not None:
                slot.rules.begin_step()
                slot.rules.count(chunk.token_ids, chunk.start)
            if slot.sampling.num_prompt_logprobs is not None:
                self._score_prompt(hidden[first_row : first_row + len(chunk.token_ids)], chunk, slot)
            first_row += len(chunk.token_ids)
            if chunk.is_last:
                last_rows.append(first_row - 1)
                last_slots.append(slot)

        outputs = iter(self._sample_tokens(hidden[last_rows], last_slots))
        if self._drafter is not None:
            self._drafter.draft_extend(self._prefill_spans(chunks), aux_hidden, hidden)
        return tuple(next(outputs) if chunk.is_last else SlotOutput() for chunk in chunks)

    def _prefill_spans(self, chunks: tuple[PrefillChunk, ...]) -> list[Span]:
        """The rows of chunks for the drafter, after the last chunks have sampled their tokens."""
        spans = []
        first_row = 0
        for chunk in chunks:
            slot = self._slots[chunk.slot]
            next_token_id = slot.last_token if chunk.next_token_id is None else chunk.next_token_id
            spans.append(
                Span(slot, chunk.start, chunk.token_ids[0], (*chunk.token_ids[1:], next_token_id), first_row)
            )
            first_row += len(chunk.token_ids)

        return spans

    def _score_prompt(self, hidden: Tensor, chunk: PrefillChunk, slot: Slot) -> None:
        """Add the log-probabilities of the prompt tokens that follow a chunk's rows, hidden [N, H], to the
        slot."""
        following = (*chunk.token_ids[1:], *([] if chunk.next_token_id is None else [chunk.next_token_id]))
        num_top = slot.sampling.num_prompt_logprobs
        assert num_top is not None and self._decoder is not None
        for first in range(0, len(following), LOGITS_ROWS):
            tokens = torch.tensor(following[first : first + LOGITS_ROWS], device=hidden.device)
            logits = self._decoder.logits(hidden[first : first + len(tokens)])
            entries = token_logprobs(logits, tokens, [num_top] * len(tokens))
            slot.prompt_logprobs += [entry for entry in entries if entry is not None]

    def _decode(self, rows: tuple[DecodeRow, ...]) -> tuple[SlotOutput, ...]:
        """Run the decode part: draft, verify all draft tokens in one forward pass, extend the draft."""
        active = [row for row in rows if not self._slots[row.slot].is_finished]
        if not active:
            return tuple(SlotOutput() for _ in rows)

        slot_rows = self._propose(active)
        hidden, aux_hidden = self._forward(
            [token for each in slot_rows for token in (each.token_id, *each.draft)],
            [SequenceRows(each.slot.block_table, each.start, 1 + len(each.draft)) for each in slot_rows],
        )
        outputs = self._verify(slot_rows, hidden)
        if self._drafter is not None:
            spans = [
                Span(each.slot, each.start, each.token_id, output.token_ids, each.first_row)
                for each, output in zip(slot_rows, outputs, strict=True)
            ]
            self._drafter.draft_extend(spans, aux_hidden, hidden)

        by_slot = {row.slot: output for row, output in zip(active, outputs, strict=True)}
        return tuple(by_slot.get(row.slot, SlotOutput()) for row in rows)

    def _propose(self, rows: list[DecodeRow]) -> list[_SlotRows]:
        """The rows of slots that have not finished: the newest token, and what the drafter proposes after
        it."""
        slots = [self._slots[row.slot] for row in rows]
        drafts: list[list[int]] = [[] for _ in rows]
        if self._drafter is not None:
            # The plan could not know the slots' lengths, so the limit by `max_length` is applied here.
            limits = [
                min(row.num_draft_tokens, slot.sampling.max_length - slot.length - 1)
                for row, slot in zip(rows, slots, strict=True)
            ]
            drafts = self._drafter.propose(slots, limits)

        slot_rows: list[_SlotRows] = []
        first_row = 0
        for slot, draft in zip(slots, drafts, strict=True):
            slot_rows.append(_SlotRows(slot, slot.length - 1, slot.last_token, draft, first_row))
            first_row += 1 + len(draft)

        return slot_rows

    def _verify(self, slot_rows: list[_SlotRows], hidden: Tensor) -> list[SlotOutput]:
        """Sample a token after each row of a slot, from hidden [N, H], until one differs from the next draft
        token.

        Every token is sampled exactly as in plain decoding, so the tokens are the same with any draft.
        """
        for each in slot_rows:
            if each.slot.rules is not None:
                each.slot.rules.begin_step(each.draft)

        emitted: list[list[SlotOutput]] = [[] for _ in slot_rows]
        num_accepted = [0] * len(slot_rows)
        active = list(range(len(slot_rows)))
        for depth in count():
            last_hidden = hidden[[slot_rows[index].first_row + depth for index in active]]
            outputs = self._sample_tokens(last_hidden, [slot_rows[index].slot for index in active])
            continued = []
            for index, output in zip(active, outputs, strict=True):
                emitted[index].append(output)
                draft = slot_rows[index].draft
                if depth < len(draft) and output.token_ids[0] == draft[depth]:
                    num_accepted[index] += 1
                    if output.finish is None:
                        continued.append(index)
            if not continued:
                break
            active = continued

        return [
            _join_outputs(outputs, len(each.draft), accepted)
            for outputs, each, accepted in zip(emitted, slot_rows, num_accepted, strict=True)
        ]

    def _forward(self, token_ids: list[int], rows: list[SequenceRows]) -> tuple[Tensor, list[Tensor]]:
        """The target's residual stream [N, H] after the last layer, and at each layer the drafter needs."""
        decoder, cache = self._decoder, self._cache
        if decoder is None or cache is None:
            raise ExecutorError("the executor is closed")

        batch = AttentionBatch(rows, cache)
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=decoder.device)
        aux_layers = self._drafter.aux_layers if self._drafter is not None else ()
        return decoder.forward(tokens, batch, cache, aux_layers)

    def _sample_tokens(self, hidden: Tensor, slots: list[Slot]) -> list[SlotOutput]:
        """Sample one token for each slot from its row of hidden [M, H], and append it to the slot."""
        if not slots:
            return []

        decoder = self._decoder
        assert decoder is not None
        logits = decoder.logits(hidden)
        lengths = [slot.length for slot in slots]
        ruled = apply_processors(logits, [slot.rules for slot in slots], lengths)
        tokens = choose(ruled, [slot.sampling for slot in slots], lengths)
        logprobs = token_logprobs(logits, tokens, [slot.sampling.num_logprobs for slot in slots])
        prompts = [slot.whole_prompt_logprobs for slot in slots]  # before a token is appended
        return [
            SlotOutput(
                token_ids=(token,),
                finish=slot.append(token),
                logprobs=(entry,) if entry is not None else None,
                prompt_logprobs=prompt,
            )
            for slot, token, entry, prompt in zip(slots, tokens.tolist(), logprobs, prompts, strict=True)
        ]


def _join_outputs(outputs: list[SlotOutput], num_drafted: int, num_accepted: int) -> SlotOutput:
    """The tokens of one slot's round, in order, as one output."""
    if len(outputs) == 1 and not num_drafted:
        return outputs[0]

    logprobs = tuple(entry for output in outputs for entry in output.logprobs or ())
    return SlotOutput(
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish=outputs[-1].finish,
        logprobs=logprobs if outputs[0].logprobs is not None else None,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
    )
