"""Runs requests on an executor with the real scheduler, without an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.spec.model import BORDER
from drift_sdk.steps import Executor, SlotSampling, StepPlan, StepResult, TokenConstraint

__all__ = ["run_scheduled", "sampling_of"]


def sampling_of(num_prompt_tokens: int, num_tokens: int, **changes: object) -> SlotSampling:
    """Parameters of a greedy request without stop ids, with `changes`."""
    fields = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "stop_token_ids": (),
        "num_prompt_tokens": num_prompt_tokens,
        "max_length": num_prompt_tokens + num_tokens,
    }
    return SlotSampling(**fields | changes)


def run_scheduled(
    executor: Executor,
    requests: list[tuple[list[int], SlotSampling]],
    *,
    prefill_token_budget: int,
    depth: int = 2,
    draft_choices: tuple[int, ...] = (),
    has_draft_kv: bool = False,
    wants_history: bool = False,
    num_checkpoints: int = 0,
    window: int = 0,
    constraints: Mapping[int, TokenConstraint] = MappingProxyType({}),
    on_step: Callable[[StepPlan, StepResult], None] = lambda plan, result: None,
) -> list[list[int]]:
    """Run all requests and return their tokens.

    requests:       prompt and parameters of each.
    depth:          number of steps in flight.
    draft_choices:  numbers of drafts that the scheduler may choose from; it always chooses the largest.
    has_draft_kv:   the drafter has a KV cache.
    wants_history:  the drafter reads the tokens of prefix hits.
    num_checkpoints: places for checkpoints of recurrent layers.
    window:         tokens that layers with windows keep, if the executor has blocks for these.
    constraints:    by index of the requests, which draft nothing; they are not advanced.
    on_step:        called with the plan and the result of each step.
    """
    limits = executor.limits
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            prefill_token_budget=prefill_token_budget,
            draft_choices=draft_choices,
            is_draft_adaptive=False,
            has_draft_kv=has_draft_kv,
            wants_history=wants_history,
            num_checkpoints=num_checkpoints,
            checkpoint_tokens=math.lcm(BORDER, limits.block_size) if num_checkpoints else 0,
            window=window,
            num_window_blocks=limits.num_window_blocks,
            max_expanded_tokens=getattr(executor, "max_expanded_tokens", 0),
        )
    )
    sequences = [
        Sequence(
            request_id=str(index),
            prompt_ids=list(prompt),
            sampling=sampling,
            priority=0,
            arrival=index,
            constraint=constraints.get(index),
            max_draft_tokens=0 if index in constraints else None,
        )
        for index, (prompt, sampling) in enumerate(requests)
    ]
    for sequence in sequences:
        scheduler.add(sequence)

    plans: dict[int, StepPlan] = {}
    while scheduler.has_work:
        plan = scheduler.schedule() if scheduler.num_in_flight < depth else None
        if plan is not None:
            plans[plan.step_id] = plan
            executor.launch(plan)
            if scheduler.num_in_flight < depth:
                continue

        result = executor.collect()
        on_step(plans.pop(result.step_id), result)
        scheduler.commit(result)
        scheduler.check_integrity()

    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
