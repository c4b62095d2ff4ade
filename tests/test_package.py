"""Wheel and sdist: their contents, and that an installed wheel works without the source tree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import drift_sdk

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "drift_sdk"
VERSION = drift_sdk.__version__
NAME = f"drift_engine-{VERSION}"

pytestmark = pytest.mark.timeout(300)

INSTALLED = """
import importlib.metadata, json, runpy, sys
import drift_sdk
metadata = importlib.metadata.metadata("drift-engine")
has_torch = "torch" in sys.modules
import drift_sdk.startup.model_startup  # what an engine imports when it starts
print(json.dumps({
    "file": drift_sdk.__file__,
    "versions": [drift_sdk.__version__, metadata["Version"]],
    "has_torch": has_torch,
    "rare": sorted({"gguf", "huggingface_hub", "triton"} & sys.modules.keys()),
}), flush=True)
sys.argv[1:] = ["doctor", "--json"]
runpy.run_module("drift_sdk", run_name="__main__", alter_sys=True)
"""
"""A program whose first line tells of what an engine imports; the others are those of the command."""


def run(*command: str | Path, cwd: Path) -> str:
    ran = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def build(tree: Path, target: str, folder: Path) -> Path:
    """Build in the current environment, so that nothing is downloaded."""
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=tree)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_of_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build(folder / NAME, "wheel", tmp_path_factory.mktemp("wheel-of-sdist"))


def source_files() -> set[str]:
    files = (file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(PACKAGE.parent).as_posix() for file in files}


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"{NAME}.dist-info/METADATA").decode())


def test_wheel_contains_exactly_the_package(wheel: Path) -> None:
    assert wheel.name == f"{NAME}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        license_text = archive.read(f"{NAME}.dist-info/licenses/LICENSE").decode()
    package = {name for name in names if not name.startswith(f"{NAME}.dist-info/")}
    assert package == source_files()
    assert "drift_sdk/py.typed" in package
    assert any(re.fullmatch(r"drift_sdk/_kernels/.*tuned/.+\.json", name) for name in package)
    assert license_text == (ROOT / "LICENSE").read_text()


def test_wheel_metadata_is_complete(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert (metadata["Name"], metadata["Version"]) == ("drift-engine", VERSION)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "clients",
        "grammar",
        "metrics",
        "openai",
        "perf",
        "ray",
        "test",
    }


def test_wheel_has_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        scripts = archive.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert scripts.split() == ["[console_scripts]", "drift-sdk", "=", "drift_sdk.__main__:run"]


def test_sdist_contains_sources_docs_examples_and_tests(sdist: Path) -> None:
    assert sdist.name == f"{NAME}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    files = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert {name.split("/")[0] for name in names} == {*files, "src", "docs", "examples", "tests"}
    assert {f"src/{name}" for name in source_files()} <= names
    assert {"docs/guide/streaming.md", "examples/prompts.jsonl", "tests/conftest.py"} <= names
    assert not [name for name in names if re.search(r"__pycache__|\.cache|\.pyc|tests/perf", name)]


def test_wheel_of_the_sdist_is_the_same(wheel: Path, wheel_of_sdist: Path) -> None:
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(wheel_of_sdist) as other:
        contents = [{name: archive.read(name) for name in archive.namelist()} for archive in (one, other)]
    assert contents[0] == contents[1]


def test_installed_wheel_works(wheel_of_sdist: Path, tmp_path: Path) -> None:
    """Install into an empty virtual environment, which finds the dependencies in the current one."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    (packages,) = folder.glob("[Ll]ib/**/site-packages")
    run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python),
        *("install", "--no-deps", "--no-index", "--no-compile", wheel_of_sdist),
        cwd=tmp_path,
    )
    # Folders named in a .pth file are searched, but .pth files in them (an editable install's) are not read.
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")

    # Without PYTHONPATH and the working directory.
    first, _, diagnosed = run(python, "-I", "-W", "error", "-c", INSTALLED, cwd=tmp_path).partition("\n")
    found = json.loads(first)
    assert Path(found["file"]).is_relative_to(packages)
    assert found["versions"] == [VERSION, VERSION]
    assert not found["has_torch"]
    assert found["rare"] == []  # libraries that only some models need

    diagnosis = json.loads(diagnosed)
    assert (diagnosis["is_usable"], diagnosis["drift_sdk"]) == (True, VERSION)


def test_version_is_in_the_changelog() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[:2] == ["Unreleased", VERSION]


def test_documents_do_not_name_the_package_of_another_project() -> None:
    """On the package index, drift-sdk is the name of another project."""
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.py")]
    wrong = re.compile(r"pip install.*drift-sdk|drift-sdk\[")
    assert not [str(text) for text in texts if wrong.search(text.read_text())]
