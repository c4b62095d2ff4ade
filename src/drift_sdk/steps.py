"""The contract between scheduler and executor: plans of steps, and their results.

The scheduler uses no device, and the executor knows no queue.

A slot is a row of the executor's slot tables and holds one running sequence. A step may be launched before
the result of the previous one has been collected, so a plan names the slots that take part and the KV blocks
that they may write, but not the lengths of decoding sequences: lengths, newest tokens and finished flags are
kept in the executor's slot tables and are advanced by the steps themselves. Steps run in the order of their
launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from msgspec import Struct

from drift_sdk.errors import RequestError
from drift_sdk.processors import LogitsFunction
from drift_sdk.results import PromptStates, StateKind, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "BlockUpdate",
    "DecodeRow",
    "Executor",
    "EXPANDED_TILE",
    "ExecutorLimits",
    "HostWork",
    "MAX_CHUNKS",
    "PrefillChunk",
    "SlotAssignment",
    "SlotOutput",
    "SlotSampling",
    "StepPlan",
    "StepResult",
    "TakesWeights",
    "TokenConstraint",
    "VIOLATIONS",
    "Verification",
    "Violation",
    "scored_tokens",
]


MAX_CHUNKS = 32
"""Most prefill chunks of a step. Executors make room for so many, and what is made and not used takes time: a
row of the draft for every chunk, and in Triton a program of attention for every head of it."""

EXPANDED_TILE = 128
"""Keys for which latents are expanded at a time: a step expands a multiple of it for each sequence."""


Verification = Literal["whole", "partial", "refresh"]
"""The keys and values that a round reads: "whole", all of each sequence. With `PartialVerification` also
"partial", those of a view (see `ViewLayout`), after which the rows that were accepted are pending: their keys
and values follow from a part of the context; and "refresh", all of them, with the pending rows before those
of the round, which computes their keys and values again and chooses the blocks of views."""


class SlotSampling(Struct, frozen=True, kw_only=True):
    """The parameters of a request that the device needs: how its tokens are sampled, and when it ends.

    The token at a position is a function of the context, `seed` and the position alone. A slot is finished
    when its newest token is in `stop_token_ids` or its length has reached `max_length`; later rows of a
    finished slot emit nothing.

    temperature, top_k, top_p, min_p: as in SamplingParams.
    num_prompt_tokens:     the first tokens of the sequence, its prompt.
    max_length:            tokens of prompt and output together.
    min_length:            stop ids are not sampled while the sequence is shorter, in tokens as `max_length`.
    presence_penalty, frequency_penalty: apply to tokens of the output.
    repetition_penalty:    applies to tokens of prompt and output.
    logit_bias:            (token id, addend to its logit) pairs.
    allowed_token_ids:     the only ids that may be sampled; None = all.
    num_logprobs:          number of most likely tokens to report at each output position; None = no report.
    logprob_token_ids:     further ids whose log-probabilities are reported at each output position.
    num_prompt_logprobs:   number of most likely tokens to report at each prompt position.
    first_prompt_logprob:  the first prompt token that gets one, at least 1. Those before may be cached.
    prompt_states:         hidden states of the prompt to report; None = no report.
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
    logprob_token_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int | None = None
    first_prompt_logprob: int = 1
    prompt_states: StateKind | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty differs from its neutral value."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


class TokenConstraint(Protocol):
    """The tokens that a sequence may have next, computed by the host (a grammar).

    The scheduler plans a constrained sequence's next row when all its tokens are committed and the host has
    computed the mask, so an executor that calls `masks` while launching or running a step gets the masks for
    the sequence's current tokens. A row that is planned one token earlier has the mask itself.

    is_slow: whether a mask takes long to compute. Nothing is drafted then: the engine's thread computes the
             masks after drafted tokens, while all other sequences wait.
    """

    @property
    def is_slow(self) -> bool: ...

    def masks(self, draft_token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Allowed tokens after the committed tokens, and after each of the draft tokens in turn.

        Shape [len(draft_token_ids) + 1, ceil(vocab_size / 32)]. Bit i % 32 of word i // 32 is set if token i
        is allowed.
        """

    def mask_ahead(self) -> NDArray[np.int32] | None:
        """Allowed tokens after the next token [ceil(vocab_size / 32)], if they are the same after every token
        that may be next; None: they depend on it, or are not known at once. Not None only if the host moves
        on by the next token before it commits the one after it.
        """


def scored_tokens(chunk: PrefillChunk, sampling: SlotSampling) -> tuple[int, tuple[int, ...]]:
    """The prompt tokens whose log-probabilities follow from a chunk's rows: the row of the chunk that the
    first of them follows, and the tokens."""
    following = (*chunk.token_ids[1:], *([] if chunk.next_token_id is None else [chunk.next_token_id]))
    first = min(max(0, sampling.first_prompt_logprob - chunk.start - 1), len(following))
    return first, following[first:]


class SlotAssignment(Struct, frozen=True, kw_only=True):
    """A sequence is placed in a slot, whose row of the slot tables is initialised.

    functions:        change the logits before a token is sampled; for the eager executor alone.
    cached_token_ids: the tokens found in the prefix cache, which no chunk contains. Given only for sampling
                      with penalties, which count them, with functions, and to executors that want the history
                      (`SchedulerConfig.wants_history`); else empty.
    arrival:          number of requests that were submitted to the engine before the sequence's. It names the
                      sequence: it is the same when a preempted sequence is placed again.
    checkpoint:       place of the checkpoint that the slot's recurrent states are copied from. None: they are
                      empty, the sequence begins at position 0, or the model has no recurrent states.
    """

    slot: int
    sampling: SlotSampling
    constraint: TokenConstraint | None = None
    functions: tuple[LogitsFunction, ...] = ()
    cached_token_ids: tuple[int, ...] = ()
    arrival: int = 0
    checkpoint: int | None = None


class BlockUpdate(Struct, frozen=True, kw_only=True):
    """Sets the entries of a slot's block table from `first_index` on to `block_ids`."""

    slot: int
    first_index: int
    block_ids: tuple[int, ...]


class PrefillChunk(Struct, frozen=True, kw_only=True):
    """Prompt tokens at positions `start ... start + len(token_ids) - 1` of a slot.

    next_token_id: the token after them; None for the last chunk, after which a token is sampled.
    checkpoints:   ascending (position, place) pairs: the slot's recurrent states after the tokens before
                   `position` are copied to `place`. `start < position <= start + len(token_ids)`, and it is a
                   multiple of `SchedulerConfig.checkpoint_tokens`.
    num_expanded:  the first so many tokens attend to keys and values that are expanded from latents (see
                   `SchedulerConfig.max_expanded_tokens`).
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    next_token_id: int | None
    checkpoints: tuple[tuple[int, int], ...] = ()
    num_expanded: int = 0

    @property
    def is_last(self) -> bool:
        """Whether a token is sampled after this chunk."""
        return self.next_token_id is None


class DecodeRow(Struct, frozen=True, kw_only=True):
    """A slot that decodes. At most `num_draft_tokens` draft tokens are verified, and 1 to
    `max_emitted_tokens` tokens are emitted; none if the slot has finished.

    max_depth: most draft tokens on a path if they may form a tree; None: they are a chain.
    mask:      the constraint's mask [ceil(vocab_size / 32)] of a row that is launched before the token before
               it is known; None: `TokenConstraint.masks` has it when the step is launched.
    """

    slot: int
    num_draft_tokens: int
    max_depth: int | None = None
    mask: NDArray[np.int32] | None = None

    @property
    def max_emitted_tokens(self) -> int:
        """Most tokens that are emitted: those of a path, and the one that the target adds."""
        if self.max_depth is None or self.max_depth > self.num_draft_tokens:
            return self.num_draft_tokens + 1

        return self.max_depth + 1


class StepPlan(Struct, frozen=True, kw_only=True):
    """One step. Assignments are applied first, then the updates of block tables; then the prefill part runs,
    then the decode part. A slot has at most one chunk or one row, never both. There are at most MAX_CHUNKS
    chunks. A chunk may write a checkpoint to the place that an assignment of the same plan reads before.

    verification: of the decode part, see `Verification`.
    window_updates: of the second block table, that of layers with windows, if these have blocks of their own.
                    Its entries are at the same indices. Those behind the window may name any block, and are
                    not read.
    """

    step_id: int
    assignments: tuple[SlotAssignment, ...]
    block_updates: tuple[BlockUpdate, ...]
    prefill: tuple[PrefillChunk, ...]
    decode: tuple[DecodeRow, ...]
    verification: Verification = "whole"
    window_updates: tuple[BlockUpdate, ...] = ()


class Violation(Struct, frozen=True, kw_only=True):
    """A rule of speculation that a round has broken.

    reason:    a key of `VIOLATIONS`.
    details:   what was found.
    is_fatal:  the sequence's state cannot be trusted any more. Otherwise the drafts were dropped before they
               were used, and the tokens are right.
    """

    reason: str
    details: str
    is_fatal: bool


VIOLATIONS = {
    "draft_tokens": "more tokens were drafted than planned, or tokens outside the vocabulary",
    "draft_tree": "the structure of a drafted tree is wrong",
    "block_table": "a block table is too short, or names a block that does not exist or twice the same",
    "mask": "a row sees other keys than its prefix and its ancestors",
    "non_finite": "hidden states are not finite: a row has read keys or values of rejected tokens",
    "acceptance": "tokens were accepted that the target did not choose, or not accepted that it chose",
    "length": "a sequence's length does not follow from the tokens of the round",
    "kv": "keys or values of accepted tokens are not at their places",
}
"""Reasons of violations, and what they mean."""


# Objects made for every token, here and on the way to the stream, cannot be part of a reference cycle.
# gc=False keeps the garbage collector from traversing them.
class SlotOutput(Struct, frozen=True, kw_only=True, gc=False):
    """The tokens that a slot emitted in one step, in order.

    finish:           how the slot finished; None if it has not.
    logprobs:         an entry for each token; None if not requested.
    prompt_logprobs:  an entry for each prompt token from `first_prompt_logprob` on, with the first output
                      token alone; None if not requested.
    prompt_states:    hidden states of the prompt, with the first output token alone; None if not requested.
    num_drafted:      tokens that were drafted for the row.
    num_accepted:     how many of them, one after another, were accepted.
    accepted_nodes:   of a tree of drafts, the numbers of those that were accepted, the first draft being 1;
                      empty for a chain.
    is_ngram:         the drafts were n-grams in place of those of a draft model.
    error:            of one of the slot's functions: its sequence ends.
    violation:        what the checks of speculation found wrong; None if nothing was, or without checks.
    """

    token_ids: tuple[int, ...] = ()
    finish: Literal["stop", "length"] | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_states: PromptStates | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_nodes: tuple[int, ...] = ()
    is_ngram: bool = False
    violation: Violation | None = None
    error: RequestError | None = None


class HostWork(Struct, frozen=True, kw_only=True):
    """Counts of host work that delays the device, since the previous step was collected.

    num_waits:         waits for the end of a replay, because there was no room for the next one's input.
    num_split_rounds:  rounds split in two replays, to ask a constraint for the masks after the draft tokens.
    num_copies:        copies of results that were not collected in time.
    num_allocations:   allocations of device memory by torch; checked only from time to time.
    """

    num_waits: int = 0
    num_split_rounds: int = 0
    num_copies: int = 0
    num_allocations: int = 0


class StepResult(Struct, frozen=True, kw_only=True):
    """The result of a step: an output for each chunk and each row of its plan, in the plan's order.

    duration_s: seconds that the device worked on the step.
    idle_s:     seconds between the end of the step before it and its start.
    """

    step_id: int
    prefill: tuple[SlotOutput, ...]
    decode: tuple[SlotOutput, ...]
    duration_s: float
    idle_s: float = 0.0
    host_work: HostWork = HostWork()


class ExecutorLimits(Struct, frozen=True, kw_only=True):
    """The sizes that an executor is built for. Its KV cache has `num_blocks` blocks of `block_size` tokens.

    max_num_seqs:   number of slots.
    max_model_len:  longest sequence, in tokens of prompt and output.
    num_window_blocks: blocks of the layers with windows; 0: they share the blocks of the others.
    """

    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    num_window_blocks: int = 0


class Executor(Protocol):
    """Runs plans in the order of their launch. All methods are called on one thread, the engine's."""

    @property
    def limits(self) -> ExecutorLimits:
        """The sizes it was built for."""

    def launch(self, plan: StepPlan) -> None:
        """Start a step and return at once, whether or not earlier steps have finished. Only a plan with draft
        tokens for a constrained slot may block until the tokens are drafted."""

    @property
    def is_done(self) -> bool:
        """True if `collect` would not wait for the device: no step is launched, the oldest one has ended, or
        steps run when they are collected."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched step that has not been collected, and return its result."""

    def close(self) -> None:
        """Release memory and handles. Launched steps are abandoned. Idempotent."""


@runtime_checkable
class TakesWeights(Protocol):
    """An executor whose weights can be replaced while no step is in flight."""

    def update_weights(self, tensors: Mapping[str, Any]) -> None:
        """Replace weights by tensors of torch with the names of the model's files, in the memory that they
        have. Keys and values that were computed are those of the weights before. RequestError for a wrong
        tensor, before anything has changed."""
