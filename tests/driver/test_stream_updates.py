"""Updates of many streams: in order, a slice in each turn of the event loop."""

from __future__ import annotations

import itertools

import anyio
import anyio.lowlevel
from loops import on_every_loop, run

from drift_sdk.driver.loops import LoopPoster
from drift_sdk.driver.stream_updates import SLICE_UPDATES, PendingUpdates, StreamUpdates, Update
from drift_sdk.results import Chunk, TokenLogprobs, ToolCall

NUM_STREAMS = 3 * SLICE_UPDATES + 5


def chunk(index: int) -> Chunk:
    return Chunk(text=str(index), token_ids=(index,))


@on_every_loop
def test_steps_are_delivered_in_slices_and_in_order(loop: str) -> None:
    """A second step whose streams stand in the opposite order comes before the first one is delivered."""

    async def main() -> None:
        poster = LoopPoster.current()
        streams = [StreamUpdates(poster) for _ in range(NUM_STREAMS)]
        pending = PendingUpdates()
        for step, order in enumerate((streams, streams[::-1])):
            for stream in order:
                pending.add(Update(stream_updates=stream, chunk=chunk(step)))
            assert pending.post() == []
        numbers = [0]
        with anyio.fail_after(60):
            while numbers[-1] < 2 * NUM_STREAMS:
                await anyio.lowlevel.checkpoint()
                numbers.append(sum(len(stream._pending) for stream in streams))
        most = max(later - earlier for earlier, later in itertools.pairwise(numbers))
        # trio may run two slices between two turns of this task.
        assert most <= (2 if loop == "trio" else 1) * SLICE_UPDATES
        assert [stream.take_chunk().token_ids for stream in streams] == [(0, 1)] * NUM_STREAMS

    run(loop, main)


async def test_unread_chunks_are_joined() -> None:
    calls = [ToolCall(name=name, arguments={}) for name in "ab"]
    logprobs = [TokenLogprobs(token_id=token_id, logprob=-1.0, top=()) for token_id in range(3)]
    stream = StreamUpdates(LoopPoster.current())
    for given in (
        Chunk(text="", token_ids=(0,), reasoning="so", logprobs=(logprobs[0],)),
        Chunk(text="a", token_ids=(1,), reasoning="me", tool_calls=(calls[0],), logprobs=(logprobs[1],)),
        Chunk(
            text="b", token_ids=(2,), tool_calls=(calls[1],), logprobs=(logprobs[2],), finish_reason="stop"
        ),
    ):
        stream.deliver(Update(stream_updates=stream, chunk=given))
    assert stream.take_chunk() == Chunk(
        text="ab",
        token_ids=(0, 1, 2),
        reasoning="some",
        tool_calls=tuple(calls),
        logprobs=tuple(logprobs),
        finish_reason="stop",
    )
    assert not stream.has_chunk


def test_closed_loops_are_forgotten() -> None:
    pending = PendingUpdates()

    async def deliver_one() -> None:
        stream = StreamUpdates(LoopPoster.current())
        pending.add(Update(stream_updates=stream, chunk=chunk(0)))
        pending.post()
        with anyio.fail_after(60):
            while not stream.has_chunk:
                await anyio.lowlevel.checkpoint()

    for _ in range(3):
        anyio.run(deliver_one)
    assert len(pending._deliveries) == 1
