"""The formats of a model's answers, chosen from its chat template or by name, and their splitter.

Harmony is the format of gpt-oss, https://github.com/openai/harmony. An answer in it is a sequence of messages
<|start|>HEADER<|message|>BODY<|end|>, the first without its beginning, which the prompt has. A header names
the role, the channel and for a call the recipient, in either order:

    assistant<|channel|>analysis                                            reasoning
    assistant<|channel|>final, assistant<|channel|>commentary               text
    assistant<|channel|>commentary to=functions.NAME <|constrain|>json      a call; the body is its arguments

A recipient shows a call on every channel, unless it is a role. A message on the channel analysis that is no
call after all is reasoning, without its header.

The markers are special tokens of the vocabulary. OpenAI's own package openai-harmony parses token ids of its
own vocabulary, o200k, a file that it downloads; this parser needs the model's tokenizer alone.
"""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.structs import replace

from drift_sdk.errors import ConfigError
from drift_sdk.text.answers.reader import AnswerWriter, Split, Steps, TextReader
from drift_sdk.text.answers.reasoning import (
    REASONING_FORMATS,
    Thinking,
    Thought,
    is_opened,
    read_around,
    read_reasoning,
)
from drift_sdk.text.answers.tool_formats import (
    TOOL_FORMATS,
    CallReader,
    MalformedCall,
    UnfinishedCall,
    read_content,
)
from drift_sdk.text.template_form import ARGUMENTS, TEXT, THOUGHT, TOOL_NAME, TOOLS, Written
from drift_sdk.text.tools import ToolSet

START, MESSAGE, CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{START}assistant{CHANNEL}final{MESSAGE}"
MARKERS = (MESSAGE, CHANNEL, "<|constrain|>", *ENDS)

CHANNEL_OF = re.compile(r"<\|channel\|>\s*(\w+)")
ROLES = ("all", "assistant", "developer", "system", "tool", "user")
"""Recipients that are no tools."""
RECIPIENT_OF = re.compile(r"(?:^|\s)to=([^\s<]+)")


def thinking_of(start: str) -> Thinking:
    """The markers of reasoning. When it is ended for the model, it may go on with a message of its choice,
    and if it chooses reasoning again, with the final one.

    start: the beginning of the first message."""
    closers = tuple(end for end in ENDS if end != START)
    ends = (ENDS[0], ENDS[0] + FINAL)
    return Thinking(openers=(ANALYSIS,), closers=closers, ends=ends, begun=start, is_anywhere=True)


def read_harmony(
    calls: CallReader, writer: AnswerWriter, *, start: str, finds_calls: bool, finds_reasoning: bool
) -> Steps[None]:
    """Read an answer to its end.

    start:           the beginning of its first message, which the prompt has, perhaps with some of its body.
    finds_calls:     whether calls are looked for; their bodies are text otherwise.
    finds_reasoning: whether reasoning is looked for; its bodies are text otherwise.
    """
    header, marker, _ = start.partition(MESSAGE)
    while True:
        if not marker:
            calls.begin()
            written = yield from calls.header(MESSAGE)
            if written is None:
                return

            header += written
        yield from read_body(calls, writer, header, finds_calls=finds_calls, finds_reasoning=finds_reasoning)
        header = marker = ""


def read_body(
    calls: CallReader, writer: AnswerWriter, header: str, *, finds_calls: bool, finds_reasoning: bool
) -> Steps[None]:
    """Read the body of a message and the marker at its end."""
    channel, recipient = CHANNEL_OF.search(header), RECIPIENT_OF.search(header)
    is_analysis = channel is not None and channel[1] == "analysis"
    part = writer.reasoning if is_analysis and finds_reasoning else writer.text
    start = calls.reader.num_taken
    if finds_calls and recipient is not None and recipient[1] not in ROLES:
        if is_analysis:
            calls.begin()  # without the header
        try:
            calls.add(
                recipient[1].removeprefix("functions."), (yield from calls.arguments(*ENDS, may_end=True))
            )
        except MalformedCall as error:
            calls.give_back(error, part.write)
        else:
            part = writer.text

    marker = yield from calls.reader.take_until(ENDS, part.write)
    if part is writer.reasoning:
        writer.reasoning_spans.append((start, calls.reader.num_taken - len(marker or "")))
    writer.reasoning.cut()
    writer.text.cut()


class AnswerSplitter:
    """The parts of one answer, as it arrives.

    read:   parses the answer; it has not begun.
    reader: where it reads.
    writer: where it writes.

    Joined over all pushes and the flush, the parts do not depend on how the answer is cut into pieces. A
    call is returned by the push in which it closes, a call in reasoning by the flush. Text is held back only
    while it may be the beginning of a marker or white space before one, and inside a call, until it closes or
    turns out not to be a call; reasoning behind a call, until the reasoning closes.
    """

    def __init__(self, read: Steps[None], reader: TextReader, writer: AnswerWriter) -> None:
        self._read = read
        self._reader = reader
        self._writer = writer
        next(read)  # to the place where it waits for text

    def push(self, text: str) -> Split:
        """Add text; returns the parts that it completes."""
        self._reader.push(text)
        next(self._read)
        return self._writer.take()

    def flush(self, *, is_cut: bool = False) -> Split:
        """End the answer; returns the parts that were held back. A call that has not closed is text.

        is_cut: whether the answer ended early, before the model ended it.
        """
        self._reader.is_ended = True
        self._reader.is_cut = is_cut
        next(self._read, None)
        self._writer.end()
        return self._writer.take()

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        """Where the reasoning is in the answer, see `AnswerWriter`; complete after the flush."""
        return self._writer.reasoning_spans

    @property
    def failure(self) -> Exception | None:
        """Why the first malformed call could not be read; None if there is none."""
        return self._writer.failure

    @property
    def is_unfinished(self) -> bool:
        """Whether the failure is that the answer ends inside a call."""
        return isinstance(self.failure, UnfinishedCall)


# Markers in chat templates, the more special first. All of a row's markers must be there.
TOOL_MARKERS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("qwen3_coder", ("<function=",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
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
    ("gemma4", ("<|channel>", "<channel|>")),
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
        found: set[str] = set(MARKERS) if self.is_harmony else set()
        if self.tools in TOOL_FORMATS:
            found |= {*TOOL_FORMATS[self.tools].openers, *TOOL_FORMATS[self.tools].markers}
        if self.reasoning in REASONING_FORMATS:
            reasoning = REASONING_FORMATS[self.reasoning]
            found |= {*reasoning.openers, *reasoning.closers, *reasoning.around, reasoning.token}
        return frozenset(found - {""})

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
            return thinking_of(prompt.rpartition(START)[2])

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
            start = prompt.rpartition(START)[2]
            steps = read_harmony(
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
