"""The command `chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from typing import Any

from drift_sdk.cli.engine_start import hide_progress, print_error, show_progress
from drift_sdk.config import EngineConfig
from drift_sdk.engine import Engine
from drift_sdk.errors import PromptTooLong, RequestError
from drift_sdk.results import Completion
from drift_sdk.sampling_params import SamplingOptions
from drift_sdk.stream import TokenStream

PROMPT = "> "


async def chat(model: str, config: EngineConfig, options: SamplingOptions, system: str | None) -> int:
    """Answer each line of stdin until its end; the exit status, always 0.

    options: replace fields of the model's own parameters. system: the system message; None = none.

    Ctrl-C stops an answer (not on Windows). Raises what starting the engine raises, RequestError if the model
    has no chat template, and OSError if stdout cannot be written.
    """
    async with Engine(model, config, on_progress=show_progress) as engine:
        hide_progress()
        conversation = Conversation(engine, options, system)
        await conversation.check()
        # Ctrl-C ends the program while the model is loaded, and stops an answer from here on.
        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, conversation.stop)
        while (question := await read_question()) is not None:
            if question.strip():
                await conversation.ask(question)
    return 0


class Conversation:
    """Questions and answers so far, sent again with each question after the system message."""

    def __init__(self, engine: Engine, options: SamplingOptions, system: str | None) -> None:
        self._engine = engine
        self._options = options
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self._history: list[dict[str, Any]] = []
        self._stream: TokenStream | None = None

    async def check(self) -> None:
        """Raise RequestError for a model that no messages can be sent to."""
        await self._engine.count_tokens([*self._system, {"role": "user", "content": "Hello"}])

    def stop(self) -> None:
        """End the answer in progress; without one, say how to leave and ask again."""
        if self._stream is not None:
            self._stream.cancel()
        else:
            print(f"\n[Ctrl-D leaves]\n{PROMPT}", end="", file=sys.stderr, flush=True)

    async def ask(self, question: str) -> None:
        """Print the answer and why it ended, unless that is its own end. A prompt that is too long is sent
        again without the older half of the history; any other RequestError is printed."""
        asked = {"role": "user", "content": question}
        completion: Completion | None = None
        while completion is None:
            try:
                completion = await self._print_answer(asked)
            except RequestError as error:
                self._stream = None
                if not (isinstance(error, PromptTooLong) and self._history):
                    print_error(error)
                    return

                num_dropped = drop_older_half(self._history)
                print(f"[{num_dropped} earlier messages no longer fit]", file=sys.stderr)

        self._history += [asked, completion.message()]
        print("" if completion.finish_reason == "stop" else f" [{completion.finish_reason}]")

    async def _print_answer(self, asked: dict[str, str]) -> Completion:
        self._stream = self._engine.chat([*self._system, *self._history, asked], **self._options)
        is_thinking = False
        async for chunk in self._stream:
            print(chunk.reasoning, end="", flush=True)
            is_thinking |= bool(chunk.reasoning)
            if chunk.text and is_thinking:
                print("\n\n", end="")  # between reasoning and answer
                is_thinking = False
            print(chunk.text, end="", flush=True)
        completion, self._stream = await self._stream, None
        return completion


async def read_question() -> str | None:
    """The next line of stdin, read on a thread; None at its end.

    In a terminal the line can be edited, and the arrow keys recall earlier ones.
    """
    with suppress(ImportError):  # Windows has no readline
        import readline  # noqa: F401  # makes input() edit lines

    try:
        return await asyncio.to_thread(input, PROMPT)
    except EOFError:
        print()
        return None


def drop_older_half(history: list[dict[str, Any]]) -> int:
    """Remove the older half of the exchanges, rounded up, each a question and its answer; returns the number
    of messages removed."""
    num_exchanges = len(history) // 2
    num_messages = 2 * ((num_exchanges + 1) // 2)
    del history[:num_messages]
    return num_messages
