"""The grammar of an answer goes on from its prompt; the splitter finds in it what it asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chat_families import FAMILIES, TOOLS, family_tokenizer

from drift_sdk import ConfigError, JsonSchema
from drift_sdk.grammars import Grammar
from drift_sdk.text.answers.answer import Answer, prepare_answer
from drift_sdk.text.answers.formats import AnswerFormats, detect_formats
from drift_sdk.text.grammar import constrain
from drift_sdk.text.tools import ToolSet

EOS = 256
FAMILY = FAMILIES["harmony"]
TOKENIZER = family_tokenizer(FAMILY)
BOTH = AnswerFormats(tools="harmony", reasoning="harmony")
OBJECT = JsonSchema({"type": "object"})
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"numbers": [1]}'
ADDED = [("add", {"numbers": [1]})]


def answer_of(
    formats: AnswerFormats,
    *,
    continued: str | None = None,
    tool_choice: str = "auto",
    grammar: Grammar | None = None,
) -> Answer:
    """An answer of gpt-oss, with tools unless the choice is none."""
    begun = "" if continued is None else f"<|channel|>final<|message|>{continued}"
    return prepare_answer(
        formats,
        TOKENIZER,
        template=FAMILY.template,
        prompt=f"<|start|>user<|message|>Add.<|end|><|start|>assistant{begun}",
        continued=continued,
        tools=ToolSet.of(TOOLS if tool_choice != "none" else None),
        tool_choice=tool_choice,
        grammar=grammar,
    )


def is_accepted(answer: Answer, text: str) -> bool:
    """Whether the grammar allows an answer that consists of this text."""
    assert answer.grammar is not None
    constraint = constrain(answer.grammar, TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_token_ids=(EOS,))
    for token_id in [*TOKENIZER.encode(text, add_special_tokens=False), EOS]:
        bits = np.unpackbits(constraint.masks(())[0].view(np.uint8), bitorder="little")
        if not bits[token_id]:
            return False

        if token_id != EOS:
            constraint.advance([token_id])
    return True


def parts_of(answer: Answer, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, text and calls of an answer with this text, as its tokens become text."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    shown = TOKENIZER.detokenizer(answer.marker_ids).push(ids)
    if answer.splitter is None:
        return "", shown, []

    part = answer.splitter.push(shown) + answer.splitter.flush()
    return part.reasoning, part.text, [(call.name, call.arguments) for call in part.tool_calls]


@pytest.mark.parametrize("choice", ["add", "required", "auto"])
def test_calls_of_harmony_come_after_the_message_that_is_continued(choice: str) -> None:
    def new() -> Answer:
        grammar = OBJECT if choice == "auto" else None
        return answer_of(BOTH, continued="I add:", tool_choice=choice, grammar=grammar)

    call = f"<|end|><|start|>assistant{CALL}"
    assert is_accepted(new(), call) and not is_accepted(new(), CALL)
    assert parts_of(new(), call) == ("", "", ADDED)
    thought = f"<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.{call}"
    assert is_accepted(new(), thought)
    assert parts_of(new(), thought) == ("Hm.", "", ADDED)
    assert is_accepted(new(), '{"a": 1}') == (choice == "auto")


@pytest.mark.parametrize("has_tools", [True, False])
def test_part_of_harmony_without_a_format_is_text_without_markers(has_tools: bool) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    answer = f"{thought}<|channel|>final<|message|>It is."
    choice = "auto" if has_tools else "none"
    no_reasoning = detect_formats(FAMILY.template, reasoning_format=None)
    assert parts_of(answer_of(no_reasoning, tool_choice=choice), answer) == ("", "Hm.\nIt is.", [])
    if has_tools:
        assert parts_of(answer_of(no_reasoning), thought + CALL) == ("", "Hm.", ADDED)
    no_calls = detect_formats(FAMILY.template, tool_format=None)
    assert parts_of(answer_of(no_calls, tool_choice=choice), answer) == ("Hm.", "It is.", [])
    assert parts_of(answer_of(no_calls), thought + CALL) == ("Hm.", '{"numbers": [1]}', [])
    neither = detect_formats(FAMILY.template, tool_format=None, reasoning_format=None)
    assert answer_of(neither).splitter is None


def test_grammar_of_harmony_allows_reasoning_where_it_has_a_format() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>{"a": 1}'
    for reasoning_format in ("auto", None):
        formats = detect_formats(FAMILY.template, reasoning_format=reasoning_format)
        forced, beside = answer_of(formats, tool_choice="add"), answer_of(formats, grammar=OBJECT)
        for answer, text in ((forced, CALL), (beside, CALL), (beside, final)):
            assert is_accepted(answer, text)
            assert is_accepted(answer, thought + text) == (reasoning_format is not None)


@pytest.mark.parametrize("name", ["tool_format", "reasoning_format"])
def test_no_other_format_is_taken_beside_harmony(name: str) -> None:
    other = {"tool_format": "hermes", "reasoning_format": "think"}
    with pytest.raises(ConfigError, match="chat template in Harmony") as caught:
        detect_formats(FAMILY.template, **{name: other[name]})
    assert caught.value.field == name
    assert detect_formats(FAMILY.template, **other) == AnswerFormats(tools="hermes", reasoning="think")


QWEN = FAMILIES["qwen3_coder"]


@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        '{"a": "<tool_call>\\n<function=add>\\n</function>"}',
        '{"a": "<function=add></function></tool_call>"}',
        '{"a": "<tool_call>{\\"name\\": \\"add\\"}"}',
        '{"a": "b</think>c"}',
        '"<think>a</think>"',
    ],
)
def test_text_that_a_grammar_describes_stays_whole(text: str, has_tools: bool) -> None:
    """Markers in its strings are no markers."""
    splitter = prepare_answer(
        AnswerFormats(tools="qwen3_coder", reasoning="think"),
        family_tokenizer(QWEN),
        template=QWEN.template,
        prompt="<|im_start|>assistant\n<think>\n",
        continued=None,
        tools=ToolSet.of(TOOLS if has_tools else None),
        tool_choice="auto" if has_tools else "none",
        grammar=JsonSchema({"type": ["object", "string"]}),
    ).splitter
    assert splitter is not None
    parts = [*map(splitter.push, text), splitter.flush()]
    assert "".join(part.text for part in parts) == text
    assert not any(part.tool_calls or part.reasoning for part in parts)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "harmony"])
def test_calls_beside_a_grammar_are_found(name: str) -> None:
    family = FAMILIES[name]
    formats = detect_formats(family.template)
    for reply in family.replies:
        if reply.calls and not (reply.text or reply.reasoning):
            splitter = formats.splitter(ToolSet.of(TOOLS), is_constrained=True)
            part = splitter.push(reply.raw) + splitter.flush()
            assert tuple((call.name, call.arguments) for call in part.tool_calls) == reply.calls
