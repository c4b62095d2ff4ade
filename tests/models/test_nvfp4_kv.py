"""A KV cache in NVFP4: what it stores and reads, and its bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch
from decoder_parity import random_tokens, shuffled_blocks
from model_zoo import make_model

from drift_sdk import Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation, inspect
from drift_sdk.execution.eager.rounds import poison
from drift_sdk.families import read_spec
from drift_sdk.loading.source import Source
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import (
    KVCache,
    KVForm,
    KVScales,
    bytes_of_head,
    decode,
    encode,
    stored_shape,
)
from drift_sdk.quantised.formats import NVFP4_GROUP, nvfp4_numbers, quantise_groups
from drift_sdk.spec.model import KVShape

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 40, 4
CONFIG = EngineConfig(device="cpu", dtype="float32", kv_dtype="nvfp4", kv_cache_tokens=512, max_model_len=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(1, path)
    return path


@pytest.mark.parametrize("head_dim, num_bytes", [(128, 72), (64, 36), (96, 54), (12, 7), (40, 23)])
def test_head_takes_half_a_byte_a_number_and_one_a_group(head_dim: int, num_bytes: int) -> None:
    assert stored_shape(head_dim, torch.bfloat16, "nvfp4") == (torch.uint8, num_bytes)
    assert bytes_of_head(head_dim, torch.bfloat16, "nvfp4") == num_bytes
    assert bytes_of_head(head_dim, torch.bfloat16, "fp8") == head_dim
    assert bytes_of_head(head_dim, torch.bfloat16, None) == 2 * head_dim


@pytest.mark.parametrize("head_dim", [12, 40, 64])
def test_codes_of_a_head_are_before_its_scales(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((5, 3, head_dim), generator=generator)
    scale = torch.tensor([[0.25], [0.01], [3.0]])
    codes, scales = quantise_groups(x, scale)
    stored = encode(x, scale, "nvfp4")
    assert torch.equal(stored[..., : head_dim // 2], codes)
    assert torch.equal(stored[..., head_dim // 2 :], scales.view(torch.uint8))
    found = decode(stored, scale, "nvfp4", head_dim)
    assert torch.equal(found, nvfp4_numbers(codes, scales.float() * scale))
    places = torch.arange(head_dim) // NVFP4_GROUP
    largest = torch.stack([x[..., places == i].abs().amax(dim=-1) for i in places.unique()], dim=-1)
    assert ((found - x).abs() <= largest[..., places] * (1 / 6 + 1 / 16)).all()


def rounded_cache(decoder: Decoder, scales: KVScales | None) -> KVCache:
    shapes = [layer.mixer.kv for layer in decoder.spec.layers]
    return KVCache(shapes, NUM_BLOCKS, BLOCK_SIZE, decoder.dtype, CPU, scales)


class RoundingCache(KVCache):
    """A cache of the model's dtype that stores the numbers which one in NVFP4 would give back."""

    scales: KVScales

    def store(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        rounded = []
        for x, scales in ((key, self.scales.keys), (value, self.scales.values)):
            codes, of_groups = quantise_groups(x, scales[layer, :, None])
            rounded.append(nvfp4_numbers(codes, of_groups.float() * scales[layer, :, None]).to(x.dtype))
        super().store(layer, slots, *rounded)


@torch.inference_mode()
def logits(decoder: Decoder, cache: KVCache) -> torch.Tensor:
    """Logits of a prompt in two chunks, and of a token after it, with blocks in any order; its last block is
    moved in between."""
    blocks, tokens = shuffled_blocks(), random_tokens(decoder.spec, 12)
    found = []
    for start, num_rows in ((0, 5), (5, 6), (11, 1)):
        batch = AttentionBatch([SequenceRows(blocks, start, num_rows)], cache)
        hidden, _ = decoder.forward(tokens[start : start + num_rows], batch, cache)
        found.append(decoder.logits(hidden))
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_read_the_numbers_that_were_stored(folder: Path, dtype: torch.dtype) -> None:
    source = Source(folder)
    spec = read_spec(source.config)
    decoder = Decoder.load(spec, source.tensors(), device=CPU, dtype=dtype, kv_form="nvfp4")
    scales = decoder.weights.kv_scales
    assert scales is not None and scales.form == decoder.kv_form == "nvfp4"
    heads = torch.rand(scales.keys.shape, generator=torch.Generator().manual_seed(0)) / 8 + 0.01
    scales = KVScales(heads, heads.flip(1), "nvfp4")
    decoder.weights = replace(decoder.weights, kv_scales=scales)
    plain = rounded_cache(decoder, None)
    rounding = rounded_cache(decoder, None)
    rounding.__class__ = RoundingCache
    rounding.scales = scales  # type: ignore[attr-defined]  # of the class above
    found = logits(decoder, rounded_cache(decoder, scales))
    assert torch.equal(found, logits(decoder, rounding))
    assert not torch.equal(found, logits(decoder, plain))


def test_slots_are_moved_with_their_scales() -> None:
    scales = KVScales(torch.full((2, 2), 0.25), torch.full((2, 2), 0.125), "nvfp4")
    cache = KVCache([KVShape(2, 40, 40)] * 2, 4, 4, torch.float32, CPU, scales)
    x = torch.randn((3, 2, 40), generator=torch.Generator().manual_seed(0)) * torch.tensor([[[9.0], [0.1]]])
    slots, targets = torch.tensor([1, 7, 12]), torch.tensor([7, 2, 15])
    for layer in range(2):
        cache.store(layer, slots, x * (1 + layer), -x)
    before = [cache.read(layer, slots) for layer in range(2)]
    cache.move(slots, targets)
    for layer in range(2):
        for moved, stored in zip(cache.read(layer, targets), before[layer], strict=True):
            assert torch.equal(moved, stored)


def test_engines_serve_from_it(folder: Path) -> None:
    wide, narrow = (inspect(folder, CONFIG.replace(kv_dtype=kind)) for kind in (None, "nvfp4"))
    assert narrow.kv_dtype == "nvfp4" and "nvfp4, " in narrow.text()
    spec = read_spec(Source(folder).config)
    heads, head_dim = 2 * spec.num_layers * spec.attention.num_kv_heads, spec.attention.head_dim
    assert wide.kv_bytes_per_token == 4 * heads * head_dim
    assert narrow.kv_bytes_per_token == heads * bytes_of_head(head_dim, torch.float32, "nvfp4")

    async def main(kv_dtype: str | None) -> Completion:
        params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)
        async with Engine(folder, CONFIG.replace(kv_dtype=kv_dtype)) as engine:
            assert engine.stats().kv_dtype == (kv_dtype or "float32")
            return await engine.generate(list(range(3, 40)), params)

    rounded, exact = (anyio.run(main, kv_dtype) for kv_dtype in ("nvfp4", None))
    assert len(rounded.token_ids) == 8
    assert abs(rounded.logprobs[1].logprob - exact.logprobs[1].logprob) > 1e-4


@pytest.mark.parametrize("form", ["nvfp4", "fp8", None])
def test_rejected_rows_are_overwritten_with_nan(form: KVForm | None) -> None:
    scales = None if form is None else KVScales(torch.ones(2, 2), torch.ones(2, 2), form)
    cache = KVCache([KVShape(2, 40, 40)] * 2, 4, 4, torch.bfloat16, CPU, scales)
    x, slots = torch.ones(16, 2, 40, dtype=torch.bfloat16), torch.arange(16)
    for layer in range(2):
        cache.store(layer, slots, x, x)
    poison(cache, [2, 9])
    for layer in range(2):
        for numbers in cache.read(layer, slots):
            assert numbers.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [2, 9]
            assert numbers.isnan().flatten(1).any(1).sum() == 2


def test_checked_drafts_change_nothing(folder: Path) -> None:
    speculation = Speculation(draft=NGram(min_length=1), checks=True, adaptive=False)

    async def main(speculation: Speculation | None) -> Completion:
        async with Engine(folder, CONFIG.replace(speculation=speculation)) as engine:
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            found = await engine.generate([3, 4, 5, 3, 4, 5, 3, 4], params)
            assert not engine.stats().violations
            return found

    checked, plain = (anyio.run(main, each) for each in (speculation, None))
    assert checked.speculation is not None and checked.speculation.num_rewound > 0
    assert checked.token_ids == plain.token_ids
