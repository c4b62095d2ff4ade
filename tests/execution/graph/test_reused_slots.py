"""A slot reused while the step that ends its previous sequence is still in flight."""

from __future__ import annotations

import pytest
import torch
from interpreted_device import InterpretedDevice
from scheduled_run import sampling_of
from tiny_llama import tiny_llama

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import Executor, ExecutorLimits, SlotOutput

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
SHAPES = tiny_llama(vocab_size=300, intermediate_size=48, rms_norm_eps=1e-6)
LIMITS = ExecutorLimits(max_num_seqs=1, max_model_len=64, num_blocks=8, block_size=16, vocab_size=300)


def first_output_after_reuse(executor: Executor, *, ends_by_chunk: bool) -> SlotOutput:
    """The output of a sequence with log-probabilities that enters the slot of a removed sequence of the same
    length, whose last chunk or decode row is in flight."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=LIMITS.max_num_seqs,
            num_blocks=LIMITS.num_blocks,
            block_size=LIMITS.block_size,
            prefill_token_budget=16,
        )
    )

    def enter(name: str, prompt: list[int], **changes: object) -> Sequence:
        sampling = sampling_of(len(prompt), 4, **changes)
        sequence = Sequence(request_id=name, prompt_ids=prompt, sampling=sampling, priority=0, arrival=0)
        scheduler.add(sequence)
        return sequence

    def launch() -> None:
        plan = scheduler.schedule()
        assert plan is not None
        executor.launch(plan)

    early = enter("early", [5, 6, 7, 8, 9])
    launch()
    if not ends_by_chunk:
        launch()
        scheduler.commit(executor.collect())
    scheduler.remove(early)
    late = enter("late", [15, 16, 17, 18, 19], num_logprobs=2, num_prompt_logprobs=1)
    launch()
    assert scheduler.commit(executor.collect()) == []
    (delta,) = scheduler.commit(executor.collect())
    assert delta.sequence is late
    return delta.output


def graph_executor(decoder: Decoder, limits: ExecutorLimits) -> GraphExecutor:
    device = GpuDevice(0) if IS_GPU else InterpretedDevice()
    return GraphExecutor(device, decoder, limits, TunedTable(), GraphOptions(prefill_token_budget=16))


@pytest.mark.parametrize("ends_by_chunk", [True, False], ids=["chunk", "row"])
def test_reused_slot_reports_logprobs_of_its_new_sequence(ends_by_chunk: bool) -> None:
    config = read_spec(SHAPES)
    decoder = Decoder.random(config, device="cuda" if IS_GPU else "cpu", dtype=torch.float32)
    expected = first_output_after_reuse(EagerExecutor(decoder, LIMITS), ends_by_chunk=ends_by_chunk)
    executor = graph_executor(decoder, LIMITS)
    found = first_output_after_reuse(executor, ends_by_chunk=ends_by_chunk)
    executor.close()
    assert found.token_ids == expected.token_ids
    assert expected.prompt_logprobs is not None and len(expected.prompt_logprobs) == 4
    assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == 4
    assert found.logprobs is not None and len(found.logprobs[0].top) == 2


def logprobs_of_preempted(executor: Executor) -> tuple[list[tuple[int, int | None]], int]:
    """(token, number of log-probabilities) of a sequence that is preempted while a step of it is in flight,
    and the number of preemptions. Its slot goes to a sequence without log-probabilities."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2, num_blocks=6, block_size=4, prefill_token_budget=16)
    )

    def enter(name: str, prompt_length: int, arrival: int, most: int, **changes: object) -> Sequence:
        prompt = [5 + arrival * 20 + index for index in range(prompt_length)]
        sampling = sampling_of(prompt_length, most, **changes)
        priority = 0 if name == "urgent" else 1
        sequence = Sequence(
            request_id=name, prompt_ids=prompt, sampling=sampling, priority=priority, arrival=arrival
        )
        scheduler.add(sequence)
        return sequence

    enter("first", 8, 0, 12)
    preempted, urgent = enter("preempted", 5, 1, 10, num_logprobs=2), None
    found: list[tuple[int, int | None]] = []
    while scheduler.has_work:
        if urgent is None and scheduler.num_running == 2:
            urgent = enter("urgent", 2, 2, 2)
        plan = scheduler.schedule() if scheduler.num_in_flight < 2 else None
        if plan is not None:
            executor.launch(plan)
        if plan is None or scheduler.num_in_flight == 2:
            for delta in scheduler.commit(executor.collect()):
                if delta.sequence is preempted:
                    logprobs = delta.output.logprobs or [None] * len(delta.output.token_ids)
                    numbers = [None if each is None else len(each.top) for each in logprobs]
                    found.extend(zip(delta.output.token_ids, numbers, strict=True))
    return found, scheduler.num_preemptions


def test_step_of_a_preempted_sequence_has_its_own_logprobs() -> None:
    limits = ExecutorLimits(max_num_seqs=2, max_model_len=24, num_blocks=6, block_size=4, vocab_size=300)
    config = read_spec(SHAPES)
    decoder = Decoder.random(config, device="cuda" if IS_GPU else "cpu", dtype=torch.float32)
    expected, num_preemptions = logprobs_of_preempted(EagerExecutor(decoder, limits))
    executor = graph_executor(decoder, limits)
    found, _ = logprobs_of_preempted(executor)
    executor.close()
    assert num_preemptions == 1
    assert found == expected
    assert [number for _, number in found] == [2] * 10
