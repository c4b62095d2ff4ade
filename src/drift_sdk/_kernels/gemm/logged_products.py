"""Files that list products by shape and count, written by engines and read by `drift_sdk tune --log`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from drift_sdk._kernels.gemm.tuned_files import file_lock, read_whole, write_whole
from drift_sdk._kernels.gemm.tuning import gemm_key, shape_of_key

__all__ = ["LoggedProduct", "add_products", "read_products", "shapes_by_time"]

MAX_FILE_BYTES = 16 * 2**20
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
