"""Serving: the methods of an engine that submit requests; and the ids, seeds and streams of these."""

from __future__ import annotations

import itertools
import logging
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, Unpack, cast, get_args, overload

from msgspec import Struct

from drift_sdk._fields import check_bool, check_choice, check_int, check_options, plain_scalar, with_config
from drift_sdk._plain_data import IdArray, reading
from drift_sdk.config import EngineConfig
from drift_sdk.conversation import Message, ToolSpec
from drift_sdk.driver.loops import LoopPoster
from drift_sdk.driver.prompts import (
    AnsweredPrompt,
    ChatPrompt,
    CutPrompt,
    ModelText,
    Prompt,
    TextPrompt,
    TokenPrompt,
    as_any_prompt,
    as_chat_prompt,
    as_prompt,
    check_forced_calls,
    in_place,
    length_of,
)
from drift_sdk.driver.stream_updates import Signal, StreamUpdates, UpdateReceiver
from drift_sdk.errors import DriftError, EngineClosed, ExecutorError, RequestError, RequestKeywordError
from drift_sdk.grammars import ParsedT
from drift_sdk.jobs import (
    Job,
    JobDone,
    JobFailed,
    JobMap,
    PromptLike,
    check_prompts,
    completions_of,
    results_of,
)
from drift_sdk.processors import functions_of
from drift_sdk.results import Completion, Decision, Embedding, PromptStates, StateKind
from drift_sdk.sampling_params import (
    MAX_LOGPROB_IDS,
    MAX_SEED,
    NOTHING,
    SamplingOptions,
    SamplingParams,
    beside_graphs,
    check_needs_no_host,
)
from drift_sdk.stream import Samples, TokenStream

MAX_ID_CHARS = 128
MAX_SUFFIX_CHARS = 4
"""Most characters that the name of a sample has more than that of its group, "-127"."""
OWN_ID = re.compile(r"req-\d+(-\d+)?", flags=re.ASCII)
"""Ids that the engine makes: "req-" and a number, and of samples a second number."""


class Submission(Struct, frozen=True, kw_only=True, eq=False):
    """A request as it is submitted: what the caller gave, with its id and seed.

    group_id:       the name of all samples of its prompt together; None if it is the only one.
    prompt, params: as the caller gave them; params may be the model's defaults.
    seed:           of its sampling: that of params, or drawn.
    stream_updates: what receives its updates.
    """

    request_id: str
    group_id: str | None = None
    prompt: Prompt
    params: SamplingParams
    seed: int
    stream_updates: UpdateReceiver


Submit: TypeAlias = Callable[[Sequence[Submission]], Sequence[Callable[[], None]]]
"""Submits requests of one prompt, all or none; returns the function that cancels each."""

SEEDS: random.Random = random.SystemRandom()
"""Source of the seeds of requests that name none."""


class Submitter:
    """Makes the submissions of one engine and their streams. May be used from any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def submit(
        self, submit: Submit, prompt: Prompt, params: SamplingParams, *, request_id: str | None
    ) -> TokenStream:
        """Submit a prompt. Raises what `submit` raises."""
        number, updates = next(self._numbers), StreamUpdates(LoopPoster.current())
        submission = Submission(
            request_id=request_id if request_id is not None else f"req-{number}",
            prompt=prompt,
            params=params,
            seed=self._seed(params),
            stream_updates=updates,
        )
        (cancel,) = submit([submission])
        return TokenStream(submission.request_id, updates, cancel)

    def submit_samples(
        self,
        submit: Submit,
        prompt: Prompt,
        params: SamplingParams,
        *,
        num_samples: int,
        request_id: str | None,
    ) -> Samples:
        """Submit a prompt several times, with the seeds `seed`, `seed + 1` and so on, modulo 2**63."""
        number = next(self._numbers)
        group_id = request_id if request_id is not None else f"req-{number}"
        first_seed, loop_poster, signal = self._seed(params), LoopPoster.current(), Signal()
        all_updates = [StreamUpdates(loop_poster, signal) for _ in range(num_samples)]
        submissions = [
            Submission(
                request_id=f"{group_id}-{index}",
                group_id=group_id,
                prompt=prompt,
                params=params,
                seed=(first_seed + index) % (MAX_SEED + 1),
                stream_updates=updates,
            )
            for index, updates in enumerate(all_updates)
        ]
        streams = [
            TokenStream(submission.request_id, updates, cancel)
            for submission, updates, cancel in zip(submissions, all_updates, submit(submissions), strict=True)
        ]
        return Samples(streams, signal)

    def _seed(self, params: SamplingParams) -> int:
        return params.seed if params.seed is not None else SEEDS.randint(0, MAX_SEED)


def check_request_id(request_id: object, *, is_new: bool) -> None:
    """RequestError for what is no id, and, if `is_new`, for ids that the engine makes itself: those of
    samples are longer."""
    most = MAX_ID_CHARS if is_new else MAX_ID_CHARS + MAX_SUFFIX_CHARS
    allowed = f"1 to {most} printable characters"
    is_id = isinstance(request_id, str) and 1 <= len(request_id) <= most and request_id.isprintable()
    if not is_id:
        raise RequestError.of("request_id", request_id, allowed)

    if is_new and isinstance(request_id, str) and OWN_ID.fullmatch(request_id):
        raise RequestError.of(
            "request_id", request_id, f'{allowed}, not one that the engine makes, like "req-1" or "req-1-0"'
        )


def embedding_of(completion: Completion, dimensions: int | None, *, normalize: bool, place: str) -> Embedding:
    """The embedding that `embed` makes of a prompt's hidden states. RequestError for more dimensions than
    there are, ExecutorError for numbers that are not finite. place: of the prompt in the arguments."""
    import numpy as np  # here, as `import drift_sdk` does without

    states = completion.prompt_states
    if states is None:
        raise DriftError(f"{completion.request_id} was cancelled before its prompt was computed")

    if dimensions is not None and dimensions > states.size:
        raise RequestError.of("dimensions", dimensions, f"1 to {states.size}, or None")

    if not np.isfinite(states.numpy()).all():
        raise not_finite(f"{place}: hidden states")

    rows = states.numpy()[:, :dimensions].astype(np.float64)
    if normalize:
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    data = rows.astype(np.float32).tobytes()
    return Embedding(
        states=PromptStates(num_rows=states.num_rows, size=rows.shape[1], data=data),
        num_tokens=completion.usage.prompt_tokens,
        cached_tokens=completion.usage.cached_tokens,
    )


def items_of(field: str, values: Sequence[Any], allowed: str, most: int | None = None) -> list[Any]:
    """The items of a sequence of the caller's. RequestError if they cannot be read, or are more than `most`
    (None = than it says)."""
    with reading(field, values, allowed):
        limit = length_of(values) if most is None else most
        found = list(islice(values, limit + 1))  # it may have no end
    if len(found) > limit:
        raise RequestError.of(field, values, allowed)

    return found


def as_item(prompt: str | Sequence[int] | IdArray, index: int, most: int | None) -> Prompt:
    """One of several prompts as a value. most: tokens that are kept; None = all."""
    if isinstance(prompt, Job):  # which has parameters of its own
        raise RequestError.of(f"prompts[{index}]", prompt, "a text or token ids")

    try:
        found = as_prompt(prompt)
    except RequestError as error:
        raise in_place(error, f"prompts[{index}]") from error

    return found if most is None else CutPrompt(cast("TextPrompt | TokenPrompt", found), most)


MAX_PROMPTS_AT_ONCE = 64
"""Of `embed` and of `decide`."""
MAX_CHOICES = 1000


def answers_of(choices: Sequence[str | Sequence[int]]) -> list[str | tuple[int, ...]]:
    """The answers of `decide` as values. RequestError for what is no sequence of texts or token ids."""
    allowed = f"1 to {MAX_CHOICES} texts or sequences of token ids, none of them empty"
    if isinstance(choices, str | bytes) or not isinstance(choices, Sequence):
        raise RequestError.of("choices", choices, allowed)

    given = items_of("choices", choices, allowed, MAX_CHOICES)
    if not given:
        raise RequestError.of("choices", choices, allowed)

    answers: list[str | tuple[int, ...]] = []
    wanted = "a text or a sequence of token ids, not empty"
    for index, choice in enumerate(given):
        try:
            answer = as_prompt(choice)
        except RequestError as error:
            raise RequestError.of(f"choices[{index}]", choice, wanted) from error

        value = answer.text if isinstance(answer, TextPrompt) else cast("TokenPrompt", answer).ids
        if not value:
            raise RequestError.of(f"choices[{index}]", choice, wanted)

        answers.append(value)
    return answers


MAX_SHORT_CHARS = 64
"""Most characters of an answer that is tokenised on the event loop, to find out if it has one token."""


def single_tokens(answers: Sequence[str | tuple[int, ...]], model: ModelText) -> list[int] | None:
    """The token of each answer; None unless all have one token of the model, and one request reports them."""
    found: list[int] = []
    for answer in answers:
        if isinstance(answer, str):
            if len(answer) > MAX_SHORT_CHARS:
                return None

            try:
                answer = tuple(model.tokenizer.encode(answer, add_special_tokens=False))
            except RequestError:  # with the field that it is about, when the answer is submitted
                return None

        if len(answer) != 1 or type(answer[0]) is not int or not 0 <= answer[0] < model.vocab_size:
            return None

        found += answer
    return found if len(set(found)) <= MAX_LOGPROB_IDS else None


def scored_tokens(completion: Completion, token_ids: Sequence[int]) -> list[float]:
    """The log-probabilities of tokens after the prompt of a request that reports them."""
    given = dict(completion.logprobs[0].given) if completion.logprobs else {}
    if not given.keys() >= set(token_ids):
        raise unscored(completion)

    return finite([given[token_id] for token_id in token_ids])


def scored_answer(completion: Completion) -> list[float]:
    """The log-probabilities of an answer's tokens, which the request's prompt ends with."""
    if completion.prompt_logprobs is None:
        raise unscored(completion)

    return finite([entry.logprob for entry in completion.prompt_logprobs if entry is not None])


def finite(logprobs: list[float]) -> list[float]:
    """The log-probabilities of tokens; ExecutorError if one is not finite."""
    if not all(map(math.isfinite, logprobs)):
        raise not_finite("choices: log-probabilities")

    return logprobs


def not_finite(what: str) -> ExecutorError:
    """The error for numbers that have overflowed."""
    expected = "EngineConfig.dtype in which the numbers of the model's layers are finite"
    return ExecutorError(f"{what} are not finite: expected an {expected}", ends_engine=False)


def unscored(completion: Completion) -> DriftError:
    if completion.finish_reason == "cancelled":
        return DriftError(f"{completion.request_id} was cancelled")

    return DriftError("decide: expected an engine that computes a model: a scripted one has no probabilities")


def decision_of(
    answers: Sequence[str | tuple[int, ...]], logprobs: Sequence[float], num_tokens: int
) -> Decision:
    """The decision between answers of which the log-probabilities are known."""
    most = max(logprobs)
    weights = [math.exp(logprob - most) for logprob in logprobs]
    return Decision(
        choices=tuple(answers),
        logprobs=tuple(logprobs),
        probabilities=tuple(weight / math.fsum(weights) for weight in weights),
        num_tokens=num_tokens,
    )


MAX_SAMPLES = 128

log: logging.Logger = logging.getLogger("drift_sdk")


class Serving(ABC):
    """The methods of an engine that submit requests. Where the requests go is what its classes differ in."""

    model: str | Path
    config: EngineConfig

    def __init__(self) -> None:
        self._submitter = Submitter()
        self._warnings: set[str] = set()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled: make one in each process")

    @abstractmethod
    def _enter(self, submissions: Sequence[Submission]) -> Sequence[Callable[[], None]]:
        """Submit requests of one prompt, all or none; returns the function that cancels each. QueueFull,
        EngineClosed, ExecutorError or RequestError if they are rejected."""

    @abstractmethod
    def _cancel(self, request_id: str) -> bool:
        """Cancel the live requests of this id; whether there are such."""

    @abstractmethod
    async def _count_tokens(self, prompt: Prompt) -> int:
        """The number of tokens of a prompt."""

    @property
    @abstractmethod
    def executor(self) -> str:
        """See `BaseEngine.executor`."""

    @property
    def _calls_functions(self) -> bool:
        """Whether functions of requests can be called: they cannot be sent to another process."""
        return True

    @property
    @abstractmethod
    def _has_room(self) -> bool:
        """False if a request would be rejected because the queue is full; EngineClosed."""

    @abstractmethod
    def _model_text(self) -> ModelText:
        """The tokenizer, which turns text into tokens and back; EngineClosed if the engine is not open."""

    @property
    def default_params(self) -> SamplingParams:
        """Parameters of a request that gives none: the model's own defaults, from its generation_config.
        EngineClosed if the engine is not open."""
        return self._model_text().default_params

    def generate(
        self,
        prompt: str | Sequence[int] | IdArray,
        params: SamplingParams[ParsedT] | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> TokenStream[ParsedT]:
        """Submit a prompt and return its stream at once. Must be called on an event loop, in a coroutine or
        in a callback: the stream belongs to the running event loop (RuntimeError if there is none).

        prompt:     a text, or token ids of the model, at least one: a sequence, or a one-dimensional array
                    of integers of numpy, torch or a library like them.
        params:     None = the model's own defaults, `default_params`.
        request_id: names the request in its completion, in the log and for `cancel`: 1 to 128 printable
                    characters, not those of another live request, nor "req-" and a number, the names
                    that the engine makes (None).
        options:    fields of SamplingParams, which replace those of `params`, or of the defaults.

        Raises RequestError for a wrong argument, QueueFull, EngineClosed, and ExecutorError if the engine
        has failed. What is known only after the prompt has been tokenised (PromptTooLong, a token id outside
        the vocabulary, no tokens) is raised by the stream."""
        return self._submit(as_prompt(prompt), self._params(params, options, Serving.generate), request_id)

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        params: SamplingParams[ParsedT] | None = None,
        tools: Sequence[ToolSpec | Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        *,
        tool_choice: str = "auto",
        continue_final: bool = False,
        request_id: str | None = None,
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> TokenStream[ParsedT]:
        """Submit a conversation, rendered with the model's chat template, and return its stream at once, as
        `generate` does. The answer comes in parts: text, reasoning and tool calls.

        messages:       mappings with at least a string "role" and "content"; the template decides about a
                        message without content. Content is a string, or a list of text parts
                        ({"type": "text", "text": ...}), which are joined to lines for a template that takes
                        no list. Arguments of calls are mappings, or JSON objects as text.
        tools:          descriptions of functions for the template. Tool calls are then looked for in the
                        answer. A warning is logged, once per engine, if the model's template ignores tools,
                        if it leaves the calls of earlier messages out, or if it writes calls in an unknown
                        format.
        template_args:  further variables of the template, by name.
        tool_choice:    "auto" (the model calls tools or not), "none" (the tools are left out), "required"
                        (the answer consists of calls, at least one) or the name of a tool (of one call of
                        it). The last two are a grammar: arguments follow the tools' schemas, reasoning may
                        come first, and the parameters can have no other grammar. With "auto" and a grammar
                        in the parameters, the answer consists of calls or is described by the grammar.
        continue_final: the answer continues the last message, which must be the assistant's and have text.
        params, request_id, options: as of `generate`.

        Messages, tools and template_args are copied at the call and must be plain data (mappings, sequences
        and scalars), each of at most 100,000 items over all levels, and 500 levels. Raises what `generate`
        raises. The stream raises RequestError if the model has no template or the template rejects the
        messages."""
        prompt = as_chat_prompt(
            messages, tools, template_args, tool_choice=tool_choice, continue_final=continue_final
        )
        return self._submit(prompt, self._params(params, options, Serving.chat), request_id)

    def samples(
        self,
        prompt: str | Sequence[int] | IdArray | Sequence[Message | Mapping[str, Any]],
        n: int,
        params: SamplingParams[ParsedT] | None = None,
        tools: Sequence[ToolSpec | Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        *,
        tool_choice: str = "auto",
        continue_final: bool = False,
        request_id: str | None = None,
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> Samples[ParsedT]:
        """Submit a prompt or a conversation `n` times, all or none, and return the streams at once.

        prompt:               as of `generate`, or messages as of `chat`.
        n:                    1 to 128.
        tools, template_args, tool_choice, continue_final: as of `chat`, with messages alone.
        request_id:           of all samples together; sample i is named by it, "-" and i.
        params, options:      as of `generate`.

        The seed of sample i is (seed + i) modulo 2**63, where `seed` is that of the parameters or drawn:
        `generate` with that seed, which is also in the completion, gives the same sample. With temperature 0,
        all samples are equal. The prompt is computed once: the other samples start when the first one has its
        first token, and find the prompt in the prefix cache, but for the tokens after the last full block.

        Raises what `generate` raises."""
        n = plain_scalar(n)
        check_int(RequestError, "n", n, ge=1, le=MAX_SAMPLES)
        any_prompt = as_any_prompt(
            prompt, tools, template_args, tool_choice=tool_choice, continue_final=continue_final
        )
        found = self._params(params, options, Serving.samples)
        return self._submit_samples(any_prompt, found, request_id, n)

    @with_config(EngineConfig, RequestKeywordError)
    async def count_tokens(
        self,
        prompt: str | Sequence[int] | IdArray | Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec | Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        *,
        tool_choice: str = "auto",
        continue_final: bool = False,
    ) -> int:
        """The number of tokens that a prompt of `generate`, or messages of `chat`, have for the model, also
        if they are more than it takes. Counted on a text thread, as prompts are tokenised.

        prompt:               as of `generate`, or messages as of `chat`.
        tools, template_args, tool_choice, continue_final: as of `chat`, with messages alone.

        RequestError for what `generate` or `chat` would reject, except for its length; EngineClosed."""
        return await self._count_tokens(
            as_any_prompt(
                prompt, tools, template_args, tool_choice=tool_choice, continue_final=continue_final
            )
        )

    @with_config(EngineConfig, RequestKeywordError)
    async def embed(
        self,
        prompts: Sequence[str | Sequence[int] | IdArray],
        *,
        pooling: StateKind = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Embedding]:
        """The embedding of each prompt: hidden states after the final norm, in float32.

        prompts:    each as of `generate`: a text, with the special tokens that the model has around one, or
                    token ids. Any number; 64 are submitted at a time.
        pooling:    "last": the state of the last token. "mean": the mean over all tokens. "all": the states
                    of all tokens, [tokens, dimensions] in `Embedding.states`.
        normalize:  divide each row by its Euclidean norm, after `dimensions`.
        dimensions: keep the first numbers of each row, at least 1; None = all, the model's hidden size.
        truncate_prompt_tokens: keep so many tokens of a longer prompt, the first ones, at least 1 and never
                    more than fit; those that the model has around a text are kept and counted. None = a
                    prompt that is too long is an error.
        priority, cache_salt: as in SamplingParams.

        Each prompt is a request like others, which generates a token that is thrown away: it is batched with
        those that generate, and limited to `max_model_len - 1` tokens. With "last" a cached prefix is used,
        with "mean" and "all" the whole prompt is computed.

        RequestError for a wrong argument, or with `strict_performance` or `tensor_parallel`; PromptTooLong,
        EngineClosed; ExecutorError, also if hidden states are not finite, because they overflow in the dtype.
        The error of a prompt names it: "prompts[3]"."""
        check_bool(RequestError, "normalize", normalize)
        if dimensions is not None:
            dimensions = plain_scalar(dimensions)
            check_int(RequestError, "dimensions", dimensions, ge=1)
        if truncate_prompt_tokens is not None:
            truncate_prompt_tokens = plain_scalar(truncate_prompt_tokens)
            check_int(RequestError, "truncate_prompt_tokens", truncate_prompt_tokens, ge=1)
        allowed = "a sequence of prompts, each a text or token ids; [prompt] for one"
        if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
            raise RequestError.of("prompts", prompts, allowed)

        with reading("prompts", prompts, allowed):
            if isinstance(next(iter(prompts), None), int):
                raise RequestError.of("prompts", prompts, allowed)

        given = items_of("prompts", prompts, allowed)
        items = [as_item(each, index, truncate_prompt_tokens) for index, each in enumerate(given)]
        check_choice(RequestError, "pooling", pooling, get_args(StateKind))
        params = SamplingParams(
            max_tokens=1,
            prompt_states=pooling,
            num_draft_tokens=0,
            priority=priority,
            cache_salt=cache_salt,
        )
        found: list[Embedding] = []
        async with aclosing(self._completions(items, params)) as completions:
            try:
                async for completion in completions:
                    place = f"prompts[{len(found)}]"
                    found.append(embedding_of(completion, dimensions, normalize=normalize, place=place))
            except RequestError as error:
                raise in_place(error, f"prompts[{len(found)}]") from error
        return found

    @with_config(EngineConfig, RequestKeywordError)
    async def decide(
        self,
        prompt: str | Sequence[int] | IdArray | Sequence[Message | Mapping[str, Any]],
        choices: Sequence[str | Sequence[int]],
        *,
        template_args: Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Decision:
        """How probable each of several answers to a prompt is: the softmax, over the answers, of the sums of
        the log-probabilities of their tokens. Nothing is generated.

        prompt:  as of `generate`, or messages as of `chat`, rendered with the model's chat template.
        choices: the answers, 1 to 1,000. A text is tokenised by itself, without special tokens, and its
                 tokens follow the prompt's: where words begin with a space, the answer to "The sky is" is
                 " blue". Token ids are used as they are. A longer answer is less likely unless its tokens are
                 all but certain.
        template_args: of a prompt of messages, as of `chat`: {"enable_thinking": False} where the template
                       has it, since the answers follow the prompt without reasoning.
        priority, cache_salt: as in SamplingParams.

        Answers of one token each, up to 128 different ones, are one request, which computes the prompt alone.
        Else the prompt is computed once, with the first answer; the other answers find it in the prefix
        cache, but for the tokens after the last full block. Each answer is a request then, which generates a
        token that is thrown away, as the one request does.

        RequestError for a wrong argument, or with `strict_performance` or `tensor_parallel`; PromptTooLong if
        the prompt with an answer is too long, QueueFull for the first answer, EngineClosed; ExecutorError,
        also if log-probabilities are not finite."""
        answers = answers_of(choices)
        given = as_any_prompt(prompt, None, template_args)
        return await self._decide(given, answers, priority=priority, cache_salt=cache_salt)

    async def _decide(
        self,
        given: Prompt,
        answers: Sequence[str | tuple[int, ...]],
        *,
        priority: int,
        cache_salt: str | None,
    ) -> Decision:
        """See `decide`."""
        params = SamplingParams(max_tokens=1, num_draft_tokens=0, priority=priority, cache_salt=cache_salt)
        token_ids = single_tokens(answers, self._model_text())
        if token_ids is not None:
            params = params.replace(logprobs=0, logprob_token_ids=tuple(dict.fromkeys(token_ids)))
            async with self._submit(given, params, None) as stream:
                completion = await stream
            logprobs = scored_tokens(completion, token_ids)
            return decision_of(answers, logprobs, completion.usage.prompt_tokens)

        params = params.replace(prompt_logprobs=0)
        first, *others = [
            AnsweredPrompt(given, answer, f"choices[{index}]") for index, answer in enumerate(answers)
        ]
        async with self._submit(first, params, None) as stream:
            completions = [await stream]
        async with aclosing(self._completions(others, params)) as found:
            completions += [completion async for completion in found]
        scores = [scored_answer(completion) for completion in completions]
        num_tokens = completions[0].usage.prompt_tokens - len(scores[0])
        return decision_of(answers, [math.fsum(entries) for entries in scores], num_tokens)

    def cancel(self, request_id: str) -> bool:
        """Cancel the live request, or all samples, of this id; from any thread. Returns whether there are
        such; False also if the engine is closed. RequestError for a value that cannot be an id."""
        request_id = plain_scalar(request_id)
        check_request_id(request_id, is_new=False)
        return self._cancel(request_id)

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike[ParsedT]],
        params: SamplingParams[ParsedT] | None = None,
        *,
        max_concurrent: int = 64,
        ordered: bool = True,
        errors: Literal["raise"] = "raise",
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> AsyncGenerator[Completion[ParsedT], None]: ...

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike[ParsedT]],
        params: SamplingParams[ParsedT] | None = None,
        *,
        max_concurrent: int = 64,
        ordered: bool = True,
        errors: Literal["yield"],
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> AsyncGenerator[JobDone[ParsedT] | JobFailed, None]: ...

    def map(
        self,
        prompts: Iterable[PromptLike[ParsedT]],
        params: SamplingParams[ParsedT] | None = None,
        *,
        max_concurrent: int = 64,
        ordered: bool = True,
        errors: Literal["raise", "yield"] = "raise",
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> AsyncGenerator[Completion[ParsedT], None] | AsyncGenerator[JobDone[ParsedT] | JobFailed, None]:
        """Completions of many prompts, as an async generator.

        prompts:        each as of `generate`, or a `Job`; read when there is room, so it may be endless.
        params:         of prompts without their own; None = the model's own defaults, `default_params`.
        max_concurrent: most requests that are submitted and have not ended, at least 1.
        ordered:        yield in the order of the prompts; False = as they end.
        errors:         "raise" yields completions, and the first error ends the iteration. "yield" yields a
                        `JobResult`: a `JobDone` or a `JobFailed` with the key of each prompt; only
                        EngineClosed and ExecutorError are raised.
        options:        fields of SamplingParams, which replace those of `params`, or of the defaults.

        While the caller waits for a result, a place that becomes free is filled at once. At most
        32 * max_concurrent prompts (2 * max_concurrent without order) are submitted and not yet yielded, so
        the memory of finished results is bounded.

        While the queue is full it waits, so QueueFull is not raised. An error of `prompts` itself, or with
        "raise" of a prompt that cannot be submitted, is raised after the results of the prompts before it.
        Ending the iteration early (`aclose`, or cancellation while waiting) cancels what was submitted. A
        wrong argument raises RequestError at the call.
        """
        job_map = self._job_map(params, max_concurrent, ordered, errors, options)
        check_prompts(prompts)
        return results_of(job_map, prompts) if errors == "yield" else completions_of(job_map, prompts)

    def _completions(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> AsyncGenerator[Completion, None]:
        """The completions of prompts, in their order. The first error is raised in its place."""
        job_map = JobMap(
            lambda job: self._submit(cast("Prompt", job), params, None),
            lambda: self._has_room,
            MAX_PROMPTS_AT_ONCE,
            is_ordered=True,
            yields_errors=False,
        )
        return completions_of(job_map, cast("list[Any]", prompts))

    def _params(
        self, params: SamplingParams | None, options: SamplingOptions, method: Callable[..., object]
    ) -> SamplingParams:
        """The parameters of a request of a method. RequestError for a wrong value or option."""
        check_options(options, method, SamplingParams, EngineConfig)
        if params is None:
            params = self.default_params
        elif not isinstance(params, SamplingParams):
            raise RequestError.of("params", params, "SamplingParams")

        return params.replace(**options) if options else params

    def _submit(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> TokenStream:
        request_id = plain_scalar(request_id)
        self._check(prompt, params, request_id)
        stream = self._submitter.submit(self._enter, prompt, params, request_id=request_id)
        self._warn_of_template(prompt)
        return stream

    def _submit_samples(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, num_samples: int
    ) -> Samples:
        request_id = plain_scalar(request_id)
        self._check(prompt, params, request_id)
        samples = self._submitter.submit_samples(
            self._enter, prompt, params, num_samples=num_samples, request_id=request_id
        )
        self._warn_of_template(prompt)
        return samples

    def _check(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> None:
        """RequestError for what this engine does not take."""
        is_strict, is_speculating = self.config.strict_performance, self.config.speculation is not None
        if is_strict:
            check_needs_no_host(params, is_speculating=is_speculating)
        if self.config.tensor_parallel > 1:
            for field, value in beside_graphs(params).items():
                raise RequestError.of(field, value, f"{NOTHING[field]!r} with tensor_parallel")

        self._check_functions(params)
        check_forced_calls(prompt, params, needs_no_host=is_strict and is_speculating)
        if request_id is not None:
            check_request_id(request_id, is_new=True)

    def _check_functions(self, params: SamplingParams) -> None:
        """RequestError for functions that this engine does not call. A warning, once, if it does."""
        functions = functions_of(params.logits_processors)
        if not functions and params.stop_when is None:
            return

        if not self._calls_functions:
            field, value = ("logits_processors", functions) if functions else ("stop_when", params.stop_when)
            allowed = "no Python function: the engine runs in another process"
            raise RequestError.of(field, value, allowed)

        if functions and (executor := self.executor) != "eager":
            allowed = f"TokenMachines and TokenBiases: the executor {executor!r} calls no Python functions"
            raise RequestError.of("logits_processors", functions, allowed)

        if functions and "functions" not in self._warnings:
            self._warnings.add("functions")
            log.warning(
                "logits_processors: Python functions run on the engine's thread for every token, while all "
                "other requests wait; a TokenMachine or a TokenBias does not"
            )

    def _job_map(
        self,
        params: SamplingParams | None,
        max_concurrent: int,
        ordered: bool,
        errors: str,
        options: SamplingOptions,
    ) -> JobMap:
        """The state of a call of `map`. RequestError for a wrong argument."""
        max_concurrent = plain_scalar(max_concurrent)
        check_int(RequestError, "max_concurrent", max_concurrent, ge=1)
        check_bool(RequestError, "ordered", ordered)
        check_choice(RequestError, "errors", errors, ("raise", "yield"))
        if params is not None or options:
            params = self._params(params, options, Serving.map)
        return JobMap(
            partial(self._submit_job, params=params),
            lambda: self._has_room,
            max_concurrent,
            is_ordered=ordered,
            yields_errors=errors == "yield",
        )

    def _submit_job(self, job: PromptLike, *, params: SamplingParams | None) -> TokenStream:
        if not isinstance(job, Job):
            return self.generate(job, params)

        own = job.params if job.params is not None else params
        if job.messages is not None:
            return self.chat(
                job.messages,
                own,
                job.tools,
                job.template_args,
                tool_choice=job.tool_choice,
                continue_final=job.continue_final,
            )

        assert job.prompt is not None
        return self.generate(job.prompt, own)

    def _warn_of_template(self, prompt: Prompt) -> None:
        """Warn of what the chat template leaves out or nothing can read, each once."""
        if not isinstance(prompt, ChatPrompt) or not (prompt.offered_tools or prompt.has_calls):
            return

        try:
            template = self._model_text().chat_template
        except EngineClosed:  # meanwhile
            return

        if template is None:
            return

        used = template.for_tools(prompt.offered_tools)
        if prompt.offered_tools and not template.uses_tools:
            self._warn_once("ignores tools: the model does not see them")
        elif prompt.has_calls and not used.shows_calls:
            self._warn_once("leaves tool calls out: the model does not see earlier calls")
        if prompt.offered_tools and prompt.tool_choice == "auto" and not used.reads_calls:
            self._warn_once("writes tool calls in an unknown format: they stay in the text")

    def _warn_once(self, finding: str) -> None:
        if finding not in self._warnings:
            self._warnings.add(finding)
            log.warning("the chat template of %s %s", self.model, finding)
