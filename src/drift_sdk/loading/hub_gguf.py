"""Headers of GGUF files on the hub, fetched without the rest of the files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
MAX_SKIPPED_BYTES = 1 << 28
"""The most bytes that are read to get to a part of a file, from a hub that sends whole files."""
READ_BYTES = 1 << 16
TIMEOUT_S = 30.0
PARTIAL_CONTENT = 206
SIZE = re.compile("[0-9]{1,18}")
CONTENT_RANGE = re.compile("bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})")


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
    """Bytes of a file on the hub, fewer at its end, and the size of the file.

    Of a hub that sends the whole file, no more is read than these bytes and those before them. Raises
    ModelLoadError if many lie before them, or if the hub does not tell the size, and errors of the hub and
    its network library.
    """
    end = start + num_bytes
    headers = {**build_hf_headers(), "range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}
    with streamed(url, headers) as (response, parts):
        hf_raise_for_status(response)
        offset, size = sent_part(response)
        if not 0 <= start - offset <= MAX_SKIPPED_BYTES:
            wrong = f"asked for byte {start}, got byte {offset} first"
            raise ModelLoadError(f"the hub does not send parts of files: {wrong}")

        data = bytearray()
        while offset < end and (part := next(parts, None)) is not None:
            data += part[max(start - offset, 0) : end - offset]
            offset += len(part)

    if size is None and offset >= end:
        raise ModelLoadError("the hub does not tell the size of the file")

    return bytes(data), offset if size is None else size


@contextmanager
def streamed(url: str, headers: dict[str, str]) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """The response to a request, and its contents as they arrive."""
    session: Any = get_session()
    if callable(session.stream):  # of httpx
        with session.stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
            yield response, response.iter_bytes()
    else:  # of requests, before version 1.0 of the library
        with session.get(url, headers=headers, timeout=TIMEOUT_S, stream=True) as response:
            yield response, response.iter_content(READ_BYTES)


def sent_part(response: Any) -> tuple[int, int | None]:
    """The first byte of a file that a response sends, and the size of the file; None if it does not tell."""
    if response.status_code == PARTIAL_CONTENT:
        found = CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if found is None:
            raise ModelLoadError("the hub sends a part of the file, and does not tell which")

        return int(found[1]), int(found[2])

    length = response.headers.get("content-length", "")
    is_plain = response.headers.get("content-encoding", "identity") == "identity"
    return 0, int(length) if is_plain and SIZE.fullmatch(length) else None
