"""The eager executor: plain torch on any device, one operation after the other.

Tests compare other executors with it. A step runs when it is collected, not when it is launched: plans are
still made before earlier results are known, as on every executor, but a result does not wait for the step
launched after it.

A warning if other processes need the cores over which torch splits operations.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, process_time

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device.memory import return_freed_memory
from drift_sdk.execution.eager.drafters import Drafter, ModelDrafter, NGramDrafter, ReadsTarget, Span
from drift_sdk.execution.eager.rounds import (
    PartialRounds,
    RoundChecks,
    SlotRows,
    Violations,
    attention_batch,
    draft_limit,
    num_tree_blocks,
    place_rows,
    rewind,
    sequence_rows,
)
from drift_sdk.execution.eager.sampling import (
    LogitsProcessors,
    apply_functions,
    apply_processors,
    choose,
    token_logprobs,
    with_given,
)
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.execution.prompt_states import StateGatherer
from drift_sdk.models.attention import AttentionBatch, LastRows, RefreshBatch, StepRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import Checkpoint, KVCache, SequenceState, StateRows
from drift_sdk.models.weight_update import update_weights
from drift_sdk.steps import (
    DecodeRow,
    ExecutorLimits,
    PrefillChunk,
    SlotOutput,
    StepPlan,
    StepResult,
    Verification,
    scored_tokens,
)
from drift_sdk.trees import Draft

INTERVAL_S = 5.0
MOST_BUSY = 0.5
"""Cores that others may use on average before threads of an operation wait for each other noticeably."""

log = logging.getLogger("drift_sdk")


class CoreTimes(Struct, frozen=True):
    """at_s: when it was read. busy_s: time that the cores this process may use have worked since the machine
    was started, together. own_s: their time for this process."""

    at_s: float
    busy_s: float
    own_s: float
    num_cores: int


class BusyCores:
    """Compares the cores that other processes use with those that `num_threads` threads leave, every five
    seconds, until it has warned once. Does nothing for one thread, and where there is no /proc/stat."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._last = core_times() if num_threads > 1 else None

    def look(self) -> None:
        """Called after a step; almost always it returns at once."""
        last = self._last
        if last is None or monotonic() - last.at_s < INTERVAL_S:
            return

        self._last = now = core_times()
        if now is None:
            return

        num_busy = ((now.busy_s - last.busy_s) - (now.own_s - last.own_s)) / (now.at_s - last.at_s)
        num_left = now.num_cores - num_busy
        if self._num_threads > num_left + MOST_BUSY:
            self._last = None
            log.warning(
                "other processes use %.1f of %d cores, and torch splits operations over %d threads, which "
                "wait for each other: EngineConfig(num_threads=%d) may be several times faster",
                num_busy,
                now.num_cores,
                self._num_threads,
                max(1, int(num_left + MOST_BUSY)),
            )


def core_times() -> CoreTimes | None:
    """None where the system does not tell."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = Path("/proc/stat").read_text().splitlines()
    except (AttributeError, OSError):
        return None

    ticks = 0
    for name, *fields in map(str.split, lines):
        if name in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, fields)
            ticks += user + nice + system + irq + softirq + steal
    busy_s = ticks / os.sysconf("SC_CLK_TCK")
    return CoreTimes(monotonic(), busy_s, process_time(), len(cores))


LOGITS_ROWS = 256
"""Prompt positions whose logits are computed at a time: those of a long prompt would take much memory."""


class EagerExecutor:
    """The `Executor` that runs a `Decoder` over a paged KV cache of `limits.num_blocks` blocks.

    With a drafter, a decode row verifies draft tokens: the target computes the newest token and all draft
    tokens in one forward pass, samples its own token after each of them, and continues as long as it equals
    the next draft token, or one of the next in a tree.

    checks: verifies every round of speculation; None: no checks. partial: rounds that verify over a part of
    the KV cache; None: there are none.
    """

    def __init__(
        self,
        decoder: Decoder,
        limits: ExecutorLimits,
        drafter: Drafter | None = None,
        checks: RoundChecks | None = None,
        partial: PartialRounds | None = None,
    ) -> None:
        self.limits = limits
        self._decoder: Decoder | None = decoder
        max_tree_rows = drafter.max_tree_rows if drafter is not None else 0
        num_blocks = limits.num_blocks + num_tree_blocks(max_tree_rows, limits.block_size)
        self._cache: KVCache | None = decoder.empty_kv_cache(
            num_blocks, limits.block_size, limits.num_window_blocks
        )
        if isinstance(drafter, ReadsTarget):
            drafter.read_from(self._cache)
        self._device = decoder.device
        self._drafter = drafter
        self._checks = checks
        self._partial = partial
        self._slots: dict[int, Slot] = {}
        self._has_states = bool(decoder.spec.recurrent_layers)
        self._states: dict[int, SequenceState] = {}  # by slot
        self._checkpoints: dict[int, Checkpoint] = {}  # by place
        self._launched: deque[StepPlan] = deque()
        self._busy_cores = BusyCores(torch.get_num_threads() if decoder.device.type == "cpu" else 1)

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    @property
    def is_done(self) -> bool:
        return True

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Run the oldest launched step. Raises ExecutorError for a step launched after `close`."""
        plan = self._launched.popleft()
        started_at = time.perf_counter()
        self._update_slots(plan)
        prefill = self._prefill(plan.prefill)
        decode = self._decode(plan.decode, plan.verification)
        duration_s = time.perf_counter() - started_at
        self._busy_cores.look()
        return StepResult(step_id=plan.step_id, prefill=prefill, decode=decode, duration_s=duration_s)

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """See `TakesWeights`."""
        if self._decoder is None:
            raise ExecutorError("the executor is closed")

        update_weights(self._decoder, tensors)

    def close(self) -> None:
        self._launched.clear()
        self._slots.clear()
        self._states.clear()
        self._checkpoints.clear()
        self._decoder = self._cache = self._drafter = None
        return_freed_memory(self._device)

    def _update_slots(self, plan: StepPlan) -> None:
        for assignment in plan.assignments:
            rules = LogitsProcessors.of(assignment, self.limits.vocab_size, self._device)
            slot = self._slots[assignment.slot] = Slot(assignment.sampling, rules)
            if assignment.sampling.prompt_states is not None:
                slot.states = StateGatherer(assignment.sampling.prompt_states)
            if self._drafter is not None:
                self._drafter.enter(slot, assignment.cached_token_ids)
            if self._partial is not None:
                self._partial.enter(slot)
            if self._has_states:
                self._states[assignment.slot] = self._state(assignment.checkpoint)
        for update in plan.block_updates:
            self._slots[update.slot].place_blocks(update.first_index, update.block_ids)
        for update in plan.window_updates:
            self._slots[update.slot].place_window_blocks(update.first_index, update.block_ids)

    def _prefill(self, chunks: tuple[PrefillChunk, ...]) -> tuple[SlotOutput, ...]:
        """Run the prefill part: an output for each chunk, with a token for each last one."""
        if not chunks:
            return ()

        rows = [sequence_rows(self._slots[chunk.slot], chunk.start, len(chunk.token_ids)) for chunk in chunks]
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        states = [self._chunk_rows(chunk) for chunk in chunks] if self._has_states else []
        cache, wanted = self._open_cache(), [self._num_wanted(chunk) for chunk in chunks]
        last = LastRows.of(rows, wanted) if sum(wanted) < len(token_ids) else None
        hidden, aux_hidden = self._forward(token_ids, AttentionBatch(rows, cache), states, last)
        for chunk, state in zip(chunks, states, strict=False):
            taken = state.checkpoints()
            self._checkpoints |= {place: taken[position] for position, place in chunk.checkpoints}
        last_rows, last_slots = [], []
        first_row = 0
        for chunk, number in zip(chunks, wanted, strict=True):
            slot = self._slots[chunk.slot]
            slot.length = chunk.start + len(chunk.token_ids)
            if slot.rules is not None:
                slot.rules.begin_step()
                slot.rules.count(chunk.token_ids, chunk.start)
            if slot.sampling.num_prompt_logprobs is not None:
                self._score_prompt(hidden[first_row : first_row + number], chunk, slot)
            if slot.states is not None:
                assert self._decoder is not None
                chunk_hidden = hidden[first_row : first_row + number]
                slot.states.add(chunk_hidden, self._decoder.final_normed, is_last=chunk.is_last)
            first_row += number
            if chunk.is_last:
                last_rows.append(first_row - 1)
                last_slots.append(slot)

        outputs = iter(self._sample_tokens(hidden[last_rows], last_slots))
        if self._drafter is not None:
            self._drafter.draft_extend(self._prefill_spans(chunks), aux_hidden, hidden)
        return tuple(next(outputs) if chunk.is_last else SlotOutput() for chunk in chunks)

    def _num_wanted(self, chunk: PrefillChunk) -> int:
        """The number of last rows of a chunk whose output is read: all, if the drafter reads them, or the
        request asks for something of each."""
        decoder, sampling = self._decoder, self._slots[chunk.slot].sampling
        assert decoder is not None
        is_cut = decoder.spec.first_reader < decoder.spec.num_layers
        reads_tokens = self._drafter is None or isinstance(self._drafter, NGramDrafter | ModelDrafter)
        asks_for_one = sampling.num_prompt_logprobs is None and sampling.prompt_states in (None, "last")
        if is_cut and reads_tokens and asks_for_one:
            return int(chunk.is_last)

        return len(chunk.token_ids)

    def _state(self, place: int | None) -> SequenceState:
        """The states of a sequence that begins, or goes on from a checkpoint."""
        decoder = self._decoder
        assert decoder is not None
        checkpoint = None if place is None else self._checkpoints[place]
        return SequenceState(decoder.spec, decoder.dtype, decoder.device, checkpoint)

    def _chunk_rows(self, chunk: PrefillChunk) -> StateRows:
        positions = [position for position, _ in chunk.checkpoints]
        state = self._states[chunk.slot]
        return StateRows.of(state, chunk.start, len(chunk.token_ids), is_final=True, positions=positions)

    def _prefill_spans(self, chunks: tuple[PrefillChunk, ...]) -> list[Span]:
        """The rows of chunks for the drafter, after the last chunks have sampled their tokens."""
        spans = []
        first_row = 0
        for chunk in chunks:
            slot = self._slots[chunk.slot]
            next_token_id = slot.last_token if chunk.next_token_id is None else chunk.next_token_id
            next_token_ids = (*chunk.token_ids[1:], next_token_id)
            rows = range(first_row, first_row + len(next_token_ids))
            spans.append(Span(slot, chunk.start, chunk.token_ids[0], next_token_ids, rows))
            first_row = rows.stop

        return spans

    def _score_prompt(self, hidden: Tensor, chunk: PrefillChunk, slot: Slot) -> None:
        """Add the log-probabilities of the prompt tokens that follow a chunk's rows, hidden [N, H], to the
        slot."""
        row, scored = scored_tokens(chunk, slot.sampling)
        hidden = hidden[row:]
        num_top = slot.sampling.num_prompt_logprobs
        assert num_top is not None and self._decoder is not None
        for first in range(0, len(scored), LOGITS_ROWS):
            token_ids = scored[first : first + LOGITS_ROWS]
            tokens = torch.tensor(token_ids, dtype=torch.int64, device=hidden.device)
            logits = self._decoder.logits(hidden[first : first + len(tokens)])
            entries = token_logprobs(logits, tokens, [num_top] * len(tokens))
            slot.prompt_logprobs += [entry for entry in entries if entry is not None]

    def _decode(self, rows: tuple[DecodeRow, ...], verification: Verification) -> tuple[SlotOutput, ...]:
        """Run the decode part: draft, verify all draft tokens in one forward pass, extend the draft."""
        by_slot = self._unusable_rows(rows)
        active = [row for row in rows if not self._slots[row.slot].is_finished and row.slot not in by_slot]
        if active:
            outputs = self._run_round(active, verification)
            by_slot |= zip([row.slot for row in active], outputs, strict=True)

        return tuple(by_slot.get(row.slot, SlotOutput()) for row in rows)

    def _unusable_rows(self, rows: tuple[DecodeRow, ...]) -> dict[int, SlotOutput]:
        """The outputs of slots that cannot take part in the round, with the violations that the checks have
        found; empty without checks."""
        outputs: dict[int, SlotOutput] = {}
        for row in rows if self._checks is not None else ():
            slot = self._slots[row.slot]
            if not slot.is_finished:
                assert self._checks is not None
                violation = self._checks.check_table(slot, draft_limit(row, slot))
                if violation is not None:
                    outputs[row.slot] = SlotOutput(token_ids=(slot.last_token,), violation=violation)

        return outputs

    def _run_round(self, active: list[DecodeRow], verification: Verification) -> list[SlotOutput]:
        """Draft, verify, rewind and extend the draft for rows of slots that have not finished."""
        slot_rows, violations = self._propose(active)
        cache = self._open_cache()
        states = []
        if self._has_states:
            states = [
                StateRows.of(
                    self._states[row.slot],
                    each.start,
                    1 + len(each.draft.token_ids),
                    is_final=not each.draft.token_ids,
                )
                for row, each in zip(active, slot_rows, strict=True)
            ]
        token_ids = [token for each in slot_rows for token in (each.token_id, *each.draft.token_ids)]
        batch: StepRows
        if verification == "whole":
            batch = attention_batch(slot_rows, cache)
        elif verification == "partial":
            batch = self._partial_rounds.partial_batch(slot_rows, cache)
        else:
            slot_rows, token_ids = self._partial_rounds.with_pending(slot_rows)
            batch = self._partial_rounds.refresh_batch(slot_rows, cache)
        hidden, aux_hidden = self._forward(token_ids, batch, states)
        checks = self._checks
        if checks is not None:
            checks.check_forward(slot_rows, batch, hidden, violations)
        outputs, paths = self._verify(slot_rows, hidden)
        rewind(slot_rows, paths, cache)
        if verification == "partial":
            self._partial_rounds.note_partial(slot_rows, outputs)
        elif isinstance(batch, RefreshBatch):
            self._partial_rounds.note_refresh(slot_rows, batch)
        if checks is not None:
            checks.check_commit(slot_rows, outputs, paths, cache, violations)
            outputs = checks.reported(slot_rows, outputs, violations)
        if self._drafter is not None:
            spans = []
            for each, output, path in zip(slot_rows, outputs, paths, strict=True):
                rows = [each.first_row + node for node in path]
                spans.append(Span(each.slot, each.start, each.token_id, output.token_ids, rows))
            self._drafter.draft_extend(spans, aux_hidden, hidden)

        return outputs

    def _propose(self, rows: list[DecodeRow]) -> tuple[list[SlotRows], Violations]:
        """The rows of slots that have not finished: the newest token, and what the drafter proposes after it.
        Drafts that break a rule are dropped, and the violations returned."""
        slots = [self._slots[row.slot] for row in rows]
        drafts = [Draft.chain(()) for _ in rows]
        violations: Violations = {}
        if self._drafter is not None:
            limits = [draft_limit(row, slot) for row, slot in zip(rows, slots, strict=True)]
            drafts = self._drafter.propose(slots, limits)
            if self._checks is not None:
                violations = self._checks.check_drafts(limits, drafts)
                for index in violations:
                    drafts[index] = Draft.chain(())

        return place_rows(slots, drafts, self.limits), violations

    def _verify(
        self, slot_rows: list[SlotRows], hidden: Tensor
    ) -> tuple[list[SlotOutput], list[tuple[int, ...]]]:
        """Sample a token after a row of each slot, from hidden [N, H], and continue at the row's child that
        has this token, as long as there is one. Returns the outputs, and the nodes that were sampled from.

        Every token is sampled exactly as in plain decoding, so the tokens are the same with any draft.
        """
        for each in slot_rows:
            if each.slot.rules is not None:
                each.slot.rules.begin_step(each.draft.token_ids)

        emitted: list[list[SlotOutput]] = [[] for _ in slot_rows]
        paths = [[0] for _ in slot_rows]  # to the row that is sampled from next
        active = list(range(len(slot_rows)))
        while active:
            last_hidden = hidden[[slot_rows[index].first_row + paths[index][-1] for index in active]]
            outputs = self._sample_tokens(last_hidden, [slot_rows[index].slot for index in active])
            continued = []
            for index, output in zip(active, outputs, strict=True):
                emitted[index].append(output)
                child = slot_rows[index].child_with(paths[index][-1], output.token_ids[0])
                if child is not None:
                    paths[index].append(child)
                    if output.finish is None:
                        continued.append(index)
            active = continued

        joined = [
            _join_outputs(outputs, each.draft, path[1:])
            for outputs, each, path in zip(emitted, slot_rows, paths, strict=True)
        ]
        return joined, [tuple(path[: len(outputs)]) for path, outputs in zip(paths, emitted, strict=True)]

    @property
    def _partial_rounds(self) -> PartialRounds:
        assert self._partial is not None, "no partial verification was configured"
        return self._partial

    def _open_cache(self) -> KVCache:
        """The target's KV cache; ExecutorError after `close`."""
        if self._cache is None:
            raise ExecutorError("the executor is closed")

        return self._cache

    def _forward(
        self,
        token_ids: list[int],
        batch: StepRows,
        states: list[StateRows],
        last: LastRows | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The target's residual stream [N, H] after the last layer, and at each layer the drafter needs.

        states: of each sequence, for a model with recurrent layers. last: as in `Decoder.forward`.
        """
        decoder = self._decoder
        assert decoder is not None
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=decoder.device)
        aux_layers = self._drafter.aux_layers if self._drafter is not None else ()
        return decoder.forward(tokens, batch, self._open_cache(), aux_layers, states, last)

    def _sample_tokens(self, hidden: Tensor, slots: list[Slot]) -> list[SlotOutput]:
        """Sample one token for each slot from its row of hidden [M, H], and append it to the slot."""
        if not slots:
            return []

        decoder = self._decoder
        assert decoder is not None
        logits = decoder.logits(hidden)
        lengths = [slot.length for slot in slots]
        ruled = apply_processors(logits, [slot.rules for slot in slots], lengths)
        ruled, errors = apply_functions(ruled, [slot.rules for slot in slots])
        tokens = choose(ruled, [slot.sampling for slot in slots], lengths)
        logprobs = token_logprobs(logits, tokens, [slot.sampling.num_logprobs for slot in slots])
        logprobs = with_given(logprobs, logits, [slot.sampling.logprob_token_ids for slot in slots])
        # Before a token is appended:
        prompts = [(slot.whole_prompt_logprobs, slot.whole_states) for slot in slots]
        return [
            SlotOutput(
                token_ids=(token,),
                finish=slot.append(token),
                logprobs=(entry,) if entry is not None else None,
                prompt_logprobs=prompt_logprobs,
                prompt_states=prompt_states,
                error=errors.get(row),
            )
            for row, (slot, token, entry, (prompt_logprobs, prompt_states)) in enumerate(
                zip(slots, tokens.tolist(), logprobs, prompts, strict=True)
            )
        ]


def _join_outputs(outputs: list[SlotOutput], draft: Draft, accepted: list[int]) -> SlotOutput:
    """The tokens of one slot's round, in order, as one output. accepted: the accepted nodes of the draft."""
    if len(outputs) == 1 and not draft.token_ids:
        return outputs[0]

    logprobs = tuple(entry for output in outputs for entry in output.logprobs or ())
    return SlotOutput(
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish=outputs[-1].finish,
        logprobs=logprobs if outputs[0].logprobs is not None else None,
        num_drafted=len(draft.token_ids),
        num_accepted=len(accepted),
        accepted_nodes=() if draft.tree.is_chain else tuple(accepted),
        is_ngram=draft.is_ngram,
        error=next((output.error for output in outputs if output.error is not None), None),
    )
