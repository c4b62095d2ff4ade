"""Four ways to end a request early. The engine frees the request at once in each case.

python examples/cancel.py [MODEL]
"""

import anyio
import command_line

from drift_sdk import Engine, SamplingParams

STORY = SamplingParams(max_tokens=400, ignore_eos=True)


async def main(model: str) -> None:
    async with Engine(model) as engine:
        # 1. Leave the block.
        async with engine.generate("Once upon a time", STORY) as stream:
            async for chunk in stream:
                print("left the block after", repr(chunk.text))
                break

        # 2. Call cancel(). The text generated so far stays readable.
        stream = engine.generate("Once upon a time", STORY)
        async for _ in stream:
            stream.cancel()
        completion = await stream
        print("cancel():", completion.finish_reason, repr(completion.text))

        # 3. A timeout around the whole request cancels it ...
        with anyio.move_on_after(0.5) as scope:
            await engine.generate("Once upon a time", STORY)
        print("timed out:", scope.cancelled_caught)

        # 4. ... but under `async with` a timeout between tokens keeps it.
        num_timeouts, text = 0, ""
        async with engine.generate("Once upon a time", SamplingParams(max_tokens=16)) as stream:
            while True:
                try:
                    with anyio.fail_after(0.01):
                        text += (await anext(stream)).text
                except TimeoutError:
                    num_timeouts += 1
                except StopAsyncIteration:
                    break
        print(f"{num_timeouts} timeouts between tokens, nothing lost:", repr(text))

        await anyio.sleep(0.5)
        print("running:", engine.stats().num_running, "free blocks:", engine.stats().num_free_blocks)


if __name__ == "__main__":
    command_line.run(main, command_line.parser(__doc__).parse_args().model)
