"""Folders of safetensors files: random headers and indices, and valid files with some bytes changed."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from drift_sdk.loading.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsFolder
from drift_sdk.loading.tensors import STORED_DTYPES

FOLDER = tempfile.TemporaryDirectory()
PLACE = Path(FOLDER.name) / "model"
PLACE.mkdir()
WHOLE = save({"a": torch.ones(3), "b.c": torch.zeros(2, 2, dtype=torch.bfloat16)}, {"format": "pt"})
SHARDS = ("1.safetensors", "2.safetensors", "missing", "../model/1.safetensors", "", ".", "/dev/zero", "a\0")
MAX_ELEMENTS = 2**16

sizes = st.integers(0, 16) | st.sampled_from([-1, 2**31, 2**32, 2**63, 2**64, 2**70])
junk = st.recursive(
    st.none() | st.booleans() | sizes | st.floats() | st.text(st.characters(), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
dtypes = st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "BOOL", "F8_E4M3", "C64", "F4", "E8M0", "F31"])
entries = st.fixed_dictionaries(
    {
        "dtype": dtypes | junk,
        "shape": st.lists(sizes, max_size=3) | junk,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | junk,
    }
)
right = st.integers(0, 16).map(lambda n: {"dtype": "I8", "shape": [n], "data_offsets": [0, n]})
names = st.sampled_from(["a", "b", "__metadata__"]) | st.text(max_size=3)
lengths = st.none() | st.sampled_from([0, 1, 7, 2**32, 2**63, 2**64 - 1])


def _file(parts: tuple[Any, int, int | None]) -> bytes:
    header, num_bytes, length = parts
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * num_bytes


def _edit(parts: tuple[int, bytes, int | None]) -> bytes:
    start, patch, size = parts
    data = bytearray(WHOLE)
    data[start : start + len(patch)] = patch
    return bytes(data[:size])


headers = st.dictionaries(names, right | entries | junk, max_size=3) | junk
places = st.integers(0, len(WHOLE))
files = (
    st.just(WHOLE)
    | st.tuples(headers, st.integers(0, 32), lengths).map(_file)
    | st.tuples(places, st.binary(min_size=1, max_size=9), st.none() | places).map(_edit)
)
maps = st.dictionaries(st.sampled_from(["a", "b.c", "x"]), st.sampled_from(SHARDS) | st.text(max_size=3))
indices = maps.map(lambda weight_map: {"weight_map": weight_map}) | junk
strategy = st.tuples(st.none() | indices, files, files)


def run(data: tuple[Any, bytes, bytes]) -> None:
    index, first, second = data
    for name in (SINGLE_FILE, INDEX_FILE):
        (PLACE / name).unlink(missing_ok=True)
    if index is None:
        (PLACE / SINGLE_FILE).write_bytes(first)
    else:
        (PLACE / INDEX_FILE).write_text(json.dumps(index))
        (PLACE / "1.safetensors").write_bytes(first)
        (PLACE / "2.safetensors").write_bytes(second)

    tensors = SafetensorsFolder(PLACE)
    for name in tensors.names():
        shape = tensors.shape(name)
        if math.prod(shape) <= MAX_ELEMENTS:
            tensor = tensors.get(name)
            assert tuple(tensor.shape) == shape
            if tensor.dtype in STORED_DTYPES:
                place = torch.zeros(shape, dtype=tensor.dtype)
                tensors.read_into(name, place)
                assert torch.equal(place.view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
