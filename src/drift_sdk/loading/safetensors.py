"""Weights in safetensors files: one file, or shards with an index, perhaps under other names.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from drift_sdk._files import has_file, is_inside, unreadable
from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.tensors import check_dtype

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TEXT_PREFIXES = ("model.language_model.", "language_model.")
OTHER_PARTS = (
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
    "model.multi_modal_projector.",
    "model.vision_adapter.",
    "model.vision_embedder.",
    "model.vision_projection.",
    "model.vision_tower.",
    "model.visual.",
    "multi_modal_projector.",
    "vision_tower.",
    "visual.",
)
MODEL_PREFIX, HEAD_PREFIX = "model.", "lm_head."
FIRST_TENSOR = "embed_tokens.weight"
"""A tensor of a model that was saved without its head; of others, "model." is before this name."""
LENGTH_BYTES = 8
"""A file begins with the length of its JSON header, in bytes, as a little-endian integer of so many bytes."""
NUM_READERS = 8
"""Threads that read at a time: each copies through the CPU's cache, which is slower than a GPU's bus."""
CHUNK_BYTES = 1 << 20
"""Size of the buffer for reading: small enough to be still in the CPU's cache when it is copied on."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of tensors, by their names in headers."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    """A tensor's entry in a file's header. Offsets are in bytes from the end of the header."""

    dtype: str
    data_offsets: tuple[int, int]


class SafetensorsFolder:
    """The TensorSource of a folder with model.safetensors, or with model.safetensors.index.json and shards.

    Of a model that reads images as well, it has the tensors of the text part alone, under the names that they
    have in a model of text.

    is_decoder: the folder has a model, no draft. If it was saved without its head, its tensors are named
                without "model." in the files, and with it here.

    Opening reads only the headers. Raises ModelLoadError naming a file that is missing, truncated, corrupt or
    outside the folder.
    """

    num_readers = NUM_READERS

    def __init__(self, folder: Path, *, is_decoder: bool = False) -> None:
        self.location: str = str(folder)
        if has_file(folder / SINGLE_FILE):
            handle = _open(folder / SINGLE_FILE)
            files = dict.fromkeys(handle.keys(), SINGLE_FILE)
            self._handles = {SINGLE_FILE: handle}
        elif has_file(folder / INDEX_FILE):
            files = read_index(folder)
            self._handles = {file: _open(folder / file) for file in sorted(set(files.values()))}
        else:
            raise ModelLoadError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")

        self._folder = folder
        self._entries = {file: _entries(folder / file) for file in self._handles}
        self._check_places(files)
        self._stored_names = text_names(files, str(folder), is_decoder=is_decoder)
        self._files = {name: files[stored] for name, stored in self._stored_names.items()}

    def _check_places(self, files: dict[str, str]) -> None:
        """Raise ModelLoadError unless each tensor is in the file that the index names, and in no other."""
        for name, file in files.items():
            if name not in self._entries[file]:
                raise ModelLoadError(
                    f"{self._folder / file}: tensor {name} is missing, {INDEX_FILE} places it there"
                )

        for file, entries in self._entries.items():
            for name in entries:
                other = files.get(name, file)
                if other != file:
                    raise ModelLoadError(
                        f"{self._folder / file}: tensor {name} is in {other} as well, expected it once"
                    )

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        handle = self._handles[self._files[name]]
        return tuple(handle.get_slice(self._stored_names[name]).get_shape())

    def file(self, name: str) -> str:
        return str(self._folder / self._files[name])

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor. Of a rare one, safetensors knows it, by a view of the mapping."""
        return DTYPES.get(self._entry(name).dtype) or self.get(name).dtype

    def check(self, name: str, place: torch.dtype) -> None:
        """Check the header, as in CheckedSource."""
        check_dtype(self, name, self.dtype(name), place)

    def _entry(self, name: str) -> _Entry:
        return self._entries[self._files[name]][self._stored_names[name]]

    def get(self, name: str) -> torch.Tensor:
        try:
            handle = self._handles[self._files[name]]
            tensor: torch.Tensor = handle.get_tensor(self._stored_names[name])
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelLoadError(f"{self.file(name)}: tensor {name} cannot be read: {error}") from error

        return tensor

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """Fill `place`, as in InPlaceSource.

        Does not read through the memory mapping that `get` returns views of: its pages would stay in memory
        beside the copies.
        """
        dtype = self.dtype(name)
        if dtype != place.dtype:
            self.check(name, place.dtype)
        try:
            with FileIO(self._folder / self._files[name]) as stored:
                stored.seek(self._entry(name).data_offsets[0])
                _read_tensor(stored, dtype, place.view(-1))
        except OSError as error:
            raise ModelLoadError(f"{self.file(name)}: tensor {name} cannot be read: {error}") from error


def text_names(stored_names: Collection[str], place: str, *, is_decoder: bool) -> dict[str, str]:
    """The names in files of the tensors of the text model, by their names in a model of text with a head.
    Raises ModelLoadError naming `place` for two tensors that have the same name then. is_decoder: as of
    `SafetensorsFolder`."""
    if is_decoder and FIRST_TENSOR in stored_names:
        return {
            name if name.startswith(HEAD_PREFIX) else f"{MODEL_PREFIX}{name}": name for name in stored_names
        }

    if not any(name.startswith(TEXT_PREFIXES) for name in stored_names):
        return {name: name for name in stored_names}

    found: dict[str, str] = {}
    for name in stored_names:
        text_name = name
        if name.startswith(TEXT_PREFIXES):
            parts = name.split(".")
            parts.remove("language_model")
            text_name = ".".join(parts)
            if not text_name.startswith(("model.", "lm_head.")):
                text_name = f"model.{text_name}"
        elif name.startswith(OTHER_PARTS):
            continue

        if text_name in found:
            raise ModelLoadError(f"{place}: tensors {found[text_name]} and {name}, expected one of them")

        found[text_name] = name

    return found


def _read_tensor(stored: FileIO, dtype: torch.dtype, place: torch.Tensor) -> None:
    """Fill `place` [N] with the next N numbers of a file, which are stored as `dtype`."""
    if place.device.type == "cpu" and place.dtype == dtype:
        _read_bytes(stored, _memory(place))
        return

    # Through a buffer, pinned for a GPU so that it reads the memory itself, and converted on the device.
    is_pinned = place.device.type == "cuda"
    buffer = torch.empty(CHUNK_BYTES // dtype.itemsize, dtype=dtype, device="cpu", pin_memory=is_pinned)
    memory, is_converted = _memory(buffer), place.dtype != dtype
    # The other readers wait for the interpreter's lock while this one has it: it does little for each part.
    for part in torch.split(place, len(buffer)):
        if len(part) < len(buffer):  # the last one
            buffer, memory = buffer[: len(part)], memory[: len(part) * dtype.itemsize]
        _read_bytes(stored, memory)
        part.copy_(buffer.to(part.device) if is_converted else buffer)


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return tensor.view(torch.uint8).numpy().data


def _read_bytes(stored: FileIO, rest: memoryview) -> None:
    """Fill `rest` with the next bytes of a file; OSError if it ends before."""
    while rest:
        num_read = stored.readinto(rest)
        if not num_read:
            raise OSError("the file has become shorter")

        rest = rest[num_read:]


def read_index(folder: Path) -> dict[str, str]:
    """The shard of each tensor, as a path inside the folder. Raises ModelLoadError naming the index file."""
    path = folder / INDEX_FILE
    try:
        weight_map = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except OSError as error:
        raise unreadable(path, error) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not an index of shards: {error}") from error

    for file in sorted(set(weight_map.values())):
        # The file may be a symbolic link that leads out of the folder, as in the hub's cache, but not the
        # name.
        if not is_inside(file):
            raise ModelLoadError(f"{path}: shard {short_repr(file)}, expected a path inside the folder")

    return weight_map


def _entries(path: Path) -> dict[str, _Entry]:
    """The entry of each tensor of a file that is known to be whole, with offsets from the file's start."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = file.read(num_bytes)

    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: not a safetensors header: {error}") from error

    _check_unique(path, header, len(raw))
    for entry in entries.values():
        first, end = (LENGTH_BYTES + num_bytes + offset for offset in entry.data_offsets)
        entry.data_offsets = first, end
    return entries


def _check_unique(path: Path, header: bytes, num_tensors: int) -> None:
    """Raise ModelLoadError if the header of a file that is known to be whole has a name twice.

    num_tensors: the number of different names.
    """
    # Each entry has this key. A header that has it as often as names, none of them escaped, has each name
    # once: to decode all pairs takes long for many tensors.
    if header.count(b'"data_offsets"') == num_tensors and b"\\" not in header:
        return

    def check_pairs(pairs: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ModelLoadError(f"{path}: {short_repr(name)} is in the header twice, expected it once")

            seen.add(name)

    json.loads(header, object_pairs_hook=check_pairs)


def _open(path: Path) -> Any:
    """An open safetensors file; ModelLoadError naming it if it is missing, truncated or corrupt."""
    if not has_file(path):
        raise ModelLoadError(f"{path}: missing, {INDEX_FILE} names it")

    try:
        path.open("rb").close()  # safetensors has one error for all files that it cannot open
    except OSError as error:
        raise unreadable(path, error) from error

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: not a whole safetensors file: {error}") from error


class RenamedTensors:
    """The TensorSource of a folder whose tensors have other names than Hugging Face's.

    Raises ModelLoadError for two tensors of one name.
    """

    def __init__(self, folder: SafetensorsFolder, rename: Callable[[str], str]) -> None:
        self.location = folder.location
        self.num_readers = folder.num_readers
        self._folder = folder
        self._stored_names: dict[str, str] = {}
        for stored in folder.names():
            other = self._stored_names.setdefault(rename(stored), stored)
            if other != stored:
                raise ModelLoadError(
                    f"{folder.location}: tensors {other} and {stored} are the same, expected one"
                )

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._folder.shape(self._stored_names[name])

    def file(self, name: str) -> str:
        return self._folder.file(self._stored_names[name])

    def get(self, name: str) -> torch.Tensor:
        return self._folder.get(self._stored_names[name])

    def read_into(self, name: str, place: torch.Tensor) -> None:
        self._folder.read_into(self._stored_names[name], place)
