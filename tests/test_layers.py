"""The shape of the package: imports point down, and only where they may."""

from __future__ import annotations

import ast
from pathlib import Path

import drift_sdk

ROOT = Path(drift_sdk.__file__).parent

# From top to bottom: a module imports only modules of its own layer or of layers below.
LAYERS = [
    "__main__",
    "warm",
    "testing",
    "measurement",
    "__init__",
    "engine",
    "doctor",
    "opening",
    "executors",
    "drafting",
    "device_memory",
    "prometheus",
    "life_cycle",
    "driver",
    "model_opener",
    "delivery",
    "recorder",
    "intake",
    "text_work",
    "inbox",
    "commands",
    "opened_model",
    "request",
    "prompts",
    "slot_sampling",
    "mapping",
    "stream",
    "feed",
    "progress",
    "bridge",
    "scheduling",
    "execution",
    "models",
    "loading",
    "speculation",
    "text",
    "_kernels",
    "stage_times",
    "driven_slots",
    "recorded_rounds",
    "metrics",
    "kv_sizing",
    "steps",
    "results",
    "config",
    "acceptance_trace",
    "drafts",
    "params",
    "grammars",
    "frozen_mapping",
    "files",
    "plain_data",
    "process_hooks",
    "validation",
    "errors",
]
WITHOUT_TORCH = [
    "scheduling",
    "speculation",
    "text",
    "engine",
    "prometheus",
    "life_cycle",
    "driver",
    "model_opener",
    "delivery",
    "recorder",
    "intake",
    "text_work",
    "inbox",
    "commands",
    "opened_model",
    "request",
    "prompts",
    "mapping",
    "stream",
    "feed",
    "bridge",
    "steps",
    "testing",
    "measurement",
]
ONLY_IN = {"triton": ["_kernels"], "cuda": ["execution/graphs", "execution/device"]}


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1] if "." in module else "__init__")


def imports_of(file: Path, *, top_level: bool) -> list[str]:
    tree = ast.parse(file.read_text())
    nodes = tree.body if top_level else list(ast.walk(tree))
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            names.append(node.module)
    return names


def modules() -> list[tuple[str, Path]]:
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(("drift_sdk", *parts))
        found.append((name.removesuffix(".__init__") if len(parts) > 1 else name, file))
    return found


def test_every_module_has_a_layer() -> None:
    tops = {name.split(".")[1] for name, _ in modules()}
    assert tops <= set(LAYERS), tops - set(LAYERS)


def test_imports_point_down() -> None:
    for name, file in modules():
        for imported in imports_of(file, top_level=False):
            if imported.split(".")[0] == "drift_sdk":
                assert layer(imported) >= layer(name), f"{name} imports {imported}"


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


def test_a_file_fits_in_the_head() -> None:
    for _, file in modules():
        assert len(file.read_text().splitlines()) <= 400, file


def test_exported_names_exist_and_are_sorted() -> None:
    assert drift_sdk.__all__ == sorted(drift_sdk.__all__)
    for name in drift_sdk.__all__:
        assert getattr(drift_sdk, name).__module__.startswith("drift_sdk") or name == "FinishReason"
