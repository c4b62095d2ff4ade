"""Stages of a round: limits compared with values computed by hand, and a run on an executor of the CPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from msgspec import to_builtins

from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits
from perf.harness.active_rounds import ACTIVE_COLUMNS, active_table, measure_by_active
from perf.harness.decoding import DecodeOptions, engine_config
from perf.harness.drafting import Drafting
from perf.harness.driven import Driven
from perf.harness.scenario import Scenario
from perf.harness.shapes import Model, prepare, prepare_draft
from perf.harness.stage_work import Work, stage_work
from perf.stages import STAGE_COLUMNS, main, measure_stages, stage_table

SCENARIO = Scenario.parse("batch3-20")


@pytest.fixture
def tiny(tmp_path: Path) -> Model:
    return prepare("tiny", tmp_path / "tiny")


@pytest.fixture
def executor(tiny: Model) -> EagerExecutor:
    decoder = Decoder.random(tiny.spec, device=torch.device("cpu"), dtype=torch.float32)
    limits = ExecutorLimits(
        max_num_seqs=3, max_model_len=128, num_blocks=40, block_size=16, vocab_size=tiny.spec.vocab_size
    )
    return EagerExecutor(decoder, limits)


def driven(model: Model, drafting: Drafting | None = None) -> Driven:
    options = DecodeOptions(device="cpu", lengths=(0, 64))
    return Driven(
        model=model,
        drafting=drafting,
        config=engine_config(model, [SCENARIO], options),
        options=options,
        bandwidth_tb_s=0.01,
        peak_tflop_s=0.1,
    )


def test_bytes_of_all_stages_add_up_to_those_of_the_round(tmp_path: Path) -> None:
    model = prepare("llama-3.1-8b", tmp_path / "llama-3.1-8b")
    draft = prepare_draft(model)
    work = stage_work(model, draft, num_drafts=3, batch=4, mean_context=16_384, itemsize=2)
    assert set(work) == {
        "verify", "accept", "commit", "draft_lm_head", "draft_attention", "draft_mlp", "draft_extend",
    }  # fmt: skip
    assert work["verify"].num_bytes == model.decode_bytes(4, 16_384, 2)
    drafted = sum(one.num_bytes for name, one in work.items() if name.startswith("draft_"))
    features = 2 * 16 * 3 * 4096
    assert drafted == draft.round_bytes(3, 4, 16_384, 2) + features
    assert work["accept"].num_bytes == 4 * 16 * 128_256
    assert work["draft_mlp"].num_bytes == 2 * 2 * 3 * 4096 * 14_336
    plain = stage_work(model, None, num_drafts=0, batch=4, mean_context=16_384, itemsize=2)
    assert set(plain) == {"base_decode", "accept", "commit"}
    assert plain["base_decode"].num_flops * 4 == work["verify"].num_flops


def test_limit_of_stage_work_is_the_longer_of_bytes_and_operations() -> None:
    assert Work(4e9, 1e12).limit_s(4.0, 500.0) == 2e-3
    assert Work(4e6, 1e12).limit_s(4.0, 500.0) == 2e-3


def test_stages_of_plain_rounds_are_measured(tiny: Model, executor: EagerExecutor) -> None:
    seconds = {"base_decode": 3e-6, "accept": 2e-6}
    runs = list(measure_stages(driven(tiny), executor, lambda: seconds, SCENARIO, num_rounds=4))
    assert [run.stage for run in runs] == ["base_decode", "accept", "round"]
    forward, accept, whole = runs
    assert forward.ms_per_round == pytest.approx(3e-3) and accept.ms_per_round == pytest.approx(2e-3)
    assert forward.num_bytes == tiny.decode_bytes(3, 20 + 3 + 2, 4)
    assert forward.roofline_fraction == pytest.approx(forward.limit_ms / 3e-3)
    assert whole.num_bytes == forward.num_bytes + accept.num_bytes
    assert whole.idle_share == pytest.approx(1 - forward.share - accept.share)
    assert whole.share == 1 and whole.measured_acceptance_length == 1
    assert whole.tokens_per_s == pytest.approx(3 / whole.ms_per_round * 1e3)
    assert [len(row) for row in stage_table([to_builtins(run) for run in runs])] == [len(STAGE_COLUMNS)] * 3


@pytest.mark.parametrize("has_ended_rows", [False, True])
def test_rounds_are_grouped_by_active_sequences(
    has_ended_rows: bool, tiny: Model, executor: EagerExecutor
) -> None:
    tiles = itertools.count(100)
    runs = list(
        measure_by_active(
            driven(tiny), executor, lambda: next(tiles), SCENARIO, 5, has_ended_rows=has_ended_rows
        )
    )
    assert [run.active_sequences for run in runs] == [3, 2, 1]
    assert [run.num_rounds for run in runs] == [5 - 3, 5, 5]
    assert [run.num_tiles for run in runs] == [100.5, 104, 109]
    assert all(run.ms_per_round > 0 and run.has_ended_rows == has_ended_rows for run in runs)
    assert [len(row) for row in active_table([to_builtins(run) for run in runs])] == [len(ACTIVE_COLUMNS)] * 3
    last = runs[-1]
    assert last.tile_bytes == 109 * 64 * tiny.num_cached_per_token * 4
    assert last.bytes_per_round > tiny.decode_bytes(1, 20 + 10, 4)


def test_drafted_run_is_recorded_as_drafted(tmp_path: Path, tiny: Model) -> None:
    drafting = Drafting(draft=prepare_draft(tiny), num_draft_tokens=2, acceptance_length=9.0)
    fields = driven(tiny, drafting).fields(SCENARIO)
    assert (fields["num_draft_tokens"], fields["acceptance_length"]) == (2, 3.0)
    assert (fields["acceptance"], fields["draft"]) == ("simulated", "tiny-eagle3")


def test_stages_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "expected a GPU" in capsys.readouterr().err
