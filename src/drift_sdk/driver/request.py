"""A request on the engine's side: turns the prompt into a sequence, and tokens into text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from drift_sdk.draft_policy.count import DraftCount
from drift_sdk.driver.prompts import ModelText, Prompt
from drift_sdk.driver.stream_updates import StreamUpdates
from drift_sdk.errors import RequestError
from drift_sdk.grammars import JsonSchema
from drift_sdk.results import Chunk, Completion, FinishReason, Timing, TokenLogprobs, Usage
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import SlotOutput, SlotSampling
from drift_sdk.text.stops import StopMatcher
from drift_sdk.text.tools import find_tool_calls

if TYPE_CHECKING:  # their libraries would make up most of the package's import time
    from drift_sdk.text.grammar import GrammarConstraint

__all__ = ["ModelText", "Request", "slot_sampling"]


class Request:
    """One request. `prepare` and `advance` run on text threads, all else on the engine's thread.

    request_id:     its name in logs and in the completion.
    group_id:       the name of all samples of its prompt together; None if it is the only one.
    arrival:        number of requests that were submitted to the engine before it.
    prompt, params: as the caller gave them; params may be the model's defaults.
    seed:           of its sampling: that of params, or drawn.
    stream_updates: the reading end of its stream.
    tool_names:     names of the tools that the caller gave; None = tool calls are not looked for.
    """

    __slots__ = (
        "_arrival",
        "_completion_ids",
        "_constraint",
        "_detokenizer",
        "_drafts",
        "_finish_reason",
        "_first_token_at",
        "_logprobs",
        "_matcher",
        "_prompt",
        "_prompt_logprobs",
        "_stop_reason",
        "_text",
        "_token_texts",
        "_tool_names",
        "followers",
        "group_id",
        "is_done",
        "is_held",
        "last_chunk_at",
        "params",
        "request_id",
        "seed",
        "sequence",
        "stream_updates",
        "submitted_at",
        "text_field",
    )

    def __init__(
        self,
        *,
        request_id: str,
        group_id: str | None = None,
        arrival: int,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        stream_updates: StreamUpdates,
        tool_names: frozenset[str] | None = None,
    ) -> None:
        self.request_id = request_id
        self.group_id = group_id
        self.followers: tuple[Request, ...] = ()  # held until its prompt is in the prefix cache
        self.is_held = False
        self.params = params
        self.seed = seed
        self.stream_updates = stream_updates
        self.sequence: Sequence | None = None
        self.submitted_at = time.monotonic()
        self.last_chunk_at: float | None = None  # set by StatsRecorder; time.monotonic()
        self.is_done = False
        self.text_field = prompt.field  # the argument that a text thread is working on
        self._arrival = arrival
        self._prompt = prompt
        self._tool_names = tool_names
        self._constraint: GrammarConstraint | None = None
        self._first_token_at: float | None = None
        self._text: list[str] = []
        self._completion_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._drafts: DraftCount | None = None

    def prepare(self, model: ModelText) -> None:
        """Tokenise the prompt, compile the grammar and make the sequence. RequestError if prompt or
        parameters do not fit the model."""
        prompt_ids = self._prompt.token_ids(model)
        self._compile_grammar(model)
        params = self.params
        # The grammar decides where the text may end; the end-of-sequence ids must then stay possible.
        has_eos = not params.ignore_eos or self._constraint is not None
        eos_token_ids = model.eos_token_ids if has_eos else ()
        self._detokenizer = model.tokenizer.detokenizer()
        self._token_texts = model.tokenizer.token_texts
        assert isinstance(params.stop, tuple)
        self._matcher = StopMatcher(params.stop, params.include_stop) if params.stop else None
        self._drafts = DraftCount() if model.has_drafts else None
        self.sequence = Sequence(
            request_id=self.request_id,
            prompt_ids=prompt_ids,
            priority=params.priority,
            arrival=self._arrival,
            constraint=self._constraint,
            max_draft_tokens=params.num_draft_tokens,
            sampling=slot_sampling(
                params,
                model,
                seed=self.seed,
                num_prompt_tokens=len(prompt_ids),
                eos_token_ids=eos_token_ids,
            ),
        )

    def _compile_grammar(self, model: ModelText) -> None:
        if self.params.grammar is None:
            return

        self.text_field = "grammar"
        from drift_sdk.text.grammar import constrain  # imported here: llguidance may not be installed

        self._constraint = constrain(
            self.params.grammar,
            model.tokenizer,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            ignore_eos=self.params.ignore_eos,
        )

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """Advance the constraint by newly generated tokens. Runs on a text thread, one call at a time."""
        assert self._constraint is not None
        self._constraint.advance(token_ids)

    @property
    def has_drafts(self) -> bool:
        """Whether the engine speculates; False before `prepare`."""
        return self._drafts is not None

    def extend(self, output: SlotOutput) -> Chunk:
        """Turn newly generated tokens into a chunk. The chunk's finish reason tells whether they end the
        request."""
        if self._drafts is not None:
            self._drafts.add(output.num_drafted, output.num_accepted)
        token_ids, logprobs = output.token_ids, output.logprobs
        finish: FinishReason | None = output.finish
        if self._first_token_at is None and token_ids:
            self._first_token_at = time.monotonic()
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = (None, *with_texts(output.prompt_logprobs, self._token_texts))

        shown_ids = token_ids
        if finish == "stop":
            self._stop_reason = token_ids[-1]
            # The text is cut before a stop token, as before a stop string.
            if not self.params.include_stop:
                shown_ids = token_ids[:-1]

        if self._matcher is None:
            text = self._detokenizer.push(shown_ids)
        else:
            text, num_used, stop = self._match_stops(self._matcher, shown_ids)
            if stop is not None:
                token_ids, finish = token_ids[:num_used], "stop"
                self._stop_reason = stop
                logprobs = logprobs[:num_used] if logprobs is not None else None

        if finish is not None:
            text += self._remaining_text(is_stopped=isinstance(self._stop_reason, str))

        return self._record(text, token_ids, logprobs, finish)

    def end(self, finish: FinishReason) -> Chunk:
        """End the request without a further token; returns its last chunk."""
        text = self._remaining_text(is_stopped=False) if self.sequence is not None else ""
        return self._record(text, (), None, finish)

    def completion(self) -> Completion:
        """The completion of a request that has ended."""
        assert self._finish_reason is not None
        now = time.monotonic()
        sequence = self.sequence
        started_at = sequence.started_at if sequence is not None else None
        first_token_at = self._first_token_at
        text = "".join(self._text)
        names = self._tool_names
        return Completion(
            request_id=self.request_id,
            text=text,
            token_ids=tuple(self._completion_ids),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            usage=Usage(
                prompt_tokens=sequence.num_prompt_tokens if sequence is not None else 0,
                cached_tokens=sequence.num_cached_tokens if sequence is not None else 0,
                completion_tokens=len(self._completion_ids),
            ),
            timing=Timing(
                queued_s=(started_at or now) - self.submitted_at,
                prefill_s=(first_token_at or now) - (started_at or now),
                first_token_s=(first_token_at or now) - self.submitted_at,
                decode_s=now - (first_token_at or now),
            ),
            seed=self.seed,
            speculation=self._drafts.stats() if self._drafts is not None else None,
            logprobs=tuple(self._logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs,
            tool_calls=find_tool_calls(text, names) if names is not None else (),
            schema=self._satisfied_schema(),
        )

    def _satisfied_schema(self) -> JsonSchema | None:
        """The request's schema if the text is complete, that is, if the grammar's end-of-sequence id ended
        it: a stop string or another stop id cuts the text short."""
        grammar, constraint = self.params.grammar, self._constraint
        is_complete = constraint is not None and self._stop_reason in constraint.eos_token_ids
        return grammar if is_complete and isinstance(grammar, JsonSchema) else None

    def _match_stops(self, matcher: StopMatcher, token_ids: tuple[int, ...]) -> tuple[str, int, str | None]:
        """(text, number of tokens used, the stop string that ended the text or None). Tokens are matched one
        by one, so that those emitted in the same step behind a stop string are left out."""
        texts: list[str] = []
        num_unmatched = self.params.min_tokens - len(self._completion_ids)
        for index, token_id in enumerate(token_ids):
            text, stop = self._detokenizer.push((token_id,)), None
            if index >= num_unmatched:
                text, stop = matcher.push(text)
            texts.append(text)
            if stop is not None:
                return "".join(texts), index + 1, stop

        return "".join(texts), len(token_ids), None

    def _remaining_text(self, *, is_stopped: bool) -> str:
        """Text that detokeniser and stop matcher still hold back at the end; none behind a stop string."""
        if is_stopped:
            return ""

        tail = self._detokenizer.flush()
        if self._matcher is None:
            return tail

        text, stop = self._matcher.push(tail)
        return text if stop is not None else text + self._matcher.flush()

    def _record(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish: FinishReason | None,
    ) -> Chunk:
        """Add to the completion what a chunk brings; returns the chunk."""
        self._text.append(text)
        self._completion_ids.extend(token_ids)
        if self.params.logprobs is not None:
            logprobs = with_texts(logprobs, self._token_texts) if logprobs else ()
            self._logprobs.extend(logprobs)

        self._finish_reason = finish
        if finish == "length" and len(self._completion_ids) != self.params.max_tokens:
            self._stop_reason = "context"
        self.is_done = finish is not None
        return Chunk(
            text=text,
            token_ids=token_ids,
            logprobs=logprobs if self.params.logprobs is not None else None,
            finish_reason=finish,
        )


def with_texts(entries: Iterable[TokenLogprobs], texts: Mapping[int, str]) -> tuple[TokenLogprobs, ...]:
    """The entries of an executor with the texts of their tokens. About a microsecond for each, and one more
    for ten top tokens."""
    text_of = texts.__getitem__
    return tuple(
        [
            TokenLogprobs(
                token_id=entry.token_id,
                logprob=entry.logprob,
                top=entry.top,
                text=text_of(entry.token_id),
                top_texts=tuple([text_of(token_id) for token_id, _ in entry.top]),
            )
            for entry in entries
        ]
    )


def slot_sampling(
    params: SamplingParams,
    model: ModelText,
    *,
    seed: int,
    num_prompt_tokens: int,
    eos_token_ids: tuple[int, ...],
) -> SlotSampling:
    """The parameters in the executor's terms: lengths count the prompt.

    eos_token_ids: end the text, in addition to the request's own stop ids.

    Raises RequestError naming the first token id that is outside the vocabulary.
    """
    for field in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        _check_vocabulary(field, getattr(params, field) or (), model.vocab_size)

    max_length = model.max_model_len
    if params.max_tokens is not None:
        max_length = min(max_length, num_prompt_tokens + params.max_tokens)

    return SlotSampling(
        temperature=float(params.temperature),
        top_k=params.top_k,
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        seed=seed,
        stop_token_ids=tuple(sorted({*params.stop_token_ids, *eos_token_ids})),
        num_prompt_tokens=num_prompt_tokens,
        max_length=max_length,
        min_length=num_prompt_tokens + params.min_tokens if params.min_tokens else 0,
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        logit_bias=tuple(params.logit_bias.items()),
        allowed_token_ids=params.allowed_token_ids,
        num_logprobs=params.logprobs,
        num_prompt_logprobs=params.prompt_logprobs,
    )


def _check_vocabulary(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    found = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
    if found is not None:
        raise RequestError.of(field, found, f"token ids of the model, from 0 to {vocab_size - 1}")
