"""Cases of kernels to time: their bytes and operations, and the output of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from drift_sdk._kernels.attention import latent
from drift_sdk._kernels.attention.decode import AttentionConfig
from drift_sdk._kernels.experts.cuda_experts import CudaTiles, RingTiles, WideTiles
from drift_sdk._kernels.experts.expert_gemm import ExpertGemmConfig
from drift_sdk._kernels.gemm.tuning import TunedTable, table_for
from drift_sdk.execution.forward.kernel_weights import KernelWeight, arrange_matrix
from drift_sdk.quantised.formats import E4M3
from drift_sdk.spec.model import Names
from perf.cases import ngrams
from perf.cases.attention import attention_cases, chunk_case, decode_case, prefill_case
from perf.cases.case import Case, Prepared
from perf.cases.experts import DOWN, GATE_UP, expert_cases
from perf.cases.gemm import gemm_cases, weight_shapes
from perf.cases.latent import chunk_case as latent_chunk_case
from perf.cases.latent import decode_case as latent_decode_case
from perf.cases.latent import expanded_case, latent_cases, product_case
from perf.cases.quantised import FORMS, Form, quantised_cases
from perf.cases.quantised_experts import quantised_expert_cases
from perf.cases.rows import norm_cases, rope_cases, sampling_cases
from perf.cases.trees import choice_case, rewind_case
from perf.harness.shapes import prepare
from perf.kernel_speed import KernelRun, cases_of, limit_us, main, measure
from perf.tune_experts import candidates, measure_tiles


def test_published_shapes_have_tuned_entries(tmp_path: Path) -> None:
    weights = weight_shapes(prepare("llama-3.1-8b", tmp_path))
    assert [str(weight) for weight in weights] == [
        "6144x4096", "4096x4096", "28672x4096 gated", "4096x14336", "128256x4096",
    ]  # fmt: skip
    table = table_for("nvidia-h200")
    assert all(str(weight) in table.gemms for weight in weights)


@pytest.mark.kernel
def test_both_kernels_of_a_product_case_fill_the_output(tmp_path: Path) -> None:
    cases = list(gemm_cases(prepare("tiny", tmp_path), (3,), TunedTable(), "cpu"))
    assert [case.kernel for case in cases] == ["gemm", "cublas"] * 5
    for case in cases[:6]:
        prepared = case.prepare()
        for output in prepared.outputs:
            output.fill_(torch.nan)
        prepared.step()
        assert prepared.num_calls >= 2
        assert all(output.isfinite().all() for output in prepared.outputs)


def test_cases_of_latents_have_their_bytes_and_operations(tmp_path: Path) -> None:
    table = TunedTable()
    assert not list(latent_cases(prepare("tiny", tmp_path), (1,), table, "cpu"))
    model = prepare("glm-4.7-flash", tmp_path)
    for suite in (attention_cases, rope_cases):
        assert not list(suite(model, (1,), table, "cpu"))
    weights = ["1344x2048", "5120x768", "2048x5120", "64x2048", "154880x2048"]
    assert [str(weight) for weight in weight_shapes(model)] == weights
    cases = {
        (case.kernel, case.shape, case.num_rows): case for case in latent_cases(model, (1,), table, "cpu")
    }
    long = cases["latent attention", "batch 64, 32768 keys", 64]
    assert long.num_flops == 64 * 32_768 * 20 * 2 * (576 + 512)
    assert long.num_bytes == 64 * (32_768 * 1152 + 20 * 2 * (576 + 512))
    assert cases["product of heads", "20 x 512 x 192", 1].num_bytes == 2 * 20 * (512 * 192 + 512 + 192)


@pytest.mark.kernel
def test_cases_of_latents_fill_their_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter multiplies float32 only.
    monkeypatch.setattr("perf.cases.latent.torch.bfloat16", torch.float32)
    limits = replace(latent.gpu_limits(), num_multiprocessors=4)
    monkeypatch.setattr(latent, "gpu_limits", lambda: limits)
    spec = replace(prepare("glm-4.7-flash", tmp_path).spec.attention, num_heads=2, latent_dim=16)
    for case in (
        latent_decode_case(spec, 70, 2, 2, "cpu"),
        latent_chunk_case(spec, 60, 10, "cpu"),
        expanded_case(spec, 60, 10, "cpu"),
        product_case(2, 16, 24, 3, "cpu"),
    ):
        prepared = case.prepare()
        for output in prepared.outputs:
            output.fill_(torch.nan)
        prepared.step()
        assert prepared.num_calls >= 2 and all(output.isfinite().all() for output in prepared.outputs)


@pytest.mark.kernel
def test_each_slot_of_an_ngram_case_finds_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "CONTEXTS", (64,))
    monkeypatch.setattr(ngrams, "BATCHES", (2,))
    tokens: list[torch.Tensor] = []
    propose = ngrams.propose_ngrams

    def noting(
        slot: torch.Tensor, position: torch.Tensor, token: torch.Tensor, *rest: Any, **options: Any
    ) -> None:
        propose(slot, position, token, *rest, **options)
        tokens.append(torch.where(slot >= 0, token, -1).view(2, -1))

    monkeypatch.setattr(ngrams, "propose_ngrams", noting)
    monkeypatch.setattr(ngrams, "num_copies", lambda num_bytes: 2)
    cases = list(ngrams.ngram_cases(prepare("tiny", tmp_path), (), TunedTable(), "cpu"))
    assert [case.num_bytes for case in cases] == [2 * 64 * 4] * 2
    for case in cases:
        case.prepare().step()
    assert len(tokens) == 4 and all(bool((each >= 0).all()) for each in tokens)


def test_product_cases_count_bytes_and_operations(tmp_path: Path) -> None:
    case = next(gemm_cases(prepare("tiny", tmp_path), (3,), TunedTable(), "cpu"))
    columns, inner = (4 + 2 * 2) * 16, 64
    assert case.shape == f"{columns}x{inner}"
    assert case.num_bytes == 2 * (columns * inner + 3 * inner)
    assert case.num_flops == 2 * 3 * columns * inner


def case_of(output: torch.Tensor, num_bytes: float = 4e6, num_flops: float = 1e9) -> Case:
    def step() -> None:
        output[:2].fill_(1.0)

    return Case(
        kernel="copy",
        shape="4",
        num_rows=1,
        num_bytes=num_bytes,
        num_flops=num_flops,
        prepare=lambda: Prepared(step, 4, (output,)),
    )


def test_limit_is_the_longer_of_bytes_and_operations() -> None:
    output = torch.empty(4)
    assert limit_us(case_of(output), bandwidth_tb_s=4.0, peak_tflop_s=1000.0) == 1.0
    assert limit_us(case_of(output, num_flops=3e9), bandwidth_tb_s=4.0, peak_tflop_s=1000.0) == 3.0


def test_unwritten_output_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.kernel_speed.time_us", lambda step, num_calls: 2.0)
    with pytest.raises(RuntimeError, match="not finite"):
        measure(case_of(torch.empty(4)), "tiny", 4.0, 1000.0)
    run = measure(case_of(torch.empty(2)), "tiny", 4.0, 1000.0)
    assert (run.us, run.limit_us, run.roofline_fraction, run.tb_s) == (2.0, 1.0, 0.5, 2.0)


def test_products_of_the_library_can_be_left_out(tmp_path: Path) -> None:
    model = prepare("tiny", tmp_path)
    given = ("gemm", model, (3,), TunedTable(), "cpu")
    assert [case.kernel for case in cases_of(*given, has_library=True)] == ["gemm", "cublas"] * 5
    assert [case.kernel for case in cases_of(*given, has_library=False)] == ["gemm"] * 5


def test_kernels_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "expected a GPU" in capsys.readouterr().err


def filled(case: Case) -> Prepared:
    prepared = case.prepare()
    for output in prepared.outputs:
        output.fill_(torch.nan)
    prepared.step()
    assert prepared.num_calls >= 2
    assert all(output.isfinite().all() for output in prepared.outputs)
    return prepared


@pytest.mark.kernel
def test_attention_cases_fill_their_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.cases.case.MAX_COPIES", 2)
    monkeypatch.setattr("perf.cases.attention.attention_config", lambda *_: AttentionConfig(num_programs=4))
    # The interpreter multiplies bfloat16 as if its bits were integers: other queries have scores of any size.
    monkeypatch.setattr(torch, "randn", torch.zeros)
    spec = prepare("tiny", tmp_path).spec.attention
    for case in (
        decode_case(spec, (150, 70), 1, "cpu"),
        decode_case(spec, (70,), 4, "cpu", E4M3),
        decode_case(spec, (200,) * 5, 1, "cpu", num_shared=128),
    ):
        filled(case)
    filled(prefill_case(spec, 100, "cpu", E4M3))
    filled(chunk_case(spec, 70, 30, "cpu"))


def test_attention_cases_count_bytes_read(tmp_path: Path) -> None:
    spec = prepare("tiny", tmp_path).spec.attention
    one, four = (decode_case(spec, (1000,) * 3, rows, "cpu") for rows in (1, 4))
    kv = 3 * 1000 * 2 * 2 * 16 * 2  # sequences, keys, keys and values, heads, head_dim, bytes
    assert one.num_bytes == kv + 3 * 2 * 4 * 16 * 2
    assert four.num_bytes - kv == 4 * (one.num_bytes - kv)
    shared = decode_case(spec, (1000,) * 5, 1, "cpu", num_shared=128)
    assert shared.num_bytes == (5 * 1000 - 3 * 128) * 2 * 2 * 16 * 2 + 5 * 2 * 4 * 16 * 2
    assert four.num_flops == 4 * one.num_flops == 4 * 3 * 1000 * 4 * 4 * 16
    prompt = prefill_case(spec, 1000, "cpu")
    assert prompt.num_flops == 1000 * decode_case(spec, (500,), 1, "cpu").num_flops
    chunk, rest = chunk_case(spec, 600, 400, "cpu"), prefill_case(spec, 600, "cpu")
    assert chunk.num_flops == prompt.num_flops - rest.num_flops
    assert chunk.num_bytes == prompt.num_bytes - 600 * 2 * 4 * 16 * 2


KERNELS_OF_FP8 = ("attention, fp8 KV", "prefill attention, fp8 KV")


def test_attention_cases_cover_all_contexts_and_batches(tmp_path: Path) -> None:
    cases = list(attention_cases(prepare("llama-3.1-8b", tmp_path), (1,), TunedTable(), "cpu"))
    assert len(cases) == 2 * (3 * 4 * 2 + 2 + 2 + 4 + 1)
    assert sum(case.shape.endswith(", 100 to 3200 keys") for case in cases) == 2 * 2
    for names, size in ((("attention", "prefill attention"), 4096), (KERNELS_OF_FP8, 2048)):
        long = next(
            case
            for case in cases
            if case.kernel == names[0] and case.shape == "batch 1, 32768 keys" and case.num_rows == 1
        )
        assert long.num_bytes == pytest.approx(32_768 * size, rel=1e-3)
        assert names[1] in {case.kernel for case in cases}


@pytest.mark.kernel
def test_quantised_cases_fill_their_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.cases.case.MAX_COPIES", 2)
    cases = list(quantised_cases(prepare("tiny", tmp_path), (3,), TunedTable(), "cpu"))
    # The inner dimension of the down projection, 96, is no multiple of 64, and none is one of 256.
    names = ("fp8", "int4", "nvfp4", "Q4_0", "Q4_1", "Q8_0", "Q5_1")
    assert [case.kernel for case in cases] == [name for name in names for _ in range(3)]
    for case in cases[2::3]:
        filled(case)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_bytes_of_forms_are_those_of_the_arranged_weights(form: Form) -> None:
    arranged = arrange_matrix(form.draw(64, 512, torch.float32, "cpu"), torch.float32)
    assert isinstance(arranged, KernelWeight)
    assert form.num_bytes(64, 512) == pytest.approx(arranged.nbytes, rel=0.02)


def test_quantised_cases_count_bytes_of_codes_and_scales(tmp_path: Path) -> None:
    columns, inner = (4 + 2 * 2) * 16, 64
    cases = list(quantised_cases(prepare("tiny", tmp_path), (3,), TunedTable(), "cpu"))
    assert cases[0].num_bytes == columns * inner + 4 * columns + 3 * inner * 2
    assert cases[3].num_bytes == columns * inner / 2 + 2 * columns + 3 * inner * 2


@pytest.mark.kernel
@pytest.mark.parametrize("cases", [norm_cases, rope_cases, sampling_cases])
def test_row_cases_fill_their_output(
    cases: Callable[..., Iterator[Case]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perf.cases.case.MAX_COPIES", 2)
    found = list(cases(prepare("tiny", tmp_path), (3,), TunedTable(), "cpu"))
    assert found and all(case.num_rows == 3 and case.num_bytes > 3 * 64 * 4 for case in found)
    for case in found:
        filled(case)


@pytest.mark.kernel
def test_expert_cases_fill_their_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter multiplies float32 only.
    monkeypatch.setattr("perf.cases.experts.torch.bfloat16", torch.float32)
    monkeypatch.setattr("perf.cases.experts.NUM_ROUTES", 2)
    model = prepare("tiny-experts", tmp_path)
    found = list(expert_cases(model, (3,), TunedTable(), "cpu"))
    assert [case.kernel for case in found] == ["choose experts", "list rows", GATE_UP, DOWN]
    assert found[2].num_bytes == pytest.approx(model.spread_experts(3) * 192 * 64 * (0.5 + 1 / 32))
    for case in found:
        prepared = case.prepare()
        prepared.step()
        assert prepared.num_calls == 2
        assert all(output.isfinite().all() for output in prepared.outputs)


@pytest.mark.kernel
def test_quantised_expert_cases_fill_their_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter multiplies float32 only.
    monkeypatch.setattr("perf.cases.experts.torch.bfloat16", torch.float32)
    monkeypatch.setattr("perf.cases.experts.NUM_ROUTES", 2)
    model = prepare("tiny-experts", tmp_path)
    assert not list(quantised_expert_cases(model, (3,), TunedTable(), "cpu"))  # in MXFP4
    assert model.spec.experts is not None
    experts = replace(model.spec.experts, intermediate_size=64)
    layers = tuple(replace(layer, channel=experts) for layer in model.spec.layers)
    model = replace(model, spec=replace(model.spec, layers=layers, names=Names()))
    found = list(quantised_expert_cases(model, (3,), TunedTable(), "cpu"))
    names = ("fp8", "int4", "nvfp4", "Q4_0", "Q4_1", "Q8_0", "Q5_1")
    assert [case.kernel for case in found] == [
        f"{name} {kernel}" for name in names for kernel in (GATE_UP, DOWN)
    ]
    assert found[0].num_bytes == pytest.approx(model.spread_experts(3) * (128 * 64 + 4 * 128))
    for case in found[:6]:
        prepared = filled(case)
        assert prepared.num_calls == 2


def test_candidates_for_experts_begin_with_the_engines_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perf.harness.shapes.write_tokenizer", lambda folder, vocab_size: None)
    dense, quantised = (prepare(name, tmp_path / name) for name in ("qwen3-30b-a3b", "gpt-oss-120b"))
    for model, few, many in (
        (dense, {ExpertGemmConfig}, {ExpertGemmConfig}),
        (quantised, {CudaTiles, RingTiles}, {CudaTiles, RingTiles, WideTiles}),
    ):
        for num_rows, expected in ((8, few), (512, many)):
            own, *others = candidates(model, num_rows)
            assert own is None and len(set(others)) == len(others) >= 5
            assert {type(tiles) for tiles in others} == expected


def test_tiles_are_recorded_with_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that do not fit the GPU are left out."""
    from triton.runtime.errors import OutOfResources

    def timed(case: Case, model: str, bandwidth: float, peak: float, dtype: str) -> KernelRun:
        prepare: Any = case.prepare  # a partial of a function
        if prepare.keywords or prepare.args[-1] == CudaTiles(row_tiles=4):
            raise OutOfResources(1, 2, "shared memory")
        monkeypatch.setattr("perf.kernel_speed.time_us", lambda step, num_calls: 2.0)
        one = measure(case_of(torch.empty(2)), model, bandwidth, peak, dtype)
        return replace(one, kernel=case.kernel, num_rows=case.num_rows)

    monkeypatch.setattr("perf.tune_experts.measure", timed)
    model = prepare("tiny-experts", tmp_path)
    runs = list(measure_tiles(model, 3, (None, CudaTiles(), CudaTiles(row_tiles=4)), 4.0, 1000.0))
    assert [(run.kernel, run.config) for run in runs] == [
        (GATE_UP, "own"), (GATE_UP, str(CudaTiles())), (DOWN, "own"), (DOWN, str(CudaTiles())),
    ]  # fmt: skip
    assert {(run.dtype, run.num_rows, run.us) for run in runs} == {("mxfp4", 3, 2.0)}


@pytest.mark.kernel
def test_tree_cases_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.cases.case.MAX_COPIES", 2)
    monkeypatch.setattr("perf.cases.trees.DRAFT_VOCAB_SIZE", 1500)
    spec = prepare("tiny", tmp_path).spec
    assert filled(choice_case(2, 3, "cpu")).outputs
    prepared = rewind_case(spec, 2, 8, "cpu").prepare()
    prepared.step()
    assert prepared.num_calls == 2
