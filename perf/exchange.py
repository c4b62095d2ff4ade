"""Time that GPUs take to add their partial sums, by number of rows. Needs several GPUs.

A step of SUMS small products, each followed by its addition to the residual stream and a norm, is captured on
every GPU and launched on all together. The same step is timed on one GPU, which adds the same slices from its
own memory. The sums of both are compared bit by bit.

Then the products of LAYERS layers, with the weights of a GPU's part and without attention, are timed twice:
with their sums, and with additions of the GPU's own slices alone. The difference is what a layer loses to the
exchange.

python -m perf.exchange --tensor-parallel 2 --rows 1 4 64 1024
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from drift_sdk._kernels.gemm.tuning import TunedTable, gpu_key, table_for
from drift_sdk.execution.device.device import (
    Device,
    DeviceGroup,
    GpuDevice,
    GroupReplay,
    Replay,
    ServingDevice,
)
from drift_sdk.execution.device.exchange import Exchange, ExchangeSizes, open_exchanges
from drift_sdk.models.shard import Shard
from drift_sdk.spec.model import ModelSpec
from perf.harness.exchanged_steps import LAYERS, SUMS, Layers, PartWeights, Sums
from perf.harness.numbers import at_least
from perf.harness.record import Run
from perf.harness.recording import Recording, parser
from perf.harness.shapes import prepare
from perf.harness.table import show, title_of

__all__ = ["ExchangeRun", "Measurement", "main"]

NUM_REPLAYS = 20
TIMEOUT_S = 5.0


class ExchangeRun(Run, kw_only=True):
    """Addition of partial sums to the residual stream of `num_rows` rows, and its norm.

    num_gpus: GPUs. us: microseconds of a small product, the addition across GPUs and the
    norm. local_us: the same with all slices on one GPU. has_same_bits: whether all GPUs have the residual
    stream that one GPU computes. layer_us, local_layer_us: of the products of a layer and its two additions,
    across GPUs and of each GPU's own slices.
    """

    num_rows: int
    num_gpus: int
    us: float
    local_us: float
    has_same_bits: bool
    layer_us: float
    local_layer_us: float


class Measurement:
    """GPUs whose exchange is measured, and the weights of their parts."""

    def __init__(self, devices: Sequence[Device], spec: ModelSpec, table: TunedTable, most_rows: int) -> None:
        """spec: of the whole model."""
        self._table = table
        self._devices, self._group, self._size = devices, DeviceGroup(devices), spec.hidden_size
        shard = Shard(rank=0, size=len(devices))
        inners = spec.attention.output_size // shard.size, spec.mlp_size // shard.size
        slices = max(shard.column_slices(spec.hidden_size, inner) for inner in inners)
        sizes = ExchangeSizes(num_sums=SUMS, sum_size=slices * most_rows * spec.hidden_size, logits_size=0)
        self._exchanges = open_exchanges(devices, sizes)
        self._weights = []
        for device, exchange in zip(devices, self._exchanges, strict=True):
            with device.work():
                self._weights.append(PartWeights.random(exchange.shard.spec(spec), device.torch_device))

    def fields(self, num_rows: int) -> dict[str, Any]:
        """The fields of an ExchangeRun that are measured."""
        steps = [
            Sums(device, self._size, num_rows, exchange, len(self._devices))
            for device, exchange in self._gpus()
        ]
        us = self._microseconds([each.step for each in steps]) / SUMS
        first = self._devices[0]
        with first.work():
            alone = Sums(first, self._size, num_rows, None, len(self._devices))
            local = first.capture(alone.step)
            first.finish_captures()
        local_us = _microseconds(first, local) / SUMS
        expected = alone.hidden.cpu()
        layer_us = {
            is_local: self._microseconds([
                Layers(weights, num_rows, exchange, self._table, is_local=is_local).step
                for weights, (_, exchange) in zip(self._weights, self._gpus(), strict=True)
            ]) / LAYERS
            for is_local in (False, True)
        }  # fmt: skip
        return {
            "num_rows": num_rows,
            "us": us,
            "local_us": local_us,
            "has_same_bits": all(torch.equal(one.hidden.cpu(), expected) for one in steps),
            "layer_us": layer_us[False],
            "local_layer_us": layer_us[True],
        }

    def _gpus(self) -> Iterator[tuple[Device, Exchange]]:
        """Each GPU, and its exchange, in whose context torch works meanwhile."""
        for device, exchange in zip(self._devices, self._exchanges, strict=True):
            with device.work():
                yield device, exchange

    def _microseconds(self, steps: Sequence[Callable[[], None]]) -> float:
        """Microseconds of a step of all GPUs, the median of NUM_REPLAYS replays."""
        replays = [device.capture(step) for (device, _), step in zip(self._gpus(), steps, strict=True)]
        for device in self._devices:
            device.finish_captures()
        _settle(self._group)
        for _, exchange in self._gpus():
            exchange.arm(TIMEOUT_S)
        _settle(self._group)
        found = _microseconds(self._group, GroupReplay(replays))
        for _, exchange in self._gpus():
            exchange.check()
            exchange.disarm()
        _settle(self._group)
        return found


def _settle(device: ServingDevice) -> None:
    """Wait until the device, or all of a group, is idle."""
    mark = device.event()
    mark.record()
    mark.wait()


def _microseconds(device: ServingDevice, replay: Replay) -> float:
    """Microseconds of a step, the median of NUM_REPLAYS replays."""
    marks = [device.event() for _ in range(NUM_REPLAYS + 1)]
    replay.launch()
    marks[0].record()
    for mark in marks[1:]:
        replay.launch()
        mark.record()
    marks[-1].wait()
    times = [later.seconds_since(earlier) for earlier, later in zip(marks, marks[1:], strict=False)]
    return median(times) * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--tensor-parallel", type=at_least(1), default=2, help="GPUs")
    made.add_argument("--rows", type=at_least(1), nargs="+", default=[1, 4, 16, 64, 256, 1024])
    given = made.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        spec = prepare(given.model, Path(folder)).spec
    recording = Recording("exchange", given.device, given.out)
    devices = [GpuDevice(index) for index in range(given.tensor_parallel)]
    make = partial(
        ExchangeRun,
        engine="drift",
        model=given.model,
        dtype="bfloat16",
        scenario="exchange",
        batch=1,
        context=0,
        num_gpus=given.tensor_parallel,
    )
    table = table_for(gpu_key(torch.cuda.get_device_name(devices[0].torch_device)))
    measurement = Measurement(devices, spec, table, max(given.rows))
    for num_rows in given.rows:
        recording.add(make(**measurement.fields(num_rows)))
    times = ("us", "local_us", "layer_us", "local_layer_us")
    rows = [
        (str(run["num_rows"]), *(f"{run[name]:.2f}" for name in times), str(run["has_same_bits"]))
        for run in recording.results.runs
    ]
    titles = ("rows", "us", "us on one GPU", "us a layer", "without exchange", "same bits")
    show(title_of(recording.results), titles, rows)
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
