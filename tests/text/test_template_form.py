"""Conversations in the form that a chat template takes, as small conversations show it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from drift_sdk.errors import RequestError
from drift_sdk.text import sandbox
from drift_sdk.text.chat import ChatTemplate
from drift_sdk.text.tools import ToolSet

USER = {"role": "user", "content": "Rome?"}
ARGUMENTS = {"city": "Rome", "days": 2}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

NATIVE = (
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text or part.thinking }}{% endfor %}{% endif %};"
)


def each_message(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}"


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, bos_token=None, eos_token=None, **options)


def calling(arguments: object, **fields: object) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "abcdefgh1", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{% if m.content is string %}{{ m.content }}{% endif %};", "one\ntwo;"),
        ("{{ m.content }};", "one\ntwo;"),
        ("{{ m.content | trim }};", "one\ntwo;"),
        ("{{ m.content + ';' }}", "one\ntwo;"),
        ("{{ m.content if m.content is string else m.content | tojson }};", "one\ntwo;"),
        ("{{ m.content if m.content is string else raise_exception('no') }};", "one\ntwo;"),
        (NATIVE, "onetwo;"),
        ("{% for part in m.content %}{{ part.text }},{% endfor %};", "one,two,;"),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %};",
            "one\ntwo;",
        ),
    ],
)
def test_text_parts_become_text_in_every_role(body: str, expected: str, role: str) -> None:
    assert template(each_message(body)).render([{"role": role, "content": PARTS}]) == expected


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("content", [PARTS, "one\ntwo"])
def test_text_becomes_the_one_part_that_a_template_reads(content: object, role: str) -> None:
    source = each_message("{{ m.content[0].text + ';' }}")
    assert template(source).render([{"role": role, "content": content}]) == "one\ntwo;"


def test_a_role_may_take_parts_while_another_takes_text() -> None:
    source = each_message(
        "{% if m.role == 'user' %}{% for part in m.content %}<{{ part.text }}>{% endfor %}"
        "{% else %}{{ '(' + m.content + ')' }}{% endif %}"
    )
    messages = [{"role": "system", "content": PARTS}, {"role": "user", "content": PARTS}, USER]
    assert template(source).render(messages) == "(one\ntwo)<one><two><Rome?>"


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "images are not supported by this model"),
        ({"type": "image"}, "images are not supported by this model"),
        ({"type": "input_audio", "input_audio": {}}, "audio is not supported by this model"),
        ({"type": "video_url", "video_url": {}}, "videos are not supported by this model"),
        ({"type": "file", "file": {}}, "files are not supported by this model"),
        ({"type": "refusal", "refusal": "x"}, "parts of the type 'refusal' are not supported"),
        ({"type": "text"}, "expected {"),
        ({"type": "text", "text": 7}, "expected {"),
        ({"text": "x"}, "expected {"),
        ("x", "expected {"),
        (7, "expected {"),
    ],
)
@pytest.mark.parametrize(
    "body", ["{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"]
)
def test_parts_of_other_kinds_are_rejected(body: str, part: object, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        template(each_message(body)).render([USER, {"role": "user", "content": [PARTS[0], part]}])
    assert (caught.value.field, caught.value.value) == ("messages[1].content[1]", part)
    assert reason in str(caught.value)


def test_thoughts_are_left_to_a_template_that_takes_parts() -> None:
    thought = {"type": "thinking", "thinking": "Hm."}
    messages = [USER, {"role": "assistant", "content": [thought, PARTS[0]]}]
    assert template(each_message(NATIVE)).render(messages) == "Rome?;Hm.one;"
    with pytest.raises(RequestError, match="parts of the type 'thinking' are not supported"):
        template(each_message("{{ m.content }}")).render(messages)


def test_sequences_of_parts_and_calls_may_be_tuples() -> None:
    messages = [{"role": "user", "content": tuple(PARTS)}, calling(COMPACT)]
    messages[1]["tool_calls"] = tuple(messages[1]["tool_calls"])
    assert template(each_message("{{ m.content }}" + SHOWN_CALLS)).render(messages) == f"one\ntwo;{SPACED};"


def test_empty_parts_are_empty_text() -> None:
    body = "{{ m.content | length if m.content is string else m.content }}"
    for content, expected in (([], "0"), ([{"type": "text", "text": ""}], "0"), (None, "0")):
        assert template(each_message(body)).render([{"role": "assistant", "content": content}]) == expected


def test_arguments_that_cannot_be_written_as_text_are_rejected() -> None:
    source = each_message("{% for call in m.tool_calls %}" + SHOWS_ARGUMENTS["text"] + "{% endfor %}")
    with pytest.raises(RequestError) as caught:
        template(source).render([USER, calling({"a": 10**5000})])
    assert caught.value.field == "messages"


def test_images_from_tools_are_rejected() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(RequestError, match="images are not supported"):
        template(each_message("{{ m.content }}")).render(
            [USER, {"role": "tool", "content": [PARTS[0], image]}]
        )


@pytest.mark.parametrize(
    "data", [[1, 2], [], ["a"], [{"type": "file", "name": "a.txt"}], [{"type": "text"}], {"type": "text"}]
)
def test_other_data_from_tools_is_left_to_the_template(data: object) -> None:
    shown = each_message("{{ m.content if m.content is string else m.content | tojson }}")
    assert template(shown).render([USER, {"role": "tool", "content": data}]) == "Rome?" + json.dumps(data)


SHOWS_ARGUMENTS = {
    "json": "{{ call.function.arguments | tojson }}",
    "items": "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}",
    "text": "{{ '' + call.function.arguments }}",
    "printed": "{{ call.function.arguments }}",
    "either": "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
    "checked": "{% if call.function.arguments is not mapping %}{{ raise_exception('no mapping') }}{% endif %}"
    "{{ call.function.arguments | tojson }}",
}
COMPACT = '{"city":"Rome","days":2}'
SPACED = '{"city": "Rome", "days": 2}'


@pytest.mark.parametrize("name", SHOWS_ARGUMENTS)
@pytest.mark.parametrize("given", [ARGUMENTS, COMPACT, "", None, "{}"])
def test_arguments_have_the_form_that_the_template_takes(name: str, given: object) -> None:
    source = each_message("{% for call in m.tool_calls %}" + SHOWS_ARGUMENTS[name] + "{% endfor %}")
    prompt = template(source).render([USER, calling(given)])
    if name == "items":
        assert prompt == ("city=Rome;days=2;" if given in (ARGUMENTS, COMPACT) else "")
    elif given in (ARGUMENTS, COMPACT):
        is_verbatim = given == COMPACT and name in ("text", "printed")
        assert prompt == (COMPACT if is_verbatim else SPACED)
    else:
        assert prompt == "{}"


def test_missing_arguments_are_empty() -> None:
    source = each_message("{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}")
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "weather"}}]}
    assert template(source).render([USER, message]) == "{}"


@pytest.mark.parametrize("name", SHOWS_ARGUMENTS)
@pytest.mark.parametrize(
    "given", ["Rome", "[1]", '"{}"', "{'a': 1}", '{"a": 1', "NaN", [1], 7, "[" * 100_000]
)
def test_arguments_that_are_no_object_are_rejected(name: str, given: object) -> None:
    source = each_message("{% for call in m.tool_calls %}" + SHOWS_ARGUMENTS[name] + "{% endfor %}")
    with pytest.raises(RequestError) as caught:
        template(source).render([USER, calling(given)])
    assert caught.value.field == "messages[1].tool_calls[0].function.arguments"
    assert caught.value.value == given and "JSON object" in str(caught.value)


def test_the_given_messages_do_not_change() -> None:
    messages = [USER, calling(COMPACT, content=None), {"role": "tool", "content": PARTS}]
    before = json.dumps(messages)
    template(each_message("{{ m.content }}")).render(messages)
    assert json.dumps(messages) == before


NONE_TESTED = "{% if m.content is none %}(none){% endif %}"
SHOWN_CALLS = "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %};"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (NONE_TESTED + SHOWN_CALLS, ";(none){};"),
        (NONE_TESTED + "{{ m.content }}" + SHOWN_CALLS, "Rome?;(none)None{};"),
        (NONE_TESTED + "{{ m.content + '' }}" + SHOWN_CALLS, "Rome?;{};"),
        (NONE_TESTED + "{{ 'think' if '</think>' in m.content }}" + SHOWN_CALLS, ";{};"),
        # The text is used only in the turn that is not finished, or only in earlier ones.
        (
            NONE_TESTED + "{{ m.content + '' if loop.index0 > 2 and m.tool_calls }}" + SHOWN_CALLS,
            ";{};",
        ),
        (
            NONE_TESTED + "{{ m.content + '' if m.tool_calls and messages | length > 4 }}" + SHOWN_CALLS,
            ";{};",
        ),
        # Only a content of None leads to the calls.
        ("{% if m.content is none %}" + SHOWN_CALLS + "{% else %}{{ m.content }}.{% endif %}", "Rome?.{};"),
    ],
)
@pytest.mark.parametrize("content", [None, "", "missing"])
def test_content_beside_calls_is_taken(body: str, expected: str, content: str | None) -> None:
    message = calling({}, content=content)
    if content == "missing":
        del message["content"]
    assert template(each_message(body)).render([USER, message]) == expected


def test_calls_that_are_left_out_are_known() -> None:
    tools = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    assert not template(tools + each_message("{{ m.content }}")).shows_calls
    assert template(tools + each_message("{{ m.content }}" + SHOWN_CALLS)).shows_calls
    assert template(tools + each_message("{{ raise_exception('no') }}")).shows_calls  # the request fails


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ m.content + '<' + m.tools + '>' }}", f"<{json.dumps(TOOLS)}>"),
        ("{{ m.content }}<{{ m.tools | tojson }}>", f"<{json.dumps(TOOLS)}>"),
        ("<{% for tool in m['tools'] %}{{ tool.function.name }}{% endfor %}>", "<weather>"),
    ],
)
def test_tools_are_given_where_the_template_reads_them(shown: str, expected: str) -> None:
    source = each_message(
        "{% if m.role == 'system' and m.tools %}" + shown + "{% else %}{{ m.content }}{% endif %};"
    )
    found = template(source)
    assert found.uses_tools
    system = {"role": "system", "content": ""}
    assert (
        found.render([system, USER], tools=TOOLS) == found.render([USER], tools=TOOLS) == f"{expected};Rome?;"
    )
    assert found.render([system, USER]) == ";Rome?;" and found.render([USER], tools=[]) == "Rome?;"
    own = {"role": "system", "content": "", "tools": TOOLS if expected == "<weather>" else "own"}
    assert ("weather" in found.render([own, USER], tools=TOOLS)) == (expected == "<weather>")


def test_tool_format_is_known_by_the_markers_of_tools() -> None:
    shown = "{% if m.tools %}{{ '<|tool|>' + m.tools + '<|/tool|>' }}{% endif %}{{ m.content }}"
    found = template(each_message(shown))
    assert found.uses_tools and not found.shows_calls
    assert found.formats.tools == found.forced_formats.tools == "phi4_mini"


def test_tools_of_the_variable_are_not_given_twice() -> None:
    source = "{{ tools | length if tools }}" + each_message("{{ m.tools }}{{ m.content }}")
    assert (
        template(source + "{{ tools | tojson }}").render([USER], tools=TOOLS) == f"1Rome?{json.dumps(TOOLS)}"
    )
    assert not template(each_message("{{ m.content }}")).uses_tools


JSON_CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'


def writing(call: str, thought: str = "", opened: str = "") -> str:
    """A template that writes calls and reasoning like this."""
    return (
        "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>\n"
        + thought
        + "{{ m.content }}{% for call in m.tool_calls %}"
        + call
        + "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
        + opened
        + "{% endif %}"
    )


@pytest.mark.parametrize("opened", ["", "<think>\n", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize(
    ("call", "tool_format"),
    [
        (f"<tool_call>\n{JSON_CALL}\n</tool_call>", "hermes"),
        (f"{{# <function= #}}<tool_call>\n{JSON_CALL}\n</tool_call>", "qwen3_coder"),  # which reads both
        (f"{{# <tool_call> #}}[TOOL_CALLS][{JSON_CALL}]", "mistral"),
        (f"{{# <function= [TOOL_CALLS] #}}<|tool_call|>{JSON_CALL}<|/tool_call|>", "phi4_mini"),
        ("<tool_call>{{ call.function.name }}|{{ call.function.arguments | tojson }}</tool_call>", None),
        ("<function={{ call.function.name }}>{{ call.function.arguments | tojson }}</function>", None),
        ("<|call|>{{ call.function.name }} {{ call.function.arguments | tojson }}", None),
    ],
)
def test_tool_format_reads_the_calls_of_its_template(call: str, tool_format: str | None, opened: str) -> None:
    found = template(writing(call, opened=opened))
    assert found.formats.tools == tool_format
    assert found.reads_calls == (tool_format is not None)
    assert found.forced_formats.tools == (tool_format or "json")
    text = found.render([USER, calling(ARGUMENTS)], add_generation_prompt=False).rpartition(
        "<|assistant|>\n"
    )[2]
    splitter = found.formats.splitter(ToolSet.of(TOOLS))
    parts = splitter.push(text), splitter.flush()
    calls = [each.arguments for part in parts for each in part.tool_calls]
    assert calls == ([ARGUMENTS] if tool_format else [])


def test_named_formats_are_not_compared_with_the_template() -> None:
    source = writing("<|call|>{{ call.function.name }}")
    assert template(source, tool_format="hermes").formats.tools == "hermes"
    none = template(source, tool_format=None)
    assert none.formats.tools is None and none.reads_calls


@pytest.mark.parametrize("opened", ["", "<think>\n", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize(
    ("thought", "reasoning_format"),
    [
        ("{# <response> #}<think>{{ m.reasoning_content }}</think>\n\n", "think"),
        ("{# <response> #}<think>\n{{ m.reasoning_content }}\n</think>\n\n", "think"),
        ("{# <think> #}[THINK]{{ m.reasoning_content }}[/THINK]", "mistral"),
        ("<think>{{ m.reasoning_content }}</think><response>", "granite"),
    ],
)
def test_reasoning_format_reads_the_reasoning_of_its_template(
    thought: str, reasoning_format: str, opened: str
) -> None:
    shown = "{% if m.reasoning_content %}" + thought + "{% endif %}"
    found = template(writing("", thought=shown, opened=opened if "<think>" in thought else ""))
    assert found.formats.reasoning == reasoning_format


def test_trying_a_template_is_bounded_by_the_budget_of_one_render(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[sandbox.Budget] = []

    class Recorded(sandbox.Budget):
        def __init__(self, num_steps: int) -> None:
            super().__init__(num_steps)
            budgets.append(self)

    monkeypatch.setattr(sandbox, "MAX_STEPS", 200_000)  # to keep the test short
    monkeypatch.setattr(sandbox, "Budget", Recorded)
    slow = template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    assert len(budgets) == 2 and budgets[1].num_left < 0  # of compiling, and of all renders
    with pytest.raises(RequestError, match="more than 200000 steps"):
        slow.render([USER])
    budgets.clear()
    template(writing(f"<tool_call>\n{JSON_CALL}\n</tool_call>"))
    assert budgets[1].num_left > 150_000
