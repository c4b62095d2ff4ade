"""Fields of requests of OpenAI's protocol, and those that vLLM adds: which ones are refused or have no
effect, and those that describe the form of the text."""

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from drift_sdk import JsonSchema, Lark, Regex, RequestError

Grammar = JsonSchema | Regex | Lark

IGNORED = {
    # Bookkeeping, and hints about speed.
    *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "session_id", "store", "stream_interval", "user"),
    # Of beam search, of images, of special tokens in the text, of truncated prompts and of other endpoints:
    # without effect where there is none of these.
    *("length_penalty", "media_io_kwargs", "mm_processor_kwargs", "spaces_between_special_tokens"),
    *("guided_decoding_backend", "return_mm_kwargs", "routed_experts_prompt_start", "truncation_side"),
}
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
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": NEVER,
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": NEVER,
    "web_search_options": (),
}
"""Field -> values that are accepted, because they are the defaults."""

MAX_NAME_CHARS = 100


def check_names(
    values: Mapping[str, Any], known: Collection[str], refused: Mapping[str, tuple[Any, ...]]
) -> None:
    """RequestError for a field that this server does not know, and for one whose effect it does not have.

    An unknown field may be one that changes the answer, or the wrong spelling of one that does."""
    for name, value in values.items():
        if name in known or name in IGNORED or value is None:
            continue

        if name not in refused:
            shown = repr(name[:MAX_NAME_CHARS])
            message = f"{shown}: unknown field, expected a field of OpenAI's protocol"
            raise RequestError(message, field=name[:MAX_NAME_CHARS], value=value)

        accepted = refused[name]
        if value not in accepted:
            allowed = " or ".join([*map(repr, accepted), "null"])
            raise RequestError.of(name, value, f"{allowed}: this server supports nothing else")


class Wire(BaseModel):
    """An object of the protocol. Fields that are null are removed, unknown fields are ignored."""

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values

        return {key: value for key, value in values.items() if value is not None}


class StrictWire(Wire):
    """An object without unknown fields: one of them might change the answer."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(StrictWire):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding that has no effect on the answer
    continuous_usage_stats: Literal[False] = False


class JsonSchemaFormat(StrictWire):
    """strict has no effect: every answer follows the schema."""

    name: str = ""
    description: str = ""
    strict: bool = True
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(StrictWire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None

        if self.type == "json_object":
            return JsonSchema({"type": "object"})

        if self.json_schema is None:
            raise RequestError.of("response_format", self.type, "a json_schema in the same object")

        return JsonSchema(self.json_schema.schema_)


class StructuredOutputs(StrictWire):
    """The form of the text: one of the first five fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool = False
    disable_fallback: bool = False
    disable_any_whitespace: Literal[False] = False
    disable_additional_properties: Literal[False] = False

    def grammars(self) -> list[Grammar]:
        found: list[Grammar] = []
        if self.json_ is not None:
            found.append(JsonSchema(self.json_))
        if self.regex is not None:
            found.append(Regex(self.regex))
        if self.choice is not None:
            found.append(Regex("|".join(map(re.escape, self.choice))))
        if self.grammar is not None:
            found.append(Lark(self.grammar))
        if self.json_object:
            found.append(JsonSchema({"type": "object"}))
        return found
