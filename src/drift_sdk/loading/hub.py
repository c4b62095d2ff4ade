"""Models from the Hugging Face hub, through its local cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # public, but not marked as exported

from drift_sdk._files import has_file
from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.safetensors import INDEX_FILE, SINGLE_FILE, read_index

__all__ = ["download"]

TORCH_FILE = "pytorch_model.bin"  # all that many draft heads are published as
PATTERNS = ["*.json", "*.safetensors", "*.jinja", TORCH_FILE]


class _NoProgressBar(tqdm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]  # untyped base


def download(
    repo_id: str, *, revision: str | None, cache_dir: str | Path | None, local_files_only: bool
) -> Path:
    """Folder of a model in the hub's local cache, downloaded if it is not wholly there.

    Raises ModelLoadError saying what was wrong with the cache and the network.
    """
    tried = []
    last_error: Exception | None = None
    for place in ("hub cache",) if local_files_only else ("hub cache", "hub"):
        try:
            folder = huggingface_hub.snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=place == "hub cache",
                allow_patterns=PATTERNS,
                tqdm_class=_NoProgressBar,
            )
        except HFValidationError as error:
            raise ModelLoadError(f"{repo_id!r} is not a hub id") from error
        except Exception as error:  # the hub's network library raises kinds of its own
            tried.append(f"{place}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            last_error = error
        else:
            if local_files_only or place == "hub" or _is_whole(Path(folder)):
                return Path(folder)

            tried.append(f"{place}: {folder} is not whole")

    where = f" at revision {revision!r}" if revision is not None else ""
    raise ModelLoadError(f"{repo_id}{where}: {'; '.join(tried)}") from last_error


def _is_whole(folder: Path) -> bool:
    """An interrupted download leaves a folder with some of the files."""
    try:
        if not has_file(folder / "config.json"):
            return False

        if has_file(folder / SINGLE_FILE) or has_file(folder / TORCH_FILE):
            return True

        return has_file(folder / INDEX_FILE) and all(
            has_file(folder / shard) for shard in set(read_index(folder).values())
        )
    except ModelLoadError:
        return False
