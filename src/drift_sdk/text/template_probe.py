"""What a chat template takes, found by rendering small conversations.

Templates differ in the forms of content, arguments and tools that they take, in ways that their source does
not tell: one that tests `content is string` leaves a list out, another prints it as Python does. Each form is
tried on a conversation whose words occur nowhere else, and counts if the prompt has these words as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from os.path import commonprefix
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from drift_sdk.text.template_form import ContentForm, TemplateForm

__all__ = ["ARGUMENTS", "TEXT", "THOUGHT", "TOOLS", "TOOL_NAME", "Probe", "Written"]

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
