"""The order of the waiting queue, and what it counts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from drift_sdk.scheduling.sequence import Sequence, WaitingQueue
from drift_sdk.steps import SlotSampling

SAMPLING = SlotSampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    stop_token_ids=(),
    num_prompt_tokens=1,
    max_length=9,
    num_logprobs=None,
)


def make(priority: int, arrival: int) -> Sequence:
    return Sequence(
        request_id=f"r{arrival}", prompt_ids=[1], sampling=SAMPLING, priority=priority, arrival=arrival
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.tuples(st.just("push"), st.integers(0, 3)), st.tuples(st.just("pop"), st.just(0))))
)
def test_order_is_priority_then_arrival(operations: list[tuple[str, int]]) -> None:
    queue = WaitingQueue()
    model: list[tuple[int, int]] = []
    for arrival, (operation, priority) in enumerate(operations):
        if operation == "push":
            queue.push(make(priority, arrival))
            model = sorted([*model, (priority, arrival)])
        elif model:
            (first,) = queue.first(1)
            queue.discard(first)
            assert first.order == model.pop(0)

        assert [sequence.order for sequence in queue] == model
        queue.check_integrity()


def test_discard_removes_the_same_object_and_ignores_others() -> None:
    queue = WaitingQueue()
    twins = [make(0, 1), make(0, 1)]
    for sequence in twins:
        queue.push(sequence)

    queue.discard(make(0, 1))
    queue.discard(make(5, 5))
    assert len(queue) == 2
    queue.discard(twins[1])
    queue.discard(twins[1])
    assert list(queue) == [twins[0]]
    assert queue.num_never_started == 1


def test_num_never_started_excludes_preempted_sequences() -> None:
    queue = WaitingQueue()
    preempted = make(0, 0)
    preempted.started_at = 1.0
    queue.push(preempted)
    queue.push(make(0, 1))
    assert (len(queue), queue.num_never_started) == (2, 1)
    for sequence in queue.first(3):
        queue.discard(sequence)
    assert (len(queue), queue.num_never_started) == (0, 0)
