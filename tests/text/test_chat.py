"""Chat templates: rendered as by transformers, in a sandbox with bounded work."""

from __future__ import annotations

import enum
from collections import UserDict, UserList
from datetime import datetime
from types import MappingProxyType
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from drift_sdk.errors import ModelLoadError, RequestError
from drift_sdk.text import template_budget
from drift_sdk.text.chat import ChatTemplate

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.role == 'assistant' %}
{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}
{{- message.content }}
    {%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- set ns = namespace(system="") %}
{%- if messages[0]["role"] == "system" %}
    {%- set ns.system = messages[0]["content"] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

{% if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{% endif %}
Today: {{ date_string }}
{% if tools is not none %}
    {%- for tool in tools %}
{{ tool | tojson(indent=4) }}

    {%- endfor %}
{% endif %}
{{ ns.system }}<|eot_id|>
{%- for message in messages %}
    {%- if not message["role"] in ["user", "assistant", "tool"] %}
        {%- continue %}
    {%- endif %}
<|start_header_id|>{{ message["role"] }}<|end_header_id|>

{{ message["content"] if message["content"] is string else message["content"] | tojson }}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}
"""

QWEN = """\
{%- macro turn(role, text) %}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and message.content is string %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{ call.function.arguments }}
            {%- else %}{{ call.function.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' and '</think>' in message.content and loop.index0 < ns.last %}
        {{- turn('assistant', message.content.split('</think>')[-1].lstrip('\\n')) }}
    {%- else %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Météo <b>à</b> 'Köln' & 東京",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "a": {"enum": [1, None]}},
            },
        },
    }
]
CALL = {"function": {"name": "weather", "arguments": {"z": 1, "city": "Köln <&> 東京"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi there 🎉 <b>&</b>"}],
    [
        {"role": "system", "content": "  Be brief.  "},
        {"role": "user", "content": "One?\n"},
        {"role": "assistant", "content": "<think>hm</think>\n\n 1 "},
        {"role": "user", "content": "Two?"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"temp": 21}'},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("args", [{}, {"enable_thinking": False, "date_string": "1 Jan"}])
@pytest.mark.parametrize("source", [CHATML, LLAMA3, QWEN], ids=["chatml", "llama3", "qwen"])
def test_prompt_equals_that_of_transformers(
    source: str,
    chat: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    args: dict[str, Any],
) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    [expected], _ = render_jinja_template(
        [chat],
        tools=tools,
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
        **args,
    )
    prompt = template.render(
        chat, tools=tools, template_args=args, add_generation_prompt=add_generation_prompt
    )
    assert prompt == expected
    assert template.render(chat, tools=tools, template_args=args) == template.render(
        chat, tools=tools, template_args=args, add_generation_prompt=True
    )


USER = [{"role": "user", "content": "x"}]


def render(source: str, messages: Any = USER, **args: Any) -> str:
    return ChatTemplate(source, bos_token=None, eos_token="</s>").render(messages, **args)


def test_block_lines_leave_no_whitespace() -> None:
    source = "{% for m in messages %}\n    {% if m.role %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n"
    [expected], _ = render_jinja_template([USER], chat_template=source)
    assert render(source) == expected == "user\n"


def test_missing_token_renders_as_nothing() -> None:
    assert render("[{{ bos_token }}{{ eos_token }}]") == "[</s>]"


def test_tojson_keeps_order_html_and_unicode() -> None:
    assert (
        render("{{ x | tojson }}", template_args={"x": {"b": "<é>", "a": "'"}}) == '{"b": "<é>", "a": "\'"}'
    )
    assert render("{{ x | tojson(indent=2) }}", template_args={"x": {"b": 1}}) == '{\n  "b": 1\n}'


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_generation_block_has_its_own_scope() -> None:
    source = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    [expected], _ = render_jinja_template([USER], chat_template=source)
    assert render(source) == expected == "21"


class Role(enum.StrEnum):
    USER = "user"


class Text(str):
    """A string with a method that a template could call."""

    def leak(self) -> str:
        return "leaked"


@pytest.mark.parametrize(
    "messages",
    [
        ({"role": "user", "content": "x"},),
        UserList([MappingProxyType({"role": "user", "content": "x"})]),
        [UserDict(role=Role.USER, content=Text("x"))],
    ],
)
def test_messages_may_be_any_sequence_of_mappings(messages: Any) -> None:
    assert render("{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}", messages) == "user:x"


def test_template_receives_plain_data_only() -> None:
    with pytest.raises(RequestError):
        render("{{ messages[0].content.leak() }}", [{"role": "user", "content": Text("x")}])


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% for m in messages %}", "{{ x | no_such_filter }}"]
)
def test_broken_template_raises_model_load_error(source: str) -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate(source, bos_token=None, eos_token=None)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ no_such_name.attribute }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ range(10 ** 9) | length }}",
        "{{ no_such_name | tojson }}",
    ],
)
def test_rendering_failure_raises_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template") as caught:
        render(source)

    assert caught.value.field == "messages"
    assert USER == [{"role": "user", "content": "x"}]


def test_error_contains_the_message_of_raise_exception() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("user", "messages"),
        (None, "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user"}, {"role": 1}], "messages[1]"),
        ([{"role": "user", "content": object()}], "messages"),
    ],
)
def test_malformed_messages_are_rejected_by_field(messages: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        render("x", messages)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"tools": "weather"}, "tools"),
        ({"tools": [print]}, "tools[0]"),
        ({"template_args": {"messages": []}}, "template_args"),
        ({"template_args": {"add_generation_prompt": False}}, "template_args"),
        ({"template_args": {"x": object()}}, "template_args"),
    ],
)
def test_malformed_arguments_are_rejected_by_field(args: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        render("x", **args)

    assert caught.value.field == field


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("args", [[1], "ab", 3, {1: 2, "deep": nested(100_000)}, nested(5000)])
def test_template_args_of_wrong_type_are_rejected(args: Any) -> None:
    with pytest.raises(RequestError) as caught:
        render("x", template_args=args)

    assert caught.value.field == "template_args"


def test_deeply_nested_messages_are_rejected() -> None:
    for depth in (5_000, 100_000):
        with pytest.raises(RequestError, match="messages=.*: expected plain data") as caught:
            render("x", [{"role": "user", "content": nested(depth)}])
        assert caught.value.field == "messages"


LOOP = "{% for i in range(99999) %}"
DOUBLED = "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP * 2 + "x" + "{% endfor %}" * 2,
        LOOP + "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        LOOP + "{{ range(99999) | list | length }}{% endfor %}",
        LOOP + "{{ range(99999) | sum }}{% endfor %}",
        "{% set all = range(99999) | list %}" + LOOP + "{{ all[1:] | length }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
        LOOP + "c" * 100_000 + "{% endfor %}",
        LOOP + "{{ " + repr("c" * 100_000) + " }}{% endfor %}",
        "{% set x %}xx{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
        "{% set ns = namespace(s='x') %}" + LOOP + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}" + LOOP + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        DOUBLED + "{{ ns.s }}",
        DOUBLED + "{{ ns.s | tojson }}",
        DOUBLED + "{{ ns.s == ns.s[0] }}",
        DOUBLED + "{{ 'x'.format(ns.s) }}",
        "{{ 'a' * 10**9 }}",
        "{{ 10 ** (10**9) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x'.center(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ [1] | slice(10**9) | list }}",
        "{{ [1] | batch(10**9, 'x') | list }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000).join(range(99999) | map('string')) }}",
        "{{ ([{'a': 'a' * 1000000}] * 99999) | map(attribute='a') | join }}",
        "{{ ('\\n' * 100000) | indent(100000) }}",
        "{{ [[1]] | tojson(indent=10**9) }}",
        "{{ ('%(a)s' * 100000) % {'a': 'x' * 10000} }}",
        "{{ ([range(99999) | list] * 9999) | sum(start=[]) | length }}",
    ],
)
def test_expensive_template_exceeds_the_step_limit(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_STEPS", 200_000)  # to keep the test short
    with pytest.raises(RequestError, match=r"chat template .* (more than \d+ |a width that is)"):
        render(source)


@pytest.mark.parametrize("source", [CHATML, LLAMA3, QWEN], ids=["chatml", "llama3", "qwen"])
def test_long_conversation_uses_less_than_a_quarter_of_the_steps(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": "word " * 40} for i in range(10_000)]
    monkeypatch.setattr(template_budget, "MAX_STEPS", template_budget.MAX_STEPS // 4)
    assert len(render(source, messages, tools=TOOLS * 100)) > 2_000_000
