"""Tensors of the package have types of their own: a program that embeds it may set torch's default type."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import drift_sdk

ROOT = Path(drift_sdk.__file__).parent
TYPED = {"empty", "eye", "full", "linspace", "normal", "ones", "rand", "randn", "tensor", "zeros"}
"""Functions of torch whose results have the default type, or that of values, unless one is given. `arange`
of integers has always int64."""


def untyped(source: str) -> Iterator[str]:
    """The calls of `TYPED` without a type."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            module, _, name = ast.unparse(node.func).rpartition(".")
            is_typed = "dtype" in {keyword.arg for keyword in node.keywords}
            if module == "torch" and name in TYPED and not is_typed:
                yield ast.unparse(node)


def test_every_tensor_is_made_with_a_type() -> None:
    paths = sorted(ROOT.rglob("*.py"))
    assert [(path, call) for path in paths for call in untyped(path.read_text())] == []
    assert len(paths) > 100


def test_untyped_calls_are_found() -> None:
    source = "torch.full((2,), 1.0); torch.zeros(2, dtype=x); zeros(2); torch.arange(3); torch.tensor([1])"
    assert list(untyped(source)) == ["torch.full((2,), 1.0)", "torch.tensor([1])"]
