"""The part of a replay that a stream is given: the rest, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from drift_sdk import Chunk, Completion, TokenLogprobs, ToolCall
from drift_sdk.pool.pool_state import Delivered, ReplayDiverged
from drift_sdk.results import Timing, Usage

TEXT = "The answer is nine."
TIMING = Timing(queued_s=0.0, prefill_s=0.0, first_token_s=0.0, decode_s=0.0)


def chunks_of(cuts: list[int], lag: int, call_id: str) -> list[Chunk]:
    """The chunks of one generation, cut at these places. The text lags behind the tokens until the end; the
    first half is reasoning, and there is a tool call with the ninth token."""
    edges = sorted({0, len(TEXT), *cuts})
    chunks = []
    for start, end in zip(edges, edges[1:], strict=False):
        is_last = end == len(TEXT)
        shown = slice(max(0, start - lag), end if is_last else max(0, end - lag))
        half = len(TEXT) // 2
        part = range(len(TEXT))[shown]
        chunks.append(
            Chunk(
                text="".join(TEXT[i] for i in part if i >= half),
                reasoning="".join(TEXT[i] for i in part if i < half),
                token_ids=tuple(map(ord, TEXT[start:end])),
                logprobs=tuple(TokenLogprobs(token_id=ord(c), logprob=-1.0) for c in TEXT[start:end]),
                finish_reason="stop" if is_last else None,
                tool_calls=(ToolCall(name="f", arguments={}, id=call_id),) if start <= 9 < end else (),
            )
        )
    return chunks


def completion_of(num_tokens: int, finish_reason: str = "stop") -> Completion:
    return Completion(
        request_id="a",
        text=TEXT[len(TEXT) // 2 : num_tokens],
        reasoning=TEXT[: min(num_tokens, len(TEXT) // 2)],
        raw_text=TEXT[:num_tokens],
        token_ids=tuple(map(ord, TEXT[:num_tokens])),
        finish_reason=finish_reason,
        stop_reason=None,
        usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=num_tokens),
        timing=TIMING,
        seed=0,
        tool_calls=(ToolCall(name="f", arguments={}, id="later"),),
    )


cuts = st.lists(st.integers(1, len(TEXT) - 1), max_size=8)
attempt = st.tuples(cuts, st.integers(0, 4), st.integers(0, 8))


@given(st.lists(attempt, max_size=3), cuts, st.integers(0, 4))
def test_replays_cut_at_any_places_join_to_one_generation(
    attempts: list[tuple[list[int], int, int]], last_cuts: list[int], last_lag: int
) -> None:
    delivered, got = Delivered(), []
    for index, (where, lag, num_chunks) in enumerate(attempts):
        if index:
            delivered.begin_again()
        chunks = chunks_of(where, lag, f"call-{index}")[:-1][:num_chunks]  # it fails before its last chunk
        got += [rest for chunk in chunks if (rest := delivered.rest_of(chunk)) is not None]
    delivered.begin_again()
    got += [rest for chunk in chunks_of(last_cuts, last_lag, "last") if (rest := delivered.rest_of(chunk))]
    half = len(TEXT) // 2
    assert "".join(chunk.text for chunk in got) == TEXT[half:]
    assert "".join(chunk.reasoning for chunk in got) == TEXT[:half]
    assert [token for chunk in got for token in chunk.token_ids] == list(map(ord, TEXT))
    assert [entry.token_id for chunk in got for entry in chunk.logprobs or ()] == list(map(ord, TEXT))
    assert [chunk.finish_reason for chunk in got if chunk.finish_reason] == ["stop"]
    calls = tuple(call for chunk in got for call in chunk.tool_calls)
    assert len(calls) == 1
    completion = delivered.completed(completion_of(len(TEXT)))
    if delivered._is_replayed:
        assert completion.tool_calls == calls  # with the id that the stream has seen


def test_other_tokens_are_no_replay() -> None:
    delivered = Delivered()
    delivered.rest_of(Chunk(text="ab", token_ids=(1, 2)))
    delivered.begin_again()
    with pytest.raises(ReplayDiverged):
        delivered.rest_of(Chunk(text="a", token_ids=(1, 3)))


def test_a_replay_that_ends_too_early_is_none() -> None:
    delivered = Delivered()
    delivered.rest_of(Chunk(text=TEXT[:4], token_ids=tuple(map(ord, TEXT[:4]))))
    delivered.begin_again()
    with pytest.raises(ReplayDiverged):
        delivered.completed(completion_of(3))


def test_a_cancelled_replay_has_the_tokens_that_were_delivered() -> None:
    delivered = Delivered()
    delivered.rest_of(Chunk(text="", reasoning=TEXT[:6], token_ids=tuple(map(ord, TEXT[:6]))))
    delivered.begin_again()
    completion = delivered.completed(completion_of(2, "cancelled"))
    assert completion.token_ids == tuple(map(ord, TEXT[:6]))
    assert completion.reasoning == TEXT[:6]
    assert completion.usage.completion_tokens == 6


def test_the_first_attempt_is_passed_on_as_it_is() -> None:
    delivered, completion = Delivered(), completion_of(5)
    chunk = Chunk(text="", token_ids=())
    assert delivered.rest_of(chunk) is chunk
    assert delivered.completed(completion) is completion


@pytest.mark.parametrize("is_split", [False, True])
def test_raw_text_of_a_cancelled_replay(is_split: bool) -> None:
    """Chunks do not have the markers between thought and answer."""
    delivered = Delivered()
    reasoning = "thought" if is_split else ""
    delivered.rest_of(Chunk(text="answer", reasoning=reasoning, token_ids=(1, 2, 3)))
    delivered.begin_again()
    replay = replace(
        completion_of(0, "cancelled"),
        text="an",
        reasoning=reasoning,
        raw_text=f"<think>{reasoning}</think>an" if is_split else "an",
        token_ids=(1, 2),
        tool_calls=(),
    )
    completion = delivered.completed(replay)
    assert (completion.text, completion.reasoning) == ("answer", reasoning)
    assert completion.raw_text == (replay.raw_text if is_split else "answer")
