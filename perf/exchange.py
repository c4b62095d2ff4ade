"""Time that GPUs take to add their partial sums, by number of rows. Needs several GPUs.

A step of SUMS small products, each followed by its addition to the residual stream and a norm, is captured on
every GPU and launched on all together. The same step is timed on one GPU, which adds the same slices from its
own memory. The sums of both are compared bit by bit.

python -m perf.exchange --tensor-parallel 2 --rows 1 4 64 1024
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from drift_sdk._kernels.exchange.add_norm_across import add_norm_across
from drift_sdk._kernels.gemm.gemm import GemmConfig, multiply
from drift_sdk._kernels.layers.residual_norm import add_norm
from drift_sdk.execution.device.device import GpuDevice, Replay, ServingDevice
from drift_sdk.execution.device.device_group import DeviceGroup, GroupReplay
from drift_sdk.execution.device.exchange import Exchange, ExchangeSizes, open_exchanges
from perf.harness.record import Run
from perf.harness.recording import Recording, parser
from perf.harness.shapes import prepare
from perf.harness.table import show, title_of

__all__ = ["ExchangeRun", "main", "measure"]

SUMS = 64
"""Additions of a step: those of 32 layers."""
INNER = 64
"""Inner dimension of the products, which so take hardly any time."""
NUM_REPLAYS = 20
TIMEOUT_S = 5.0


class ExchangeRun(Run, kw_only=True):
    """Addition of partial sums to the residual stream of `num_rows` rows, and its norm.

    num_gpus: GPUs. us: microseconds of a product of INNER columns, the addition across GPUs and the
    norm. local_us: the same with all slices on one GPU. has_same_bits: whether all GPUs have the residual
    stream that one GPU computes.
    """

    num_rows: int
    num_gpus: int
    us: float
    local_us: float
    has_same_bits: bool


class Sums:
    """The step on one GPU: with `exchange` of one slice, without it of all slices."""

    def __init__(self, device: GpuDevice, size: int, num_rows: int, exchange: Exchange | None, num_gpus: int):
        self._exchange, self._rows = exchange, num_rows
        place = device.torch_device
        generator = torch.Generator(place).manual_seed(num_rows)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=place, dtype=torch.bfloat16)

        x, weights = draw(num_rows, num_gpus * INNER), draw(size, num_gpus * INNER) / 8
        self.hidden, self._norm = draw(num_rows, size), draw(size)
        self._first = self.hidden.clone()
        self._normed = torch.empty_like(self.hidden)
        own = slice(None)
        if exchange is not None:
            rank = exchange.shard.rank
            own = slice(rank * INNER, (rank + 1) * INNER)
        self._x, self._weights = x[:, own].contiguous(), weights[:, own].contiguous()
        self._config = GemmConfig(num_slices=1 if exchange is not None else num_gpus, tile_k=INNER)
        self._partials = torch.empty(num_gpus, num_rows, size, device=place)

    def step(self) -> None:
        self.hidden.copy_(self._first)
        if self._exchange is not None:
            self._exchange.begin()
        for index in range(SUMS):
            if self._exchange is None:
                multiply(self._x, self._weights, self._partials, self._config)
                add_norm(self.hidden, self._partials, self._norm, self._normed, eps=1e-5)
            else:
                sums = self._exchange.sums(index, (1, self._rows, self.hidden.shape[1]))
                multiply(self._x, self._weights, sums.own, self._config)
                add_norm_across(self.hidden, sums, self._norm, self._normed, eps=1e-5)


def measure(
    devices: Sequence[GpuDevice], size: int, every_num_rows: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the fields of an ExchangeRun for each number of rows. size: of a row."""
    num_gpus = len(devices)
    sizes = ExchangeSizes(num_sums=SUMS, sum_size=max(every_num_rows) * size, logits_size=0)
    exchanges = open_exchanges(devices, sizes)
    group = DeviceGroup(devices)
    for num_rows in every_num_rows:
        replays, found = [], []
        for device, exchange in zip(devices, exchanges, strict=True):
            with device.work():
                found.append(Sums(device, size, num_rows, exchange, num_gpus))
                replays.append(device.capture(found[-1].step))
        with devices[0].work():
            alone = Sums(devices[0], size, num_rows, None, num_gpus)
            local = devices[0].capture(alone.step)
        _settle(group)
        for device, exchange in zip(devices, exchanges, strict=True):
            with device.work():
                exchange.arm(TIMEOUT_S)
        _settle(group)
        us = _microseconds(group, GroupReplay(replays))
        local_us = _microseconds(devices[0], local)
        for exchange in exchanges:
            exchange.check()
        expected = alone.hidden.cpu()
        yield {
            "num_rows": num_rows,
            "us": us,
            "local_us": local_us,
            "has_same_bits": all(torch.equal(one.hidden.cpu(), expected) for one in found),
        }
        for device, exchange in zip(devices, exchanges, strict=True):
            with device.work():
                exchange.disarm()


def _settle(device: ServingDevice) -> None:
    """Wait until the device, or all of a group, is idle."""
    mark = device.event()
    mark.record()
    mark.wait()


def _microseconds(device: ServingDevice, replay: Replay) -> float:
    """Microseconds of one of the SUMS additions, the median of NUM_REPLAYS replays."""
    marks = [device.event() for _ in range(NUM_REPLAYS + 1)]
    replay.launch()
    marks[0].record()
    for mark in marks[1:]:
        replay.launch()
        mark.record()
    marks[-1].wait()
    times = [later.seconds_since(earlier) for earlier, later in zip(marks, marks[1:], strict=False)]
    return median(times) / SUMS * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--tensor-parallel", type=int, default=2, help="GPUs")
    made.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    given = made.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        size = prepare(given.model, Path(folder)).config.hidden_size
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
    for fields in measure(devices, size, given.rows):
        recording.add(make(**fields))
    rows = [
        (str(run["num_rows"]), f"{run['us']:.2f}", f"{run['local_us']:.2f}", str(run["has_same_bits"]))
        for run in recording.results.runs
    ]
    show(title_of(recording.results), ("rows", "us", "us on one GPU", "same bits"), rows)
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
