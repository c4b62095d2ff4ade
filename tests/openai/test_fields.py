"""Fields that OpenAI's clients and vLLM's can send: each is supported, has no effect on the answer, or is
refused."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from drift_sdk import JsonSchema, Lark, Regex, RequestError, SamplingParams
from drift_sdk.openai import conversation
from drift_sdk.openai.chat import ChatBody, CompletionBody
from drift_sdk.openai.scoring import EmbeddingBody
from drift_sdk.openai.wire import Body, read

MESSAGES = [{"role": "user", "content": "hi"}]
VLLM = {
    *("add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "ec_transfer_params", "echo"),
    *("guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex"),
    *("guided_whitespace_pattern", "ignore_eos", "include_stop_str_in_output", "kv_transfer_params"),
    *("length_penalty", "logits_processors", "logprob_token_ids", "min_p", "min_tokens", "priority"),
    *("prompt_logprobs", "repetition_detection", "repetition_penalty", "request_id", "response_format"),
    *("return_prompt_text", "return_token_ids", "return_token_offsets", "return_tokens_as_token_ids"),
    *("routed_experts_prompt_start", "session_id", "skip_special_tokens", "stop_token_ids"),
    *("spaces_between_special_tokens", "stream_interval", "structured_outputs", "top_k", "truncation_side"),
    *("truncate_prompt_tokens", "use_beam_search", "vllm_xargs", "watermarking"),
}
VLLM_CHAT = {
    *("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message"),
    *("documents", "include_reasoning", "media_io_kwargs", "mm_processor_kwargs", "return_mm_kwargs"),
    *("thinking_token_budget",),
}
VLLM_TEXT = {"prompt_embeds"}


def fields_of(module: Any, name: str = "CompletionCreateParams") -> set[str]:
    """All fields of a client's requests, from the types of its keyword arguments."""
    kinds = [getattr(module, f"{name}{mode}") for mode in ("NonStreaming", "Streaming")]
    return {name for kind in kinds for name in typing.get_type_hints(kind)}


ENDPOINTS = {
    "chat": (ChatBody, {"messages": MESSAGES}, fields_of(chat_params) | VLLM | VLLM_CHAT),
    "text": (CompletionBody, {"prompt": "a"}, fields_of(text_params) | VLLM | VLLM_TEXT),
}
DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
SAMPLING: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0, {"temperature": 0.0}),
    "top_p": (0.5, {"top_p": 0.5}),
    "top_k": (3, {"top_k": 3}),
    "min_p": (0.1, {"min_p": 0.1}),
    "min_tokens": (2, {"min_tokens": 2}),
    "presence_penalty": (1, {"presence_penalty": 1.0}),
    "frequency_penalty": (1, {"frequency_penalty": 1.0}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "logit_bias": ({"5": 1}, {"logit_bias": {5: 1.0}}),
    "stop": (["a"], {"stop": ("a",)}),
    "stop_token_ids": ([5], {"stop_token_ids": (5,)}),
    "include_stop_str_in_output": (True, {"include_stop": True}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "allowed_token_ids": ([5], {"allowed_token_ids": (5,)}),
    "seed": (5, {"seed": 5}),
    "priority": (-1, {"priority": -1}),
    "cache_salt": ("a", {"cache_salt": "a"}),
    "thinking_budget": (5, {"thinking_budget": 5}),
    "thinking_token_budget": (5, {"thinking_budget": 5}),
    "max_tokens": (5, {"max_tokens": 5}),
    "response_format": ({"type": "json_object"}, {"grammar": JsonSchema({"type": "object"})}),
    "structured_outputs": ({"regex": "a"}, {"grammar": Regex("a")}),
    "guided_json": ({"const": 1}, {"grammar": JsonSchema({"const": 1})}),
    "guided_regex": ("a", {"grammar": Regex("a")}),
    "guided_choice": (["a", "b.c"], {"grammar": Regex(r"a|b\.c")}),
    "guided_grammar": ('start: "a"', {"grammar": Lark('start: "a"')}),
}
BEYOND_SAMPLING = {
    "chat": {
        *("messages", "model", "stream", "stream_options", "n", "request_id", "logprobs", "top_logprobs"),
        *("max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
        *("chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message"),
    },
    "text": {"prompt", "model", "stream", "stream_options", "n", "request_id", "logprobs"},
}
"""Fields that are mapped to other arguments than parameters, or with others; tested by requests."""


def params_of(endpoint: str, defaults: SamplingParams = DEFAULTS, **fields: Any) -> SamplingParams:
    kind, prompt, _ = ENDPOINTS[endpoint]
    body = read({**prompt, **fields}, kind)
    return body.params(defaults, is_forced=False) if endpoint == "chat" else body.params(defaults)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_of_the_clients_is_supported_ignored_or_refused(endpoint: str) -> None:
    kind, _, fields = ENDPOINTS[endpoint]
    for name in fields:
        known = {*kind.__struct_fields__, *kind.sampling_names} - {"sampling"}
        places = [name in each for each in (known, kind.ignored, kind.refused)]
        assert sum(places) == 1, name
    assert known == set(SAMPLING) | BEYOND_SAMPLING[endpoint]


def test_parameters_that_no_field_sets() -> None:
    set_elsewhere = {"max_tokens", "logprobs", "grammar", "include_stop"}
    missing = set(SamplingParams.__struct_fields__) - set(conversation.SAMPLING) - set_elsewhere
    assert missing == {
        *("prompt_logprobs", "prompt_states", "logprob_token_ids", "num_draft_tokens"),
        *("logits_processors", "stop_when"),
    }


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_request_without_fields_has_the_models_own_parameters(endpoint: str) -> None:
    most = {"chat": None, "text": 16}[endpoint]
    assert params_of(endpoint) == DEFAULTS.replace(max_tokens=most)
    nulls = dict.fromkeys([*SAMPLING, "audio", "what_is_this"])
    assert params_of(endpoint, **nulls) == DEFAULTS.replace(max_tokens=most)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("field", SAMPLING)
def test_a_field_replaces_the_parameter(endpoint: str, field: str) -> None:
    value, changes = SAMPLING[field]
    assert params_of(endpoint, **{field: value}) == params_of(endpoint).replace(**changes)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_all_tokens_are_kept_with_a_top_k_of_minus_one(endpoint: str) -> None:
    assert params_of(endpoint, top_k=-1).top_k == params_of(endpoint, top_k=0).top_k == 0


def test_a_thinking_token_budget_of_minus_one_is_no_limit() -> None:
    defaults = DEFAULTS.replace(thinking_budget=5)
    assert params_of("chat", defaults, thinking_token_budget=-1).thinking_budget is None
    with pytest.raises(RequestError, match="thinking_budget"):
        params_of("chat", thinking_budget=-1)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_ignored_fields_change_nothing(endpoint: str) -> None:
    for value in (1, "a", True, {"a": 1}):
        assert params_of(endpoint, **dict.fromkeys(conversation.IGNORED, value)) == params_of(endpoint)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_refused_fields_are_named_unless_they_have_their_default(endpoint: str) -> None:
    kind = ENDPOINTS[endpoint][0]
    for name, accepted in kind.refused.items():
        for value in accepted:
            assert params_of(endpoint, **{name: value}) == params_of(endpoint)
        with pytest.raises(RequestError, match=name) as caught:
            params_of(endpoint, **{name: "something else"})
        assert caught.value.field == name


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("name", ["temprature", "x" * 10_000, "\ud800"])
def test_unknown_fields_are_named(endpoint: str, name: str) -> None:
    with pytest.raises(RequestError, match="unknown field") as caught:
        params_of(endpoint, **{name: 1})
    assert caught.value.field == name[:100]
    assert len(str(caught.value)) < 200 and str(caught.value).isprintable()


def test_an_unknown_field_is_answered_with_the_nearest_one() -> None:
    for kind, name, nearest in (
        (ChatBody, "temprature", "temperature"),
        (EmbeddingBody, "dimension", "dimensions"),
        (EmbeddingBody, "inputs", "input"),
    ):
        with pytest.raises(RequestError, match=rf"'{name}': unknown field \(did you mean {nearest}\?\)"):
            read({name: 1}, kind)


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        (
            {"encoding_format": "int8"},
            EmbeddingBody,
            "encoding_format: .*, expected one of 'base64', 'float'",
        ),
        ({"tool_choice": "any"}, ChatBody, "tool_choice: .*, expected one of 'auto', 'none', 'req.*"),
        (
            {"messages": [*MESSAGES, {"role": "me"}]},
            ChatBody,
            r"messages\[1\].role: .*, expected one of 'ass.*",
        ),
    ],
)
def test_a_value_that_is_none_of_several_is_answered_with_these(
    values: dict[str, Any], kind: type[Body], message: str
) -> None:
    required = {"input": "a"} if kind is EmbeddingBody else {"messages": MESSAGES}
    with pytest.raises(RequestError, match=message):
        read(required | values, kind)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
    ],
)
def test_there_is_one_form_of_the_text(endpoint: str, field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        params_of(endpoint, **fields)
    assert caught.value.field == field
