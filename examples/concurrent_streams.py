"""Many streams at once. The engine batches them; each task reads its own stream.

python examples/concurrent_streams.py [MODEL] [NUM_STREAMS]
"""

import time

import anyio
import command_line

from drift_sdk import Completion, Engine, SamplingParams

TOPICS = ["the sea", "winter", "a clock", "bread", "the moon", "a bridge", "rain", "a letter"]


async def main(model: str, num_streams: int) -> None:
    completions: dict[int, Completion] = {}
    async with Engine(model) as engine:

        async def tell(index: int) -> None:
            question = f"Write one sentence about {TOPICS[index % len(TOPICS)]}."
            params = SamplingParams(max_tokens=32, temperature=0.8, seed=index)
            completions[index] = await engine.chat([{"role": "user", "content": question}], params)

        started_at = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for index in range(num_streams):
                tasks.start_soon(tell, index)
        seconds = time.perf_counter() - started_at

    for index, completion in sorted(completions.items()):
        print(f"{index:3d}  {completion.text.strip()}")
    num_tokens = sum(completion.usage.completion_tokens for completion in completions.values())
    print(f"{num_streams} streams, {num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.1f} tok/s")


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("num_streams", nargs="?", type=command_line.whole(1), default=8)
    options = parser.parse_args()
    command_line.run(main, options.model, options.num_streams)
