"""Model families: chat templates and answers in the formats that they document.

The templates are written for these tests. They render what the tests need of a conversation, in the family's
notation and with its way of taking messages: names of fields, arguments as mappings or as JSON text, checks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from drift_sdk.testing import byte_alphabet
from drift_sdk.text.answers.formats import AnswerFormats
from drift_sdk.text.tokenizer import Tokenizer
from drift_sdk.text.tools import ToolSet


class Reply(NamedTuple):
    """An answer as it is generated, without its end-of-sequence token, and its parts. calls: (name,
    arguments)."""

    raw: str
    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


class Family(NamedTuple):
    """special: texts of special tokens; formats: of tools and of reasoning."""

    template: str
    formats: tuple[str | None, str | None]
    special: tuple[str, ...]
    replies: tuple[Reply, ...]


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "exact": {"type": "boolean"},
            },
            "required": ["city", "unit"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "numbers": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}}
            },
        },
    },
}
TOOLS: list[dict[str, Any]] = [WEATHER, ADD]

PARIS = {"city": "Paris", "unit": "C"}
TRICKY = {"city": 'a"b\\ </tool_call>{[', "unit": "C"}
NUMBERS = {"numbers": [1, 2]}
PARIS_JSON = '{"city": "Paris", "unit": "C"}'
TRICKY_JSON = '{"city": "a\\"b\\\\ </tool_call>{[", "unit": "C"}'
NUMBERS_JSON = '{"numbers": [1, 2]}'


SIZES = (1, 2, 3, 7, 10**9)
"""Lengths of the pieces in which answers arrive."""


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


WEATHER_CALL, ADD_CALL = call("get_weather", PARIS_JSON), call("add", NUMBERS_JSON)
BOTH = (("get_weather", PARIS), ("add", NUMBERS))

HERMES = """\
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nA call is <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if message.content or not loop.first }}{{ '<tool_call>\\n{"name": "' + call.function.name }}
        {{- '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if thinks %}{{ '<think>\\n' }}{% endif %}{% endif %}"""

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and tools is not none %}
        {{- 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.' }}
        {%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}
    {%- endif %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
    {%- else %}{{ message['content'] | trim }}{% endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

PYTHONIC = """\
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and tools %}
        {{- 'Answer with [func_name1(params_name1=params_value1), func_name2(params)].' }}{{ tools | tojson }}
    {%- endif %}
    {%- if message.tool_calls %}{{ '[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- name + '=' + (value | tojson) }}{{ ', ' if not loop.last }}
            {%- endfor %}
            {{- ')' }}{{ ', ' if not loop.last }}
        {%- endfor %}{{ ']' }}
    {%- else %}{{ message['content'] }}{% endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- if tools is not none %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}{{ '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
        {%- endfor %}{{ ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{ message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

MAGISTRAL = """\
{{- bos_token }}{{ '[SYSTEM_PROMPT]Think first: [THINK]...[/THINK][/SYSTEM_PROMPT]' }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.reasoning_content %}{{ '[THINK]' + message.reasoning_content + '[/THINK]' }}{% endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
        {%- endfor %}{{ eos_token }}
    {%- endif %}
{%- endfor %}"""

QWEN3_CODER = HERMES.replace(
    """\
        {{- '\\n' if message.content or not loop.first }}{{ '<tool_call>\\n{"name": "' + call.function.name }}
        {{- '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
""",
    """\
        {{- '\\n' if message.content or not loop.first }}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' }}{{ value if value is string else value | tojson }}
            {{- '\\n</parameter>\\n' }}
        {%- endfor %}{{ '</function>\\n</tool_call>' }}
""",
)

GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|># Tools' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<|user|>' + message.content }}
    {%- elif message.role == 'assistant' %}{{ '<|assistant|>' }}
        {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}
        {%- else %}{{ '</think>' }}{% endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<arg_key>' + name + '</arg_key><arg_value>' }}
                {{- value if value is string else value | tojson }}{{ '</arg_value>' }}
            {%- endfor %}{{ '</tool_call>' }}
        {%- endfor %}
    {%- else %}{{ '<|' + ('observation' if message.role == 'tool' else 'system') + '|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% if thinks %}{{ '<think>' }}{% endif %}{% endif %}"""

GEMMA4 = """\
{%- macro noted(value) -%}
    {%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is mapping %}{{ '{' }}
        {%- for key, each in value | dictsort %}{{ key + ':' }}{{ noted(each) }}{{ ',' if not loop.last }}
        {%- endfor %}{{ '}' }}
    {%- elif value is boolean or value is none or value is number %}{{ value | tojson }}
    {%- else %}{{ '[' }}
        {%- for each in value %}{{ noted(each) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}
    {%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools or thinks %}{{ '<|turn>system\\n' }}{% if thinks %}{{ '<|think|>\\n' }}{% endif %}
{%- for tool in tools or [] %}{{ '<|tool>declaration:' + tool.function.name }}
    {{- noted(tool.function.parameters) + '<tool|>' }}{% endfor %}{{ '<turn|>\\n' }}{% endif %}
{%- set state = namespace(is_inside=false) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ '<|tool_response>response:' + message.name + '{value:' }}
        {{- noted(message.content) + '}<tool_response|>' }}
    {%- else %}
        {%- if not state.is_inside %}
            {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
        {%- endif %}
        {%- if message.reasoning_content and message.tool_calls %}
            {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + noted(call.function.arguments) + '<tool_call|>' }}
        {%- endfor %}
        {{- message.content or '' }}
        {%- set state.is_inside = (message.tool_calls or []) | length > 0 %}
        {%- if not state.is_inside %}{{ '<turn|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not state.is_inside %}{{ '<|turn>model\\n' }}
    {%- if not thinks %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}
{%- endif %}"""

# The arguments are joined to text, so they must be text themselves.
DEEPSEEK_V3 = """\
{{- bos_token }}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['content'] is none %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for call in message['tool_calls'] %}
            {{- '\\n' if not loop.first }}
            {{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] }}
            {{- '\\n```json\\n' + call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

DEEPSEEK_V31 = """\
{{- bos_token }}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}{{ '<｜Assistant｜></think>' + message.content }}
        {%- if message.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}
            {%- for call in message.tool_calls %}
                {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
                {{- (call.function.arguments | tojson) + '<｜tool▁call▁end｜>' }}
            {%- endfor %}{{ '<｜tool▁calls▁end｜>' }}
        {%- endif %}{{ '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜></think>' }}{% endif %}"""

GRANITE = """\
{%- if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' + (tools | tojson) + '<|end_of_text|>\\n' }}
{{- 'When a tool is required, answer with <|tool_call|> and a JSON list of tools.' }}{% endif %}
{{- 'Write your thoughts between <think></think> and your response between <response></response>.' }}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] }}
    {%- if message.tool_calls %}{{ '<|tool_call|>[' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}{{ ', ' if not loop.last }}
        {%- endfor %}{{ ']' }}
    {%- endif %}{{ '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

PHI4_MINI = """\
{%- if tools %}{{ '<|system|>' }}
{%- for tool in tools %}{{ '<|tool|>' + (tool['function'] | tojson) + '<|/tool|>' }}{% endfor %}
{{- '<|end|>' }}{% endif %}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] }}
    {%- for call in message.tool_calls %}
        {{- '<|tool_call|>' + (call['function'] | tojson) + '<|/tool_call|>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

HARMONY = """\
{%- if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.content and message.thinking and message.tool_calls %}
            {{- raise_exception('thinking or content') }}
        {%- endif %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- (call.arguments | tojson) + '<|call|>' }}
        {%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

THINK = "<think>\nIs it\n\nraining?\n</think>\n\n"
THOUGHT = "Is it\n\nraining?"
DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
WEATHER_NOTED = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,unit:<|"|>C<|"|>}<tool_call|>'
ADD_NOTED = "<|tool_call>call:add{numbers:[1,2]}<tool_call|>"
CHANNEL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"

FAMILIES: dict[str, Family] = {
    "hermes": Family(
        HERMES,
        ("hermes", "think"),
        ("<|im_start|>",),
        (
            Reply("It is sunny.\n", text="It is sunny.\n"),
            Reply(f"{THINK}It is < 3 °C.", THOUGHT, "It is < 3 °C."),
            Reply(
                f"{THINK}<tool_call>\n{WEATHER_CALL}\n</tool_call>\n<tool_call>\n{ADD_CALL}\n</tool_call>",
                THOUGHT,
                "",
                BOTH,
            ),
            Reply(
                f"Let me see. \n<tool_call>\n{call('get_weather', TRICKY_JSON)}\n</tool_call>",
                text="Let me see.",
                calls=(("get_weather", TRICKY),),
            ),
            Reply(f"<tool_call>[{WEATHER_CALL}, {ADD_CALL}]</tool_call>", calls=BOTH),
            Reply(f"A.\n\n<tool_call>{ADD_CALL}\n</tool_call>\nB.", text="A.\n\nB.", calls=BOTH[1:]),
            Reply(f"<tool_call>{WEATHER_CALL}", calls=BOTH[:1]),
        ),
    ),
    "llama": Family(
        LLAMA,
        ("llama3_json", None),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        (
            Reply(call("get_weather", PARIS_JSON, "parameters"), calls=BOTH[:1]),
            Reply(f"<|python_tag|>{call('add', NUMBERS_JSON, 'parameters')}", calls=BOTH[1:]),
            Reply(f"{call('get_weather', PARIS_JSON, 'parameters')}; {ADD_CALL}", calls=BOTH),
            Reply('{"answer": [42]}', text='{"answer": [42]}'),
            Reply("{not JSON", text="{not JSON"),
            Reply("It is sunny.", text="It is sunny."),
        ),
    ),
    "pythonic": Family(
        PYTHONIC,
        ("pythonic", None),
        ("<|start_header_id|>", "<|end_header_id|>", "<|python_start|>", "<|python_end|>"),
        (
            Reply('[get_weather(city="Paris", unit="C"), add(numbers=[1, 2])]', calls=BOTH),
            Reply("<|python_start|>[get_weather(city='Paris', unit='C')]<|python_end|>", calls=BOTH[:1]),
            Reply("[add()]", calls=(("add", {}),)),
            Reply(
                "[add(numbers=[-1, 2.5e1, True, None, (), {'a': \"é\\n\\x41)\"}])]",
                calls=(("add", {"numbers": [-1, 25.0, True, None, [], {"a": "é\nA)"}]}),),
            ),
            Reply("[1, 2] is a list.", text="[1, 2] is a list."),
            Reply("[print(1)]", text="[print(1)]"),
            Reply("[print(a=1)]", text="[print(a=1)]"),
        ),
    ),
    "mistral": Family(
        MISTRAL,
        ("mistral", None),
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        (
            Reply(f"[TOOL_CALLS] [{WEATHER_CALL}, {ADD_CALL}]", calls=BOTH),
            Reply(f"I look.[TOOL_CALLS]get_weather{PARIS_JSON}", text="I look.", calls=BOTH[:1]),
            Reply(f"[TOOL_CALLS]add[CALL_ID]abc123DEF[ARGS]{NUMBERS_JSON}", calls=BOTH[1:]),
        ),
    ),
    "magistral": Family(
        MAGISTRAL,
        ("mistral", "mistral"),
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        (
            Reply(
                f"[THINK]{THOUGHT}[/THINK][TOOL_CALLS]get_weather[ARGS]{PARIS_JSON}"
                f"[TOOL_CALLS]add[ARGS]{NUMBERS_JSON}",
                THOUGHT,
                "",
                BOTH,
            ),
            Reply(f"[THINK]{THOUGHT}[/THINK]Yes.", THOUGHT, "Yes."),
        ),
    ),
    "qwen3_coder": Family(
        QWEN3_CODER,
        ("qwen3_coder", "think"),
        ("<|im_start|>",),
        (
            Reply(
                "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
                "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=numbers>\n"
                "[1, 2]\n"
                "</parameter>\n</function>\n</tool_call>",
                text="I look.",
                calls=BOTH,
            ),
            Reply(
                "<function=get_weather>\n<parameter=city>\n 3\n\n4 <b>\n\n</parameter>\n<parameter=days>\n3\n"
                "</parameter>"
                "<parameter=exact>\nTrue\n</parameter>\n<parameter=other>\n5\n</parameter>\n</function>",
                calls=(("get_weather", {"city": " 3\n\n4 <b>\n", "days": 3, "exact": True, "other": "5"}),),
            ),
        ),
    ),
    "glm": Family(
        GLM,
        ("glm", "think"),
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (
            Reply(
                "I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
                "<arg_key>unit</arg_key><arg_value>C</arg_value></tool_call>"
                "<tool_call>add<arg_key>numbers</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
                text="I look.",
                calls=BOTH,
            ),
            Reply(
                f"<think>{THOUGHT}</think><tool_call>get_weather\n<arg_key>city</arg_key>\n"
                "<arg_value> 3\n4 <b></arg_value>\n"
                "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
                THOUGHT,
                calls=(("get_weather", {"city": " 3\n4 <b>", "days": 3}),),
            ),
            Reply("<tool_call>add</tool_call>", calls=(("add", {}),)),
            Reply(f"<tool_call>{ADD_CALL}</tool_call>", calls=BOTH[1:]),
        ),
    ),
    "gemma4": Family(
        GEMMA4,
        ("gemma4", "gemma4"),
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        (
            Reply(f"<|channel>thought\n{THOUGHT}\n<channel|>{WEATHER_NOTED}{ADD_NOTED}", THOUGHT, calls=BOTH),
            Reply(f"I look.{WEATHER_NOTED}", text="I look.", calls=BOTH[:1]),
            Reply("<|channel>thought\n<channel|>It is < 3 °C.", text="It is < 3 °C."),
            Reply(
                '<|tool_call>call:get_weather{city:<|"|>a"b\\ </tool_call>{[<|"|>,'
                'unit:<|"|>C<|"|>}<tool_call|>',
                calls=(("get_weather", TRICKY),),
            ),
            Reply("<|tool_call>call:add{}<tool_call|>", calls=(("add", {}),)),
            Reply(
                '<|tool_call>call:add{a b:[{x:[],y-1:<|"|>,}]\n<|"|>},[[-1.5e1]], true,false , null],'
                '<|"|>k:<|"|>:None}<tool_call|>',
                calls=(
                    (
                        "add",
                        {"a b": [{"x": [], "y-1": ",}]\n"}, [[-15.0]], True, False, None], "k:": None},
                    ),
                ),
            ),
            Reply("<|tool_call>call:add{numbers:[1, 2]}", calls=BOTH[1:]),
            Reply("A <|channel> of text.", text="A <|channel> of text."),
        ),
    ),
    "deepseek_v3": Family(
        DEEPSEEK_V3,
        ("deepseek", "think"),
        ("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", *DS),
        (
            Reply(
                f"{THINK}I look.{DS[0]}{DS[1]}function{DS[2]}get_weather\n```json\n{PARIS_JSON}\n```{DS[3]}\n"
                f"{DS[1]}function{DS[2]}add\n```json\n{NUMBERS_JSON}\n```{DS[3]}{DS[4]}",
                THOUGHT,
                "I look.",
                BOTH,
            ),
        ),
    ),
    "deepseek_v31": Family(
        DEEPSEEK_V31,
        ("deepseek", "think"),
        ("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>"),  # the markers are plain added tokens
        (
            Reply(
                f"{DS[0]}{DS[1]}get_weather{DS[2]}{PARIS_JSON}{DS[3]}{DS[1]}add{DS[2]}{NUMBERS_JSON}{DS[3]}{DS[4]}",
                calls=BOTH,
            ),
        ),
    ),
    "granite": Family(
        GRANITE,
        ("granite", "granite"),
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        (
            Reply(f"<|tool_call|>[{WEATHER_CALL}, {ADD_CALL}]", calls=BOTH),
            Reply(f"<tool_call>[{ADD_CALL}]", calls=BOTH[1:]),
            Reply("<think>Rain?</think>\n<response>It is\nsunny.</response>", "Rain?", "It is\nsunny."),
            Reply(
                "Here is my thought process:\n\nRain?\n\nHere is my response:\n\nIt is sunny.",
                "Rain?",
                "It is sunny.",
            ),
        ),
    ),
    "phi4_mini": Family(
        PHI4_MINI,
        ("phi4_mini", None),
        ("<|user|>", "<|assistant|>", "<|tool_call|>", "<|/tool_call|>"),
        (
            Reply(
                f"<|tool_call|>{WEATHER_CALL}<|/tool_call|><|tool_call|>[{ADD_CALL}]<|/tool_call|>",
                calls=BOTH,
            ),
            Reply(f"functools[{WEATHER_CALL}, {ADD_CALL}]", calls=BOTH),
            Reply("functools are tools", text="functools are tools"),
        ),
    ),
    "harmony": Family(
        HARMONY,
        ("harmony", "harmony"),
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        (
            Reply(
                f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
                "<|channel|>final<|message|>It is.",
                THOUGHT,
                "It is.",
            ),
            Reply(
                f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant{CHANNEL}{PARIS_JSON}",
                THOUGHT,
                "",
                BOTH[:1],
            ),
            Reply(
                f" to=functions.add<|channel|>commentary json<|message|>{NUMBERS_JSON}<|call|>",
                calls=BOTH[1:],
            ),
            Reply(
                f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CHANNEL}{PARIS_JSON}",
                text="I look.",
                calls=BOTH[:1],
            ),
            Reply("Hello.", text="Hello."),
        ),
    ),
}


def family_tokenizer(family: Family) -> Tokenizer:
    """A tokenizer of 256 byte tokens, an end-of-sequence token and the family's special tokens."""
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*byte_alphabet(), "<eos>", *family.special],
            "tokenizer.ggml.token_type": [1] * 256 + [3] * (1 + len(family.special)),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 256,
        }
    )


def calls_of(
    name: str, raw: str, size: int = 10**9, *, tools: object = TOOLS, is_cut: bool = False
) -> tuple[str, list[tuple[str, dict[str, Any]]], Exception | None]:
    """(text, calls, failure) of an answer in a format of tools, in pieces of a size."""
    formats = AnswerFormats(tools=name, reasoning="harmony" if name == "harmony" else None)
    splitter = formats.splitter(ToolSet.of(tools), prompt="<|start|>assistant")
    parts = [splitter.push(raw[start : start + size]) for start in range(0, len(raw), size)]
    parts.append(splitter.flush(is_cut=is_cut))
    calls = [(each.name, each.arguments) for part in parts for each in part.tool_calls]
    return "".join(part.text for part in parts), calls, splitter.failure
