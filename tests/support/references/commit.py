"""References of the kernels of `drift_sdk._kernels.commit`."""

from __future__ import annotations

import torch

from drift_sdk._kernels.commit import (
    FINISHED_LENGTH,
    FINISHED_STOP,
    RECORD_HEADER_WORDS,
    ROW_RECORD_WORDS,
    CommitTensors,
    record_words,
)
from drift_sdk._kernels.sampling.rows import MAX_TOP
from drift_sdk._kernels.slots import SlotFlag


def commit_reference(tensors: CommitTensors) -> None:
    """`commit` in plain torch, one slot after the other."""
    row_slot, row_token, rows_per_slot = tensors.row_slot, tensors.row_token, tensors.rows_per_slot
    buffers, state, slots, emitted = tensors.buffers, tensors.state, tensors.slots, tensors.emitted
    output_ring, current_entry, next_entry = tensors.output_ring, tensors.current_entry, tensors.next_entry
    is_ngram = tensors.is_ngram
    size = record_words(rows_per_slot)
    for index in range(len(emitted)):
        rows = range(index * rows_per_slot, (index + 1) * rows_per_slot)
        record = output_ring[int(current_entry), index * size : (index + 1) * size]
        emitted[index] = 0
        record[:RECORD_HEADER_WORDS] = 0
        slot = int(row_slot[rows[0]])
        if slot < 0:
            continue

        is_drafted = [int(row_slot[row]) >= 0 for row in rows[1:]]
        drafts = [int(row_token[row]) if has else -1 for row, has in zip(rows[1:], is_drafted, strict=True)]
        tokens: list[int] = []
        finish = num_accepted = 0
        for row, draft in zip(rows, [*drafts, -1], strict=True):
            token = int(buffers.chosen[row])
            tokens.append(token)
            if int(slots.stop_bits[slot, token // 32]) >> token % 32 & 1:
                finish = FINISHED_STOP
            elif int(state.length[slot]) + len(tokens) >= int(state.max_length[slot]):
                finish = FINISHED_LENGTH
            num_accepted += draft == token
            if finish or draft != token:
                break

        state.length[slot] += len(tokens)
        state.last_token[slot], state.finish[slot] = tokens[-1], finish
        emitted[index] = len(tokens)
        mark = 0 if is_ngram is None else int(is_ngram[index])
        header = [len(tokens), finish, sum(is_drafted), num_accepted, mark]
        record[:RECORD_HEADER_WORDS] = torch.tensor(header, dtype=torch.int32)
        for depth, token in enumerate(tokens):
            row_record = record[RECORD_HEADER_WORDS + depth * ROW_RECORD_WORDS :][:ROW_RECORD_WORDS]
            row_record[0] = token
            if int(slots.flags[slot]) & SlotFlag.PENALTIES:
                slots.counts[slot, token] += 1
            if int(slots.num_logprobs[slot]) >= 0:
                row = rows[depth]
                row_record[1] = buffers.chosen_logprob[row].view(torch.int32)
                row_record[2 : 2 + MAX_TOP] = buffers.top_token[row]
                row_record[2 + MAX_TOP :] = buffers.top_logprob[row].view(torch.int32)

    next_entry.add_(1).remainder_(len(output_ring))
