"""The state of one slot: a running sequence on the executor's side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from drift_sdk.results import PromptStates, TokenLogprobs
from drift_sdk.steps import SlotSampling

if TYPE_CHECKING:  # a scripted executor has slots and no torch
    from drift_sdk.execution.eager.sampling import LogitsProcessors
    from drift_sdk.execution.prompt_states import StateGatherer


class Slot:
    """The state of a running sequence.

    length:           tokens of prompt and output computed or sampled so far.
    last_token:       the newest token; -1 before the first one is sampled.
    block_table:      its KV blocks.
    window_table:     blocks of layers with windows; empty if they are the same.
    is_finished:      whether it has stopped or reached its limit.
    rules:            rules that change its logits; None without any.
    prompt_logprobs:  log-probabilities of the chunks so far.
    states:           hidden states of the chunks so far; None if they are not requested.
    draft:            state of a drafter.
    ngrams:           state of n-grams beside a draft model.
    view:             state of partial verification.
    """

    __slots__ = (
        "block_table",
        "draft",
        "is_finished",
        "last_token",
        "length",
        "ngrams",
        "prompt_logprobs",
        "rules",
        "sampling",
        "states",
        "view",
        "window_table",
    )

    def __init__(self, sampling: SlotSampling, rules: LogitsProcessors | None = None) -> None:
        self.sampling: SlotSampling = sampling
        self.rules: LogitsProcessors | None = rules
        self.draft: object = None
        self.ngrams: object = None
        self.view: object = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.states: StateGatherer | None = None
        self.block_table: list[int] = []
        self.window_table: list[int] = []
        self.length: int = 0
        self.last_token: int = -1
        self.is_finished: bool = False

    def place_blocks(self, first_index: int, block_ids: tuple[int, ...]) -> None:
        """Set the entries of the block table from `first_index` on; later ones belonged to blocks that were
        freed."""
        self.block_table[first_index:] = block_ids

    def place_window_blocks(self, first_index: int, block_ids: tuple[int, ...]) -> None:
        """The same for layers with windows. Entries before the first update lie behind the window."""
        self.window_table += [0] * (first_index - len(self.window_table))
        self.window_table[first_index:] = block_ids

    @property
    def room(self) -> int:
        """Tokens that can be accepted in a round besides the one that the target adds."""
        return self.sampling.max_length - self.length - 1

    def kv_slot(self, position: int, block_size: int) -> int:
        """The slot of the KV cache that belongs to a position."""
        return self.block_table[position // block_size] * block_size + position % block_size

    @property
    def whole_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The log-probabilities of the prompt, for the output with the first token; None if they were not
        requested or the sequence has output tokens. A sequence that is preempted after its first token has
        returned them already, and may not compute all of them again."""
        is_requested = self.sampling.num_prompt_logprobs is not None
        return tuple(self.prompt_logprobs) if is_requested and self._is_whole_prompt else None

    @property
    def whole_states(self) -> PromptStates | None:
        """The hidden states of the prompt, likewise."""
        return self.states.result() if self.states is not None and self._is_whole_prompt else None

    @property
    def _is_whole_prompt(self) -> bool:
        """Whether the sequence is its prompt, without output tokens."""
        return self.length == self.sampling.num_prompt_tokens

    def append(self, token_id: int) -> Literal["stop", "length"] | None:
        """Append a sampled token. Returns how the sequence finished; None if it has not."""
        if self.rules is not None:
            self.rules.append(token_id, self.length)
        self.last_token = token_id
        self.length += 1
        if token_id in self.sampling.stop_token_ids:
            self.is_finished = True
            return "stop"

        if self.length >= self.sampling.max_length:
            self.is_finished = True
            return "length"

        return None
