"""Downloads the packages of templates.txt, and unpacks the chat templates in them, and in transformers, to
`.cache/templates`. Nothing is built, installed or run."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / ".ci" / "templates.txt"
FOLDER = ROOT / ".cache" / "templates"
STAMP = FOLDER / "packages.txt"

SOURCE_ONLY = "llama-cpp-python"  # its wheels have no templates
BACKEND = "scikit_build_core"
BACKEND_CODE = """
import pathlib, shutil

def prepare_metadata_for_build_wheel(folder, settings=None):
    fields = dict(line.split(": ", 1) for line in pathlib.Path("PKG-INFO").read_text().splitlines()[:3])
    name = f"{fields['Name'].replace('-', '_')}-{fields['Version']}.dist-info"
    pathlib.Path(folder, name).mkdir()
    shutil.copy("PKG-INFO", pathlib.Path(folder, name, "METADATA"))
    return name
"""
"""pip asks the build backend of a source archive for its metadata before it keeps the archive. This one
answers with those that the archive states, in place of the real one, which runs CMake."""


def download(folder: Path) -> None:
    backend = folder / "backend" / BACKEND
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build.py").write_text(BACKEND_CODE)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--only-binary", ":all:", "--no-binary", SOURCE_ONLY, "-r", str(LIST), "-d", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(backend.parent)})


def templates_in(archive: Path) -> Iterator[tuple[str, bytes]]:
    """File names and contents of the templates in an archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for path in wheel.namelist():
                if path.endswith(".jinja"):
                    yield Path(path).name, wheel.read(path)
        return

    with tarfile.open(archive) as source:
        for member in source:
            if member.name.endswith(".jinja") and (file := source.extractfile(member)) is not None:
                yield Path(member.name).name, file.read()


def templates_of_transformers() -> Iterator[tuple[str, bytes]]:
    """The templates that are constants in the code of transformers."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    for file in sorted(Path(spec.origin).parent.glob("models/*/*.py")):
        code = file.read_text()
        if "{%" not in code:
            continue

        for node in ast.walk(ast.parse(code)):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and text.lstrip().startswith("{") and "messages %}" in text:
                yield f"{file.stem}-{node.lineno}.jinja", text.encode()


def main() -> None:
    if STAMP.exists() and STAMP.read_text() == LIST.read_text():
        return

    with tempfile.TemporaryDirectory() as name:
        download(Path(name))
        for archive in sorted(Path(name).glob("*-*")):
            store(archive.name.partition("-")[0], templates_in(archive))
    store("transformers", templates_of_transformers())
    STAMP.write_text(LIST.read_text())


def store(package: str, templates: Iterator[tuple[str, bytes]]) -> None:
    (FOLDER / package).mkdir(parents=True, exist_ok=True)
    for name, content in templates:
        (FOLDER / package / name).write_bytes(content)


if __name__ == "__main__":
    main()
