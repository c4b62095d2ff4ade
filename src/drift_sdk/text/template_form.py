"""Conversations in the form that a chat template takes, and how this form is found.

Templates differ in the forms of content, arguments and tools that they take, in ways that their source does
not tell: one that tests `content is string` leaves a list out, another prints it as Python does. Each form is
tried on a small conversation whose words occur nowhere else, and counts if the prompt has these words as
text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from os.path import commonprefix
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from drift_sdk.errors import RequestError
from drift_sdk.text.tools import decode_json

ContentForm = Literal["text", "part", "parts", "either"]
"""Form of a content: text, a list of one part, a list of parts, or text as well as a list."""

TEXT_ROLES = ("system", "developer", "user", "assistant")
"""Roles whose content is text, or a list of parts. Tools may answer with other data."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names that messages and templates have for reasoning."""

KINDS = {
    "image": "images are",
    "image_url": "images are",
    "input_image": "images are",
    "audio": "audio is",
    "audio_url": "audio is",
    "input_audio": "audio is",
    "video": "videos are",
    "video_url": "videos are",
    "file": "files are",
}
"""Other types of parts than text, in the words of an error message."""


class TemplateForm(Struct, frozen=True, kw_only=True):
    """What a chat template takes, where templates differ.

    contents:       form of the content by role; "text" for roles that are missing.
    arguments:      form of the arguments of calls; "text" is JSON.
    empty_content:  content of the assistant's message that has calls and no text.
    tools:          place of the tools: the variable, or the field `tools` of the system message, as a list or
                    as JSON text; None = the template does not read tools.
    shows_calls:    whether the calls of earlier messages are in the prompt.
    """

    contents: Mapping[str, ContentForm] = {}
    arguments: Literal["mapping", "text"] = "mapping"
    empty_content: Literal[""] | None = ""
    tools: Literal["variable", "system list", "system text"] | None = "variable"
    shows_calls: bool = True

    def arranged(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None
    ) -> list[dict[str, Any]]:
        """Messages of plain data in this form. RequestError for parts that are no text, and for arguments
        that are no mapping and no JSON object."""
        found = [self._message(f"messages[{index}]", message) for index, message in enumerate(messages)]
        if not tools or self.tools not in ("system list", "system text"):
            return found

        given = tools if self.tools == "system list" else json.dumps(tools, ensure_ascii=False)
        if found[0]["role"] != "system":
            found.insert(0, self._message("messages[0]", {"role": "system", "content": ""}))
        found[0] = {"tools": given, **found[0]}
        return found

    def _message(self, field: str, message: dict[str, Any]) -> dict[str, Any]:
        reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            arranged = [
                self._call(f"{field}.tool_calls[{index}]", call) if isinstance(call, dict) else call
                for index, call in enumerate(calls)
            ]
            message = message | {"tool_calls": arranged}
        if "content" in message:
            message = message | {"content": self._content(f"{field}.content", message)}
        if message["role"] == "assistant" and message.get("content", "") in (None, "", []):
            message = message | {"content": self.empty_content if calls else ""}
        return message

    def _content(self, field: str, message: dict[str, Any]) -> Any:
        """The content of a message. Data from tools that is no text is left as it is."""
        role, content = message["role"], message["content"]
        form = self.contents.get("system" if role == "developer" else role, "text")
        takes_list = form in ("parts", "either")
        if isinstance(content, list | tuple) and (role in TEXT_ROLES or is_list_of_parts(content)):
            texts = [
                text_of(f"{field}[{index}]", part, may_think=takes_list) for index, part in enumerate(content)
            ]
            if takes_list:
                return list(content)

            content = "\n".join(texts)
        needs_list = isinstance(content, str) and content and form in ("part", "parts")
        return [{"type": "text", "text": content}] if needs_list else content

    def _call(self, field: str, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        if not isinstance(function, dict) or "name" not in function:
            return call  # the template has its own rules

        place = f"{field}.function" if "function" in call else field
        arguments = function.get("arguments")
        mapping = arguments_of(f"{place}.arguments", arguments)
        if self.arguments == "mapping":
            arguments = mapping
        elif not (isinstance(arguments, str) and arguments.strip()):
            arguments = json.dumps(mapping, ensure_ascii=False)
        function = function | {"arguments": arguments}
        return call | {"function": function} if "function" in call else function


def is_list_of_parts(content: Sequence[Any]) -> bool:
    """Whether a tool's answer is a list of parts, and no other data with a `type`."""
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    return bool(kinds) and all(
        isinstance(kind, str) and kind in part and (kind in KINDS or kind == "text")
        for kind, part in zip(kinds, content, strict=True)
    )


def text_of(field: str, part: object, *, may_think: bool) -> str:
    """The text of a part; RequestError if it has none. may_think: it may also be a thought, which the
    template renders or leaves out."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind == "text" and isinstance(text, str):
        return text

    if kind == "thinking" and may_think:
        return ""

    allowed = '{"type": "text", "text": ...}'
    if isinstance(kind, str) and kind in KINDS:
        allowed += f": {KINDS[kind]} not supported by this model"
    elif isinstance(kind, str) and kind != "text":
        allowed += f": parts of the type {kind!r} are not supported"
    raise RequestError.of(field, part, allowed)


def arguments_of(field: str, arguments: object) -> dict[str, Any]:
    """The arguments of a call, which may be JSON text, or empty."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}

    try:
        found = decode_json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise RequestError.of(field, arguments, f"a JSON object ({error})") from error

    if not isinstance(found, dict):
        raise RequestError.of(field, arguments, "a mapping, or a JSON object as text")

    return found


TOOL_NAME = "probed_tool"
ARGUMENTS: dict[str, str | int] = {"place": "probed-place", "count": 3}
LATER_ARGUMENTS: dict[str, str | int] = {"place": "later-place", "count": 5}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "A place."},
                    "count": {"type": "integer", "description": "A count."},
                },
                "required": ["place", "count"],
            },
        },
    }
]
THOUGHT = "A probed thought."
TEXT = "A probed text."
MORE_TEXT = "One text more."
USER: dict[str, Any] = {"role": "user", "content": "A question."}
RESULT: dict[str, Any] = {"role": "tool", "name": TOOL_NAME, "tool_call_id": "probedAa1", "content": "done"}


def calling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a call. Mistral's templates require ids of nine letters and digits."""
    function = {"name": TOOL_NAME, "arguments": arguments}
    call = {"id": RESULT["tool_call_id"], "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


CALL = calling(ARGUMENTS)
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [USER, CALL, RESULT, {"role": "assistant", "content": "So."}, USER, calling(LATER_ARGUMENTS), RESULT],
    [USER, CALL, RESULT],
    [USER, CALL],
    [CALL],
)
"""Conversations with calls, longest first: templates differ in what they require around a call."""

MAX_PROMPT_CHARS = 1 << 18
"""Most characters of a prompt that is looked at. Prompts of small conversations are shorter."""
ARGUMENT_FORMS: tuple[Literal["mapping", "text"], ...] = ("mapping", "text")


class Render(Protocol):
    """Renders messages that have the form that the template is to take. Any error may be raised."""

    def __call__(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None, add_generation_prompt: bool
    ) -> str: ...


class Written(Struct, frozen=True):
    """An answer as a template writes it into a prompt.

    prompt: the prompt before it.
    answer: the answer, perhaps with what ends a turn.
    """

    prompt: str
    answer: str


class Probe:
    """The findings about a template.

    render:      renders with the template. An error means that the template rejects the conversation.
    asks_none:   whether the template asks if the content of a message is None.
    reads_tools: whether it reads the variable `tools`.

    form:        what it takes.
    call:        a call of TOOL_NAME with ARGUMENTS, as the template writes it; None if it does not.
    thought:     an answer of THOUGHT and TEXT, as it writes them; None if it leaves reasoning out.
    """

    def __init__(self, render: Render, *, asks_none: bool, reads_tools: bool) -> None:
        self._render = render
        self.form: TemplateForm = TemplateForm(tools=None)
        self._find_content("user", lambda content: [{"role": "user", "content": content}])
        self._find_content("system", lambda content: [{"role": "system", "content": content}, USER])
        self._find_content(
            "assistant", lambda content: [USER, {"role": "assistant", "content": content}, USER]
        )
        self._find_tools(reads_tools)
        self._find_calls((None, "") if asks_none else ("", None))
        self._find_content("tool", lambda content: [USER, CALL, RESULT | {"content": content}])
        self.call: Written | None = (
            self._written(CALL, TOOLS, ARGUMENTS["place"]) if self.form.shows_calls else None
        )
        answer = {"role": "assistant", "content": TEXT, "reasoning_content": THOUGHT}
        self.thought: Written | None = self._written(answer, None, THOUGHT)

    def _prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        form: TemplateForm | None = None,
        add_generation_prompt: bool = False,
    ) -> str | None:
        """The prompt for messages in a form, None = as found until now; None if the template rejects it."""
        form = self.form if form is None else form
        try:
            prompt = self._render(form.arranged(messages, tools), tools, add_generation_prompt)
        except Exception:  # the template is the model's code
            return None

        return prompt if len(prompt) <= MAX_PROMPT_CHARS else None

    def _find_content(
        self, role: str, conversation: Callable[[str | list[dict[str, Any]]], Sequence[dict[str, Any]]]
    ) -> None:
        """Find out which contents of a role become text. conversation: makes messages with a content."""
        two = [{"type": "text", "text": text} for text in (TEXT, MORE_TEXT)]
        as_text = self._prompt(conversation(TEXT), form=self._with_content(role, "text"))
        as_part = self._prompt(conversation(TEXT), form=self._with_content(role, "part"))
        as_parts = self._prompt(conversation(two), form=self._with_content(role, "parts"))
        takes_parts = shows_text(as_part, TEXT) and shows_text(as_parts, TEXT, MORE_TEXT)
        form: ContentForm = "text"
        if shows_text(as_text, TEXT):
            form = "either" if takes_parts and as_part == as_text else "text"
        elif shows_text(as_part, TEXT):
            form = "parts" if takes_parts else "part"
        self.form = self._with_content(role, form)

    def _with_content(self, role: str, form: ContentForm) -> TemplateForm:
        return msgspec.structs.replace(self.form, contents={**self.form.contents, role: form})

    def _find_tools(self, reads_tools: bool) -> None:
        """Find out where tools are read from."""
        places: list[Literal["variable", "system list", "system text"]] = [
            "variable",
            "system list",
            "system text",
        ]
        for place in places:
            form = msgspec.structs.replace(self.form, tools=place)
            for messages in ([{"role": "system", "content": TEXT}, USER], [USER]):
                prompt = self._prompt(messages, TOOLS, form=form) or ""
                if TOOL_NAME in prompt and (place != "system list" or "{'" not in prompt):
                    self.form = form
                    return

        if reads_tools:
            self.form = msgspec.structs.replace(self.form, tools="variable")

    def _find_calls(self, empty_contents: tuple[Literal[""] | None, ...]) -> None:
        """Find out in which form earlier calls are taken.

        empty_contents: those to try, in this order.
        """
        taken: list[TemplateForm] = []
        for messages in CONVERSATIONS:
            for arguments, content in product(ARGUMENT_FORMS, empty_contents):
                form = msgspec.structs.replace(self.form, arguments=arguments, empty_content=content)
                prompt = self._prompt(messages, TOOLS, form=form)
                if prompt is None:
                    continue

                if all(shows_call(prompt, call) for call in calls_of(messages)):
                    self.form = form
                    return

                taken.append(form)
        # Where every form is rejected, the template's own error says why, once there is a request.
        form = taken[0] if taken else msgspec.structs.replace(self.form, empty_content=empty_contents[0])
        self.form = msgspec.structs.replace(form, shows_calls=not taken)

    def _written(self, answer: dict[str, Any], tools: Sequence[Any] | None, word: object) -> Written | None:
        """An answer as the template writes it behind a question; None if it leaves a word out."""
        whole = self._prompt([USER, answer], tools)
        opened = self._prompt([USER], tools, add_generation_prompt=True)
        if whole is None or opened is None or str(word) not in whole:
            return None

        # The beginning of an answer may differ from a generation prompt that opens reasoning: both have the
        # header of the message then, which ends with a marker or a line.
        shared = commonprefix((opened, whole))
        if shared != opened:
            shared = shared[: max(shared.rfind(end) for end in (">", "]", "\n")) + 1]
        return Written(shared, whole[len(shared) :])


def calls_of(messages: Sequence[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """The arguments of all calls of some messages."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return [call["function"]["arguments"] for call in calls]


def shows_text(prompt: str | None, *texts: str) -> bool:
    """Whether a prompt has some texts in this order, and none in a part as Python or JSON prints it."""
    rest = prompt or ""
    for text in texts:
        before, found, rest = rest.partition(text)
        if not found or before.endswith(("'text': '", '"text": "', '"text":"')):
            return False

    return True


def shows_call(prompt: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a prompt has the arguments of a call, neither as Python prints them nor as text in JSON."""
    place = arguments["place"]
    return place in prompt and f"'place': '{place}'" not in prompt and f'\\"{place}' not in prompt
