"""The shape of the package: imports point down, and only where they may."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import drift_sdk

ROOT = Path(drift_sdk.__file__).parent

ARCHITECTURE = Path(__file__).parents[1] / "docs" / "internals" / "architecture.md"
PACKAGES = ("drift_sdk", "drift_sdk.execution", "drift_sdk._kernels")
WITHOUT_TORCH = [
    "sync",
    "engine",
    "serving",
    "stream",
    "jobs",
    "driver",
    "scheduling",
    "draft_policy",
    "trees",
    "text",
    "steps",
    "prometheus",
    "openai",
    "testing",
    "measurement",
]
ONLY_IN = {
    "triton": ["_kernels", "cli/tune"],
    "cuda": ["execution/graph/gpu_graphs", "execution/device", "_kernels/launch/cuda_programs"],
}


def ranks_of(package: str) -> dict[str, int]:
    """Row of each member of a package in the tables of docs/internals/architecture.md; 0 is the top."""
    lines = ARCHITECTURE.read_text().splitlines()
    rows = itertools.takewhile(bool, lines[lines.index(f"`{package}`") + 4 :])
    return {name: rank for rank, row in enumerate(rows) for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def member_of(package: str, module: str) -> str | None:
    """The member of the package that a module is, or lies in; None if it lies elsewhere."""
    if package == module == "drift_sdk":
        return "__init__"

    prefix = package + "."
    return module.removeprefix(prefix).split(".")[0] if module.startswith(prefix) else None


def statements_of(file: Path) -> Iterator[ast.AST]:
    """All statements of a module, also those inside others: `ast.walk` without the expressions."""
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            waiting += getattr(node, name, ())


@functools.cache
def imports_of(file: Path, *, top_level: bool) -> list[str]:
    nodes = ast.parse(file.read_text()).body if top_level else statements_of(file)
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            names.append(node.module)
    return names


@functools.cache
def modules() -> list[tuple[str, Path]]:
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(("drift_sdk", *parts))
        found.append((name.removesuffix(".__init__") if len(parts) > 1 else name, file))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_documented_tables_name_what_is_there(package: str) -> None:
    members = {member_of(package, name) for name, _ in modules()} - {None}
    assert members == set(ranks_of(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_down(package: str) -> None:
    ranks = ranks_of(package)
    for name, file in modules():
        here = member_of(package, name)
        for imported in imports_of(file, top_level=False):
            there = member_of(package, imported)
            if here is not None and there is not None and here != there:
                assert ranks[here] <= ranks[there], f"{name} imports {imported}"


def test_folders_do_not_import_each_other_in_a_circle() -> None:
    for package in PACKAGES:
        edges: dict[str, set[str]] = {}
        for name, file in modules():
            here = member_of(package, name)
            found = {member_of(package, imported) for imported in imports_of(file, top_level=False)}
            if here is not None:
                edges.setdefault(here, set()).update(each for each in found if each not in (None, here))
        TopologicalSorter(edges).prepare()  # CycleError names the circle


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Not inside functions either, nor for annotations alone."""
    edges = {name: {*imports_of(file, top_level=False)} - {name} for name, file in modules()}
    TopologicalSorter(edges).prepare()  # CycleError names the circle


def test_torch_free_modules_stay_so() -> None:
    for name, file in modules():
        if name.split(".")[1] in WITHOUT_TORCH:
            assert "torch" not in {i.split(".")[0] for i in imports_of(file, top_level=False)}, name


def test_gpu_libraries_have_one_home() -> None:
    for name, file in modules():
        place = name.removeprefix("drift_sdk.").replace(".", "/")
        for imported in imports_of(file, top_level=False):
            homes = ONLY_IN.get(imported.split(".")[0])
            assert homes is None or any(place.startswith(home) for home in homes), f"{name}: {imported}"


def test_engine_on_the_cpu_needs_neither_triton_nor_cuda_python() -> None:
    """They are imported inside functions of the graph executor's start."""
    files = dict(modules())
    reached, waiting = set(), ["drift_sdk.startup.model_startup", "drift_sdk.startup.model_startup"]
    while waiting:
        name = waiting.pop()
        if name in files and name not in reached:
            reached.add(name)
            waiting += imports_of(files[name], top_level=True)
    assert "drift_sdk.execution.eager.eager_executor" in reached
    for name in reached:
        found = {imported.split(".")[0] for imported in imports_of(files[name], top_level=True)}
        assert not found & set(ONLY_IN), name


def test_a_file_fits_in_the_head() -> None:
    for _, file in modules():
        assert len(file.read_text().splitlines()) <= 900, file


def test_long_functions_say_why() -> None:
    """A body has at most 60 lines, signature and docstring aside, or the docstring says why it is longer."""
    for name, file in modules():
        for node in statements_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                docstring = ast.get_docstring(node)
                first = node.body[1 if docstring and len(node.body) > 1 else 0]
                if node.end_lineno - first.lineno >= 60:
                    assert docstring and "longer than" in docstring.lower(), f"{name}.{node.name}"


def test_exported_names_exist_and_are_sorted() -> None:
    assert drift_sdk.__all__ == sorted(drift_sdk.__all__)
    for name in drift_sdk.__all__:
        module = getattr(drift_sdk, name).__module__
        assert module.startswith("drift_sdk") or name in ("FinishReason", "JobResult")  # aliases of types
