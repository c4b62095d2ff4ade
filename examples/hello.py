"""Stream one answer, with speculation if a draft for the model is at hand.

python examples/hello.py                                  SmolLM2-135M, downloaded the first time
python examples/hello.py MODEL "Your question"            a folder, a .gguf file or a hub id
"""

import sys
import time
from pathlib import Path

import command_line
import smollm2

from drift_sdk import Completion, Engine, EngineConfig, Progress, SamplingParams, Speculation


def show(progress: Progress) -> None:
    print(f"\r{progress.stage}: {progress.fraction:4.0%}   ", end="", file=sys.stderr, flush=True)


def speed(completion: Completion) -> float:
    """Tokens a second after the first."""
    return (completion.usage.completion_tokens - 1) / max(completion.timing.decode_s, 1e-9)


async def main(model: str, question: str) -> None:
    has_draft = Path(model).name == Path(smollm2.MEMBER).name and smollm2.DRAFT.exists()
    config = EngineConfig(speculation=Speculation(draft=smollm2.DRAFT) if has_draft else None)
    started_at = time.perf_counter()
    async with Engine(model, config, on_progress=show) as engine:
        print(f"\rready in {time.perf_counter() - started_at:.1f} s    ", file=sys.stderr)
        messages, params = [{"role": "user", "content": question}], SamplingParams(max_tokens=128)
        stream = engine.chat(messages, params)
        async for chunk in stream:
            print(chunk.text, end="", flush=True)

        completion = await stream
        num_tokens, first = completion.usage.completion_tokens, completion.timing.first_token_s * 1e3
        print(f"\n[{num_tokens} tokens, first after {first:.0f} ms, {speed(completion):.1f} tok/s]")
        if completion.speculation is not None:
            plain = await engine.chat(messages, params.replace(num_draft_tokens=0))
            length, gain = completion.speculation.acceptance_length, speed(completion) / speed(plain)
            print(f"[with drafts: {length:.2f} tokens a round, {gain:.2f} times the speed without]")


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "question", nargs="?", default="What is the capital of France, and what is it known for?"
    )
    options = parser.parse_args()
    command_line.run(main, options.model, options.question)
