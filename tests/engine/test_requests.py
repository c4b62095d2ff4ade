"""Requests: parameters by keyword, ids, acceptance, token counts, and the ends of generations."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, get_type_hints

import anyio
import pytest
from loops import WAIT_S, on_every_loop, run, until
from msgspec.structs import replace

from drift_sdk import (
    Engine,
    EngineClosed,
    EngineConfig,
    EngineOptions,
    ExecutorError,
    PromptTooLong,
    QueueFull,
    Regex,
    RequestError,
    SamplingOptions,
    SamplingParams,
    TokenLogprobs,
)
from drift_sdk._plain_data import IdArray
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.driver.prompts import ModelText, TextPrompt
from drift_sdk.processors import LogitsProcessor
from drift_sdk.steps import SlotOutput, StepResult
from drift_sdk.testing import EOS_TOKEN_ID, ScriptedExecutor, ScriptedModel, scripted_engine

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look."}}]
ENDLESS = SamplingParams(max_tokens=None)
SMALL = EngineConfig(max_model_len=64, kv_cache_tokens=256)


def endless(prompt_ids, output_ids, seed) -> int:
    return ord("a") + len(output_ids) % 26


def engine_with_defaults(params: SamplingParams) -> Engine:
    model = ScriptedModel("0123456789")

    def open_model(report, limits=None) -> LoadedModel:
        loaded = model(report, limits)
        return replace(loaded, text=replace(loaded.text, default_params=params))

    return Engine("scripted", model.config, open_model=open_model)


class WithTops:
    """A scripted executor that reports three likely tokens at each position: the chosen one, the first byte
    of a euro sign and the end of sequence."""

    is_done = True

    def __init__(self, executor: ScriptedExecutor) -> None:
        self._executor = executor
        self.limits, self.launch, self.close = executor.limits, executor.launch, executor.close

    def collect(self) -> StepResult:
        result = self._executor.collect()
        return replace(
            result,
            prefill=tuple(
                replace(with_tops(output), prompt_logprobs=(entry_of(ord("b")),)) for output in result.prefill
            ),
            decode=tuple(map(with_tops, result.decode)),
        )


def entry_of(token_id: int) -> TokenLogprobs:
    top = ((token_id, -0.5), (0xE2, -1.5), (EOS_TOKEN_ID, -2.5))
    return TokenLogprobs(token_id=token_id, logprob=-0.5, top=top)


def with_tops(output: SlotOutput) -> SlotOutput:
    return replace(output, logprobs=tuple(entry_of(token_id) for token_id in output.token_ids))


async def test_logprobs_have_the_texts_of_their_tokens() -> None:
    model = ScriptedModel("a€")

    def open_model(report, limits=None) -> LoadedModel:
        loaded = model(report, limits)
        return replace(loaded, executor=WithTops(loaded.executor))

    async with Engine("scripted", model.config, open_model=open_model) as engine:
        stream = engine.generate("ab", logprobs=3, prompt_logprobs=3)
        entries = [entry async for chunk in stream for entry in chunk.logprobs]
        completion = await stream
        assert tuple(entries) == completion.logprobs
        texts = ["a", "\ufffd", "\ufffd", "\ufffd", "<eos>"]
        assert [entry.text for entry in entries] == texts
        assert [entry.top_texts for entry in entries] == [(text, "\ufffd", "<eos>") for text in texts]
        assert [entry.logprob for entry in entries] == [-0.5] * 5 and entries[0].top[1] == (0xE2, -1.5)
        first, second = completion.prompt_logprobs
        assert first is None and (second.text, second.top_texts) == ("b", ("b", "\ufffd", "<eos>"))
        assert (await engine.generate("ab")).logprobs is None


def test_options_name_the_fields_of_sampling_params() -> None:
    assert set(SamplingOptions.__annotations__) == set(SamplingParams.__struct_fields__)
    assert not SamplingOptions.__required_keys__
    options, fields = get_type_hints(SamplingOptions), get_type_hints(SamplingParams)
    lists = {
        "stop": list[str],
        "stop_token_ids": list[int] | IdArray,
        "allowed_token_ids": list[int] | IdArray,
        "logprob_token_ids": list[int] | IdArray,
        "logits_processors": list[LogitsProcessor],
    }
    for hints in (options, fields):
        hints["grammar"] = hints["grammar"][Any]  # each has a type variable of its own
    for name, kind in fields.items():
        assert options[name] == (kind | lists[name] if name in lists else kind), name


def test_options_name_the_fields_of_engine_config() -> None:
    assert get_type_hints(EngineOptions) == get_type_hints(EngineConfig)
    assert not EngineOptions.__required_keys__


async def test_keywords_replace_fields_of_params_and_of_the_models_defaults() -> None:
    defaults = SamplingParams(max_tokens=5, temperature=0.5, stop="3")
    async with engine_with_defaults(defaults) as engine:
        for call, prompt in ((engine.generate, "x"), (engine.chat, [USER])):
            assert (await call(prompt)).text == "012"
            assert (await call(prompt, max_tokens=2)).text == "01"
            assert (await call(prompt, stop=(), seed=7)).text == "01234"
            assert (await call(prompt, stop=(), seed=7)).seed == 7
            assert (await call(prompt, SamplingParams())).text == "0123456789"
            assert (await call(prompt, SamplingParams(stop="8"), max_tokens=None)).text == "01234567"
            assert (await call(prompt, SamplingParams(stop="8"), stop=["2", "5"])).text == "01"
        assert engine.default_params == defaults


async def test_wrong_keywords_are_rejected_at_the_call() -> None:
    async with scripted_engine("fine") as engine:
        calls = (
            lambda **options: engine.generate("x", **options),
            lambda **options: engine.chat([USER], **options),
            lambda **options: engine.samples("x", 2, **options),
            lambda **options: engine.map(["x"], **options),
        )
        for call in calls:
            with pytest.raises(RequestError, match="^max_tokens=0: expected an integer"):
                call(max_tokens=0)
            with pytest.raises(
                RequestError, match=r"^max_token=3: unknown argument \(did you mean max_tokens\?\)"
            ):
                call(max_token=3)
            with pytest.raises(RequestError, match="^min_tokens=9: expected an integer from 0 to 4"):
                call(params=SamplingParams(max_tokens=4), min_tokens=9)
        assert engine.stats().num_submitted == 0


@pytest.mark.parametrize(
    "name, said",
    [
        ("reqest_id", r"\(did you mean request_id\?\)"),
        ("max_model_len", r"\(here: EngineConfig\.max_model_len\)"),
        ("chat_template_kwargs", r"\(here: template_args\)"),
        ("sampling_params", r"\(here: params\)"),
    ],
)
async def test_unknown_keyword_of_a_method_is_named_with_its_own(name: str, said: str) -> None:
    async with scripted_engine("fine") as engine:
        for call in (
            partial(engine.generate, "x"),
            partial(engine.chat, [USER]),
            partial(engine.samples, "x", 2),
        ):
            with pytest.raises(RequestError, match=f"^{name}=5: unknown argument {said}") as caught:
                call(**{name: 5})
            assert isinstance(caught.value, TypeError) and caught.value.field == name
        assert engine.stats().num_submitted == 0


async def test_each_method_suggests_its_own_arguments() -> None:
    async with scripted_engine("fine") as engine:
        wrong: dict[str, Any] = {"tool": []}
        for call in (partial(engine.chat, [USER]), partial(engine.samples, [USER], 2)):
            with pytest.raises(RequestError, match=r"\(did you mean tools\?\)"):
                call(**wrong)
        with pytest.raises(RequestError, match=r"\(did you mean tools\?\)"):
            await engine.count_tokens([USER], **wrong)
        wrong = {"max_concurency": 3}
        with pytest.raises(RequestError, match=r"\(did you mean max_concurrent\?\)"):
            engine.map(["x"], **wrong)
        assert inspect.iscoroutinefunction(engine.count_tokens)


async def test_stop_reason_tells_a_full_context_from_max_tokens() -> None:
    async with scripted_engine(endless, config=SMALL) as engine:
        for length, max_tokens, num_tokens, reason in (
            (10, None, 54, "context"),
            (10, 60, 54, "context"),
            (10, 55, 54, "context"),
            (10, 54, 54, None),
            (10, 5, 5, None),
            (63, 1, 1, None),
            (63, None, 1, "context"),
        ):
            found = await engine.generate("x" * length, max_tokens=max_tokens)
            assert (found.finish_reason, found.stop_reason) == ("length", reason), (length, max_tokens)
            assert len(found.token_ids) == num_tokens
        stopped = await engine.generate("x", stop="context")
        assert stopped.finish_reason == "length"
    async with scripted_engine("the context is") as engine:
        stopped = await engine.generate("x", stop="context")
        assert (stopped.finish_reason, stopped.stop_reason, stopped.text) == ("stop", "context", "the ")


async def test_text_that_a_stop_string_could_begin_in_is_kept_when_the_context_is_full() -> None:
    async with scripted_engine("x" * 100, config=SMALL) as engine:
        found = await engine.generate("p" * 60, stop="xxxxxxxx", max_tokens=None)
        assert (found.text, found.stop_reason) == ("xxxx", "context")


async def test_own_id_names_the_request() -> None:
    async with scripted_engine(endless, step_s=0.001) as engine:
        stream = engine.generate("x", ENDLESS, request_id="order 7/ä")
        assert stream.request_id == "order 7/ä"
        chat = engine.chat([USER], request_id="r" * 128, max_tokens=2)
        assert (await chat).request_id == "r" * 128
        for call in (engine.generate, lambda _, **given: engine.samples("y", 2, **given)):
            with pytest.raises(
                RequestError, match="^request_id='order 7/ä': expected an id that no live request"
            ):
                call("y", request_id="order 7/ä")
        assert engine.stats().num_rejected == 0
        assert engine.cancel("order 7/ä") is True
        assert (await stream).finish_reason == "cancelled"
        assert (await stream).request_id == "order 7/ä"
        assert engine.cancel("order 7/ä") is False
        again = await engine.generate("x", request_id="order 7/ä", max_tokens=1)
        assert again.request_id == "order 7/ä"
        unnamed = engine.generate("x", ENDLESS)
        assert engine.cancel(unnamed.request_id)
        assert (await unnamed).finish_reason == "cancelled"


@pytest.mark.parametrize(
    "wrong", ["", "x" * 129, "x" * 133, "a\nb", "a\x1b[0m", "\ud800", 7, b"x", ("x",), "req-3", "req-3-1"]
)
async def test_wrong_ids_are_rejected(wrong: Any) -> None:
    async with scripted_engine("fine") as engine:
        for call in (
            lambda: engine.generate("x", request_id=wrong),
            lambda: engine.chat([USER], request_id=wrong),
            lambda: engine.samples("x", 2, request_id=wrong),
        ):
            with pytest.raises(RequestError) as caught:
                call()
            assert (caught.value.field, caught.value.value) == ("request_id", wrong)
        assert engine.stats().num_submitted == 0
        # Names that the engine makes itself; those of samples are up to 132 characters long.
        if isinstance(wrong, str) and (wrong.startswith("req-") or len(wrong) == 129):
            assert engine.cancel(wrong) is False
        else:
            with pytest.raises(RequestError, match="^request_id="):
                engine.cancel(wrong)
        for other in ("req-", "req-1a", "req-7f3c-0", "req-1-2-3"):
            assert (await engine.generate("x", request_id=other)).request_id == other


class Urgency(IntEnum):
    """Priorities that are compared with each other alone."""

    HIGH, LOW = 0, 1

    def __lt__(self, other: object) -> bool:
        return self.value < other.value  # type: ignore[attr-defined]


class CallersText(str):
    """A text that works in the caller's thread alone, and changes what it is added to."""

    def __hash__(self) -> int:
        assert threading.current_thread() is threading.main_thread()
        return super().__hash__()

    def __radd__(self, other: str) -> str:
        return other.upper() + self

    __eq__ = str.__eq__


@pytest.mark.anyio
async def test_values_of_subclasses_do_not_reach_the_engines_thread() -> None:
    config = replace(SMALL, max_num_seqs=1)
    async with scripted_engine("one two", config=config) as engine:
        plain = [engine.generate("x") for _ in range(2)]
        params = SamplingParams(priority=Urgency.LOW, stop=CallersText("o"), min_tokens=2, include_stop=True)
        own = engine.generate(CallersText("x"), params, request_id=CallersText("mine"))
        with anyio.fail_after(WAIT_S):
            assert [(await stream).text for stream in plain] == ["one two"] * 2
            assert (await own).text == "one two"
        assert engine.is_open


async def test_id_of_a_request_that_failed_is_free_again() -> None:
    config = SMALL.replace(max_num_seqs=1, max_queued_requests=0)
    async with scripted_engine("fine", config=config) as engine:
        for _ in range(2):
            with pytest.raises(PromptTooLong):
                await engine.generate("x" * 64, request_id="a")
        await engine.pause()
        first = engine.generate("x", request_id="b")
        with pytest.raises(QueueFull):
            engine.generate("x", request_id="a")
        await engine.resume()
        assert (await first).text == "fine"
        assert (await engine.generate("x", request_id="a")).text == "fine"


async def test_cancelled_requests_leave_their_places_at_once() -> None:
    """Also while a step runs, which the engine's thread waits for: here until all are cancelled."""
    are_cancelled = threading.Event()

    def held(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        assert not output_ids or are_cancelled.wait(WAIT_S)
        return 65

    config = SMALL.replace(max_num_seqs=1, max_queued_requests=2)
    async with scripted_engine(held, config=config) as engine:
        running = engine.generate("x", max_tokens=None)
        await anext(running)
        streams = [running]
        for number in range(3):
            streams += [engine.generate("x", request_id=f"{name}{number}") for name in "ab"]
            with pytest.raises(QueueFull):
                engine.generate("x")
            streams[-2].cancel()
            assert engine.cancel(f"b{number}")
        streams += [engine.generate("x") for _ in range(2)]
        for stream in streams:
            stream.cancel()
        last = engine.generate("x", max_tokens=1)
        are_cancelled.set()
        assert [(await stream).finish_reason for stream in streams] == ["cancelled"] * len(streams)
        assert (await last).text == "A"

        await engine.pause()
        streams = [engine.generate("x", max_tokens=1) for _ in range(3)]
        with pytest.raises(QueueFull):  # those that have ended count no more, in either way
            engine.generate("x")
        await engine.resume()
        assert [(await stream).text for stream in streams] == ["A"] * 3


async def test_cancel_on_a_closed_engine_finds_nothing() -> None:
    engine = scripted_engine("fine")
    assert engine.cancel("x") is False
    async with engine:
        assert engine.cancel("x") is False
    assert engine.cancel("x") is False


class Stall:
    """Blocks tokenising of prompts that begin with "stall" until `released` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        self.num_begun = 0
        for name in ("prepare", "num_tokens"):
            self._patch(monkeypatch, name)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(TextPrompt, name)

        def stalling(prompt: TextPrompt, model: ModelText) -> Any:
            if prompt.text.startswith("stall"):
                self.num_begun += 1
                self.released.wait(WAIT_S)
            return original(prompt, model)

        monkeypatch.setattr(TextPrompt, name, stalling)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    stall = Stall(monkeypatch)
    yield stall
    stall.released.set()


@on_every_loop
def test_accepted_returns_before_the_first_token(loop: str, stall: Stall) -> None:
    """The engine is paused, so that no step runs."""

    async def main() -> None:
        async with scripted_engine("fine", config=SMALL) as engine:
            await engine.pause()
            stream = engine.generate("stall")
            await until(lambda: stall.num_begun == 1)
            with anyio.move_on_after(0.02) as scope:
                async with stream:
                    await stream.accepted()
            assert scope.cancelled_caught

            stream = engine.generate("stall")
            finished: list[int] = []
            async with anyio.create_task_group() as tasks:

                async def wait(number: int) -> None:
                    await stream.accepted()
                    finished.append(number)

                tasks.start_soon(wait, 1)
                tasks.start_soon(wait, 2)
                await until(lambda: stall.num_begun == 2)
                assert not finished
                stall.released.set()
            assert sorted(finished) == [1, 2]
            assert engine.stats().num_steps == 0 and engine.stats().num_queued == 1
            late = engine.generate("x")
            await until(lambda: engine.stats().num_queued == 2)
            assert await late.accepted() == len("x")
            await engine.resume()
            assert (await stream).text == (await late).text == "fine"
            assert await stream.accepted() == len("stall")

    run(loop, main)


@on_every_loop
def test_accepted_raises_what_preparing_the_prompt_raises(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine("fine", config=SMALL) as engine:
            for stream, error in (
                (engine.generate("x" * 64), PromptTooLong),
                (engine.generate([300]), RequestError),
                (engine.generate("x", grammar=Regex("(")), RequestError),
                (engine.chat([]), RequestError),
            ):
                for _ in range(2):
                    with pytest.raises(error):
                        await stream.accepted()
                with pytest.raises(error):
                    await stream

    run(loop, main)


@on_every_loop
def test_accepted_ends_when_the_request_is_cancelled_or_the_engine_closes(loop: str, stall: Stall) -> None:
    async def main() -> None:
        engine = scripted_engine("fine")
        await engine.start()
        cancelled, closed = engine.generate("stall"), engine.generate("stall")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancelled.accepted)
            await until(lambda: stall.num_begun == 2)
            cancelled.cancel()
        assert (await cancelled).finish_reason == "cancelled"
        assert await cancelled.accepted() is None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.aclose)
            with pytest.raises(EngineClosed):
                await closed.accepted()
            stall.released.set()
        with pytest.raises(EngineClosed):
            await closed.accepted()

    run(loop, main)


@on_every_loop
def test_cancelled_wait_for_acceptance_cancels_a_stream_outside_async_with(loop: str, stall: Stall) -> None:
    async def main() -> None:
        async with scripted_engine("fine") as engine:
            stream = engine.generate("stall")
            with anyio.move_on_after(0.01) as scope:
                await stream.accepted()
            assert scope.cancelled_caught
            assert (await stream).finish_reason == "cancelled"
            stall.released.set()

    run(loop, main)


async def test_accepted_does_not_raise_what_happens_afterwards() -> None:
    def broken(prompt_ids, output_ids, seed) -> int:
        raise ValueError("the device caught fire")

    async with scripted_engine(broken) as engine:
        await engine.pause()
        stream = engine.generate("x")
        await until(lambda: engine.stats().num_queued == 1)
        await engine.resume()
        with pytest.raises(ExecutorError):
            await stream
        await stream.accepted()


PROMPTS = ["x", "Grüße 世界", [1, 2, 3], [USER], [USER, {"role": "assistant", "content": "ho"}]]


@on_every_loop
def test_counted_tokens_are_those_of_the_request(loop: str) -> None:
    template = "{{ messages[0]['content'] }}{{ tools | tojson if tools else '' }}{{ style }}"

    async def main() -> None:
        config = EngineConfig(max_model_len=512, kv_cache_tokens=1024, chat_template=template)
        async with scripted_engine("fine", config=config) as engine:
            for prompt in PROMPTS:
                is_chat = isinstance(prompt[0], dict)
                completion = await (engine.chat(prompt) if is_chat else engine.generate(prompt))
                assert await engine.count_tokens(prompt) == completion.usage.prompt_tokens
            completion = await engine.chat([USER], tools=TOOLS, template_args={"style": "calm"})
            counted = await engine.count_tokens([USER], TOOLS, {"style": "calm"})
            assert counted == completion.usage.prompt_tokens > await engine.count_tokens([USER])
            assert await engine.count_tokens([USER], TOOLS, tool_choice="none") == len("hi")
            assert await engine.count_tokens("x" * 5000) == 5000
            assert await engine.count_tokens([7] * 600) == 600
            assert await engine.count_tokens([{**USER, "content": "x" * 9000}]) == 9000
            assert await engine.count_tokens("") == await engine.count_tokens([]) == 0
            assert engine.stats().num_submitted == len(PROMPTS) + 1

    run(loop, main)


async def test_wrong_prompts_are_not_counted() -> None:
    async with scripted_engine("fine") as engine:
        for arguments, field in (
            ((7,), "prompt"),
            (([300],), "prompt"),
            ((["a"],), "prompt"),
            (("x", TOOLS), "tools"),
            (("x", None, {"a": 1}), "template_args"),
            (([USER], [object()]), "tools"),
            (([{"content": "no role"}],), "messages"),
        ):
            with pytest.raises(RequestError) as caught:
                await engine.count_tokens(*arguments)
            assert caught.value.field.startswith(field), arguments
        for options in ({"tool_choice": "none"}, {"continue_final": True}):
            with pytest.raises(RequestError, match="with a prompt that is no sequence of messages") as caught:
                await engine.count_tokens("x", **options)
            assert caught.value.field in options
        with pytest.raises(RequestError, match="tool_choice='add': expected one of"):
            await engine.count_tokens([USER], tool_choice="add")
        with pytest.raises(RequestError, match=r"^messages\[-1\]"):
            await engine.count_tokens([USER], continue_final=True)
    with pytest.raises(EngineClosed):
        await engine.count_tokens("x")


@on_every_loop
def test_counts_end_when_they_are_cancelled_or_the_engine_closes(loop: str, stall: Stall) -> None:
    async def main() -> None:
        engine = scripted_engine("fine")
        await engine.start()
        for num_begun in (1, 2, 3):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.count_tokens, "stall")
                await until(lambda number=num_begun: stall.num_begun == number)
                tasks.cancel_scope.cancel()
        with anyio.fail_after(WAIT_S):
            assert await engine.count_tokens("hi") == 2
        errors: list[BaseException] = []

        async def count() -> None:
            try:
                await engine.count_tokens("stall")
            except EngineClosed as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(4):  # two in progress, two waiting for a thread
                tasks.start_soon(count)
            await until(lambda: stall.num_begun == 5)
            tasks.start_soon(engine.aclose)
            await until(lambda: len(errors) == 4)
            stall.released.set()
        assert not engine.is_open

    run(loop, main)
