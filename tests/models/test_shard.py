"""The division of a model between GPUs."""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter

import msgspec
import pytest
import torch

from drift_sdk._kernels.gemm.slices import num_slices
from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder, random_tensors
from drift_sdk.models.shard import Shard, ShardedTensors, cut_head, load_shard, shard_obstacles
from drift_sdk.models.weights import DecoderWeights, meta_weights, tensor_shapes
from drift_sdk.spec.model import ModelSpec

SIZES = (2, 4, 8)
CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
NORMS = ("mixer_norm", "channel_norm", "mixer.query_norm", "mixer_post_norm")
TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def spec_of(family: str, **fields: object) -> ModelSpec:
    return read_spec({"model_type": family, **TINY, **fields})


def parts_of(spec: ModelSpec, size: int) -> list[Decoder]:
    parts = []
    for rank in range(size):
        shard = Shard(rank=rank, size=size)
        parts.append(load_shard(spec, random_tensors(spec, **CPU), shard, **CPU))
        cut_head(parts[-1], shard)
    return parts


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3", "gemma3_text"])
def test_parts_together_are_the_model(family: str, size: int) -> None:
    """Rows of the head and of what comes before sums, columns of what is summed, and all of the rest."""
    spec = spec_of(family)
    whole, parts = Decoder.random(spec, **CPU).weights, [part.weights for part in parts_of(spec, size)]
    attention, mlp = spec.attention, spec.layers[0].channel
    heads = attention.num_heads * attention.head_dim
    for index, layer in enumerate(whole.layers):
        layers = [part.layers[index] for part in parts]
        for module, names, sizes in (
            ("mixer", ("qkv", "qkv_bias"), [heads, heads, heads]),
            ("channel", ("gate_up", "gate_up_bias"), [mlp.intermediate_size] * 2),
        ):
            for name in names:
                expected = getattr(getattr(layer, module), name)
                found = [getattr(getattr(part, module), name) for part in layers]
                if expected is None:
                    assert all(part is None for part in found)
                    continue

                cut = [torch.split(part, [s // size for s in sizes]) for part in found]
                joined = torch.cat([torch.cat(same) for same in zip(*cut, strict=True)])
                assert torch.equal(joined, expected)
        joined = torch.cat([part.mixer.output for part in layers], dim=1)
        assert torch.equal(joined, layer.mixer.output)
        joined = torch.cat([part.channel.down for part in layers], dim=1)
        assert torch.equal(joined, layer.channel.down)
        for name in NORMS:
            expected = attrgetter(name)(layer)
            found = [attrgetter(name)(part) for part in layers]
            if expected is not None:
                assert all(torch.equal(part, expected) for part in found)
    assert all(torch.equal(part.embedding, whole.embedding) for part in parts)
    assert torch.equal(torch.cat([part.head for part in parts]), whole.head)


def test_the_part_of_a_tied_head_takes_no_memory() -> None:
    spec = spec_of("llama", tie_word_embeddings=True)
    for rank, part in enumerate(parts_of(spec, 2)):
        weights: DecoderWeights = part.weights
        assert weights.head.data_ptr() == weights.embedding[20 * rank :].data_ptr()


def test_a_vocabulary_that_gpus_do_not_divide_is_whole_on_each() -> None:
    spec = spec_of("llama", vocab_size=41)
    assert [part.weights.head.shape[0] for part in parts_of(spec, 2)] == [41, 41]


def test_sinks_go_with_their_heads() -> None:
    spec = spec_of("llama")

    class Sinks:
        location = "here"

        def names(self) -> Collection[str]:
            return ("model.layers.0.self_attn.sinks",)

        def shape(self, name: str) -> tuple[int, ...]:
            return (8,)

        def file(self, name: str) -> str:
            return self.location

        def get(self, name: str) -> torch.Tensor:
            return torch.arange(8)

    tensors = ShardedTensors(Sinks(), spec, Shard(rank=1, size=4))
    (name,) = tensors.names()
    assert tensors.shape(name) == (2,) and tensors.get(name).tolist() == [2, 3]


def test_files_of_another_model_are_rejected_by_their_own_shapes() -> None:
    spec = spec_of("llama")
    tensors = random_tensors(spec_of("llama", intermediate_size=256), **CPU)
    with pytest.raises(ModelLoadError, match=r"shape \[256, 16\], expected \[512, 16\]"):
        load_shard(spec, tensors, Shard(rank=0, size=2), **CPU)


@pytest.mark.parametrize(
    ("fields", "size", "expected"),
    [
        ({}, 8, ()),
        ({"num_key_value_heads": 2}, 4, ("2 KV heads",)),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3},
            2,
            ("3 KV heads", "9 heads", "576 columns of attention's output"),
        ),
        ({"intermediate_size": 576}, 2, ("576 columns of the MLP's down",)),
        ({"intermediate_size": 577}, 2, ("577 columns of the MLP", "577 columns of the MLP's down")),
    ],
)
def test_obstacles_are_named(fields: dict[str, int], size: int, expected: tuple[str, ...]) -> None:
    found = list(shard_obstacles(spec_of("llama", **fields), size))
    assert len(found) == len(expected)
    assert all(one.startswith(start) for one, start in zip(found, expected, strict=True))


def test_experts_are_an_obstacle() -> None:
    spec = read_spec(TINY | {"model_type": "mixtral", "num_local_experts": 4})
    assert list(shard_obstacles(spec, 2)) == ["a mixture of experts"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shapes", [LLAMA_8B, LLAMA_70B], ids=["8b", "70b"])
def test_published_models_on_paper(shapes: dict[str, int], size: int) -> None:
    """Weights are divided evenly, products before sums keep their slices, and with two GPUs sums do too."""
    spec = read_spec({"model_type": "llama", **shapes})
    assert not list(shard_obstacles(spec, size))
    shard = Shard(rank=size - 1, size=size)
    part = meta_weights(shard.spec(spec), torch.bfloat16).layers[0]
    whole = meta_weights(msgspec.structs.replace(spec, layers=spec.layers[:1]), torch.bfloat16).layers[0]
    for name in ("mixer.qkv", "channel.gate_up", "mixer.output", "channel.down"):
        assert attrgetter(name)(part).numel() * size == attrgetter(name)(whole).numel()
    assert shard.row_slices(*part.mixer.qkv.shape) == num_slices(*whole.mixer.qkv.shape)
    for name in ("mixer.output", "channel.down"):
        slices = shard.column_slices(*attrgetter(name)(part).shape)
        assert slices == 1
        assert (slices * size == num_slices(*attrgetter(name)(whole).shape)) == (size == 2)


def test_shapes_are_those_of_the_part() -> None:
    spec, shard = spec_of("phi3"), Shard(rank=0, size=2)
    tensors = ShardedTensors(random_tensors(spec, **CPU), spec, shard)
    expected = tensor_shapes(shard.spec(spec))
    names = [name for name in expected if name not in ("lm_head.weight",)]
    assert {name: tensors.shape(name) for name in names} == {name: expected[name] for name in names}
    assert all(tensors.get(name).shape == tensors.shape(name) for name in tensors.names())
