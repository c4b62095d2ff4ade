"""The splitter and the grammar of the answer to a conversation.

A grammar forces tool calls or permits them, in each format of calls, in llguidance's Lark. Arguments are
described by the tool's schema; an object of named properties that does not say whether it may have others has
no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec import Struct

from drift_sdk.errors import FieldError, RequestError
from drift_sdk.grammars import JSON_STYLE, After, AnyGrammar, AnyOf, Grammar, Lark
from drift_sdk.text.answers import tool_formats as marks
from drift_sdk.text.answers.formats import AnswerFormats, AnswerSplitter
from drift_sdk.text.answers.reasoning import REASONING_FORMATS, Thinking
from drift_sdk.text.answers.tool_formats import MAX_NAME_CHARS, is_name
from drift_sdk.text.schemas import ANNOTATIONS, DEFINITIONS, are_exclusive, followed, part_of, strings_of
from drift_sdk.text.tokenizer import Tokenizer
from drift_sdk.text.tools import IMPLIED_TYPES, Tool, ToolSet, types_of, values_of

COMPACT: dict[str, bool | str] = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""White space as Python's json.dumps writes it, which is what templates show to models."""
ANY_TEXT = r"/(?s:.*)/"


class Rules:
    """The rules of a grammar, and its literals.

    template:     source of the model's chat template.
    is_single:    whether there is exactly one call.
    object_style: white space of objects that are calls by themselves, without a marker.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        is_single: bool = False,
        object_style: Mapping[str, object] = COMPACT,
    ) -> None:
        self.template = template
        self.object_style = object_style
        self._lines: list[str] = []
        self._num_names = 0
        self._is_single = is_single
        self._tokenizer = tokenizer

    def grammar(self, start: str) -> Lark:
        """The grammar with these rules."""
        return Lark("\n".join([f"start: {start}", *self._lines]))

    def rule(self, body: str, options: str = "", *, name: str = "") -> str:
        """The name of a new rule. name: one of `new_name`; empty = another one."""
        name = name or self.new_name()
        self._lines.append(f"{name}{options}: {body}")
        return name

    def new_name(self) -> str:
        """The name of a rule that is written later."""
        self._num_names += 1
        return f"rule{self._num_names}"

    def calls(self, call: str, separator: str = "") -> str:
        """A call, or several with a separator between them."""
        return call if self._is_single else f"{call} ({separator} {call})*"

    def literal(self, text: str) -> str:
        """A text, with the special tokens of the vocabulary that stand alone in it."""
        (token_id,) = self._tokenizer.special_ids_of([text]) or (None,)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def text_before(self, marker: str, text: str = ANY_TEXT) -> str:
        """A text without a marker, and the marker. text: a regular expression for it."""
        if self._tokenizer.special_ids_of([marker]):  # which is no text
            return f"{self.rule(text)} {self.literal(marker)}"

        return self.rule(text, f"[suffix={quoted(marker)}]")

    def value(self, schema: Mapping[str, Any], style: Mapping[str, object] = COMPACT) -> str:
        """A JSON value that a schema describes. style: its white space."""
        return f"%json {json.dumps({**schema, 'x-guidance': style}, ensure_ascii=False)}"


def quoted(text: str) -> str:
    """A literal in Lark's notation, in which U+007F cannot stand by itself."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


MAX_LENGTH = 1000
"""Most characters of a string that is not quoted, and items of an array that is not JSON, which a grammar
counts."""
COMMA, COMMA_ALONE = '", "', '","'
IDENTIFIER = re.compile(r"[^\W\d]\w*")
XML_NAME = re.compile(r"[^>]+")
KEYED_NAME = re.compile(r"[^<\s](?:[^<\n]*[^<\s])?")
NOTED_NAME = re.compile(r"[^\s<>{}\[\],:\"](?:[^\n<>{}\[\],:\"]*[^\s<>{}\[\],:\"])?")


def forced_calls(
    formats: AnswerFormats,
    tools: ToolSet,
    tokenizer: Tokenizer,
    *,
    template: str,
    is_thinking: bool,
    is_single: bool = False,
) -> Lark:
    """The grammar of one or more calls of these tools, after reasoning if the model has a format for it.

    formats:     its format of calls must not be None.
    template:    source of the model's chat template, which shows the variant of the format.
    is_thinking: whether the answer begins with reasoning that the prompt has opened.
    is_single:   whether there is exactly one call.

    Raises RequestError for names of tools and arguments that the format has no quotes for.
    """
    assert formats.tools is not None
    rules = Rules(tokenizer, template, is_single=is_single)
    calls = GRAMMARS[formats.tools](rules, list(tools.values()))
    return rules.grammar(f"{reasoning(rules, formats, is_thinking=is_thinking)}{calls}")


def optional_calls(formats: AnswerFormats, tools: ToolSet, tokenizer: Tokenizer, *, template: str) -> Lark:
    """The grammar of one or more calls of these tools, as an alternative to another grammar.
    Reasoning comes first in Harmony only. Objects that could be values of a `JsonSchema` are written as such.

    Arguments and errors are those of `forced_calls`.
    """
    assert formats.tools is not None
    rules = Rules(tokenizer, template, object_style=JSON_STYLE)
    calls = GRAMMARS[formats.tools](rules, list(tools.values()))
    thought = reasoning(rules, formats, is_thinking=False) if formats.is_harmony else ""
    return rules.grammar(f"{thought}{calls}")


def reasoning(rules: Rules, formats: AnswerFormats, *, is_thinking: bool) -> str:
    """The part of an answer before its calls: reasoning, which may be left out unless it has begun. In
    Harmony, the part before any other message."""
    if formats.reasoning == "harmony":
        return f"({harmony_thought(rules)})? "

    reasoning_format = REASONING_FORMATS.get(formats.reasoning or "")
    if reasoning_format is None:
        return ""

    ends = [rules.text_before(closer) for closer in reasoning_format.closers[:1]]
    space = rules.rule("/[ \\n]{0,2}/")
    if is_thinking:
        return f"{ends[0]} {space} "

    opener, token = reasoning_format.openers[0], reasoning_format.token
    begin = f"{rules.literal(token)} {quoted(opener.removeprefix(token))}" if token else rules.literal(opener)
    return f"({begin} {ends[0]} {space})? "


def final_message(formats: AnswerFormats, tokenizer: Tokenizer) -> Lark:
    """The grammar of what stands before the body of Harmony's final message, with reasoning or without."""
    rules = Rules(tokenizer, "")
    thought = reasoning(rules, formats, is_thinking=False)
    return rules.grammar(f'{thought}{rules.literal("<|channel|>")} "final" {rules.literal("<|message|>")}')


def message_end(tokenizer: Tokenizer) -> Lark:
    """The grammar of what stands between the body of a message of Harmony and its next one."""
    rules = Rules(tokenizer, "")
    return rules.grammar(f'{rules.literal("<|end|>")} {rules.literal("<|start|>")} "assistant"')


def plain_name(tool: Tool) -> str:
    """The name of a tool in formats that write it without quotes."""
    if not is_name(tool.name):
        allowed = f"tools named by 1 to {MAX_NAME_CHARS} letters, digits and _.:/- in this model's format"
        raise RequestError.of("tool_choice", tool.name, allowed)

    return tool.name


def plain_key(tool: Tool, name: object, pattern: re.Pattern[str], kind: str) -> str:
    """The name of an argument in formats that write it without quotes. kind: that of the pattern in words."""
    if not isinstance(name, str) or not pattern.fullmatch(name):
        allowed = f"arguments of {tool.name} that are {kind} in this model's format of calls"
        raise RequestError.of("tool_choice", name, allowed)

    return name


def object_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments. A tool without parameters has none."""
    schema = {"type": "object", **tool.parameters}
    if not tool.parameters or "properties" in tool.parameters:
        schema.setdefault("additionalProperties", False)
    return schema


def json_arguments(rules: Rules, tool: Tool) -> str:
    """The rule of the arguments of a tool as a JSON object."""
    return rules.rule(rules.value(object_schema(tool)))


def any_object(rules: Rules, tools: list[Tool]) -> str:
    """The rule of an object with the name and the arguments of one of the tools."""
    calls = []
    for tool in tools:
        start = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        calls.append(f'{quoted(start)} {json_arguments(rules, tool)} "}}"')
    return rules.rule(" | ".join(calls))


def call_schema(tool: Tool) -> dict[str, Any]:
    """The schema of an object with the name of a tool and its arguments as parameters."""
    arguments = part_of(object_schema(tool))
    properties = {"name": {"const": tool.name}, "parameters": arguments}
    definitions = {name: arguments.pop(name) for name in DEFINITIONS if name in arguments}
    return {
        **definitions,
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def hermes(rules: Rules, tools: list[Tool]) -> str:
    begin, end = rules.literal("<tool_call>"), rules.literal("</tool_call>")
    call = rules.rule(f'{begin} "\\n" {any_object(rules, tools)} "\\n" {end}')
    return rules.calls(call, '"\\n"')


PARAMETER_END = "\n</parameter>\n"
"""The end of a value as Qwen3-Coder writes it."""


def qwen3_coder(rules: Rules, tools: list[Tool]) -> str:
    begin, end = rules.literal("<tool_call>"), rules.literal("</tool_call>")
    bodies = []
    for tool in tools:
        parts = [quoted(f"<function={plain_name(tool)}>\n")]
        for name in tool.properties:
            opening = f"<parameter={plain_key(tool, name, XML_NAME, 'names without >')}>\n"
            written = f"{quoted(opening)} {written_value(rules, tool, name, PARAMETER_END)}"
            parts.append(written if name in tool.required else f"({written})?")
        bodies.append(" ".join([*parts, '"</function>\\n"']))
    call = rules.rule(f'{begin} "\\n" ({" | ".join(bodies)}) {end}')
    return rules.calls(call, '"\\n"')


def glm(rules: Rules, tools: list[Tool]) -> str:
    """With a new line between a call's parts where the template has one."""
    begin, end = rules.literal(marks.TAGGED_CALL), rules.literal(marks.TAGGED_CALL_END)
    is_split = marks.LINES_BETWEEN.search(rules.template) is not None
    line = '"\\n" ' if is_split else ""
    bodies = []
    for tool in tools:
        parts = [f"{quoted(plain_name(tool))} {line}"]
        for name in tool.properties:
            key = quoted(plain_key(tool, name, KEYED_NAME, "names in one line without <"))
            opening = f"{rules.literal(marks.ARG_KEY)} {key} {rules.literal(marks.ARG_KEY_END)} {line}"
            value = written_value(rules, tool, name, marks.ARG_VALUE_END)
            written = f"{opening}{rules.literal(marks.ARG_VALUE)} {value} {line}"
            parts.append(written if name in tool.required else f"({written})?")
        bodies.append(" ".join(parts))
    call = rules.rule(f"{begin} ({' | '.join(bodies)}) {end}")
    return rules.calls(call, '"\\n"' if is_split else "")


def gemma4(rules: Rules, tools: list[Tool]) -> str:
    calls = []
    for tool in tools:
        try:
            arguments = Notation(rules, tool).arguments()
        except RecursionError:
            raise unwritten(tool, "schemas that are nested so deeply") from None

        calls.append(f"{quoted(f'call:{plain_name(tool)}')} {arguments}")
    begin, end = rules.literal(marks.NOTED_CALL), rules.literal(marks.NOTED_CALL_END)
    return rules.calls(rules.rule(f"{begin} ({' | '.join(calls)}) {end}"))


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
UNWRITTEN = (
    *("$ref", "allOf", "contains", "dependentRequired", "dependentSchemas", "if", "maxProperties"),
    *("minProperties", "not", "patternProperties", "prefixItems", "propertyNames", "uniqueItems"),
)
"""Keywords of schemas that `Notation` does not follow."""
MAX_JOINED = 100
"""Most alternatives that are joined with what stands beside them; schemas may refer to themselves."""


def unwritten(tool: Tool, part: str) -> FieldError:
    """The error for schemas that a format without JSON cannot follow. part: what they have, in words."""
    allowed = f"arguments of {tool.name} without {part} in this model's format of calls"
    return RequestError.of("tool_choice", tool.name, allowed)


class Notation:
    """The rules of values in Gemma 4's notation that the schemas of a tool's arguments describe.

    Followed are types, enumerations, alternatives, references, bounds of numbers, lengths of strings and
    arrays, items, and the properties of objects, which have no others if any is named. RequestError for
    `UNWRITTEN` keywords.
    """

    def __init__(self, rules: Rules, tool: Tool) -> None:
        self._rules = rules
        self._tool = tool
        self._quote = rules.literal(marks.QUOTE)
        self._names: dict[int, str] = {}  # rules by id() of schemas, which are parts of the tool's
        self._any = ""
        self._num_joined = 0

    def arguments(self) -> str:
        """The rule of the tool's arguments."""
        return self._rules.rule(self._choices(object_schema(self._tool)))

    def _value(self, schema: object) -> str:
        """The rule of a value."""
        if not isinstance(schema, Mapping):
            return self._any_value()

        name = self._names.get(id(schema))
        if name is None:
            name = self._names[id(schema)] = self._rules.new_name()
            self._rules.rule(self._choices(schema), name=name)
        return name

    def _object(self, schema: Mapping[str, Any]) -> str:
        """An object with the properties that a schema names, or with any if it names none."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            others = schema.get("additionalProperties", True)
            return '"{" "}"' if others is False else self._dictionary(self._value(others))

        keys = {
            plain_key(self._tool, name, NOTED_NAME, "names in one line without quotes, brackets and ,:"): each
            for name, each in properties.items()
            if each is not False
        }
        members = {key: f"{quoted(f'{key}:')} {self._value(keys[key])}" for key in marks.noted_order(keys)}
        return f'"{{" {listed(self._rules, members, strings_of(schema.get("required")), COMMA_ALONE)} "}}"'

    def _choices(self, schema: Mapping[str, Any]) -> str:
        """The values that a schema describes."""
        schema = followed(schema, self._tool.parameters)
        for keyword in UNWRITTEN:
            if schema.get(keyword):
                raise unwritten(self._tool, keyword)

        if {"enum", "const"} & schema.keys():
            values = values_of(schema)
            if not values:
                raise unwritten(self._tool, "enumerations that are no lists of values")

            return " | ".join(map(self._constant, values))

        for keyword in ("anyOf", "oneOf"):
            members = schema.get(keyword)
            if isinstance(members, list) and members:
                if keyword == "oneOf" and not are_exclusive([members], self._tool.parameters):
                    raise unwritten(self._tool, "members of oneOf that do not exclude each other")

                rest = {name: each for name, each in schema.items() if name not in (keyword, *ANNOTATIONS)}
                return " | ".join(self._alternative(rest, member) for member in members)

        named = schema.get("type")
        types = [named] if isinstance(named, str) else strings_of(named)
        types = types or [implied for name, implied in IMPLIED_TYPES.items() if name in schema]
        return " | ".join(self._of_type(kind, schema) for kind in dict.fromkeys(types)) or self._any_value()

    def _alternative(self, rest: Mapping[str, Any], member: object) -> str:
        """A member of alternatives, joined with what the schema around them says besides."""
        if not rest or not isinstance(member, Mapping):
            return self._value(member)

        self._num_joined += 1
        if self._num_joined > MAX_JOINED:
            raise unwritten(self._tool, f"more than {MAX_JOINED} alternatives")

        joined = followed({**rest, "allOf": [member]}, self._tool.parameters)
        if "allOf" in joined:
            raise unwritten(self._tool, "alternatives that differ from what stands beside them")

        return self._choices(joined)

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return f"{self._quote} {self._rules.text_before(marks.QUOTE, text_of(schema))}"

        if kind == "object":
            return self._object(schema)

        if kind == "array":
            return self._array(self._value(schema.get("items")), *bounds_of(schema, "minItems", "maxItems"))

        bounds = {name: schema[name] for name in BOUNDS if name in schema}
        return self._rules.rule(self._rules.value({"type": kind, **bounds}))

    def _constant(self, value: object) -> str:
        parts = marks.noted(value).split(marks.QUOTE)
        return f" {self._quote} ".join(quoted(part) for part in parts)

    def _array(self, item: str, least: int = 0, most: int | None = None) -> str:
        if most == 0:
            return '"[" "]"'

        more = f'("," {item})'
        if most == 1:
            items = f"({item})"
        elif most is None and least < 2:
            items = f"({item} {more}*)"
        else:
            items = f"({item} {more}{{{max(least - 1, 0)},{'' if most is None else most - 1}}})"
        return f'"[" {items} "]"' if least else f'"[" {items}? "]"'

    def _dictionary(self, value: str) -> str:
        member = rf'/[A-Za-z_]\w*/ ":" {value}'
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _any_value(self) -> str:
        if not self._any:
            self._any = self._rules.new_name()
            scalars = [self._of_type(kind, {}) for kind in ("string", "number", "boolean", "null")]
            parts = [*scalars, self._array(self._any), self._dictionary(self._any)]
            self._rules.rule(" | ".join(parts), name=self._any)
        return self._any


def written_value(rules: Rules, tool: Tool, name: str, end: str) -> str:
    """The value of an argument where strings have no quotes, with its end. Of what the schema says of
    strings, lengths and enumerations are followed."""
    types, schema, close = types_of(tool, name), argument_schema(tool, name), rules.literal(end)
    if types <= {"string"} and not {"enum", "const"} & schema.keys():
        return rules.text_before(end, text_of(schema))

    values = [each for each in values_of(schema) or () if isinstance(each, str)]
    if types == {"string"} and values:
        return f"({' | '.join(map(quoted, values))}) {close}"

    return f"{rules.rule(rules.value(nested(tool, name)))} {close}"


def argument_schema(tool: Tool, name: str) -> Mapping[str, Any]:
    """The schema of one argument, joined with what it refers to; empty if it allows anything."""
    schema = tool.properties[name]
    return followed(schema, tool.parameters) if isinstance(schema, Mapping) else {}


def text_of(schema: Mapping[str, Any]) -> str:
    """A regular expression for the text of a string."""
    least, most = bounds_of(schema, "minLength", "maxLength")
    return f"/(?s:.{{{least},{'' if most is None else most}}})/"


def bounds_of(schema: Mapping[str, Any], lower: str, upper: str) -> tuple[int, int | None]:
    """The bounds of a length that a grammar counts; None = any number."""
    least, most = schema.get(lower), schema.get(upper)
    least = least if type(least) is int and 0 <= least <= MAX_LENGTH else 0
    return least, most if type(most) is int and least <= most <= MAX_LENGTH else None


def nested(tool: Tool, name: str) -> dict[str, Any]:
    """The schema of one argument as a schema by itself."""
    return part_of(object_schema(tool), "properties", name)


def llama3_json(rules: Rules, tools: list[Tool]) -> str:
    # One JSON schema, not a literal and the arguments: a parser that has begun a literal cannot go back to
    # the value of another schema that begins in the same way.
    calls = [rules.rule(rules.value(call_schema(tool), rules.object_style)) for tool in tools]
    return rules.calls(rules.rule(" | ".join(calls)), '"; "')


def pythonic(rules: Rules, tools: list[Tool]) -> str:
    calls = [f'{quoted(plain_name(tool) + "(")} {keywords(rules, tool)} ")"' for tool in tools]
    call = rules.rule(" | ".join(calls))
    return f'"[" {rules.calls(call, COMMA)} "]"'


def keywords(rules: Rules, tool: Tool) -> str:
    """The arguments of a tool in the order of its schema, some of them left out, as `a=1, b=2`."""
    written: dict[str, str] = {}
    for name in tool.properties:
        key = plain_key(tool, name, IDENTIFIER, "identifiers")
        is_open = values_of(argument_schema(tool, name)) is None
        is_flag = is_open and types_of(tool, name) == {"boolean"}
        value = '("True" | "False")' if is_flag else rules.rule(rules.value(nested(tool, name)))
        written[name] = f"{quoted(key + '=')} {value}"
    return listed(rules, written, tool.required, COMMA)


def listed(rules: Rules, written: dict[str, str], required: Collection[str], separator: str) -> str:
    """The rule of some parts in their order, with a separator between them.

    written:  the parts by name.
    required: names of those that are not left out.
    """
    first, later = rules.rule('""'), rules.rule('""')  # behind the last part
    for name in reversed(written):
        part = f"{written[name]} {later}"
        if name in required:
            first, later = rules.rule(part), rules.rule(f"{separator} {part}")
        else:
            first, later = rules.rule(f"{part} | {first}"), rules.rule(f"{separator} {part} | {later}")
    return first


def mistral(rules: Rules, tools: list[Tool]) -> str:
    begin = rules.literal("[TOOL_CALLS]")
    if "[ARGS]" not in rules.template:
        return f'{begin} "[" {rules.calls(any_object(rules, tools), COMMA)} "]"'

    args = rules.literal("[ARGS]")
    calls = [f"{quoted(plain_name(tool))} {args} {json_arguments(rules, tool)}" for tool in tools]
    return rules.calls(rules.rule(f"{begin} ({' | '.join(calls)})"))


def deepseek(rules: Rules, tools: list[Tool]) -> str:
    begin, end, separator = map(rules.literal, (marks.CALL_BEGIN, marks.CALL_END, marks.CALL_SEP))
    is_fenced = "```json" in rules.template
    calls = []
    for tool in tools:
        name = plain_name(tool)
        start, stop = quoted(f"{name}\n```json\n"), '"\\n```"'
        head = f'"function" {separator} {start}' if is_fenced else f"{quoted(name)} {separator}"
        calls.append(f"{head} {json_arguments(rules, tool)} {stop if is_fenced else ''}")
    call = rules.rule(f"{begin} ({' | '.join(calls)}) {end}")
    written = rules.calls(call, '"\\n"' if is_fenced else "")
    return f"{rules.literal(marks.CALLS_BEGIN)} {written} {rules.literal(marks.CALLS_END)}"


def granite(rules: Rules, tools: list[Tool]) -> str:
    written = rules.calls(any_object(rules, tools), COMMA)
    return f'{rules.literal("<|tool_call|>")} "[" {written} "]"'


def phi4_mini(rules: Rules, tools: list[Tool]) -> str:
    begin, end = rules.literal("<|tool_call|>"), rules.literal("<|/tool_call|>")
    return rules.calls(rules.rule(f"{begin} {any_object(rules, tools)} {end}"))


def harmony(rules: Rules, tools: list[Tool]) -> str:
    """One call: the model's end of a call ends the answer."""
    channel, message, constrain = map(rules.literal, ("<|channel|>", "<|message|>", "<|constrain|>"))
    calls = []
    for tool in tools:
        recipient = quoted(f"commentary to=functions.{plain_name(tool)} ")
        calls.append(f'{channel} {recipient} {constrain} "json" {message} {json_arguments(rules, tool)}')
    return f"({' | '.join(calls)})"


def harmony_thought(rules: Rules) -> str:
    """A message of reasoning, and the beginning of the next message."""
    channel, message, start = map(rules.literal, ("<|channel|>", "<|message|>", "<|start|>"))
    return f'{channel} "analysis" {message} {rules.text_before("<|end|>")} {start} "assistant"'


GRAMMARS: dict[str, Callable[[Rules, list[Tool]], str]] = {
    "json": hermes,
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "glm": glm,
    "gemma4": gemma4,
    "llama3_json": llama3_json,
    "pythonic": pythonic,
    "mistral": mistral,
    "deepseek": deepseek,
    "granite": granite,
    "phi4_mini": phi4_mini,
    "harmony": harmony,
}
"""Functions that write the calls of a format as an expression of Lark."""


class Answer(Struct, frozen=True, kw_only=True):
    """The answer that a request asks for.

    splitter:   splits it; None = all of it is text.
    marker_ids: special tokens that are part of the text which is split.
    grammar:    that it has to follow; None = any answer.
    thinking:   the markers of its reasoning; None = it has none.
    """

    splitter: AnswerSplitter | None
    marker_ids: frozenset[int]
    grammar: AnyGrammar | None
    thinking: Thinking | None = None


def prepare_answer(
    formats: AnswerFormats,
    tokenizer: Tokenizer,
    *,
    template: str,
    prompt: str,
    continued: str | None,
    tools: ToolSet,
    tool_choice: str,
    grammar: Grammar | None,
) -> Answer:
    """The answer to a prompt.

    template:    source of the chat template.
    continued:   the beginning of the answer, if the prompt ends with it; else None.
    tools:       those that the model was given.
    tool_choice: "auto" or "none", or for a grammar of calls "required", or of one call the name of a tool.
    grammar:     the request's own: the answer then begins after the prompt, and it is not reasoning, even if
                 the prompt has opened one. In Harmony it describes the body of the final message. With
                 "auto", calls of the tools are allowed in its place.

    Calls in Harmony are messages: if an answer is continued, they come after the end of its message.

    Raises RequestError if calls cannot be forced in the model's format.
    """
    is_inside = formats.is_harmony and continued is not None
    is_thinking = grammar is None and formats.is_thinking(prompt, continued)
    followed: AnyGrammar | None = grammar
    if tool_choice not in ("auto", "none"):
        if formats.tools is None:
            raise RequestError.of("tool_choice", tool_choice, '"auto" or "none" with tool_format=None')

        wanted = tools if tool_choice == "required" else tools.only(tool_choice)
        calls = forced_calls(
            formats,
            wanted,
            tokenizer,
            template=template,
            is_thinking=is_thinking,
            is_single=tool_choice != "required",
        )
        followed = After(message_end(tokenizer), calls) if is_inside else calls
    elif grammar is not None:
        is_message = formats.is_harmony and not is_inside
        own = After(final_message(formats, tokenizer), grammar) if is_message else grammar
        followed = own
        if tools and formats.tools is not None:
            calls = optional_calls(formats, tools, tokenizer, template=template)
            followed = AnyOf((After(message_end(tokenizer), calls) if is_inside else calls, own))
    finds_calls = bool(tools) and formats.tools is not None
    if formats.reasoning is None and not finds_calls and not formats.is_harmony:  # whose text is in messages
        return Answer(splitter=None, marker_ids=frozenset(), grammar=followed)

    splitter = formats.splitter(
        tools, prompt=prompt, is_thinking=is_thinking, is_constrained=grammar is not None
    )
    return Answer(
        splitter=splitter,
        marker_ids=tokenizer.special_ids_of(formats.markers),
        grammar=followed,
        thinking=formats.thinking(prompt, is_thinking=is_thinking)
        if grammar is None or formats.is_harmony
        else None,
    )
