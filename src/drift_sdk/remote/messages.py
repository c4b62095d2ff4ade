"""Messages between an engine's host and the process that uses it, and their frames on a socket.

All of them can be pickled. A frame is a message with its length before it.
"""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from msgspec import Struct

from drift_sdk.base_engine import EngineKind
from drift_sdk.driver.prompts import Prompt
from drift_sdk.results import Chunk, Completion
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.stats import EngineMetrics

if TYPE_CHECKING:
    from drift_sdk.text.tokenizer import Tokenizer  # imports tokenizers, which `import drift_sdk` does not


class RemoteRequest(Struct, frozen=True, kw_only=True):
    """A request. number: names it between the two processes, whatever its id is."""

    number: int
    request_id: str
    group_id: str | None
    params: SamplingParams
    seed: int


class SubmitRequests(Struct, frozen=True, kw_only=True):
    """Submit requests of one prompt, all or none."""

    prompt: Prompt
    requests: tuple[RemoteRequest, ...]


class CancelRequest(Struct, frozen=True):
    """Cancel a request."""

    number: int


class TakeBackPause(Struct, frozen=True):
    """Take one pause back; others stay in force."""

    pause: int


Command: TypeAlias = SubmitRequests | CancelRequest | TakeBackPause


class News(Struct, frozen=True, kw_only=True):
    """Events of a request since the last news of it: it was accepted, it has new tokens, or it has
    ended with a completion or an error.

    num_prompt_tokens: None before the request was accepted.
    """

    number: int
    num_prompt_tokens: int | None = None
    chunk: Chunk | None = None
    completion: Completion | None = None
    error: BaseException | None = None


class Batch(Struct, frozen=True, kw_only=True):
    """All news since the last batch.

    number:  of the batch, from 1.
    news:    at most one of each request.
    is_open: whether the engine admits requests.
    is_last: whether the engine is closed and no more news will come.
    metrics: None if they were sent not long ago.
    """

    number: int
    news: tuple[News, ...]
    is_open: bool
    is_last: bool
    metrics: EngineMetrics | None


class Opened(Struct, frozen=True, kw_only=True):
    """An engine that has been started.

    num_slots: most sequences that run at once.
    """

    kind: EngineKind
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    has_drafts: bool
    num_slots: int
    metrics: EngineMetrics


class HostLost(Exception):
    """The host's process has ended, or cannot be reached any more."""


class HostUnavailable(Exception):
    """The host could not be reached; the call may be repeated."""


class Channel(Protocol):
    """Calls the methods of an `EngineHost` in another process."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method. Raises the method's DriftError, HostLost or HostUnavailable."""

    async def kill(self) -> None:
        """End the host's process, whatever it does."""


LENGTH_BYTES = 8
MAX_FRAME_BYTES = 2**30
"""Largest message. A greater length is read only from a process that sends something else."""


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next message; EOFError or OSError if the other process has ended. Any other exception for what is
    no message."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    check_length(length)
    return pickle.loads(await reader.readexactly(length))


async def write_frame(writer: asyncio.StreamWriter, message: tuple[Any, ...]) -> None:
    """Send a message, and wait while too much has not been taken by the other process. OSError if that has
    ended, and ValueError before anything is sent if the message is too large."""
    packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    check_length(len(packed))
    writer.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)
    await writer.drain()


def check_length(length: int) -> None:
    """ValueError for a message that is too large."""
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes: expected at most {MAX_FRAME_BYTES}")
