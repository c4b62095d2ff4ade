"""Step timeout: an engine abandons a device that hangs and never waits for it again."""

from __future__ import annotations

import gc
import time
import weakref

import anyio
import pytest
import torch
from interpreted_device import InterpretedDevice, InterpretedEvent
from loops import WAIT_S, on_every_loop, run
from scheduled_run import sampling_of
from tiny_llama import tiny_llama

from drift_sdk import Engine, EngineClosed, EngineConfig, ExecutorError
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.execution.device import device as device_module
from drift_sdk.execution.device.device import step_timeout
from drift_sdk.execution.device.resources import Ring, RingSizes
from drift_sdk.execution.device.slot_table import NO_UPDATES
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import (
    BlockUpdate,
    ExecutorLimits,
    PrefillChunk,
    SlotAssignment,
    StepPlan,
)
from drift_sdk.testing import ScriptedExecutor, ScriptedModel, scripted_engine

SHAPES = tiny_llama(tie_word_embeddings=True)
LIMITS = ExecutorLimits(max_num_seqs=1, max_model_len=32, num_blocks=8, block_size=4, vocab_size=64)


class HangingEvent(InterpretedEvent):
    def __init__(self, device: HangingDevice) -> None:
        super().__init__()
        self._device = device

    @property
    def is_done(self) -> bool:
        return not self._device.is_hung

    def wait(self, timeout_s: float | None = None) -> None:
        if self._device.is_hung:
            assert timeout_s is not None, "waits without a limit"
            self._device.timeouts.append(timeout_s)
            raise step_timeout(timeout_s)


class HangingDevice(InterpretedDevice):
    def __init__(self) -> None:
        self.is_hung = False
        self.is_closed = False
        self.timeouts: list[float] = []

    def event(self) -> HangingEvent:
        return HangingEvent(self)

    def close(self) -> None:
        self.is_closed = True


def graph_executor(device: HangingDevice, step_timeout_s: float | None) -> GraphExecutor:
    decoder = Decoder.random(read_spec(SHAPES), device="cpu", dtype=torch.float32)
    options = GraphOptions(prefill_token_budget=16, step_timeout_s=step_timeout_s)
    return GraphExecutor(device, decoder, LIMITS, TunedTable(), options)


def first_step() -> StepPlan:
    return StepPlan(
        step_id=0,
        assignments=(SlotAssignment(slot=0, sampling=sampling_of(2, 6)),),
        block_updates=(BlockUpdate(slot=0, first_index=0, block_ids=(3,)),),
        prefill=(PrefillChunk(slot=0, start=0, token_ids=(5, 6), next_token_id=None),),
        decode=(),
    )


@pytest.mark.interpreter
def test_hanging_step_raises_and_keeps_its_memory() -> None:
    device = HangingDevice()
    executor = graph_executor(device, 0.5)
    executor.launch(first_step())
    device.is_hung = True
    with pytest.raises(ExecutorError, match=r"not finished a step within 0\.5 s") as caught:
        executor.collect()
    assert caught.value.process_unusable
    executor.close()
    assert device.timeouts == [0.5]  # closing did not wait again
    assert not device.is_closed
    graphs = weakref.ref(executor._graphs)
    del executor, caught
    gc.collect()
    assert graphs() is not None  # replays in flight still write to its buffers


@pytest.mark.interpreter
@pytest.mark.parametrize("num_launched", [0, 1])
def test_close_waits_one_timeout_for_each_step_in_flight(num_launched: int) -> None:
    device = HangingDevice()
    executor = graph_executor(device, 0.5)
    for _ in range(num_launched):
        executor.launch(first_step())
    device.is_hung = True
    executor.close()
    assert device.timeouts == [0.5 * (num_launched + 1)]
    assert not device.is_closed


def test_ring_waits_at_most_two_timeouts() -> None:
    device = HangingDevice()
    sizes = RingSizes(
        num_entries=2,
        max_updates=4,
        payload_words=4,
        record_words=4,
        max_slots=1,
        num_draft_masks=0,
        mask_words=1,
    )
    ring = Ring(device, sizes, timeout_s=0.5)
    device.is_hung = True
    for wait in (lambda: ring.acquire(NO_UPDATES), lambda: ring.wait(0)):
        with pytest.raises(ExecutorError, match="within 1 s"):
            wait()


class FakeStream:
    def record(self, event: FakeCudaEvent) -> None:
        event.num_asked = 0


class FakeCudaEvent:
    """An event of cuda.core that is done when it is asked the third time, or never."""

    def __init__(self, *, is_hung: bool) -> None:
        self._is_hung = is_hung
        self.num_asked = 0
        self.num_syncs = 0

    @property
    def is_done(self) -> bool:
        self.num_asked += 1
        return not self._is_hung and self.num_asked > 2

    def sync(self) -> None:
        self.num_syncs += 1


class FakeSignal:
    """A signal that is given at each wait, or never."""

    def __init__(self, *, is_hung: bool = False) -> None:
        self._is_hung = is_hung
        self.events: list[object] = []
        self.num_waits = 0

    def after(self, event: object) -> None:
        self.events.append(event)

    def wait(self, timeout_s: float) -> None:
        self.num_waits += 1
        if self._is_hung:
            time.sleep(timeout_s)


class FakeCudaDevice:
    def __init__(self, *, is_hung: bool = False) -> None:
        self.made = FakeCudaEvent(is_hung=is_hung)

    def create_event(self, options: object) -> FakeCudaEvent:
        return self.made


def test_event_that_was_never_recorded_is_done() -> None:
    device = FakeCudaDevice(is_hung=True)
    signal = FakeSignal()
    event = device_module._GpuEvent(device, FakeStream(), lambda: signal)
    assert event.is_done
    event.wait(0.01)
    event.wait()
    assert device.made.num_syncs == device.made.num_asked == signal.num_waits == 0


def test_wait_with_a_timeout_waits_for_the_signal() -> None:
    """The signal of an earlier wait may come first: the event decides."""
    device, signal = FakeCudaDevice(), FakeSignal()
    event = device_module._GpuEvent(device, FakeStream(), lambda: signal)
    event.record()
    event.wait(10.0)
    assert signal.events == [device.made]
    assert (device.made.num_asked, signal.num_waits, device.made.num_syncs) == (3, 2, 0)
    event.record()
    event.wait()
    assert (device.made.num_asked, device.made.num_syncs) == (0, 1)


def test_wait_ends_after_the_timeout() -> None:
    signal = FakeSignal(is_hung=True)
    event = device_module._GpuEvent(FakeCudaDevice(is_hung=True), FakeStream(), lambda: signal)
    event.record()
    started_at = time.monotonic()
    with pytest.raises(ExecutorError, match=r"within 0\.05 s") as caught:
        event.wait(0.05)
    assert caught.value.process_unusable
    assert time.monotonic() - started_at >= 0.05


class HangingExecutor(ScriptedExecutor):
    """An executor whose device hangs at the third step."""

    def collect(self):
        if self.num_steps == 2:
            raise step_timeout(0.5)
        return super().collect()


@on_every_loop
def test_every_stream_gets_the_error_and_close_does_not_wait(loop: str) -> None:
    async def main() -> None:
        model = ScriptedModel("Hello, hello!", config=EngineConfig(step_timeout_s=0.5))

        def open_hanging(report, limits=None) -> LoadedModel:
            opened = model(report)
            opened.executor.__class__ = HangingExecutor
            return opened

        engine = Engine("scripted", model.config, open_model=open_hanging)
        errors: list[ExecutorError] = []

        async def consume() -> None:
            with pytest.raises(ExecutorError) as caught:
                await engine.generate("x")
            errors.append(caught.value)

        async with engine:
            with anyio.fail_after(WAIT_S):
                async with anyio.create_task_group() as tasks:
                    for _ in range(3):
                        tasks.start_soon(consume)
            assert len({id(error) for error in errors}) == 3
            assert all(error.process_unusable for error in errors)
            with pytest.raises(ExecutorError) as caught:
                engine.generate("x")
            assert caught.value.process_unusable

    run(loop, main)


@pytest.mark.parametrize("failure", [ExecutorError("broken"), None])
def test_request_admitted_before_the_engine_ends_gets_the_reason(failure: ExecutorError | None) -> None:
    """The engine ends after a request is admitted and before its text is prepared."""

    async def main() -> None:
        async with scripted_engine("Hello!") as engine:
            driver = engine._driver
            assert driver is not None
            prepare = driver._text_worker.prepare

            def end_first(*arguments) -> None:
                driver._registry.close(failure)
                driver._text_worker.close()
                prepare(*arguments)

            driver._text_worker.prepare = end_first
            with pytest.raises(EngineClosed if failure is None else ExecutorError) as caught:
                engine.generate("x")
            assert caught.value.__cause__ is failure
            assert driver._registry.is_empty
            assert driver._registry.num_admitted == 0

    anyio.run(main)
