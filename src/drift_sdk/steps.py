"""The seam between the scheduler, which knows no GPU, and the executor, which knows no queue.

A step is launched before the previous one has been read, so a plan says which slots take part and which KV
blocks they may write, but not how long they are: lengths, last tokens and finished flags live in the
executor's slot tables and are advanced by the steps themselves. Steps run in the order of their launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

from drift_sdk.results import TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "BlockUpdate",
    "DecodeRow",
    "Executor",
    "ExecutorLimits",
    "HostWork",
    "PrefillChunk",
    "SlotAssignment",
    "SlotOutput",
    "SlotSampling",
    "StepPlan",
    "StepResult",
    "TokenConstraint",
]


class SlotSampling(Struct, frozen=True, kw_only=True):
    """How a slot's tokens are chosen and when they end; all a device needs to know of a request.

    The token at a position is a function of context, `seed` and position alone. The first
    `num_prompt_tokens` tokens of a sequence are its prompt; `max_length` counts prompt and generated tokens.
    A slot whose newest token is in `stop_token_ids`, or whose length has reached `max_length`, is finished:
    later rows for it emit nothing.

    `min_length`: stop ids are not chosen while the sequence is shorter.
    Penalties: `repetition_penalty` looks at prompt and output, the two others at the output alone.
    `logit_bias`: (token id, addend) pairs. `allowed_token_ids`: None = all.
    `num_logprobs`, `num_prompt_logprobs`: how many of the most likely tokens to report at each generated
    position and at each prompt position; None = no report.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    max_length: int
    min_length: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


class TokenConstraint(Protocol):
    """What a sequence may say next, known to the host alone (a grammar).

    The scheduler plans a constrained sequence's next row only when all its tokens are committed and the
    host is ready, so an executor that asks while launching or running a step gets the current answer.
    """

    def masks(self, draft_token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Allowed tokens after the committed ones and after each of the drafted ones in turn:
        [len(draft_token_ids) + 1, ceil(vocab_size / 32)], bit i % 32 of word i // 32 stands for token i.
        """


class SlotAssignment(Struct, frozen=True, kw_only=True):
    """A sequence enters a slot: its row of the device tables starts afresh.

    `cached_token_ids`: the tokens found in the prefix cache, which no chunk brings; only for slots with
    penalties, which count them, and executors that want the history.
    """

    slot: int
    sampling: SlotSampling
    constraint: TokenConstraint | None = None
    cached_token_ids: tuple[int, ...] = ()


class BlockUpdate(Struct, frozen=True, kw_only=True):
    """Entries `first_index...` of a slot's block table are to hold `block_ids`."""

    slot: int
    first_index: int
    block_ids: tuple[int, ...]


class PrefillChunk(Struct, frozen=True, kw_only=True):
    """Tokens at positions `start ... start + len(token_ids) - 1` of a slot, and the known token after them:
    None after the last chunk, which samples it."""

    slot: int
    start: int
    token_ids: tuple[int, ...]
    next_token_id: int | None

    @property
    def is_last(self) -> bool:
        return self.next_token_id is None


class DecodeRow(Struct, frozen=True, kw_only=True):
    """A slot that decodes: up to `num_draft_tokens` drafted tokens are verified and 1 to
    `num_draft_tokens + 1` tokens emitted, none if the slot has finished."""

    slot: int
    num_draft_tokens: int


class StepPlan(Struct, frozen=True, kw_only=True):
    """One step. Assignments come first, then block updates, then the prefill part, then the decode part.
    A slot has a chunk or a row, never both."""

    step_id: int
    assignments: tuple[SlotAssignment, ...]
    block_updates: tuple[BlockUpdate, ...]
    prefill: tuple[PrefillChunk, ...]
    decode: tuple[DecodeRow, ...]


# Nothing of what comes with every token, here and on its way to the stream, can be part of a cycle: the
# collector need not go through it again and again.
class SlotOutput(Struct, frozen=True, kw_only=True, gc=False):
    """Tokens a slot emitted in one step, in order, and how it finished if it did.

    `logprobs` has an entry per token where they were asked for. `prompt_logprobs` comes with the first
    token: an entry per prompt token from the second on. `num_drafted` tokens were drafted for the row, the
    first `num_accepted` of them right.
    """

    token_ids: tuple[int, ...] = ()
    finish: Literal["stop", "length"] | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_drafted: int = 0
    num_accepted: int = 0


class HostWork(Struct, frozen=True, kw_only=True):
    """What the host did where the device should have gone on by itself, since the step before was collected.

    `num_waits`: for a replay to be over because there was no room for the next one's input.
    `num_split_rounds`: rounds cut in two, to ask a constraint what may follow each draft. `num_copies`: of
    results that came late to be read. `num_allocations`: of device memory, torch's, counted now and then.
    """

    num_waits: int = 0
    num_split_rounds: int = 0
    num_copies: int = 0
    num_allocations: int = 0


class StepResult(Struct, frozen=True, kw_only=True):
    """What a step did: an output per chunk and per row of its plan, in the plan's order.

    `duration_s` is the time the device worked on it, in seconds.
    """

    step_id: int
    prefill: tuple[SlotOutput, ...]
    decode: tuple[SlotOutput, ...]
    duration_s: float
    host_work: HostWork = HostWork()


class ExecutorLimits(Struct, frozen=True, kw_only=True):
    """What an executor has room for. KV holds `num_blocks` blocks of `block_size` tokens each."""

    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int


class Executor(Protocol):
    """Runs plans in the order of their launch. Every method is called on one thread, the engine's."""

    @property
    def limits(self) -> ExecutorLimits: ...

    def launch(self, plan: StepPlan) -> None:
        """Start a step and return at once, whether or not earlier steps have finished; only where a
        constrained slot drafts may it take until the tokens are drafted."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched step that was not collected yet and return its result."""

    def close(self) -> None:
        """Release memory and handles; idempotent. Launched steps are abandoned."""
