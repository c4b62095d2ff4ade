"""Chat templates: rendered as by transformers, in a sandbox with bounded work."""

from __future__ import annotations

import enum
import threading
from collections import UserDict, UserList
from datetime import datetime
from types import MappingProxyType
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from drift_sdk._plain_data import MAX_DEPTH
from drift_sdk.errors import ModelLoadError, RequestError
from drift_sdk.text import sandbox
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


def test_depth_of_messages_does_not_depend_on_the_version_of_python() -> None:
    place = 2  # of the content: in a message, in a list
    assert render("x", [{"role": "tool", "content": nested(MAX_DEPTH - place)}]) == "x"
    with pytest.raises(RequestError, match=f"nested deeper than {MAX_DEPTH} levels"):
        render("x", [{"role": "tool", "content": nested(MAX_DEPTH - place + 1)}])


def test_sequences_computed_without_end_are_rejected() -> None:
    for length in (10**9, 10**30):
        with pytest.raises(RequestError, match="messages=.*: expected plain data"):
            render("x", [{"role": "user", "content": range(length)}])


LOOP = "{% for i in range(99999) %}"
DOUBLED = "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
DOUBLED_TUPLE = DOUBLED.replace("[", "(").replace("]", ",)")
DEEP_LIST = "{% set ns = namespace(s=range(9999) | list) %}" + "{% set ns.s = [ns.s] %}" * 300
NESTED_TUPLE = (
    "{% set ns = namespace(s=(1,)) %}{% for i in range(9999) %}{% set ns.s = (ns.s,) %}{% endfor %}"
)


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
        "{{ [1] | slice(100000) | list | length }}" * 3,
        "{{ [1, 2] | batch(100000, 'x') | list | length }}" * 3,
        "{{ range(9999) | list" + " | select" * 30 + " | list | length }}",
        "{{ [1] | map(attribute='a.' * 300000 ~ 'a', default={}) | list }}",
        "{{ ('a' * 100000) | replace(new='b' * 100000, old='a') }}",
        "{{ ('{:>99999}' * 1000).format(*range(1000)) }}",
        "{{ ('%99999d' * 1000) % 1 }}",
        "{{ ('{a}' * 100000).format_map({'a': 'x' * 10000}) }}",
        "{{ ([''] * 100000) | join(['x' * 100000]) }}",
        "{{ ('a' * 100000) | replace('a', ['x' * 100000]) }}",
        "{% set all = range(9999) %}" + LOOP + "{% set found = 'a' in all %}{% endfor %}",
        LOOP + "{% set d = {" + ",".join(f"{n * (2**61 - 1)}: 1" for n in range(999)) + "} %}{% endfor %}",
        DOUBLED + "{{ raise_exception(ns.s) }}",
        DOUBLED + "{{ ns.s is lower }}",
        "{{ [] | sort(attribute='a,' * 500000) }}",
        "{% for c in 'a' * 1000000 %}{{ ''.format(*loop) }}{% endfor %}",
        "{{ range(0, 9999 * 2**61, 2**61 - 1) | unique | list }}",
        "{{ dict(range(0, 9999 * 2**61, 2**61 - 1) | batch(2)) }}",
        "{{ namespace(range(0, 9999 * 2**61, 2**61 - 1) | batch(2)) }}",
        DOUBLED + "{{ {'a': ns.s}.items() }}",
        DOUBLED + "{{ [ns.s].index(ns.s[0]) }}",
        DOUBLED + "{% for i in [1] %}{{ loop.changed(ns.s) }}{% endfor %}",
        DOUBLED_TUPLE + "{{ {ns.s: 1} }}",
        DOUBLED_TUPLE + "{{ {}[ns.s] }}",
        DOUBLED_TUPLE + "{{ {}.get(ns.s) }}",
        DOUBLED_TUPLE + "{{ dict([[ns.s, 1]]) }}",
        NESTED_TUPLE + "{{ {ns.s: 1} }}",
        NESTED_TUPLE + "{{ {}[ns.s] }}",
        NESTED_TUPLE + "{{ [ns.s] | unique | list }}",
        NESTED_TUPLE + "{{ [{}] | map(attribute=ns.s) | list }}",
        "{% set all = range(9999) | list %}" + LOOP + "{% set c = cycler(*all) %}{% endfor %}",
        "{% set all = range(9999) | list %}" + LOOP + "{{ ''.format(*all) }}{% endfor %}",
        "{{ ('a ' * 1000000).split() | length }}",
        "{{ ('a,' * 1000000).split(',') | length }}",
        "{{ ('\n' * 1000000).splitlines() | length }}",
        "{{ ('a' * 1000000) | list | length }}",
        "{{ ''.join('a' * 1000000) | length }}",
        "{{ ('a' * 100000).rfind('ab' ~ 'a' * 5000) }}",
        "{{ ('a' * 100000).strip('b' * 5000 ~ 'a') }}",
        "{{ ('a' * 100000) | trim('b' * 5000 ~ 'a') }}",
        LOOP + "{% set a = 1 %}" * 1000 + "{% endfor %}",
        "{% block b %}" + "{% set a = 1 %}" * 999 + "{% endblock %}" + LOOP + "{{ self.b() }}{% endfor %}",
        DEEP_LIST + "{{ ns.s | tojson(indent=16) }}",
    ],
)
def test_expensive_template_exceeds_the_step_limit(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 50_000)  # to keep the test short
    with pytest.raises(RequestError, match=r"chat template .* (more than \d+ |a width that is)"):
        render(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 5 | round(-20000000 * messages | length) }}", "rounds to a precision"),
        ("{{ 1.5 | round(3000000, 'ceil') }}", "rounds to a precision"),
        ("{{ range(9) | map('round', 3000000) | list }}", "rounds to a precision"),
        ("{{ [[]] | sum(start=[0]) }}", "does not start with a number"),
        ("{{ [[]] | sum(none, [0]) }}", "does not start with a number"),
        ("{{ ['%1000000000d'] | format(1) }}", "a value that is not text"),
        ("{{ [1] | tojson(indent='x') }}", "expected an indent from 0 to 16"),
        ("{{ [1] | tojson(indent=17) }}", "expected an indent from 0 to 16"),
        ("{{ [1] | tojson(separators=('x' * 99, ':')) }}", "expected separators of 16"),
        ("{{ [1] | tojson(separators=([1], ':')) }}", "expected separators that are text"),
        ("{{ strftime_now('%d' * 999) }}", "expected a format of 256"),
        ("{% for i in [1, 2] %}{{ '{0.nextitem}'.format(loop) }}{% endfor %}", "reads a LoopContext as text"),
        ("{{ '{0.current}'.format(cycler(1)) }}", "reads a Cycler as text"),
        ("{% macro m() %}{% endmacro %}{{ [m] | join }}", "reads a Macro as text"),
        ("{{ {1: 2}.items() - [] }}", "subtracts values that are not numbers"),
        ("{{ (5).to_bytes(3000000000, 'little') }}", "'to_bytes' of 'int' object is unsafe"),
        ("{{ (1.5).hex() }}", "'hex' of 'float' object is unsafe"),
        ("{{ 'a'.encode() }}", "'encode' of 'str' object is unsafe"),
        ("{{ 'a'.expandtabs(10**9) }}", "'expandtabs' of 'str' object is unsafe"),
        ("{{ 'a'.translate({97: 'x'}) }}", "'translate' of 'str' object is unsafe"),
        ("{{ ('a' | escape).unescape() }}", "'unescape' of 'Markup' object is unsafe"),
        ("{{ dict.fromkeys([1]) }}", "'fromkeys' of 'type' object is unsafe"),
        ("{{ dict.update(messages[0], {}) }}", "'update' of 'type' object is unsafe"),
        ("{{ (messages | map('string')).send(none) }}", "'send' of 'generator' object is unsafe"),
        ("{{ {}.items().mapping.copy }}", "'mapping' of 'dict_items' object is unsafe"),
        ("{{ messages[0].keys().isdisjoint([]) }}", "'isdisjoint' of 'dict_keys' object is unsafe"),
        ("{{ messages[0] | attr('popitem')() }}", "popitem"),
    ],
)
def test_calls_and_arguments_without_bounds_are_rejected(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=f"chat template rejected them: .*{reason}"):
        render(source)


@pytest.mark.parametrize("name", sorted(sandbox.SLOW_FILTERS))
def test_slow_filters_do_not_exist(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"No filter named '{name}'"):
        render(f"{{{{ 'x' | {name} }}}}")


def test_text_is_not_escaped_for_html() -> None:
    with pytest.raises(ModelLoadError, match="escapes text for HTML"):
        render("{% autoescape true %}{{ messages[0].content }}{% endautoescape %}")


def test_compilation_has_a_step_limit_and_a_source_limit() -> None:
    """Constant expressions that take too many steps are left to the render, which rejects them."""
    with pytest.raises(RequestError, match="more than"):
        render("{{ 'x' | center(30000000) | length }}" * 20)
    with pytest.raises(ModelLoadError, match="expected at most 262144"):
        render("x" * (sandbox.MAX_SOURCE_CHARS + 1))


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m(n) %}{{ 'x'.format(m(n ~ 1)) }}{% endmacro %}{{ m(0) }}",
        "{% block b %}{{ self.b() }}{% endblock %}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}",
    ],
)
def test_nested_calls_are_rejected_before_a_small_stack_overflows(source: str) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            render(source)
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert "it nests more than 64 calls" in str(errors[0])


def test_int_returns_the_default_for_long_numbers() -> None:
    assert render("{{ ('f' * 5000) | int(7, 16) }} {{ '12' | int }} {{ 'f' | int(base=16) }}") == "7 12 15"


def test_formatted_text_may_contain_long_numbers_and_braces() -> None:
    messages = [{"role": "user", "content": "{1000000} %*d {{"}]
    source = "{{ '%s' % messages[0].content }}{{ '{}'.format(messages[0].content) }}"
    assert render(source, messages) == "{1000000} %*d {{" * 2


IDIOMS = [
    "{{ messages[0].content.strip().split('</think>')[-1].lstrip('\n').rstrip() | upper }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}",
    "{{ messages | rejectattr('role', 'in', ['tool', 'system']) | list | length }}",
    "{% for m in messages | reverse %}{{ loop.cycle('a', 'b') }}{{ m.role | title }}{% endfor %}",
    "{% for k, v in messages[0].items() | sort if k != 'x' %}{{ k ~ '=' ~ v }}{% endfor %}",
    "{% for k, v in messages[0] | dictsort %}{{ k }}{{ loop.changed(v) }}{% endfor %}",
    "{% for k, v in messages[0] | items %}{{ loop.last }}{{ loop.nextitem }}{{ k }}{% endfor %}",
    "{% for group in messages | groupby('role') %}{{ group.grouper }}{{ group.list | length }}{% endfor %}",
    "{{ messages | map(attribute='role') | unique | list }}{{ messages[::-1] | first }}",
    "{{ messages[0].get('content', 'none') }}{{ messages[0].keys() | list }}{{ dict(a=1).values() | list }}",
    "{{ 'role: %s, %d' | format(messages[0].role, 7) }}{{ '%s!' % messages[0].role }}",
    "{{ '{:>5}|{}|{a}'.format('x', 2, a='b') }}{{ 'a,b'.partition(',') }}{{ 'a b'.rsplit(' ', 1) }}",
    "{{ 3.14159 | round(2) }}{{ 7 | round }}{{ 2.5 | round(0, 'floor') }}{{ [1, 2.5] | sum }}",
    "{{ messages | sum(attribute='n', start=1) if messages[0].n is defined else 'none' }}",
    "{{ messages[0] | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':')) }}",
    "{{ range(7) | batch(3) | list }}{{ range(7) | slice(3, 'x') | list }}{{ 'abc' | list }}",
    "{{ 'x' | indent(4, true) }}{{ 'a b c' | replace('b', 1) | truncate(20) | center(9) }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}",
    "{% macro m(a) %}{{ a }}{{ caller() }}{% endmacro %}{% call m(3) %}c{% endcall %}",
    "{% set d = {'a': 1, ('b' ~ 'c'): 2} %}{{ d['bc'] }}{{ d.a - 1 }}{{ d.copy() }}{{ [1, 2].index(2) }}",
    "{% set j = joiner(', ') %}{% set c = cycler(1, 2) %}{{ j() }}{{ j() }}{{ c.next() }}{{ c.current }}",
    "{% block b %}{{ messages | length }}{% endblock %}{{ self.b() }}",
    "{% for m in [[1], [2, [3]]] recursive %}{{ loop(m) if m is iterable else m }}{% endfor %}",
]


@pytest.mark.parametrize("source", IDIOMS)
def test_idioms_of_templates_render_as_by_transformers(source: str) -> None:
    for chat in CHATS:
        [expected], _ = render_jinja_template([chat], chat_template=source)
        assert render(source, chat) == expected


@pytest.mark.parametrize("source", [CHATML, LLAMA3, QWEN], ids=["chatml", "llama3", "qwen"])
def test_long_conversation_uses_less_than_a_quarter_of_the_steps(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": "word " * 40} for i in range(10_000)]
    monkeypatch.setattr(sandbox, "MAX_STEPS", sandbox.MAX_STEPS // 4)
    assert len(render(source, messages, tools=TOOLS * 100)) > 2_000_000
