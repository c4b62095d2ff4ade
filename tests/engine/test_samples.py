"""Several samples of one prompt: seeds, the shared prefix, reading, cancelling, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from loops import WAIT_S, on_every_loop, run, until

from drift_sdk import EngineConfig, ExecutorError, PromptTooLong, QueueFull, RequestError, SamplingParams
from drift_sdk.driver.prompts import ModelText, PreparedPrompt, TextPrompt
from drift_sdk.sampling_params import MAX_SEED
from drift_sdk.stream import updates_of
from drift_sdk.testing import EOS_TOKEN_ID, ScriptedEngine, scripted_engine

USER = {"role": "user", "content": "hi"}
SAMPLED = SamplingParams(temperature=1.0, max_tokens=20)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
BLOCKS = EngineConfig(max_model_len=512, kv_cache_tokens=4096, block_size=16)
PROMPT = "p" * 100


def by_seed(prompt_ids, output_ids, seed) -> int:
    return (sum(output_ids) * 7 + len(output_ids) + seed * 31) % 250


def is_idle(engine: ScriptedEngine) -> bool:
    stats, limits = engine.stats(), engine.executors[-1].limits
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == limits.num_blocks


@on_every_loop
def test_samples_can_be_replayed_alone(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(by_seed, config=BLOCKS) as engine:
            for prompt in (PROMPT, "x", [1, 2, 3]):
                for seed in (7, MAX_SEED, None):
                    samples = await engine.samples(prompt, 3, SAMPLED, seed=seed)
                    first = samples[0].seed
                    assert seed in (None, first)
                    assert [each.seed for each in samples] == [(first + i) % 2**63 for i in range(3)]
                    for sample in samples:
                        alone = await engine.generate(prompt, SAMPLED, seed=sample.seed)
                        assert alone.token_ids == sample.token_ids
                    assert len({sample.token_ids for sample in samples}) == 3
            chats = await engine.samples([USER], 2, SAMPLED, seed=3)
            assert [each.token_ids for each in chats] == [
                (await engine.chat([USER], SAMPLED, seed=seed)).token_ids for seed in (3, 4)
            ]

    run(loop, main)


async def test_prompt_is_tokenised_and_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenised: list[str] = []
    prepare = TextPrompt.prepare

    def noting(prompt: TextPrompt, model: ModelText) -> PreparedPrompt:
        tokenised.append(prompt.text)
        return prepare(prompt, model)

    monkeypatch.setattr(TextPrompt, "prepare", noting)
    async with scripted_engine(by_seed, config=BLOCKS) as engine:
        samples = await engine.samples(PROMPT, 5, SAMPLED)
        assert [sample.usage.cached_tokens for sample in samples] == [0, 96, 96, 96, 96]
        assert tokenised == [PROMPT]
        blocked = await engine.samples("q" * 16, 2, SAMPLED)  # one block: nothing to share
        assert [sample.usage.cached_tokens for sample in blocked] == [0, 0]


@on_every_loop
def test_chunks_of_all_samples_are_read_together(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(by_seed, config=BLOCKS, step_s=0.0005) as engine:
            texts, reasons = ["", "", ""], {}
            async with engine.samples(PROMPT, n=3, params=SAMPLED) as samples:
                async for index, chunk in samples:
                    texts[index] += chunk.text
                    if chunk.finish_reason is not None:
                        reasons[index] = chunk.finish_reason
                completions = await samples
            assert [completion.text for completion in completions] == texts
            assert reasons == {0: "length", 1: "length", 2: "length"}
            assert [completion.request_id for completion in completions] == ["req-0-0", "req-0-1", "req-0-2"]
            with pytest.raises(StopAsyncIteration):
                await anext(samples)
            assert len(samples) == 3 and [stream.request_id for stream in samples[1:]] == [
                "req-0-1",
                "req-0-2",
            ]

            alone = engine.samples(PROMPT, 2, SAMPLED)
            chunks = [chunk async for chunk in alone[1]]
            assert "".join(chunk.text for chunk in chunks) == (await alone[1]).text
            assert [index async for index, _ in alone] == [0]

    run(loop, main)


async def test_no_sample_is_starved_by_the_others() -> None:
    async with (
        scripted_engine(lambda *_: 65, step_s=0.001) as engine,
        engine.samples("x", 3, ENDLESS) as samples,
    ):
        found: set[int] = set()
        with anyio.fail_after(WAIT_S):
            while len(found) < 3:
                index, _ = await anext(samples)
                found.add(index)
                await until(lambda: all(stream._updates.has_chunk for stream in samples))


@on_every_loop
def test_two_iterations_over_samples_at_once_are_rejected(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(lambda *_: 65) as engine:
            await engine.pause()
            async with engine.samples("x", 2, ENDLESS) as samples, anyio.create_task_group() as tasks:
                tasks.start_soon(samples.__anext__)
                await anyio.sleep(0.005)
                with pytest.raises(RuntimeError, match="iterated already"):
                    await anext(samples)
                tasks.cancel_scope.cancel()

    run(loop, main)


def leave_the_block(engine: ScriptedEngine) -> Callable[[], Any]:
    async def use() -> None:
        async with engine.samples(PROMPT, 3, ENDLESS) as samples:
            await anext(samples)

    return use


def be_cancelled(engine: ScriptedEngine, how: str) -> Callable[[], Any]:
    async def use() -> None:
        samples = engine.samples(PROMPT, 3, ENDLESS)
        await samples[0].accepted()
        await engine.pause()
        with anyio.move_on_after(0.02) as scope:
            if how == "anext":
                async for _ in samples:
                    pass
            else:
                await (samples.completions() if how == "completions" else samples)
        assert scope.cancelled_caught
        await engine.resume()
        assert [completion.finish_reason for completion in await samples] == ["cancelled"] * 3

    return use


@on_every_loop
@pytest.mark.parametrize("how", ["block", "anext", "completions", "await"])
def test_leaving_and_cancelling_end_all_samples(loop: str, how: str) -> None:
    async def main() -> None:
        async with scripted_engine(by_seed, config=BLOCKS, step_s=0.001) as engine:
            await (leave_the_block(engine) if how == "block" else be_cancelled(engine, how))()
            await until(lambda: is_idle(engine))
            assert engine.stats().num_cancelled == 3

    run(loop, main)


@on_every_loop
def test_wait_that_is_cancelled_in_the_block_loses_nothing(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(by_seed, config=BLOCKS, step_s=0.002) as engine:
            texts, num_timeouts = ["", ""], 0
            await engine.pause()  # until a wait has been cancelled
            async with engine.samples(PROMPT, 2, SAMPLED) as samples:
                while True:
                    try:
                        with anyio.fail_after(0.0005):
                            index, chunk = await anext(samples)
                        texts[index] += chunk.text
                    except TimeoutError:
                        num_timeouts += 1
                        await engine.resume()
                    except StopAsyncIteration:
                        break
                assert [completion.text for completion in await samples] == texts
            assert num_timeouts

            await engine.pause()
            async with engine.samples(PROMPT, 2, SAMPLED) as samples:
                with anyio.move_on_after(0.0005) as scope:
                    await samples[0]
                assert scope.cancelled_caught
                await engine.resume()
                assert [completion.finish_reason for completion in await samples] == ["length"] * 2

    run(loop, main)


async def test_next_sample_computes_the_prompt_if_the_first_is_cancelled_before() -> None:
    """Cancelled while they wait, being held or in the queue, samples leave their places in the queue."""
    config = BLOCKS.replace(max_num_seqs=2, max_queued_requests=2)
    async with scripted_engine(by_seed, config=config) as engine:
        await engine.pause()
        samples = engine.samples(PROMPT, 4, SAMPLED)
        assert await samples.accepted() == await engine.count_tokens(PROMPT)
        samples[0].cancel()
        samples[2].cancel()
        await samples[0]
        await samples[2]
        await until(lambda: engine.stats().num_queued == 1)
        others = [engine.generate("other", SAMPLED) for _ in range(2)]
        with pytest.raises(QueueFull):
            engine.generate("other")
        await engine.resume()
        ended = await samples
        assert [sample.finish_reason for sample in ended] == ["cancelled", "length", "cancelled", "length"]
        assert [sample.usage.cached_tokens for sample in ended] == [0, 0, 0, 96]
        for other in others:
            await other
        await until(lambda: is_idle(engine))
        assert len(await engine.samples(PROMPT, 4, SAMPLED)) == 4


async def test_samples_are_accepted_together_before_the_first_token() -> None:
    async with scripted_engine(by_seed, config=BLOCKS) as engine:
        await engine.pause()
        samples = engine.samples(PROMPT, 3, SAMPLED)
        await samples.accepted()
        assert engine.stats().num_steps == 0
        await engine.resume()
        await samples


async def test_samples_that_share_no_block_are_queued_together() -> None:
    """The last token of a prompt is always computed, so a prompt of one block has no block to share."""
    async with scripted_engine(by_seed, config=BLOCKS) as engine:
        await engine.pause()
        for num_tokens, num_queued in ((16, 3), (17, 1)):
            samples = engine.samples([1] * num_tokens, 3, SAMPLED)
            await samples.accepted()
            await until(lambda expected=num_queued: engine.stats().num_queued == expected)
            samples.cancel()
            await samples
        await engine.resume()


async def test_error_of_the_prompt_is_raised_by_every_sample() -> None:
    async with scripted_engine("fine", config=BLOCKS) as engine:
        samples = engine.samples("x" * 600, 3)
        errors: list[BaseException] = []
        for stream in samples:
            with pytest.raises(PromptTooLong, match="prompt of 600 tokens") as caught:
                await stream
            assert (caught.value.field, caught.value.value) == ("prompt", 600)
            errors.append(caught.value)
        assert len({id(error) for error in errors}) == 3
        for wait in (samples.accepted, samples.completions, samples.__anext__):
            with pytest.raises(PromptTooLong):
                await wait()
        assert engine.stats().num_failed == 3
        assert len(await engine.samples("x", 3)) == 3


async def test_error_of_one_sample_cancels_the_others() -> None:
    """Outside of a block."""

    async with scripted_engine(lambda *_: 65, config=BLOCKS, step_s=0.001) as engine:
        samples = engine.samples("x", 3, ENDLESS)
        await anext(samples)
        updates_of(samples[1]).error = ExecutorError("of this one")
        with pytest.raises(ExecutorError, match="of this one"):
            async for _ in samples:
                pass
        await until(lambda: is_idle(engine))


async def test_failed_step_ends_samples_that_are_held() -> None:
    reached = threading.Event()

    def broken(prompt_ids, output_ids, seed) -> int:
        reached.set()
        raise ValueError("the device caught fire")

    async with scripted_engine(broken, config=BLOCKS) as engine:
        samples = engine.samples(PROMPT, 3)
        for stream in samples:
            with pytest.raises(ExecutorError, match="caught fire"):
                await stream
    assert reached.is_set()


async def test_samples_are_admitted_all_or_none() -> None:
    config = BLOCKS.replace(max_num_seqs=2, max_queued_requests=1)
    async with scripted_engine(by_seed, config=config) as engine:
        # More than an idle engine takes: trying again would be in vain.
        with pytest.raises(RequestError, match="^n=4: expected 1 to 3, all that may run and wait"):
            engine.samples("x", 4)
        running = engine.generate("x", ENDLESS)
        with pytest.raises(QueueFull, match="max_queued_requests=1: there is room for 2 of 3 requests"):
            engine.samples("x", 3)
        running.cancel()
        await running
        assert len(await engine.samples("x", 3, SAMPLED)) == 3
        assert (engine.stats().num_submitted, engine.stats().num_rejected) == (4, 3)


async def test_samples_are_cancelled_by_their_common_id_or_their_own() -> None:
    async with scripted_engine(by_seed, config=BLOCKS, step_s=0.001) as engine:
        samples = engine.samples(PROMPT, 3, ENDLESS, request_id="best")
        assert [stream.request_id for stream in samples] == ["best-0", "best-1", "best-2"]
        for name in ("best", "best-1"):
            with pytest.raises(RequestError, match="expected an id that no live request has"):
                engine.generate("x", request_id=name)
        assert engine.cancel("best-1")
        assert (await samples[1]).finish_reason == "cancelled"
        assert not engine.cancel("best-1")
        assert engine.cancel("best")
        assert [sample.finish_reason for sample in await samples] == ["cancelled"] * 3
        assert not engine.cancel("best")
        assert len(await engine.samples(PROMPT, 2, SAMPLED, request_id="best")) == 2
        longest = engine.samples(PROMPT, 128, ENDLESS, request_id="x" * 128)
        assert engine.cancel(longest[127].request_id)
        assert (await longest[127]).finish_reason == "cancelled"
        longest.cancel()


@pytest.mark.parametrize("n", [0, -1, 129, True, 2.0, "2", None])
async def test_wrong_number_of_samples_is_rejected(n: Any) -> None:
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match="^n=.*: expected an integer from 1 to 128"):
            engine.samples("x", n)


async def test_wrong_arguments_of_samples_are_rejected() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    async with scripted_engine("fine") as engine:
        for arguments, field in (
            ({"prompt": 7}, "prompt"),
            ({"prompt": "x", "tools": tools}, "tools"),
            ({"prompt": [1], "template_args": {}}, "template_args"),
            ({"prompt": "x", "params": {}}, "params"),
        ):
            with pytest.raises(RequestError) as caught:
                engine.samples(n=2, **arguments)
            assert caught.value.field == field
        assert [c.text for c in await engine.samples([USER], 2, tools=tools)] == ["fine", "fine"]
        assert len(await engine.samples("x", 128)) == 128


async def test_speculating_and_short_samples_end_as_alone() -> None:
    """The first sample ends with the token that releases the others."""

    def one_token(prompt_ids, output_ids, seed) -> int:
        return seed % 200 if not output_ids else EOS_TOKEN_ID

    async with scripted_engine(one_token, config=BLOCKS, tokens_per_step=3) as engine:
        ended = await engine.samples(PROMPT, 3, seed=5, max_tokens=1)
        assert [sample.token_ids for sample in ended] == [(5,), (6,), (7,)]
        ended = await engine.samples(PROMPT, 3, seed=5)
        assert [sample.token_ids for sample in ended] == [(5, 256), (6, 256), (7, 256)]
