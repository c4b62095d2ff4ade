"""ScriptedExecutor: an executor that runs plans without a model."""

from __future__ import annotations

import time
from collections import deque

from drift_sdk.execution.eager.slot import Slot
from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import DecodeRow, ExecutorLimits, PrefillChunk, SlotOutput, StepPlan, StepResult
from drift_sdk.testing.byte_tokens import EOS_TOKEN_ID
from drift_sdk.testing.replies import Answer, Script

__all__ = ["ScriptedExecutor"]


class ScriptedExecutor:
    """An executor whose tokens a script tells.

    Like a device, it runs steps in the order of their launch and keeps the lengths of its sequences itself.

    limits:          slots, blocks and lengths, as of any executor.
    script:          the replies.
    step_s:          seconds that a step takes, besides the delays of replies.
    tokens_per_step: most tokens that a decode row emits in one step.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        script: Script,
        *,
        step_s: float = 0.0,
        tokens_per_step: int = 1,
    ) -> None:
        self.limits = limits
        self.is_closed: bool = False
        self.num_steps: int = 0
        self._script = script
        self._step_s = step_s
        self._tokens_per_step = tokens_per_step
        self._slots: dict[int, Slot] = {}
        self._arrivals: dict[int, int] = {}  # by slot
        self._delay_s = 0.0  # of the step that is being collected
        # The KV cache: each place holds the token computed there, so that a prefix hit finds those tokens.
        self._kv = [-1] * (limits.num_blocks * limits.block_size)
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    @property
    def is_done(self) -> bool:
        return True

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        self.num_steps += 1
        self._delay_s = 0.0
        for assignment in plan.assignments:
            self._slots[assignment.slot] = Slot(assignment.sampling)
            self._arrivals[assignment.slot] = assignment.arrival
        for update in plan.block_updates:
            self._slots[update.slot].place_blocks(update.first_index, update.block_ids)

        prefill = tuple(self._prefill(chunk) for chunk in plan.prefill)
        decode = tuple(self._decode(row) for row in plan.decode)
        duration_s = self._step_s + self._delay_s
        if duration_s:
            time.sleep(duration_s)
        return StepResult(step_id=plan.step_id, prefill=prefill, decode=decode, duration_s=duration_s)

    def close(self) -> None:
        self.is_closed = True
        self._slots.clear()

    def _prefill(self, chunk: PrefillChunk) -> SlotOutput:
        slot = self._slots[chunk.slot]
        for position, token in enumerate(chunk.token_ids, chunk.start):
            self._kv[self._kv_slot(slot, position)] = token
        if not chunk.is_last:
            return SlotOutput()

        slot.length = chunk.start + len(chunk.token_ids)
        return self._emit(chunk.slot, 1)

    def _decode(self, row: DecodeRow) -> SlotOutput:
        return self._emit(row.slot, min(row.num_draft_tokens + 1, self._tokens_per_step))

    def _emit(self, slot_number: int, max_tokens: int) -> SlotOutput:
        slot, arrival = self._slots[slot_number], self._arrivals[slot_number]
        emitted: list[int] = []
        finish = None
        delay_s = 0.0
        while len(emitted) < max_tokens and not slot.is_finished:
            if slot.last_token >= 0:
                self._kv[self._kv_slot(slot, slot.length - 1)] = slot.last_token
            if self._script.next_token is not None:
                tokens = self._tokens(slot, slot.length)
                num_prompt_tokens = slot.sampling.num_prompt_tokens
                token = self._script.next_token(
                    tokens[:num_prompt_tokens], tokens[num_prompt_tokens:], slot.sampling.seed
                )
            else:
                answer, index = self._answer(slot, arrival), slot.length - slot.sampling.num_prompt_tokens
                if index >= len(answer.token_ids) and answer.failure is not None:
                    if emitted:
                        break  # they are delivered before the next step fails

                    raise answer.failure

                delay_s += answer.token_s if index else answer.first_token_s
                token = answer.token_ids[index] if index < len(answer.token_ids) else EOS_TOKEN_ID
            finish = slot.append(token)
            emitted.append(token)

        self._delay_s = max(self._delay_s, delay_s)
        if slot.is_finished:
            self._script.ended(arrival)
        logprobs = None
        if slot.sampling.num_logprobs is not None:
            num_top = min(slot.sampling.num_logprobs, 1)  # a scripted token is the only one
            logprobs = tuple(
                TokenLogprobs(token_id=token, logprob=0.0, top=((token, 0.0),) * num_top) for token in emitted
            )

        return SlotOutput(token_ids=tuple(emitted), finish=finish, logprobs=logprobs)

    def _answer(self, slot: Slot, arrival: int) -> Answer:
        return self._script.answer(arrival, lambda: self._tokens(slot, slot.sampling.num_prompt_tokens))

    def _tokens(self, slot: Slot, end: int) -> list[int]:
        """The tokens of a sequence before position `end`, from the KV cache."""
        size, tokens = self.limits.block_size, list[int]()
        for block in slot.block_table[: -(-end // size)]:
            tokens += self._kv[block * size : (block + 1) * size]
        return tokens[:end]

    def _kv_slot(self, slot: Slot, position: int) -> int:
        block_size = self.limits.block_size
        return slot.block_table[position // block_size] * block_size + position % block_size
