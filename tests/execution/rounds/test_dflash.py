"""The DFlash drafter of graphs against the eager drafter: same steps, same drafts, same keys and values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_zoo import NUM_HEADS, make_dflash
from msgspec import structs
from slow_cases import slow_after
from tiny_llama import tiny_llama
from tolerances import assert_near

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.eager.drafters import DFlashDrafter, Span
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.execution.forward.caches import ModelResources, PagedKVCache
from drift_sdk.execution.forward.kernel_weights import KernelWeight, arrange_decoder
from drift_sdk.execution.forward.rows import HiddenStates, Rows
from drift_sdk.execution.rounds import dflash as dflash_rounds
from drift_sdk.execution.rounds.dflash import DFlashRoundDrafter
from drift_sdk.execution.rounds.drafters import ComputedChunks, RoundSizes, VerifiedRows
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.channels import MlpWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashDecoder
from drift_sdk.models.draft_head import DraftForm
from drift_sdk.quantised.formats import quantise_fp8
from drift_sdk.quantised.weight import dense
from drift_sdk.steps import ExecutorLimits, SlotSampling
from drift_sdk.trees import DraftLimit

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB_SIZE, NUM_TOKENS, MAX_DRAFTS = 160, 48, 7
TARGET = tiny_llama(vocab_size=VOCAB_SIZE, num_hidden_layers=3, max_position_embeddings=256)
# Temperature and seed of each slot.
SAMPLINGS = [(0.0, 0), (0.9, 5), (1.4, 2**40 + 1)]


class Pair:
    """Runs both drafters through the same steps of a target with random features, drawn once for each slot
    and position. Memory that was never written has NaN."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        block_size: int = 4,
        *,
        form: DraftForm = "expanded",
        embedding_multiplier: float = 1.0,
        **sizes: int,
    ) -> None:
        """seed: of the head. form: of its weights. embedding_multiplier, sizes: of the target."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(TARGET | sizes))
        spec = structs.replace(read_spec(TARGET | sizes), embedding_multiplier=embedding_multiplier)
        target = Decoder.random(spec, device=DEVICE, dtype=torch.float32)
        make_dflash(seed, folder / "draft", folder)
        source = resolve(folder / "draft", role="draft")
        draft, arranged = (DFlashDecoder.load(source, target, form=form) for _ in range(2))
        arrange_decoder(target, arranged)
        max_blocks = -(-NUM_TOKENS // block_size)
        limits = ExecutorLimits(
            max_num_seqs=3,
            max_model_len=NUM_TOKENS,
            num_blocks=3 * max_blocks,
            block_size=block_size,
            vocab_size=VOCAB_SIZE,
        )
        self.draft, self.arranged, self.block_size = draft, arranged, block_size
        self.num_masks = draft.config.num_masks
        self.eager = DFlashDrafter(draft, limits)
        self.table = SlotTable(limits, torch.device(DEVICE))
        self.rounds = DFlashRoundDrafter(
            arranged,
            ModelResources(
                decoder=target, cache=PagedKVCache(target, limits), tuned=TunedTable(), limits=limits
            ),
            self.table,
            Workspace(torch.device(DEVICE)),
            RoundSizes(max_num_slots=4, max_draft_tokens=MAX_DRAFTS, max_prefill_rows=24),
        )
        self.rounds.kv_cache.allocate(limits.num_blocks)
        for tensor in (*self.eager._cache.tensors, *self.rounds.kv_cache.groups[0]):
            tensor.fill_(torch.nan)
        self.generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCAB_SIZE, (3, NUM_TOKENS), generator=self.generator)
        shape = (len(draft.aux_layers), 3, NUM_TOKENS, spec.hidden_size)
        self.features = torch.randn(shape, generator=self.generator)
        blocks = torch.randperm(limits.num_blocks, generator=self.generator).view(3, max_blocks)
        self.slots = []
        for index, (temperature, seed) in enumerate(SAMPLINGS):
            slot = Slot(
                SlotSampling(
                    temperature=temperature,
                    top_k=0,
                    top_p=1.0,
                    min_p=0.0,
                    seed=seed,
                    stop_token_ids=(),
                    num_prompt_tokens=1,
                    max_length=NUM_TOKENS,
                )
            )
            slot.place_blocks(0, tuple(blocks[index].tolist()))
            self.table.columns.temperature[index] = temperature
            self.table.columns.seed[index] = seed
            self.table.block_table[index, :max_blocks] = blocks[index].int()
            self.slots.append(slot)

    def share(self, slot: int, other: int, num_blocks: int) -> None:
        """Make `slot` a sequence that found the first blocks of `other` in the prefix cache."""
        size = num_blocks * self.block_size
        self.tokens[slot, :size] = self.tokens[other, :size]
        self.features[:, slot, :size] = self.features[:, other, :size]
        self.slots[slot].block_table[:num_blocks] = self.slots[other].block_table[:num_blocks]
        self.table.block_table[slot, :num_blocks] = self.table.block_table[other, :num_blocks]

    def prefill(self, chunks: list[tuple[int, int, int]], num_rows: int, gap: int = 1) -> None:
        """Run chunks (slot, start, end) with `gap` padding rows after each."""
        inputs = ints([[-1] * num_rows, [2**31 - 1] * num_rows, [2**31 - 1] * num_rows])
        hidden = self.hidden(num_rows)
        spans = []
        first = 0
        for index, start, end in chunks:
            slot, rows = self.slots[index], slice(first, first + end - start)
            inputs[0, rows] = index
            inputs[1, rows] = self.tokens[index, start:end].int().to(DEVICE)
            inputs[2, rows] = ints(list(range(start, end)))
            hidden[:, rows] = self.features[:, index, start:end].to(DEVICE)
            slot.length, slot.last_token = end + 1, int(self.tokens[index, end])
            next_tokens = self.tokens[index, start + 1 : end + 1].tolist()
            rows_of_span = range(first, rows.stop)
            spans.append(Span(slot, start, int(self.tokens[index, start]), next_tokens, rows_of_span))
            first = rows.stop + gap

        self.eager.draft_extend(spans, list(hidden), hidden[0])
        computed = ComputedChunks(
            rows=Rows(slot=inputs[0], token=inputs[1], position=inputs[2]),
            hidden=hidden_states(hidden),
            next_token=ints([-1] * num_rows),
            hits=ints([-1, -1]),
            last_token=self.table.state.last_token,
        )
        self.rounds.draft_extend_prefill(computed)
        self.compare([index for index, _, _ in chunks])

    def round(self, num_drafts: int, plan: list[tuple[int, int, int]]) -> None:
        """Run a round with an entry (slot, most drafts, tokens emitted) for each slot; slot -1: padding."""
        num_rows_each, num_slots = num_drafts + 1, len(plan)
        num_rows = num_slots * num_rows_each
        garbage = 2**31 - 1
        rows = Rows(
            slot=ints([-1] * num_rows), token=ints([-1] * num_rows), position=ints([garbage] * num_rows)
        )
        chosen = torch.randint(VOCAB_SIZE, (num_rows,), generator=self.generator).int().to(DEVICE)
        hidden = self.hidden(num_rows)
        for group, (index, cap, num_emitted) in enumerate(plan):
            first = group * num_rows_each
            chosen[first + num_emitted : first + num_rows_each] = -1 if index < 0 else chosen[first]
            if index < 0:
                continue

            length = self.slots[index].length
            rows.slot[first : first + cap + 1] = index
            rows.token[first] = self.slots[index].last_token
            rows.position[first : first + num_rows_each] = ints(list(range(length - 1, length + num_drafts)))
            true = slice(length - 1, length - 1 + num_emitted)
            hidden[:, first : first + num_emitted] = self.features[:, index, true].to(DEVICE)
            following = self.tokens[index, length : length + num_emitted]
            chosen[first : first + num_emitted] = following.int().to(DEVICE)

        live = [(group, *entry) for group, entry in enumerate(plan) if entry[0] >= 0]
        drafts = self.eager.propose(
            [self.slots[index] for _, index, _, _ in live], [DraftLimit(cap, cap) for *_, cap, _ in live]
        )
        self.rounds.propose(rows, num_slots=num_slots, num_draft_tokens=num_drafts)
        found = rows.token.view(num_slots, num_rows_each).tolist()
        for (group, index, cap, _), draft in zip(live, drafts, strict=True):
            assert len(draft.token_ids) == cap
            tokens = [self.slots[index].last_token, *draft.token_ids]
            assert found[group] == [*tokens, *[-1] * (num_drafts - cap)]

        spans = []
        for group, index, _, num_emitted in live:
            slot = self.slots[index]
            end = slot.length + num_emitted
            following = self.tokens[index, slot.length : end].tolist()
            drafted_rows = range(group * num_rows_each, group * num_rows_each + num_emitted)
            spans.append(Span(slot, slot.length - 1, slot.last_token, following, drafted_rows))
            slot.length, slot.last_token = end, int(self.tokens[index, end - 1])
        self.eager.draft_extend(spans, list(hidden), hidden[0])
        verified = VerifiedRows(
            rows=rows,
            hidden=hidden_states(hidden),
            chosen=chosen,
            emitted=ints([num_emitted for *_, num_emitted in plan]),
        )
        self.rounds.draft_extend(verified)
        self.compare([index for _, index, _, _ in live])

    def compare(self, slots: list[int]) -> None:
        """Keys and values of all positions before the newest token."""
        size = self.block_size
        for index in slots:
            slot = self.slots[index]
            places = torch.arange(slot.length - 1, device=DEVICE)
            table = torch.tensor(slot.block_table, device=DEVICE)
            block, offset = table[places // size], places % size
            pairs = zip(self.rounds.kv_cache.groups[0], self.eager._cache.tensors, strict=True)
            for found, expected in pairs:
                found = found[:, block, :, offset].transpose(0, 1)
                assert_near(found, expected[:, block * size + offset], inner=192, depth=6)

    def hidden(self, num_rows: int) -> torch.Tensor:
        return torch.full((len(self.features), num_rows, self.features.shape[-1]), torch.nan, device=DEVICE)


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def hidden_states(streams: torch.Tensor) -> HiddenStates:
    """The residual stream at each boundary."""
    by_layer = dict(enumerate(streams))
    return HiddenStates(streams[0], tuple(by_layer), by_layer)


@torch.inference_mode()
def check(pair: Pair) -> None:
    """A prompt, a prefix hit, drafts that are rejected in the middle, accepted as a whole, or not at all."""
    most = pair.num_masks
    pair.prefill([(0, 0, 13)], num_rows=13)
    pair.share(2, 0, 3)
    pair.prefill([(2, 12, 14)], num_rows=2)
    pair.round(most, [(0, most, 2), (2, most - 1, most)])
    pair.round(most - 1, [(2, most - 1, 1), (-1, 0, 0), (0, 1, 2)])
    pair.round(most, [(0, most, 1), (2, most, most + 1)])


@pytest.mark.parametrize("seed", slow_after(2, [7, 1, *({*range(NUM_HEADS)} - {7, 1})]))
def test_state_and_drafts_equal_the_eager_drafter(seed: int, tmp_path: Path) -> None:
    check(Pair(seed, tmp_path))


@pytest.mark.parametrize("seed", slow_after(1, [0, 7]))
@torch.inference_mode()
def test_mixed_steps_equal_the_eager_drafter(seed: int, tmp_path: Path) -> None:
    """Several chunks in a step, a prefix hit beside a chunk, padding rows, limited drafts, rounds without
    drafts, and masks behind the longest sequence."""
    pair = Pair(seed, tmp_path)
    pair.prefill([(0, 0, 5)], num_rows=6)
    pair.prefill([(1, 0, 1), (0, 5, 9)], num_rows=7)
    pair.round(3, [(0, 3, 4), (-1, 0, 0), (1, 2, 1)])
    pair.share(2, 0, 2)
    pair.prefill([(1, 2, 3), (2, 8, 10)], num_rows=6)
    pair.round(3, [(1, 3, 2), (2, 3, 4), (0, 0, 1)])
    pair.round(0, [(0, 0, 1), (1, 0, 1)])
    pair.round(2, [(2, 1, 1), (0, 2, 3), (1, 2, 3), (-1, 0, 0)])
    pair.prefill([(1, 9, 30)], num_rows=22)
    pair.prefill([(1, 30, 44)], num_rows=22)
    pair.round(2, [(1, 2, 2)])
    pair.round(1, [(1, 1, 1)])


@torch.inference_mode()
def test_long_blocks_and_many_rows_equal_the_eager_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products by cuBLAS, a fast forward pass, and several tiles of keys within a block."""
    monkeypatch.setattr(dflash_rounds, "MAX_MULTIPLY_ROWS", 2)
    pair = Pair(1, tmp_path, block_size=32)
    pair.prefill([(0, 0, 7), (1, 0, 9)], num_rows=24, gap=4)
    pair.prefill([(1, 9, 32)], num_rows=24)
    pair.round(1, [(1, 1, 2), (0, 1, 1)])


@pytest.mark.parametrize("many", slow_after(1, [False, True]))
@pytest.mark.parametrize("seed", slow_after(1, [1, 2]))
@torch.inference_mode()
def test_quantised_head_equals_the_eager_drafter(
    seed: int, many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if many:
        monkeypatch.setattr(dflash_rounds, "MAX_MULTIPLY_ROWS", 2)
    pair = Pair(seed, tmp_path, form="fp8", hidden_size=64)
    weights = pair.arranged.weights
    layer = weights.layers[0]
    assert isinstance(layer.channel, MlpWeights)
    assert all(isinstance(matrix, KernelWeight) for matrix in (weights.fc, layer.mixer.qkv))
    pair.prefill([(0, 0, 5)], num_rows=5)
    pair.round(2, [(0, 2, 2)])
    pair.round(2, [(0, 2, 1)])


def test_a_quantised_head_is_arranged_once(tmp_path: Path) -> None:
    """Target and draft have the same."""
    settings = TARGET | {"hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    target = Decoder.random(read_spec(settings), device=DEVICE, dtype=torch.float32)
    target.weights = dataclasses.replace(target.weights, head=quantise_fp8(dense(target.weights.head)))
    make_dflash(0, tmp_path / "draft", tmp_path)
    draft = DFlashDecoder.load(resolve(tmp_path / "draft", role="draft"), target)
    arrange_decoder(target, draft)
    assert isinstance(target.weights.head, KernelWeight)
    assert draft.weights.head is target.weights.head
    assert draft.decoder().weights.embedding is target.weights.embedding


def see_no_later_rows(patch: pytest.MonkeyPatch) -> None:
    """A causal mask inside the draft."""
    seen_rows = DFlashRoundDrafter._seen_rows

    def causal(self: DFlashRoundDrafter, is_causal: bool, *sizes: int) -> Any:
        found = seen_rows(self, is_causal, *sizes)
        size = 1 + self._num_masks
        path = found.path.view(-1, size, found.path.shape[1])
        path[:, :, :size] = path[:, :, :size].tril() - torch.ones(size, size).triu(1).int()
        return found

    patch.setattr(DFlashRoundDrafter, "_seen_rows", causal)


def store_features_of_other_rows(patch: pytest.MonkeyPatch) -> None:
    fuse = DFlashRoundDrafter._fuse
    patch.setattr(DFlashRoundDrafter, "_fuse", lambda *given: fuse(*given).roll(1, 0))


def keep_features_of_rejected_rows(patch: pytest.MonkeyPatch) -> None:
    """The row behind those emitted is stored, and not again when its token is known."""
    original = dflash_rounds.round_rows

    def rows(slot: torch.Tensor, position: torch.Tensor, *given: Any) -> None:
        chosen, emitted, out = given
        original(slot, position, chosen, emitted + 1, out)
        out[0].view(len(emitted), -1)[:, 0] = -1

    patch.setattr(dflash_rounds, "round_rows", rows)


def store_at_the_next_position(patch: pytest.MonkeyPatch) -> None:
    store = DFlashRoundDrafter._store
    patch.setattr(
        DFlashRoundDrafter,
        "_store",
        lambda self, slot, position, hidden: store(self, slot, (position + 1).clamp(max=47), hidden),
    )


def draft_behind_the_first_mask(patch: pytest.MonkeyPatch) -> None:
    compute = DFlashRoundDrafter._compute
    patch.setattr(DFlashRoundDrafter, "_compute", lambda *given: compute(*given).roll(1, 1))


def forget_the_wider_window(patch: pytest.MonkeyPatch) -> None:
    """Rows that see later ones see as far back as the last of these."""
    attend = dflash_rounds.DraftAttention.attend

    def without(self: Any, layer: Any) -> None:
        position = self._kinds[False][1].position
        position.copy_(
            position.view(-1, 1 + self._num_masks)[:, :1].expand(-1, 1 + self._num_masks).flatten()
        )
        attend(self, layer)

    patch.setattr(dflash_rounds.DraftAttention, "attend", without)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of NaN
@pytest.mark.parametrize(
    ("fault", "seed"),
    [
        (see_no_later_rows, 0),
        (store_features_of_other_rows, 0),
        (keep_features_of_rejected_rows, 0),
        (store_at_the_next_position, 0),
        (draft_behind_the_first_mask, 0),
        (forget_the_wider_window, 7),
    ],
)
def test_faults_are_detected(fault: Callable[[pytest.MonkeyPatch], None], seed: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError):
            check(Pair(seed, tmp_path))


def test_embeddings_are_what_the_target_makes_of_them(tmp_path: Path) -> None:
    """A head without an embedding of its own, behind a target that multiplies its embeddings."""
    pair = Pair(6, tmp_path, embedding_multiplier=3.0)
    assert pair.arranged.weights.embedding is None
    check(pair)
