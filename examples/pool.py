"""Several engines behind the methods of one, and what happens when one of them fails.

python examples/pool.py [MODEL] [--devices cuda:0 cuda:1]

Without --devices, two engines share the CPU. Streams of the replica that is closed in mid-stream go on on the
other one; the same requests afterwards, undisturbed, have the same tokens.
"""

import command_line

from drift_sdk import Completion, EngineConfig, EnginePool, Routing, SamplingParams

QUESTION = "Write one sentence about"
TOPICS = ["the sea", "winter", "a clock", "bread", "the moon", "a bridge", "rain", "a letter"]


async def ask_all(pool: EnginePool, restarted: int | None = None) -> list[Completion]:
    """The answers to all questions. restarted: index of a replica to restart after the first token."""
    streams = [
        pool.chat(
            [{"role": "user", "content": f"{QUESTION} {topic}."}],
            SamplingParams(max_tokens=24, temperature=0.8, seed=seed),
        )
        for seed, topic in enumerate(TOPICS)
    ]
    await anext(streams[0])
    if restarted is not None:
        await pool.restart(restarted)
    return [await stream for stream in streams]


async def main(model: str, devices: list[str]) -> None:
    config = EngineConfig(
        max_model_len=512,
        kv_cache_tokens=8192,
        num_threads=1 if devices[0] == "cpu" else None,  # the engines share the cores
    )
    async with EnginePool.on_devices(model, config, devices=devices, routing=Routing(replay=True)) as pool:
        disturbed = await ask_all(pool, restarted=0)
        for replica in pool.replicas():
            print(
                f"replica {replica.index} on {replica.device}: {replica.state}, {replica.num_routed} requests"
                f", {replica.num_moved} moved away, {replica.num_replayed} replayed elsewhere"
            )
        undisturbed = await ask_all(pool)

    for completion in disturbed:
        print(f"  {completion.text.strip()}")
    pairs = zip(disturbed, undisturbed, strict=True)
    num_equal = sum(one.token_ids == other.token_ids for one, other in pairs)
    print(f"{num_equal} of {len(disturbed)} answers have the same tokens undisturbed")


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"], metavar="DEVICE")
    options = parser.parse_args()
    command_line.run(main, options.model, options.devices)
