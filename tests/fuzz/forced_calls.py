"""Tools of any form: a grammar of their calls in every format, by itself and beside another, compiled."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from drift_sdk.config import TOOL_FORMATS
from drift_sdk.grammars import AnyOf, JsonSchema
from drift_sdk.testing import EOS_TOKEN_ID, byte_tokenizer
from drift_sdk.text.answers.answer import forced_calls, optional_calls
from drift_sdk.text.answers.formats import AnswerFormats
from drift_sdk.text.grammar import constrain
from drift_sdk.text.tokenizer import Tokenizer
from drift_sdk.text.tools import ToolSet

KEYWORDS = [
    "type",
    "properties",
    "required",
    "enum",
    "items",
    "anyOf",
    "minLength",
    "maxLength",
    "$defs",
    "$ref",
]
scalars = st.none() | st.booleans() | st.integers(-3, 2000) | st.text(max_size=4)
names = st.sampled_from(["string", "integer", "boolean", "object", "array", "a", "#/$defs/a"])
values = st.recursive(
    scalars | names,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYWORDS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=10,
)
schemas = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(st.text(max_size=5), values, max_size=4) | values,
        "required": st.lists(st.text(max_size=5), max_size=3) | values,
        "type": st.just("object") | values,
        "$defs": values,
    },
)
tools = st.lists(
    st.fixed_dictionaries(
        {"name": st.text(min_size=1, max_size=6)}, optional={"parameters": schemas | values}
    ),
    min_size=1,
    max_size=3,
)
formats = st.sampled_from([name for name in TOOL_FORMATS if name != "auto"])
strategy = st.tuples(formats, st.sampled_from(["think", "granite", None]), tools, st.booleans())


@lru_cache
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


def run(data: tuple[str, str | None, list[dict[str, Any]], bool]) -> None:
    name, reasoning, descriptions, is_thinking = data
    found = AnswerFormats(tools=name, reasoning="harmony" if name == "harmony" else reasoning)
    tools = ToolSet.of(descriptions)
    if not tools:
        return

    template = "[ARGS]```json" if is_thinking else ""
    grammar = forced_calls(found, tools, tokenizer(), template=template, is_thinking=is_thinking)
    calls = optional_calls(found, tools, tokenizer(), template=template)
    for each in (grammar, AnyOf((calls, JsonSchema({"type": "object"})))):
        constrain(each, tokenizer(), vocab_size=EOS_TOKEN_ID + 1, eos_token_ids=(EOS_TOKEN_ID,))
