"""Complete a file of prompts, many at a time, and go on where an earlier run was stopped.

python examples/batch.py [MODEL] [--input prompts.jsonl] [--output answers.jsonl]

Each line of the input is a JSON object with a "prompt"; line n of the output answers line n of the input.
Stop it with Ctrl-C and start it again: lines that are complete are not computed anew.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import anyio
import smollm2

from drift_sdk import Engine, SamplingParams

PROMPTS = Path(__file__).parent / "prompts.jsonl"
ANSWERS = smollm2.CACHE.parent / "answers.jsonl"


def num_finished(output: Path) -> int:
    """Complete lines of the output. A line that was being written when the run ended is cut off."""
    if not output.exists():
        return 0

    content = output.read_bytes()
    os.truncate(output, content.rfind(b"\n") + 1)
    return content.count(b"\n")


def prompts(source: Path) -> Iterator[str]:
    with source.open() as lines:
        for line in lines:
            yield json.loads(line)["prompt"]


async def main(model: str, source: Path, output: Path, params: SamplingParams) -> None:
    num_prompts = sum(1 for _ in prompts(source))
    num_done = num_earlier = num_finished(output)
    if num_earlier:
        print(f"{num_earlier} of {num_prompts} are in {output} already", file=sys.stderr)
    if num_earlier >= num_prompts:
        return

    async with Engine(model) as engine:
        started_at, num_tokens = time.perf_counter(), 0
        todo = islice(prompts(source), num_earlier, None)
        with output.open("a") as answers:
            async for completion in engine.map(todo, params):
                answer = {"text": completion.text, "finish_reason": completion.finish_reason}
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
                num_done += 1
                num_tokens += completion.usage.completion_tokens
                speed = num_tokens / (time.perf_counter() - started_at)
                print(f"\r{num_done}/{num_prompts}  {speed:.1f} tok/s ", end="", file=sys.stderr, flush=True)

    print(f"\n{num_done - num_earlier} answers added to {output}", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or a hub id (default: SmolLM2-135M)")
    parser.add_argument("--input", type=Path, default=PROMPTS)
    parser.add_argument("--output", type=Path, default=ANSWERS)
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args()
    try:
        anyio.run(
            main,
            options.model or str(smollm2.path()),
            options.input,
            options.output,
            SamplingParams(max_tokens=options.max_tokens, temperature=0.7, seed=0),
        )
    except KeyboardInterrupt:
        print("\nstopped; start it again to go on", file=sys.stderr)
        sys.exit(130)
