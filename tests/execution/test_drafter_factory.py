"""Drafter factories: what they state agrees with the drafters they make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dflash_zoo import make_dflash
from draft_zoo import make_draft
from interpreted_device import InterpretedDevice
from tiny_llama import tiny_llama

from drift_sdk import EngineConfig, NGram
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.resources import DeviceResources, PayloadBuffer, Ring, RingSizes
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device.stages import NO_STAGE_MARKS
from drift_sdk.execution.drafter_factory import (
    NO_DRAFTER,
    DFlashDrafterFactory,
    DrafterFactory,
    EagleDrafterFactory,
    NGramDrafterFactory,
)
from drift_sdk.execution.eager.drafters import DFlashDrafter, EagleDrafter, NGramDrafter
from drift_sdk.execution.forward.caches import ModelResources, PagedKVCache
from drift_sdk.execution.rounds.dflash import DFlashRoundDrafter
from drift_sdk.execution.rounds.drafters import NGramRoundDrafter, RoundDrafter, RoundSizes
from drift_sdk.execution.rounds.eagle import EagleRoundDrafter
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashDecoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.startup.executor_factory import kv_demand
from drift_sdk.startup.model_parts import open_drafter_factory
from drift_sdk.steps import ExecutorLimits

TARGET = tiny_llama(vocab_size=160, num_hidden_layers=3)
LIMITS = ExecutorLimits(max_num_seqs=2, max_model_len=40, num_blocks=20, block_size=4, vocab_size=160)


@pytest.fixture
def target() -> Decoder:
    return Decoder.random(read_spec(TARGET), device="cpu", dtype=torch.float32)


@pytest.fixture
def draft(target: Decoder, tmp_path: Path) -> DraftDecoder:
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    make_draft("reference", tmp_path / "draft", tmp_path)
    return DraftDecoder.load(tmp_path / "draft", target)


def round_drafter(factory: DrafterFactory, target: Decoder) -> RoundDrafter | None:
    device = InterpretedDevice()
    table = SlotTable(LIMITS, device.torch_device, has_history=factory.needs_history)
    sizes = RingSizes(
        num_entries=1,
        max_updates=1,
        payload_words=1,
        record_words=1,
        max_slots=1,
        num_draft_masks=0,
        mask_words=1,
    )
    ring = Ring(device, sizes)
    resources = DeviceResources(
        device=device,
        ring=ring,
        payload=PayloadBuffer(ring, table.words, 1),
        table=table,
        workspace=Workspace(device.torch_device),
        stages=NO_STAGE_MARKS,
    )
    cache = PagedKVCache(target, LIMITS)
    model = ModelResources(decoder=target, cache=cache, tuned=TunedTable(), limits=LIMITS)
    return factory.round_drafter(
        resources, model, RoundSizes(max_num_slots=2, max_draft_tokens=3, max_prefill_rows=16)
    )


def test_no_drafter_needs_nothing(target: Decoder) -> None:
    assert open_drafter_factory(EngineConfig(), target, lambda stage, fraction: None) is NO_DRAFTER
    assert NO_DRAFTER.draft_choices == () and not NO_DRAFTER.is_adaptive
    assert not (NO_DRAFTER.needs_history or NO_DRAFTER.needs_draft_kv or NO_DRAFTER.always_drafts)
    assert NO_DRAFTER.eager_drafter(target, LIMITS) is None
    assert round_drafter(NO_DRAFTER, target) is None


def test_ngram_drafter_needs_history(target: Decoder) -> None:
    factory = NGramDrafterFactory(NGram(), (1, 3))
    assert factory.needs_history and not factory.needs_draft_kv and not factory.always_drafts
    assert isinstance(factory.eager_drafter(target, LIMITS), NGramDrafter)
    drafter = round_drafter(factory, target)
    assert isinstance(drafter, NGramRoundDrafter)
    assert drafter.kv_cache is None


def test_eagle_drafter_needs_draft_kv(target: Decoder, draft: DraftDecoder) -> None:
    factory = EagleDrafterFactory(draft, (1, 3))
    assert factory.needs_draft_kv and factory.always_drafts and not factory.needs_history
    assert isinstance(factory.eager_drafter(target, LIMITS), EagleDrafter)
    drafter = round_drafter(factory, target)
    assert isinstance(drafter, EagleRoundDrafter)
    assert drafter.aux_layers == draft.aux_layers


def dflash_head(target: Decoder, folder: Path) -> DFlashDecoder:
    (folder / "config.json").write_text(json.dumps(TARGET))
    make_dflash(7, folder / "masks", folder)
    return DFlashDecoder.load(resolve(folder / "masks", role="draft"), target)


def test_dflash_drafter_needs_nothing_beside_its_cache(target: Decoder, tmp_path: Path) -> None:
    head = dflash_head(target, tmp_path)
    factory = DFlashDrafterFactory(head, (1, 3))
    assert factory.always_drafts and not (factory.needs_draft_kv or factory.needs_history)
    assert factory.num_graph_layers == 2 * head.config.shape.num_layers
    assert isinstance(factory.eager_drafter(target, LIMITS), DFlashDrafter)
    drafter = round_drafter(factory, target)
    assert isinstance(drafter, DFlashRoundDrafter)
    assert drafter.aux_layers == head.aux_layers


def block_bytes(decoder: Decoder, factory: DrafterFactory) -> int:
    return kv_demand(EngineConfig(), decoder, factory, LIMITS.block_size, "eager").bytes_per_block


def test_kv_demand_is_what_caches_allocate(target: Decoder, draft: DraftDecoder) -> None:
    """Bytes of a block: keys and values of the target, and all that the drafter keeps for it."""
    itemsize = 4
    cache = PagedKVCache(target, LIMITS)
    (tensors,) = cache.groups
    target_bytes = (tensors.keys.numel() + tensors.values.numel()) * itemsize  # of its only block
    assert block_bytes(target, NO_DRAFTER) == target_bytes
    ngrams = NGramDrafterFactory(NGram(), (3,))
    assert block_bytes(target, ngrams) == target_bytes

    factory = EagleDrafterFactory(draft, (3,))
    drafter = round_drafter(factory, target)
    assert drafter is not None and drafter.kv_cache is not None
    kept = drafter.kv_cache
    draft_bytes = (kept.keys.numel() + kept.values.numel() + kept.block_features.numel()) * itemsize
    assert block_bytes(target, factory) == target_bytes + draft_bytes

    # A cache of e4m3 has a byte for each number of the target; the draft's remains as it is.
    narrow = Decoder.random(target.spec, device="cpu", dtype=torch.float32, kv_form="fp8")
    assert PagedKVCache(narrow, LIMITS).groups[0].keys.nbytes == tensors.keys.numel()
    assert block_bytes(narrow, factory) == target_bytes // itemsize + draft_bytes


def test_kv_demand_counts_all_layers_of_a_dflash_head(target: Decoder, tmp_path: Path) -> None:
    """The blocks that grow with the cache; rows of masks lie behind them, and are there from the start."""
    factory = DFlashDrafterFactory(dflash_head(target, tmp_path), (3,))
    drafter = round_drafter(factory, target)
    assert isinstance(drafter, DFlashRoundDrafter)
    sizes = []
    for num_blocks in (1, 6):
        drafter.kv_cache.allocate(num_blocks)
        sizes.append(sum(tensor.nbytes for group in drafter.kv_cache.groups for tensor in group))
    assert sizes[1] - sizes[0] == 5 * (block_bytes(target, factory) - block_bytes(target, NO_DRAFTER))
    num_rows = 2 * (1 + factory.draft.config.num_masks)  # of the two slots of a round
    per_block = block_bytes(target, factory) - block_bytes(target, NO_DRAFTER)
    assert sizes[0] == per_block * (1 + -(-num_rows // LIMITS.block_size))
