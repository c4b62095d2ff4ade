"""The eager executor: plain torch on any device, one operation after the other.

It is the oracle for every other executor. A step runs when it is collected, not when it is launched: that
keeps launch-ahead's rules (plans are made before earlier results are known) without holding back a result
until the step behind it has run too.
"""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor

from drift_sdk._kernels.sample import sample, top_logprobs
from drift_sdk.errors import ExecutorError
from drift_sdk.execution.slots import Slot
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import ExecutorLimits, PrefillChunk, SlotOutput, StepPlan, StepResult

__all__ = ["EagerExecutor"]


class EagerExecutor:
    """Runs a `Decoder` over a paged KV cache of `limits.num_blocks` blocks."""

    def __init__(self, decoder: Decoder, limits: ExecutorLimits) -> None:
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
        self._slots: dict[int, Slot] = {}
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    @torch.inference_mode()
    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        started_at = time.perf_counter()
        for assignment in plan.assignments:
            self._slots[assignment.slot] = Slot(assignment.sampling)
        for update in plan.block_updates:
            self._slots[update.slot].place_blocks(update.first_index, update.block_ids)

        prefill = self._prefill(plan.prefill)
        decode = self._decode([row.slot for row in plan.decode])
        duration_s = time.perf_counter() - started_at
        return StepResult(step_id=plan.step_id, prefill=prefill, decode=decode, duration_s=duration_s)

    def close(self) -> None:
        self._launched.clear()
        self._slots.clear()
        self._decoder = self._cache = None

    def _prefill(self, chunks: tuple[PrefillChunk, ...]) -> tuple[SlotOutput, ...]:
        if not chunks:
            return ()

        rows = [
            SequenceRows(self._slots[chunk.slot].block_table, chunk.start, len(chunk.token_ids))
            for chunk in chunks
        ]
        hidden = self._forward([token for chunk in chunks for token in chunk.token_ids], rows)
        last_rows, ends, last_slots = [], 0, []
        for chunk in chunks:
            ends += len(chunk.token_ids)
            if chunk.is_last:
                slot = self._slots[chunk.slot]
                slot.length = chunk.start + len(chunk.token_ids)
                last_rows.append(ends - 1)
                last_slots.append(slot)

        outputs = iter(self._emit(hidden[last_rows], last_slots))
        return tuple(next(outputs) if chunk.is_last else SlotOutput() for chunk in chunks)

    def _decode(self, slot_ids: list[int]) -> tuple[SlotOutput, ...]:
        slots = [self._slots[slot_id] for slot_id in slot_ids]
        active = [slot for slot in slots if not slot.is_finished]
        if not active:
            return tuple(SlotOutput() for _ in slots)

        rows = [SequenceRows(slot.block_table, slot.length - 1, 1) for slot in active]
        hidden = self._forward([slot.last_token for slot in active], rows)
        # Slots that finish in this very step are active too: decide before emitting.
        was_active = [not slot.is_finished for slot in slots]
        outputs = iter(self._emit(hidden, active))
        return tuple(next(outputs) if is_active else SlotOutput() for is_active in was_active)

    def _forward(self, token_ids: list[int], rows: list[SequenceRows]) -> Tensor:
        decoder, cache = self._decoder, self._cache
        if decoder is None or cache is None:
            raise ExecutorError("the executor is closed")

        batch = AttentionBatch(rows, cache)
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=decoder.device)
        hidden, _ = decoder.forward(tokens, batch, cache)
        return hidden

    def _emit(self, hidden: Tensor, slots: list[Slot]) -> list[SlotOutput]:
        """Sample one token for each slot from its row of hidden [M, H], and advance the slots."""
        if not slots:
            return []

        decoder = self._decoder
        assert decoder is not None
        logits = decoder.logits(hidden)
        tokens = self._sample(logits, slots)
        logprobs = self._logprobs(logits, tokens, slots)
        return [
            SlotOutput(
                token_ids=(token,),
                finish=slot.append(token),
                logprobs=(entry,) if entry is not None else None,
            )
            for slot, token, entry in zip(slots, tokens.tolist(), logprobs, strict=True)
        ]

    def _sample(self, logits: Tensor, slots: list[Slot]) -> Tensor:
        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device)

        return sample(
            logits,
            temperature=column([slot.sampling.temperature for slot in slots], torch.float32),
            top_k=column([slot.sampling.top_k for slot in slots], torch.int64),
            top_p=column([slot.sampling.top_p for slot in slots], torch.float32),
            min_p=column([slot.sampling.min_p for slot in slots], torch.float32),
            seed=column([slot.sampling.seed for slot in slots], torch.int64),
            position=column([slot.length for slot in slots], torch.int64),
        )

    def _logprobs(self, logits: Tensor, tokens: Tensor, slots: list[Slot]) -> list[TokenLogprobs | None]:
        wanted = [slot.sampling.num_logprobs for slot in slots]
        rows = [row for row, num_top in enumerate(wanted) if num_top is not None]
        entries: list[TokenLogprobs | None] = [None] * len(slots)
        if not rows:
            return entries

        most = max(num_top for num_top in wanted if num_top is not None)
        chosen, top_ids, top_values = top_logprobs(logits[rows], tokens[rows], most)
        for row, token, logprob, ids, values in zip(
            rows, tokens[rows].tolist(), chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True
        ):
            num_top = wanted[row]
            top = tuple(zip(ids[:num_top], values[:num_top], strict=True))
            entries[row] = TokenLogprobs(token_id=token, logprob=logprob, top=top)

        return entries
