"""The files of an EAGLE-3 draft: its tensors under one set of names, and the tokens that it can propose."""

from __future__ import annotations

import pickletools
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile

import torch

from drift_sdk._files import has_file, unreadable
from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsFolder
from drift_sdk.loading.tensors import TensorSource

TORCH_FILE = "pytorch_model.bin"
# Names of tensors. Draft id i stands for the target's id i + d2t[i]; t2d marks the target's ids that the
# draft can propose.
OFFSETS, PROPOSABLE = "d2t", "t2d"
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
MAX_PICKLE_OPS = 100_000
"""Most operations of the pickles in a file: torch runs them in Python. A tensor takes some twenty."""
NUM_PICKLES = 5
"""Pickles before the numbers in files of torch before 1.6: magic number, version, system, tensors, keys."""
FIRST_LAYER, SINGLE_LAYER = "layers.0.", "midlayer."


class TorchFile:
    """The TensorSource of a pytorch_model.bin. The file is mapped into memory if its format allows it.

    Raises ModelLoadError naming the file if it is corrupt, truncated, or holds anything but named tensors.
    """

    def __init__(self, path: Path) -> None:
        self.location: str = str(path)
        try:
            contents = _load(path)
        except OSError as error:
            raise unreadable(path, error) from error
        except Exception as error:  # the unpickler raises errors of many types for a corrupt file
            reason = str(error).strip().partition("\n")[0]
            raise ModelLoadError(f"{path}: not a whole file of torch tensors: {reason}") from error

        if not isinstance(contents, dict) or not all(
            isinstance(name, str) and _is_plain(tensor) for name, tensor in contents.items()
        ):
            raise ModelLoadError(f"{path}: holds a {type(contents).__name__}, expected plain tensors by name")

        self._tensors: dict[str, torch.Tensor] = contents

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def file(self, name: str) -> str:
        return self.location

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()


class DraftTensors:
    """The TensorSource of a draft's folder: of model.safetensors, its shards, or else pytorch_model.bin.

    The first layer's tensors are named "layers.0.", also if the file names them "midlayer.". Raises
    ModelLoadError naming a file that is missing or broken, or two tensors of the same name.
    """

    def __init__(self, folder: Path) -> None:
        self.location: str = str(folder)
        self._tensors: TensorSource
        if has_file(folder / SINGLE_FILE) or has_file(folder / INDEX_FILE):
            self._tensors = SafetensorsFolder(folder)
        elif has_file(folder / TORCH_FILE):
            self._tensors = TorchFile(folder / TORCH_FILE)
        else:
            raise ModelLoadError(f"{folder}: holds none of {SINGLE_FILE}, {INDEX_FILE}, {TORCH_FILE}")

        self._stored_names: dict[str, str] = {}
        for stored in self._tensors.names():
            name = (
                FIRST_LAYER + stored.removeprefix(SINGLE_LAYER) if stored.startswith(SINGLE_LAYER) else stored
            )
            if name in self._stored_names:
                both = f"{self._stored_names[name]} and {stored}"
                raise ModelLoadError(f"{self._tensors.file(stored)}: tensors {both}, expected one")

            self._stored_names[name] = stored

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(self._stored_names[name])

    def file(self, name: str) -> str:
        return self._tensors.file(self._stored_names[name])

    def get(self, name: str) -> torch.Tensor:
        return self._tensors.get(self._stored_names[name])


def read_target_ids(tensors: TensorSource, vocab_size: int, draft_vocab_size: int) -> torch.Tensor:
    """The target's token id for each of the draft's, [draft_vocab_size] int64 on the CPU, strictly
    increasing.

    Without a tensor d2t the draft has the target's vocabulary. Raises ModelLoadError naming tensor and value:
    for a missing d2t of a reduced vocabulary, ids that are out of range or do not increase, and a t2d that
    contradicts d2t.
    """
    names = tensors.names()
    ids = torch.arange(draft_vocab_size, device="cpu")
    if OFFSETS in names:
        offsets = read_vector(tensors, OFFSETS, draft_vocab_size, INTEGERS)
        ids = ids + offsets.to(torch.int64)
    elif draft_vocab_size < vocab_size:
        raise ModelLoadError(
            f"{tensors.location}: tensor {OFFSETS} of shape [{draft_vocab_size}] is missing: "
            f"the draft proposes {draft_vocab_size} of {vocab_size} tokens"
        )

    is_outside = (ids < 0) | (ids >= vocab_size)
    if is_outside.any():
        first = int(is_outside.nonzero()[0])
        raise ModelLoadError(
            f"{tensors.file(OFFSETS)}: tensor {OFFSETS} maps draft id {first} to {int(ids[first])}, "
            f"expected 0 to {vocab_size - 1}"
        )

    is_not_increasing = ids[1:] <= ids[:-1]
    if is_not_increasing.any():
        first = int(is_not_increasing.nonzero()[0])
        raise ModelLoadError(
            f"{tensors.file(OFFSETS)}: tensor {OFFSETS} maps draft ids {first} and {first + 1} to "
            f"{ids[first : first + 2].tolist()}, expected increasing ids"
        )

    if PROPOSABLE in names:
        has_token = read_vector(tensors, PROPOSABLE, vocab_size, (torch.bool, *INTEGERS)).to(torch.bool)
        marked = has_token.nonzero().view(-1)
        if not torch.equal(marked, ids):
            raise ModelLoadError(
                f"{tensors.file(PROPOSABLE)}: tensor {PROPOSABLE} marks {len(marked)} tokens, "
                f"expected the {len(ids)} that {OFFSETS} maps to"
            )

    return ids


def read_vector(
    tensors: TensorSource, name: str, length: int, dtypes: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """A tensor as stored; ModelLoadError unless it has shape [length] and one of `dtypes`."""
    if tensors.shape(name) != (length,):
        raise ModelLoadError(
            f"{tensors.file(name)}: tensor {name} has shape {list(tensors.shape(name))}, expected [{length}]"
        )

    vector = tensors.get(name)
    if vector.dtype not in dtypes:
        raise ModelLoadError(
            f"{tensors.file(name)}: tensor {name} is stored as {vector.dtype}, "
            f"expected {str(dtypes[0]).removeprefix('torch.')}"
        )

    return vector


def _is_plain(value: object) -> bool:
    """Whether a value is a tensor that is neither sparse nor quantised and has its data on the CPU."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _load(path: Path) -> object:
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        _check_pickles(file, is_zip=is_zip)

    # Files written by torch before 1.6 are no zip archives, and only those can be mapped.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _check_pickles(file: BinaryIO, *, is_zip: bool) -> None:
    """Raise ValueError for a file whose pickles are broken, or have more operations than any draft's."""
    num_ops = sum(1 for _ in islice(_operations(file, is_zip=is_zip), MAX_PICKLE_OPS + 1))
    if num_ops > MAX_PICKLE_OPS:
        raise ValueError(f"a pickle of more than {MAX_PICKLE_OPS} operations")


def _operations(file: BinaryIO, *, is_zip: bool) -> Iterator[Any]:
    if not is_zip:
        for _ in range(NUM_PICKLES):
            yield from pickletools.genops(file)
        return

    with ZipFile(file) as archive:
        for name in archive.namelist():
            if name.rpartition("/")[2] == "data.pkl":
                with archive.open(name) as pickled:
                    yield from pickletools.genops(pickled)
