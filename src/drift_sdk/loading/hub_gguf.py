"""Headers of GGUF files on the hub, fetched without the rest of the files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import huggingface_hub
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # not marked as public
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.gguf_config import ROPE_FACTORS
from drift_sdk.loading.gguf_header import GGUFHeader, read_header

__all__ = ["copy_headers"]

FIRST_BYTES = 1 << 23
"""Bytes of a file that are fetched first. A header takes 2 to 8 MiB, nearly all of it the vocabulary."""
MAX_HEADER_BYTES = 1 << 28
MAX_SETTING_BYTES = 1 << 20
"""The most bytes of a tensor that is a setting: factors of a rotation take some hundreds."""
TIMEOUT_S = 30.0


def copy_headers(repo_id: str, revision: str | None, names: Iterable[str], folder: Path) -> None:
    """Write a sparse copy of each file into `folder`: it has the file's size, header and settings, and holes
    in place of the weights.

    Raises ModelLoadError for a file that is not a GGUF file, and errors of the hub and its network library.
    """
    for name in names:
        url = huggingface_hub.hf_hub_url(repo_id, name, revision=revision)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data, num_bytes, header = fetch_header(url, name)
        with path.open("wb") as copy:
            copy.write(data)
            copy.truncate(num_bytes)
            for stored, tensor in header.tensors.items():
                if stored in ROPE_FACTORS and tensor.num_bytes <= MAX_SETTING_BYTES:
                    copy.seek(tensor.offset)
                    copy.write(fetch_range(url, tensor.offset, tensor.num_bytes)[0])


def fetch_header(url: str, name: str) -> tuple[bytes, int, GGUFHeader]:
    """The first bytes of a file, at least its header; the file's size; and the header."""
    wanted = FIRST_BYTES
    while True:
        data, num_bytes = fetch_range(url, 0, wanted)
        try:
            return data, num_bytes, read_header(data, num_bytes=num_bytes)
        except ValueError as error:
            if len(data) >= num_bytes or wanted >= MAX_HEADER_BYTES:
                raise ModelLoadError(f"{name}: not a whole GGUF file: {error}") from error

        wanted *= 4


def fetch_range(url: str, start: int, num_bytes: int) -> tuple[bytes, int]:
    """Bytes of a file on the hub, fewer at its end, and the size of the file."""
    headers = {**build_hf_headers(), "range": f"bytes={start}-{start + num_bytes - 1}"}
    response = get_session().get(url, headers=headers, timeout=TIMEOUT_S)
    hf_raise_for_status(response)
    data: bytes = response.content
    size = response.headers.get("content-range", "").rpartition("/")[2]
    return data, int(size) if size.isdigit() else len(data)
