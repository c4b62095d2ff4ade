"""Chat with a model in the terminal. Ctrl-C stops an answer, Ctrl-D ends the program.

python examples/chat.py [MODEL]
"""

import asyncio
import signal
import sys
from contextlib import suppress
from typing import Any

import command_line

from drift_sdk import Engine, PromptTooLong, RequestError, TokenStream


async def main(model: str, max_tokens: int) -> None:
    messages: list[dict[str, Any]] = []
    stream: TokenStream | None = None

    def stop() -> None:
        if stream is not None:
            stream.cancel()

    async with Engine(model) as engine:
        # The engine does not handle signals; the program does. While the model is loaded, Ctrl-C ends the
        # program.
        with suppress(NotImplementedError):  # Windows
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
        while True:
            try:
                question = await asyncio.to_thread(input, "> ")
            except EOFError:
                return

            messages.append({"role": "user", "content": question})
            stream = engine.chat(messages, max_tokens=max_tokens)
            try:
                async for chunk in stream:
                    print(chunk.reasoning, chunk.text, sep="", end="", flush=True)

                completion = await stream
            except RequestError as error:
                messages.pop()
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                if isinstance(error, PromptTooLong) and messages:
                    messages.clear()
                    print("the conversation is cleared: ask again", file=sys.stderr)
                continue

            messages.append(completion.message())
            print("" if completion.finish_reason == "stop" else f" [{completion.finish_reason}]")


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("--max-tokens", type=int, default=512, help="length limit of an answer")
    options = parser.parse_args()
    command_line.run(main, options.model, options.max_tokens)
