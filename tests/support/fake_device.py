"""A simulated executor that keeps the device's state and checks every KV slot that it reads.

The next token is a hash of a sequence's history and seed over a small alphabet. So the whole output of a
sequence is known in advance (`Story`), and the scheduler's result can be compared with it. KV slots hold
(token, position, hash of the history up to the token). The history begins with the salt of the cache, so a
story differs from one with another salt. It also has the form of attention of each position, expanded or not.
A row may attend only if all earlier positions hold its own story. Rounds over views leave other content,
which rows over all keys may not read.

With checkpoints, a slot and a place hold the content of all positions that their recurrent states have seen.
Chunks and rows append to it, rejected drafts are taken off again, and every start has to find its own story.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Literal
from zlib import crc32

from drift_sdk.results import TokenLogprobs
from drift_sdk.scheduling.planning import SchedulerConfig, num_expanded_tokens
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import (
    EXPANDED_TILE,
    PrefillChunk,
    SlotOutput,
    SlotSampling,
    StepPlan,
    StepResult,
    Verification,
)

ALPHABET = 5
JUNK = (-1, -1, -1)


def rough(content: tuple[int, int, int]) -> tuple[int, int, int]:
    """The content of a slot that a round over views has written."""
    return (*content[:2], ~content[2])


def mix(history: int, value: int) -> int:
    history = (history ^ (value + 0x9E3779B9)) * 0xFF51AFD7ED558CCD % 2**64
    return history ^ (history >> 29)


class Story:
    """All tokens of one request, from prompt to end, and the content of its KV at each position."""

    def __init__(
        self, prompt_ids: list[int], sampling: SlotSampling, cache_salt: str | None, num_expanded: int = 0
    ) -> None:
        self.prompt_ids = prompt_ids
        self.num_expanded = num_expanded
        self.sampling = sampling
        self.token_ids = list(prompt_ids)
        self.kv: list[tuple[int, int, int]] = []
        self._history = 0 if cache_salt is None else mix(0, crc32(cache_salt.encode()))
        for token_id in prompt_ids:
            self._remember(token_id)

        self.finish: Literal["stop", "length"] | None = None
        while self.finish is None:
            token_id = mix(self._history, sampling.seed) % ALPHABET
            self.token_ids.append(token_id)
            self._remember(token_id)
            if token_id in sampling.stop_token_ids:
                self.finish = "stop"
            elif len(self.token_ids) == sampling.max_length:
                self.finish = "length"

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    def _remember(self, token_id: int) -> None:
        self._history = mix(self._history, token_id)
        if len(self.kv) < self.num_expanded:
            self._history = mix(self._history, -1)
        self.kv.append((token_id, len(self.kv), self._history))


def logprob_of(position: int, token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=-float(position))


class FakeSlot:
    def __init__(self, story: Story) -> None:
        self.story = story
        self.table: dict[int, int] = {}
        self.window_table: dict[int, int] = {}
        self.length = 0  # 0 until the last chunk has run
        self.num_computed: int | None = None  # None until the first chunk
        self.num_pending = 0  # positions before the newest token's that rounds over views have written
        self.has_view = False
        self.state: list[tuple[int, int, int]] = []

    @property
    def is_finished(self) -> bool:
        return self.length == len(self.story.token_ids)


class FakeDevice:
    """Runs plans when they are collected, in the order of their launch: as late as a device may run them."""

    def __init__(self, config: SchedulerConfig, seed: int = 0) -> None:
        self.config = config
        self.stories: dict[int, Story] = {}  # by sampling seed
        self.slots: dict[int, FakeSlot] = {}
        self.kv: list[tuple[int, int, int]] = [JUNK] * (config.num_blocks * config.block_size)
        self.window_kv: list[tuple[int, int, int]] = [JUNK] * (config.num_window_blocks * config.block_size)
        self.places: list[list[tuple[int, int, int]]] = [[JUNK] for _ in range(config.num_checkpoints)]
        self.launched: deque[StepPlan] = deque()
        self.num_expanded = 0
        self._random = random.Random(seed)

    def sequence(
        self,
        prompt_ids: list[int],
        *,
        max_tokens: int,
        arrival: int,
        priority: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        num_logprobs: int | None = None,
        cache_salt: str | None = None,
        borders: tuple[int, ...] = (),
    ) -> Sequence:
        """A new sequence whose story this device knows. `arrival` is its seed."""
        sampling = SlotSampling(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=arrival,
            stop_token_ids=stop_token_ids,
            num_prompt_tokens=len(prompt_ids),
            max_length=len(prompt_ids) + max_tokens,
            num_logprobs=num_logprobs,
        )
        num_expanded = num_expanded_tokens(len(prompt_ids), self.config.max_expanded_tokens) or 0
        self.stories[arrival] = Story(prompt_ids, sampling, cache_salt, num_expanded)
        return Sequence(
            request_id=f"r{arrival}",
            prompt_ids=prompt_ids,
            sampling=sampling,
            priority=priority,
            arrival=arrival,
            cache_salt=cache_salt,
            borders=borders,
        )

    def launch(self, plan: StepPlan) -> None:
        slots = [chunk.slot for chunk in plan.prefill] + [row.slot for row in plan.decode]
        assert slots, "an empty plan"
        assert len(set(slots)) == len(slots), "a slot has a chunk and a row, or two"
        num_prefill_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        assert num_prefill_tokens <= self.config.prefill_token_budget
        ends = [chunk.start + chunk.num_expanded for chunk in plan.prefill if chunk.num_expanded]
        num_keys = sum(-(-end // EXPANDED_TILE) * EXPANDED_TILE for end in ends)
        assert num_keys <= self.config.max_expanded_tokens
        self.launched.append(plan)

    def collect(self) -> StepResult:
        plan = self.launched.popleft()
        for assignment in plan.assignments:
            slot = self.slots[assignment.slot] = FakeSlot(self.stories[assignment.sampling.seed])
            if assignment.checkpoint is not None:
                slot.state = list(self.places[assignment.checkpoint])

        for update in plan.block_updates:
            table = self.slots[update.slot].table
            assert update.first_index <= len(table), "a gap in a block table"
            assert update.block_ids, "an empty block update"
            table.update(enumerate(update.block_ids, update.first_index))

        for update in plan.window_updates:
            assert update.block_ids, "an empty block update"
            table = self.slots[update.slot].window_table
            table.update(enumerate(update.block_ids, update.first_index))

        prefill = tuple(self._run_chunk(self.slots[chunk.slot], chunk) for chunk in plan.prefill)
        decode = tuple(
            self._run_row(self.slots[row.slot], row.max_emitted_tokens, plan.verification)
            for row in plan.decode
        )
        num_prefill_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        duration_s = 0.01 * bool(decode) + 0.0001 * num_prefill_tokens
        return StepResult(step_id=plan.step_id, prefill=prefill, decode=decode, duration_s=duration_s)

    def lose_kv(self) -> None:
        """Overwrite all KV and all checkpoints."""
        self.kv, self.window_kv = [JUNK] * len(self.kv), [JUNK] * len(self.window_kv)
        self.places = [[JUNK] for _ in self.places]

    def _run_chunk(self, slot: FakeSlot, chunk: PrefillChunk) -> SlotOutput:
        start, token_ids = chunk.start, chunk.token_ids
        assert slot.length == 0, "a chunk after the last one"
        assert token_ids, "an empty chunk"
        assert slot.num_computed is None or start == slot.num_computed, f"chunk at {start}, not next"
        end = start + len(token_ids)
        assert list(token_ids) == slot.story.token_ids[start:end], "the chunk has other tokens"
        most = min(max(slot.story.num_expanded - start, 0), len(token_ids))
        assert chunk.num_expanded == most, "the chunk has another form"
        self.num_expanded += chunk.num_expanded
        self._check(slot, start)
        for position in range(start, end):
            self._write(slot, position, slot.story.kv[position])

        self._check_states(slot, start)
        slot.state += slot.story.kv[start:end]
        self._keep(slot, chunk)
        slot.num_computed = end
        if not chunk.is_last:
            return SlotOutput()

        slot.length = end
        return self._emit(slot, 1)

    def _run_row(self, slot: FakeSlot, max_emitted_tokens: int, verification: Verification) -> SlotOutput:
        assert slot.length > 0, "a row before the last chunk"
        if slot.is_finished:
            return SlotOutput()

        first = slot.length - 1
        self._check(slot, first - slot.num_pending)
        layout = self.config.view_layout
        if verification == "partial":
            assert layout is not None
            room = layout.refresh_tokens - slot.num_pending
            assert max_emitted_tokens <= room, "no room for the rows that a round may accept"
            assert slot.has_view or slot.length <= layout.capacity, "a long sequence without views"
        elif verification == "refresh":
            for position in range(first - slot.num_pending, first):
                assert self.kv[self._address(slot, position)] == rough(slot.story.kv[position])
                self._write(slot, position, slot.story.kv[position])
            slot.num_pending, slot.has_view = 0, True
        else:
            slot.has_view = False  # it has no room for the rows that follow
        assert verification == "partial" or slot.num_pending == 0, "a whole round reads pending rows"
        output = self._emit(slot, self._random.randint(1, max_emitted_tokens))
        # All drafts are verified, so rejected ones leave junk after the newest token, up to the limit.
        last = min(first + max_emitted_tokens - 1, slot.story.sampling.max_length - 2)
        self._check_states(slot, first)
        for position in range(first, last + 1):
            is_true = position < slot.length - 1
            content = slot.story.kv[position] if is_true else JUNK
            self._write(slot, position, rough(content) if verification == "partial" else content)
            slot.state.append(content)
        del slot.state[slot.length - 1 :]
        if verification == "partial":
            slot.num_pending += slot.length - 1 - first

        return output

    def _emit(self, slot: FakeSlot, count: int) -> SlotOutput:
        story = slot.story
        first = slot.length
        slot.length = min(first + count, len(story.token_ids))
        token_ids = tuple(story.token_ids[first : slot.length])
        logprobs = None
        if story.sampling.num_logprobs is not None:
            logprobs = tuple(logprob_of(position, i) for position, i in enumerate(token_ids, first))

        finish = story.finish if slot.is_finished else None
        return SlotOutput(token_ids=token_ids, finish=finish, logprobs=logprobs)

    def _check_states(self, slot: FakeSlot, start: int) -> None:
        if self.config.checkpoint_tokens:
            assert len(slot.state) == start, f"states of {len(slot.state)} tokens at position {start}"
            assert slot.state == slot.story.kv[:start], f"states of another sequence at position {start}"

    def _keep(self, slot: FakeSlot, chunk: PrefillChunk) -> None:
        """Write the checkpoints of a chunk whose positions the slot's states have seen."""
        positions = [position for position, _ in chunk.checkpoints]
        assert positions == sorted({*positions}), f"checkpoints at {positions}"
        for position, place in chunk.checkpoints:
            assert position % self.config.checkpoint_tokens == 0, f"a checkpoint at {position}"
            assert chunk.start < position <= chunk.start + len(chunk.token_ids), f"not passed: {position}"
            self.places[place] = slot.state[:position]

    def _check(self, slot: FakeSlot, length: int) -> None:
        for position in range(length):
            found = self.kv[self._address(slot, position)]
            assert found == slot.story.kv[position], (
                f"KV of position {position} holds {found}, not {slot.story.kv[position]}"
            )
        window = self.config.window
        for position in range(max(length - window + 1, 0), length) if window else ():
            found = self.window_kv[self._window_address(slot, position)]
            assert found == slot.story.kv[position], (
                f"the window's KV of position {position} holds {found}, not {slot.story.kv[position]}"
            )

    def _write(self, slot: FakeSlot, position: int, content: tuple[int, int, int]) -> None:
        self.kv[self._address(slot, position)] = content
        if self.config.window:
            self.window_kv[self._window_address(slot, position)] = content

    def _window_address(self, slot: FakeSlot, position: int) -> int:
        index, offset = divmod(position, self.config.block_size)
        assert index in slot.window_table, f"no window block for position {position}"
        return slot.window_table[index] * self.config.block_size + offset

    def _address(self, slot: FakeSlot, position: int) -> int:
        index, offset = divmod(position, self.config.block_size)
        assert index in slot.table, f"no block for position {position}"
        return slot.table[index] * self.config.block_size + offset
