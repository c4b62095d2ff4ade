"""Names of a model's files: those to load of a repository on the hub, and the parts of a split GGUF file.

llama.cpp's gguf-split gives parts names like "model-00001-of-00003.gguf".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from msgspec import Struct

from drift_sdk._files import has_file, is_inside
from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.draft import TORCH_FILE
from drift_sdk.loading.safetensors import INDEX_FILE, SINGLE_FILE, read_index

PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class PartName(Struct, frozen=True):
    """The name of one part of a split file: `stem`-`index`-of-`num_parts`.gguf, counted from 1."""

    stem: str
    index: int
    num_parts: int

    def file(self, index: int) -> str:
        """The name of another part."""
        return f"{self.stem}-{index:05}-of-{self.num_parts:05}.gguf"


def part_of(name: str) -> PartName | None:
    """The name of a part, taken apart; None for a file that is not one of several."""
    found = PART_NAME.fullmatch(name)
    if found is None:
        return None

    part = PartName(found[1], int(found[2]), int(found[3]))
    return part if 1 <= part.index <= part.num_parts else None


def missing_parts(names: Collection[str]) -> list[str]:
    """The parts that are missing of those that the names, of one model, belong to."""
    missing: list[str] = []
    for part in {(p.stem, p.num_parts): p for p in map(part_of, names) if p is not None}.values():
        wanted = [part.file(index) for index in range(1, part.num_parts + 1)]
        missing += [name for name in wanted if name not in names]

    return missing


SMALL_PATTERNS = ["*.json", "*.jinja"]
"""Settings, tokenizer and templates: a few megabytes, which are fetched before the config is judged."""
QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|B?F16|FP16|F32))$", re.IGNORECASE)
"""The quantisation at the end of a file's name without its suffix."""
MAX_LISTED = 40
"""Most names that an error lists."""


class HubFile(Struct, frozen=True, kw_only=True):
    """A file of a repository: its path there, and its size in bytes (None if the hub does not tell)."""

    name: str
    num_bytes: int | None


def hub_file(name: object, num_bytes: object) -> HubFile:
    """A file as the hub lists it; ModelLoadError for a name that leads out of the repository, or no size."""
    if not isinstance(name, str) or not is_inside(name):
        raise ModelLoadError(f"the hub lists {short_repr(name)}, expected a path inside the repository")

    if num_bytes is not None and (type(num_bytes) is not int or num_bytes < 0):
        raise ModelLoadError(f"the hub lists {name} with size {short_repr(num_bytes)}, expected bytes")

    return HubFile(name=name, num_bytes=num_bytes)


def split_quant(name: str) -> tuple[str, str | None]:
    """Repository and quantisation of "repository:quantisation"; without a colon the name and None."""
    repo_id, colon, quant = name.partition(":")
    return (repo_id, quant) if colon else (name, None)


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files among `names` by model, each model's parts in order. A model's name is its path without
    ".gguf" and the numbers of parts. Image projectors are left out."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not name.rpartition("/")[2].startswith("mmproj"):
            part = part_of(name)
            models.setdefault(part.stem if part is not None else name.removesuffix(".gguf"), []).append(name)

    return models


def gguf_quants(names: Iterable[str]) -> str:
    """The quantisations of the GGUF files among `names`, for messages; empty if there are none."""
    return listed(map(quant_of, gguf_models(names)))


def choose_gguf(names: Collection[str], quant: str) -> tuple[str, ...]:
    """The GGUF file of a quantisation, or all parts of the one that is split, in order.

    names: paths of files in the repository.
    quant: the quantisation with which the name of the file ends, in upper or lower case, such as "Q4_K_M"; or
           the whole name without ".gguf".

    Raises ModelLoadError listing what there is if none or several match, and naming a missing part.
    """
    models = gguf_models(names)
    if not models:
        raise ModelLoadError("it holds no .gguf file")

    matching = [stem for stem in models if has_quant(stem, quant)]
    if not matching:
        raise ModelLoadError(f"no .gguf file is named {quant}, there are {gguf_quants(names)}")

    if len(matching) > 1:
        raise ModelLoadError(
            f"several .gguf files are named {quant}: {listed(matching)}; give more of the end of one's name"
        )

    (stem,) = matching
    missing = missing_parts(models[stem])
    if missing:
        raise ModelLoadError(f"{missing[0]} is missing beside {models[stem][0]}")

    return tuple(models[stem])


def has_quant(stem: str, quant: str) -> bool:
    """Whether a file's name without its suffix is `quant`, or ends with it after a separator."""
    whole, end = stem.lower(), quant.lower()
    separators = "-._/" if QUANT.fullmatch(quant) else "-./"  # "K_M" is part of a quantisation's name
    return whole == end or any(whole.endswith(separator + end) for separator in separators)


def quant_of(stem: str) -> str:
    """The quantisation that a file's name ends with, else the whole name."""
    found = QUANT.search(stem)
    return found[1] if found is not None else stem


def listed(names: Iterable[str]) -> str:
    """Names in order, separated by commas, at most `MAX_LISTED` of them."""
    ordered = sorted(set(names))
    more = f" and {len(ordered) - MAX_LISTED} more" if len(ordered) > MAX_LISTED else ""
    return ", ".join(ordered[:MAX_LISTED]) + more


def weight_names(names: Collection[str], folder: Path) -> list[str]:
    """The files of a repository's weights: one safetensors file, the shards of an index, or else
    pytorch_model.bin, which many draft heads are published as. Empty if there are none.

    folder: holds the index, if the repository has one. Raises ModelLoadError for a broken index.
    """
    if SINGLE_FILE in names:
        return [SINGLE_FILE]

    if INDEX_FILE in names and has_file(folder / INDEX_FILE):
        return sorted(set(read_index(folder).values()))

    return [TORCH_FILE] if TORCH_FILE in names else []
