"""The EAGLE-3 drafter of graphs against the eager drafter: same steps, same drafts, same state."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_zoo import make_draft
from msgspec import structs
from slow_cases import slow_after
from tiny_llama import tiny_llama
from tolerances import assert_near

from drift_sdk._kernels.attention.decode import AttentionConfig
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.eager.drafters import EagleDrafter, Span, state_of
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.execution.forward import attention
from drift_sdk.execution.forward import caches as draft_cache
from drift_sdk.execution.forward import draft as draft_forward
from drift_sdk.execution.forward.caches import ModelResources, PagedKVCache
from drift_sdk.execution.forward.kernel_weights import KernelWeight, arrange_decoder
from drift_sdk.execution.forward.rows import HiddenStates, Rows
from drift_sdk.execution.rounds import eagle as eagle_rounds
from drift_sdk.execution.rounds.drafters import ComputedChunks, RoundSizes, VerifiedRows
from drift_sdk.execution.rounds.eagle import EagleRoundDrafter
from drift_sdk.families import read_spec
from drift_sdk.models.channels import MlpWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder, DraftForm
from drift_sdk.spec.model import Attention, NormKind
from drift_sdk.steps import ExecutorLimits, SlotSampling
from drift_sdk.trees import DraftLimit

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB_SIZE, NUM_TOKENS, MAX_CHUNKS = 160, 48, 2
TARGET = tiny_llama(vocab_size=VOCAB_SIZE, num_hidden_layers=3, max_position_embeddings=256)
# Temperature and seed of each slot.
SAMPLINGS = [(0.0, 0), (0.9, 5), (1.4, 2**40 + 1)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs per attention launch: each takes the interpreter a millisecond."""
    if DEVICE == "cpu":
        monkeypatch.setattr(attention, "attention_config", lambda *_: AttentionConfig(num_programs=4))


class Pair:
    """Runs both drafters through the same steps of a target with random features, drawn once for each slot
    and position."""

    def __init__(
        self,
        variant: str,
        folder: Path,
        block_size: int = 4,
        *,
        norm_kind: NormKind = "rounded",
        form: DraftForm = "expanded",
        **sizes: int,
    ) -> None:
        """norm_kind: of the target's final norm. form: of the draft's weights. sizes: those that are not
        TARGET's."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(TARGET | sizes))
        spec = read_spec(TARGET | sizes)
        spec = structs.replace(spec, final_norm=structs.replace(spec.final_norm, kind=norm_kind))
        target = Decoder.random(spec, device=DEVICE, dtype=torch.float32)
        make_draft(variant, folder / "draft", folder)
        draft, arranged = (DraftDecoder.load(folder / "draft", target, form=form) for _ in range(2))
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
        self.eager = EagleDrafter(draft, target, limits)
        self.table = SlotTable(limits, torch.device(DEVICE))
        model = ModelResources(
            decoder=target, cache=PagedKVCache(target, limits), tuned=TunedTable(), limits=limits
        )
        self.rounds = EagleRoundDrafter(
            arranged,
            model,
            self.table,
            Workspace(torch.device(DEVICE)),
            RoundSizes(max_num_slots=4, max_draft_tokens=3, max_prefill_rows=24),
        )
        self.rounds.kv_cache.allocate(limits.num_blocks)
        self.generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCAB_SIZE, (3, NUM_TOKENS), generator=self.generator)
        shape = (len(draft.aux_layers) + 1, 3, NUM_TOKENS, spec.hidden_size)
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
            self.eager.enter(slot, ())
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
        """Run chunks (slot, start, end) with `gap` padding rows after each. The next token of each chunk is
        known, except for the last chunk."""
        inputs = self.ints([[-1] * num_rows, [2**31 - 1] * num_rows, [2**31 - 1] * num_rows])
        following = self.ints([-1] * num_rows)
        hits = self.ints([-1] * MAX_CHUNKS)
        aux_hidden = self.step_features(num_rows)
        spans = []
        first = 0
        for number, (index, start, end) in enumerate(chunks):
            slot, rows = self.slots[index], slice(first, first + end - start)
            inputs[0, rows] = index
            inputs[1, rows] = self.tokens[index, start:end].int().to(DEVICE)
            inputs[2, rows] = self.ints(list(range(start, end)))
            following[rows] = self.tokens[index, start + 1 : end + 1].int().to(DEVICE)
            if index == chunks[-1][0]:
                following[rows.stop - 1] = -1
                self.table.state.last_token[index] = self.tokens[index, end]
            if start > state_of(slot).num_rows:
                hits[number] = first
            aux_hidden[:, rows] = self.features[:, index, start:end].to(DEVICE)
            slot.length, slot.last_token = end + 1, int(self.tokens[index, end])
            next_tokens = self.tokens[index, start + 1 : end + 1].tolist()
            spans.append(
                Span(slot, start, int(self.tokens[index, start]), next_tokens, range(first, rows.stop))
            )
            first = rows.stop + gap

        self.eager.draft_extend(spans, list(aux_hidden[:-1]), aux_hidden[-1])
        computed = ComputedChunks(
            rows=Rows(slot=inputs[0], token=inputs[1], position=inputs[2]),
            hidden=hidden_states(aux_hidden),
            next_token=following,
            hits=hits,
            last_token=self.table.state.last_token,
        )
        self.rounds.draft_extend_prefill(computed)
        self.compare([index for index, _, _ in chunks])

    def round(self, num_drafts: int, plan: list[tuple[int, int, int]]) -> None:
        """Run a round with an entry (slot, most drafts, tokens emitted) for each slot; slot -1: padding."""
        num_rows_each, num_slots = num_drafts + 1, len(plan)
        num_rows = num_slots * num_rows_each
        rows = Rows(
            slot=self.ints([-1] * num_rows),
            token=self.ints([-1] * num_rows),
            position=self.ints([2**31 - 1] * num_rows),
        )
        chosen = torch.randint(VOCAB_SIZE, (num_rows,), generator=self.generator).int().to(DEVICE)
        aux_hidden = self.step_features(num_rows)
        for group, (index, cap, num_emitted) in enumerate(plan):
            first = group * num_rows_each
            chosen[first + num_emitted : first + num_rows_each] = -1 if index < 0 else chosen[first]
            if index < 0:
                continue

            length = self.slots[index].length
            rows.slot[first : first + cap + 1] = index
            rows.token[first] = self.slots[index].last_token
            rows.position[first : first + num_rows_each] = self.ints(
                list(range(length - 1, length + num_drafts))
            )
            true = slice(length - 1, length - 1 + num_emitted)
            aux_hidden[:, first : first + num_emitted] = self.features[:, index, true].to(DEVICE)
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
        self.eager.draft_extend(spans, list(aux_hidden[:-1]), aux_hidden[-1])
        verified = VerifiedRows(
            rows=rows,
            hidden=hidden_states(aux_hidden),
            chosen=chosen,
            emitted=self.ints([num_emitted for *_, num_emitted in plan]),
        )
        self.rounds.draft_extend(verified)
        self.compare([index for _, index, _, _ in live])

    def compare(self, slots: list[int]) -> None:
        cache, eager, size = self.rounds.kv_cache, self.eager, self.block_size
        for index in slots:
            slot = self.slots[index]
            state = state_of(slot)
            near(cache.outputs[index], state.hidden)
            places = torch.arange(1, state.num_rows + 1, device=DEVICE)
            table = torch.tensor(slot.block_table, device=DEVICE)
            block, offset = table[places // size], places % size
            for found, expected in zip((cache.keys, cache.values), eager._cache.tensors, strict=True):
                near(found[:, block, :, offset].transpose(0, 1), expected[:, block * size + offset])
            blocks = table[: state.num_rows // size]
            near(cache.block_features[blocks], eager._block_features[blocks])

    def step_features(self, num_rows: int) -> torch.Tensor:
        return torch.full((len(self.features), num_rows, self.features.shape[-1]), torch.nan, device=DEVICE)

    @staticmethod
    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def hidden_states(streams: torch.Tensor) -> HiddenStates:
    """The residual stream at each boundary, and after the last layer."""
    by_layer = dict(enumerate(streams[:-1]))
    return HiddenStates(streams[-1], tuple(by_layer), by_layer)


def near(found: torch.Tensor, expected: torch.Tensor | None) -> None:
    assert expected is not None
    assert_near(found, expected, inner=96, depth=6)


@torch.inference_mode()
def check(pair: Pair) -> None:
    """A prompt, a prefix hit, a draft that is rejected in the middle, and one that is accepted as a whole."""
    pair.prefill([(0, 0, 5)], num_rows=5)
    pair.share(2, 0, 1)
    pair.prefill([(2, 4, 5)], num_rows=1)
    pair.round(2, [(0, 2, 2), (2, 1, 1)])
    pair.round(2, [(2, 2, 3)])


@pytest.mark.parametrize(
    "variant",
    [
        "speculators",
        "narrow",
        "norm before fc",
        "fc norm and output norm",
        "final hidden",
        "deep",
        "biased",
        "peagle",
        "flat peagle",
        "windowed",
        "windowed peagle",
    ],
)
def test_state_and_drafts_equal_the_eager_drafter(variant: str, tmp_path: Path) -> None:
    # The final norm of the target makes the features where no projection does.
    check(Pair(variant, tmp_path, norm_kind="offset" if variant == "final hidden" else "rounded"))


@pytest.mark.parametrize("variant", ["windowed", "windowed peagle"])
def test_windows_of_other_sizes_are_found(variant: str, tmp_path: Path) -> None:
    pair = Pair(variant, tmp_path)
    layer = pair.draft.config.layer
    assert isinstance(layer.mixer, Attention) and layer.mixer.window == 5
    layer = structs.replace(layer, mixer=structs.replace(layer.mixer, window=6))
    pair.draft.config = structs.replace(pair.draft.config, layer=layer)
    with pytest.raises(AssertionError):
        check(pair)


@pytest.mark.parametrize("variant", slow_after(2, ["reference", "windowed peagle", "peagle", "windowed"]))
@torch.inference_mode()
def test_mixed_steps_equal_the_eager_drafter(variant: str, tmp_path: Path) -> None:
    """Several chunks in a step, a prefix hit beside a chunk, padding rows, limited drafts, rounds without
    drafts."""
    pair = Pair(variant, tmp_path)
    pair.prefill([(0, 0, 5)], num_rows=6)
    pair.prefill([(1, 0, 1), (0, 5, 9)], num_rows=7)
    pair.round(3, [(0, 3, 4), (-1, 0, 0), (1, 2, 1)])
    pair.share(2, 0, 2)
    pair.prefill([(1, 2, 3), (2, 8, 10)], num_rows=6)
    pair.round(3, [(1, 3, 2), (2, 3, 4), (0, 0, 1)])
    pair.round(0, [(0, 0, 1), (1, 0, 1)])
    pair.round(2, [(2, 1, 1), (0, 2, 3), (1, 2, 3), (-1, 0, 0)])
    pair.round(1, [(1, 1, 1)])


@torch.inference_mode()
def test_long_blocks_and_many_rows_equal_the_eager_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products by cuBLAS, and several tiles of keys within a block."""
    monkeypatch.setattr(draft_forward, "MAX_MULTIPLY_ROWS", 2)
    pair = Pair("reference", tmp_path, block_size=32)
    pair.prefill([(0, 0, 7), (1, 0, 9)], num_rows=24, gap=4)
    pair.prefill([(1, 9, 32)], num_rows=24)
    pair.round(1, [(1, 1, 2), (0, 1, 1)])


@pytest.mark.parametrize("variant", ["reference", "flat peagle"])
@torch.inference_mode()
def test_quantised_draft_equals_the_eager_drafter(variant: str, tmp_path: Path) -> None:
    pair = Pair(variant, tmp_path, form="fp8", hidden_size=64)
    weights = pair.arranged.weights
    layer = weights.layers[0]
    assert isinstance(layer.channel, MlpWeights)
    matrices = weights.fc, layer.mixer.qkv, layer.channel.gate_up
    assert all(isinstance(matrix, KernelWeight) for matrix in matrices)
    pair.prefill([(0, 0, 5)], num_rows=5)
    pair.round(2, [(0, 2, 2)])


def rotate_by_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(draft_cache, "DRAFT_KV_OFFSET", 0)


def attend_the_unused_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(draft_forward, "DRAFT_KV_OFFSET", 0)


def keep_outputs_of_other_rows(patch: pytest.MonkeyPatch) -> None:
    original = eagle_rounds.keep_last_rows
    patch.setattr(
        eagle_rounds, "keep_last_rows", lambda slot, output, state: original(slot, output.roll(1, 0), state)
    )


def ignore_prefix_hits(patch: pytest.MonkeyPatch) -> None:
    original = EagleRoundDrafter.draft_extend_prefill
    patch.setattr(
        EagleRoundDrafter,
        "draft_extend_prefill",
        lambda rounds, chunks: original(rounds, structs.replace(chunks, hits=chunks.hits * 0 - 1)),
    )


def keep_drafted_kv(patch: pytest.MonkeyPatch) -> None:
    original = EagleRoundDrafter.draft_extend

    def draft_extend(rounds: EagleRoundDrafter, verified: VerifiedRows) -> None:
        keys = rounds.kv_cache.keys.clone()
        original(rounds, verified)
        is_written = ~keys.isnan()
        rounds.kv_cache.keys[is_written] = keys[is_written]

    patch.setattr(EagleRoundDrafter, "draft_extend", draft_extend)


def mask_the_first_draft(patch: pytest.MonkeyPatch) -> None:
    original = EagleRoundDrafter._masked

    def masked(rounds: EagleRoundDrafter, *args: Any) -> torch.Tensor:
        return original(rounds, *args).roll(1, 0)

    patch.setattr(EagleRoundDrafter, "_masked", masked)


def extend_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    original = eagle_rounds.round_rows
    patch.setattr(
        eagle_rounds,
        "round_rows",
        lambda slot, position, chosen, emitted, out: original(slot, position, chosen, emitted + 1, out),
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of NaN
@pytest.mark.parametrize(
    "fault",
    [
        rotate_by_place,
        attend_the_unused_place,
        keep_outputs_of_other_rows,
        ignore_prefix_hits,
        keep_drafted_kv,
        extend_rejected_drafts,
        mask_the_first_draft,
    ],
)
def test_faults_are_detected(fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path) -> None:
    variant = "peagle" if fault is mask_the_first_draft else "narrow"
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError):
            check(Pair(variant, tmp_path))


@torch.inference_mode()
def test_rounds_larger_than_the_limits_are_rejected(tmp_path: Path) -> None:
    pair = Pair("reference", tmp_path)
    with pytest.raises(ValueError, match="5 rows of 1 slots with 4 drafts each: .* at most 4 slots .* 3$"):
        pair.round(4, [(-1, 0, 0)])

    with pytest.raises(ValueError, match="10 rows of 5 slots"):
        pair.round(1, [(-1, 0, 0)] * 5)
