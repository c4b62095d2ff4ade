"""The eager executor: plain torch on any device, one operation after the other.

It is the oracle for every other executor. A step runs when it is collected, not when it is launched: that
keeps launch-ahead's rules (plans are made before earlier results are known) without holding back a result
until the step behind it has run too.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import accumulate, count

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
"""Prompt positions whose logits are held at a time: a long prompt times the vocabulary is much memory."""


class EagerExecutor:
    """Runs a `Decoder` over a paged KV cache of `limits.num_blocks` blocks.

    With a drafter, a decode row carries drafted tokens behind the newest one: the target computes them all at
    once, chooses its own token after each, and goes on as long as the draft said the same.
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
        plan = self._launched.popleft()
        started_at = time.perf_counter()
        for assignment in plan.assignments:
            rules = LogitsProcessors.of(assignment, self.limits.vocab_size, self._device)
            slot = self._slots[assignment.slot] = Slot(assignment.sampling, rules)
            if self._drafter is not None:
                self._drafter.enter(slot, assignment.cached_token_ids)
        for update in plan.block_updates:
            self._slots[update.slot].place_blocks(update.first_index, update.block_ids)

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

    def _prefill(self, chunks: tuple[PrefillChunk, ...]) -> tuple[SlotOutput, ...]:
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

        outputs = iter(self._emit(hidden[last_rows], last_slots))
        if self._drafter is not None:
            self._drafter.draft_extend(self._prefill_spans(chunks), aux_hidden, hidden)
        return tuple(next(outputs) if chunk.is_last else SlotOutput() for chunk in chunks)

    def _prefill_spans(self, chunks: tuple[PrefillChunk, ...]) -> list[Span]:
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
        """Log-probabilities of the known tokens that follow a chunk's rows of hidden [N, H]."""
        following = (*chunk.token_ids[1:], *([] if chunk.next_token_id is None else [chunk.next_token_id]))
        num_top = slot.sampling.num_prompt_logprobs
        assert num_top is not None and self._decoder is not None
        for first in range(0, len(following), LOGITS_ROWS):
            tokens = torch.tensor(following[first : first + LOGITS_ROWS], device=hidden.device)
            logits = self._decoder.logits(hidden[first : first + len(tokens)])
            entries = token_logprobs(logits, tokens, [num_top] * len(tokens))
            slot.prompt_logprobs += [entry for entry in entries if entry is not None]

    def _decode(self, rows: tuple[DecodeRow, ...]) -> tuple[SlotOutput, ...]:
        active = [row for row in rows if not self._slots[row.slot].is_finished]
        if not active:
            return tuple(SlotOutput() for _ in rows)

        slots = [self._slots[row.slot] for row in active]
        drafts: list[list[int]] = [[] for _ in active]
        if self._drafter is not None:
            # Only here is it known how much room a sequence has left.
            drafts = self._drafter.propose(
                slots,
                [
                    min(row.num_draft_tokens, slot.sampling.max_length - slot.length - 1)
                    for row, slot in zip(active, slots, strict=True)
                ],
            )

        lengths = [slot.length for slot in slots]
        newest = [slot.last_token for slot in slots]
        hidden, aux_hidden = self._forward(
            [token for last, draft in zip(newest, drafts, strict=True) for token in (last, *draft)],
            [
                SequenceRows(slot.block_table, slot.length - 1, 1 + len(draft))
                for slot, draft in zip(slots, drafts, strict=True)
            ],
        )
        first_rows = [0, *accumulate(1 + len(draft) for draft in drafts)]
        outputs = self._verify(slots, drafts, hidden, first_rows)
        if self._drafter is not None:
            spans = [
                Span(slot, length - 1, token, output.token_ids, first_row)
                for slot, length, token, output, first_row in zip(
                    slots, lengths, newest, outputs, first_rows, strict=False
                )
            ]
            self._drafter.draft_extend(spans, aux_hidden, hidden)

        by_slot = {row.slot: output for row, output in zip(active, outputs, strict=True)}
        return tuple(by_slot.get(row.slot, SlotOutput()) for row in rows)

    def _verify(
        self, slots: list[Slot], drafts: list[list[int]], hidden: Tensor, first_rows: list[int]
    ) -> list[SlotOutput]:
        """Walk down each slot's rows of hidden while the target's own token is the drafted one. Every token
        is chosen just as in plain decoding, so the tokens are the same."""
        for slot, draft in zip(slots, drafts, strict=True):
            if slot.rules is not None:
                slot.rules.begin_step(draft)

        steps: list[list[SlotOutput]] = [[] for _ in slots]
        num_accepted = [0] * len(slots)
        walking = list(range(len(slots)))
        for depth in count():
            outputs = self._emit(
                hidden[[first_rows[index] + depth for index in walking]], [slots[index] for index in walking]
            )
            going = []
            for index, output in zip(walking, outputs, strict=True):
                steps[index].append(output)
                draft = drafts[index]
                if depth < len(draft) and output.token_ids[0] == draft[depth]:
                    num_accepted[index] += 1
                    if output.finish is None:
                        going.append(index)
            if not going:
                break
            walking = going

        return [
            _joined(outputs, len(draft), accepted)
            for outputs, draft, accepted in zip(steps, drafts, num_accepted, strict=True)
        ]

    def _forward(self, token_ids: list[int], rows: list[SequenceRows]) -> tuple[Tensor, list[Tensor]]:
        decoder, cache = self._decoder, self._cache
        if decoder is None or cache is None:
            raise ExecutorError("the executor is closed")

        batch = AttentionBatch(rows, cache)
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=decoder.device)
        aux_layers = self._drafter.aux_layers if self._drafter is not None else ()
        return decoder.forward(tokens, batch, cache, aux_layers)

    def _emit(self, hidden: Tensor, slots: list[Slot]) -> list[SlotOutput]:
        """Sample one token for each slot from its row of hidden [M, H], and advance the slots."""
        if not slots:
            return []

        decoder = self._decoder
        assert decoder is not None
        logits = decoder.logits(hidden)
        lengths = [slot.length for slot in slots]
        ruled = apply_processors(logits, [slot.rules for slot in slots], lengths)
        tokens = choose(ruled, [slot.sampling for slot in slots], lengths)
        logprobs = token_logprobs(logits, tokens, [slot.sampling.num_logprobs for slot in slots])
        prompts = [slot.whole_prompt_logprobs for slot in slots]  # appending ends the prompt
        return [
            SlotOutput(
                token_ids=(token,),
                finish=slot.append(token),
                logprobs=(entry,) if entry is not None else None,
                prompt_logprobs=prompt,
            )
            for slot, token, entry, prompt in zip(slots, tokens.tolist(), logprobs, prompts, strict=True)
        ]


def _joined(outputs: list[SlotOutput], num_drafted: int, num_accepted: int) -> SlotOutput:
    """The tokens of one round, in order, as one output."""
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
