"""Pausing and sleeping."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import pytest
from loops import WAIT_S, on_every_loop, run, until
from model_zoo import make_model
from msgspec.structs import replace

from drift_sdk import EngineClosed, EngineConfig, ModelLoadError, SamplingParams
from drift_sdk.draft_policy import ViewCosts
from drift_sdk.driver.life_cycle import LoadedModel, with_limits
from drift_sdk.measurement import recorded_engine
from drift_sdk.testing import byte_tokenizer, scripted_engine

ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


def counting(prompt_ids, output_ids, seed) -> int:
    """A next token that depends on all tokens before it, so that a lost or repeated one changes the
    output."""
    return (sum(prompt_ids) + sum(output_ids) * 31 + len(output_ids)) % 250


@on_every_loop
def test_pause_stops_steps_and_resume_goes_on(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(counting, step_s=0.001) as engine:
            expected = await engine.generate("x", SamplingParams(max_tokens=200))
            stream = engine.generate("x", SamplingParams(max_tokens=200))
            await anext(stream)
            assert not engine.stats().is_paused
            await engine.pause()
            await engine.pause()
            assert engine.stats().is_paused and "drift_paused" in engine.metrics_text()
            num_steps = engine.stats().num_steps
            late = engine.generate("y", SamplingParams(max_tokens=3))
            await anyio.sleep(0.03)
            assert engine.stats().num_steps == num_steps
            doomed = engine.generate("z", ENDLESS)
            doomed.cancel()
            assert (await doomed).finish_reason == "cancelled"
            assert engine.stats().is_paused and not engine.stats().is_asleep
            await engine.resume()
            assert not engine.stats().is_paused
            assert (await stream).token_ids == expected.token_ids
            assert len((await late).token_ids) == 3

    run(loop, main)


@on_every_loop
def test_sleep_frees_the_executor_and_wake_continues_all_requests(loop: str) -> None:
    async def main() -> None:
        config = EngineConfig(max_model_len=512, kv_cache_tokens=2048)
        async with scripted_engine(counting, config=config, step_s=0.001) as engine:
            params = SamplingParams(max_tokens=150)
            expected = [await engine.generate(f"prompt {i}", params) for i in range(4)]
            await engine.pause()
            streams = [engine.generate(f"prompt {i}", params) for i in range(4)]
            await until(lambda: engine.stats().num_queued == 4)
            await engine.resume()
            await anext(streams[0])
            await engine.sleep()
            assert engine.executors[0].is_closed
            assert engine.stats().num_running == engine.stats().num_cached_blocks == 0
            assert engine.stats().num_free_blocks == engine.executors[0].limits.num_blocks
            await anyio.sleep(0.02)
            await engine.sleep()
            assert engine.is_open and engine.stats().is_asleep and not engine.stats().is_paused
            await engine.wake()
            assert not engine.stats().is_asleep
            await engine.wake()
            assert len(engine.executors) == 2
            for stream, completion in zip(streams, expected, strict=True):
                assert (await stream).token_ids == completion.token_ids

    run(loop, main)


@on_every_loop
def test_engine_stays_asleep_after_a_failed_wake(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine("ok") as engine:
            opener = engine._driver._opener
            opens = opener._open_model
            await engine.sleep()

            for failure, message in ((ModelLoadError("gone"), "gone"), (SystemExit(3), "SystemExit")):

                def failing(report, limits=None, failure=failure):
                    raise failure

                opener._open_model = failing
                with pytest.raises(ModelLoadError, match=message):
                    await engine.wake()
                assert engine.stats().is_asleep
            stream = engine.generate("x")
            opener._open_model = opens
            await engine.wake()
            assert (await stream).text == "ok"

    run(loop, main)


@on_every_loop
def test_cancelled_pause_leaves_the_engine_unchanged(loop: str) -> None:
    """A step is in flight, so the pause has to wait. A cancelled pause takes back itself and no other
    pause."""
    awaits_mask, may_go_on = threading.Event(), threading.Event()

    def holding(prompt_ids, output_ids, seed) -> int:
        if prompt_ids == list(b"hold") and not may_go_on.is_set():
            awaits_mask.set()
            assert may_go_on.wait(120)
        return 65

    async def main() -> None:
        async with scripted_engine(holding) as engine:
            few = SamplingParams(max_tokens=3)
            for is_paused_already in (False, True):
                awaits_mask.clear()
                may_go_on.clear()
                stream = engine.generate("hold", few)
                await until(awaits_mask.is_set)
                async with anyio.create_task_group() as tasks:
                    if is_paused_already:
                        tasks.start_soon(engine.pause)
                        await until(lambda: engine._driver._commands._queue.qsize() == 1)
                    with anyio.move_on_after(0.02) as scope:
                        await engine.pause()
                    assert scope.cancelled_caught
                    may_go_on.set()
                if is_paused_already:
                    late = engine.generate("x", few)
                    await until(lambda: engine.stats().num_queued == 1)
                    num_steps = engine.stats().num_steps
                    await anyio.sleep(0.02)
                    assert engine.stats().num_steps == num_steps
                    await engine.resume()
                    await late
                with anyio.fail_after(120):
                    assert len((await stream).token_ids) == 3

    run(loop, main)


@on_every_loop
@pytest.mark.parametrize("first, second", [("pause", "resume"), ("sleep", "wake")])
def test_calls_in_the_same_step_are_carried_out_in_their_order(loop: str, first: str, second: str) -> None:
    """Both come while a step is in flight. The second one undoes the first, and requests go on."""
    is_begun, may_go_on = threading.Event(), threading.Event()

    def holding(prompt_ids, output_ids, seed) -> int:
        is_begun.set()
        assert may_go_on.wait(WAIT_S)
        return 65

    async def main() -> None:
        async with scripted_engine(holding) as engine:
            stream = engine.generate("x", SamplingParams(max_tokens=9))
            await until(is_begun.is_set)
            with anyio.fail_after(WAIT_S):
                async with anyio.create_task_group() as tasks:
                    for number, name in enumerate((first, second), 1):
                        tasks.start_soon(getattr(engine, name))
                        await until(lambda number=number: engine._driver._commands._queue.qsize() == number)
                    may_go_on.set()
                assert (await stream).text == "A" * 9
                assert (await engine.generate("y", SamplingParams(max_tokens=2))).text == "AA"

    run(loop, main)


@on_every_loop
def test_cancelled_sleep_and_wake_are_completed(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine("ok", step_s=0.001) as engine:
            for command, is_asleep in ((engine.sleep, True), (engine.wake, False)):
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await command()
                assert engine.executors[-1].is_closed == is_asleep
            assert (await engine.generate("x")).text == "ok"

    run(loop, main)


async def test_recorded_engine_wakes_with_the_limits_of_its_start(tmp_path: Path) -> None:
    make_model(0, tmp_path)
    config = EngineConfig(device="cpu", executor="eager", max_model_len=32, kv_cache_tokens=64)
    async with recorded_engine(tmp_path, config) as engine:
        num_blocks = engine.stats().num_blocks
        await engine.sleep()
        await engine.wake()
        assert engine.stats().num_blocks == num_blocks
        assert len((await engine.generate([5, 6], SamplingParams(max_tokens=3))).token_ids) >= 1


def changed_vocabulary(model: LoadedModel) -> LoadedModel:
    return replace(model, text=replace(model.text, vocab_size=99))


def changed_ends(model: LoadedModel) -> LoadedModel:
    return replace(model, text=replace(model.text, eos_token_ids=(1, 2)))


def changed_context(model: LoadedModel) -> LoadedModel:
    return replace(model, text=replace(model.text, max_model_len=99))


def changed_blocks(model: LoadedModel) -> LoadedModel:
    return replace(model, scheduling=replace(model.scheduling, num_blocks=99))


def changed_tokenizer(model: LoadedModel) -> LoadedModel:
    tokenizer = byte_tokenizer()
    tokenizer._raw.add_special_tokens(["<new>"])
    return replace(model, text=replace(model.text, tokenizer=tokenizer))


def changed_executor(model: LoadedModel) -> LoadedModel:
    return replace(model, executor_name="other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_vocabulary, "vocab_size=99, was 257"),
        (changed_ends, r"eos_token_ids=\(1, 2\), was \(256,\)"),
        (changed_context, "max_model_len=99, was 4096"),
        (changed_blocks, "num_blocks=99, was 4096"),
        (changed_tokenizer, "tokenizer='"),
        (changed_executor, "executor='other', was 'scripted'"),
    ],
)
def test_wake_rejects_another_model(change, message: str) -> None:
    async def main() -> None:
        async with scripted_engine("ok") as engine:
            opener = engine._driver._opener
            opens = opener._open_model
            await engine.sleep()
            opener._open_model = lambda report, limits: change(opens(report, limits))
            stream = engine.generate("x")
            with pytest.raises(ModelLoadError, match=message):
                await engine.wake()
            assert engine.is_open
            assert all(executor.is_closed for executor in engine.executors)
            opener._open_model = opens
            await engine.wake()
            assert (await stream).text == "ok"

    run("asyncio", main)


def test_wake_accepts_other_templates_and_costs_and_keeps_the_blocks() -> None:
    """The size of the KV cache does not depend on the memory that is free when the engine wakes up."""

    async def main() -> None:
        config = EngineConfig(max_model_len=64, kv_cache_tokens=1000)
        async with scripted_engine("ok", config=config) as engine:
            first = engine.executors[0].limits
            driver = engine._driver
            opens, asked = driver._opener._open_model, []

            def open_changed(report, limits=None) -> LoadedModel:
                asked.append(limits)
                model = opens(report, limits)
                params = SamplingParams(max_tokens=1)
                costs = ViewCosts(refresh_tokens=9, view_tokens=9, refresh_costs={1: 0.001 * len(asked)})
                return replace(
                    model,
                    text=replace(model.text, default_params=params),
                    scheduling=replace(model.scheduling, round_costs={(1, 0): 0.001}, view_costs=costs),
                )

            driver._opener._open_model = open_changed
            await engine.sleep()
            await engine.wake()
            assert asked == [first]
            assert engine.executors[1].limits == first
            assert (await engine.generate("x")).text == "o"
            pinned = with_limits(EngineConfig(), first)
            assert pinned.kv_cache_tokens == first.num_blocks * first.block_size
            assert pinned.max_model_len == 64

    run("asyncio", main)


@on_every_loop
def test_closing_ends_all_waiting_calls(loop: str) -> None:
    async def main() -> None:
        engine = scripted_engine("ok")
        with pytest.raises(EngineClosed):
            await engine.pause()
        await engine.start()
        driver = engine._driver
        await engine.pause()
        stream = engine.generate("x")
        await engine.aclose(drain=0.01)
        with pytest.raises(EngineClosed):
            await stream
        engine._life_cycle.driver = driver
        with pytest.raises(EngineClosed):
            await engine.resume()
        engine._life_cycle.driver = None

    run(loop, main)
