"""Launching of steps: the replays of a plan, their input words, and results once the step has ended.

Log-probabilities and hidden states of prompts are computed outside the graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch
from msgspec import Struct, structs
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from drift_sdk._kernels.attention.expanded import fill_parts
from drift_sdk._kernels.attention.prefill import prefill_tiles
from drift_sdk._kernels.commit import (
    FINISHED_LENGTH,
    FINISHED_STOP,
    RECORD_HEADER_WORDS,
    record_words,
)
from drift_sdk._kernels.sampling.rows import MAX_TOP
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES, tree_record_words
from drift_sdk.execution.device.resources import DeviceResources, Results
from drift_sdk.execution.device.slot_table import NO_UPDATES, Pairs, Updates
from drift_sdk.execution.device.stages import forward_stage
from drift_sdk.execution.eager.sampling import top_logprobs
from drift_sdk.execution.forward.caches import RecurrentStates
from drift_sdk.execution.graph.buckets import GraphBuckets, MixedBucket, bucket_of
from drift_sdk.execution.graph.gpu_graphs import CapturedGraphs
from drift_sdk.execution.prompt_states import StateGatherer
from drift_sdk.execution.rounds.round import PromptHead, violation_of
from drift_sdk.results import TokenLogprobs
from drift_sdk.spec.model import BORDER
from drift_sdk.steps import (
    DecodeRow,
    PrefillChunk,
    SlotAssignment,
    SlotOutput,
    SlotSampling,
    StepPlan,
    TokenConstraint,
    scored_tokens,
)

Words = NDArray[np.int32]

Constraints = Mapping[int, TokenConstraint]
"""By slot, of the slots that have a constraint."""


def first_rows(chunks: Sequence[PrefillChunk]) -> list[int]:
    """The first row of each chunk in the step, then the end of the last chunk's rows."""
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + len(chunk.token_ids))

    return ends


def fill_chunks(buckets: GraphBuckets, chunks: Sequence[PrefillChunk], payload: Words) -> int:
    """Write the payload of a prefill step and return its bucket."""
    ends = first_rows(chunks)
    num_rows = bucket_of(buckets.prefill, ends[-1])
    layout = buckets.prefill_layout(num_rows)
    token, slot, position = payload[layout.rows].reshape(3, num_rows)
    slot[:] = -1
    _fill_rows(chunks, token, slot, position)
    tiles = payload[layout.tiles]
    _fill_tiles(chunks, buckets.tile_rows, tiles)
    _fill_expanded(chunks, buckets.tile_rows, len(tiles) // 4, num_rows, payload[layout.expanded])
    if buckets.has_states:
        _fill_runs(chunks, buckets.max_chunks, payload[layout.runs])
    return num_rows


def without_last_tokens(chunks: Sequence[PrefillChunk]) -> list[PrefillChunk]:
    """The chunks of a mixed step, in which the last tokens of prompts are rows of the round. Chunks of a last
    token alone become empty."""
    return [
        replace(chunk, token_ids=chunk.token_ids[:-1], next_token_id=chunk.token_ids[-1])
        if chunk.is_last
        else chunk
        for chunk in chunks
    ]


def fill_mixed(
    buckets: GraphBuckets, plan: StepPlan, hits: Collection[int], bucket: MixedBucket, payload: Words
) -> None:
    """Write the payload of a mixed step: chunks, decode rows, and the prompts that end.

    hits: slots whose chunk is led by a row of the draft: the first one after a prefix hit, for instance.
    """
    layout, chunks = buckets.mixed_layout(bucket), without_last_tokens(plan.prefill)
    token, slot, position = payload[layout.rows].reshape(3, bucket.size)
    slot[:] = -1
    _fill_rows(chunks, token, slot, position)
    tile_rows, tiles = buckets.mixed_attention(bucket).tile_rows, payload[layout.tiles]
    _fill_tiles(chunks, tile_rows, tiles)
    _fill_expanded(chunks, tile_rows, len(tiles) // 4, bucket.size, payload[layout.expanded])
    if buckets.has_states:
        _fill_runs(chunks, buckets.mixed_chunks(bucket), payload[layout.runs])
    if layout.hits.stop > layout.following.start:
        _fill_following(chunks, hits, payload[layout.following], payload[layout.hits])
    slots, max_drafts = payload[layout.slots].reshape(2, bucket.num_slots)
    slots[:] = -1
    max_drafts[:] = 0
    num_decode = len(plan.decode)
    slots[:num_decode] = [row.slot for row in plan.decode]
    max_drafts[:num_decode] = [row.num_draft_tokens for row in plan.decode]
    for place, chunk in enumerate(chunk_ends(plan.prefill), num_decode):
        slots[place] = chunk.slot
        row = bucket.num_rows + place * (bucket.num_drafts + 1)
        token[row], slot[row] = chunk.token_ids[-1], chunk.slot
        position[row] = chunk.start + len(chunk.token_ids) - 1


def chunk_ends(chunks: Sequence[PrefillChunk]) -> list[PrefillChunk]:
    """The chunks that end their prompts."""
    return [chunk for chunk in chunks if chunk.is_last]


def _fill_rows(chunks: Sequence[PrefillChunk], token: Words, slot: Words, position: Words) -> None:
    for chunk, first in zip(chunks, first_rows(chunks), strict=False):
        rows = slice(first, first + len(chunk.token_ids))
        token[rows] = chunk.token_ids
        slot[rows] = chunk.slot
        position[rows] = np.arange(chunk.start, chunk.start + len(chunk.token_ids))


def _fill_tiles(chunks: Sequence[PrefillChunk], tile_rows: int, words: Words) -> None:
    """Write the tiles of the rows that do not attend to expanded keys."""
    sizes = [
        (chunk.slot, chunk.start + chunk.num_expanded, len(chunk.token_ids) - chunk.num_expanded)
        for chunk in chunks
    ]
    firsts = [first + chunk.num_expanded for chunk, first in zip(chunks, first_rows(chunks), strict=False)]
    kept = [index for index, (_, _, num_rows) in enumerate(sizes) if num_rows]
    prefill_tiles(
        [sizes[index] for index in kept], tile_rows, words.reshape(-1, 4), [firsts[index] for index in kept]
    )


def _fill_expanded(
    chunks: Sequence[PrefillChunk], tile_rows: int, num_tiles: int, num_rows: int, words: Words
) -> None:
    """Write the part `expanded` of a layout with so many tiles and rows."""
    if not len(words):
        return

    firsts = first_rows(chunks)
    kept = [(chunk, first) for chunk, first in zip(chunks, firsts, strict=False) if chunk.num_expanded]
    tiles, is_expanded = words[: 4 * num_tiles], words[4 * num_tiles : 4 * num_tiles + num_rows]
    ends = [(chunk.slot, chunk.start + chunk.num_expanded) for chunk, _ in kept]
    blocks = fill_parts(ends, words[4 * num_tiles + num_rows :])
    sizes = [(block, chunk.start, chunk.num_expanded) for block, (chunk, _) in zip(blocks, kept, strict=True)]
    prefill_tiles(sizes, tile_rows, tiles.reshape(-1, 4), [first for _, first in kept])
    is_expanded[:] = 0
    for chunk, first in kept:
        is_expanded[first : first + chunk.num_expanded] = 1


def _fill_runs(chunks: Sequence[PrefillChunk], max_chunks: int, words: Words) -> None:
    """Write the runs of chunks and the places of their checkpoints, as `PromptRuns` has them."""
    runs, places = words[: 4 * max_chunks].reshape(max_chunks, 4), words[4 * max_chunks :]
    runs[:] = -1
    places[:] = -1
    for index, (chunk, first) in enumerate(zip(chunks, first_rows(chunks), strict=False)):
        runs[index] = chunk.slot, chunk.start, first, len(chunk.token_ids)
        for position, place in chunk.checkpoints:
            places[first // BORDER + index + position // BORDER - chunk.start // BORDER - 1] = place


def _fill_following(
    chunks: Sequence[PrefillChunk], hits: Collection[int], following: Words, hit_rows: Words
) -> None:
    """Write the token after each row (-1: it is sampled), and the rows that follow prefix hits."""
    following[:] = -1
    hit_rows[:] = -1
    for index, (chunk, first) in enumerate(zip(chunks, first_rows(chunks), strict=False)):
        if not chunk.token_ids:
            continue

        last = first + len(chunk.token_ids) - 1
        following[first:last] = chunk.token_ids[1:]
        following[last] = -1 if chunk.next_token_id is None else chunk.next_token_id
        if chunk.slot in hits:
            hit_rows[index] = first


def fill_draft_extend(
    buckets: GraphBuckets, chunks: Sequence[PrefillChunk], hits: Collection[int], payload: Words
) -> int:
    """Write the payload of the step that updates the drafter after a prefill step, and return its bucket.

    hits: slots whose chunk is led by a row of the draft: the first one after a prefix hit, for instance.
    """
    num_rows = bucket_of(buckets.prefill, first_rows(chunks)[-1])
    token, slot, position, following = payload[: 4 * num_rows].reshape(4, num_rows)
    slot[:] = -1
    _fill_rows(chunks, token, slot, position)
    hit_rows = payload[4 * num_rows : buckets.draft_extend_words(num_rows)]
    _fill_following(chunks, hits, following, hit_rows)
    return num_rows


def fill_slots(buckets: GraphBuckets, slots: Sequence[int], values: Sequence[int], payload: Words) -> int:
    """Write slots, then a value for each slot, and return the bucket. The rest of the slots is -1."""
    size = bucket_of(buckets.decode, len(slots))
    payload[: len(slots)] = slots
    if len(slots) < size:
        payload[len(slots) : size] = -1
    payload[size : size + len(values)] = values
    return size


def fill_masks(
    constraints: Constraints, slots: Sequence[int], masks: Words, rows: Sequence[DecodeRow] = ()
) -> None:
    """Write the tokens allowed next for each of `slots` that has a constraint to its row of masks [B, W].
    rows: the decode rows of the first slots."""
    for place, slot in enumerate(slots if constraints else ()):
        constraint = constraints.get(slot)
        if constraint is not None:
            ahead = rows[place].mask if place < len(rows) else None
            masks[place] = constraint.masks(())[0] if ahead is None else ahead


def fill_draft_masks(constraints: Constraints, slots: Sequence[int], tokens: Words, masks: Words) -> None:
    """Write the tokens allowed after every row of a round to masks [B * T, W], for slots with a constraint.

    tokens [B * T]: each slot's newest token and the drafts after it; -1: no draft.
    """
    rows_per_slot = len(tokens) // len(slots)
    drafts_of = tokens.reshape(-1, rows_per_slot)[:, 1:].tolist()
    for place, (slot, drafts) in enumerate(zip(slots, drafts_of, strict=True)):
        constraint = constraints.get(slot)
        if constraint is not None:
            drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
            first = place * rows_per_slot
            masks[first : first + len(drafts) + 1] = constraint.masks(drafts)


FINISH: dict[int, Literal["stop", "length"]] = {FINISHED_STOP: "stop", FINISHED_LENGTH: "length"}


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


ScoredParts = list[tuple[tuple[int, ...], Tensor, Tensor, Tensor]]
"""For each part: token ids, their log-probabilities [N], the most likely ids and their log-probabilities
[N, num_top]. The tensors are in pinned memory and being copied to."""


VECTOR = 4
"""Numbers of fp32 that torch loads at once."""


def aligned(logits: Tensor) -> Tensor:
    """Logits [N, V] fp32, with columns of -inf if the rows begin at addresses of different alignment: torch's
    softmax sums a row in an order that depends on that."""
    num_missing = -logits.shape[1] % VECTOR
    return functional.pad(logits, (0, num_missing), value=-torch.inf) if num_missing else logits


class PromptOutputs:
    """Computes what requests report of their prompts from `hidden` [N, H] of the prefill step launched last:
    log-probabilities of the token after each position, and hidden states.

    The results are valid on the host once that step has ended. head: None = no request reports any.
    """

    def __init__(self, head: PromptHead | None, hidden: Tensor) -> None:
        self._head = head
        self._hidden = hidden
        self._parts: dict[int, ScoredParts] = {}
        self._states: dict[int, StateGatherer] = {}

    def enter(self, slot: int, sampling: SlotSampling) -> None:
        """Prepare for the prompt of a sequence that is placed in a slot."""
        self._parts.pop(slot, None)
        self._states.pop(slot, None)
        if sampling.prompt_states is not None:
            self._states[slot] = StateGatherer(sampling.prompt_states)

    def score(self, chunk: PrefillChunk, first_row: int, sampling: SlotSampling) -> None:
        """Start to score the known tokens after a chunk's rows, the first of which is `first_row`."""
        head, num_top = self._open_head, sampling.num_prompt_logprobs
        assert num_top is not None
        row, scored = scored_tokens(chunk, sampling)
        first_row += row
        for first in range(0, len(scored), head.num_rows):
            token_ids = scored[first : first + head.num_rows]
            tokens = torch.tensor(token_ids, dtype=torch.int64).to(self._hidden.device, non_blocking=True)
            rows = self._hidden[first_row + first : first_row + first + len(token_ids)]
            parts = top_logprobs(aligned(head.logits(rows)), tokens, num_top)
            host = [torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda) for part in parts]
            for target, part in zip(host, parts, strict=True):
                target.copy_(part, non_blocking=True)
            self._parts.setdefault(chunk.slot, []).append((token_ids, host[0], host[1], host[2]))

    def gather(self, chunk: PrefillChunk, rows: Sequence[range]) -> None:
        """Start to gather the hidden states of a chunk's rows, which lie in runs, one after the other."""
        head, states = self._open_head, self._states[chunk.slot]
        for run in rows:
            for first in range(run.start, run.stop, head.num_rows):
                end = min(first + head.num_rows, run.stop)
                is_last = chunk.is_last and end == run.stop and run is rows[-1]
                states.add(self._hidden[first:end], head.normed, is_last=is_last)

    def take_logprobs(self, slot: int) -> ScoredParts:
        """Remove and return all parts of a slot, so that the slot's next sequence does not find them."""
        return self._parts.pop(slot, [])

    def take_states(self, slot: int) -> StateGatherer:
        """Remove and return the hidden states of a slot, likewise."""
        return self._states.pop(slot)

    def stored_logits(self, num_rows: int) -> Tensor:
        """See `PromptHead.stored_logits`."""
        return self._open_head.stored_logits(num_rows)

    @property
    def _open_head(self) -> PromptHead:
        assert self._head is not None, "requests that report anything of their prompts are refused"
        return self._head

    @staticmethod
    def entries(parts: ScoredParts) -> tuple[TokenLogprobs, ...]:
        """An entry for each scored token; call it only after the steps have ended."""
        return tuple(
            TokenLogprobs(token_id=token, logprob=logprob, top=tuple(zip(ids, values, strict=True)))
            for token_ids, chosen, top_ids, top_values in parts
            for token, logprob, ids, values in zip(
                token_ids, chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True
            )
        )


class ResultPlaces(Struct):
    """Places of the results of a launched step.

    first_tokens: of the prompts that end in the step. decode: of its round, with `rows_per_slot` rows a slot,
    or with trees of which the results are those of `num_trees` slots. is_mixed: the step has one pass, and
    the results of `decode` are those of the round and then of the prompts that end.
    prompt_logprobs, prompt_states: by slot, of prompts that end in the step and report them.
    given_logprobs: by slot that reports the log-probabilities of given tokens, these ids and [rows, ids] in
    pinned memory: behind each row of the slot.
    num_logprobs: by slot, how many log-probabilities of a token its sequence reports. A later step may give
    the slot to another one before this step is read.
    """

    first_tokens: Results | None = None
    decode: Results | None = None
    rows_per_slot: int = 1
    num_trees: int = 0
    is_mixed: bool = False
    prompt_logprobs: dict[int, ScoredParts] = {}
    prompt_states: dict[int, StateGatherer] = {}
    given_logprobs: dict[int, tuple[tuple[int, ...], Tensor]] = {}
    num_logprobs: Mapping[int, int] = {}


class StepLauncher:
    """Starts the replays of plans and reads their results.

    It keeps what the host must know of each slot; lengths, tokens and finished flags are on the device.
    Launching waits for the device only for drafts after which a constraint must be asked, and for a free ring
    entry.
    """

    def __init__(
        self,
        resources: DeviceResources,
        graphs: CapturedGraphs,
        buckets: GraphBuckets,
        prompt_outputs: PromptOutputs,
        mirrors: Sequence[DeviceResources] = (),
        states: RecurrentStates | None = None,
        *,
        needs_first_token: bool = False,
    ) -> None:
        """mirrors: resources of the further GPUs on which the graphs run. states: of recurrent layers.
        needs_first_token: see `DrafterFactory.needs_first_token`."""
        self._resources, self._graphs, self._buckets = resources, graphs, buckets
        self._prompt_outputs, self._mirrors, self._states = prompt_outputs, mirrors, states
        self._sampling: dict[int, SlotSampling] = {}
        # By slot, only of slots that have any: in most steps no slot does.
        self._constraints: dict[int, TokenConstraint] = {}
        self._num_logprobs: dict[int, int] = {}
        self._given_ids: dict[int, tuple[int, ...]] = {}
        self._needs_first_token = needs_first_token
        self._fresh: set[int] = set()  # slots whose first chunk is still to come

    def launch(self, plan: StepPlan) -> ResultPlaces:
        """Start all replays of a plan, in order: updates, prefill, decode."""
        updates = self._launch_early_updates(self._updates(plan))
        found = ResultPlaces(num_logprobs=self._num_logprobs, given_logprobs={})
        if self._states is not None:  # assignments have been carried out
            self._states.note(plan.prefill)
        bucket = self._mixed_bucket(plan)
        if bucket is not None:
            with self._resources.stages("mixed"):
                self._launch_mixed(plan, bucket, updates, found)
            self._take_prompt_outputs(plan.prefill, found)
            return found

        if plan.prefill:
            with self._resources.stages("prefill"):
                found.first_tokens = self._launch_prefill(plan.prefill, updates, found)
            self._take_prompt_outputs(plan.prefill, found)
            updates = NO_UPDATES
        if plan.decode:
            if plan.verification == "whole":
                (num_slots, num_drafts), found.decode = self._launch_round(plan.decode, updates)
            else:
                (num_slots, num_drafts), found.decode = self._launch_partial(plan, updates)
            is_tree = num_drafts in self._buckets.trees
            found.rows_per_slot, found.num_trees = num_drafts + 1, num_slots if is_tree else 0
            self._report_given([row.slot for row in plan.decode], num_drafts + 1, num_slots, found)
        return found

    def read(
        self, plan: StepPlan, found: ResultPlaces
    ) -> tuple[tuple[SlotOutput, ...], tuple[SlotOutput, ...]]:
        """The outputs of a plan's chunks and of its decode rows; call it only after the step has ended."""
        slots = [row.slot for row in plan.decode]
        last = [chunk.slot for chunk in chunk_ends(plan.prefill)]
        if found.is_mixed:
            together = [*_outputs(found, found.decode, found.rows_per_slot, [*slots, *last])]
            decode, sampled = tuple(together[: len(slots)]), iter(together[len(slots) :])
        else:
            decode, sampled = self._decoded(found, slots), _outputs(found, found.first_tokens, 1, last)
        prefill = tuple(
            _with_prompt_outputs(next(sampled), found, chunk.slot) if chunk.is_last else SlotOutput()
            for chunk in plan.prefill
        )
        return prefill, decode

    def _decoded(self, found: ResultPlaces, slots: list[int]) -> tuple[SlotOutput, ...]:
        """The outputs of a round of its own."""
        if not found.num_trees or found.decode is None:
            return tuple(_outputs(found, found.decode, found.rows_per_slot, slots))

        found.decode.is_pending = False
        has_checks = self._buckets.has_checks
        outputs_of_trees = tree_outputs(
            found.decode.words, found.num_trees, slots, found.num_logprobs, has_checks=has_checks
        )
        return tuple(
            _with_given(output, found, slot) for output, slot in zip(outputs_of_trees, slots, strict=True)
        )

    def _updates(self, plan: StepPlan) -> Updates:
        """The slot table updates of a plan's assignments, block updates and finished prompts."""
        table, updates = self._resources.table, Updates()
        for assignment in plan.assignments:
            self._assign(assignment, updates)
        for update in plan.block_updates:
            table.place_blocks(update, updates)
        for update in plan.window_updates:
            table.place_blocks(update, updates, "window_table")
        for chunk in plan.prefill:
            if chunk.is_last:
                length = chunk.start + len(chunk.token_ids)
                table.set_length(chunk.slot, length, chunk.token_ids[-1], updates)

        return updates

    def _assign(self, assignment: SlotAssignment, updates: Updates) -> None:
        slot, sampling = assignment.slot, assignment.sampling
        self._sampling[slot] = sampling
        self._fresh.add(slot)
        self._constraints.pop(slot, None)
        self._given_ids.pop(slot, None)
        self._prompt_outputs.enter(slot, sampling)
        if sampling.logprob_token_ids:
            self._given_ids[slot] = sampling.logprob_token_ids
        # A copy: `read` takes those of the steps in flight.
        self._num_logprobs = {other: number for other, number in self._num_logprobs.items() if other != slot}
        if assignment.constraint is not None:
            self._constraints[slot] = assignment.constraint
        if sampling.num_logprobs is not None:
            self._num_logprobs[slot] = sampling.num_logprobs
        with self._resources.device.work():
            self._resources.table.assign(assignment, updates)
            if self._states is not None and assignment.checkpoint is not None:
                self._states.restore(slot, assignment.checkpoint)
        for mirror in self._mirrors:
            with mirror.device.work():
                mirror.table.clear(assignment)

    def _launch_early_updates(self, updates: Updates) -> Pairs:
        """Send all updates but the last ones, which one entry holds and the step's first replay applies.
        Return those."""
        ring = self._resources.ring
        *early, rest = [*updates.slices(ring.max_updates)] or [NO_UPDATES]
        for pairs in early:
            ring.start(ring.acquire(pairs), self._graphs.update)
        return rest

    def _launch_prefill(
        self, chunks: tuple[PrefillChunk, ...], updates: Pairs, found: ResultPlaces
    ) -> Results | None:
        """Compute chunks, sample the first token of prompts that end, and update the drafter. Return the
        results of the first tokens; None if no prompt ends."""
        ring = self._resources.ring
        entry = ring.acquire(updates)
        bucket = fill_chunks(self._buckets, chunks, ring.payload(entry))
        graphs = self._graphs.prefill
        if bucket in self._graphs.inner and not any(self._is_read(chunk) for chunk in chunks):
            graphs = self._graphs.inner
        ring.start(entry, graphs[bucket])
        firsts = first_rows(chunks)
        self._score_prompts(chunks, firsts)
        for chunk, first in zip(chunks, firsts, strict=False):
            self._gather_states(chunk, [range(first, first + len(chunk.token_ids))])
        results = self._launch_first_tokens(chunks, firsts)
        ends = [chunk.slot for chunk in chunk_ends(chunks)]
        self._report_given(ends, 1, bucket_of(self._buckets.decode, len(ends)) if ends else 0, found)
        if self._graphs.draft_extend:
            self._launch_draft_extend(chunks)
        return results

    def _is_read(self, chunk: PrefillChunk) -> bool:
        """Whether the output of a chunk's rows is read."""
        sampling = self._sampling[chunk.slot]
        reports_all = sampling.num_prompt_logprobs is not None or sampling.prompt_states in ("mean", "all")
        return chunk.is_last or reports_all

    def _mixed_bucket(self, plan: StepPlan) -> MixedBucket | None:
        """The mixed step for a plan; None if its chunks and its decode rows run in two passes.

        They do if the round waits for a constraint or is one of partial verification, and if a chunk is a
        single token whose draft first needs a row for the token before it.
        """
        if not plan.prefill or not plan.decode or plan.verification != "whole":
            return None

        drafts = [row.num_draft_tokens for row in plan.decode]
        ends = chunk_ends(plan.prefill)
        if self._is_split(plan.decode) or any(
            len(chunk.token_ids) == 1 and chunk.slot in self._slots_with_lead_row(ends) for chunk in ends
        ):
            return None

        num_tokens = first_rows(plan.prefill)[-1] - len(ends)
        num_slots = len(drafts) + len(ends)
        return self._buckets.mixed_bucket(num_tokens, len(plan.prefill), num_slots, max(drafts))

    def _launch_mixed(self, plan: StepPlan, bucket: MixedBucket, updates: Pairs, found: ResultPlaces) -> None:
        """Start the mixed step of a plan. Its results are those of the decode rows, then of the prompts that
        end."""
        ring = self._resources.ring
        hits = self._slots_with_lead_row(plan.prefill)
        self._fresh.difference_update(chunk.slot for chunk in plan.prefill)
        slots = [row.slot for row in plan.decode] + [chunk.slot for chunk in chunk_ends(plan.prefill)]
        entry = ring.acquire(updates)
        fill_mixed(self._buckets, plan, hits, bucket, ring.payload(entry))
        fill_masks(self._constraints, slots, ring.mask(entry), plan.decode)
        ring.start(entry, self._graphs.mixed[bucket])
        found.decode, found.rows_per_slot, found.is_mixed = ring.results(entry), bucket.num_drafts + 1, True
        self._report_given(slots, bucket.num_drafts + 1, bucket.num_slots, found)
        firsts = first_rows(without_last_tokens(plan.prefill))
        self._score_prompts(plan.prefill, firsts)
        place = len(plan.decode)
        for chunk, first, end in zip(plan.prefill, firsts, firsts[1:], strict=False):
            rows = [range(first, end)]
            if chunk.is_last:  # its last token is a row of the round
                last = bucket.num_rows + place * (bucket.num_drafts + 1)
                rows.append(range(last, last + 1))
                place += 1
            self._gather_states(chunk, rows)

    def _slots_with_lead_row(self, chunks: Sequence[PrefillChunk]) -> set[int]:
        """Slots whose chunk is led by a row of the draft for the token before it: the first chunk after a
        prefix hit, and the first one of a sequence if the drafter has a row for its first token."""
        if not self._graphs.draft_extend:
            return set()

        least = 0 if self._needs_first_token else 1
        return {chunk.slot for chunk in chunks if chunk.start >= least and chunk.slot in self._fresh}

    def _score_prompts(self, chunks: tuple[PrefillChunk, ...], firsts: Sequence[int]) -> None:
        """firsts: the first row of each chunk, see `first_rows`."""
        for chunk, first in zip(chunks, firsts, strict=False):
            sampling = self._sampling[chunk.slot]
            if sampling.num_prompt_logprobs is not None:
                with self._resources.device.work():
                    self._prompt_outputs.score(chunk, first, sampling)

    def _gather_states(self, chunk: PrefillChunk, rows: Sequence[range]) -> None:
        """rows: of the chunk in the step, see `PromptOutputs.gather`."""
        if self._sampling[chunk.slot].prompt_states is not None:
            with self._resources.device.work():
                self._prompt_outputs.gather(chunk, rows)

    def _report_given(
        self, slots: Sequence[int], rows_per_slot: int, num_slots: int, found: ResultPlaces
    ) -> None:
        """Start to copy the log-probabilities of given tokens behind each row of the slots that report them,
        from the logits of the step launched last, which has room for `num_slots` slots."""
        if not self._given_ids:
            return

        with self._resources.device.work():
            logits = self._prompt_outputs.stored_logits(num_slots * rows_per_slot)
            for place, slot in enumerate(slots):
                token_ids = self._given_ids.get(slot)
                if token_ids is None:
                    continue

                rows = aligned(logits[place * rows_per_slot : (place + 1) * rows_per_slot]).log_softmax(
                    dim=-1
                )
                columns = torch.tensor(token_ids, dtype=torch.int64).to(rows.device, non_blocking=True)
                values = rows.index_select(1, columns)
                host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
                found.given_logprobs[slot] = token_ids, host.copy_(values, non_blocking=True)

    def _launch_first_tokens(self, chunks: tuple[PrefillChunk, ...], firsts: Sequence[int]) -> Results | None:
        """firsts: the first row of each chunk, see `first_rows`."""
        last_rows = {
            chunk.slot: first + len(chunk.token_ids) - 1
            for chunk, first in zip(chunks, firsts, strict=False)
            if chunk.is_last
        }
        if not last_rows:
            return None

        ring, slots = self._resources.ring, [*last_rows]
        entry = ring.acquire(NO_UPDATES)
        bucket = fill_slots(self._buckets, slots, [*last_rows.values()], ring.payload(entry))
        fill_masks(self._constraints, slots, ring.mask(entry))
        ring.start(entry, self._graphs.first_tokens[bucket])
        return ring.results(entry)

    def _launch_draft_extend(self, chunks: tuple[PrefillChunk, ...]) -> None:
        ring = self._resources.ring
        entry = ring.acquire(NO_UPDATES)
        hits = self._slots_with_lead_row(chunks)
        self._fresh.difference_update(chunk.slot for chunk in chunks)
        bucket = fill_draft_extend(self._buckets, chunks, hits, ring.payload(entry))
        ring.start(entry, self._graphs.draft_extend[bucket])

    def _launch_round(self, rows: Sequence[DecodeRow], updates: Pairs) -> tuple[tuple[int, int], Results]:
        """Start a round of `rows`. Return its bucket (slots, drafts) and its results.

        Only the host knows which tokens a constraint allows after a draft. So if a constrained slot drafts,
        and only then, the round is split, and this waits until the tokens are drafted.
        """
        graphs, ring, constraints = self._graphs, self._resources.ring, self._constraints
        slots = [row.slot for row in rows]
        drafts = [row.num_draft_tokens for row in rows]
        num_drafts = bucket_of(self._buckets.drafts, max(drafts))
        entry = ring.acquire(updates)
        bucket = fill_slots(self._buckets, slots, drafts, ring.payload(entry)), num_drafts
        with self._resources.stages(forward_stage(num_drafts)):
            if self._is_split(rows):
                ring.start(entry, graphs.draft[bucket])
                tokens = ring.wait(entry)[: len(rows) * (num_drafts + 1)]
                fill_draft_masks(constraints, slots, tokens, ring.draft_masks.numpy())
                entry = ring.acquire(NO_UPDATES)
                ring.start(entry, graphs.verify[bucket])
            else:
                fill_masks(constraints, slots, ring.mask(entry), rows)
                ring.start(entry, graphs.decode[bucket])
        return bucket, ring.results(entry)

    def _launch_partial(self, plan: StepPlan, updates: Pairs) -> tuple[tuple[int, int], Results]:
        """Start a round of partial verification. Return its bucket (slots, drafts) and its results."""
        graphs, ring, drafts = self._graphs, self._resources.ring, self._buckets.drafts
        slots = [row.slot for row in plan.decode]
        most = [row.num_draft_tokens for row in plan.decode]
        entry = ring.acquire(updates)
        num_slots = fill_slots(self._buckets, slots, most, ring.payload(entry))
        fill_masks(self._constraints, slots, ring.mask(entry), plan.decode)
        num_drafts, graph = drafts[-1], graphs.refresh.get(num_slots)
        if plan.verification == "partial":
            num_drafts = bucket_of(drafts[1:], max(most))
            graph = graphs.partial[num_slots, num_drafts]
        assert graph is not None, "no partial verification was configured"
        with self._resources.stages(forward_stage(num_drafts)):
            ring.start(entry, graph)
        return (num_slots, num_drafts), ring.results(entry)

    def _is_split(self, rows: Sequence[DecodeRow]) -> bool:
        """True if a constrained slot drafts."""
        constraints = self._constraints
        return any(
            row.num_draft_tokens > 0 and row.slot in constraints for row in (rows if constraints else ())
        )

    def _take_prompt_outputs(self, chunks: tuple[PrefillChunk, ...], found: ResultPlaces) -> None:
        """Note what the prompts that end in this step report. It is taken now because the slot may have
        another sequence when the step is collected. A preempted sequence that recomputes generated tokens too
        does not report it again."""
        logprobs: dict[int, ScoredParts] = {}
        states: dict[int, StateGatherer] = {}
        for chunk in chunks:
            sampling = self._sampling[chunk.slot]
            is_whole = chunk.start + len(chunk.token_ids) == sampling.num_prompt_tokens
            if chunk.is_last and is_whole and sampling.num_prompt_logprobs is not None:
                logprobs[chunk.slot] = self._prompt_outputs.take_logprobs(chunk.slot)
            if chunk.is_last and is_whole and sampling.prompt_states is not None:
                states[chunk.slot] = self._prompt_outputs.take_states(chunk.slot)
        found.prompt_logprobs, found.prompt_states = logprobs, states


def _outputs(
    found: ResultPlaces, results: Results | None, rows_per_slot: int, slots: list[int]
) -> Iterator[SlotOutput]:
    """The outputs of slots in one of the results of a step; of None there are none."""
    if results is None:
        return iter(())

    results.is_pending = False
    found_outputs = outputs(results.words, rows_per_slot, slots, found.num_logprobs)
    if not found.given_logprobs:
        return found_outputs

    return (_with_given(output, found, slot) for output, slot in zip(found_outputs, slots, strict=True))


def _with_given(output: SlotOutput, found: ResultPlaces, slot: int) -> SlotOutput:
    """The output of a slot with the log-probabilities of given tokens."""
    given = found.given_logprobs.get(slot)
    if given is None or output.logprobs is None:
        return output

    token_ids, values = given
    rows = values.tolist()
    path = (0, *output.accepted_nodes) if output.accepted_nodes else range(len(output.token_ids))
    entries = [
        msgspec.structs.replace(entry, given=tuple(zip(token_ids, rows[row], strict=True)))
        for entry, row in zip(output.logprobs, path, strict=False)
    ]
    return msgspec.structs.replace(output, logprobs=tuple(entries))


def _with_prompt_outputs(output: SlotOutput, found: ResultPlaces, slot: int) -> SlotOutput:
    """The output of a prompt's last chunk, with what the prompt reports."""
    parts, states = found.prompt_logprobs.get(slot), found.prompt_states.get(slot)
    if parts is not None:
        output = msgspec.structs.replace(output, prompt_logprobs=PromptOutputs.entries(parts))
    if states is not None:
        output = msgspec.structs.replace(output, prompt_states=states.result())
    return output
