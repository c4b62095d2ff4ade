"""Chat templates: turn messages into a prompt."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec

from drift_sdk._plain_data import to_plain
from drift_sdk.errors import ConfigError, ModelLoadError, RequestError
from drift_sdk.text.answers.formats import UNKNOWN_TOOLS, AnswerFormats, detect_formats
from drift_sdk.text.sandbox import TemplateSandbox, budget
from drift_sdk.text.template_form import Probe

RESERVED_ARGS = ("messages", "tools", "documents", "add_generation_prompt")
MAX_INDENT = 16
MAX_SEPARATOR_CHARS = 16
MAX_FORMAT_CHARS = 256


class ChatTemplate:
    """A model's chat template, in the Jinja dialect of Hugging Face's `apply_chat_template`.

    Templates come with downloaded models. They run in a sandbox, receive plain data only and may take at most
    4,000,000 steps to render; an iteration, a call, an operation and 64 characters of text are one step each.
    A rendered prompt contains its special tokens: encode it with `add_special_tokens=False`.
    Jinja's filters pprint, striptags, urlize, wordcount and wordwrap and autoescape blocks are not available.
    Of Python's methods, templates may call those of strings, lists and dicts that change nothing and need
    bounded memory.

    source:                         template text.
    bos_token, eos_token:           text of the model's special tokens; None if it has none.
    tool_format, reasoning_format:  formats of the model's answers, as in `EngineConfig`; "auto" = as the
                                    template shows.
    with_tools:                     the template that takes the place of this one for messages with tools;
                                    None = the same.
    uses_tools:                     whether the template for messages with tools shows tools.
    shows_calls:                    whether it shows the calls of earlier messages.
    reads_calls:                    False if it writes calls in none of the known formats: they are text.
    formats:                        of the answers to its prompts.
    forced_formats:                 of answers that a grammar of calls forces: it can force a known format.

    Raises `ModelLoadError` if the template cannot be compiled.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        tool_format: str | None = "auto",
        reasoning_format: str | None = "auto",
        with_tools: ChatTemplate | None = None,
    ) -> None:
        special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        # A token that the model lacks stays undefined and renders as nothing; None would render as "None".
        self._special_tokens = {name: token for name, token in special_tokens.items() if token is not None}
        try:
            with budget(is_compiling=True):  # compiling evaluates constant expressions
                environment = _environment()
                tree = environment.parse(source)
                self._template = environment.from_string(tree)
        except Exception as error:
            raise ModelLoadError(f"chat template cannot be compiled: {error}") from error

        self.source = source
        self._with_tools = with_tools
        names = tree.find_all(jinja2.nodes.Name)
        reads_tools = any(name.name == "tools" and name.ctx == "load" for name in names)
        with budget():  # one for all conversations that are tried
            probe = Probe(self._render, asks_none=_asks_none(tree), reads_tools=reads_tools)
        self._form = probe.form
        self.shows_calls: bool = probe.form.shows_calls
        self.uses_tools: bool = (probe.form if with_tools is None else with_tools._form).tools is not None
        self.formats: AnswerFormats = detect_formats(
            source, probe.call, probe.thought, tool_format=tool_format, reasoning_format=reasoning_format
        )
        self.reads_calls: bool = tool_format is None or self.formats.tools is not None
        self.forced_formats: AnswerFormats = self.formats
        if not self.reads_calls:
            self.forced_formats = msgspec.structs.replace(self.formats, tools=UNKNOWN_TOOLS)

    def for_tools(self, tools: Sequence[object] | None) -> ChatTemplate:
        """The template for messages with these tools, or with none."""
        return self._with_tools if tools and self._with_tools is not None else self

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> str:
        """The prompt for these messages.

        messages:               mappings with at least a string "role".
        tools:                  descriptions of functions (JSON schemas).
        template_args:          further variables of the template, such as enable_thinking.
        add_generation_prompt:  whether the prompt ends with the beginning of the assistant's answer.
        continue_final:         the prompt ends inside of the last message, after its content; there is no
                                generation prompt then.

        Templates differ, and this one gets the form that it takes (`TemplateForm`): text parts are joined
        to lines where it takes no list of them, arguments of calls are mappings or JSON text,
        `reasoning_content` of messages is also their `thinking`, the content of an assistant's message
        without text is empty or None, and tools are also a field of the system message.

        Raises `RequestError` if messages, tools or arguments have another form, if the template rejects them,
        or if the last message cannot be continued.
        """
        _check_messages(messages)
        if tools is not None:
            _check_mappings("tools", tools)

        if template_args is not None and not isinstance(template_args, Mapping):
            raise RequestError.of("template_args", template_args, "a mapping of names to plain data")

        args = {} if template_args is None else to_plain("template_args", template_args)
        for name in RESERVED_ARGS:
            if name in args:
                raise RequestError.of("template_args", name, f"other names than {', '.join(RESERVED_ARGS)}")

        plain = to_plain("messages", messages)
        mark = _mark_continuation(plain) if continue_final else ""
        plain_tools = to_plain("tools", tools)
        is_begun = add_generation_prompt and not continue_final
        try:
            arranged = self._form.arranged(plain, plain_tools)
            with budget():
                prompt = self._render(arranged, plain_tools, is_begun, args)
        except RequestError:
            raise
        except Exception as error:
            # The template is the model's code, run on the caller's data: any error concerns this request.
            raise RequestError(
                f"messages: the chat template rejected them: {error}",
                field="messages",
                value=messages,
                allowed="what the model's chat template accepts",
            ) from error

        return _cut_continuation(prompt, mark, messages) if continue_final else prompt

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        args: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        variables = {
            **self._special_tokens,
            **args,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template.render(variables, messages=messages)


def configured_template(source: str, **settings: Any) -> ChatTemplate:
    """The template of `EngineConfig.chat_template`; ConfigError if it cannot be compiled."""
    try:
        return ChatTemplate(source, **settings)
    except ModelLoadError as error:
        raise ConfigError.of("chat_template", source, f"a Jinja template: {error}") from error


def _asks_none(tree: jinja2.nodes.Template) -> bool:
    """Whether a template asks if a message's content is None."""
    tested = [test.node for test in tree.find_all(jinja2.nodes.Test) if test.name == "none"]
    return any(
        isinstance(node, jinja2.nodes.Getattr)
        and node.attr == "content"
        or isinstance(node, jinja2.nodes.Getitem)
        and isinstance(node.arg, jinja2.nodes.Const)
        and node.arg.value == "content"
        for node in tested
    )


def _mark_continuation(messages: list[dict[str, Any]]) -> str:
    """Append a mark to the content of the last message, and return it: a text that no message has.
    RequestError if the message cannot be continued."""
    last = messages[-1]
    content = last.get("content")
    if last["role"] != "assistant" or not isinstance(content, str) or not content or last.get("tool_calls"):
        allowed = "a message of the assistant whose content is text, to be continued, and without tool calls"
        raise RequestError.of("messages[-1]", last, allowed)

    mark = f"[continued here, {secrets.token_hex(8)}]"
    last["content"] = f"{content}{mark} "
    return mark


def _cut_continuation(prompt: str, mark: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """A prompt up to the last mark in it, without earlier ones."""
    end = prompt.rfind(mark)
    if end < 0:
        allowed = "a message that the chat template renders whole: it leaves the end of this one out"
        raise RequestError.of("messages[-1]", messages[-1], allowed)

    # A template that trims content would have trimmed the end of this one too.
    is_trimmed = prompt[end + len(mark) : end + len(mark) + 1] != " "
    prompt = prompt[:end].replace(f"{mark} ", "").replace(mark, "")
    return prompt.rstrip() if is_trimmed else prompt


class _GenerationBlocks(jinja2.ext.Extension):
    """Renders the body of {% generation %} blocks, which mark the assistant's text for training."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@cache
def _environment() -> TemplateSandbox:
    """The environment of all templates, which cannot change it."""
    return TemplateSandbox(
        filters={"tojson": _tojson},
        functions={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
    )


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= MAX_INDENT):
        raise jinja2.TemplateError(f"tojson: expected an indent from 0 to {MAX_INDENT}")

    parts = () if separators is None else separators
    if not (isinstance(parts, tuple | list) and all(isinstance(each, str) for each in parts)):
        raise jinja2.TemplateError("tojson: expected separators that are text")

    if sum(map(len, parts)) > MAX_SEPARATOR_CHARS:
        raise jinja2.TemplateError(f"tojson: expected separators of {MAX_SEPARATOR_CHARS} characters at most")

    # Replaces Jinja's filter, which escapes HTML and sorts keys: models were not trained on such text.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if not isinstance(format, str) or len(format) > MAX_FORMAT_CHARS:
        raise jinja2.TemplateError(
            f"strftime_now: expected a format of {MAX_FORMAT_CHARS} characters at most"
        )

    return datetime.now().strftime(format)


def _check_messages(messages: object) -> None:
    _check_mappings("messages", messages)
    assert isinstance(messages, Sequence)
    if not messages:
        raise RequestError.of("messages", messages, "at least one message")

    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError.of(f"messages[{index}]", message, 'a mapping with a string "role"')


def _check_mappings(field: str, values: object) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RequestError.of(field, values, "a sequence of mappings")

    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestError.of(f"{field}[{index}]", value, "a mapping")
