"""Greedy tokens of random models of each family, equal to those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder_parity import inner_terms, poisoned_cache, shuffled_blocks
from family_zoo import FAMILIES, draw_model, own_decoder
from msgspec import structs
from slow_cases import slow_after
from tolerances import assert_near, tie_gap

from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.weights import LayerWeights
from drift_sdk.spec.model import Experts, Norm

NUM_MODELS = dict.fromkeys(FAMILIES, 16) | {"qwen2": 5, "qwen3": 5}  # others of these are in the zoo
NUM_TOKENS = 64
PROMPT_LENGTH = 37  # longer than any window and than the shorter context of pretraining
MAX_MODEL_LEN = 128
CHUNKS = ((PROMPT_LENGTH,), (9, PROMPT_LENGTH - 9))


@torch.inference_mode()
def greedy(decoder: Decoder, prompts: torch.Tensor) -> torch.Tensor:
    """NUM_TOKENS tokens [B, NUM_TOKENS] after prompts
    [B, PROMPT_LENGTH]. Each prompt is computed in chunks of its own,
    and all are decoded together."""
    cache = poisoned_cache(decoder.spec, 32)
    blocks = shuffled_blocks(32)
    tables = [blocks[:16], blocks[16:]]
    newest = []
    for prompt, table, chunks in zip(prompts, tables, CHUNKS, strict=True):
        start = 0
        for length in chunks:
            batch = AttentionBatch([SequenceRows(table, start, length)], cache)
            hidden, _ = decoder.forward(prompt[start : start + length], batch, cache)
            start += length
        newest.append(decoder.logits(hidden[-1:]).argmax(-1))

    tokens = [torch.cat(newest)]
    for position in range(prompts.shape[1], prompts.shape[1] + NUM_TOKENS - 1):
        batch = AttentionBatch([SequenceRows(table, position, 1) for table in tables], cache)
        hidden, _ = decoder.forward(tokens[-1], batch, cache)
        tokens.append(decoder.logits(hidden).argmax(-1))

    return torch.stack(tokens, dim=1)


@torch.inference_mode()
def expected_logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """The logits [B, N, vocab] of transformers after all of token_ids [B, N], in one pass."""
    return model(token_ids, use_cache=False).logits


def num_wrong(decoder: Decoder, logits: torch.Tensor, tokens: torch.Tensor) -> int:
    """Number of tokens [B, N] that transformers would not have chosen by logits [B, N, vocab].

    Of two tokens whose logits differ by no more than rounding explains, either is a choice.
    """
    chosen = logits.gather(-1, tokens[..., None])[..., 0]
    gap = tie_gap(logits, inner=inner_terms(decoder.spec), depth=decoder.spec.num_layers + 1)
    return int((logits.amax(-1) - chosen > gap).sum())


@torch.inference_mode()
def assert_logits(decoder: Decoder, token_ids: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare the logits after token_ids [N], computed in two steps, with those of transformers."""
    cache, table, found = poisoned_cache(decoder.spec), shuffled_blocks(), []
    for start, end in ((0, 9), (9, len(token_ids))):
        batch = AttentionBatch([SequenceRows(table, start, end - start)], cache)
        found.append(decoder.logits(decoder.forward(token_ids[start:end], batch, cache)[0]))

    depth = decoder.spec.num_layers + 1
    assert_near(torch.cat(found), expected, inner=inner_terms(decoder.spec), depth=depth, name="logits")


def _prompts(model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (2, PROMPT_LENGTH), generator=generator)


@pytest.mark.parametrize("family", slow_after(3, FAMILIES))
def test_greedy_tokens_equal_transformers(family: str) -> None:
    num_distinct = []
    for seed in range(NUM_MODELS[family]):
        model = draw_model(family, seed)
        decoder, prompts = own_decoder(model, max_model_len=MAX_MODEL_LEN), _prompts(model, seed)
        tokens = greedy(decoder, prompts)
        # One pass over prompts and tokens shows transformers' choice after each of them.
        token_ids = torch.cat((prompts, tokens), dim=1)
        logits = expected_logits(model, token_ids)
        found = num_wrong(decoder, logits[:, PROMPT_LENGTH - 1 : -1], tokens)
        assert found == 0, f"seed {seed}: {model.config}"
        assert_logits(decoder, token_ids[0], logits[0])
        num_distinct.append(len(tokens.unique()))

    assert sum(num_distinct) / len(num_distinct) > 20, "greedy outputs are loops, which hide errors"


def _change(decoder: Decoder, **fields: Any) -> Decoder:
    return Decoder(structs.replace(decoder.spec, **fields), decoder.weights)


def _change_layers(decoder: Decoder, part: str, fields: Callable[[Any], dict[str, Any]]) -> Decoder:
    """part: "mixer" or "channel". fields: those that change, from the part of a layer."""
    layers = []
    for layer in decoder.spec.layers:
        value = getattr(layer, part)
        layers.append(structs.replace(layer, **{part: structs.replace(value, **fields(value))}))
    return _change(decoder, layers=tuple(layers))


def _wider_windows(decoder: Decoder) -> Decoder:
    return _change_layers(decoder, "mixer", lambda mixer: {"window": mixer.window and mixer.window + 1})


def _narrower_windows(decoder: Decoder) -> Decoder:
    return _change_layers(decoder, "mixer", lambda mixer: {"window": mixer.window and mixer.window - 1})


def _windows_of_other_layers(decoder: Decoder) -> Decoder:
    windows = iter(decoder.spec.windows[::-1])
    return _change_layers(decoder, "mixer", lambda mixer: {"window": next(windows)})


def _swapped_ropes(decoder: Decoder) -> Decoder:
    first, second = decoder.spec.ropes
    other = {first: second, second: first}
    return _change_layers(decoder, "mixer", lambda mixer: {"rope": other[mixer.rope]})


def _rotation_in_all_layers(decoder: Decoder) -> Decoder:
    (rope,) = decoder.spec.ropes
    return _change_layers(decoder, "mixer", lambda mixer: {"rope": rope})


def _whole_rotation(decoder: Decoder) -> Decoder:
    (rope,) = decoder.spec.ropes
    whole = structs.replace(rope, rotary_dim=decoder.spec.attention.head_dim, scaling=None)
    return _change_layers(decoder, "mixer", lambda mixer: {"rope": whole})


def _rope_of_magnitude_1(decoder: Decoder) -> Decoder:
    (rope,) = decoder.spec.ropes
    changed = structs.replace(rope, scaling=structs.replace(rope.scaling, magnitude=1.0))
    return _change_layers(decoder, "mixer", lambda mixer: {"rope": changed})


def _attention_scale_of_head_dim(decoder: Decoder) -> Decoder:
    return _change_layers(decoder, "mixer", lambda mixer: {"scale": mixer.head_dim**-0.5})


def _silu(decoder: Decoder) -> Decoder:
    return _change_layers(decoder, "channel", lambda channel: {"activation": "silu"})


def _no_residual_multiplier(decoder: Decoder) -> Decoder:
    layers = (structs.replace(layer, multiplier=1.0) for layer in decoder.spec.layers)
    return _change(decoder, layers=tuple(layers))


def _plain_norms(decoder: Decoder) -> Decoder:
    norm = Norm(decoder.spec.final_norm.eps)
    changed = _change_layers(decoder, "mixer", lambda mixer: {"head_norm": norm})
    layers = (structs.replace(layer, norm=norm, post_norm=norm) for layer in changed.spec.layers)
    return _change(changed, layers=tuple(layers), final_norm=norm)


def _change_weights(decoder: Decoder, change: Callable[[LayerWeights], LayerWeights]) -> Decoder:
    layers = tuple(change(layer) for layer in decoder.weights.layers)
    return Decoder(decoder.spec, replace(decoder.weights, layers=layers))


def _without(name: str) -> Callable[[Decoder], Decoder]:
    """Leave out the norms `name` of layers."""
    return lambda decoder: _change_weights(decoder, lambda layer: replace(layer, **{name: None}))


def _without_head_norms(decoder: Decoder) -> Decoder:
    return _change_weights(decoder, lambda layer: replace(layer, mixer=replace(layer.mixer, query_norm=None)))


def _with(**fields: Any) -> Callable[[Decoder], Decoder]:
    return lambda decoder: _change(decoder, **fields)


def _mixers(**fields: Any) -> Callable[[Decoder], Decoder]:
    return lambda decoder: _change_layers(decoder, "mixer", lambda mixer: fields)


def _keys_of_another_layer(decoder: Decoder) -> Decoder:
    """Of the first layer with keys of the same shape."""
    own = [index for index, layer in enumerate(decoder.spec.layers) if layer.kv is not None]
    shapes = {index: decoder.spec.layers[index].kv for index in own}

    def other(mixer: Any) -> dict[str, Any]:
        found = [index for index in own if shapes[index] == mixer.kv and index != mixer.kv_of]
        return {"kv_of": found[0] if mixer.kv_of is not None and found else mixer.kv_of}

    return _change_layers(decoder, "mixer", other)


def _rotation_of_first_elements(decoder: Decoder) -> Decoder:
    """The pairs that are rotated lie side by side, as in partial rotations."""

    def changed(mixer: Any) -> dict[str, Any]:
        scaling = mixer.rope.scaling
        if scaling is None:
            return {}

        return {"rope": structs.replace(mixer.rope, rotary_dim=2 * scaling.num_pairs, scaling=None)}

    return _change_layers(decoder, "mixer", changed)


def _without_inputs(decoder: Decoder) -> Decoder:
    return _change(decoder, layer_inputs=None)


def _router_without_norm(decoder: Decoder) -> Decoder:
    def changed(channel: Any) -> dict[str, Any]:
        router = structs.replace(channel.experts.router, input_norm=None)
        return {"experts": structs.replace(channel.experts, router=router)}

    return _change_layers(decoder, "channel", changed)


def _experts_of_the_normed_stream(decoder: Decoder) -> Decoder:
    """Norms of the experts' input and of the MLP's are swapped."""
    return _change_weights(
        decoder,
        lambda layer: replace(
            layer,
            channel_norm=layer.channel.norm,
            channel=replace(layer.channel, norm=layer.channel_norm),
        ),
    )


def _rotated_queries_as_in_files(decoder: Decoder) -> Decoder:
    """Elements 2 i and 2 i + 1 of rotated parts are pairs in queries, and not in keys."""
    mixer = decoder.spec.attention

    def layer(weights: LayerWeights) -> LayerWeights:
        rows = weights.mixer.query_up.unflatten(0, (mixer.num_heads, -1))
        plain, rotated = rows.split((mixer.plain_dim, mixer.rotary_dim), dim=1)
        stored = rotated.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        query_up = torch.cat((plain, stored), dim=1).flatten(0, 1)
        return replace(weights, mixer=replace(weights.mixer, query_up=query_up))

    return _change_weights(decoder, layer)


def _scale_without_mscale(decoder: Decoder) -> Decoder:
    return _change_layers(decoder, "mixer", lambda mixer: {"scale": mixer.query_dim**-0.5})


def _norm_of_latents(decoder: Decoder) -> Decoder:
    return _mixers(norm=Norm(1e-3))(decoder)


def _all_groups(decoder: Decoder) -> Decoder:
    def layer(each: Any) -> Any:
        if not isinstance(each.channel, Experts):
            return each

        router = structs.replace(each.channel.router, num_groups=1, num_active_groups=1)
        return structs.replace(each, channel=structs.replace(each.channel, router=router))

    return _change(decoder, layers=tuple(map(layer, decoder.spec.layers)))


SHARED, CAPPED = 4, 1
"""Seeds of models of Gemma 4 with inputs of layers: in one, two layers of a shape have keys, the other has
a low cap."""
RANKED, SCALED, GROUPED = 7, 0, 1
"""Seeds of models with latents of queries, with a magnitude of scores, and with groups of experts."""
FAULTS: dict[str, tuple[str, int, Callable[[Decoder], Decoder]]] = {
    "wider windows": ("mistral", 0, _wider_windows),
    "narrower windows": ("gemma3", 0, _narrower_windows),
    "windows of other layers": ("qwen3", 0, _windows_of_other_layers),
    "swapped ropes": ("gemma3", 0, _swapped_ropes),
    "rotation in all layers": ("smollm3", 0, _rotation_in_all_layers),
    "whole rotation": ("phi3", 0, _whole_rotation),
    "rope of magnitude 1": ("phi3", 0, _rope_of_magnitude_1),
    "attention scale": ("gemma3", 0, _attention_scale_of_head_dim),
    "attention multiplier": ("granite", 0, _attention_scale_of_head_dim),
    "embedding multiplier": ("granite", 0, _with(embedding_multiplier=1.0)),
    "embedding scale": ("gemma3", 0, _with(embedding_multiplier=1.0)),
    "residual multiplier": ("granite", 0, _no_residual_multiplier),
    "divisor of logits": ("granite", 0, _with(logits_divisor=1.0)),
    "activation": ("gemma3", 0, _silu),
    "plain norms": ("gemma3", 0, _plain_norms),
    "no norm of attention's output": ("gemma3", 0, _without("mixer_post_norm")),
    "no norm of the MLP's output": ("gemma3", 0, _without("channel_post_norm")),
    "no norm of queries and keys": ("gemma3", 0, _without_head_norms),
    "values without norm": ("gemma4", 0, _mixers(has_value_norm=False)),
    "keys of another layer": ("gemma4", SHARED, _keys_of_another_layer),
    "rotation of the first elements": ("gemma4", 0, _rotation_of_first_elements),
    "cap of logits": ("gemma4", CAPPED, _with(logits_cap=None)),
    "no inputs of layers": ("gemma4", CAPPED, _without_inputs),
    "no factors of layers": ("gemma4", 0, _without("factor")),
    "router without norm": ("gemma4 experts", 0, _router_without_norm),
    "experts in sequence": ("gemma4 experts", 0, _experts_of_the_normed_stream),
    "other pairs in queries": ("glm4_moe_lite", RANKED, _rotated_queries_as_in_files),
    "scale without mscale": ("deepseek_v3", SCALED, _scale_without_mscale),
    "eps of latents": ("deepseek_v3", 0, _norm_of_latents),
    "experts of all groups": ("deepseek_v2", GROUPED, _all_groups),
}


@pytest.mark.parametrize("fault", slow_after(3, FAULTS))
def test_planted_fault_is_found(fault: str) -> None:
    family, seed, plant = FAULTS[fault]
    model = draw_model(family, seed)
    decoder, token_ids = own_decoder(model, max_model_len=MAX_MODEL_LEN), _prompts(model, seed)[0]
    expected = expected_logits(model, token_ids[None])[0]
    assert_logits(decoder, token_ids, expected)
    with pytest.raises(AssertionError, match="logits differ by"):
        assert_logits(plant(decoder), token_ids, expected)
