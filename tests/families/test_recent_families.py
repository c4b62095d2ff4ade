"""Greedy tokens of random models of recent families, equal to those of transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_parity import inner_terms, poisoned_cache, shuffled_blocks
from msgspec import structs
from recent_zoo import RECENT, VOCAB_SIZE, make_recent_model
from safetensors.torch import load_file, save_file
from slow_cases import slow_after
from tolerances import tie_gap

from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.channels import ExpertWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.spec.model import Experts, LayerSpec

NUM_MODELS = 16
NUM_TOKENS = 64
PROMPT_LENGTH = 30  # longer than any window, and than the context of pretraining
CHUNK = 13
MIN_DISTINCT = 8
"""Least number of different tokens in an answer: answers that repeat few tokens compare little."""


def load(folder: Path) -> Decoder:
    source = resolve(folder)
    return Decoder.load(read_spec(source.config), source.tensors(), device="cpu", dtype=torch.float32)


@torch.inference_mode()
def logits_of(decoder: Decoder, token_ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """The logits after all of token_ids [N], computed in chunks."""
    kv_cache, blocks, found, start = poisoned_cache(decoder.spec), shuffled_blocks(), [], 0
    for length in chunks:
        batch = AttentionBatch([SequenceRows(blocks, start, length)], kv_cache)
        hidden, _ = decoder.forward(token_ids[start : start + length], batch, kv_cache)
        found.append(decoder.logits(hidden))
        start += length
    return torch.cat(found)


@torch.inference_mode()
def answer(model: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt with transformers' greedy answer [PROMPT_LENGTH + NUM_TOKENS], and the logits after each."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    prompt = torch.randint(3, VOCAB_SIZE, (1, PROMPT_LENGTH), generator=generator)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    token_ids = model.generate(prompt, max_new_tokens=NUM_TOKENS, **options)
    return token_ids[0], model(token_ids).logits[0]


def num_wrong(decoder: Decoder, token_ids: torch.Tensor, expected: torch.Tensor) -> int:
    """Number of tokens of an answer that the decoder would not have chosen, but for ties."""
    chunks = [CHUNK, PROMPT_LENGTH - CHUNK, *[1] * (NUM_TOKENS - 1)]
    found = logits_of(decoder, token_ids[:-1], chunks)[PROMPT_LENGTH - 1 :]
    chosen = expected[PROMPT_LENGTH - 1 : -1].gather(1, found.argmax(-1, keepdim=True))[:, 0]
    best = expected[PROMPT_LENGTH - 1 : -1].amax(-1)
    gap = tie_gap(expected, inner=inner_terms(decoder.spec), depth=decoder.spec.num_layers + 1)
    return int((best - chosen > gap).sum())


@pytest.mark.parametrize("seed", slow_after(1, range(NUM_MODELS)))
@pytest.mark.parametrize("family", RECENT)
def test_tokens_equal_those_of_transformers(family: str, seed: int, tmp_path: Path) -> None:
    model = make_recent_model(family, seed, tmp_path)
    token_ids, expected = answer(model, seed)
    assert len(token_ids[PROMPT_LENGTH:].unique()) >= MIN_DISTINCT
    assert num_wrong(load(tmp_path), token_ids, expected) == 0


Change = Callable[[Decoder], Decoder]


def _layers(change: Callable[[LayerSpec], LayerSpec]) -> Change:
    def plant(decoder: Decoder) -> Decoder:
        layers = tuple(map(change, decoder.spec.layers))
        return Decoder(structs.replace(decoder.spec, layers=layers), decoder.weights)

    return plant


def _mixer(**changes: Any) -> Change:
    return _layers(lambda layer: structs.replace(layer, mixer=structs.replace(layer.mixer, **changes)))


def _router(**changes: Any) -> Change:
    def change(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.channel, Experts):
            return layer

        router = structs.replace(layer.channel.router, **changes)
        return structs.replace(layer, channel=structs.replace(layer.channel, router=router))

    return _layers(change)


def _experts(**changes: Any) -> Change:
    """Changed weights of experts; None stands for zeros."""

    def plant(decoder: Decoder) -> Decoder:
        layers = list(decoder.weights.layers)
        for index, layer in enumerate(layers):
            if isinstance(layer.channel, ExpertWeights):
                found = {name: getattr(layer.channel, name) for name in changes}
                zeros = {name: None if name == "shared" else value * 0 for name, value in found.items()}
                layers[index] = replace(layer, channel=replace(layer.channel, **zeros))
        return Decoder(decoder.spec, replace(decoder.weights, layers=tuple(layers)))

    return plant


def _spec(**changes: Any) -> Change:
    return lambda decoder: Decoder(structs.replace(decoder.spec, **changes), decoder.weights)


FAULTS: dict[str, tuple[str, Change]] = {
    "queries not scaled": ("ministral3", _mixer(query_scaling=None)),
    "no rotation": ("qwen3_vl", _mixer(rope=None)),
    "no norm of heads": ("qwen3_vl_moe", _mixer(head_norm=None)),
    "weights of all experts": ("qwen3_vl_moe", _router(is_normalised=False)),
    "no correction": ("glm4_moe", _experts(correction=None)),
    "no shared experts": ("glm4_moe", _experts(shared=None)),
    "scale of weights": ("glm4_moe", _router(scale=0.7)),
    "no window": ("muse_glimmer", _mixer(window=None)),
    "embedding not normalised": ("muse_glimmer", _spec(embedding_norm=None)),
    "norm of outputs": ("muse_glimmer", _layers(lambda layer: structs.replace(layer, post_norm=None))),
    "divisor of logits": ("muse_glimmer", _spec(logits_divisor=1.0)),
}


@cache
def _seed_of(fault: str) -> int:
    """A model that has what the fault takes away: of GLM, weights that are scaled."""
    return {"queries not scaled": 1, "scale of weights": 3}.get(fault, 0)


@pytest.mark.parametrize("fault", slow_after(3, FAULTS))
def test_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    family, plant = FAULTS[fault]
    model = make_recent_model(family, _seed_of(fault), tmp_path)
    token_ids, expected = answer(model, _seed_of(fault))
    decoder = load(tmp_path)
    assert num_wrong(decoder, token_ids, expected) == 0
    changed = logits_of(plant(decoder), token_ids, [len(token_ids)])
    unchanged = logits_of(decoder, token_ids, [len(token_ids)])
    assert (changed - expected).abs().max() > 100 * (unchanged - expected).abs().max()


def test_cap_of_logits_and_gate_are_applied(tmp_path: Path) -> None:
    """A cap keeps the order of logits, and a gate that is left out takes columns of the values' place."""
    make_recent_model("muse_glimmer", 0, tmp_path)
    decoder = load(tmp_path)
    cap = decoder.spec.logits_cap
    assert cap is not None and all(layer.mixer.has_gate for layer in decoder.spec.layers)
    token_ids = torch.arange(3, 33)
    capped = logits_of(decoder, token_ids, [30])
    plain = logits_of(_spec(logits_cap=None)(decoder), token_ids, [30])
    assert plain.abs().max() > 0.3 * cap
    assert torch.allclose(capped, cap * torch.tanh(plain / cap))
    assert not torch.allclose(logits_of(_mixer(has_gate=False)(decoder), token_ids, [30]), capped)


def test_experts_are_read_in_any_layout(tmp_path: Path) -> None:
    """Stacked as [in, out], as [out, in], and one by one."""
    seed = next(
        seed for seed in itertools.count() if _is_oblong(make_recent_model("qwen3_vl_moe", seed, tmp_path))
    )
    make_recent_model("qwen3_vl_moe", seed, tmp_path)
    token_ids, file = torch.arange(3, 33), tmp_path / "model.safetensors"
    expected, transposed = logits_of(load(tmp_path), token_ids, [30]), load_file(file)
    stacked = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in transposed.items()
    }
    each: dict[str, torch.Tensor] = {}
    for name, tensor in stacked.items():
        if ".experts." not in name:
            each[name] = tensor
            continue

        prefix, _, projection = name.rpartition(".")
        is_down = projection == "down_proj"
        parts = {"down": tensor} if is_down else dict(zip(("gate", "up"), tensor.chunk(2, 1), strict=True))
        for part, matrices in parts.items():
            each |= {
                f"{prefix}.{index}.{part}_proj.weight": matrix.clone()
                for index, matrix in enumerate(matrices)
            }
    for tensors in (stacked, each):
        save_file(tensors, file)
        assert torch.equal(logits_of(load(tmp_path), token_ids, [30]), expected)


def _is_oblong(model: Any) -> bool:
    """Whether the shape of experts tells their layout."""
    config = model.config.text_config
    return config.hidden_size != 2 * config.moe_intermediate_size
