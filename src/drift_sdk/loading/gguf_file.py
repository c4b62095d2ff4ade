"""GGUF files, one or the parts of a split one read as a whole: metadata, settings of a config.json, tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Each part has a header for its own tensors; the first has the model's metadata.

The gguf package's own reader makes a numpy view of every token and merge, which takes two seconds for a
vocabulary of 49K; this one takes less than 0.1 s.
"""

from __future__ import annotations

import io
import math
import os
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from msgspec import Struct, structs

from drift_sdk._files import has_file, unreadable
from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.file_names import part_of
from drift_sdk.quantised.formats import BLOCK_FORMATS
from drift_sdk.spec.family import Family, GGUFArchitecture, GGUFSettings
from drift_sdk.text.gguf_tokenizer import gguf_eos_token_ids

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ITEMS = 2**22
"""Most items of all arrays, such as the vocabulary: three times what the largest ones need."""
MAX_STRING_BYTES = 2**24
"""Most bytes of a string. The longest ones are chat templates, of some hundred thousand."""
SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
UINT32, UINT64 = SCALARS[GGUFValueType.UINT32], SCALARS[GGUFValueType.UINT64]


class GGUFTensor(Struct, frozen=True, kw_only=True):
    """The location of a tensor: `offset` and `num_bytes` in the file, which is number `part` of a split one.
    `shape` is in torch's order, rows first."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    num_bytes: int
    part: int = 0


def is_block_matrix(tensor: GGUFTensor) -> bool:
    """Whether a tensor is a matrix of blocks that can remain quantised."""
    return len(tensor.shape) == 2 and tensor.quantization.name in BLOCK_FORMATS


class GGUFHeader(Struct, frozen=True, kw_only=True):
    """The key/value metadata of a file, and its tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(data: bytes | BinaryIO, *, num_bytes: int | None = None) -> GGUFHeader:
    """The header of a GGUF file. Raises ValueError with the reason if it is invalid or truncated.

    data:      the contents of the file, or the file, open for reading. It is not mapped: the process would be
               killed where the file has become shorter.
    num_bytes: the size of the file if `data` is only its beginning; None = the size of `data`.
    """
    cursor = _Cursor(io.BytesIO(data) if isinstance(data, bytes) else data)
    magic = cursor.read(4, "the magic number")
    if magic != b"GGUF":
        raise ValueError(f"begins with {magic!r}, expected b'GGUF'")

    version = cursor.scalar(UINT32)
    if version not in VERSIONS:
        raise ValueError(f"version {version}, expected one of {VERSIONS} (little-endian)")

    num_tensors, num_keys = cursor.scalar(UINT64), cursor.scalar(UINT64)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"key {short_repr(key)} occurs twice")

        metadata[key] = cursor.value(cursor.scalar(UINT32))

    tensors: dict[str, GGUFTensor] = {}
    for _ in range(num_tensors):
        name, tensor = _read_tensor(cursor)
        if name in tensors:
            raise ValueError(f"tensor {short_repr(name)} occurs twice")

        tensors[name] = tensor

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={short_repr(alignment)}, expected a power of two")

    first_byte = -(-cursor.offset // alignment) * alignment
    tensors = {n: structs.replace(t, offset=first_byte + t.offset) for n, t in tensors.items()}
    _check_places(tensors, cursor.num_bytes if num_bytes is None else num_bytes)
    return GGUFHeader(metadata=metadata, tensors=tensors)


def _check_places(tensors: dict[str, GGUFTensor], num_bytes: int) -> None:
    """Raise ValueError unless all tensors lie inside the file and none overlap."""
    last_end, last_name = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        end = tensor.offset + tensor.num_bytes
        if end > num_bytes:
            raise ValueError(f"truncated at byte {num_bytes}: tensor {short_repr(name)} ends at {end}")

        if tensor.offset < last_end:
            raise ValueError(f"tensors {short_repr(last_name)} and {short_repr(name)} overlap")

        last_end, last_name = end, name


def _read_tensor(cursor: _Cursor) -> tuple[str, GGUFTensor]:
    """The name and entry of the next tensor; its offset is still relative to the end of the header."""
    name = cursor.string()
    found = f"tensor {short_repr(name)}"
    num_dimensions = cursor.scalar(UINT32)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"{found} has {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")

    shape = tuple(cursor.scalar(UINT64) for _ in range(num_dimensions))[::-1]
    if 0 in shape:
        raise ValueError(f"{found} has a dimension of 0")

    kind = cursor.scalar(UINT32)
    try:
        quantization = GGMLQuantizationType(kind)
        block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{found} is stored as type {kind}, which is not known") from error

    if shape[-1] % block_size:
        raise ValueError(f"{found} has rows of {shape[-1]}, expected a multiple of {block_size}")

    num_bytes = math.prod(shape) // block_size * block_bytes
    offset = cursor.scalar(UINT64)
    return name, GGUFTensor(shape=shape, quantization=quantization, offset=offset, num_bytes=num_bytes)


class _Cursor:
    """Reads values of a file one after another; ValueError at its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_items = 0  # of arrays
        self.num_bytes = file.seek(0, os.SEEK_END)
        self.offset = file.seek(0)

    def read(self, num_bytes: int, what: str = "a value") -> bytes:
        """The next bytes. what: their meaning, for the message."""
        end = self.offset + num_bytes
        if end <= self.num_bytes:
            data = self._file.read(num_bytes)
            if len(data) == num_bytes:
                self.offset = end
                return data

            self.num_bytes = self.offset + len(data)  # the file has become shorter

        raise ValueError(f"truncated at byte {self.num_bytes}: {what} ends at {end}")

    def scalar(self, layout: struct.Struct) -> Any:
        """The next number or boolean of this layout."""
        return layout.unpack(self.read(layout.size))[0]

    def string(self) -> str:
        """The next string: its length in bytes, then UTF-8."""
        num_bytes = self.scalar(UINT64)
        if num_bytes > MAX_STRING_BYTES:
            raise ValueError(f"a string of {num_bytes} bytes, expected at most {MAX_STRING_BYTES}")

        return self.read(num_bytes, "a string").decode()

    def value(self, kind: int) -> Any:
        """The next value of a GGUFValueType: a scalar, a string, or a list of either."""
        if kind == GGUFValueType.STRING:
            return self.string()

        if kind != GGUFValueType.ARRAY:
            return self.scalar(_layout(kind))

        item_kind, num_items = self.scalar(UINT32), self.scalar(UINT64)
        if item_kind == GGUFValueType.ARRAY:
            raise ValueError("an array of arrays, expected one of strings or numbers")

        is_strings = item_kind == GGUFValueType.STRING
        # A string takes at least its length.
        layout = UINT64 if is_strings else _layout(item_kind)
        end = self.offset + num_items * layout.size
        if end > self.num_bytes:
            raise ValueError(f"truncated at byte {self.num_bytes}: an array ends at {end}")

        self._num_items += num_items
        if self._num_items > MAX_ITEMS:
            raise ValueError(f"arrays of {self._num_items} items, expected at most {MAX_ITEMS}")

        if is_strings:
            return [self.string() for _ in range(num_items)]

        return [item for (item,) in layout.iter_unpack(self.read(num_items * layout.size, "an array"))]


def _layout(kind: int) -> struct.Struct:
    try:
        return SCALARS[GGUFValueType(kind)]
    except (KeyError, ValueError) as error:
        raise ValueError(f"unknown kind of value {kind}") from error


BUFFER_BYTES = 1 << 20
"""Bytes of a header that are read at a time."""


class GGUFParts:
    """The header of a model, with the tensors of all its parts, and the bytes of each tensor.

    path: the file, or any one part.

    Opening reads only the headers. Raises ModelLoadError naming the part that is missing, or a file that is
    not whole or does not belong to the others.
    """

    def __init__(self, path: Path) -> None:
        part = part_of(path.name)
        self.files: list[Path] = [path]
        if part is not None:
            self.files = [path.with_name(part.file(index)) for index in range(1, part.num_parts + 1)]
            for file in self.files:
                if not has_file(file):
                    raise ModelLoadError(f"{file}: is missing, {path.name} is one of {part.num_parts} parts")

        opened = [self._open(file) for file in self.files]
        self._descriptors = [descriptor for descriptor, _ in opened]
        headers = [header for _, header in opened]
        for index, header in enumerate(headers):
            self._check_split(index, header.metadata)
        self.header: GGUFHeader = GGUFHeader(metadata=headers[0].metadata, tensors=self._joined(headers))

    def file(self, tensor: GGUFTensor) -> str:
        """The file that holds a tensor."""
        return str(self.files[tensor.part])

    def raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """A copy of the bytes of a tensor as stored. Raises ModelLoadError if the file cannot be read.

        Not a view of a mapping: the process would be killed where the file has become shorter.
        """
        found = np.empty(tensor.num_bytes, np.uint8)
        rest, offset = found.data, tensor.offset
        try:
            while rest:
                num_read = os.preadv(self._descriptors[tensor.part], [rest], offset)
                if not num_read:
                    raise OSError("the file has become shorter")

                rest, offset = rest[num_read:], offset + num_read
        except OSError as error:
            raise ModelLoadError(f"{self.file(tensor)}: cannot be read: {error}") from error

        return found

    def _open(self, path: Path) -> tuple[int, GGUFHeader]:
        """A descriptor of a file, which this object closes when it is deleted, and the file's header. Raises
        ModelLoadError naming a file that is not whole."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, descriptor)
            with open(descriptor, "rb", buffering=BUFFER_BYTES, closefd=False) as file:
                return descriptor, read_header(file)
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:
            raise ModelLoadError(f"{path}: not a whole GGUF file: {error}") from error

    def _check_split(self, index: int, metadata: dict[str, Any]) -> None:
        """Raise ModelLoadError unless the metadata of a part agree with its place among the files."""
        num_parts = len(self.files)
        found = metadata.get("split.count", 1) or 1
        if found != num_parts:
            expected = "a name that ends in -00001-of-0000N.gguf" if num_parts == 1 else str(num_parts)
            raise ModelLoadError(f"{self.files[index]}: split.count={short_repr(found)}, expected {expected}")

        place = metadata.get("split.no", index)
        if num_parts > 1 and place != index:
            raise ModelLoadError(
                f"{self.files[index]}: split.no={short_repr(place)}, expected {index} as its name says"
            )

    def _joined(self, headers: list[GGUFHeader]) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}
        for index, header in enumerate(headers):
            for name, tensor in header.tensors.items():
                if name in tensors:
                    other = self.files[tensors[name].part].name
                    raise ModelLoadError(
                        f"{self.files[index]}: tensor {short_repr(name)} is in {other} as well"
                    )

                tensors[name] = structs.replace(tensor, part=index)

        expected = headers[0].metadata.get("split.tensors.count", len(tensors))
        if len(self.files) > 1 and expected != len(tensors):
            raise ModelLoadError(
                f"{self.files[0]}: split.tensors.count={short_repr(expected)}, the parts hold {len(tensors)}"
            )

        return tensors


ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are settings: factors of the frequencies of rotation."""
LONG_ROPE = [("longrope", name) for name in ROPE_FACTORS[1:]]
# Metadata that changes the arithmetic. Each architecture reads some of it.
ARITHMETIC_KEYS = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.scaling.attn_factor",
    "use_parallel_residual",
)
NEUTRAL = {"rope.scaling.attn_factor": 1.0}
"""Of that metadata, what changes nothing; else 0, "" and what is missing."""
REQUIRED = ("attention.layer_norm_rms_epsilon",)
"""Metadata that every file has, and whose absence would not be found elsewhere. Architectures have others."""


def read_gguf_config(
    header: GGUFHeader,
    family: Family,
    architecture: GGUFArchitecture,
    location: str,
    read_vector: Callable[[str], list[float]],
) -> dict[str, Any]:
    """The settings of a file's model.

    family, architecture: of the file.
    location:     the file, for messages.
    read_vector:  returns the numbers of a tensor of the file, by name.

    Raises ModelLoadError naming the file for metadata that is not implemented, or not of the right type.
    Sizes are checked where the settings are read.
    """
    return _ConfigReader(header, family, architecture, location, read_vector).config()


class _ConfigReader:
    def __init__(
        self,
        header: GGUFHeader,
        family: Family,
        architecture: GGUFArchitecture,
        location: str,
        read_vector: Callable[[str], list[float]],
    ) -> None:
        self._header, self._family, self._architecture = header, family, architecture
        self._location = location
        self._read_vector = read_vector
        self._prefix = f"{architecture.name}."
        self._settings = {
            key.removeprefix(self._prefix): value
            for key, value in header.metadata.items()
            if key.startswith(self._prefix)
        }

    def config(self) -> dict[str, Any]:
        settings, tensors = self._settings, self._header.tensors
        for key in ARITHMETIC_KEYS:
            is_neutral = not settings.get(key) or settings[key] == NEUTRAL.get(key)
            if not is_neutral and key not in self._architecture.keys:
                found = f"{self._prefix}{key}={short_repr(settings[key])}"
                raise ModelLoadError(f"{self._location}: {found} is not implemented")

        head_dim, rotary_dim = self._head_dims()
        num_heads = settings.get("attention.head_count")
        embedding = tensors.get("token_embd.weight")
        config = {
            "architectures": [self._family.architectures[0]],
            "model_type": self._family.model_type,
            "vocab_size": None if embedding is None else embedding.shape[0],
            "hidden_size": settings.get("embedding_length"),
            "intermediate_size": settings.get("feed_forward_length"),
            "num_hidden_layers": settings.get("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": settings.get("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": settings.get("context_length"),
            "rms_norm_eps": settings.get("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope_parameters(rotary_dim),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "tie_word_embeddings": "output.weight" not in tensors,
            "sliding_window": settings.get("attention.sliding_window") or None,
            "bos_token_id": self._header.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": gguf_eos_token_ids(self._header.metadata, self._location),
        }
        if any(is_block_matrix(tensor) for tensor in tensors.values()):
            config["quantization_config"] = {"quant_method": "gguf"}
        for key in (*REQUIRED, *self._architecture.required):
            if key not in settings:
                raise ModelLoadError(f"{self._location}: {self._prefix}{key} is missing")

        if self._architecture.settings is None:
            return config

        own = GGUFSettings(
            values=settings,
            config=config,
            rotary_dim=rotary_dim,
            place=f"{self._location}: {self._prefix}",
            tensors=tensors.keys(),
        )
        return config | self._architecture.settings(own)

    def _head_dims(self) -> tuple[Any, Any]:
        """The width of a head, and how much of it is rotated."""
        settings = self._settings
        head_dim = settings.get("attention.key_length")
        if head_dim is None:
            head_dim = _quotient(settings.get("embedding_length"), settings.get("attention.head_count"))

        rotary_dim = settings.get("rope.dimension_count", head_dim)
        is_partial = self._architecture.is_partial and _is_below(rotary_dim, head_dim)
        others = {}
        if "attention.value_length" not in self._architecture.keys:
            others["attention.value_length"] = settings.get("attention.value_length", head_dim)
        if not is_partial:
            others["rope.dimension_count"] = rotary_dim

        for key, value in others.items():
            if value != head_dim:
                found = f"{self._prefix}{key}={short_repr(value)}, expected {short_repr(head_dim)}"
                raise ModelLoadError(f"{self._location}: {found}")

        return head_dim, rotary_dim

    def _rope_parameters(self, rotary_dim: object) -> dict[str, Any]:
        settings = self._settings
        rope_type = settings.get("rope.scaling.type", "none")
        factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear"))
        if "rope.scaling.type" not in settings and factor not in (None, 0.0, 1.0):
            rope_type = "linear"
        parameters = {"rope_theta": settings.get("rope.freq_base", 10_000.0)}
        if rope_type == "yarn" and self._architecture.yarn is not None:
            context = settings.get("rope.scaling.original_context_length")
            known = {"factor": factor, "original_max_position_embeddings": context}
            return parameters | dict(self._architecture.yarn) | known

        if rope_type == "yarn":  # llama.cpp has other defaults and one more factor than transformers
            raise ModelLoadError(f"{self._location}: rope_type='yarn' is not implemented for GGUF files")

        freqs, short, long = (self._factors(name, rope_type, rotary_dim) for name in ROPE_FACTORS)
        if freqs is not None:
            return parameters | {"rope_type": "factors", "factors": freqs}

        if short is not None or long is not None:
            magnitude = settings.get("rope.scaling.attn_factor")
            sets = {"short_factor": short, "long_factor": long, "attention_factor": magnitude}
            return parameters | sets | {"rope_type": "longrope"}

        return parameters | {"rope_type": "default" if rope_type == "none" else rope_type, "factor": factor}

    def _factors(self, name: str, rope_type: object, rotary_dim: object) -> list[float] | None:
        """The numbers of a tensor of factors; None if the file has none."""
        tensor = self._header.tensors.get(name)
        if tensor is None:
            return None

        if rope_type != "none" and (rope_type, name) not in LONG_ROPE:
            found = f"{name} beside rope scaling {short_repr(rope_type)}"
            raise ModelLoadError(f"{self._location}: {found}, expected one")

        if not isinstance(rotary_dim, int) or tensor.shape != (rotary_dim // 2,):
            raise ModelLoadError(
                f"{self._location}: tensor {name} has shape {list(tensor.shape)}, expected one factor for "
                f"each two of a head's {short_repr(rotary_dim)} elements"
            )

        return self._read_vector(name)


def _quotient(size: object, count: object) -> int | None:
    """The size of each of `count` parts; None if either is no positive integer."""
    return size // count if isinstance(size, int) and isinstance(count, int) and count > 0 else None


def _is_below(value: object, limit: object) -> bool:
    return isinstance(value, int) and isinstance(limit, int) and 0 < value < limit
