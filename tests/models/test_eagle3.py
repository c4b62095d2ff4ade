"""A draft against a plain reference in float64: features, rows, logits, and KV slots."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_parity import BLOCK_SIZE, load_decoder, poisoned_cache, random_tokens, shuffled_blocks
from draft_zoo import VARIANTS, make_draft
from model_zoo import make_model
from safetensors.torch import load_file
from tolerances import assert_near

from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models import draft_head
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_head import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.layers import offset_rms_norm
from drift_sdk.spec.model import KVShape

INNER = 192  # terms of the longest sum: three hidden states of 64
NUM_BLOCKS = 16
NUM_PROMPT_TOKENS, NUM_DRAFT_STEPS = 43, 5
CHUNKS = (1, 20, 7, 15)
TARGET = 1
GEMMA3 = 30  # a model of the zoo


class Reference:
    """The draft of a folder in float64, independent of the implementation: row by row, over lists."""

    def __init__(self, folder: Path, target_folder: Path, num_target_layers: int) -> None:
        config = json.loads((folder / "config.json").read_text())
        nested = config.get("transformer_layer_config")
        self.options = {**config, **config.get("eagle_config", {})}
        self.shape = config if nested is None else nested
        self.mask_token_id = self.options.get("mask_token_id", self.options.get("pard_token"))
        is_first = nested is not None and self.mask_token_id is None
        self.is_normed_first = self.options.get("norm_before_residual", is_first)
        self.feeds_normed = self.options.get("norm_output") or self.options.get("return_hidden_post_norm")
        files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
        stored: dict[str, torch.Tensor] = {}
        for file in files:
            stored |= load_file(file) if file.suffix == ".safetensors" else torch.load(file)
        self.w = {
            name.replace("midlayer", "layers.0"): tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in stored.items()
        }
        target = load_file(target_folder / "model.safetensors")
        self.target = {name: tensor.double() for name, tensor in target.items()}
        self.target_eps = json.loads((target_folder / "config.json").read_text())["rms_norm_eps"]
        offsets = self.w.get("d2t")
        self.ids = torch.arange(self.shape["vocab_size"] if offsets is None else len(offsets))
        if offsets is not None:
            self.ids = self.ids + offsets
        self.aux_layers = self._aux_layers(num_target_layers)
        num_layers = self.shape["num_hidden_layers"]
        self.keys: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self.values: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def _aux_layers(self, num_layers: int) -> list[int]:
        if self.options.get("use_aux_hidden_state") is False:
            return []
        ids = self.options.get("eagle_aux_hidden_state_layer_ids")
        if ids is None:
            return sorted([2, num_layers // 2, num_layers - 3])
        is_boundary = max(ids) == num_layers or "transformer_layer_config" in self.options
        return ids if is_boundary else [layer_id + 1 for layer_id in ids]

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        eps = self.shape["rms_norm_eps"] if eps is None else eps
        return weight * x / ((x * x).mean() + eps).sqrt()

    def fuse(self, aux_hidden: list[torch.Tensor], final: torch.Tensor) -> torch.Tensor:
        """The feature of one row, from the target's residual stream at the aux layers and after the last
        layer."""
        if not self.aux_layers:
            return self.norm(final, self.target["model.norm.weight"], self.target_eps)
        if self.options.get("fc_norm"):
            aux_hidden = [self.norm(x, self.w[f"fc_norm.{i}.weight"]) for i, x in enumerate(aux_hidden)]
        joined = torch.cat(aux_hidden)
        if self.options.get("norm_before_fc"):
            joined = self.norm(joined, self.w["input_norm.weight"])
        return self.w["fc.weight"] @ joined

    def frequencies(self) -> list[float]:
        half, theta = self.shape["head_dim"] // 2, self.shape.get("rope_theta", 10_000.0)
        scaling, found = self.shape.get("rope_scaling"), []
        for index in range(half):
            frequency = theta ** (-index / half)
            if scaling is not None:
                turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
                share = (turns - scaling["low_freq_factor"]) / (
                    scaling["high_freq_factor"] - scaling["low_freq_factor"]
                )
                share = min(1.0, max(0.0, share))
                frequency = share * frequency + (1 - share) * frequency / scaling["factor"]
            found.append(frequency)
        return found

    def rope(self, head: torch.Tensor, position: int) -> torch.Tensor:
        half, out = len(head) // 2, head.clone()
        for index, frequency in enumerate(self.frequencies()):
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            out[index] = head[index] * cos - head[index + half] * sin
            out[index + half] = head[index + half] * cos + head[index] * sin
        return out

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def heads(self, name: str, x: torch.Tensor, number: int) -> list[torch.Tensor]:
        heads = list(self.project(f"{name}_proj", x).view(number, -1))
        weight = self.w.get(f"{name}_norm.weight")
        return heads if weight is None else [self.norm(head, weight) for head in heads]

    def row(self, feature: torch.Tensor, token: int) -> torch.Tensor:
        """Append a row; returns the next feature."""
        embedding = self.w.get("embed_tokens.weight", self.target["model.embed_tokens.weight"])[token]
        position = len(self.keys[0])
        num_heads, num_kv_heads = self.shape["num_attention_heads"], self.shape["num_key_value_heads"]
        head_dim = self.shape["head_dim"]
        stream = feature
        for index in range(self.shape["num_hidden_layers"]):
            layer = f"layers.{index}"
            if index == 0:
                normed = self.norm(feature, self.w[f"{layer}.hidden_norm.weight"])
                stream = normed if self.is_normed_first else feature
                x = torch.cat([self.norm(embedding, self.w[f"{layer}.input_layernorm.weight"]), normed])
            else:
                x = self.norm(stream, self.w[f"{layer}.input_layernorm.weight"])
            query = self.heads(f"{layer}.self_attn.q", x, num_heads)
            key = self.heads(f"{layer}.self_attn.k", x, num_kv_heads)
            value = self.project(f"{layer}.self_attn.v_proj", x).view(num_kv_heads, head_dim)
            self.keys[index].append(torch.stack([self.rope(head, position) for head in key]))
            self.values[index].append(value)
            heads, window = [], self.shape.get("sliding_window", 0)
            for head in range(num_heads):
                shared = head // (num_heads // num_kv_heads)
                turned = self.rope(query[head], position)
                past = torch.stack([key[shared] for key in self.keys[index][-window:]])
                weights = (past @ turned / math.sqrt(head_dim)).softmax(0)
                heads.append(weights @ torch.stack([value[shared] for value in self.values[index][-window:]]))
            stream = stream + self.project(f"{layer}.self_attn.o_proj", torch.cat(heads))
            x = self.norm(stream, self.w[f"{layer}.post_attention_layernorm.weight"])
            gate, up = self.project(f"{layer}.mlp.gate_proj", x), self.project(f"{layer}.mlp.up_proj", x)
            stream = stream + self.project(f"{layer}.mlp.down_proj", gate * gate.sigmoid() * up)
        return self.norm(stream, self.w["norm.weight"]) if self.feeds_normed else stream

    def logits(self, fed_back: torch.Tensor) -> torch.Tensor:
        head = self.w.get("lm_head.weight")
        if head is None and self.shape.get("tie_word_embeddings"):
            head = self.w["embed_tokens.weight"]
        if head is None:
            head = self.target.get("lm_head.weight", self.target["model.embed_tokens.weight"])[self.ids]
        return head @ (fed_back if self.feeds_normed else self.norm(fed_back, self.w["norm.weight"]))


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_model(TARGET, folder)
    return folder


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Decoder:
    return load_decoder(target_folder)


def _cache(draft: DraftDecoder) -> KVCache:
    cache = draft.empty_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    return cache


@torch.inference_mode()
def _target_states(
    target: Decoder, tokens: torch.Tensor, aux_layers: Sequence[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    cache = poisoned_cache(target.spec)
    batch = AttentionBatch([SequenceRows(shuffled_blocks(), 0, len(tokens))], cache)
    final, aux_hidden = target.forward(tokens, batch, cache, aux_layers)
    return aux_hidden, final


@torch.inference_mode()
def _assert_parity(draft: DraftDecoder, target: Decoder, reference: Reference) -> None:
    """Compare all rows of a prefill in chunks and of draft steps after it, and at the end all KV slots."""
    assert list(draft.aux_layers) == reference.aux_layers
    assert torch.equal(draft.target_ids, reference.ids)
    tokens = random_tokens(target.spec, NUM_PROMPT_TOKENS + 1, seed=3)
    aux_hidden, final = _target_states(target, tokens[:-1], draft.aux_layers)
    features = draft.fuse(aux_hidden, final)
    streams = [stream.double() for stream in (*aux_hidden, final)]
    expected = torch.stack(
        [reference.fuse([s[i] for s in streams[:-1]], streams[-1][i]) for i in range(len(final))]
    )
    assert_near(features, expected, inner=INNER, name="features")
    depth = draft.num_layers + 1

    cache, blocks = _cache(draft), shuffled_blocks(NUM_BLOCKS)
    start = 0
    for num_rows in CHUNKS:
        batch = _batch(blocks, start, num_rows, cache)
        rows = slice(start, start + num_rows)
        hidden = draft.forward(features[rows], tokens[start + 1 : start + num_rows + 1], batch, cache)
        fed_back = [
            reference.row(feature.double(), int(token))
            for feature, token in zip(features[rows], tokens[start + 1 :], strict=False)
        ]
        logits, expected_logits = draft.logits(hidden), torch.stack([reference.logits(g) for g in fed_back])
        assert_near(hidden, torch.stack(fed_back), inner=INNER, depth=depth, name="rows")
        assert_near(logits, expected_logits, inner=INNER, depth=depth, name="logits")
        start += num_rows

    assert start == NUM_PROMPT_TOKENS
    g, token = hidden[-1:], draft.target_ids[draft.logits(hidden[-1:]).argmax(-1)]
    expected_g = fed_back[-1]
    for position in range(start, start + NUM_DRAFT_STEPS):
        depth += draft.num_layers  # the previous output is an input, with its error
        g = draft.forward(g, token, _batch(blocks, position, 1, cache), cache)
        expected_g = reference.row(expected_g, int(token))
        assert_near(g, expected_g[None], inner=INNER, depth=depth, name=f"draft row {position}")
        logits = draft.logits(g)
        assert logits.dtype == torch.float32
        expected_logits = reference.logits(expected_g)[None]
        assert_near(logits, expected_logits, inner=INNER, depth=depth, name=f"draft logits {position}")
        token = draft.target_ids[logits.argmax(-1)]

    _assert_cache(cache, blocks, reference, depth)


@torch.inference_mode()
def _assert_masks(draft: DraftDecoder, target: Decoder, reference: Reference) -> None:
    """Compare a draft of one pass: the row of the newest token, and those of masks behind it."""
    tokens = random_tokens(target.spec, NUM_PROMPT_TOKENS + 1, seed=4)
    aux_hidden, final = _target_states(target, tokens[:-1], draft.aux_layers)
    features, masks = draft.fuse(aux_hidden, final), draft.mask_feature.expand(NUM_DRAFT_STEPS, -1)
    mask = reference.w["mask_hidden"].view(len(draft.aux_layers), -1)
    expected_mask = reference.fuse(list(mask), mask[0])
    rows = [
        reference.row(each.double(), int(token)) for each, token in zip(features, tokens[1:], strict=True)
    ]
    rows += [reference.row(expected_mask, reference.mask_token_id) for _ in range(NUM_DRAFT_STEPS)]
    ids = torch.cat((tokens[1:], torch.full((NUM_DRAFT_STEPS,), draft.config.mask_token_id)))
    cache, blocks = _cache(draft), shuffled_blocks(NUM_BLOCKS)
    batch = _batch(blocks, 0, len(ids), cache)
    logits = draft.logits(draft.forward(torch.cat((features, masks)), ids, batch, cache))
    expected = torch.stack([reference.logits(row) for row in rows])
    assert_near(logits, expected, inner=INNER, depth=draft.num_layers + 1, name="logits")


def _assert_cache(cache: KVCache, blocks: list[int], reference: Reference, depth: int) -> None:
    """Row i lies at slot i + 1 of the sequence, and no other slot was written."""
    num_rows = len(reference.keys[0])
    places = torch.arange(1, num_rows + 1)
    slots = torch.tensor(blocks)[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    for layer in range(len(reference.keys)):
        keys, values = cache.layer(layer)
        for name, found, expected in (
            ("keys", keys, reference.keys[layer]),
            ("values", values, reference.values[layer]),
        ):
            assert_near(found[slots], torch.stack(expected), inner=INNER, depth=depth, name=f"cached {name}")
            is_unwritten = torch.ones(len(found), dtype=torch.bool).index_fill_(0, slots, False)
            assert found[is_unwritten].isnan().all(), f"{name} outside the sequence's slots"


def _batch(blocks: list[int], start: int, num_rows: int, cache: KVCache) -> AttentionBatch:
    return AttentionBatch(
        [SequenceRows(blocks, start, num_rows)], cache, slot_offset=draft_head.DRAFT_KV_OFFSET
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_draft_equals_the_reference(name: str, target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    make_draft(name, tmp_path, target_folder)
    draft = DraftDecoder.load(tmp_path, target)
    assert draft.num_layers == VARIANTS[name].num_layers
    _assert_parity(draft, target, Reference(tmp_path, target_folder, target.spec.num_layers))


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.has_masks])
def test_draft_of_one_pass_equals_the_reference(
    name: str, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    make_draft(name, tmp_path, target_folder)
    draft = DraftDecoder.load(tmp_path, target)
    assert draft.config.mask_token_id is not None
    _assert_masks(draft, target, Reference(tmp_path, target_folder, target.spec.num_layers))


def test_draft_of_a_tied_target_of_four_layers(tmp_path: Path) -> None:
    """Two of the default aux layers coincide: 1, 2 and 2."""
    make_model(6, tmp_path / "target")
    make_draft("ids only", tmp_path / "draft", tmp_path / "target")
    target = load_decoder(tmp_path / "target")
    draft = DraftDecoder.load(tmp_path / "draft", target)
    assert draft.aux_layers == (1, 2, 2)
    _assert_parity(draft, target, Reference(tmp_path / "draft", tmp_path / "target", 4))


FAULTS = (
    "position of all rows",
    "position of draft rows",
    "feature",
    "halves",
    "norm twice",
    "slot offset",
    "residual",
)


@pytest.mark.parametrize("name", ["reference", "fc norm and output norm"])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(
    fault: str,
    name: str,
    target: Decoder,
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_draft(name, tmp_path, target_folder)
    draft = DraftDecoder.load(tmp_path, target)
    tables, fuse, logits = draft_head.rotary_tables, DraftDecoder.fuse, DraftDecoder.logits
    if fault == "position of all rows":
        monkeypatch.setattr(draft_head, "rotary_tables", lambda p, *rest: tables(p + 1, *rest))
    elif fault == "position of draft rows":
        monkeypatch.setattr(
            draft_head, "rotary_tables", lambda p, *rest: tables(p + (p >= NUM_PROMPT_TOKENS), *rest)
        )
    elif fault == "feature":
        monkeypatch.setattr(DraftDecoder, "fuse", lambda *inputs: fuse(*inputs).roll(1, 0))
    elif fault == "halves":
        first = draft.weights.layers[0]
        mixer = dataclasses.replace(first.mixer, qkv=first.mixer.qkv.roll(draft.config.hidden_size, 1))
        layers = (dataclasses.replace(first, mixer=mixer), *draft.weights.layers[1:])
        draft = DraftDecoder(draft.config, dataclasses.replace(draft.weights, layers=layers), target)
    elif fault == "norm twice":
        weight, norm = draft.weights.final_norm, draft.config.norm
        monkeypatch.setattr(
            DraftDecoder,
            "logits",
            lambda self, hidden: logits(self, draft_head.normalise(hidden, weight, norm)),
        )
    elif fault == "slot offset":
        monkeypatch.setattr(draft_head, "DRAFT_KV_OFFSET", 0)
    else:
        draft.config = _replace(draft.config, is_residual_normed=True)

    with pytest.raises(AssertionError, match="differ by"):
        _assert_parity(draft, target, Reference(tmp_path, target_folder, target.spec.num_layers))


def _replace(config: DraftConfig, **changes: Any) -> DraftConfig:
    return DraftConfig(**{name: getattr(config, name) for name in config.__struct_fields__} | changes)


def test_batch_equals_single_sequences(target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    """Chunks and decode rows of different lengths. A block table ends exactly at a sequence's last slot."""
    make_draft("deep", tmp_path, target_folder)
    draft = DraftDecoder.load(tmp_path, target)
    starts_and_rows = [(15, 1), (0, 7), (3, 1), (6, 2), (0, 3), (22, 1), (0, 20), (8, 3)]
    free = shuffled_blocks(64)
    tables = [
        [free.pop() for _ in range(-(-(start + num_rows + DRAFT_KV_OFFSET) // BLOCK_SIZE))]
        for start, num_rows in starts_and_rows
    ]
    generator = torch.Generator().manual_seed(5)
    features = [torch.randn(s + n, draft.config.hidden_size, generator=generator) for s, n in starts_and_rows]
    tokens = [random_tokens(target.spec, s + n, seed=i) for i, (s, n) in enumerate(starts_and_rows)]

    def run(*, together: bool) -> tuple[torch.Tensor, KVCache]:
        cache = draft.empty_kv_cache(64, BLOCK_SIZE)
        for tensor in cache.tensors:
            tensor.fill_(float("nan"))
        rows = [SequenceRows(t, s, n) for t, (s, n) in zip(tables, starts_and_rows, strict=True)]
        for index, (start, _) in enumerate(starts_and_rows):
            if start:
                past = AttentionBatch(
                    [SequenceRows(tables[index], 0, start)], cache, slot_offset=DRAFT_KV_OFFSET
                )
                draft.forward(features[index][:start], tokens[index][:start], past, cache)

        groups = [list(range(len(rows)))] if together else [[index] for index in range(len(rows))]
        hidden = []
        for group in groups:
            batch = AttentionBatch([rows[i] for i in group], cache, slot_offset=DRAFT_KV_OFFSET)
            news = torch.cat([features[i][rows[i].start :] for i in group])
            ids = torch.cat([tokens[i][rows[i].start :] for i in group])
            hidden.append(draft.forward(news, ids, batch, cache))

        return torch.cat(hidden), cache

    (found, found_cache), (expected, expected_cache) = run(together=True), run(together=False)
    depth = draft.num_layers + 1
    assert_near(found, expected, inner=INNER, depth=depth)
    assert_near(found_cache.tensors[0], expected_cache.tensors[0], inner=INNER, depth=depth)


def test_slot_offset_shifts_slots_but_not_positions() -> None:
    cache = KVCache([KVShape(1, 4, 4)], 8, BLOCK_SIZE, torch.float32, "cpu")
    rows = [SequenceRows([5, 2], 7, 1), SequenceRows([3, 0], 6, 4), SequenceRows([7], 2, 1)]
    batch = AttentionBatch(rows, cache, slot_offset=1)
    assert batch.positions.tolist() == [7, 6, 7, 8, 9, 2]
    assert batch.slot_mapping.tolist() == [2 * 8 + 0, 3 * 8 + 7, 0, 1, 2, 7 * 8 + 3]
    plain, zero = AttentionBatch(rows, cache), AttentionBatch(rows, cache, slot_offset=0)
    assert torch.equal(plain.slot_mapping, zero.slot_mapping)
    with pytest.raises(ValueError, match="1 blocks for 9 tokens: expected 2"):
        AttentionBatch([SequenceRows([1], 7, 1)], cache, slot_offset=1)
    with pytest.raises(ValueError, match="slot_offset=-1"):
        AttentionBatch(rows, cache, slot_offset=-1)


def test_context_longer_than_the_drafts(target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    """The zoo's drafts have a context of 16; rows beyond it are rotated by their positions."""
    make_draft("reference", tmp_path, target_folder)
    draft = DraftDecoder.load(tmp_path, target)
    reference = Reference(tmp_path, target_folder, target.spec.num_layers)
    cache, start = _cache(draft), 90
    for tensor in cache.tensors:
        tensor.zero_()
    feature = torch.randn(1, draft.config.hidden_size, generator=torch.Generator().manual_seed(1))
    blocks = shuffled_blocks(NUM_BLOCKS)
    draft.forward(feature, torch.tensor([9]), _batch(blocks, start, 1, cache), cache)
    reference.keys[0] = [torch.zeros(2, 12).double()] * start
    reference.values[0] = list(reference.keys[0])
    reference.row(feature[0].double(), 9)
    place = start + 1
    key = cache.layer(0)[0][blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE]
    assert_near(key, reference.keys[0][start], inner=INNER)


def test_random_draft(target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    for name in ("reference", "narrow", "final hidden", "deep"):
        make_draft(name, tmp_path / name, target_folder)
        config = DraftConfig.from_hf(resolve(tmp_path / name).config, target.spec)
        first, again, other = (DraftDecoder.random(config, target, seed) for seed in (4, 4, 5))
        assert torch.equal(first.weights.layers[0].mixer.qkv, again.weights.layers[0].mixer.qkv)
        assert not torch.equal(first.weights.layers[0].mixer.qkv, other.weights.layers[0].mixer.qkv)
        assert (first.target_ids.diff() > 0).all() and first.target_ids[-1] < config.vocab_size
        aux_hidden, final = _target_states(target, random_tokens(target.spec, 8), first.aux_layers)
        cache = _cache(first)
        batch = _batch(shuffled_blocks(NUM_BLOCKS), 0, 8, cache)
        hidden = first.forward(first.fuse(aux_hidden, final), random_tokens(target.spec, 8), batch, cache)
        logits = first.logits(hidden)
        assert logits.shape == (8, config.draft_vocab_size) and logits.isfinite().all()


def test_all_tensors_have_the_targets_dtype_and_device(target_folder: Path, tmp_path: Path) -> None:
    """On the meta device, an operation with a tensor of the CPU fails."""
    source = resolve(target_folder)
    away = Decoder.load(read_spec(source.config), source.tensors(), device="meta", dtype=torch.bfloat16)
    for name in ("fc norm and output norm", "final hidden", "ids only"):
        make_draft(name, tmp_path / name, target_folder)
        draft = DraftDecoder.load(tmp_path / name, away)
        states = [torch.empty(4, 64, dtype=torch.bfloat16, device="meta") for _ in range(4)]
        cache = draft.empty_kv_cache(4, BLOCK_SIZE)
        batch = _batch([1, 2], 0, 4, cache)
        features = draft.fuse(states[: len(draft.aux_layers)], states[-1])
        ids = torch.zeros(4, dtype=torch.int64, device="meta")
        logits = draft.logits(draft.forward(features, ids, batch, cache))
        assert logits.dtype == torch.float32 and logits.device.type == "meta"
        assert draft.dtype == torch.bfloat16 and draft.target_ids.device.type == "meta"


def test_wrong_shapes_are_rejected(target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    make_draft("reference", tmp_path, target_folder)
    draft = DraftDecoder.load(tmp_path, target)
    cache = _cache(draft)
    batch, ids = _batch([1], 0, 2, cache), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"expected \[2, 64\] and \[2\]"):
        draft.forward(torch.zeros(2, 63), ids, batch, cache)
    with pytest.raises(ValueError, match=r"expected \[2, 64\] and \[2\]"):
        draft.forward(torch.zeros(2, 64), ids[:1], batch, cache)
    with pytest.raises(ValueError, match="aux_hidden: 1 tensors: expected 3"):
        draft.fuse([torch.zeros(2, 64)], torch.zeros(2, 64))


def test_final_hidden_state_is_normed_as_by_the_target(tmp_path: Path) -> None:
    """Gemma's norm multiplies by 1 + weight."""
    make_model(GEMMA3, tmp_path / "target")
    target = load_decoder(tmp_path / "target")
    make_draft("final hidden", tmp_path / "draft", tmp_path / "target")
    draft = DraftDecoder.load(tmp_path / "draft", target)
    hidden = torch.randn(3, target.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    found = draft.fuse([], hidden)
    norm = target.weights.final_norm
    assert torch.equal(found, offset_rms_norm(hidden, norm, target.spec.final_norm.eps))
