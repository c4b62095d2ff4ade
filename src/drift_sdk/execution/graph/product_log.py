"""A log of the products that an engine has run: role, shape, type and how often, for `drift_sdk tune --log`.

Replays are counted, and each has the same products every time. Products that the vendor's library computes,
those of prefill and of long draft extensions, have nothing to tune and are left out. So are those of steps
that take little of the time: draft extensions of prompts, and refreshes of partial verification.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from drift_sdk._kernels.gemm.tuning import LoggedProduct, add_products
from drift_sdk.execution.device.device import Replay
from drift_sdk.execution.forward.draft import MAX_MULTIPLY_ROWS
from drift_sdk.execution.graph.gpu_graphs import CapturedGraphs
from drift_sdk.execution.stages import WatchedReplay
from drift_sdk.models.channels import MlpWeights, ParallelWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder, DraftWeights
from drift_sdk.models.weights import LayerWeights

log = logging.getLogger("drift_sdk")

Products = Counter[LoggedProduct]


class ProductLog:
    """Counts the products of an executor's replays, and writes them to a file when the executor is closed."""

    def __init__(self, path: Path, decoder: Decoder, draft: DraftDecoder | Decoder | None) -> None:
        self._path = path
        self._decoder, self._draft = decoder, draft
        self._num_launches: Counter[str] = Counter()
        self._products: dict[str, Products] = {}

    def watch(self, graphs: CapturedGraphs, *, is_exact: bool) -> None:
        """Count the launches of an executor's graphs. is_exact: prefill runs in the kernels of decoding."""
        for (num_slots, num_drafts), replay in graphs.decode.items():
            products = self._drafted(num_slots, num_drafts) + self._verified(num_slots, num_drafts)
            graphs.decode[num_slots, num_drafts] = self._watched(replay, products)
        for (num_slots, num_drafts), replay in graphs.draft.items():
            graphs.draft[num_slots, num_drafts] = self._watched(replay, self._drafted(num_slots, num_drafts))
        for (num_slots, num_drafts), replay in graphs.verify.items():
            graphs.verify[num_slots, num_drafts] = self._watched(
                replay, self._verified(num_slots, num_drafts)
            )
        for (num_slots, num_drafts), replay in graphs.partial.items():
            products = self._drafted(num_slots, num_drafts) + self._verified(num_slots, num_drafts)
            graphs.partial[num_slots, num_drafts] = self._watched(replay, products)
        for bucket, replay in graphs.mixed.items():
            products = self._layers(bucket.size) + self._head(bucket.num_round_rows)
            products += self._drafted(bucket.num_slots, bucket.num_drafts)
            products += self._extended(bucket.num_round_rows)
            graphs.mixed[bucket] = self._watched(replay, products)
        for num_slots, replay in graphs.first_tokens.items():
            graphs.first_tokens[num_slots] = self._watched(replay, self._head(num_slots))
        if is_exact:
            for num_rows, replay in graphs.prefill.items():
                graphs.prefill[num_rows] = self._watched(replay, self._layers(num_rows))

    def reset(self) -> None:
        """Forget what was counted."""
        self._num_launches.clear()

    def write(self) -> None:
        """Add the counts to the file. A file that cannot be written is a warning."""
        total: Products = Counter()
        for name, number in self._num_launches.items():
            for product, count in self._products[name].items():
                total[product] += number * count
        try:
            add_products(self._path, total)
        except (OSError, ValueError) as error:
            log.warning("%s: the shapes of products were not written: %s", self._path, error)

    def _watched(self, replay: Replay, products: Products) -> Replay:
        name = str(len(self._products))
        self._products[name] = products
        return WatchedReplay(replay, lambda: self._num_launches.update((name,)))

    def _layers(self, num_rows: int) -> Products:
        return Counter(_layer_products("", self._decoder.weights.layers, num_rows))

    def _head(self, num_rows: int) -> Products:
        return Counter(_product("head", self._decoder.weights.head, num_rows))

    def _drafted(self, num_slots: int, num_drafts: int) -> Products:
        """The products that draft: of each draft its head, and between drafts its layers."""
        if self._draft is None or num_drafts == 0:
            return Counter()

        weights = self._draft.weights
        found: Products = Counter()
        for depth in range(num_drafts):
            found.update(self._of_draft(_product("draft head", weights.head, num_slots)))
            if depth > 0:
                found.update(self._rows_of_draft(num_slots))
        return found

    def _verified(self, num_slots: int, num_drafts: int) -> Products:
        """The products that verify drafts, and the draft extension."""
        num_rows = num_slots * (num_drafts + 1)
        return self._layers(num_rows) + self._head(num_rows) + self._extended(num_rows)

    def _extended(self, num_rows: int) -> Products:
        """The products of the draft extension of a round's rows."""
        if self._draft is None:
            return Counter()

        weights = self._draft.weights
        found = self._rows_of_draft(num_rows)
        if isinstance(weights, DraftWeights) and weights.fc is not None:
            found.update(self._of_draft(_product("draft fc", weights.fc, num_rows)))
        return found

    def _rows_of_draft(self, num_rows: int) -> Products:
        """The products of the draft's layers, and of the projection before them."""
        assert self._draft is not None
        weights = self._draft.weights
        found: Products = Counter(self._of_draft(_layer_products("draft ", weights.layers, num_rows)))
        if isinstance(weights, DraftWeights) and weights.joint is not None:
            found.update(self._of_draft(_product("draft joint", weights.joint, num_rows)))
        return found

    def _of_draft(self, products: Iterable[LoggedProduct]) -> list[LoggedProduct]:
        """The products of a draft that are not left to the library: for a head those of few rows."""
        most = MAX_MULTIPLY_ROWS if isinstance(self._draft, DraftDecoder) else sys.maxsize
        return [product for product in products if product.num_rows <= most]


def _layer_products(prefix: str, layers: Sequence[LayerWeights], num_rows: int) -> Iterator[LoggedProduct]:
    for layer in layers:
        assert not isinstance(layer.channel, ParallelWeights)
        mlp = layer.channel if isinstance(layer.channel, MlpWeights) else layer.channel.shared
        for name, matrix in layer.mixer.matrices.items():
            yield from _product(f"{prefix}{name}", matrix, num_rows)
        if mlp is not None:
            is_gated = mlp.gate_up_bias is None
            yield from _product(f"{prefix}gate_up", mlp.gate_up, num_rows, is_gated=is_gated)
            yield from _product(f"{prefix}down", mlp.down, num_rows)


def _product(role: str, weight: object, num_rows: int, *, is_gated: bool = False) -> list[LoggedProduct]:
    """The product by a weight; none by an empty or a quantised one, which has no tuned table."""
    if not isinstance(weight, Tensor) or weight.numel() == 0:
        return []

    num_columns, inner = weight.shape
    dtype = str(weight.dtype).removeprefix("torch.")
    return [
        LoggedProduct(
            role=role,
            num_rows=num_rows,
            num_columns=num_columns,
            inner=inner,
            is_gated=is_gated,
            dtype=dtype,
        )
    ]
