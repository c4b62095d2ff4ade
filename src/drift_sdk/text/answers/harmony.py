"""Answers in Harmony, the format of gpt-oss, https://github.com/openai/harmony.

An answer is a sequence of messages <|start|>HEADER<|message|>BODY<|end|>, the first without its beginning,
which the prompt has. A header names the role, the channel and for a call the recipient, in either order:

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

from drift_sdk.text.answers.calls import CallReader, MalformedCall
from drift_sdk.text.answers.reader import Steps
from drift_sdk.text.answers.reasoning import Thinking
from drift_sdk.text.answers.writer import AnswerWriter

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
