"""Answers in chat templates: rendered back, continued, and templates for messages with tools."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import BOTH, FAMILIES, PARIS, TOOLS
from transformers.utils.chat_template_utils import render_jinja_template

from drift_sdk.errors import RequestError
from drift_sdk.results import Completion, Timing, ToolCall, Usage
from drift_sdk.text.chat import ChatTemplate
from drift_sdk.text.tools import ToolSet

USER = {"role": "user", "content": "Weather?"}


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(FAMILIES[name].template, bos_token="<s>", eos_token="</s>")


def completion(text: str, reasoning: str, calls: tuple[tuple[str, dict[str, Any]], ...]) -> Completion:
    return Completion(
        request_id="req-0",
        text=text,
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(name=name, arguments=arguments, id=f"call0000{index}", index=index)
            for index, (name, arguments) in enumerate(calls)
        ),
        token_ids=(),
        finish_reason="stop",
        stop_reason=None,
        usage=Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0),
        timing=Timing(queued_s=0.0, prefill_s=0.0, first_token_s=0.0, decode_s=0.0),
        seed=0,
    )


def test_message_has_the_form_that_templates_take() -> None:
    assert completion("Hi.", "", ()).message() == {"role": "assistant", "content": "Hi."}
    assert completion("", "Hm.", BOTH[:1]).message() == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "get_weather", "arguments": PARIS},
            }
        ],
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_message_is_rendered_as_the_model_would_have_written_it(name: str) -> None:
    """The splitter finds in the rendered message what the message was made of."""
    family, template = FAMILIES[name], template_of(name)
    calls = BOTH[:1] if name in ("llama", "harmony") else BOTH
    for text, reasoning, wanted in (("It is sunny.", "", ()), ("", "", calls), ("", "Is it raining?", calls)):
        message = completion(text, reasoning, wanted).message()
        if reasoning and "message.reasoning_content" not in family.template and name != "harmony":
            continue  # most templates leave earlier reasoning out

        prompt = template.render([USER, message], tools=TOOLS, add_generation_prompt=False)
        before = template.render([USER], tools=TOOLS, add_generation_prompt=False)
        assert prompt.startswith(before)
        answer = prompt[len(before) :]
        for opening in ("<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"):
            answer = answer.removeprefix(opening)
        for opening in (
            "<｜Assistant｜></think>",
            "<｜Assistant｜>",
            "<|start_of_role|>assistant<|end_of_role|>",
            "<|turn>model\n",
        ):
            answer = answer.removeprefix(opening)
        answer = answer.removeprefix("<|assistant|>").removeprefix("<|start|>assistant")
        for end in (
            "<|im_end|>\n",
            "<|eot_id|>",
            "</s>",
            "<｜end▁of▁sentence｜>",
            "<|end_of_text|>\n",
            "<|end|>",
            "<turn|>\n",
        ):
            answer = answer.removesuffix(end)
        splitter = template.formats.splitter(ToolSet.of(TOOLS), prompt="<|start|>assistant")
        parts = [splitter.push(answer), splitter.flush()]
        assert "".join(part.text for part in parts) == text, answer
        assert "".join(part.reasoning for part in parts) == reasoning
        found = [(call.name, call.arguments) for part in parts for call in part.tool_calls]
        assert tuple(found) == wanted, answer


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("content", ["It is", "  It is ", "It is\n"])
def test_continued_prompt_equals_that_of_transformers(name: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    options: dict[str, Any] = {
        "chat_template": FAMILIES[name].template,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    [expected], _ = render_jinja_template([messages], continue_final_message=True, tools=None, **options)
    assert template_of(name).render(messages, continue_final=True) == expected
    assert expected.rstrip().endswith("It is")


@pytest.mark.parametrize(
    "last",
    [
        USER,
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": [{"type": "text", "text": "It"}]},
        {"role": "assistant", "content": "It", "tool_calls": [{}]},
    ],
)
def test_only_text_of_the_assistant_is_continued(last: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        template_of("hermes").render([USER, last], continue_final=True)
    assert caught.value.field == "messages[-1]"


def test_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", bos_token=None, eos_token=None)
    with pytest.raises(RequestError, match="leaves the end of this one out"):
        template.render([USER, {"role": "assistant", "content": "It"}], continue_final=True)


@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_passed_under_the_names_that_templates_read(given: str) -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "x", given: "Hm."}]
    [expected], _ = render_jinja_template([messages], chat_template=source)
    assert ChatTemplate(source, bos_token=None, eos_token=None).render(messages) == expected == "|;Hm.|Hm.;"


@pytest.mark.parametrize("content", [None, "", "missing"])
def test_content_beside_calls_is_what_the_template_takes(content: str | None) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [{"type": "function"}]}
    if content == "missing":
        del message["content"]
    joins = ChatTemplate("{{ messages[0]['content'] + '!' }}", bos_token=None, eos_token=None)
    assert joins.render([message]) == "!"
    for test in ("messages[0]['content'] is none", "messages[0].content is not none"):
        asks = ChatTemplate(f"{{{{ {test} }}}}", bos_token=None, eos_token=None)
        assert asks.render([message]) == str("not" not in test)
        assert asks.render([message | {"tool_calls": []}]) == str("not" in test)
    assert joins.render([message | {"tool_calls": None}]) == "!"
    assert joins.render([{"role": "assistant", "content": "x", "tool_calls": [{}]}]) == "x!"


def test_arguments_become_text_only_where_the_template_joins_them() -> None:
    message = completion("", "", (("add", {"a": "é"}),)).message()
    joins = "{{ 'x' + messages[0].tool_calls[0].function.arguments }}"
    dumps = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    fails = "{{ raise_exception('no ' + messages[0].tool_calls[0].function.name) }}"
    for source, expected in ((joins, 'x{"a": "é"}'), (dumps, '{"a": "é"}')):
        assert ChatTemplate(source, bos_token=None, eos_token=None).render([message]) == expected
    with pytest.raises(RequestError, match="rejected them: no add"):
        ChatTemplate(fails, bos_token=None, eos_token=None).render([message])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": "é"}


def test_template_for_tools_takes_the_place_of_the_default() -> None:
    for_tools = ChatTemplate("{{ tools }}<tool_call>", bos_token=None, eos_token=None)
    template = ChatTemplate("plain", bos_token=None, eos_token=None, with_tools=for_tools)
    assert template.uses_tools
    assert template.for_tools(TOOLS) is for_tools and for_tools.for_tools(TOOLS) is for_tools
    assert template.for_tools(None) is template.for_tools([]) is template
    assert (template.formats.tools, for_tools.formats.tools) == ("json", "hermes")


def test_continued_message_that_is_left_out_or_repeated() -> None:
    """The prompt ends where the last message is rendered last, whatever other messages say."""
    users = "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
    messages = [
        {"role": "user", "content": "x [continued here] y"},
        {"role": "assistant", "content": "ab"},
    ]
    with pytest.raises(RequestError, match="leaves the end of this one out") as caught:
        ChatTemplate(users, bos_token=None, eos_token=None).render(messages, continue_final=True)
    assert caught.value.value == messages[-1]
    for last in ("{{ messages[-1].content }}", "{{ messages[-1].content | trim }}"):
        template = ChatTemplate(f"{last}<{last}>{users}{last}.", bos_token=None, eos_token=None)
        assert template.render(messages, continue_final=True) == "ab<ab>[x [continued here] y]ab"
