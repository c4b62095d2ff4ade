"""Writes docs/api.md from the package's own signatures and docstrings.

python docs/generate_api.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

import drift_sdk
import drift_sdk.openai
from drift_sdk import errors, events, measurement, prometheus, testing
from drift_sdk.openai.server import serve

FILE = Path(__file__).parent / "api.md"
PARAMETER = (
    "`ParsedT` is the type that the request's `JsonSchema` is made from: `Completion.parsed` is one."
    " It is Any for a schema that is no class, and without a schema."
)
GROUPS = {
    "Running": [
        "Engine",
        "SyncEngine",
        "ProcessEngine",
        "EnginePool",
        "Routing",
        "BaseEngine",
        "EngineConfig",
        "EngineOptions",
        "Speculation",
        "Chain",
        "StaticTree",
        "DynamicTree",
        "NGram",
        "PartialVerification",
        "Progress",
        "Download",
        "EngineStats",
        "ReplicaStats",
    ],
    "Before loading": ["inspect", "ModelInfo", "RemoteFile"],
    "Asking": [
        "SamplingParams",
        "SamplingOptions",
        "Message",
        "ToolSpec",
        "Job",
        "JsonSchema",
        "Regex",
        "Lark",
        "TokenMachine",
        "TokenState",
        "TokenBias",
    ],
    "Answers": [
        "TokenStream",
        "Samples",
        "SyncStream",
        "JobDone",
        "JobFailed",
        "Chunk",
        "Completion",
        "PromptStates",
        "Embedding",
        "Decision",
        "TokenLogprobs",
        "ToolCall",
        "Usage",
        "Timing",
        "SpeculationStats",
    ],
    "Errors": [
        "DriftError",
        "ConfigError",
        "ModelLoadError",
        "RequestError",
        "PromptTooLong",
        "QueueFull",
        "EngineClosed",
        "ExecutorError",
        "ReplicaFailed",
    ],
}


def render() -> str:
    names = [name for group in GROUPS.values() for name in group]
    missing = set(drift_sdk.__all__) - set(names) - {"FinishReason", "JobResult", "load_tree"}
    assert not missing, f"names without a group: {sorted(missing)}"
    parts = ["# API", "Generated from the code by `docs/generate_api.py`.", PARAMETER]
    for title, group in GROUPS.items():
        parts.append(f"## {title}")
        parts += [render_any(name, getattr(drift_sdk, name)) for name in group]
        if title == "Running":
            parts.append(f"### {signature('load_tree', drift_sdk.load_tree)}")
            parts.append(doc_of(drift_sdk.load_tree))
        if title == "Errors":
            parts.append(render_class("drift_sdk.errors.FieldError", errors.FieldError))
    parts.append("## Events")
    parts.append(doc_of(events))
    parts += [
        render_class(f"drift_sdk.events.{name}", getattr(events, name))
        for name in events.__all__
        if name != "Event"
    ]
    parts.append("## Metrics")
    parts.append(doc_of(prometheus))
    parts.append(f"### drift_sdk.prometheus.{signature('collector', prometheus.collector)}")
    parts.append(doc_of(prometheus.collector))
    parts.append("## Serving")
    parts.append(f"### drift_sdk.openai.{signature('app', drift_sdk.openai.app)}")
    parts.append(doc_of(drift_sdk.openai.app))
    parts.append(render_class("drift_sdk.openai.Reranker", drift_sdk.openai.Reranker))
    parts.append(f"### drift_sdk.openai.server.{signature('serve', serve)}")
    parts.append(doc_of(serve))
    parts.append("## Testing code that embeds an engine")
    parts.append(f"### drift_sdk.testing.{signature('scripted_engine', testing.scripted_engine)}")
    parts.append(doc_of(testing.scripted_engine))
    parts.append(render_class("drift_sdk.testing.Reply", testing.Reply))
    parts.append(render_class("drift_sdk.testing.ScriptedModel", testing.ScriptedModel))
    parts.append("## Measuring")
    for function in (
        measurement.recorded_engine,
        measurement.profiled_engine,
    ):
        parts.append(f"### drift_sdk.measurement.{signature(function.__name__, function)}")
        parts.append(doc_of(function))
    for cls in (measurement.AcceptanceTrace, measurement.RecordedRounds):
        parts.append(render_class(f"drift_sdk.measurement.{cls.__name__}", cls))
    return "\n\n".join(part for part in parts if part) + "\n"


def render_any(name: str, thing: Any) -> str:
    if inspect.isfunction(thing):
        return f"### {signature(name, thing)}\n\n{doc_of(thing)}"

    return render_class(name, thing)


def render_class(name: str, cls: type) -> str:
    bases = [base.__name__ for base in cls.__bases__ if base.__module__.startswith("drift_sdk")]
    parts = [f"### {name}" + (f" ({bases[0]})" if bases and issubclass(cls, Exception) else ""), doc_of(cls)]
    if issubclass(cls, msgspec.Struct):
        rows = ["| field | type | default |", "|---|---|---|"]
        for field in msgspec.structs.fields(cls):
            annotation = str(cls.__annotations__.get(field.name, field.type)).replace("|", "\\|")
            # Without the bounds, which the docstring states.
            annotation = annotation.replace("ParsedT_co", "ParsedT")
            annotation = re.sub(r"Annotated\[(.+?), Meta\(.*?\)\]", r"\1", annotation)
            rows.append(f"| `{field.name}` | `{annotation}` | {default_of(field)} |")
        parts.append("\n".join(rows))
    for method, value in members(cls):
        if isinstance(value, property | cached_property):
            parts.append(f"#### {name}.{method}\n\n{doc_of(value)}".rstrip())
        else:
            parts.append(f"#### {name}.{signature(method, value)}\n\n{doc_of(value)}".rstrip())
    return "\n\n".join(part for part in parts if part)


def members(cls: type) -> list[tuple[str, Any]]:
    """Public methods and properties, in the order of the source: those of the class, then those of its bases
    in this package."""
    if issubclass(cls, Exception):
        return []

    found: dict[str, Any] = {}
    for each in cls.__mro__:
        if not each.__module__.startswith("drift_sdk"):
            continue

        for method, value in vars(each).items():
            value = value.__func__ if isinstance(value, classmethod) else value
            is_shown = inspect.isfunction(value) or isinstance(value, property | cached_property)
            if not method.startswith("_") and is_shown:
                found.setdefault(method, value)
    return list(found.items())


def signature(name: str, function: Any) -> str:
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
    shown = re.sub(r"\(self: [^,)]+", "(self", shown).replace("ParsedT_co", "ParsedT")
    return f"`{prefix}{name}{shown}`".replace("(self, ", "(").replace("(cls, ", "(").replace("(self)", "()")


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return f"`{field.default!r}`"

    return "" if field.default_factory is msgspec.NODEFAULT else f"`{field.default_factory()!r}`"


def doc_of(thing: Any) -> str:
    """The docstring; its tables, and aligned fields, as code."""
    lines = (inspect.getdoc(thing) or "").splitlines()
    blocks: list[str] = []
    for block in "\n".join(lines).split("\n\n"):
        is_table = any(line.split(":")[0].isidentifier() and ":  " in line for line in block.splitlines())
        is_example = block.startswith(("    ", "==="))
        blocks.append(f"```\n{textwrap.dedent(block)}\n```" if is_table or is_example else block)
    return "\n\n".join(blocks)


if __name__ == "__main__":
    FILE.write_text(render())
