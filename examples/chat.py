"""Talk with a model in the terminal; Ctrl-C stops an answer, Ctrl-D leaves.

python examples/chat.py [MODEL]
"""

import asyncio
import signal
import sys

import smollm2

from drift_sdk import Engine, SamplingParams, TokenStream


async def main(model: str) -> None:
    loop = asyncio.get_running_loop()
    messages: list[dict[str, str]] = []
    stream: TokenStream | None = None

    def stop() -> None:
        if stream is not None:
            stream.cancel()

    # The signal is this program's to handle: the engine never touches it.
    loop.add_signal_handler(signal.SIGINT, stop)
    async with Engine(model) as engine:
        while True:
            try:
                question = await asyncio.to_thread(input, "> ")
            except EOFError:
                return

            messages.append({"role": "user", "content": question})
            stream = engine.chat(messages, SamplingParams(max_tokens=512, temperature=0.7, top_p=0.9))
            async for chunk in stream:
                print(chunk.text, end="", flush=True)

            completion = await stream
            messages.append({"role": "assistant", "content": completion.text})
            print("" if completion.finish_reason == "stop" else f" [{completion.finish_reason}]")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else str(smollm2.path())))
