"""Descriptions of tools, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from drift_sdk.text.schema_references import followed

__all__ = ["Tool", "ToolSet"]


class Tool(Struct, frozen=True):
    """A tool.

    name:       as the model writes it in calls.
    parameters: JSON schema of its arguments, an object, joined with what it refers to; empty if the
                description has none.
    """

    name: str
    parameters: Mapping[str, Any]

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of its arguments by name."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        """Names of arguments that every call has."""
        required = self.parameters.get("required")
        names = required if isinstance(required, Sequence) and not isinstance(required, str) else ()
        return frozenset(name for name in names if isinstance(name, str) and name in self.properties)


class ToolSet(dict[str, Tool]):
    """Tools by name. Of tools with the same name, the last counts."""

    @classmethod
    def of(cls, descriptions: object) -> ToolSet:
        """The tools of a list of descriptions, {"type": "function", "function": {...}} or the inner part
        alone. Descriptions of another form are left out: the chat template rejects them or makes sense of
        them."""
        given = descriptions if isinstance(descriptions, Sequence) else ()
        inner = [tool.get("function", tool) for tool in given if isinstance(tool, Mapping)]
        found = cls()
        for each in inner:
            if isinstance(each, Mapping) and isinstance(name := each.get("name"), str) and name:
                parameters = each.get("parameters")
                schema = followed(parameters, parameters) if isinstance(parameters, Mapping) else {}
                found[name] = Tool(name, schema)
        return found

    def only(self, name: str) -> ToolSet:
        """The set of one of its tools."""
        return ToolSet({name: self[name]})
