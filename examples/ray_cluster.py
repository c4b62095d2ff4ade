"""Engines in actors of a Ray cluster, behind the methods of one engine.

python examples/ray_cluster.py [MODEL] [--address ADDRESS] [--replicas N] [--device cpu]

Without --address, Ray is started on this machine and ends with the program. On a cluster, run it on any node
with --address auto. Needs the extra `ray`.
"""

import time

import anyio
import command_line

from drift_sdk import DriftError, EngineConfig, SamplingParams

NUM_STREAMS = 8


async def main(model: str, address: str, num_replicas: int, device: str) -> None:
    from drift_sdk.ray import Placement, ray_pool  # without the extra, this raises DriftError

    config = EngineConfig(
        device=device,
        max_model_len=512,
        kv_cache_tokens=8192,
        num_threads=1 if device == "cpu" else None,
    )
    placement = Placement(num_cpus=0.5 if device == "cpu" else 1.0)
    pool = ray_pool(model, config, num_replicas=num_replicas, address=address, placement=placement)
    async with pool:
        started_at = time.perf_counter()
        lines: dict[int, str] = {}

        async def tell(index: int) -> None:
            params = SamplingParams(max_tokens=24, temperature=0.8, seed=index)
            stream = pool.chat([{"role": "user", "content": f"Tell me fact number {index}."}], params)
            try:
                lines[index] = (await stream).text.strip()
            except DriftError as error:  # ReplicaFailed, if an actor or its node is lost
                lines[index] = f"{type(error).__name__}: {error}"

        async with anyio.create_task_group() as tasks:
            for index in range(NUM_STREAMS):
                tasks.start_soon(tell, index)
        seconds = time.perf_counter() - started_at
        replicas = pool.replicas()

    for index in sorted(lines):
        print(f"{index:3d}  {lines[index]}")
    for replica in replicas:
        print(f"replica {replica.index}: {replica.state}, {replica.num_routed} requests")
    print(f"{NUM_STREAMS} streams in {seconds:.1f} s")


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("--address", default="local", help='"auto" or the address of a cluster')
    parser.add_argument("--replicas", type=command_line.whole(1, 1024), default=2)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    options = parser.parse_args()
    command_line.run(main, options.model, options.address, options.replicas, options.device)
