"""Requests on the engine's side: from prompt to sequence, from tokens to text; the registry of live ones."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from drift_sdk.draft_policy import DraftCount
from drift_sdk.driver.callbacks import NO_EVENTS, EventSender
from drift_sdk.driver.loops import LoopPoster
from drift_sdk.driver.prompts import ModelText, Prompt, message_ends
from drift_sdk.driver.stream_updates import UpdateReceiver
from drift_sdk.errors import EngineClosed, ExecutorError, QueueFull, RequestError, error_repr
from drift_sdk.grammars import AnyGrammar, JsonSchema
from drift_sdk.processors import StopFunction, TokenBias, TokenMachine, functions_of, machines_of
from drift_sdk.results import Chunk, Completion, FinishReason, PromptStates, Timing, TokenLogprobs, Usage
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import SlotOutput, SlotSampling, Verification
from drift_sdk.text.answers.reader import Split, StopMatcher

if TYPE_CHECKING:  # their libraries would make up most of the package's import time
    from drift_sdk.text.answers.formats import AnswerSplitter
    from drift_sdk.text.grammar import GrammarConstraint
    from drift_sdk.text.limits import Limits


def check_text_params(params: SamplingParams, grammar: AnyGrammar | None, model: ModelText) -> None:
    """Raise RequestError for what needs texts of tokens that the model does not have."""
    if params.stop and not model.tokenizer.has_text:
        raise RequestError.of("stop", params.stop, "stop_token_ids: the model has no tokenizer")

    if grammar is not None and not model.tokenizer.has_token_bytes:
        lack = (
            "the text of a token depends on its neighbours"
            if model.tokenizer.has_text
            else "the model has no tokenizer"
        )
        raise RequestError.of("grammar", grammar, f"None: {lack}")


def slot_sampling(
    params: SamplingParams,
    model: ModelText,
    *,
    seed: int,
    num_prompt_tokens: int,
    first_scored: int = 1,
    eos_token_ids: tuple[int, ...],
) -> SlotSampling:
    """The parameters in the executor's terms: lengths count the prompt.

    first_scored:  of the prompt, see `PreparedPrompt`.
    eos_token_ids: end the text, in addition to the request's own stop ids.

    Raises RequestError naming the first token id that is outside the vocabulary.
    """
    for field in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        _check_vocabulary(field, getattr(params, field) or (), model.vocab_size)
    for index, processor in enumerate(params.logits_processors):
        if isinstance(processor, TokenMachine | TokenBias):
            _check_vocabulary(f"logits_processors[{index}]", processor.token_ids, model.vocab_size)

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
        logit_bias=tuple(bias_of(params).items()),
        allowed_token_ids=params.allowed_token_ids,
        num_logprobs=params.logprobs,
        logprob_token_ids=params.logprob_token_ids,
        num_prompt_logprobs=params.prompt_logprobs,
        first_prompt_logprob=first_scored,
        prompt_states=params.prompt_states,
    )


def bias_of(params: SamplingParams) -> Mapping[int, float]:
    """The addends of `logit_bias` and of the processors together."""
    tables = [each.biases for each in params.logits_processors if isinstance(each, TokenBias)]
    if not tables:
        return params.logit_bias

    found = dict(params.logit_bias)
    for table in tables:
        for token_id, addend in table.items():
            found[token_id] = found.get(token_id, 0.0) + addend
    return found


def _check_vocabulary(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    found = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
    if found is not None:
        raise RequestError.of(field, found, f"token ids of the model, from 0 to {vocab_size - 1}")


log: logging.Logger = logging.getLogger("drift_sdk")


class Request:
    """One request. `prepare` runs on a text thread, `advance` there or on the engine's thread, all else on
    the engine's thread.

    request_id:     its name in logs and in the completion.
    group_id:       the name of all samples of its prompt together; None if it is the only one.
    arrival:        number of requests that were submitted to the engine before it.
    prompt, params: as the caller gave them; params may be the model's defaults.
    seed:           of its sampling: that of params, or drawn.
    stream_updates: what receives its updates.
    """

    __slots__ = (
        "_answer",
        "_arrival",
        "_completion_ids",
        "_weights_versions",
        "_constraint",
        "_detokenizer",
        "_drafts",
        "_finish_reason",
        "_first_token_at",
        "_limits",
        "_logprobs",
        "_matcher",
        "_num_chars",
        "_prompt",
        "_prompt_logprobs",
        "_prompt_states",
        "_stop_reason",
        "_seen_ids",
        "_seen_text",
        "_splitter",
        "_text",
        "_token_starts",
        "_token_texts",
        "followers",
        "group_id",
        "is_done",
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
        stream_updates: UpdateReceiver,
    ) -> None:
        self.request_id: str = request_id
        self.group_id: str | None = group_id
        self.followers: tuple[Request, ...] = ()  # held until its prompt is in the prefix cache
        self.params: SamplingParams = params
        self.seed: int = seed
        self.stream_updates: UpdateReceiver = stream_updates
        self.sequence: Sequence | None = None
        self.submitted_at: float = time.monotonic()
        self.last_chunk_at: float | None = None  # set by StatsRecorder; time.monotonic()
        self.is_done: bool = False
        self.text_field: str = prompt.field  # the argument that a text thread is working on
        self._arrival = arrival
        self._prompt = prompt
        self._constraint: GrammarConstraint | None = None
        self._limits: Limits | None = (
            None  # the constraint of the sequence: the grammar's, a budget's or both
        )
        self._first_token_at: float | None = None
        self._text: list[str] = []  # before it is split
        self._splitter: AnswerSplitter | None = None  # of the answer to a conversation
        self._answer: list[Split] = []  # what it has found
        self._token_starts = array("L")  # with a splitter: where in the text each token begins
        self._num_chars = 0
        self._seen_ids: list[int] = []  # what `stop_when` has been shown, and may have changed
        self._seen_text = ""
        self._completion_ids: list[int] = []
        self._weights_versions: tuple[int, int] | None = None
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._prompt_states: PromptStates | None = None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._drafts: DraftCount | None = None

    def prepare(self, model: ModelText) -> None:
        """Tokenise the prompt, compile the grammar and make the sequence. RequestError if prompt or
        parameters do not fit the model."""
        from drift_sdk.text.limits import limits_of

        params = self.params
        grammar: AnyGrammar | None = params.grammar
        shown_ids = frozenset[int]()
        prompt = self._prompt.prepare(model)
        answer = prompt.new_answer(params.grammar) if prompt.new_answer is not None else None
        if answer is not None:
            self._splitter, shown_ids, grammar = answer.splitter, answer.marker_ids, answer.grammar
        check_text_params(params, grammar, model)
        self._compile_grammar(grammar, model)
        self._limits = limits_of(params, answer, self._constraint, model.tokenizer, model.vocab_size)
        # The grammar decides where the text may end; the end-of-sequence ids must then stay possible.
        has_eos = not params.ignore_eos or self._constraint is not None
        eos_token_ids = model.eos_token_ids if has_eos else ()
        # A grammar describes the text with the first space of the first token.
        is_continuation = prompt.is_continued or self._constraint is not None
        self._detokenizer = model.tokenizer.detokenizer(shown_ids, is_continuation=is_continuation)
        self._token_texts = model.tokenizer.token_texts
        assert isinstance(params.stop, tuple)
        self._matcher = StopMatcher(params.stop, params.include_stop) if params.stop else None
        self._drafts = DraftCount() if model.has_drafts else None
        self.sequence = Sequence(
            request_id=self.request_id,
            prompt_ids=prompt.token_ids,
            priority=params.priority,
            arrival=self._arrival,
            constraint=self._limits,
            functions=functions_of(params.logits_processors),
            max_draft_tokens=params.num_draft_tokens,
            cache_salt=params.cache_salt,
            borders=message_ends(prompt.token_ids, model.eos_token_ids) if model.has_states else (),
            sampling=slot_sampling(
                params,
                model,
                seed=self.seed,
                num_prompt_tokens=len(prompt.token_ids),
                first_scored=prompt.first_scored,
                eos_token_ids=eos_token_ids,
            ),
        )

    def _compile_grammar(self, grammar: AnyGrammar | None, model: ModelText) -> None:
        if grammar is None:
            return

        self.text_field = "grammar"
        own = self.params.grammar
        try:
            self._constraint = self._constrained_by(grammar, model)
        except RequestError as error:
            if grammar is own:
                raise

            if own is not None:
                self._constrained_by(own, model)  # raises its error, if it is the one that does not compile
            allowed = "tools whose parameters are schemas that a grammar can follow"
            message = f"tool_choice: no grammar describes the calls: {error}: expected {allowed}"
            raise RequestError(message, field="tool_choice", allowed=allowed) from error

    def _constrained_by(self, grammar: AnyGrammar, model: ModelText) -> GrammarConstraint:
        from drift_sdk.text.grammar import constrain  # imported here: llguidance may not be installed

        return constrain(
            grammar,
            model.tokenizer,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            ignore_eos=self.params.ignore_eos,
        )

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """Advance the constraint by newly generated tokens. RequestError if they are not allowed. One call at
        a time."""
        assert self._limits is not None
        self._limits.advance(token_ids)

    @property
    def has_slow_mask(self) -> bool:
        """Whether the newest mask took long."""
        assert self._limits is not None
        return self._limits.is_slow

    @property
    def can_advance_at_once(self) -> bool:
        """Whether `advance` takes so little time that the engine's thread may call it."""
        assert self._limits is not None
        return self._limits.can_advance_at_once

    @property
    def has_drafts(self) -> bool:
        """Whether the engine speculates; False before `prepare`."""
        return self._drafts is not None

    def extend(self, output: SlotOutput, verification: Verification = "whole") -> Chunk:
        """Turn newly generated tokens into a chunk. The chunk's finish reason tells whether they end the
        request. verification: of the round that generated them."""
        if self._drafts is not None:
            self._drafts.add(
                output.num_drafted,
                output.num_accepted,
                is_ngram=output.is_ngram,
                verification=verification,
            )
        token_ids, logprobs = output.token_ids, output.logprobs
        finish: FinishReason | None = output.finish
        if self._first_token_at is None and token_ids:
            self._first_token_at = time.monotonic()
        if output.prompt_logprobs is not None:
            assert self.sequence is not None
            unscored = (None,) * self.sequence.sampling.first_prompt_logprob
            self._prompt_logprobs = (*unscored, *with_texts(output.prompt_logprobs, self._token_texts))
        if output.prompt_states is not None:
            self._prompt_states = output.prompt_states

        shown_ids = token_ids
        if finish == "stop":
            self._stop_reason = token_ids[-1]
            # The text is cut before a stop token, as before a stop string.
            if not self.params.include_stop:
                shown_ids = token_ids[:-1]

        if self._matcher is None and self.params.stop_when is None:
            text = self._text_of(shown_ids)
        else:
            text, num_used, stop = self._match_stops(shown_ids)
            if stop is not None:
                token_ids, finish = token_ids[:num_used], "stop"
                self._stop_reason = stop
                logprobs = logprobs[:num_used] if logprobs is not None else None

        if finish is not None and not isinstance(self._stop_reason, str):
            tail, stop = self._remaining_text(len(self._completion_ids) + len(shown_ids))
            text += tail
            if stop is not None:
                token_ids, finish = shown_ids, "stop"
                self._stop_reason = stop
                logprobs = logprobs[: len(shown_ids)] if logprobs is not None else None

        if finish is not None and token_ids and machines_of(self.params.logits_processors):
            self._check_last(token_ids)
        return self._record(text, token_ids, logprobs, finish)

    def _check_last(self, token_ids: tuple[int, ...]) -> None:
        """RequestError if token machines do not allow the tokens that end the text: `advance` gets the others
        alone."""
        from drift_sdk.text.limits import check_last

        assert self._limits is not None
        check_last(self._limits, token_ids)

    def end(self, finish: FinishReason) -> Chunk:
        """End the request without a further token; returns its last chunk."""
        text, _ = self._remaining_text(len(self._completion_ids)) if self.sequence is not None else ("", None)
        return self._record(text, (), None, finish)

    def note_weights(self, version: int) -> None:
        """The weights by which the next tokens were computed."""
        self._weights_versions = (
            version if not self._weights_versions else self._weights_versions[0],
            version,
        )

    def completion(self) -> Completion:
        """The completion of a request that has ended."""
        assert self._finish_reason is not None
        now = time.monotonic()
        sequence = self.sequence
        started_at = sequence.started_at if sequence is not None else None
        first_token_at = self._first_token_at
        raw_text = "".join(self._text)
        text = "".join(part.text for part in self._answer) if self._splitter is not None else raw_text
        tool_calls = tuple(call for part in self._answer for call in part.tool_calls)
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
                reasoning_tokens=self._num_reasoning_tokens(),
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
            prompt_states=self._prompt_states,
            tool_calls=tool_calls,
            reasoning="".join(part.reasoning for part in self._answer),
            raw_text=raw_text,
            schema=self._satisfied_schema() if text or not tool_calls else None,
            weights_versions=self._weights_versions or (0, 0),
        )

    def _satisfied_schema(self) -> JsonSchema | None:
        """The request's schema if the text is complete, that is, if the grammar's end-of-sequence id ended
        it: a stop string or another stop id cuts the text short."""
        grammar, constraint = self.params.grammar, self._constraint
        is_complete = constraint is not None and self._stop_reason in constraint.eos_token_ids
        return grammar if is_complete and isinstance(grammar, JsonSchema) else None

    def _match_stops(self, token_ids: tuple[int, ...]) -> tuple[str, int, str | None]:
        """(text, number of tokens used, the stop string that ended the text, "stop_when" or None). Tokens are
        matched one by one, so that those emitted in the same step behind a stop string are left out."""
        matcher, stop_when = self._matcher, self.params.stop_when
        texts: list[str] = []
        num_unmatched = self.params.min_tokens - len(self._completion_ids)
        for index, token_id in enumerate(token_ids):
            text, stop = self._text_of((token_id,)), None
            if index >= num_unmatched and matcher is not None:
                text, stop = matcher.push(text)
            texts.append(text)
            if stop_when is not None and stop is None:
                self._seen_ids.append(token_id)
                self._seen_text += text
                if index + 1 >= num_unmatched and self._should_stop(stop_when):
                    return "".join(texts), index + 1, "stop_when"

            if stop is not None:
                return "".join(texts), index + 1, stop

        return "".join(texts), len(token_ids), None

    def _should_stop(self, stop_when: StopFunction) -> bool:
        """The answer of the request's function. RequestError if it fails."""
        try:
            return bool(stop_when(self._seen_ids, self._seen_text))
        except BaseException as error:  # also SystemExit, which would end the engine's thread
            raise RequestError(f"stop_when: {error_repr(error)}", field="stop_when") from error

    def _text_of(self, token_ids: tuple[int, ...]) -> str:
        """The text that the next tokens complete."""
        if self._splitter is None:
            return self._detokenizer.push(token_ids)

        texts: list[str] = []
        for token_id in token_ids:
            has_part = self._detokenizer.is_incomplete
            text = self._detokenizer.push((token_id,))
            # A character before the token that it does not complete becomes U+FFFD.
            self._token_starts.append(self._num_chars + (has_part and text.startswith("\ufffd")))
            self._num_chars += len(text)
            texts.append(text)
        return "".join(texts)

    def _num_reasoning_tokens(self) -> int:
        starts = self._token_starts
        spans = self._splitter.reasoning_spans if self._splitter is not None else ()
        return sum(bisect_left(starts, end) - bisect_left(starts, start) for start, end in spans)

    def _remaining_text(self, num_tokens: int) -> tuple[str, str | None]:
        """(text that detokeniser and stop matcher still hold back after `num_tokens` tokens, the stop string
        that it completes or None)."""
        tail = self._detokenizer.flush()
        if self._matcher is None or num_tokens <= self.params.min_tokens:
            return tail, None

        text, stop = self._matcher.push(tail)
        return (text, stop) if stop is not None else (text + self._matcher.flush(), None)

    def _record(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish: FinishReason | None,
    ) -> Chunk:
        """Add a chunk to the completion; returns the chunk. text: before it is split."""
        self._text.append(text)
        self._completion_ids.extend(token_ids)
        if self.params.logprobs is not None:
            logprobs = with_texts(logprobs, self._token_texts) if logprobs else ()
            self._logprobs.extend(logprobs)

        self._finish_reason = finish
        if finish == "length" and len(self._completion_ids) != self.params.max_tokens:
            self._stop_reason = "context"
        self.is_done = finish is not None
        logprobs = logprobs if self.params.logprobs is not None else None
        if self._splitter is None:
            return Chunk(text=text, token_ids=token_ids, logprobs=logprobs, finish_reason=finish)

        part = self._split(self._splitter, text)
        return Chunk(
            text=part.text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish,
            reasoning=part.reasoning,
            tool_calls=part.tool_calls,
        )

    def _split(self, splitter: AnswerSplitter, text: str) -> Split:
        """The parts that new text brings; at the end of the request with those that were held back."""
        part = splitter.push(text)
        if self.is_done:
            part += splitter.flush(is_cut=self._finish_reason != "stop")
            if splitter.failure is not None and (self._finish_reason == "stop" or not splitter.is_unfinished):
                log.warning("%s: a tool call stays in the text: %s", self.request_id, splitter.failure)
        self._answer.append(part)
        return part


def with_texts(entries: Iterable[TokenLogprobs], texts: Mapping[int, str]) -> tuple[TokenLogprobs, ...]:
    """The entries of an executor with the texts of their tokens, looked up in a table."""
    text_of = texts.__getitem__
    return tuple(
        [
            TokenLogprobs(
                token_id=entry.token_id,
                logprob=entry.logprob,
                top=entry.top,
                text=text_of(entry.token_id),
                top_texts=tuple([text_of(token_id) for token_id, _ in entry.top]),
                given=entry.given,
            )
            for entry in entries
        ]
    )


class RequestRegistry:
    """Live requests, from the call that submits them to their end. Used from any thread.

    A request is live once `admit` has returned. Every live request has a slot or waits for one, so that the
    queue is full if there are more than slots and `max_queued_requests`. A request that is being cancelled
    does not count: it leaves its place when the engine's thread has ended the step that runs.

    max_queued_requests: most requests that wait for a slot; None = unbounded.
    """

    def __init__(self, max_queued_requests: int | None, events: EventSender = NO_EVENTS) -> None:
        self._events = events
        self._max_queued_requests = max_queued_requests
        # Reentrant: the garbage collector may run within a locked section, and an engine's finaliser in it.
        self._lock = threading.RLock()
        self._live: dict[Request, None] = {}
        self._by_id: dict[str, list[Request]] = {}  # live requests by request_id and by group_id
        self._leaving: set[Request] = set()  # live ones that are being cancelled
        self._num_slots = 0
        self.num_admitted: int = 0
        self.num_rejected: int = 0
        self.is_open: bool = False
        self._is_closed = False
        self._failure: BaseException | None = None

    def open(self, num_slots: int) -> None:
        """Admit requests from now on, unless `close` has been called before. num_slots: most that run."""
        with self._lock:
            self._num_slots = num_slots
            self.is_open = not self._is_closed

    def close(self, failure: BaseException | None = None) -> None:
        """Reject new requests, with an ExecutorError that names `failure` if there is one, else
        EngineClosed."""
        with self._lock:
            self.is_open, self._is_closed = False, True
            self._failure = failure or self._failure

    def admit(self, requests: Items[Request]) -> None:
        """Make all of these requests live, or none: EngineClosed or ExecutorError if the registry is not
        open, RequestError if a live request has one of their ids or there are more than an idle engine
        takes, QueueFull."""
        ids = {name for request in requests for name in names_of(request)}
        with self._lock:
            if not self.is_open:
                raise self.rejection()

            taken = next((name for name in ids if name in self._by_id), None)
            if taken is not None:
                raise RequestError.of("request_id", taken, "an id that no live request has")

            most = self._most_at_once
            if most is not None and len(requests) > most:
                allowed = f"1 to {most}, all that may run and wait (max_num_seqs, max_queued_requests)"
                raise RequestError.of("n", len(requests), allowed)

            if not self.has_room(len(requests)):
                self.num_rejected += len(requests)
                error = self._queue_full(len(requests))
                for request in requests:
                    self._events.rejected(request.request_id, error)
                raise error

            self.num_admitted += len(requests)
            for request in requests:
                self._live[request] = None
                self._events.queued(request.request_id)
                for name in names_of(request):
                    self._by_id.setdefault(name, []).append(request)

    def rejection(self) -> EngineClosed | ExecutorError:
        """The error for a request that is submitted while the registry is not open."""
        if self._failure is not None:
            return failure_of(self._failure)

        return EngineClosed("the engine was closed" if self._is_closed else "the engine is still starting")

    def has_room(self, num_requests: int = 1) -> bool:
        """Whether the queue has room for `num_requests` more requests."""
        limit = self._max_queued_requests
        return limit is None or self._num_queued + num_requests <= limit

    def withdraw(self, requests: Items[Request]) -> None:
        """Undo `admit`."""
        with self._lock:
            self.num_admitted -= len(requests)
            for request in requests:
                self.remove(request)

    def leave(self, request: Request) -> None:
        """Called when a request is being cancelled."""
        with self._lock:
            if request in self._live:
                self._leaving.add(request)

    def remove(self, request: Request) -> None:
        """Called when a request has ended."""
        with self._lock:
            if request not in self._live:
                return

            del self._live[request]
            self._leaving.discard(request)
            for name in names_of(request):
                self._by_id[name].remove(request)
                if not self._by_id[name]:
                    del self._by_id[name]

    def find(self, request_id: str) -> list[Request]:
        """Live requests of this id: one, or all samples of a group; empty if there is none."""
        with self._lock:
            return list(self._by_id.get(request_id, ()))

    def live_requests(self, loop_poster: LoopPoster | None = None) -> list[Request]:
        """Live requests of one event loop, or of all (None)."""
        with self._lock:
            if loop_poster is None:
                return list(self._live)

            loop = loop_poster.loop
            return [request for request in self._live if request.stream_updates.loop_poster.loop is loop]

    @property
    def is_empty(self) -> bool:
        return not self._live

    @property
    def _num_queued(self) -> int:
        """Requests that wait for a slot: negative while more slots are free than requests are coming."""
        return len(self._live) - len(self._leaving) - self._num_slots

    @property
    def _most_at_once(self) -> int | None:
        """Most requests that are admitted while there are no others; None: any number."""
        limit = self._max_queued_requests
        return None if limit is None else self._num_slots + limit

    def _queue_full(self, num_requests: int) -> QueueFull:
        limit, num_queued = self._max_queued_requests, self._num_queued
        if num_requests > 1:
            room = max(limit - num_queued, 0) if limit is not None else 0
            return QueueFull(
                f"max_queued_requests={limit}: there is room for {room} of {num_requests} requests; "
                "try again later"
            )

        waiting = "1 request is" if num_queued == 1 else f"{max(num_queued, 0)} requests are"
        return QueueFull(
            f"max_queued_requests={limit}: no slot is free and {waiting} waiting for one already; try again "
            "later"
        )


def names_of(request: Request) -> tuple[str, ...]:
    """The ids that a request can be found by."""
    return (request.request_id,) if request.group_id is None else (request.request_id, request.group_id)


def failure_of(cause: BaseException) -> ExecutorError:
    """A new error, for one caller, that says the engine failed because of `cause`."""
    is_unusable = isinstance(cause, ExecutorError) and cause.process_unusable
    error = ExecutorError(f"the engine failed: {error_repr(cause)}", process_unusable=is_unusable)
    error.__cause__ = cause
    return error
