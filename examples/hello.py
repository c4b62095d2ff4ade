"""Stream one answer.

python examples/hello.py                                  SmolLM2-135M, downloaded the first time
python examples/hello.py MODEL "Your question"            a folder, a .gguf file or a hub id
"""

import sys
import time

import command_line

from drift_sdk import Engine, Progress, SamplingParams


def show(progress: Progress) -> None:
    print(f"\r{progress.stage}: {progress.fraction:4.0%}   ", end="", file=sys.stderr, flush=True)


async def main(model: str, question: str) -> None:
    started_at = time.perf_counter()
    async with Engine(model, on_progress=show) as engine:
        print(f"\rready in {time.perf_counter() - started_at:.1f} s    ", file=sys.stderr)
        stream = engine.chat([{"role": "user", "content": question}], SamplingParams(max_tokens=128))
        async for chunk in stream:
            print(chunk.text, end="", flush=True)

        completion = await stream
        speed = (completion.usage.completion_tokens - 1) / max(completion.timing.decode_s, 1e-9)
        first = completion.timing.first_token_s * 1e3
        print(
            f"\n[{completion.usage.completion_tokens} tokens, first after {first:.0f} ms, {speed:.1f} tok/s]"
        )


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    options = parser.parse_args()
    command_line.run(main, options.model, options.question)
