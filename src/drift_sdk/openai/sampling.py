"""Sampling fields of the protocols, as the engine's parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from drift_sdk import JsonSchema, Lark, Regex, RequestError, SamplingParams
from drift_sdk.openai.wire import Strict

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
