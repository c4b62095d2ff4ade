"""Layers that a first run computes: one of each kind, and each kind after those that it follows."""

from __future__ import annotations

import dataclasses
from itertools import pairwise, product

import pytest
import torch
from tiny_llama import tiny_llama

from drift_sdk._kernels.common.launch_tape import launch
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.first_runs import first_run
from drift_sdk.execution.forward.kv_cache import PagedKVCache
from drift_sdk.execution.forward.model_resources import ModelResources, chosen_layers
from drift_sdk.execution.forward.repeated_layers import RepeatedLayers, layout
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.kv_scales import KVScales
from drift_sdk.models.weights import LayerWeights, meta_weights
from drift_sdk.steps import ExecutorLimits

LIMITS = ExecutorLimits(max_num_seqs=1, max_model_len=64, num_blocks=16, block_size=4, vocab_size=64)
FULL, WINDOW = "full_attention", "sliding_attention"


def model(**changes: object) -> ModelResources:
    config = DecoderConfig.from_hf(tiny_llama(**changes))
    decoder = Decoder(config, meta_weights(config, torch.bfloat16))
    return ModelResources(
        decoder=decoder, cache=PagedKVCache(decoder, LIMITS), tuned=TunedTable(), limits=LIMITS
    )


def indices(resources: ModelResources, aux_layers: tuple[int, ...] = ()) -> list[int]:
    found: list[int] = []
    every: list[int] = []
    with first_run():
        resources.run_layers(lambda index, _: found.append(index), RepeatedLayers(), aux_layers)
    resources.run_layers(lambda index, _: every.append(index), RepeatedLayers(), aux_layers)
    assert every == list(range(resources.decoder.config.num_layers))
    return found


def qwen(types: list[str]) -> ModelResources:
    return model(
        model_type="qwen3",
        architectures=["Qwen3ForCausalLM"],
        num_hidden_layers=len(types),
        layer_types=types,
        sliding_window=8,
        use_sliding_window=True,
    )


def test_layers_of_one_kind_are_run_once_after_each_other_and_at_the_end() -> None:
    assert indices(model(num_hidden_layers=1)) == [0]
    assert indices(model(num_hidden_layers=2)) == [0, 1]
    assert indices(model(num_hidden_layers=12)) == [9, 10, 11]


def test_layers_whose_stream_is_kept_are_of_another_kind() -> None:
    """Layers 2 and 5 end at a boundary that the drafter reads, between layers of the same kinds."""
    assert indices(model(num_hidden_layers=12), (3, 6)) == [0, 5, 9, 10, 11]


def test_chosen_layers_of_every_short_model() -> None:
    for number in range(1, 9):
        for kinds in product("abc", repeat=number):
            chosen = chosen_layers(kinds)
            assert chosen == sorted(set(chosen)) and chosen[-1] == number - 1
            assert kinds[chosen[0]] == kinds[0]
            assert {*pairwise(kinds)} <= {*pairwise([kinds[index] for index in chosen])}
            for kind in {*kinds}:
                same = [index for index in range(number) if kinds[index] == kind]
                compared = [index for index in chosen if kinds[index] == kind]
                assert compared, "a kind without a first run"
                if len(same) > 2:
                    assert compared[-2:] == same[-2:]
                    assert {index % 2 for index in compared} == {index % 2 for index in same}


def test_layers_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step that is captured has a first run."""
    resources = model(num_hidden_layers=12)
    indices(resources)
    indices(resources, (3, 6))
    monkeypatch.setattr(ModelResources, "_kind", None)
    assert indices(resources) == [9, 10, 11]
    assert indices(resources, (3, 6)) == [0, 5, 9, 10, 11]


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ([WINDOW, FULL] * 4, [0, 3, 4, 5, 6, 7]),
        ([WINDOW, FULL] * 6, [0, 7, 8, 9, 10, 11]),
        ([WINDOW] * 3 + [FULL] + [WINDOW] * 3 + [FULL], [0, 3, 5, 6, 7]),
        ([WINDOW] + [FULL] * 6, [0, 4, 5, 6]),
    ],
)
def test_every_kind_follows_the_kinds_that_it_follows(types: list[str], expected: list[int]) -> None:
    assert indices(qwen(types)) == expected


def test_layers_are_repeated_with_the_cache_of_their_run() -> None:
    """The cache has one block when steps are compiled, and all blocks when they are captured."""
    config = DecoderConfig.from_hf(tiny_llama(num_hidden_layers=8))
    decoder = Decoder.random(config, device="cpu", dtype=torch.float32)
    cache = PagedKVCache(decoder, LIMITS)
    resources = ModelResources(decoder=decoder, cache=cache, tuned=TunedTable(), limits=LIMITS)
    repeated, launched, computed = RepeatedLayers(), list[int](), list[int]()

    def compute(index: int, layer: LayerWeights) -> None:
        computed.append(index)
        launch(note, layer.down, cache.layer(index).keys)

    def note(down: torch.Tensor, keys: torch.Tensor) -> None:
        launched.append(keys.data_ptr())

    for num_blocks in (1, 16):
        cache.allocate(num_blocks)
        with first_run():
            resources.run_layers(compute, repeated)
        launched.clear()
        computed.clear()
        resources.run_layers(compute, repeated)
        assert launched == [cache.layer(index).keys.data_ptr() for index in range(8)]
        assert computed == [7]  # the only one of its kind
        kept = {each.data_ptr() for own in resources.weights.values() for each in own.tensors}
        assert not kept & set(launched), "old keys would be kept while new ones are allocated"


def test_layers_of_scales_at_other_alignments_are_compared_among_themselves() -> None:
    """Two scales a layer are at a multiple of 16 bytes in every second layer alone."""
    fields = tiny_llama(num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2)
    config = DecoderConfig.from_hf(fields)
    decoder = Decoder.random(config, device="cpu", dtype=torch.float32, kv_form="fp8")
    decoder.weights = dataclasses.replace(decoder.weights, kv_scales=KVScales(*torch.ones(2, 12, 2)))
    cache = PagedKVCache(decoder, LIMITS)
    resources = ModelResources(decoder=decoder, cache=cache, tuned=TunedTable(), limits=LIMITS)
    kinds = [cache.own(index).kind for index in range(4)]
    assert kinds[0] == kinds[2] != kinds[1] == kinds[3]
    repeated, computed = RepeatedLayers(), list[int]()

    def compute(index: int, layer: LayerWeights) -> None:
        computed.append(index)
        launch(torch.numel, cache.layer(index).key_scale)

    with first_run():
        resources.run_layers(compute, repeated)
    computed.clear()
    resources.run_layers(compute, repeated)
    assert computed == [11]  # the only one of its kind


def test_layers_before_a_norm_at_another_alignment_are_of_another_kind() -> None:
    """A layer's last kernel reads the norm of the next layer's input."""
    config = DecoderConfig.from_hf(tiny_llama(num_hidden_layers=6))
    decoder = Decoder.random(config, device="cpu", dtype=torch.float32)
    layers = list(decoder.weights.layers)
    norm = torch.ones(len(layers[3].input_norm) + 1)[1:]
    layers[3] = dataclasses.replace(layers[3], input_norm=norm)
    decoder.weights = dataclasses.replace(decoder.weights, layers=tuple(layers))
    resources = ModelResources(
        decoder=decoder, cache=PagedKVCache(decoder, LIMITS), tuned=TunedTable(), limits=LIMITS
    )
    found = [resources._own(index, 0).kind for index in range(4)]
    assert found[0] == found[1] == found[3] != found[2]


def test_layouts_differ_by_shape_type_and_absence() -> None:
    first, second = model(num_hidden_layers=2).decoder.weights.layers
    assert layout(first) == layout(second)
    narrower = dataclasses.replace(second, down=second.down[:, :8])
    biased = dataclasses.replace(second, down_bias=torch.empty(32, device="meta"))
    wider = dataclasses.replace(second, down=second.down.float())
    unknown = dataclasses.replace(second, down=object())
    found = [layout(layer) for layer in (first, narrower, biased, wider, unknown)]
    assert len(set(found)) == len(found)


def resources_of(decoder: Decoder) -> ModelResources:
    cache = PagedKVCache(decoder, LIMITS)
    cache.allocate(1)
    return ModelResources(decoder=decoder, cache=cache, tuned=TunedTable(), limits=LIMITS)


def test_layers_with_tensors_in_one_place_are_compared_among_themselves() -> None:
    """An address in a launch does not tell which of both is meant."""
    config = DecoderConfig.from_hf(tiny_llama(num_hidden_layers=12))
    decoder = Decoder.random(config, device="cpu", dtype=torch.float32)
    layers = list(decoder.weights.layers)
    for index in range(0, 12, 2):
        layers[index] = dataclasses.replace(layers[index], mlp_norm=layers[index].input_norm)
    decoder.weights = dataclasses.replace(decoder.weights, layers=layers)
    assert indices(resources_of(decoder)) == [0, 7, 8, 9, 10, 11]


def test_layers_with_scales_in_one_place_are_of_another_kind() -> None:
    fields = tiny_llama(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
    config = DecoderConfig.from_hf(fields)
    decoder = Decoder.random(config, device="cpu", dtype=torch.float32, kv_form="fp8")
    kinds = []
    for scales in torch.ones(2, 2, 4), torch.ones(1, 2, 4).expand(2, 2, 4):
        decoder.weights = dataclasses.replace(decoder.weights, kv_scales=KVScales(*scales))
        kinds.append(resources_of(decoder).cache.own(0).kind)
    assert kinds[0] != kinds[1]
