"""Tuned tables in the user's cache folder, one file for each GPU, driver, library and version of the kernels.

A file is used on the machine it was measured on, or one that is alike in all of `MeasuredOn`. It is replaced
as a whole, so a reader never sees half of it; writers take turns. A file that is damaged, too large, or of
another machine is ignored with one warning.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec
import torch
import triton
from msgspec import Struct

from drift_sdk._kernels.gemm.tuning import TunedTable, TunedTiles, gpu_key, shape_of_key

__all__ = [
    "MAX_FILE_BYTES",
    "MeasuredOn",
    "add_to_user_table",
    "file_lock",
    "measured_on",
    "read_whole",
    "tuning_lock",
    "user_table",
    "user_table_path",
    "write_whole",
]

log = logging.getLogger("drift_sdk")

SCHEMA = 1
"""Version of the files' contents."""

MAX_FILE_BYTES = 16 * 2**20
MAX_SHAPES = 500
MAX_PROVENANCE = 1000
"""Bounds of a file, its entries, and the text about one of them. An entry has up to 25 KiB."""

LOCK_TIMEOUT_S = 120.0
LOCK_POLL_S = 0.05

DRIVER_FILE = Path("/proc/driver/nvidia/version")
SOURCES = ("gemm/gemm.py", "gemm/cublas_gemm.py", "gemm/slices.py", "common/launching.py", "layers/glu.py")
"""Files of this package that the time of a product depends on."""


_ignored: set[Path] = set()
"""Files that this process has warned about."""


class MeasuredOn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties of the machine and the software on which a file's measurements hold.

    gpu: its name. driver: of the GPU, "" where the system does not report it. torch, cuda, triton: versions.
    kernels: a hash of the kernels' source. schema: version of the file's contents.
    """

    gpu: str
    driver: str
    torch: str
    cuda: str
    triton: str
    kernels: str
    schema: int = SCHEMA


class StoredTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a file: where it was measured, and a TunedTable's fields."""

    measured_on: MeasuredOn
    gemms: dict[str, TunedTiles]
    provenance: dict[str, str] = {}

    def __post_init__(self) -> None:
        if len(self.gemms) > MAX_SHAPES or not self.provenance.keys() <= self.gemms.keys():
            raise ValueError(f"expected at most {MAX_SHAPES} weights, and provenance of these only")

        if any(len(text) > MAX_PROVENANCE for text in self.provenance.values()):
            raise ValueError(f"provenance: expected at most {MAX_PROVENANCE} characters")

        for key in self.gemms:
            shape_of_key(key)


def measured_on(gpu: str) -> MeasuredOn:
    """Return the properties of this machine for measurements on a GPU of this name."""
    return MeasuredOn(
        gpu=gpu,
        driver=driver_version(),
        torch=str(torch.__version__),  # a subclass of str, which msgspec does not encode
        cuda=str(torch.version.cuda),
        triton=triton.__version__,
        kernels=kernels_hash(),
    )


def driver_version() -> str:
    """Return the version of the NVIDIA driver as the Linux kernel reports it; "" if it does not."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", DRIVER_FILE.read_text())
    except (OSError, ValueError):
        return ""

    return found[0] if found is not None else ""


@cache
def kernels_hash() -> str:
    """Return a hash of the source that the time of a product depends on."""
    folder = resources.files("drift_sdk._kernels")
    contents = b"\0".join((folder / source).read_bytes() for source in SOURCES)
    return hashlib.sha256(contents).hexdigest()[:16]


def cache_folder() -> Path:
    """Return the folder of the files: drift_sdk in XDG_CACHE_HOME, by default ~/.cache, or /.cache for a user
    without a home."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        try:
            root = Path.home() / ".cache"
        except RuntimeError:
            root = Path(os.sep, ".cache")
    return root / "drift_sdk" / "gemm"


def user_table_path(machine: MeasuredOn) -> Path:
    """Return the path of a machine's file."""
    digest = hashlib.sha256(msgspec.json.encode(machine)).hexdigest()[:12]
    return cache_folder() / f"{gpu_key(machine.gpu).replace('/', '-')}-{digest}.json"


def user_table(machine: MeasuredOn) -> TunedTable:
    """Return the measurements in a machine's file: none if there is no file, or it is ignored with a
    warning."""
    path = user_table_path(machine)
    try:
        stored = msgspec.json.decode(read_whole(path, MAX_FILE_BYTES), type=StoredTable)
        if stored.measured_on != machine:
            raise ValueError(f"measured on {stored.measured_on}")
    except (FileNotFoundError, NotADirectoryError):
        return TunedTable()
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        if path not in _ignored:
            log.warning("%s: ignored: %s: expected measurements of this machine", path, error)
        _ignored.add(path)
        return TunedTable()

    return TunedTable(gemms=stored.gemms, provenance=stored.provenance)


def add_to_user_table(machine: MeasuredOn, found: TunedTable) -> Path:
    """Add measurements to a machine's file, in place of those of the same weights, and return its path.

    Call it inside `tuning_lock`. Raises OSError if the file cannot be written.
    """
    path, old = user_table_path(machine), user_table(machine)
    gemms = {**old.gemms, **found.gemms}
    provenance = {**old.provenance, **found.provenance}
    if len(gemms) > MAX_SHAPES:
        gemms = dict(list(gemms.items())[-MAX_SHAPES:])
    provenance = {key: text[:MAX_PROVENANCE] for key, text in provenance.items() if key in gemms}
    stored = StoredTable(measured_on=machine, gemms=gemms, provenance=provenance)
    write_whole(path, msgspec.json.format(msgspec.json.encode(stored), indent=1) + b"\n")
    _ignored.discard(path)
    return path


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a regular file. Raises OSError, and ValueError for a file of another kind or of
    more than `max_bytes`."""
    if path.exists() and not path.is_file():  # opening a FIFO may never return
        raise ValueError(f"{path}: not a regular file")

    with path.open("rb") as file:
        contents = file.read(max_bytes + 1)
    if len(contents) > max_bytes:
        raise ValueError(f"{path}: more than {max_bytes} bytes")

    return contents


def write_whole(path: Path, contents: bytes) -> None:
    """Replace a file by another one in one step; its folder is made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(contents)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def tuning_lock(machine: MeasuredOn, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the right to measure on this kind of machine and to write its file. Others wait: two processes
    that measured at once would disturb each other.

    Raises what `file_lock` raises.
    """
    with file_lock(user_table_path(machine).with_suffix(".lock"), timeout_s):
        yield


@contextmanager
def file_lock(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold a lock that one thread of all processes has at a time: a file, which remains.

    Raises OSError if the file cannot be written, and TimeoutError, which is one, after `timeout_s` seconds.
    """
    import fcntl  # the executor that needs kernels runs on Linux only

    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path}: held by another process for {timeout_s:g} s") from None

            time.sleep(LOCK_POLL_S)
        yield  # closing the file frees the lock
