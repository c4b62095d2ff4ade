"""Pausing, sleeping, and mapping over many prompts."""

from __future__ import annotations

import itertools

import anyio
import pytest
from loops import on_every_loop, run, until

from drift_sdk import EngineClosed, EngineConfig, ModelLoadError, RequestError, SamplingParams
from drift_sdk.testing import scripted_engine

ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


def counting(prompt_ids, output_ids, seed) -> int:
    """Depends on every token before: what is lost or doubled shows."""
    return (sum(prompt_ids) + sum(output_ids) * 31 + len(output_ids)) % 250


@on_every_loop
def test_pause_stops_steps_and_resume_goes_on(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(counting, step_s=0.001) as engine:
            expected = await engine.generate("x", SamplingParams(max_tokens=200))
            stream = engine.generate("x", SamplingParams(max_tokens=200))
            await anext(stream)
            await engine.pause()
            await engine.pause()
            num_steps = engine.stats().num_steps
            late = engine.generate("y", SamplingParams(max_tokens=3))
            await anyio.sleep(0.03)
            assert engine.stats().num_steps == num_steps
            doomed = engine.generate("z", ENDLESS)
            doomed.cancel()
            assert (await doomed).finish_reason == "cancelled"
            await engine.resume()
            assert (await stream).token_ids == expected.token_ids
            assert len((await late).token_ids) == 3

    run(loop, main)


@on_every_loop
def test_sleep_frees_the_executor_and_wake_loses_nothing(loop: str) -> None:
    async def main() -> None:
        config = EngineConfig(max_model_len=512, kv_cache_tokens=2048)
        async with scripted_engine(counting, config=config, step_s=0.001) as engine:
            params = SamplingParams(max_tokens=150)
            expected = [await engine.generate(f"prompt {i}", params) for i in range(4)]
            streams = [engine.generate(f"prompt {i}", params) for i in range(4)]
            await until(lambda: engine.stats().num_running == 4)
            await anext(streams[0])
            await engine.sleep()
            assert engine.executors[0].is_closed
            assert engine.stats().num_running == engine.stats().num_cached_blocks == 0
            assert engine.stats().num_free_blocks == engine.executors[0].limits.num_blocks
            await anyio.sleep(0.02)
            await engine.sleep()
            await engine.wake()
            await engine.wake()
            assert len(engine.executors) == 2
            for stream, completion in zip(streams, expected, strict=True):
                assert (await stream).token_ids == completion.token_ids

    run(loop, main)


@on_every_loop
def test_a_failed_wake_stays_asleep(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine("ok") as engine:
            opens = engine._driver._open_model
            await engine.sleep()

            def failing():
                raise ModelLoadError("gone")

            engine._driver._open_model = failing
            with pytest.raises(ModelLoadError, match="gone"):
                await engine.wake()
            stream = engine.generate("x")
            engine._driver._open_model = opens
            await engine.wake()
            assert (await stream).text == "ok"

    run(loop, main)


@on_every_loop
def test_closing_answers_whoever_waits(loop: str) -> None:
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
        engine._driver = driver
        with pytest.raises(EngineClosed):
            await engine.resume()
        engine._driver = None

    run(loop, main)


@on_every_loop
def test_map_keeps_order_and_bounds(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(counting, step_s=0.0005) as engine:
            taken = []

            def prompts():
                for index in itertools.count():
                    taken.append(index)
                    yield f"prompt {index}"

            params = SamplingParams(max_tokens=4)
            found = []
            completions = engine.map(prompts(), params, max_concurrent=3)
            async for completion in completions:
                assert len(taken) - len(found) <= 4
                found.append(completion.token_ids)
                if len(found) == 20:
                    break
            await completions.aclose()
            await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
            alone = [(await engine.generate(f"prompt {i}", params)).token_ids for i in range(20)]
            assert found == alone
            assert [c async for c in engine.map([], params)] == []
            with pytest.raises(RequestError, match="prompt"):
                async for _ in engine.map(["x", 7], params):
                    pass
            with pytest.raises(RequestError, match="max_concurrent"):
                engine.map([], max_concurrent=0)

    run(loop, main)


@on_every_loop
def test_cancelling_a_map_frees_its_requests(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(counting, step_s=0.001) as engine:
            with anyio.move_on_after(0.05) as scope:
                completions = engine.map(["a", "b", "c"], ENDLESS)
                async for _ in completions:
                    pass
            assert scope.cancelled_caught
            await completions.aclose()
            await until(lambda: engine.stats().num_running == 0)

    run(loop, main)
