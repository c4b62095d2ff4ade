"""Tuned tables: measured launch configurations of products, by GPU and by shape of the weight.

The tables are `tuned/<gpu>.json`, written by `drift_sdk tune`, and files in the user's cache,
written by it and by tuning at a start. A weight without an entry runs with the tiles of heuristic.py.

No table changes a product's bits: the slices of a weight are not in it, they follow from the weight's shape;
and tiles whose instruction could be another one are refused (`check_tiles`).

Tuned tables in the user's cache folder, one file for each GPU, driver, library and version of the kernels.

A file is used on the machine it was measured on, or one that is alike in all of `MeasuredOn`. It is replaced
as a whole, so a reader never sees half of it; writers take turns. A file that is damaged, too large, or of
another machine is ignored with one warning.

Files that list products by shape and count, written by engines and read by `drift_sdk tune --log`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

import msgspec
import torch
import triton
from msgspec import Struct

from drift_sdk._kernels.gemm.gemm import GemmConfig, GemmTiles
from drift_sdk._kernels.gemm.heuristic import ROW_COUNTS, GemmShape, default_tiles, fits
from drift_sdk._kernels.gemm.slices import num_slices
from drift_sdk._kernels.launch.gpu_limits import GpuLimits, gpu_limits

ALLOWED: dict[str, tuple[int, ...]] = {
    "tile_n": (64, 128, 256),
    "tile_m": (16, 32, 64, 128, 256),
    "tile_k": (32, 64, 128, 256),
    "num_stages": (1, 2, 3, 4, 5, 6, 7, 8),
    "num_warps": (4, 8),
}
"""Values that tiles of a table may have. Fewer columns than 64, or warps other than whole groups of four,
would let Triton choose mma.sync instead of wgmma on compute capability 9.0, whose sums have other bits."""

MAX_ENTRIES = 64
"""Most numbers of rows of a weight."""

KEY = re.compile(r"([1-9]\d{0,8})x([1-9]\d{0,8})( gated)?")


def check_tiles(tiles: GemmTiles) -> None:
    """Raise ValueError for tiles that no table may hold, since their product could have other bits."""
    for name, allowed in ALLOWED.items():
        if getattr(tiles, name) not in allowed:
            found = f"{name}={getattr(tiles, name)}"
            raise ValueError(
                f"{found}: expected one of {', '.join(map(str, allowed))}: others may change bits"
            )


class TunedTiles(Struct, frozen=True, forbid_unknown_fields=True):
    """Tiles for one weight: pairs (highest number of rows, tiles), in ascending order.

    Raises ValueError for rows in another order, and for tiles that `check_tiles` refuses.
    """

    by_rows: tuple[tuple[int, GemmTiles], ...]

    def __post_init__(self) -> None:
        counts = [max_rows for max_rows, _ in self.by_rows]
        is_ascending = counts == sorted(set(counts)) and counts[:1] > [0]
        if not (is_ascending and len(counts) <= MAX_ENTRIES):
            raise ValueError(f"by_rows: rows {counts}: expected 1 to {MAX_ENTRIES} ascending numbers over 0")

        for _, tiles in self.by_rows:
            check_tiles(tiles)

    def tiles(self, num_rows: int) -> GemmTiles:
        """Return the tiles for a number of rows: the last ones if there are more than any entry's."""
        for max_rows, tiles in self.by_rows:
            if num_rows <= max_rows:
                return tiles

        return self.by_rows[-1][1]

    def fit(self, shape: GemmShape, limits: GpuLimits) -> bool:
        """Whether all tiles fit a GPU's shared memory."""
        return all(fits(shape, tiles, limits) for _, tiles in self.by_rows)


@lru_cache(maxsize=4096)
def heuristic_tiles(shape: GemmShape, limits: GpuLimits) -> TunedTiles:
    """Return the tiles of a weight without measurements on a GPU. They have the same bits as measured
    ones."""
    return TunedTiles(tuple((num_rows, default_tiles(shape, num_rows, limits)) for num_rows in ROW_COUNTS))


class TunedGemm(Struct, frozen=True):
    """The configurations of one weight. All have the same slices, so that no bits depend on the rows' number.

    num_slices: a function of the weight's shape, see slices.py. tiles: by number of rows, as measured.
    """

    num_slices: int
    tiles: TunedTiles

    def config(self, num_rows: int) -> GemmConfig:
        """Return the configuration for a number of rows."""
        return self.tiles.tiles(num_rows).config(self.num_slices)


class TunedTable(Struct, frozen=True, kw_only=True):
    """The measurements of one kind of GPU.

    gemms: by "NxK"; by "NxK gated" for gated products, with N counting both gate and up. provenance: when and
    with which versions each entry was measured.
    """

    gemms: dict[str, TunedTiles] = {}
    provenance: dict[str, str] = {}

    def gemm(
        self,
        num_columns: int,
        inner: int,
        *,
        is_gated: bool = False,
        is_whole: bool = False,
        slices: int | None = None,
    ) -> TunedGemm:
        """Return the configurations of a weight [num_columns, inner]: those of its entry, or without one that
        fits the current GPU those of `heuristic_tiles`.

        is_whole: whether the product is to be one sum, without partial sums. A gated product always is.
        slices: of a part of a weight, which its own shape does not tell; None: `num_slices` of the shape.
        """
        shape = GemmShape(
            num_columns=num_columns,
            inner=inner,
            num_slices=slices or num_slices(num_columns, inner, is_whole=is_whole or is_gated),
            is_gated=is_gated,
            element_bytes=self._element_bytes,
        )
        limits = gpu_limits()
        entry = self.gemms.get(gemm_key(num_columns, inner, is_gated=is_gated))
        if entry is None or not entry.fit(shape, limits):
            return TunedGemm(shape.num_slices, heuristic_tiles(shape, limits))

        return TunedGemm(shape.num_slices, entry)

    @property
    def _element_bytes(self) -> int:
        return 2

    def refuse(self, num_columns: int, inner: int, *, is_gated: bool = False) -> None:
        """Report that a weight's configuration could not be used. Only a WatchedTable records it."""


class WatchedTable(TunedTable, frozen=True, kw_only=True):
    """The table of one engine, which records the weights that run as measured and those that do not.

    element_bytes: of the engine's storage type.
    used:          keys of all weights that were asked for.
    untuned:       of them, those that have no entry that fits, and those whose configurations could not be
                   used.
    """

    element_bytes: int = 2
    used: set[str] = msgspec.field(default_factory=set)
    untuned: set[str] = msgspec.field(default_factory=set)

    @property
    def _element_bytes(self) -> int:
        return self.element_bytes

    def gemm(
        self,
        num_columns: int,
        inner: int,
        *,
        is_gated: bool = False,
        is_whole: bool = False,
        slices: int | None = None,
    ) -> TunedGemm:
        found = super().gemm(num_columns, inner, is_gated=is_gated, is_whole=is_whole, slices=slices)
        key = gemm_key(num_columns, inner, is_gated=is_gated)
        self.used.add(key)
        if found.tiles is not self.gemms.get(key):
            self.untuned.add(key)
        return found

    def refuse(self, num_columns: int, inner: int, *, is_gated: bool = False) -> None:
        self.untuned.add(gemm_key(num_columns, inner, is_gated=is_gated))


def gemm_key(num_columns: int, inner: int, *, is_gated: bool = False) -> str:
    """Return a weight's key in a table."""
    return f"{num_columns}x{inner}{' gated' if is_gated else ''}"


def shape_of_key(key: str) -> tuple[int, int, bool]:
    """Return the columns, inner dimension and gating of a weight's key. Raises ValueError for no key."""
    found = KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"{key!r}: expected the shape of a weight, such as '6144x4096' or '512x64 gated'")

    return int(found[1]), int(found[2]), found[3] is not None


def gpu_key(name: str) -> str:
    """Return a GPU's key: "NVIDIA H200" -> "nvidia-h200". It names the GPU's table and folder of results."""
    return "-".join(name.lower().split())


@cache
def table_for(gpu: str) -> TunedTable:
    """Return the table of a GPU by its key; an empty table if the GPU was never measured."""
    file = resources.files("drift_sdk._kernels.gemm") / "tuned" / f"{gpu}.json"
    return msgspec.json.decode(file.read_bytes(), type=TunedTable) if file.is_file() else TunedTable()


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
SOURCES = (
    "gemm/gemm.py",
    "gemm/slices.py",
    "launch/kernel.py",
    "layers/gates.py",
)
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


FLOPS_PER_BYTE = 200
"""Operations for which a GPU takes as long as for reading a byte, roughly: only an order follows from it."""


class LoggedProduct(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A product of `num_rows` rows and a weight [num_columns, inner].

    role: of the weight in its model, such as "qkv". is_gated: gate and up are one weight. dtype: of the
    weight.
    """

    role: str
    num_rows: int
    num_columns: int
    inner: int
    is_gated: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"num_rows={self.num_rows}: expected 1 or more")

        shape_of_key(self.key)

    @property
    def key(self) -> str:
        """The weight's key in a tuned table."""
        return gemm_key(self.num_columns, self.inner, is_gated=self.is_gated)

    @property
    def cost(self) -> float:
        """A measure of the product's time: bytes, or operations in as many bytes' time if that is more."""
        elements = self.num_columns * self.inner
        return max(2 * elements, 2 * elements * self.num_rows / FLOPS_PER_BYTE)


class CountedProduct(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A product and how often it was run."""

    product: LoggedProduct
    count: int


def read_products(path: Path) -> Counter[LoggedProduct]:
    """Return the products of a file. Raises OSError, and ValueError for other contents."""
    contents = read_whole(path, MAX_FILE_BYTES)
    try:
        found = msgspec.json.decode(contents, type=list[CountedProduct])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: no log of products: {error}") from error

    return Counter({each.product: each.count for each in found if each.count > 0})


def add_products(path: Path, products: Mapping[LoggedProduct, int]) -> None:
    """Add products to a file, which is made if there is none: the largest share of time first. Several
    threads and processes may add to it.

    Raises OSError, and ValueError for a file of other contents, which is left as it is.
    """
    with file_lock(path.with_name(f".{path.name}.lock")):
        total = read_products(path) if path.exists() else Counter[LoggedProduct]()
        total.update(products)
        ordered = sorted(total.items(), key=lambda item: -item[0].cost * item[1])
        found = [CountedProduct(product=product, count=count) for product, count in ordered]
        write_whole(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def shapes_by_time(products: Mapping[LoggedProduct, int]) -> list[tuple[int, int, bool]]:
    """Return the shapes of weights (columns, inner dimension, gated), the largest share of time first."""
    costs: Counter[str] = Counter()
    for product, count in products.items():
        costs[product.key] += int(product.cost * count)
    return [shape_of_key(key) for key, _ in costs.most_common()]
