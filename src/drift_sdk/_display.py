"""Short descriptions of objects for people: `__repr__`, the HTML that notebooks show, names of models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from pathlib import Path

from msgspec import Struct

from drift_sdk.errors import short_repr

__all__ = ["html_table", "model_name", "state_repr", "struct_repr"]

MAX_TEXT_CHARS = 2000


def struct_repr(struct: Struct) -> str:
    """The fields of a Struct that differ from their defaults, each cut to 200 characters."""
    names, defaults = struct.__struct_fields__, struct.__struct_defaults__
    default_of = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    shown = []
    for name in names:
        value = getattr(struct, name)
        if name in default_of and type(value) is type(default_of[name]) and value == default_of[name]:
            continue

        shown.append(f"{name}={short_repr(value)}")
    return f"{type(struct).__name__}({', '.join(shown)})"


def model_name(model: str | Path) -> str:
    """A model's name for those who need not know where its files are: of a path the last part, else the hub
    id. A relative path as text may be a hub id, unless it begins with a dot."""
    text = str(model)
    if isinstance(model, str) and not text.startswith((".", "~")) and not os.path.isabs(text):
        return text

    return os.path.basename(os.path.abspath(text)) or text


def state_repr(name: str, rows: Mapping[str, str]) -> str:
    """The description of an object that is no value, such as <Engine model='tiny', state=open>."""
    return f"<{name} {', '.join(f'{label}={value}' for label, value in rows.items())}>"


def html_table(title: str, rows: Mapping[str, str], text: str | None = None) -> str:
    """A table of a label and a value in each row, and below it a text; all of it is escaped."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(label)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for label, value in rows.items()
    )
    shown = ""
    if text is not None:
        shown = f'<pre style="white-space:pre-wrap">{escape(short_text(text))}</pre>'
    return f"<div><b>{escape(title)}</b><table>{cells}</table>{shown}</div>"


def short_text(text: str) -> str:
    """A text, cut to 2,000 characters."""
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 3]}..."
