"""The command `serve`: a server of OpenAI's and Anthropic's protocols."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Callable

from msgspec import Struct

from drift_sdk.cli.engine_start import (
    SERVE_SETTINGS,
    add_drafts,
    add_settings,
    config_of,
    hide_progress,
    show_progress,
)
from drift_sdk.config import EngineConfig
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError
from drift_sdk.events import EngineFailed, Event

KEY_VARIABLE = "DRIFTSDK_API_KEY"
MAX_PORT = 65_535
MAX_DRAIN_S = 1e6


class Server(Struct, frozen=True, kw_only=True):
    """Where and how to serve.

    names: by which clients know the model; empty = the name of its folder or file, or its hub id.
    drain: seconds that open answers have to end after SIGTERM.
    """

    host: str
    port: int
    drain: float
    names: tuple[str, ...]
    api_keys: tuple[str, ...]
    salt_keys: bool
    hide_cached_tokens: bool


def add_serve_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    command.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    command.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"a key that requests need; repeat it for several (default: {KEY_VARIABLE}, if it is set)",
    )
    command.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the model for clients; repeat it for several (default: its hub id or file name)",
    )
    command.add_argument(
        "--salt-keys", action="store_true", help="requests of different keys share no cached prefixes"
    )
    command.add_argument(
        "--hide-cached-tokens",
        action="store_true",
        help="do not tell clients how many tokens of a prompt were cached",
    )
    command.add_argument(
        "--drain",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="time that open answers have to end after SIGTERM (default: %(default)s)",
    )
    command.add_argument(
        "--max-queued-requests",
        type=int,
        default=256,
        help="most requests that wait to start; further ones get a 429 (default: %(default)s)",
    )
    add_settings(command, SERVE_SETTINGS)
    add_drafts(command)


def serve_command(options: argparse.Namespace) -> Callable[[], int]:
    """The command. Raises ConfigError for a number out of range."""
    if not 0 <= options.port <= MAX_PORT:
        raise ConfigError.of("port", options.port, f"0 to {MAX_PORT}")

    if not 0.0 <= options.drain <= MAX_DRAIN_S:
        raise ConfigError.of("drain", options.drain, f"0 to {MAX_DRAIN_S:g} seconds")

    config = config_of(options, SERVE_SETTINGS).replace(max_queued_requests=options.max_queued_requests)
    variable = os.environ.get(KEY_VARIABLE)
    server = Server(
        host=options.host,
        port=options.port,
        drain=options.drain,
        names=tuple(options.served_model_name),
        api_keys=tuple(options.api_key or filter(None, [variable])),
        salt_keys=options.salt_keys,
        hide_cached_tokens=options.hide_cached_tokens,
    )
    return lambda: asyncio.run(run_serve(options.model, config, server))


async def run_serve(model: str, config: EngineConfig, server: Server) -> int:
    """Load the model and serve it until SIGTERM; the exit status, 1 if the engine has failed."""
    import drift_sdk.openai  # imported here, for it needs an extra
    from drift_sdk.openai.server import check_port, serve

    check_port(server.host, server.port)  # before the model is loaded
    is_serving = has_failed = False

    def end_if_failed(event: Event) -> None:
        nonlocal has_failed
        if isinstance(event, EngineFailed) and is_serving:
            has_failed = True
            os.kill(os.getpid(), signal.SIGTERM)  # the server shuts down as at any other SIGTERM

    engine = Engine(model, config, on_progress=show_progress, on_event=end_if_failed)
    application = drift_sdk.openai.app(
        dict.fromkeys(server.names, engine) or engine,
        api_keys=server.api_keys,
        salts_keys=server.salt_keys,
        shows_cached_tokens=not server.hide_cached_tokens,
    )
    async with engine:
        hide_progress()
        is_serving = True
        await serve(application, [engine], host=server.host, port=server.port, drain_s=server.drain)

    return 1 if has_failed else 0
