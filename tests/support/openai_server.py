"""drift_sdk.openai, served from a thread, and a scripted engine that answers clients' requests."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

import drift_sdk.openai
from drift_sdk import Engine, EngineConfig
from drift_sdk.openai.server import LimitedHeads
from drift_sdk.testing import EOS_TOKEN_ID, scripted_engine

MODEL = "small"
Wrap = Callable[[Any], Any]

CLIENT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
)
PARIS, CITY, WEATHER = "Paris, of course.", {"name": "Rome", "population": 3}, {"city": "Rome"}
STORY = "la " * 20_000


@contextmanager
def serving(engine: Engine, wrap: Wrap = lambda app: app, **options: Any) -> Iterator[str]:
    """Serve an engine from another thread with its own event loop; yields the base URL."""
    config = uvicorn.Config(
        wrap(drift_sdk.openai.app({MODEL: engine}, **options)),
        log_level="error",
        ws="none",
        http=LimitedHeads,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        httpx.get(f"{url}/health", timeout=300, verify=False).raise_for_status()
        yield url
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def replying(reply: Callable[[str], str], *, template: str, step_s: float = 0.0, **settings: int) -> Engine:
    """An engine whose reply is a function of the prompt's text."""
    replies: dict[bytes, bytes] = {}

    def next_token(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        prompt = bytes(prompt_ids)
        data = replies.get(prompt)
        if data is None:
            data = replies[prompt] = reply(prompt.decode()).encode()
        return data[len(output_ids)] if len(output_ids) < len(data) else EOS_TOKEN_ID

    limits = {"max_model_len": 4096, "kv_cache_tokens": 16_384, **settings}
    config = EngineConfig(chat_template=template, **limits)
    return scripted_engine(next_token, config=config, step_s=step_s)


def client_engine(**settings: int) -> Engine:
    """An engine that answers each request of the clients' tests: with a call if there are tools and none has
    answered, with a city as JSON (also after a tool) or a long story if that is asked for, else with a
    sentence."""
    return replying(client_reply, template=CLIENT_TEMPLATE, **settings)


def client_reply(prompt: str) -> str:
    tools, *messages = prompt.split("<|")
    role, _, content = messages[-1].partition("|>")
    if role == "tool":
        is_typed = any("a city" in message for message in messages)
        return json.dumps(CITY) if is_typed else f"It is {content} in Rome."

    if tools:
        function = json.loads(tools)[0]["function"]
        is_city = "population" in function["parameters"]["properties"]
        city = CITY | {"name": STORY} if "story" in content else CITY
        call = {"name": function["name"], "arguments": city if is_city else WEATHER}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    if "story" in content:
        return STORY

    return json.dumps(CITY) if "city" in content else PARIS
