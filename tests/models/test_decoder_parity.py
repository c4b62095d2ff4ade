"""The decoder equals transformers on all kinds of models, for any division of a prompt into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
import transformers
from decoder_parity import (
    assert_parity,
    inner_terms,
    load_decoder,
    poisoned_cache,
    random_tokens,
    shuffled_blocks,
)
from family_zoo import StateTensors, draw_model
from model_zoo import NUM_MODELS, make_model
from tolerances import assert_near
from transformers.models.llama import modeling_llama

from drift_sdk.families import read_spec
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.layers import rms_norm, rotary_tables, rotate
from drift_sdk.models.mixers import attention as attention_module
from drift_sdk.spec.rope import inverse_frequencies

NUM_DECODE_STEPS = 8
CHUNKINGS = ((45,), (1, 44), (16, 17, 12), (7,) * 6 + (3,), (40, 5))


@pytest.mark.parametrize("index", range(NUM_MODELS))
def test_decoder_equals_transformers(index: int, tmp_path: Path) -> None:
    model = make_model(index, tmp_path)
    decoder = load_decoder(tmp_path)
    token_ids = random_tokens(decoder.spec, 45 + NUM_DECODE_STEPS, seed=index)
    for chunks in CHUNKINGS:
        assert_parity(decoder, model, token_ids, (*chunks, *(1,) * NUM_DECODE_STEPS))


@pytest.mark.parametrize("index", [0, 12, 18])
def test_last_aux_layer_is_the_stream_before_the_final_norm(index: int, tmp_path: Path) -> None:
    model = make_model(index, tmp_path)
    decoder = load_decoder(tmp_path)
    token_ids = random_tokens(decoder.spec, 20)
    streams: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0][0]))
    with torch.inference_mode():
        model(token_ids[None])

    cache = poisoned_cache(decoder.spec)
    batch = AttentionBatch([SequenceRows(shuffled_blocks(), 0, 20)], cache)
    hidden, _ = decoder.forward(token_ids, batch, cache)
    inner, depth = inner_terms(decoder.spec), decoder.spec.num_layers + 1
    assert_near(hidden, streams[0], inner=inner, depth=depth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_and_rotation_round_as_transformers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 5, 24, generator=generator).to(dtype)
    norm = modeling_llama.LlamaRMSNorm(24, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3, generator=generator)
    config = transformers.LlamaConfig(hidden_size=48, num_attention_heads=2, head_dim=24)
    positions = torch.tensor([0, 1, 2, 77, 500, 1000, 1003, 1500, 2000])
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))
        theirs = modeling_llama.LlamaRotaryEmbedding(config)(x, positions[None])
        expected, _ = modeling_llama.apply_rotary_pos_emb(x[None], x[None], *theirs, unsqueeze_dim=2)
        tables = rotary_tables(positions, inverse_frequencies(24, 10_000.0, None), dtype)
        assert torch.equal(rotate(x, *tables), expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gemma3", "granite"])
def test_embeddings_round_as_transformers(family: str, dtype: torch.dtype) -> None:
    """transformers rounds the multiplier of Gemma alone. 10.3 is no number of bfloat16."""
    changes = {"embedding_multiplier": 10.3} if family == "granite" else {}
    model = draw_model(family, 3, **changes).to(dtype)
    spec = read_spec(model.config.to_dict() | {"architectures": [type(model).__name__]})
    decoder = Decoder.load(spec, StateTensors(model), device="cpu", dtype=dtype)
    token_ids = torch.arange(spec.vocab_size)
    expected = model.model.embed_tokens(token_ids)
    if family == "granite":
        expected = expected * model.model.embedding_multiplier
    assert torch.equal(decoder.embedded(token_ids), expected)


def _rope_off_by_one(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Shift the positions of queries alone: shifting those of keys too would have no effect."""

    attention = decoder.spec.attention
    (frequencies,) = decoder._frequencies.values()

    def shifted(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotated = rotate(x, cos, sin)
        late_cos, late_sin = rotary_tables(torch.ones(len(x), dtype=torch.int64), frequencies, decoder.dtype)
        num_heads = attention.num_heads
        return torch.cat((rotate(rotated[:, :num_heads], late_cos, late_sin), rotated[:, num_heads:]), dim=1)

    monkeypatch.setattr(attention_module, "rotate", shifted)
    return decoder


def _causal_mask_off_by_one(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        num_rows, num_keys = query.shape[2], key.shape[2]
        is_visible = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows - 1)
        is_visible[:, 0] = True
        is_causal = options["is_causal"]
        return F_attention(query, key, value, attn_mask=is_visible if is_causal else None, enable_gqa=True)

    F_attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return decoder


def _wrong_gqa_map(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Assign key heads to query heads in turn, instead of one to neighbouring query heads."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        times = query.shape[1] // key.shape[1]
        options["enable_gqa"] = False
        return F_attention(query, key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1), **options)

    F_attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return decoder


def _wrong_eps(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    norm = msgspec.structs.replace(decoder.spec.final_norm, eps=10 * decoder.spec.final_norm.eps)
    layers = tuple(msgspec.structs.replace(layer, norm=norm) for layer in decoder.spec.layers)
    spec = msgspec.structs.replace(decoder.spec, layers=layers, final_norm=norm)
    return Decoder(spec, decoder.weights)


def _untied_head(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Use a random head instead of the embedding."""
    spec = msgspec.structs.replace(decoder.spec, is_head_tied=False)
    other = Decoder.random(spec, device="cpu", dtype=decoder.dtype)
    weights = type(decoder.weights)(
        embedding=decoder.weights.embedding,
        layers=decoder.weights.layers,
        final_norm=decoder.weights.final_norm,
        head=other.weights.head,
    )
    return Decoder(spec, weights)


@pytest.mark.parametrize(
    "plant", [_rope_off_by_one, _causal_mask_off_by_one, _wrong_gqa_map, _wrong_eps, _untied_head]
)
@pytest.mark.parametrize("index", [2, 13, 22])
def test_planted_fault_is_found(
    plant: Any, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(index, tmp_path)
    decoder = load_decoder(tmp_path)
    token_ids = random_tokens(decoder.spec, 24)
    chunks = (20, 1, 1, 1, 1)
    assert_parity(decoder, model, token_ids, chunks)
    with monkeypatch.context() as context:
        # transformers calls the same attention function, so its output is computed before the fault is
        # planted.
        recorded = _Recorded(model, token_ids)
        broken = plant(decoder, context)
        with pytest.raises(AssertionError, match="differ by"):
            assert_parity(broken, recorded, token_ids, chunks)


class _Recorded:
    """Returns the output that a model computed before, whatever the arguments."""

    def __init__(self, model: Any, token_ids: torch.Tensor) -> None:
        with torch.inference_mode():
            self._output = model(token_ids[None], output_hidden_states=True, use_cache=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._output
