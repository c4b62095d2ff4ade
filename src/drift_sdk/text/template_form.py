"""Conversations in the form that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from drift_sdk.errors import RequestError
from drift_sdk.text.answers.values import decode_json

__all__ = ["TEXT_ROLES", "ContentForm", "TemplateForm"]

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
