"""The formats of a model's answers: chosen from its chat template, or by name."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from drift_sdk.errors import ConfigError
from drift_sdk.text.answers import harmony
from drift_sdk.text.answers.calls import CallReader
from drift_sdk.text.answers.reader import Steps, TextReader
from drift_sdk.text.answers.reasoning import (
    REASONING_FORMATS,
    Thinking,
    is_opened,
    read_around,
    read_reasoning,
)
from drift_sdk.text.answers.splitter import AnswerSplitter
from drift_sdk.text.answers.thought import Thought
from drift_sdk.text.answers.tool_formats import TOOL_FORMATS, read_content
from drift_sdk.text.answers.writer import AnswerWriter, Split
from drift_sdk.text.template_form import ARGUMENTS, TEXT, THOUGHT, TOOL_NAME, TOOLS, Written
from drift_sdk.text.tools import ToolSet

# Markers in chat templates, the more special first. All of a row's markers must be there.
TOOL_MARKERS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("qwen3_coder", ("<function=",)),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("phi4_mini", ("<|tool_call|>",)),
    ("phi4_mini", ("<|tool|>", "<|/tool|>")),  # around tools: the template itself writes no calls
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ')),
)
REASONING_MARKERS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("granite", ("<think>", "<response>")),
    ("granite", ("Here is my thought process",)),
    ("mistral", ("[THINK]",)),
    ("think", ("<think>",)),
    ("think", ("</think>",)),
)
UNKNOWN_TOOLS = "json"
"""The tool format of templates without any of the markers."""


class AnswerFormats(Struct, frozen=True, kw_only=True):
    """The formats in which a model writes tool calls and reasoning.

    tools, reasoning: names; None = the answer is not searched for them.
    """

    tools: str | None
    reasoning: str | None

    @property
    def is_harmony(self) -> bool:
        return "harmony" in (self.tools, self.reasoning)

    @property
    def markers(self) -> frozenset[str]:
        """The markers of both. Special tokens among them have to be part of the text that is split."""
        found: set[str] = set(harmony.MARKERS) if self.is_harmony else set()
        if self.tools in TOOL_FORMATS:
            found |= {*TOOL_FORMATS[self.tools].openers, *TOOL_FORMATS[self.tools].markers}
        if self.reasoning in REASONING_FORMATS:
            reasoning = REASONING_FORMATS[self.reasoning]
            found |= {*reasoning.openers, *reasoning.closers, *reasoning.around}
        return frozenset(found)

    def is_thinking(self, prompt: str, continued: str | None) -> bool:
        """Whether the answer to a prompt begins with reasoning that the prompt has opened.

        continued: the beginning of the answer, if the prompt ends with it; else None.
        """
        reasoning = REASONING_FORMATS.get(self.reasoning or "")
        return reasoning is not None and is_opened(prompt, continued, reasoning)

    def thinking(self, prompt: str, *, is_thinking: bool) -> Thinking | None:
        """The markers of the reasoning in the answer to a prompt; None if none is looked for.

        is_thinking: whether the answer begins with reasoning that the prompt has opened.
        """
        if self.is_harmony and self.reasoning is not None:
            return harmony.thinking_of(prompt.rpartition(harmony.START)[2])

        reasoning = REASONING_FORMATS.get(self.reasoning or "")
        if reasoning is None:
            return None

        openers, closers = reasoning.openers, reasoning.closers
        return Thinking(
            openers=openers, closers=closers, ends=closers, begun=openers[0] if is_thinking else ""
        )

    def splitter(
        self, tools: ToolSet, *, prompt: str = "", is_thinking: bool = False, is_constrained: bool = False
    ) -> AnswerSplitter:
        """A splitter for one answer.

        tools:          those that the model was given; if there are none, calls are not looked for.
        prompt:         as rendered by the template.
        is_thinking:    whether the answer begins with reasoning that the prompt has opened.
        is_constrained: whether the answer is either calls or a text that the request's grammar describes,
                        without reasoning. In Harmony the grammar describes the body of a message.
        """
        reader, writer = TextReader(), AnswerWriter()
        calls = CallReader(reader, writer, tools)
        finds_calls = bool(tools) and self.tools is not None
        if self.is_harmony:
            start = prompt.rpartition(harmony.START)[2]
            steps = harmony.read_harmony(
                calls,
                writer,
                start=start,
                finds_calls=finds_calls,
                finds_reasoning=self.reasoning is not None,
            )
        elif is_constrained:
            steps = read_calls_or_text(self, calls, finds_calls=finds_calls)
        else:
            steps = read_answer(self, calls, writer, is_thinking=is_thinking, finds_calls=finds_calls)
        return AnswerSplitter(steps, reader, writer)


def read_answer(
    formats: AnswerFormats, calls: CallReader, writer: AnswerWriter, *, is_thinking: bool, finds_calls: bool
) -> Steps[None]:
    """Read an answer to its end: reasoning, then text and calls.

    A tag that closes reasoning which has not begun is left out. What stands before it remains text, for it
    may have been delivered.
    """
    reader = calls.reader
    reasoning = REASONING_FORMATS.get(formats.reasoning or "")
    tool_format = TOOL_FORMATS.get(formats.tools or "") if finds_calls else None
    if reasoning is None:
        yield from read_content(calls, tool_format)
        return

    thought = Thought(writer, calls.tools, tool_format)
    if not (yield from read_reasoning(reader, writer, reasoning, thought, is_open=is_thinking)):
        tags = (reasoning.openers[0], reasoning.closers[0])
        tag = yield from read_content(calls, tool_format, ends=tags)
        if tag == reasoning.openers[0]:  # the text is about the tags
            calls.writer.write(tag)
            tag = yield from read_content(calls, tool_format, is_start=False)
        if tag is None:
            return

        writer.text.cut()
    dropped = yield from read_around(reader, reasoning)
    yield from read_content(calls, tool_format, dropped=dropped)


def read_calls_or_text(formats: AnswerFormats, calls: CallReader, *, finds_calls: bool) -> Steps[None]:
    """Read an answer that is calls alone, or text which may contain anything."""
    tool_format = TOOL_FORMATS.get(formats.tools or "") if finds_calls else None
    if tool_format is not None and (yield from calls.reader.begins(*tool_format.openers)) is None:
        tool_format = replace(tool_format, openers=())
    yield from read_content(calls, tool_format)


def detect_formats(
    source: str,
    call: Written | None = None,
    thought: Written | None = None,
    *,
    tool_format: str | None = "auto",
    reasoning_format: str | None = "auto",
) -> AnswerFormats:
    """The formats of a model with this chat template. A name other than "auto" is taken as it is. ConfigError
    for one beside Harmony, in which neither calls nor reasoning have another format.

    call, thought: a call and an answer with reasoning as the template writes them, which the format reads.
                   Calls that no format reads have none. Where the template writes none, its markers tell the
                   format.
    """
    if "harmony" in (tool_format, reasoning_format):
        return AnswerFormats(tools="harmony", reasoning="harmony")

    if reasoning_format == "auto":
        reasoning_format = reasoning_of(source, thought)
    if tool_format == "auto":
        tool_format = tools_of(source, call, reasoning_format)
    for name, own, other in (
        ("tool_format", tool_format, reasoning_format),
        ("reasoning_format", reasoning_format, tool_format),
    ):
        if other == "harmony" and own not in ("harmony", None):
            raise ConfigError.of(name, own, '"auto", "harmony" or None with a chat template in Harmony')

    return AnswerFormats(tools=tool_format, reasoning=reasoning_format)


def reasoning_of(source: str, thought: Written | None) -> str | None:
    """The format in which a template writes reasoning."""
    marked = matching(source, REASONING_MARKERS)
    if thought is None or "harmony" in marked:
        return next(iter(marked), None)

    for name in REASONING_FORMATS:
        parts = split(AnswerFormats(tools=None, reasoning=name), thought)
        text = "".join(part.text for part in parts).strip()
        if "".join(part.reasoning for part in parts).strip() == THOUGHT and text.startswith(TEXT):
            return name

    return next(iter(marked), None)


def tools_of(source: str, call: Written | None, reasoning: str | None) -> str | None:
    """The format in which a template writes calls."""
    marked = matching(source, TOOL_MARKERS)
    if call is None:
        return next(iter(marked), UNKNOWN_TOOLS)

    for name in dict.fromkeys((*marked, UNKNOWN_TOOLS, *TOOL_FORMATS)):
        parts = split(AnswerFormats(tools=name, reasoning=reasoning), call)
        found = [(each.name, each.arguments) for part in parts for each in part.tool_calls]
        if found == [(TOOL_NAME, ARGUMENTS)]:
            return name

    return None


def split(formats: AnswerFormats, written: Written) -> tuple[Split, Split]:
    """The parts of an answer that a template has written."""
    is_thinking = formats.is_thinking(written.prompt, None)
    splitter = formats.splitter(ToolSet.of(TOOLS), prompt=written.prompt, is_thinking=is_thinking)
    return splitter.push(written.answer), splitter.flush()


def matching(source: str, rows: tuple[tuple[str, tuple[str, ...]], ...]) -> list[str]:
    """The names of the rows all of whose markers a text contains."""
    return [name for name, markers in rows if all(marker in source for marker in markers)]
