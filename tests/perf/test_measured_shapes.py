"""Bytes and operations of a step, and the models and prompts that are measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from drift_sdk.loading.source import resolve
from drift_sdk.models.decoder import Decoder
from perf.harness.bandwidth import matmul_tflop_s, read_bandwidth_tb_s
from perf.harness.scenario import SCENARIOS, Scenario
from perf.harness.shapes import prepare


def test_bytes_equal_the_size_of_the_tensors_that_a_step_reads(tmp_path: Path) -> None:
    model = prepare("tiny", tmp_path)
    weights = Decoder.random(model.config, device=torch.device("cpu"), dtype=torch.bfloat16).weights
    layers = [getattr(layer, field.name) for layer in weights.layers for field in dataclasses.fields(layer)]
    read = [tensor for tensor in (*layers, weights.final_norm, weights.head) if tensor is not None]
    num_bytes = sum(tensor.nbytes for tensor in read)
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


def test_operations_of_a_prompt(tmp_path: Path) -> None:
    model = prepare("llama-3.1-8b", tmp_path)
    config = model.config
    one = model.prefill_flops(1)
    assert one == pytest.approx(2 * model.num_read_parameters, rel=1e-4)
    layers = 2 * 8192 * (8_030_261_248 - 2 * 128_256 * 4096)
    attention = 2 * 2 * config.num_layers * config.num_heads * config.head_dim * 8192 * 8192 / 2
    assert model.prefill_flops(8192) == pytest.approx(layers + attention, rel=1e-3)


def test_8b_shapes_have_the_published_number_of_parameters(tmp_path: Path) -> None:
    model = prepare("llama-3.1-8b", tmp_path)
    assert model.num_read_parameters + 128_256 * 4096 == 8_030_261_248
    assert model.config.ropes[0].scaling is not None


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
    assert 1e-3 < read_bandwidth_tb_s("cpu", 2**24) < 10
    assert 1e-4 < matmul_tflop_s("cpu") < 1000
