"""What chat completions and text completions have in common: fields of requests, choices of answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from drift_sdk import Chunk, Completion, DriftError, RequestError
from drift_sdk.openai.errors import described, shaped
from drift_sdk.openai.generation import DONE, Event
from drift_sdk.openai.sampling import IGNORED, REFUSED, SAMPLING, Form, ResponseFormat, StructuredOutputs
from drift_sdk.openai.service import new_id
from drift_sdk.openai.wire import Body, Strict

__all__ = ["Choice", "ChoicesAnswer", "TextBody"]

MAX_ID_CHARS = 64


class StreamOptions(Strict, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding that has no effect on the answer
    continuous_usage_stats: Literal[False] | None = None


class TextBody(Body, kw_only=True):
    """Fields of the requests of chat and of completions."""

    sampling_names: ClassVar[Mapping[str, str]] = SAMPLING
    ignored: ClassVar[frozenset[str]] = IGNORED
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED

    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def error_names(self) -> dict[str, str]:
        """Fields of the engine's errors -> the fields of this request that they are about."""
        budget = "thinking_token_budget"
        return {
            **dict.fromkeys(("schema", "pattern", "grammar"), Form(self).field),
            "include_stop": "include_stop_str_in_output",
            "thinking_budget": budget if budget in self.sampling else "thinking_budget",
        }

    def new_id(self, prefix: str) -> str:
        given = self.request_id
        if given is not None and not 1 <= len(given) <= MAX_ID_CHARS:
            raise RequestError.of("request_id", given, f"1 to {MAX_ID_CHARS} characters")

        return new_id(prefix, given)


class Choice(Protocol):
    """One choice of an answer."""

    def pieces(self, chunk: Chunk, completion: Completion | None) -> list[dict[str, Any]]:
        """The JSON of a chunk, in pieces. completion: given with the last chunk."""
        ...

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The JSON of an answer that is not streamed."""
        ...


class ChoicesAnswer:
    """An answer of several choices, as `generation.Answer` describes it.

    kinds: the values of `object` of an answer and of its chunks.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        body: TextBody,
        kinds: tuple[str, str],
        *,
        answer_id: str,
        model: str,
        shows_cached_tokens: bool,
    ) -> None:
        self._choices = choices
        self._body = body
        self._kinds = kinds
        self._common = {"id": answer_id, "created": int(time.time()), "model": model}
        self._shows_cached_tokens = shows_cached_tokens
        # Clients look there for the id of their request, which is also in the engine's log.
        self.headers: Mapping[str, str] = {"x-request-id": answer_id}

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        choices = [
            {"index": index, **choice.whole(completion)}
            for index, (choice, completion) in enumerate(zip(self._choices, completions, strict=True))
        ]
        return {
            **self._common,
            "object": self._kinds[0],
            "choices": choices,
            "usage": self._usage(completions),
        }

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        return iter(())

    def chunk(self, index: int, chunk: Chunk, completion: Completion | None) -> Iterator[Event]:
        for piece in self._choices[index].pieces(chunk, completion):
            yield self._event([{"index": index, **piece}])

    def end(self, completions: list[Completion]) -> Iterator[Event | bytes]:
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield self._event([], usage=self._usage(completions))
        yield DONE

    def failed(self, error: DriftError) -> Iterator[Event]:
        yield Event(shaped(described(error, self._body.error_names()), is_anthropic=False))

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> Event:
        return Event({**self._common, "object": self._kinds[1], "choices": choices, **more})

    def _usage(self, completions: list[Completion]) -> dict[str, Any]:
        """Token counts of all choices together. A prompt with several choices counts once."""
        counts = [completion.usage for completion in completions]
        prompts = counts[:: self._body.n]
        prompt_tokens = sum(count.prompt_tokens for count in prompts)
        completion_tokens = sum(count.completion_tokens for count in counts)
        found: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens_details": {
                "reasoning_tokens": sum(count.reasoning_tokens for count in counts)
            },
        }
        if self._shows_cached_tokens:
            cached_tokens = sum(count.cached_tokens for count in prompts)
            found["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return found
