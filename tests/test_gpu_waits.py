"""Nothing in the package waits for a whole GPU, or forbids calls of other threads: the program that an engine
is part of may capture or use the GPU on any thread."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import drift_sdk

SOURCE = Path(drift_sdk.__file__).parent
WAITING = {
    "torch.cuda.synchronize",
    "torch.accelerator.synchronize",
    "torch.cuda.graph",  # waits for the GPU, and captures in the mode "global"
    "torch.cuda.make_graphed_callables",
    "torch.cuda.MemPool",  # its destructor waits
}


def forbidden(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node)) in WAITING:
            yield f"line {node.lineno}: {name}"


def test_package_waits_for_streams_and_events_alone() -> None:
    found = {
        str(path.relative_to(SOURCE)): names
        for path in SOURCE.rglob("*.py")
        if (names := [*forbidden(path.read_text(encoding="utf-8"))])
    }
    assert not found
    assert [*forbidden("import torch\ntorch.cuda.synchronize(0)\ntorch.cuda.graphs.capture()")] == [
        "line 2: torch.cuda.synchronize"
    ]
