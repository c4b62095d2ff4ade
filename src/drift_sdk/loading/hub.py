"""Models from the Hugging Face hub, through its local cache."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import tqdm, validate_repo_id  # type: ignore[attr-defined]  # not marked as public

from drift_sdk._files import has_file
from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.draft import TORCH_FILE
from drift_sdk.loading.safetensors import INDEX_FILE, SINGLE_FILE, read_index
from drift_sdk.progress import Report

__all__ = ["download", "is_hub_id"]

# Many draft heads are published as a pytorch_model.bin alone.
PATTERNS = ["*.json", "*.safetensors", "*.jinja", TORCH_FILE]
# Raised for a snapshot of which some files are cached; older versions of the library have no such class.
INCOMPLETE_ERRORS: Any = getattr(errors, "IncompleteSnapshotError", ())


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id, "name" or "owner/name". Nothing is looked up."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False

    return True


def download(
    repo_id: str,
    *,
    revision: str | None,
    cache_dir: str | Path | None,
    local_files_only: bool,
    report: Report | None = None,
) -> Path:
    """The folder of a model in the hub's local cache, after downloading what is missing there.

    The hub is asked only if the cache does not hold the whole model, and never with `local_files_only`.
    `report` is called with the stage "download" and the fraction of bytes received (0 to 1), on threads of
    huggingface_hub, and only while files are downloaded. The fraction refers to the files begun so far, so it
    may fall when another one begins. Versions of huggingface_hub before 1.0 do not count bytes: nothing is
    reported with them.

    Raises ModelLoadError with the state of the cache and the reason why the hub did not help; the message
    does not name the model.
    """

    def snapshot(*, is_local: bool) -> Path:
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=is_local,
            allow_patterns=PATTERNS,
            tqdm_class=_progress_bar_class(report),
        )
        return Path(folder)

    try:
        folder = snapshot(is_local=True)
    except Exception as error:  # besides errors of the library, those of its network library
        cache_state = _cache_state(error)
    else:
        if local_files_only or _is_whole(folder):
            return folder

        cache_state = "only partly in the cache"

    if local_files_only:
        raise ModelLoadError(f"{cache_state}, and local_files_only is set")

    try:
        return snapshot(is_local=False)
    except Exception as error:
        # The library's own chain of errors is long and ends in advice about its parameters.
        raise ModelLoadError(f"{cache_state}, and {_hub_problem(error)}") from None


def _progress_bar_class(report: Report | None) -> type[Any]:
    """A class of progress bars that print nothing. The bar that counts received bytes calls `report`."""
    lock = threading.Lock()  # several files are downloaded at a time, each on a thread

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # There are two bars of bytes, for the network and for the disk; the latter counts cached parts
            # too.
            is_transfer = str(kwargs.get("name")).endswith(".transfer")
            self._counts_bytes = kwargs.get("unit") == "B" and not is_transfer
            super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if report is None or not self._counts_bytes:
                return

            with lock:
                self.n += n or 0
                fraction = self.n / self.total if self.total else 0.0

            report("download", min(max(fraction, 0.0), 1.0))

    return SilentBar


def _cache_state(error: Exception) -> str:
    """The message for an error of a look-up in the cache."""
    if isinstance(error, INCOMPLETE_ERRORS):
        return "only partly in the cache"

    if isinstance(error, LocalEntryNotFoundError):
        return "not in the cache"

    return f"the cache cannot be read ({_describe(error)})"


def _hub_problem(error: Exception) -> str:
    """The cause of a failed download in words."""
    # The library wraps the cause in an error about the local cache.
    while isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__

    if isinstance(error, HfHubHTTPError):
        return f"the hub answers: {_describe(error)}"

    is_network = isinstance(error, ConnectionError | TimeoutError | socket.gaierror)
    if isinstance(error, OSError) and error.errno is not None and not is_network:
        return f"it cannot be downloaded: {_describe(error)}"

    return f"the hub cannot be reached: {_describe(error)}"


def _describe(error: Exception) -> str:
    """The error's type and the first line of its text; all lines of an answer of the hub."""
    text = str(error).strip()
    text = " ".join(text.split()) if isinstance(error, HfHubHTTPError) else text.partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_whole(folder: Path) -> bool:
    """Whether a folder holds a config and all weights: an interrupted download leaves only some files."""
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
