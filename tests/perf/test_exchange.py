"""The measurement of sums across GPUs, on devices without GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreted_device import InterpretedDevice, InterpretedReplay
from lockstep_devices import Lockstep, LockstepDevice, LockstepReplay

from drift_sdk._kernels.exchange import add_norm_across
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.families import read_spec
from perf import exchange
from perf.harness import exchanged_steps

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(torch.cuda.is_available(), reason="perf.exchange measures GPUs"),
]

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


def test_sums_and_layers_are_timed_with_and_without_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one device runs alone."""
    for module, name, value in (
        (exchange, "SUMS", 2),
        (exchanged_steps, "SUMS", 2),
        (exchange, "LAYERS", 1),
        (exchanged_steps, "LAYERS", 1),
        (exchange, "NUM_REPLAYS", 1),
    ):
        monkeypatch.setattr(module, name, value)
    capture = LockstepDevice.capture

    def capture_alone(device: LockstepDevice, step: Callable[[], None]) -> LockstepReplay | InterpretedReplay:
        if step.__self__._exchange is None:
            return InterpretedDevice.capture(device, step)

        unfinished.append(device)
        return capture(device, step)

    def finish(device: LockstepDevice) -> None:
        unfinished[:] = [each for each in unfinished if each is not device]
        InterpretedDevice.finish_captures(device)

    def launch(replay: LockstepReplay) -> None:
        assert not unfinished
        launch_before(replay)

    unfinished: list[LockstepDevice] = []
    launch_before = LockstepReplay.launch
    monkeypatch.setattr(LockstepReplay, "launch", launch)
    monkeypatch.setattr(LockstepDevice, "finish_captures", finish)

    monkeypatch.setattr(LockstepDevice, "capture", capture_alone)
    group = Lockstep(2, monkeypatch)
    monkeypatch.setattr(exchanged_steps, "add_norm_across", group._meeting(add_norm_across))
    measurement = exchange.Measurement(group.devices, read_spec(CONFIG), TunedTable(), 3)
    found = measurement.fields(3)
    assert found["has_same_bits"] and found["num_rows"] == 3
    assert min(found[name] for name in ("us", "local_us", "layer_us", "local_layer_us")) > 0
    # Two replays of two sums, of two sums of a layer, and the beginning of each of six.
    assert group.num_exchanges == 2 * (2 * 2 + 2 * 2 + 6)
