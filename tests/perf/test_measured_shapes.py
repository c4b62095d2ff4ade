"""Bytes and operations of a step, and the models and prompts that are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec import structs

from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.allocation import WeightForm
from drift_sdk.models.channels import ExpertWeights, MlpWeights, QuantisedMatrices
from drift_sdk.models.decoder import Decoder, random_tensors
from drift_sdk.models.dflash import DFlashConfig, DFlashDecoder
from drift_sdk.models.draft_head import required_shapes, shareable_shapes
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.models.weights import LayerWeights, weight_bytes
from drift_sdk.quantised.weight import Matrix
from drift_sdk.spec.model import Names
from perf.harness.bandwidth import matmul_tflop_s, read_bandwidth_tb_s
from perf.harness.published import LLAMA, PUBLISHED
from perf.harness.scenario import SCENARIOS, Scenario
from perf.harness.shapes import Draft, MaskDraft, dflash_settings, prepare, prepare_draft, prepare_drafts


def tensors_of(layers: Iterable[LayerWeights]) -> Iterator[Matrix]:
    """The weights of layers that have MLPs."""
    for layer in layers:
        for part in (layer, layer.mixer, layer.channel):
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                if value is not None and not isinstance(value, AttentionWeights | MlpWeights):
                    yield value


def test_bytes_equal_the_size_of_the_tensors_that_a_step_reads(tmp_path: Path) -> None:
    model = prepare("tiny", tmp_path)
    weights = Decoder.random(model.spec, device=torch.device("cpu"), dtype=torch.bfloat16).weights
    num_bytes = sum(
        tensor.nbytes for tensor in (*tensors_of(weights.layers), weights.final_norm, weights.head)
    )
    assert model.decode_bytes(0, 0, 2) == num_bytes
    kv_of_a_token = 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, head_dim, bytes
    assert model.decode_bytes(3, 10.5, 2) == num_bytes + 3 * 10.5 * kv_of_a_token


@pytest.mark.parametrize(
    "name, tokens_per_s", [("single-512", 286), ("single-32k", 223), ("batch4-16k", 729)]
)
def test_limits_of_the_published_shapes(name: str, tokens_per_s: float, tmp_path: Path) -> None:
    """The expected speeds are computed by hand for reads at 4.3 TB/s."""
    model, scenario = prepare("llama-3.1-8b", tmp_path), Scenario.parse(name)
    seconds = model.decode_bytes(scenario.batch, scenario.mean_context(), 2) / 4.3e12
    assert scenario.batch / seconds == pytest.approx(tokens_per_s, rel=0.005)


EXPERT_LIMITS = {
    ("gpt-oss-120b", "single-512"): (860, 909),
    ("qwen3-30b-a3b", "single-512"): (699, None),
}


@pytest.mark.parametrize("name, scenario", EXPERT_LIMITS, ids=str)
def test_limits_of_models_with_experts(
    name: str, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads at 4.3 TB/s, routing that is spread; with three drafts and 2.56 tokens a round."""
    monkeypatch.setattr("perf.harness.shapes.write_tokenizer", lambda folder, vocab_size: None)
    model, found = prepare(name, tmp_path / name), Scenario.parse(scenario)
    plain, drafted = EXPERT_LIMITS[name, scenario]
    context = found.mean_context()
    assert 4.3e12 / model.decode_bytes(1, context, 2) == pytest.approx(plain, rel=0.01)
    if drafted is not None:
        num_bytes = model.decode_bytes(1, context, 2, model.spread_experts(4))
        num_bytes += prepare_draft(model).round_bytes(3, 1, context, 2)
        assert 2.56 * 4.3e12 / num_bytes == pytest.approx(drafted, rel=0.01)


def test_bytes_of_experts_are_those_of_their_tensors(tmp_path: Path) -> None:
    model = prepare("tiny-experts", tmp_path)
    weights = Decoder.random(model.spec, device=torch.device("cpu"), dtype=torch.bfloat16).weights
    experts = weights.layers[0].channel
    assert isinstance(experts, ExpertWeights)
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, QuantisedMatrices) and isinstance(down, QuantisedMatrices)
    assert experts.gate_up_bias is not None and experts.down_bias is not None
    tensors = (gate_up.blocks, gate_up.scales, experts.gate_up_bias)
    tensors += (down.blocks, down.scales, experts.down_bias)
    num_bytes = sum(tensor[0].nbytes for tensor in tensors)
    assert model.expert_bytes(2) == num_bytes
    assert model.decode_bytes(1, 0, 2, 3.0) - model.decode_bytes(1, 0, 2, 0.0) == 3 * 4 * num_bytes
    assert model.spread_experts(1) == 2
    assert model.spread_experts(2) == pytest.approx(2 + 2 * 6 / 8)
    assert model.spread_experts(10_000) == 8


def test_keys_outside_a_window_are_not_counted(tmp_path: Path) -> None:
    model = prepare("tiny-experts", tmp_path)
    kv_of_a_token = 2 * 2 * 16 * 2  # keys and values, heads, head_dim, bytes
    assert model.kv_bytes(20, 2) == 4 * 20 * kv_of_a_token
    assert model.kv_bytes(100, 2) == (2 * 32 + 2 * 100) * kv_of_a_token


def test_operations_of_a_prompt(tmp_path: Path) -> None:
    model = prepare("llama-3.1-8b", tmp_path)
    spec = model.spec
    one = model.prefill_flops(1)
    assert one == pytest.approx(2 * model.num_read_parameters, rel=1e-4)
    layers = 2 * 8192 * (8_030_261_248 - 2 * 128_256 * 4096)
    attention = 2 * 2 * spec.num_layers * spec.attention.num_heads * spec.attention.head_dim * 8192 * 8192 / 2
    assert model.prefill_flops(8192) == pytest.approx(layers + attention, rel=1e-3)


def test_8b_shapes_have_the_published_number_of_parameters(tmp_path: Path) -> None:
    model = prepare("llama-3.1-8b", tmp_path)
    assert model.num_read_parameters + 128_256 * 4096 == 8_030_261_248
    assert model.spec.ropes[0].scaling is not None


def test_byte_tokenizer_fills_the_vocabulary(tmp_path: Path) -> None:
    prepare("tiny", tmp_path)
    tokenizer = resolve(tmp_path).tokenizer()
    assert tokenizer.vocab_size == 320
    text = "Any text, any bytes: äöü €\n"
    token_ids = tokenizer.encode(text)
    assert len(token_ids) < len(text.encode())  # artificial words of one letter are merged
    assert tokenizer.decode(token_ids) == text


def test_unknown_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="llama-4"):
        prepare("llama-4", tmp_path)


def test_scenarios_are_parsed() -> None:
    assert [(s.batch, s.context) for s in SCENARIOS] == [
        (1, 512),
        (1, 32_768),
        (4, 16_384),
        (8, 512),
        (64, 512),
    ]
    assert Scenario.parse("batch3-2k").mean_context() == 2048 + 136
    for name in ("batch-512", "single", "batch0-512", "single-16K", "batch4-0"):
        with pytest.raises(ValueError, match=name):
            Scenario.parse(name)


def test_prompts_differ_between_sequences_and_repeat_between_calls() -> None:
    scenario = Scenario.parse("batch4-64")
    prompts = scenario.prompts(320)
    assert prompts == scenario.prompts(320)
    assert [len(prompt) for prompt in prompts] == [64] * 4
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 4
    assert all(2 <= token < 320 for prompt in prompts for token in prompt)


def test_measured_speeds_of_the_machine_are_plausible() -> None:
    """Units that are wrong by a factor of 1,000 are found on all but the slowest machines."""
    assert 1e-6 < read_bandwidth_tb_s("cpu", 2**24) < 10
    assert 1e-7 < matmul_tflop_s("cpu") < 1000


def test_bytes_of_quantised_weights_are_those_of_their_tensors(tmp_path: Path) -> None:
    plain = prepare("tiny", tmp_path)
    spec, device = plain.spec, torch.device("cpu")
    sizes = {}
    for form in ("fp8", "int4"):
        model = prepare("tiny", tmp_path, form)
        assert model.dtype_name == form
        weights = Decoder.random(spec, device=device, dtype=torch.bfloat16, form=form).weights
        read = *tensors_of(weights.layers), weights.final_norm, weights.head
        sizes[form] = sum(tensor.nbytes for tensor in read)
        assert model.decode_bytes(0, 0, 2) == sizes[form]
    assert sizes["int4"] < sizes["fp8"] < plain.decode_bytes(0, 0, 2)


@pytest.mark.parametrize("form", ["fp8", "int4", "nvfp4"])
def test_bytes_of_quantised_experts_are_those_of_their_tensors(form: WeightForm, tmp_path: Path) -> None:
    plain = prepare("tiny-experts", tmp_path)
    assert plain.spec.experts is not None
    experts = structs.replace(plain.spec.experts, has_bias=False, clamped_gate=None)
    layers = tuple(structs.replace(layer, channel=experts) for layer in plain.spec.layers)
    spec = structs.replace(plain.spec, layers=layers, names=Names())
    model = structs.replace(plain, spec=spec, weights=form)
    weights = Decoder.random(spec, device=torch.device("cpu"), dtype=torch.bfloat16, form=form).weights
    layer = weights.layers[0].channel
    assert isinstance(layer, ExpertWeights)
    assert isinstance(layer.gate_up, tuple) and isinstance(layer.down, tuple)
    assert model.expert_bytes(2) == layer.gate_up[0].nbytes + layer.down[0].nbytes
    all_experts = weight_bytes(spec, torch.bfloat16, form) - spec.vocab_size * spec.hidden_size * 2
    assert model.decode_bytes(0, 0, 2, experts.num_experts) == all_experts


def test_bytes_of_a_quantised_draft(tmp_path: Path) -> None:
    """Matrices take a byte a number and four a row; norms keep two bytes a number."""
    model = prepare("tiny", tmp_path / "tiny")
    plain, quantised = prepare_draft(model), prepare_draft(model, weights="fp8")
    shapes = required_shapes(plain.config) | {"head": shareable_shapes(plain.config)["lm_head.weight"]}
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    saved = sum(rows * columns - 4 * rows for rows, columns in matrices)
    assert plain.round_bytes(1, 0, 0, 2) - quantised.round_bytes(1, 0, 0, 2) == saved


def test_bytes_of_heads_that_draft_in_one_pass(tmp_path: Path) -> None:
    """All weights of a DFlash head are read once, and those of the features' keys and values once more; its
    embedding is not. The number of drafts does not matter, nor does it to a P-EAGLE head."""
    model = prepare("tiny", tmp_path / "tiny")
    target = Decoder.random(model.spec, device=torch.device("cpu"), dtype=torch.bfloat16)
    masks = prepare_drafts(model, "dflash-6")
    assert isinstance(masks, MaskDraft) and masks.config.num_masks == 5
    head = DFlashDecoder.load(resolve(masks.path, has_weights=False), target, has_weights=False)
    assert head.config == masks.config
    weights = head.weights
    tensors = [*tensors_of(weights.layers), weights.fc, weights.hidden_norm, weights.final_norm, weights.head]
    num_layers = len(weights.layers)
    tensors += [weights.context_projection(index)[0] for index in range(num_layers)]
    kv_of_a_token = 2 * num_layers * 2 * 16 * 2  # keys and values, layers, heads, head_dim, bytes
    expected = sum(tensor.nbytes for tensor in tensors) + 3 * 10 * kv_of_a_token
    assert [masks.round_bytes(number, 3, 10, 2) for number in (1, 5)] == [expected] * 2
    parallel = prepare_drafts(model, "peagle")
    assert isinstance(parallel, Draft) and parallel.config.mask_token_id is not None
    assert parallel.round_bytes(1, 3, 10, 2) == parallel.round_bytes(8, 3, 10, 2) > 0


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "quantization_config" not in PUBLISHED[name]])
def test_a_dflash_head_fits_each_model(name: str) -> None:
    """Also models whose channels are all experts."""
    settings = LLAMA | PUBLISHED[name]
    config = DFlashConfig.from_hf(dflash_settings(settings, 8), read_spec(settings))
    assert config.num_masks == 7


def test_bytes_of_weights_in_fp8_blocks_are_those_of_their_tensors(tmp_path: Path) -> None:
    model = prepare("tiny-hybrid", tmp_path, "fp8-blocks")
    assert (model.dtype_name, model.weights) == ("fp8-blocks", "stored")
    plain, device = prepare("tiny-hybrid", tmp_path), torch.device("cpu")
    sizes: list[int] = []
    for each in (model, plain):
        form = each.weights or "expanded"
        Decoder.random(each.spec, device=device, dtype=torch.bfloat16, form=form, check_bytes=sizes.append)
    saved = plain.decode_bytes(0, 0, 2) - model.decode_bytes(0, 0, 2)
    assert saved == sizes[1] - sizes[0] > 0.3 * sizes[1]


@pytest.mark.slow
def test_bytes_of_experts_in_fp8_blocks(tmp_path: Path) -> None:
    model = prepare("qwen3.6-35b-a3b", tmp_path, "fp8-blocks")
    blocks = 3 * 4 * 16  # of 512 x 2,048
    assert model.expert_bytes(2) == 3 * 512 * 2048 + 4 * blocks
    tensors = random_tensors(model.spec, device=torch.device("cpu"), dtype=torch.bfloat16, form="stored")
    num_bytes = weight_bytes(model.spec, torch.bfloat16, "stored", tensors)
    read = num_bytes - 2 * 248_320 * 2048  # the embedding, of which a step reads rows alone
    assert model.decode_bytes(0, 0, 2, 256.0) == pytest.approx(read, rel=1e-6)
    assert num_bytes == pytest.approx(35.5e9, rel=0.02)


def test_models_without_such_files_are_not_in_fp8_blocks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a model whose published weights are not quantised"):
        prepare("tiny-experts", tmp_path, "fp8-blocks")
    prepare("tiny", tmp_path / "tiny")
    with pytest.raises(ValueError, match="expected one with random weights for fp8-blocks"):
        prepare(str(tmp_path / "tiny"), tmp_path / "other", "fp8-blocks")
