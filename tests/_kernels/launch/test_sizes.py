from __future__ import annotations

import ast
from pathlib import Path

import triton

import drift_sdk
from drift_sdk._kernels.launch.arguments import cdiv, next_power_of_2

REPLACED = ("cdiv", "next_power_of_2")
SIZES = [*range(130), 2**20 - 1, 2**20, 2**20 + 1, 2**40 + 1]


def test_sizes_are_those_of_triton() -> None:
    for size in SIZES:
        assert next_power_of_2(size) == triton.next_power_of_2(size)
        for part in (1, 2, 3, 64, 100):
            assert cdiv(size, part) == triton.cdiv(size, part)


def test_launches_do_not_call_those_of_triton() -> None:
    """They take ten times as long, at each launch of a start."""
    for file in Path(drift_sdk.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if not any(name in text for name in REPLACED):
            continue

        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr in REPLACED:
                assert not (isinstance(node.value, ast.Name) and node.value.id == "triton"), file
