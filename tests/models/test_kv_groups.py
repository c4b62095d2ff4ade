"""Layers whose keys and values differ in shape."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from decoder_parity import inner_terms, poisoned_cache, random_tokens, shuffled_blocks
from tolerances import assert_near

from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.channels import MlpWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.spec.model import Attention, KVShape, LayerSpec, Mlp, ModelSpec, Norm
from drift_sdk.spec.rope import Rope

NUM_TOKENS = 37
EPS = 1e-5
NARROW = Attention(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    value_dim=16,
    scale=0.25,
    rope=Rope(theta=1e4, rotary_dim=16),
)
WIDE = Attention(
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    value_dim=24,
    scale=0.2,
    window=9,
    rope=Rope(theta=500.0, rotary_dim=32),
)
MIXERS = (NARROW, WIDE, NARROW, NARROW, WIDE)
SPEC = ModelSpec(
    vocab_size=90,
    hidden_size=48,
    layers=tuple(
        LayerSpec(mixer=mixer, channel=Mlp(intermediate_size=56), norm=Norm(EPS)) for mixer in MIXERS
    ),
    max_position_embeddings=128,
    final_norm=Norm(EPS),
    is_head_tied=False,
)
DEPTH = len(MIXERS) + 1


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.random(SPEC, device="cpu", dtype=torch.float32, seed=4)


@torch.inference_mode()
def logits_in_chunks(decoder: Decoder, tokens: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
    cache, blocks, start, found = poisoned_cache(decoder.spec), shuffled_blocks(), 0, []
    for num_rows in chunks:
        batch = AttentionBatch([SequenceRows(blocks, start, num_rows)], cache)
        hidden, _ = decoder.forward(tokens[start : start + num_rows], batch, cache)
        found.append(decoder.logits(hidden))
        start += num_rows
    assert start == len(tokens)
    return torch.cat(found)


def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


def rotated(heads: torch.Tensor, theta: float) -> torch.Tensor:
    """Heads [N, num_heads, D] of positions 0 to N - 1."""
    num_rows, _, head_dim = heads.shape
    periods = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(num_rows, dtype=torch.float64)[:, None, None] / periods
    first, second = heads.chunk(2, dim=-1)
    return torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        dim=-1,
    )


def attention(x: torch.Tensor, weights: AttentionWeights, spec: Attention) -> torch.Tensor:
    assert spec.rope is not None
    sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
    query, key, value = (x @ weights.qkv.double().T).split(
        [*sizes, spec.num_kv_heads * spec.value_dim], dim=1
    )
    query = rotated(query.unflatten(1, (spec.num_heads, spec.head_dim)), spec.rope.theta)
    key = rotated(key.unflatten(1, (spec.num_kv_heads, spec.head_dim)), spec.rope.theta)
    value = value.unflatten(1, (spec.num_kv_heads, spec.value_dim))
    places = torch.arange(len(x))
    distance = places[:, None] - places
    is_visible = (distance >= 0) & (distance < (spec.window or len(x)))
    heads = []
    for head in range(spec.num_heads):
        shared = head * spec.num_kv_heads // spec.num_heads
        scores = query[:, head] @ key[:, shared].T * spec.scale
        heads.append(scores.masked_fill(~is_visible, float("-inf")).softmax(dim=-1) @ value[:, shared])
    return torch.cat(heads, dim=1) @ weights.output.double().T


def mlp(x: torch.Tensor, weights: MlpWeights) -> torch.Tensor:
    gate, up = (x @ weights.gate_up.double().T).chunk(2, dim=1)
    return (F.silu(gate) * up) @ weights.down.double().T


def reference(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of all tokens in float64, without a cache."""
    weights = decoder.weights
    hidden = weights.embedding.double()[tokens]
    for layer, spec in zip(weights.layers, SPEC.layers, strict=True):
        hidden = hidden + attention(normalised(hidden, layer.mixer_norm), layer.mixer, spec.mixer)
        assert isinstance(layer.channel, MlpWeights)
        hidden = hidden + mlp(normalised(hidden, layer.channel_norm), layer.channel)
    return normalised(hidden, weights.final_norm) @ weights.head.double().T


@pytest.mark.parametrize("chunks", [[NUM_TOKENS], [16, 1, 20], [5] * 7 + [2], [1] * NUM_TOKENS], ids=str)
def test_logits_are_those_of_a_computation_without_a_cache(decoder: Decoder, chunks: list[int]) -> None:
    tokens = random_tokens(SPEC, NUM_TOKENS)
    expected = reference(decoder, tokens)
    found = logits_in_chunks(decoder, tokens, chunks)
    assert_near(found, expected, inner=inner_terms(SPEC), depth=DEPTH, magnitude=expected.abs().max().item())


def test_sequences_together_have_the_logits_of_each_alone(decoder: Decoder) -> None:
    lengths, cache, blocks = (11, 3, 24), poisoned_cache(SPEC), shuffled_blocks()
    tokens = [random_tokens(SPEC, length, seed=length) for length in lengths]
    rows = [SequenceRows(blocks[8 * i : 8 * i + 8], 0, length) for i, length in enumerate(lengths)]
    with torch.inference_mode():
        hidden, _ = decoder.forward(torch.cat(tokens), AttentionBatch(rows, cache), cache)
        found = decoder.logits(hidden)
    expected = torch.cat([reference(decoder, each) for each in tokens])
    assert_near(found, expected, inner=inner_terms(SPEC), depth=DEPTH, magnitude=expected.abs().max().item())


def test_cache_has_keys_and_values_of_each_shape(decoder: Decoder) -> None:
    assert SPEC.kv_groups == {KVShape(2, 16, 16): (0, 2, 3), KVShape(1, 32, 24): (1, 4)}
    cache = decoder.empty_kv_cache(6, 8)
    shapes = [tuple(tensor.shape) for tensor in cache.tensors]
    assert shapes == [(3, 48, 2, 16), (3, 48, 2, 16), (2, 48, 1, 32), (2, 48, 1, 24)]
    for group, layers in enumerate(SPEC.kv_groups.values()):
        keys, values = cache.tensors[2 * group : 2 * group + 2]
        for place, index in enumerate(layers):
            found = cache.layer(index)
            assert [each.data_ptr() for each in found] == [keys[place].data_ptr(), values[place].data_ptr()]


def test_slots_of_all_shapes_are_stored_read_and_moved() -> None:
    shapes = [mixer.kv for mixer in MIXERS]
    cache = KVCache(shapes, 4, 4, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    slots, targets = torch.tensor([1, 7, 12]), torch.tensor([7, 2, 15])
    stored = []
    for index, shape in enumerate(shapes):
        key = torch.randn(3, shape.num_kv_heads, shape.head_dim, generator=generator)
        value = torch.randn(3, shape.num_kv_heads, shape.value_dim, generator=generator)
        cache.store(index, slots, key, value)
        stored.append((key, value))
    cache.move(slots, targets)
    for index, expected in enumerate(stored):
        for found, wanted in zip(cache.read(index, targets), expected, strict=True):
            assert torch.equal(found, wanted)


def test_layers_with_blocks_of_their_own_have_tensors_of_their_own() -> None:
    shapes = [KVShape(2, 8, 8)] * 3 + [KVShape(1, 4, 4)]
    cache = KVCache(shapes, 6, 4, torch.float32, "cpu", num_blocks_of={1: 2, 3: 2})
    found = [tuple(tensor.shape) for tensor in cache.tensors[::2]]
    assert found == [(2, 24, 2, 8), (1, 8, 2, 8), (1, 8, 1, 4)]
    assert [len(cache.layer(index)[0]) for index in range(4)] == [24, 8, 24, 8]
