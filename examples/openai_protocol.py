"""OpenAI's chat and completions protocol in terms of the engine: bodies in, answers and errors out."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from drift_sdk import (
    Chunk,
    Completion,
    DriftError,
    Engine,
    EngineClosed,
    JsonSchema,
    PromptTooLong,
    QueueFull,
    RequestError,
    SamplingParams,
    TokenLogprobs,
    Usage,
)


class Body(BaseModel):
    """What both endpoints take. A field that is not known is refused, not ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: bool = False
    stream_options: "StreamOptions | None" = None
    n: Literal[1] = 1
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | list[str] | None = None
    seed: int | None = None
    user: str | None = None

    def params(self, **more: Any) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop=stop,
            seed=self.seed,
            **more,
        )


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> JsonSchema | None:
        if self.type == "text":
            return None

        if self.type == "json_object":
            return JsonSchema({"type": "object"})

        if self.json_schema is None:
            raise RequestError.of("response_format", self.type, "a json_schema beside it")

        return JsonSchema(self.json_schema.schema_)


MaxTokens = Annotated[int, Field(ge=1)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]


class ChatBody(Body):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    response_format: ResponseFormat | None = None

    def sampling(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError.of("top_logprobs", self.top_logprobs, "logprobs=true beside it")

        return self.params(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=self.response_format.grammar() if self.response_format is not None else None,
        )


class CompletionBody(Body):
    prompt: str | list[int]
    max_tokens: MaxTokens | None = 16
    logprobs: NumLogprobs | None = None

    def sampling(self) -> SamplingParams:
        return self.params(max_tokens=self.max_tokens, logprobs=self.logprobs)


class ChatAnswer:
    """How the chat endpoint writes what the engine says."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def piece(self, chunk: Chunk, *, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": chunk.text}, "logprobs": self._logprobs(chunk.logprobs)}

    def whole(self, completion: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(completion.logprobs)}

    def _logprobs(self, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if entries is None:
            return None

        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(self._engine, token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextAnswer:
    """The same for the completions endpoint. Offsets of tokens count from the beginning of the text."""

    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._offset = 0

    def piece(self, chunk: Chunk, *, is_first: bool) -> dict[str, Any]:
        return {"text": chunk.text, "logprobs": self._logprobs(chunk.logprobs)}

    def whole(self, completion: Completion) -> dict[str, Any]:
        return {"text": completion.text, "logprobs": self._logprobs(completion.logprobs)}

    def _logprobs(self, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if entries is None:
            return None

        tokens = [token_text(self._engine, entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        top = [{token_text(self._engine, token): value for token, value in entry.top} for entry in entries]
        values = [entry.logprob for entry in entries]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def token_text(engine: Engine, token_id: int) -> str:
    return engine.tokenizer.decode([token_id], skip_special_tokens=False)


def usage(counts: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


def error_body(error: DriftError, path: str) -> tuple[int, dict[str, Any]]:
    """Status and body, in OpenAI's shape and with the names of its parameters."""
    if isinstance(error, RequestError):
        names = {"schema": "response_format", "grammar": "response_format"}
        if path.endswith("/chat/completions"):
            names["prompt"] = "messages"
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        param = names.get(error.field, error.field)
        return 400, shaped_error(str(error), "invalid_request_error", param=param, code=code)

    if isinstance(error, QueueFull):
        return 429, shaped_error(str(error), "rate_limit_error", code="rate_limit_exceeded")

    return 503 if isinstance(error, EngineClosed) else 500, shaped_error(str(error), "server_error")


def shaped_error(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
