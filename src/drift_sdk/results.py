"""Results of requests: chunks while a request runs, a completion at its end."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Literal

from msgspec import Struct

from drift_sdk._display import html_table, struct_repr
from drift_sdk.errors import short_repr
from drift_sdk.grammars import JsonSchema, ParsedT_co

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "Chunk",
    "Completion",
    "Decision",
    "Embedding",
    "FinishReason",
    "PromptStates",
    "SpeculationStats",
    "StateKind",
    "Timing",
    "TokenLogprobs",
    "ToolCall",
    "Usage",
]

FinishReason = Literal["stop", "length", "cancelled"]
StateKind = Literal["last", "mean", "all"]
"""Hidden states of a prompt: of its last token, the mean of all tokens, or those of all tokens."""


class TokenLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities at one position, of the model's own distribution: log-softmax of the raw logits in
    fp32, before penalties, temperature and filters.

    token_id:  the token at this position.
    logprob:   its log-probability.
    top:       (token id, log-probability) of the most likely tokens, as many as `logprobs` asks for, most
               likely first; the token at this position is not necessarily among them.
    text:      text of the token by itself. Bytes that are no whole character become U+FFFD:
               `engine.tokenizer.token_bytes` has them. Special tokens are spelled out.
    top_texts: texts of the tokens of `top`, in the same order.
    given:     (token id, log-probability) of the request's `logprob_token_ids`, in their order; empty for
               tokens of the prompt.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: str = ""
    top_texts: tuple[str, ...] = ()
    given: tuple[tuple[int, float], ...] = ()


class PromptStates(Struct, frozen=True, kw_only=True):
    """Hidden states of a prompt, after the last layer and the final norm.

    num_rows: 1, or the number of the prompt's tokens with `prompt_states="all"`.
    size:     numbers in a row, the model's hidden size.
    data:     the rows, one after the other, as float32 in the machine's order of bytes.
    """

    num_rows: int
    size: int
    data: bytes

    def numpy(self) -> NDArray[np.float32]:
        """The states as an array [num_rows, size], which cannot be written to."""
        import numpy as np

        return np.frombuffer(self.data, dtype=np.float32).reshape(self.num_rows, self.size)

    def __repr__(self) -> str:
        return f"PromptStates(num_rows={self.num_rows}, size={self.size})"


class Decision(Struct, frozen=True, kw_only=True):
    """The probabilities of given answers to a prompt.

    choices:       the answers, texts or token ids, as they were given.
    logprobs:      of each answer, the sum of the log-probabilities of its tokens after the prompt.
    probabilities: the softmax of these sums: they add up to 1 over the given answers.
    num_tokens:    tokens of the prompt, without an answer.
    """

    choices: tuple[str | tuple[int, ...], ...]
    logprobs: tuple[float, ...]
    probabilities: tuple[float, ...]
    num_tokens: int

    @property
    def best(self) -> int:
        """The index of the most likely answer, the first of equal ones."""
        return self.logprobs.index(max(self.logprobs))

    @property
    def choice(self) -> str | tuple[int, ...]:
        """The most likely answer."""
        return self.choices[self.best]


class Embedding(Struct, frozen=True, kw_only=True):
    """The embedding of a text.

    states:        what `embed` has made of the prompt's hidden states: one row, or with pooling "all" a row
                   for each token.
    num_tokens:    tokens of the prompt.
    cached_tokens: of them, those that were found in the prefix cache.
    """

    states: PromptStates
    num_tokens: int
    cached_tokens: int = 0

    @property
    def vector(self) -> NDArray[np.float32]:
        """The first row, [size]: the embedding, unless pooling is "all"."""
        row: NDArray[np.float32] = self.states.numpy()[0]
        return row


class Chunk(Struct, frozen=True, kw_only=True, gc=False):
    """New tokens of a stream. Tokens that have not been read are joined into the next chunk.

    text:          text of the tokens, of `chat` without reasoning and tool calls. A character comes
                   whole, so the text may be empty, and it lags behind token_ids while a stop string or a
                   marker of the model's format could still begin in it. If the last token is only a part
                   of a character, the text ends with U+FFFD. The texts of all chunks, joined,
                   equal `Completion.text`.
    token_ids:     the tokens; empty in a last chunk that brings none.
    logprobs:      an entry for each token if the request asks for them, else None.
    finish_reason: None on every chunk but the last.
    reasoning:     reasoning of the tokens; joined over all chunks it equals `Completion.reasoning`.
    tool_calls:    calls that close with these tokens, whole.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class Usage(Struct, frozen=True, kw_only=True):
    """Numbers of tokens.

    prompt_tokens:     tokens of the prompt.
    cached_tokens:     of them, those whose KV was found in the prefix cache.
    completion_tokens: tokens generated.
    reasoning_tokens:  of them, those that begin inside the reasoning of an answer, without its markers; 0 for
                       `generate`.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


class Timing(Struct, frozen=True, kw_only=True):
    """Times of a request, in seconds.

    queued_s:      from the call to the first slot.
    prefill_s:     from the first slot to the first token.
    first_token_s: from the call to the first token.
    decode_s:      from the first token to the end.

    Of a request that ended before it had a slot or a token, the end stands for these.
    """

    queued_s: float
    prefill_s: float
    first_token_s: float
    decode_s: float


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call in an answer.

    name:      of the tool; not necessarily one that `chat` was given.
    arguments: as the model wrote them: they are not checked against the tool's schema.
    id:        names the call in the tool's answer (`tool_call_id`): the model's own id if it writes ids, else
               nine random letters and digits.
    index:     its place among the calls of the answer, from 0.
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""
    index: int = 0


class SpeculationStats(Struct, frozen=True, kw_only=True):
    """Counts of speculation, for a request or an engine.

    num_rounds:   rounds in which tokens were drafted.
    num_drafted:  tokens drafted.
    num_accepted: of them, those accepted because the model chose the same token.
    accepted_at:  at index i, rounds in which draft i and all drafts before it were accepted. Of a tree of
                  drafts, those on one path count.

    num_ngram_rounds, num_ngram_drafted, num_ngram_accepted: of these, those in which `Speculation.ngrams`
    took the place of the draft's tokens; 0 with `draft=NGram()`.

    num_partial_rounds, num_refresh_rounds: rounds, also of no drafts, that verified over a part of the KV
    cache, and those that refreshed it; see `PartialVerification`. If there are any, tokens may differ from
    those without it.
    """

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    num_ngram_rounds: int = 0
    num_ngram_drafted: int = 0
    num_ngram_accepted: int = 0
    num_partial_rounds: int = 0
    num_refresh_rounds: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round, the model's own token included; 0 without rounds."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    @property
    def rates(self) -> tuple[float, ...]:
        """At index i, share of rounds in which draft i and all drafts before it were accepted; 0 without
        rounds."""
        return tuple(count / self.num_rounds if self.num_rounds else 0.0 for count in self.accepted_at)

    @property
    def multiple_rate(self) -> float:
        """Share of rounds in which two or more drafted tokens were accepted."""
        return self.rates[1] if len(self.accepted_at) > 1 else 0.0

    @property
    def num_rewound(self) -> int:
        """Drafted tokens that were not accepted, each a row of the KV cache to be rewound."""
        return self.num_drafted - self.num_accepted

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """At index i, rounds in which exactly i drafted tokens were accepted."""
        at_least = (self.num_rounds, *self.accepted_at, 0)
        return tuple(count - more for count, more in pairwise(at_least))


class Completion(Struct, Generic[ParsedT_co], frozen=True, kw_only=True, dict=True):
    """A request that has ended; for type checkers, a `Completion[City]` if `parsed` is a `City` or None.

    request_id:      name of the request, also in the log.
    text:            the text generated; of `chat`, the answer without reasoning and tool calls.
    token_ids:       all tokens generated, including those of a stop string that was cut from the text.
    finish_reason:   "stop" (end of sequence, stop token or stop string), "length" or "cancelled".
    stop_reason:     the stop string or the stop token's id that ended it, if finish_reason is "stop", or
                     "stop_when" if the request's function did;
                     "context" if finish_reason is "length" and the context was full before max_tokens.
    usage, timing:   numbers of tokens, and times.
    seed:            gives the same tokens again, with the same model and parameters.
    speculation:     None if the engine does not speculate.
    logprobs:        an entry for each generated token if the request asks for them, else None.
    prompt_logprobs: an entry for each token of the prompt, None for the first, if the request asks for them;
                     else None. Also None for a request cancelled before its first token.
    prompt_states:   hidden states of the prompt if the request asks for them, else None. Also None for a
                     request cancelled before its first token.
    tool_calls:      those found in the answer; empty if `chat` was given no tools.
    reasoning:       what the model thought before it answered, without its markers; empty if it did not, and
                     for `generate`.
    raw_text:        all text generated, before it was split; of `generate`, the same as `text`. The markers
                     of the model's formats are in it, even those that are special tokens.
    schema:          the request's `JsonSchema` if the text is complete; None if it was cut short, or if the
                     answer is tool calls.
    weights_versions: `EngineStats.weights_version` of the weights that computed the first token and the last
                     one; equal unless weights were replaced in between. (0, 0) without a token.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timing: Timing
    seed: int
    speculation: SpeculationStats | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    prompt_states: PromptStates | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    raw_text: str = ""
    schema: JsonSchema[ParsedT_co] | None = None
    weights_versions: tuple[int, int] = (0, 0)

    @cached_property
    def parsed(self) -> ParsedT_co | None:
        """The text as a value of the schema's type, or as a plain JSON value; None without a schema or
        without a complete text.

        A type that checks more than its schema says raises its own validation error, at the first use.
        """
        if self.schema is None:
            return None

        # A grammar describes all of the answer, also what looks like a tool call inside of it. But an answer
        # that consists of messages, as in Harmony, begins with a marker, with which no JSON does.
        is_whole = self.raw_text and not self.raw_text.startswith("<")
        return self.schema.decode(self.raw_text if is_whole else self.text)

    def __repr__(self) -> str:
        """The fields that differ from their defaults, each cut to 200 characters."""
        return struct_repr(self)

    def _repr_html_(self) -> str:
        """Finish reason, tokens, tokens a second and text, for notebooks."""
        usage, timing = self.usage, self.timing
        reason = "" if self.stop_reason is None else f" ({self.stop_reason!r})"
        cached = f" ({usage.cached_tokens:,} cached)" if usage.cached_tokens else ""
        rows = {
            "finish reason": f"{self.finish_reason}{reason}",
            "tokens": f"{usage.prompt_tokens:,}{cached} + {usage.completion_tokens:,}",
            "first token": f"{timing.first_token_s:.3f} s",
        }
        if usage.completion_tokens > 1 and timing.decode_s > 0:
            rows["tokens/s"] = f"{(usage.completion_tokens - 1) / timing.decode_s:,.1f}"
        if self.reasoning:
            rows["reasoning"] = short_repr(self.reasoning)
        for call in self.tool_calls:
            rows[f"tool call {call.index}"] = f"{call.name}({short_repr(call.arguments)})"
        return html_table(f"Completion {self.request_id}", rows, self.text)

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation, in the form that chat templates take: role, content,
        `reasoning_content` if there is reasoning, and `tool_calls` if there are calls, with their arguments
        as mappings. Append it to `messages` before the tools' answers and the next question."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message
