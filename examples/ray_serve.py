"""The server of drift_sdk.openai as a deployment of Ray Serve, whose replicas follow the load.

python examples/ray_serve.py [MODEL] [--address ADDRESS] [--max-replicas N] [--device cpu] [--port PORT]

Each replica is an engine with a GPU of its own. Serve starts a replica when the others have more than
--target-requests requests each, and stops it when they have fewer, after its requests have ended. Without
--address, Ray is started on this machine and ends with the program. Needs "ray[serve]".
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import command_line

from drift_sdk import DriftError, Engine, EngineConfig

EXAMPLES = Path(__file__).resolve().parent
MAX_STREAM_S = 600.0


def app_builder(model: str, config: EngineConfig) -> Callable[[], Any]:
    """A function that makes the application of a replica, in the replica's process."""

    def build() -> Any:
        import drift_sdk.openai

        return drift_sdk.openai.app(Engine(model, config))

    return build


def deployment(model: str, config: EngineConfig, max_replicas: int, target_requests: int) -> Any:
    """The application for `serve.run`."""
    from ray import serve

    class Server:
        """Serves the application; its engine starts and closes with it."""

    is_on_gpu = config.device != "cpu"
    made = serve.deployment(
        serve.ingress(app_builder(model, config))(Server),
        name="drift",
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": max_replicas,
            "target_ongoing_requests": target_requests,
        },
        max_ongoing_requests=4 * target_requests,
        graceful_shutdown_timeout_s=MAX_STREAM_S,
        ray_actor_options={"num_gpus": 1 if is_on_gpu else 0, "num_cpus": 1},
    )
    return made.bind()


async def main(
    model: str, config: EngineConfig, address: str, port: int, max_replicas: int, target_requests: int
) -> None:
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise DriftError(f'{error}: pip install "ray[serve]"') from error

    paths = [str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    ray.init(
        None if address == "local" else address,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(deployment(model, config, max_replicas, target_requests), route_prefix="/")
    print(f"serving on http://127.0.0.1:{port}/v1", flush=True)
    try:
        await anyio.sleep_forever()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("--address", default="local", help='"auto" or the address of a cluster')
    parser.add_argument("--port", type=command_line.whole(1, 65535), default=8000)
    parser.add_argument("--max-replicas", type=command_line.whole(1, 1024), default=2)
    parser.add_argument("--target-requests", type=command_line.whole(1, 4096), default=32)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    options = parser.parse_args()
    settings = EngineConfig(device=options.device, num_threads=1 if options.device == "cpu" else None)
    command_line.run(
        main,
        options.model,
        settings,
        options.address,
        options.port,
        options.max_replicas,
        options.target_requests,
    )
