"""Conversations of the protocols as engines take them: messages, tools, sampling; and parts of answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from drift_sdk import (
    BaseEngine,
    Chunk,
    Completion,
    JsonSchema,
    Lark,
    Regex,
    RequestError,
    SamplingParams,
    TokenLogprobs,
    ToolCall,
)
from drift_sdk.openai.wire import Strict, Wire, convert


class TokenLog:
    """The log-probabilities of a text's tokens, each with its text, its bytes and its offset in the text.

    Tokens that do not belong to the text (the end of sequence, a stop string) are left out. An entry is
    therefore kept back until the text in which it begins has been sent.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self._tokenizer = engine.tokenizer
        self._detokenizer = engine.tokenizer.detokenizer()
        self._waiting: list[tuple[int, TokenLogprobs]] = []
        self._num_generated = 0
        self._num_sent = 0

    def take(
        self,
        text: str,
        entries: Sequence[TokenLogprobs],
        completion: Completion | None,
        *,
        is_split: bool = False,
    ) -> list[tuple[int, TokenLogprobs]]:
        """Add the entries of a chunk; returns those that can be sent with its text, with their offsets.

        completion: given with the last chunk. is_split: the text is not all that was generated, so that it
        does not show where it ends."""
        self._num_sent += len(text)
        for entry in entries:
            self._waiting.append((self._num_generated, entry))
            self._num_generated += len(self._detokenizer.push([entry.token_id]))
        if is_split:
            self._num_sent = self._num_generated
        if completion is None or (
            completion.finish_reason == "stop" and isinstance(completion.stop_reason, str)
        ):
            ready = sum(offset < self._num_sent for offset, _ in self._waiting)
        else:
            ready = len(self._waiting) - isinstance(completion.stop_reason, int)
        taken, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return taken

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token, which may be a part of a character. Special tokens are spelled out."""
        tokenizer = self._tokenizer
        data = tokenizer.token_bytes[token_id] if tokenizer.has_token_bytes else b""
        return data or self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode(errors="replace")

    def entry_json(self, entry: TokenLogprobs) -> dict[str, Any]:
        """An entry as the chat and Responses protocols write it."""
        top = [self._token_json(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token_json(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token_json(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.bytes_of(token_id)
        return {"token": data.decode(errors="replace"), "logprob": shown(logprob), "bytes": list(data)}


LEAST_LOGPROB = -9999.0


def shown(logprob: float) -> float:
    """A log-probability as JSON has it: at least LEAST_LOGPROB, as of OpenAI, also for NaN."""
    return max(LEAST_LOGPROB, logprob)


Ended = Literal["stop", "length", "tool_calls"]


class ToolUse(Struct, frozen=True, kw_only=True):
    """What a request allows in the answer besides text.

    is_forced: the answer consists of tool calls, so that text after a call is one that was cut short.
    max_calls: further calls are left out; None = all are kept.
    """

    is_forced: bool = False
    max_calls: int | None = None


class AnswerParts:
    """Text and calls of one answer as they are shown."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._has_calls = False

    def read(self, part: Chunk | Completion) -> tuple[str, list[ToolCall]]:
        """Text and calls of a chunk, or of a whole answer. Reasoning is shown as it is."""
        calls = [call for call in part.tool_calls if self._is_kept(call)]
        self._has_calls |= bool(calls)
        return "" if self._use.is_forced and self._has_calls else part.text, calls

    def ended(self, completion: Completion) -> Ended:
        """Why the answer ended. One that has all calls it may have is not cut short."""
        calls, is_cut = completion.tool_calls, completion.finish_reason == "length"
        is_full = self._use.max_calls is not None and len(calls) >= self._use.max_calls
        if calls and (not is_cut or is_full):
            return "tool_calls"

        return "length" if is_cut else "stop"

    def _is_kept(self, call: ToolCall) -> bool:
        return self._use.max_calls is None or call.index < self._use.max_calls


MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[\w.-]+")
CHOICES = ("none", "auto", "required")
ROLES = {"developer": "system", "function": "tool"}
"""Roles that chat templates know by another name."""
TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part with text -> its field. Engines know the type "text" alone."""


def as_parts(content: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """The content of a message. Parts other than text are left to the engine, which names those that the
    model does not take."""
    if isinstance(content, str):
        return content

    return [
        {"type": "text", "text": part.get(field)}
        if (field := TEXT_PARTS.get(str(part.get("type")))) is not None
        else part
        for part in content
    ]


class CalledFunction(Wire, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class Call(Wire, kw_only=True):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments or "{}"}
        return {"id": self.id or "", "type": "function", "function": function}


class Message(Wire, kw_only=True):
    """Of the fields of the protocol that are not here, `audio` is refused by `plain`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Any = None
    tool_calls: list[Call] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None

    def plain(self, place: str) -> dict[str, Any]:
        """The message in the form that engines take. place: its path in the request, for errors."""
        if self.audio is not None:
            raise RequestError.of(f"{place}.audio", self.audio, "null: audio is not supported")

        content = self.content if self.content is not None else self.refusal or ""
        plain: dict[str, Any] = {"role": ROLES.get(self.role, self.role), "content": as_parts(content)}
        calls = list(self.tool_calls or [])
        if self.function_call is not None:  # the older form of a call
            calls.append(Call(function=self.function_call))
        if calls:
            plain["tool_calls"] = [call.plain() for call in calls]
        reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if reasoning is not None:
            plain["reasoning_content"] = reasoning
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                plain[name] = getattr(self, name)
        return plain


class Tools:
    """The tools of a request, and which of them the answer may or must call.

    offered: descriptions in the form that engines take; None = there are none.
    choice:  the engine's `tool_choice`.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        choice: str,
        *,
        names: Sequence[str] | None = None,
        is_parallel: bool = True,
    ) -> None:
        """choice: "none", "auto" or "required". names: the tools that may be called; None = all.

        Of tools that may not be called, the model sees nothing."""
        if len(tools) > MAX_TOOLS:
            raise RequestError.of("tools", len(tools), f"at most {MAX_TOOLS} tools")

        for name in names or ():
            if name not in (known := [tool["function"]["name"] for tool in tools]):
                allowed = f"one of {', '.join(map(repr, known))}" if known else "none, as there are no tools"
                raise RequestError.of("tool_choice", name, allowed)

        kept = [tool for tool in tools if names is None or tool["function"]["name"] in names]
        self.offered = kept or None
        self.choice = choice
        self.use = ToolUse(is_forced=choice == "required", max_calls=None if is_parallel else 1)

    @classmethod
    def calling(cls, tools: Sequence[Mapping[str, Any]], name: str) -> Tools:
        """Tools of which one has to be called, once; the model sees all."""
        if name in CHOICES:
            raise RequestError.of("tool_choice", name, "a tool of another name, to force its call")

        made = cls(tools, "required", is_parallel=False)
        made.choice = name
        return made


def described_tool(description: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A tool in the form that engines take. Fields of the function that the protocol does not have are kept,
    because a chat template may use them.

    description: name, description and parameters of a function. place: its path in the request."""
    name = description.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise RequestError.of(f"{place}.name", name, "letters, digits, _, - and .")

    function = {key: value for key, value in description.items() if value is not None}
    function.setdefault("parameters", {"type": "object", "properties": {}})
    convert(function["parameters"], dict[str, Any], f"{place}.parameters")
    return {"type": "function", "function": function}


def effort_args(effort: str | None) -> dict[str, Any]:
    """Variables of chat templates that set how long a model reasons."""
    if effort is None:
        return {}

    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


Grammar = JsonSchema | Regex | Lark
ANY_OBJECT = {"type": "object"}

SAMPLING: dict[str, str] = {
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "min_tokens", "presence_penalty"),
            *("frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids"),
            *("ignore_eos", "allowed_token_ids", "seed", "priority", "cache_salt", "thinking_budget"),
        )
    },
    "include_stop_str_in_output": "include_stop",
    "thinking_token_budget": "thinking_budget",
}
"""Field of a request -> field of SamplingParams. Besides those of OpenAI they are the ones that vLLM adds."""

IGNORED = frozenset(
    {
        # Bookkeeping, and hints about speed.
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "session_id", "store", "stream_interval", "user"),
        # Of beam search, of images, of special tokens in the text, of truncated prompts and of other
        # endpoints: without effect where there is none of these.
        *("length_penalty", "media_io_kwargs", "mm_processor_kwargs", "spaces_between_special_tokens"),
        *("guided_decoding_backend", "return_mm_kwargs", "routed_experts_prompt_start", "truncation_side"),
    }
)
"""Fields without effect on the answer."""

NEVER = (False,)
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "ec_transfer_params": (),
    "echo": NEVER,
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_prompt_text": NEVER,
    "return_token_ids": NEVER,
    "return_token_offsets": NEVER,
    "return_tokens_as_token_ids": NEVER,
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": NEVER,
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": NEVER,
    "web_search_options": (),
}
"""Field -> values that are accepted, because they are the defaults."""


def params_of(
    defaults: SamplingParams,
    given: Mapping[str, Any],
    names: Mapping[str, str] = SAMPLING,
    **more: Any,
) -> SamplingParams:
    """The model's own parameters with the fields of a request. RequestError for a wrong value.

    given: fields in the protocol's names. more: further changes, in the engine's names.
    """
    changes = {names[name]: value for name, value in given.items()}
    if changes.get("top_k") == -1:  # vLLM's clients and OpenAI's differ in the number that stands for all
        changes["top_k"] = 0
    if given.get("thinking_token_budget") == -1:  # of vLLM: no limit
        changes["thinking_budget"] = None
    if isinstance(bias := changes.get("logit_bias"), Mapping):
        changes["logit_bias"] = SamplingParams.from_dict({"logit_bias": bias}).logit_bias
    return defaults.replace(**changes, **more)


class JsonSchemaFormat(Strict, kw_only=True):
    """strict has no effect: every answer follows the schema."""

    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema: dict[str, Any]


class ResponseFormat(Strict, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None

        if self.type == "json_object":
            return JsonSchema(ANY_OBJECT)

        if self.json_schema is None:
            raise RequestError.of("response_format", self.type, "a json_schema in the same object")

        return JsonSchema(self.json_schema.schema)


class StructuredOutputs(Strict, kw_only=True):
    """The form of the text: one of the first five fields."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None

    def grammars(self) -> list[Grammar]:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name):
                raise RequestError.of(f"structured_outputs.{name}", True, "false: it is not supported")

        found: list[Grammar] = []
        if self.json is not None:
            found.append(JsonSchema(self.json))
        if self.regex is not None:
            found.append(Regex(self.regex))
        if self.choice is not None:
            found.append(one_of("structured_outputs.choice", self.choice))
        if self.grammar is not None:
            found.append(Lark(self.grammar))
        if self.json_object:
            found.append(JsonSchema(ANY_OBJECT))
        return found


def one_of(field: str, texts: list[str]) -> Regex:
    if not texts:
        raise RequestError.of(field, texts, "at least one text")

    return Regex("|".join(map(re.escape, texts)))


class Form:
    """The form of the text that a request asks for, by one of these fields. The older names of vLLM are
    among them."""

    FIELDS = (
        *("response_format", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    )

    def __init__(self, body: Any) -> None:
        self._given = {name: value for name in self.FIELDS if (value := getattr(body, name)) is not None}

    @property
    def field(self) -> str:
        """The field that describes the form."""
        return next(iter(self._given), "response_format")

    def grammar(self) -> Grammar | None:
        """RequestError for several forms, and for one that cannot be read."""
        found: list[Grammar] = []
        for name, value in self._given.items():
            match name:
                case "response_format":
                    form = value.grammar()
                    found += [] if form is None else [form]
                case "structured_outputs":
                    forms = value.grammars()
                    if not forms:
                        raise RequestError.of(name, None, "json, regex, choice, grammar or json_object")

                    found += forms
                case "guided_json":
                    found.append(JsonSchema(value))
                case "guided_regex":
                    found.append(Regex(value))
                case "guided_choice":
                    found.append(one_of(name, value))
                case "guided_grammar":
                    found.append(Lark(value))
        if len(found) > 1:
            raise RequestError.of(list(self._given)[-1], len(found), "one form of the text in a request")

        return found[0] if found else None
