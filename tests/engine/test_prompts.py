"""Prompts of `generate`, `chat` and `map`: wrong ones, and the hints in their errors."""

from __future__ import annotations

import json
import logging
import re
import threading
from array import array
from collections import UserDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from loops import WAIT_S

from drift_sdk import EngineConfig, Job, QueueFull, RequestError, SamplingParams
from drift_sdk.testing import scripted_engine

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            [USER],
            r"a sequence of token ids; chat\(\) and Job\(messages=\.\.\.\) take messages$",
        ),
        (["a", "b"], r"expected a string or a sequence of token ids; map\(\) takes several prompts$"),
        ([[1, 2], [3]], r"expected a string or a sequence of token ids; map\(\) takes several prompts$"),
    ],
)
async def test_generate_names_the_method_that_takes_the_prompt(prompt: Any, message: str) -> None:
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match=message) as caught:
            engine.generate(prompt)
        assert (caught.value.field, caught.value.value) == ("prompt", prompt)


async def test_generate_names_an_empty_prompt_and_a_wrong_token_id() -> None:
    async with scripted_engine("fine") as engine:
        for prompt, value, message in (
            ([], [], "prompt=[]: expected at least one token id from 0 to 256"),
            ("", "", "prompt='': expected a text of at least one token"),
            ([5, 6, 300, -1], 300, "prompt[2]=300: expected a token id from 0 to 256"),
            ([5, "x"], "x", "prompt[1]='x': expected a token id from 0 to 256, an int"),
            ([True], True, "prompt[0]=True: expected a token id from 0 to 256, an int"),
        ):
            with pytest.raises(RequestError) as caught:
                await engine.generate(prompt)
            assert str(caught.value) == message
            assert (caught.value.field, caught.value.value) == ("prompt", value)


class Letter(IntEnum):
    H = ord("h")


async def test_token_ids_may_be_integers_of_other_classes() -> None:
    async with scripted_engine("fine") as engine:
        for ids in ([Letter.H], list(np.array([ord("h")])), [np.int32(ord("h"))]):
            completion = await engine.generate(ids)
            assert completion.text == "fine" and completion.usage.prompt_tokens == 1
        for wrong in (np.bool_(True), np.float32(1.0), Letter):
            with pytest.raises(RequestError, match=r"prompt\[0\]=.*: expected a token id .*, an int"):
                await engine.generate([wrong])


@pytest.mark.parametrize(
    "ids",
    [
        np.array([104, 105]),
        np.array([104, 105], dtype=np.uint8),
        torch.tensor([104, 105]),
        torch.tensor([104, 105], dtype=torch.int32),
        array("q", [104, 105]),
    ],
    ids=lambda ids: str(getattr(ids, "dtype", "array")),
)
async def test_token_ids_may_be_an_array(ids: Any) -> None:
    async with scripted_engine(lambda prompt: prompt) as engine:
        stream = engine.generate(ids, stop_token_ids=np.arange(0), allowed_token_ids=np.arange(257))
        ids[0] = 120  # the array is copied at the call
        assert (await stream).text == "hi"
        assert await engine.count_tokens(ids) == 2
        (sample,) = await engine.samples(ids, np.int64(1))
        assert sample.text == "xi"
        assert [each.text async for each in engine.map([ids])] == ["xi"]


async def test_type_checkers_take_arrays_for_token_ids() -> None:
    of_numpy, of_torch = np.array([104]), torch.tensor([104])
    async with scripted_engine(lambda prompt: prompt) as engine:
        stream = engine.generate(of_numpy, stop_token_ids=of_torch[:0], allowed_token_ids=np.arange(257))
        assert (await stream).text == (await engine.generate(of_torch)).text == "h"
        assert await engine.count_tokens(of_torch) == 1
        assert [sample.text for sample in await engine.samples(of_numpy, 1)] == ["h"]
        jobs = [Job(key="array", prompt=of_torch), of_numpy]
        assert [each.text async for each in engine.map(jobs)] == ["h", "h"]


@pytest.mark.parametrize(
    "ids",
    [
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(["a"]),
        np.array(1),
        torch.tensor([[1]]),
    ],
    ids=lambda ids: f"{ids.dtype} {tuple(ids.shape)}",
)
async def test_arrays_that_are_no_token_ids_are_rejected_at_the_call(ids: Any) -> None:
    said = re.escape(
        f"expected a one-dimensional array of integers, not {ids.dtype} of the shape {tuple(ids.shape)}"
    )
    async with scripted_engine("fine") as engine:
        for field, ask in (
            ("prompt", lambda: engine.generate(ids)),
            ("prompt", lambda: engine.samples(ids, 2)),
            ("stop_token_ids", lambda: engine.generate("a", stop_token_ids=ids)),
            ("allowed_token_ids", lambda: engine.generate("a", allowed_token_ids=ids)),
        ):
            with pytest.raises(RequestError, match=f"^{field}=.*{said}") as caught:
                ask()
            assert caught.value.field == field
        with pytest.raises(RequestError, match=f"^prompt=.*{said}"):
            await engine.count_tokens(ids)


class Endless:
    def __aiter__(self) -> AsyncIterator[str]:
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("abc", r"prompts='abc': expected an iterable of prompts; generate\(\) takes a single one"),
        (b"abc", r"prompts=b'abc': expected an iterable of prompts; generate"),
        (7, "prompts=7: expected an iterable of prompts$"),
        (None, "prompts=None: expected an iterable of prompts$"),
        (Endless(), "prompts=.*: expected an iterable of prompts, not an async iterable$"),
    ],
)
async def test_map_rejects_values_that_are_no_iterable_of_prompts(prompts: Any, message: str) -> None:
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match=message) as caught:
            engine.map(prompts)
        assert caught.value.field == "prompts"


async def test_chat_warns_once_of_a_template_that_ignores_tools(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_engine("fine") as engine:
        await engine.chat([USER], tools=TOOLS)
        assert caplog.records == []  # the template of scripted engines takes tools
    config = EngineConfig(max_model_len=512, chat_template="{{ messages[0].content }}")
    async with scripted_engine("fine", config=config) as engine:
        await engine.chat([USER])
        await engine.chat([USER], tools=[])
        assert caplog.records == []
        for _ in range(2):
            assert (await engine.chat([USER], tools=TOOLS)).text == "fine"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "the chat template of scripted ignores tools: the model does not see them"


@pytest.mark.parametrize(
    "template",
    [
        "{{ tools }}",
        "{% if tools is not none %}{{ tools | tojson }}{% endif %}x",
        "{% if not tools is defined %}{% set tools = none %}{% endif %}x",
        "{% macro show() %}{% for tool in tools %}{{ tool }}{% endfor %}{% endmacro %}{{ show() }}x",
    ],
)
async def test_chat_does_not_warn_where_the_template_reads_tools(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_engine("fine", config=EngineConfig(chat_template=template)) as engine:
        await engine.chat([USER], tools=TOOLS)
    assert caplog.records == []


@pytest.mark.parametrize(
    "shown",
    ["{{ m['content'] + '' }}", "{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% endif %}"],
)
async def test_text_parts_become_text(shown: str) -> None:
    parts = [{"type": "text", "text": "it's"}, {"type": "text", "text": "fine"}]
    config = EngineConfig(chat_template=f"{{% for m in messages %}}{shown}{{% endfor %}}")
    async with scripted_engine(lambda prompt: prompt, config=config) as engine:
        assert (await engine.chat([{"role": "user", "content": parts}])).text == "it's\nfine"
        assert await engine.count_tokens([{"role": "user", "content": parts}]) == len("it's\nfine")


async def test_parts_that_are_no_text_are_rejected() -> None:
    parts = [{"type": "text", "text": "it's"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    shown = "{% for part in m.content if part.text is defined %}{{ part.text }}{% endfor %}"
    config = EngineConfig(chat_template=f"{{% for m in messages %}}{shown}{{% endfor %}}")
    async with scripted_engine("fine", config=config) as engine:
        for ask in (engine.chat, engine.count_tokens):
            with pytest.raises(RequestError, match="images are not supported by this model") as caught:
                await ask([USER, {"role": "user", "content": parts}])
            assert (caught.value.field, caught.value.value) == ("messages[1].content[1]", parts[1])
        with pytest.raises(RequestError, match=r"^messages\[0\]\.content\[0\]='hi': expected"):
            await engine.chat([{"role": "user", "content": ["hi"]}])


async def test_template_decides_about_other_data() -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    async with scripted_engine("fine", config=EngineConfig(chat_template=template)) as engine:
        with pytest.raises(RequestError, match="the chat template rejected them") as caught:
            await engine.chat([{"role": "tool", "content": 7}])
        assert caught.value.field == "messages"


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 7}'}}]}
SHOWN_TOOLS = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}"
SHOWN_CALLS = "{% for call in m.tool_calls %}<|call|>{{ call.function | tojson }}{% endfor %}"
UNKNOWN_CALLS = "{% for call in m.tool_calls %}<|call|>{{ call.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "tools", "warning"),
    [
        (
            SHOWN_TOOLS,
            [USER, CALL],
            None,
            "leaves tool calls out: the model does not see earlier calls",
        ),
        (SHOWN_TOOLS, [USER], TOOLS, None),
        (
            SHOWN_TOOLS + UNKNOWN_CALLS,
            [USER],
            TOOLS,
            "writes tool calls in an unknown format: they stay in the text",
        ),
        (SHOWN_TOOLS + UNKNOWN_CALLS, [USER, CALL], None, None),
        (SHOWN_TOOLS + "<tool_call>" + SHOWN_CALLS, [USER, CALL], None, None),
    ],
)
async def test_chat_warns_once_of_what_the_template_leaves_out(
    template: str,
    messages: list[dict[str, object]],
    tools: list[dict[str, object]] | None,
    warning: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = EngineConfig(chat_template=template + "{% endfor %}")
    async with scripted_engine("fine", config=config) as engine:
        for _ in range(2):
            assert (await engine.chat(messages, tools=tools)).text == "fine"
    found = [record.getMessage() for record in caplog.records]
    assert found == ([f"the chat template of scripted {warning}"] if warning else [])


@pytest.mark.parametrize(
    ("role", "content"),
    [
        ("user", None),
        ("user", 7),
        ("system", {"text": "hi"}),
        ("assistant", 7),
        ("user", b"hi"),
        ("tool", b"hi"),
    ],
)
async def test_content_that_no_template_takes_is_rejected_at_the_call(role: str, content: object) -> None:
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match=r"^messages\[1\]\.content=.*: expected a string or") as caught:
            engine.chat([USER, {"role": role, "content": content}])
        assert (caught.value.field, caught.value.value) == ("messages[1].content", content)


async def test_content_of_tools_and_of_an_empty_answer_is_served() -> None:
    messages = [USER, {"role": "assistant", "content": None}, {"role": "tool", "content": {"sky": "clear"}}]
    async with scripted_engine(lambda prompt: prompt) as engine:
        assert (await engine.chat(messages)).text == (
            "user: hi\nassistant: \ntool: {'sky': 'clear'}\nassistant: "
        )


@pytest.mark.parametrize("content", [[21, 22], [], ["a"]])
async def test_content_of_tools_may_be_a_list(content: list[object]) -> None:
    shown = "{{ m.content if m.content is string else m.content | tojson }}"
    template = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    async with scripted_engine(lambda prompt: prompt, config=EngineConfig(chat_template=template)) as engine:
        completion = await engine.chat([USER, {"role": "tool", "content": content}])
        assert completion.text == "hi" + json.dumps(content)


async def test_message_may_contain_what_an_empty_list_is_printed_as() -> None:
    template = (
        "{% for m in messages %}"
        "{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    async with scripted_engine(lambda prompt: prompt, config=EngineConfig(chat_template=template)) as engine:
        messages = [{"role": "user", "content": []}, {"role": "user", "content": "what is [] in Python?"}]
        assert (await engine.chat(messages)).text == "what is [] in Python?"


async def test_content_of_parts_is_served_where_the_template_takes_it() -> None:
    template = "{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}"
    async with scripted_engine("fine", config=EngineConfig(chat_template=template)) as engine:
        content = [{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}]
        completion = await engine.chat([{"role": "user", "content": content}])
        assert completion.usage.prompt_tokens == len("hi there")


async def test_queue_full_says_how_many_requests_wait() -> None:
    for limit, waiting in ((0, "0 requests are"), (1, "1 request is"), (2, "2 requests are")):
        config = EngineConfig(max_num_seqs=1, max_queued_requests=limit, max_model_len=64, kv_cache_tokens=64)
        is_rejected = threading.Event()

        def held(
            prompt_ids: Sequence[int],
            output_ids: Sequence[int],
            seed: int,
            is_rejected: threading.Event = is_rejected,
        ) -> int:
            assert not output_ids or is_rejected.wait(WAIT_S)
            return 65

        async with scripted_engine(held, config=config) as engine:
            endless = SamplingParams(max_tokens=None)
            streams = [engine.generate("x", endless)]
            await anext(streams[0])
            streams += [engine.generate("x", endless) for _ in range(limit)]
            with pytest.raises(QueueFull) as caught:
                engine.generate("x")
            assert str(caught.value) == (
                f"max_queued_requests={limit}: no slot is free and {waiting} waiting for one already; "
                "try again later"
            )
            for stream in streams:
                stream.cancel()
            is_rejected.set()


async def test_too_many_token_ids_are_rejected_before_they_are_copied() -> None:
    async with scripted_engine("fine") as engine:
        with pytest.raises(
            RequestError, match="prompt: expected at most 4194304 token ids, not 100000000000"
        ):
            engine.generate(range(100_000_000_000))
        for ask in (engine.generate, engine.count_tokens, partial(engine.samples, n=2)):
            with pytest.raises(RequestError, match="prompt: expected at most 4194304 token ids"):
                await ask(range(10**20))  # of which len() has no number


async def test_options_of_messages_with_a_text_are_named_whatever_they_are() -> None:
    async with scripted_engine("fine") as engine:
        for name, value in (("tools", np.array([1, 2])), ("template_args", {}), ("tool_choice", "none")):
            with pytest.raises(
                RequestError, match=f"^{name}=.* with a prompt that is no sequence of messages"
            ):
                await engine.count_tokens("a", **{name: value})
        assert await engine.count_tokens("a", tool_choice="auto"[:2] + "to") == 1


class Unending(Sequence[Any]):
    """A sequence that says it has three items and has no end."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return self.item


class Iterated(list[Any]):
    """A list that is read in its order alone."""

    def __getitem__(self, index: Any) -> Any:
        raise ValueError("no item has an index")


async def test_sequences_are_read_in_their_order_alone() -> None:
    async with scripted_engine("fine") as engine:
        assert (await engine.generate(Iterated([5, 6]))).usage.prompt_tokens == 2
        assert await engine.count_tokens(Iterated([5, 6])) == 2
        (sample,) = await engine.samples(Iterated([5, 6]), 1)
        assert sample.usage.prompt_tokens == 2
        (sample,) = await engine.samples(Iterated([USER]), 1)
        assert sample.usage.prompt_tokens == await engine.count_tokens([USER])


async def test_sequences_without_an_end_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drift_sdk.driver.prompts.MAX_PROMPT_TOKENS", 1000)
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match="prompt: expected at most 1000 token ids"):
            engine.generate(Unending(5))
        with pytest.raises(RequestError, match="^messages=.*: expected plain data.*more than 100000 items"):
            engine.chat(Unending({"role": "user", "content": "x"}))
        with pytest.raises(
            RequestError,
            match=r"^messages=range\(0, 1000000000000\): expected plain data.*more than 100000 items",
        ):
            engine.chat(range(10**12))  # type: ignore[arg-type]


async def test_texts_that_take_much_memory_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drift_sdk.driver.prompts.MAX_COUNTED_CHARS", 100)
    async with scripted_engine("fine") as engine:
        assert await engine.count_tokens("x" * 100) == 100
        with pytest.raises(RequestError, match="prompt: expected a text of at most 100 characters, not 101"):
            await engine.count_tokens("x" * 101)
        with pytest.raises(RequestError, match="messages: expected a text of at most 100 characters"):
            await engine.count_tokens([{"role": "user", "content": "x" * 101}])


async def test_integers_that_cannot_be_written_as_json_are_rejected_at_the_call() -> None:
    parameters = {"type": "object", "properties": {"a": {"minimum": 10**5000}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match="^tools=.*an integer of 16610 bits: expected at most 14000"):
            engine.chat([{"role": "user", "content": "x"}], tools=tools, tool_choice="required")


async def test_queue_full_of_the_prompts_themselves_ends_a_map() -> None:
    def prompts() -> Iterator[str]:
        yield "a"
        raise QueueFull("of another engine")

    async with scripted_engine("fine") as engine:
        found = engine.map(prompts())
        assert (await anext(found)).text == "fine"
        with pytest.raises(QueueFull, match="of another engine"):
            await anext(found)


class Failing(Sequence[Any]):
    """A sequence that cannot be read, and no array."""

    def __len__(self) -> int:
        raise OSError("no length")

    def __getitem__(self, index: Any) -> Any:
        raise OSError("no item")


class FailingArray:
    """An array that has no data, like a tensor of torch on the device "meta"."""

    dtype = "int64"
    shape = (2,)

    def tolist(self) -> list[int]:
        raise NotImplementedError("no data")


class FailingText(str):
    def __eq__(self, other: object) -> bool:
        raise OSError("not comparable")

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("prompt", lambda engine: engine.generate(Failing())),
        ("prompt", lambda engine: engine.generate(FailingArray())),
        ("prompt", lambda engine: engine.samples(Failing(), 2)),
        ("messages", lambda engine: engine.chat(Failing())),
        ("messages", lambda engine: engine.chat([{"role": FailingText("user"), "content": "x"}])),
        ("template_args", lambda engine: engine.chat([USER], template_args=UserDict(Failing=Failing()))),
        ("stop_token_ids", lambda engine: engine.generate("x", stop_token_ids=FailingArray())),
        ("allowed_token_ids", lambda engine: engine.generate("x", allowed_token_ids=FailingArray())),
    ],
)
async def test_values_that_cannot_be_read_are_rejected(field: str, ask: Callable[[Any], Any]) -> None:
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match=f"^{field}=.*: expected .*no") as caught:
            await ask(engine)
        assert caught.value.field == field
        with pytest.raises(RequestError, match="^prompt="):
            await engine.count_tokens(Failing())


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("tools", {"tools": "a" * 100}),
        ("tools", {"tools": {"type": "function"}}),
        ("tool_choice", {"tools": [{"name": "f"}], "tool_choice": np.array([1, 2])}),
    ],
)
async def test_tools_of_other_kinds_are_rejected_at_the_call(field: str, options: dict[str, Any]) -> None:
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match=f"^{field}=.*: expected ") as caught:
            engine.chat([USER], **options)
        assert caught.value.field == field
