"""Measure speculative decoding and compare it with plain decoding of the same scenarios in the same run.

python -m perf.speculative --num-draft-tokens 1 3 5 --acceptance-length 3.2 --scenario single-512 batch64-512
python -m perf.speculative --model smollm2-135m --draft ngram
python -m perf.speculative --model qwen3.6-27b --draft mtp --acceptance-length 3 --peer vllm
python -m perf.speculative --model gemma-4-31b --draft assistant --acceptance-length 3
python -m perf.speculative --model qwen3-8b --draft dflash-16 --num-draft-tokens 8 15 --acceptance-length 5
python -m perf.speculative --policy-sweep --repeats 3
python -m perf.speculative --model gpt-oss-120b --acceptance-length 2.56 --peer vllm
python -m perf.speculative --model llama-3.1-8b --acceptance-length 3.2 --tensor-parallel 1 2 --peer vllm
python -m perf.speculative --model FOLDER --draft HEAD --text long.txt

With --acceptance-length, acceptance is simulated: drafts are made and verified, but not compared. --trace
simulates rounds that an engine with real acceptance has recorded. Without either, acceptance is that of the
draft given by --draft, or of a draft with random weights if the model has random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from drift_sdk import NGram
from drift_sdk.loading.source import resolve
from drift_sdk.measurement import recorded_engine
from perf.harness.decoding import DecodeOptions, slow_paths
from perf.harness.drafting import Drafting
from perf.harness.experts import measured_experts
from perf.harness.mtp_draft import ASSISTANT, MTP, Assistant, MtpDraft
from perf.harness.record import DecodeRun, Run
from perf.harness.recording import Recording, free_memory
from perf.harness.rounds import Rounds, batch_config, measure_rounds
from perf.harness.scenario import Scenario, Text
from perf.harness.shapes import Draft, MaskDraft, Model, prepare, prepare_drafts
from perf.harness.speculative_options import arguments_of
from perf.harness.startup_process import gpu_memory_gib
from perf.harness.table import show, speculative_table
from perf.peers import vllm
from perf.policy_sweep import ACCEPTANCE_LENGTHS, draw, policy_table
from perf.policy_sweep import SCENARIOS as SWEPT_SCENARIOS

__all__ = ["SpeculativeRun", "main", "measure"]


class SpeculativeRun(DecodeRun, kw_only=True):
    """Decoding with drafts, or without drafts for comparison.

    acceptance_length:                           tokens per round to simulate, or the measured ones if
                                                 acceptance is real.
    measured_acceptance_length:                  tokens per round and sequence.
    mean_drafts:                                 tokens drafted per round and sequence.
    limit_tokens_per_s:                          tokens of a round over the time to read its bytes.
    limit_fraction:                              tokens/s over `limit_tokens_per_s`.
    several_share:                               share of the rounds of a sequence with two or more tokens.
    accepted_at:                                 share of the rounds with drafts in which draft i and all
                                                 before it were accepted.
    num_active, num_active_min, num_active_max:  sequences that got tokens in a step: mean, least, most.
    is_adaptive:                                 whether the policy chose the number of drafts, up to
                                                 `num_draft_tokens`.
    speedup:                                     over plain decoding in the same run.
    efficiency:                                  speedup over measured acceptance length.
    gpu_memory_gib:                              memory in use on the GPU afterwards, of all processes.
    text:                                        the file that prompts were taken from, of runs without random
                                                 prompts.
    is_traced:                                   whether recorded rounds were simulated, and not a mean.
    """

    measured_acceptance_length: float
    mean_drafts: float
    limit_tokens_per_s: float
    limit_fraction: float
    several_share: float
    accepted_at: tuple[float, ...]
    num_active: float
    num_active_min: int
    num_active_max: int
    draft: str | None = None
    is_adaptive: bool = False
    speedup: float | None = None
    efficiency: float | None = None
    gpu_memory_gib: float | None = None
    text: str | UnsetType = UNSET
    is_traced: bool | UnsetType = UNSET


async def measure(
    model: Model,
    draftings: Sequence[Drafting],
    scenarios: Sequence[Scenario],
    options: DecodeOptions,
    bandwidth_tb_s: float,
    on_run: Callable[[Run], None] = lambda run: None,
) -> list[SpeculativeRun]:
    """Measure all scenarios, first without drafts, then with each of the draftings, each on a new engine.

    `on_run` is called with each run as soon as it has ended.
    """
    config = batch_config(model, scenarios, options)
    runs: list[SpeculativeRun] = []
    plain: dict[str, float] = {}
    for drafting in (None, *draftings):
        if drafting is None:
            engine = recorded_engine(model.path, config)
        else:
            engine = drafting.engine(model, config)
        async with engine:
            for scenario in scenarios:
                rounds = await measure_rounds(engine, scenario, model.spec.vocab_size, options)
                num_drafts = 0 if drafting is None else drafting.num_draft_tokens
                num_experts = await measured_experts(engine, model, scenario, options, num_drafts)
                run = run_of(
                    rounds, model, drafting, scenario, options, bandwidth_tb_s, engine.executor, num_experts
                )
                run.slow_paths = slow_paths(engine.stats())
                if drafting is None:
                    plain[scenario.name] = rounds.tokens_per_s(scenario.batch)
                else:
                    run.speedup = rounds.tokens_per_s(scenario.batch) / plain[scenario.name]
                    run.efficiency = run.speedup / rounds.acceptance_length
                runs.append(run)
                on_run(run)

        free_memory()

    return runs


def run_of(
    rounds: Rounds,
    model: Model,
    drafting: Drafting | None,
    scenario: Scenario,
    options: DecodeOptions,
    bandwidth_tb_s: float,
    executor: str,
    num_experts: float | None,
) -> SpeculativeRun:
    """The run of these rounds, without its speedup and efficiency.

    drafting: None for plain decoding. num_experts: of a layer, as measured; None: as if routing were spread.
    """
    if num_experts is None:
        num_experts = model.spread_experts(round(scenario.batch * (rounds.mean_drafts + 1)))
    context = scenario.mean_context(options.lengths)
    num_bytes = model.decode_bytes(scenario.batch, context, options.itemsize, num_experts)
    num_bytes /= options.tensor_parallel  # each GPU has the whole draft
    fields: dict[str, Any] = {"num_experts": num_experts} if model.spec.experts is not None else {}
    if options.compares_gpus:
        fields["num_gpus"] = options.tensor_parallel
    if drafting is not None:
        num_bytes += drafting.round_bytes(rounds.mean_drafts, scenario, options)
        fields |= {
            "draft": drafting.name,
            "is_adaptive": drafting.is_adaptive,
            "num_draft_tokens": drafting.num_draft_tokens,
            "acceptance": drafting.acceptance,
            "acceptance_length": drafting.simulated_length or rounds.acceptance_length,
        }

    limit = rounds.acceptance_length * scenario.batch * bandwidth_tb_s * 1e12 / num_bytes
    return SpeculativeRun.of_rounds(
        rounds.step_seconds,
        num_bytes,
        bandwidth_tb_s,
        tokens_per_round=rounds.tokens_per_step,
        engine="drift",
        executor=executor,
        model=model.name,
        dtype=model.dtype_name or options.dtype_name,
        scenario=scenario,
        measured_acceptance_length=rounds.acceptance_length,
        mean_drafts=rounds.mean_drafts,
        limit_tokens_per_s=limit,
        limit_fraction=rounds.tokens_per_s(scenario.batch) / limit,
        several_share=rounds.several_share,
        accepted_at=rounds.accepted_at,
        num_active=statistics.mean(rounds.num_active),
        num_active_min=min(rounds.num_active),
        num_active_max=max(rounds.num_active),
        gpu_memory_gib=gpu_memory_gib(options.device),
        text=UNSET if options.text is None else options.text.name,
        is_traced=drafting is not None and drafting.trace is not None or UNSET,
        **fields,
    )


def measure_peer(
    model: Model,
    draftings: Sequence[Drafting],
    scenarios: Sequence[Scenario],
    options: DecodeOptions,
    recording: Recording,
) -> None:
    """Record vLLM without drafts, then with each of the draftings, which are simulated."""
    bandwidth_tb_s = recording.bandwidth_tb_s
    num_gpus = options.tensor_parallel if options.compares_gpus else 0
    for run in vllm.measure(model, scenarios, options.repeats, bandwidth_tb_s, num_gpus=num_gpus):
        recording.add(run)
    for drafting in draftings:
        length = drafting.simulated_length
        assert isinstance(drafting.draft, Draft | MtpDraft) and length is not None
        for run in vllm.measure_drafts(
            model,
            drafting.draft,
            scenarios,
            options.repeats,
            bandwidth_tb_s,
            num_draft_tokens=drafting.num_draft_tokens,
            acceptance_length=length,
            num_gpus=num_gpus,
        ):
            recording.add(run)


def read_text(model: Model, file: Path | None) -> Text | None:
    """The text of a UTF-8 file as a model's tokens. Raises SystemExit for another file."""
    if file is None:
        return None

    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        sys.exit(f"--text {file}: expected UTF-8: {error}")
    return Text(file.name, tuple(resolve(model.path).tokenizer().encode(content)))


def draftings_of(given: argparse.Namespace, model: Model) -> list[Drafting]:
    """The drafts to measure."""
    draft: Draft | MaskDraft | Model | MtpDraft | Assistant | NGram
    if given.draft == MTP:
        draft = MtpDraft(model=model, weights=given.draft_weights)
    elif given.draft == ASSISTANT:
        draft = Assistant.prepare(model, given.draft_weights)
    else:
        draft = prepare_drafts(model, given.draft, given.draft_weights, given.aux_layer_convention)
    return [
        Drafting(
            draft=draft,
            ngrams=ngrams,
            num_draft_tokens=number,
            acceptance_length=length,
            is_adaptive=given.policy_sweep,
            trace=given.trace,
        )
        for number in given.num_draft_tokens
        if number > 0
        for ngrams in ((None, NGram()) if given.ngrams else (None,))
        for length in (ACCEPTANCE_LENGTHS if given.policy_sweep else given.acceptance_length or (None,))
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    given = arguments_of(arguments, __doc__)
    topic = "tensor-parallel-speculative" if given.tensor_parallel else "speculative"
    if given.policy_sweep:
        topic = "policy"
    recording = Recording(topic, given.device, given.out)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder) / Path(given.model).name, given.weights, given.kv_dtype)
        options = DecodeOptions(
            device=given.device,
            dtype=given.dtype,
            executor=given.executor,
            strict_performance=given.strict_performance,
            compares_gpus=bool(given.tensor_parallel),
            tuning=given.tuning,
            repeats=given.repeats,
            text=read_text(model, given.text),
        )
        scenarios = SWEPT_SCENARIOS if given.policy_sweep else given.scenario
        draftings = draftings_of(given, model)
        for num_gpus in given.tensor_parallel or (1,):
            options = replace(options, tensor_parallel=num_gpus)
            measuring = measure(model, draftings, scenarios, options, recording.bandwidth_tb_s, recording.add)
            asyncio.run(measuring)
        if given.peer:
            measure_peer(model, draftings, scenarios, options, recording)

    show(*(policy_table if given.policy_sweep else speculative_table)(recording.results))
    print(f"written to {recording.path}")
    if given.policy_sweep and find_spec("matplotlib") is not None:
        draw(recording.results, recording.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
