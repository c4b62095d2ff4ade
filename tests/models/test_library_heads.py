"""Heads that other libraries wrote, with the drafts of their own forward passes: `write_library_heads.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from decoder_parity import load_decoder
from draft_pass import dflash_pass, masked_pass
from tolerances import assert_near

from drift_sdk import Chain, ConfigError, DynamicTree, Engine, EngineConfig, SamplingParams, Speculation
from drift_sdk.errors import ModelLoadError
from drift_sdk.execution.eager.drafters import DFlashDrafter, EagleDrafter
from drift_sdk.loading.source import resolve
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashDecoder, is_dflash
from drift_sdk.models.draft_head import DRAFT_KV_OFFSET, DraftDecoder

FOLDER = Path(__file__).parent / "library_heads"
TARGET = FOLDER / "target"
HEADS = sorted(file.parent.name for file in FOLDER.glob("*/expected.json"))
NAMED = [name for name in HEADS if "_layer_ids" in (FOLDER / name / "config.json").read_text()]
"""Heads that name the target's layers."""
WITHOUT_MASK = "specforge-peagle"
"""A head whose config.json does not name the token of its masks, which is MASK."""
MASK = 101
INNER = 96  # terms of the longest sum


class Head(NamedTuple):
    """A head that can be loaded, and the content of its expected.json."""

    folder: Path
    expected: dict[str, Any]

    @property
    def token_ids(self) -> list[int]:
        return list(self.expected["token_ids"])

    def load(self, target: Decoder, **options: Any) -> DraftDecoder | DFlashDecoder:
        source = resolve(self.folder)
        kind = DFlashDecoder if is_dflash(source.config) else DraftDecoder
        return kind.load(source if kind is DFlashDecoder else self.folder, target, **options)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return load_decoder(TARGET)


@pytest.fixture(params=HEADS)
def head(request: pytest.FixtureRequest, tmp_path: Path) -> Head:
    folder = FOLDER / request.param
    expected = json.loads((folder / "expected.json").read_text())
    return Head(with_mask(folder, tmp_path) if request.param == WITHOUT_MASK else folder, expected)


def with_mask(folder: Path, copy: Path) -> Path:
    """A copy of a head whose config.json names the token of its masks."""
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"mask_token_id": MASK}))
    return copy


def test_every_form_is_there() -> None:
    kinds = ("eagle3", "peagle", "dflash")
    assert {name for name in HEADS if name.startswith("speculators")} > {f"speculators-{k}" for k in kinds}
    assert {name for name in HEADS if name.startswith("specforge")} > {f"specforge-{k}" for k in kinds}
    assert len(NAMED) > len(HEADS) // 2


@torch.inference_mode()
def draft_outputs(target: Decoder, draft: DraftDecoder | DFlashDecoder, token_ids: list[int]) -> torch.Tensor:
    """The outputs of four drafts behind a sequence, of a chain those after its most likely tokens."""
    number = 4
    if isinstance(draft, DFlashDecoder):
        return dflash_pass(target, draft, token_ids, number)

    if draft.mask_feature is not None:
        return masked_pass(target, draft, token_ids, number)

    blocks = list(range(len(token_ids) + number))
    cache, own = target.empty_kv_cache(len(blocks), 1), draft.empty_kv_cache(len(blocks), 1)
    batch = AttentionBatch([SequenceRows(blocks, 0, len(token_ids) - 1)], cache)
    final, aux_hidden = target.forward(torch.tensor(token_ids[:-1]), batch, cache, draft.aux_layers)
    feature, tokens, start = draft.fuse(aux_hidden, final), torch.tensor(token_ids[1:]), 0
    outputs: list[torch.Tensor] = []
    while len(outputs) < number:
        rows = [SequenceRows(blocks, start, len(tokens))]
        batch = AttentionBatch(rows, own, slot_offset=DRAFT_KV_OFFSET)
        start += len(tokens)
        feature = draft.forward(feature, tokens, batch, own)[-1:]
        outputs.append(feature)
        tokens = draft.target_ids[draft.logits(feature).argmax(-1)]
    return torch.cat(outputs)


def assert_drafts(draft: DraftDecoder | DFlashDecoder, target: Decoder, head: Head) -> None:
    logits = draft.logits(draft_outputs(target, draft, head.token_ids))
    expected = torch.tensor(head.expected["logits"])
    depth = target.spec.num_layers + 6
    assert_near(logits, expected, inner=INNER, depth=depth, name="logits")
    assert draft.target_ids[logits.argmax(-1)].tolist() == head.expected["drafts"]


def test_layers_and_logits_are_the_librarys(head: Head, target: Decoder) -> None:
    draft = head.load(target)
    assert list(draft.aux_layers) == head.expected["layers"]
    assert_drafts(draft, target, head)
    assert len(set(head.expected["drafts"])) > 1


@pytest.mark.parametrize("head", NAMED, indirect=True)
def test_ids_of_the_other_convention_are_found(head: Head, target: Decoder) -> None:
    is_boundary = "transformer_layer_config" in json.loads((head.folder / "config.json").read_text())
    draft = head.load(target, aux_layer_convention="output" if is_boundary else "boundary")
    shift = 1 if is_boundary else -1
    assert list(draft.aux_layers) == [layer + shift for layer in head.expected["layers"]]
    with pytest.raises(AssertionError, match="logits"):
        assert_drafts(draft, target, head)


async def test_the_engine_drafts_as_the_library(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted: list[tuple[int, ...]] = []

    def watch(drafter: type[EagleDrafter | DFlashDrafter]) -> None:
        propose = drafter.propose

        def noted(self: Any, *args: Any) -> Any:
            found = propose(self, *args)
            drafted.extend(draft.token_ids for draft in found)
            return found

        monkeypatch.setattr(drafter, "propose", noted)

    watch(EagleDrafter)
    watch(DFlashDrafter)
    config = EngineConfig(
        device="cpu", executor="eager", dtype="float32", kv_cache_tokens=512, max_num_seqs=2
    )
    speculation = Speculation(draft=head.folder, shape=Chain(4), adaptive=False)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    answers = []
    for given in (speculation, None):
        async with Engine(TARGET, config.replace(speculation=given)) as engine:
            answers.append(await engine.generate(head.token_ids[:-1], params))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].token_ids[0] == head.token_ids[-1]
    assert list(drafted[0]) == head.expected["drafts"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("speculators-dspark", "DSpark, whose Markov head chooses the tokens .* is not implemented"),
        ("specforge-dspark", "DSpark, whose Markov head chooses the tokens .* is not implemented"),
        ("speculators-dflash2", "DFlash 2, whose layers have convolutions, is not implemented"),
        ("speculators-xpress", "XPress, .* is not implemented"),
        ("specforge-domino", "Domino, .* is not implemented"),
        (WITHOUT_MASK, "mask_token_id is missing: expected the token that masks stand for"),
    ],
)
def test_what_is_not_implemented_or_missing_is_named(name: str, message: str, target: Decoder) -> None:
    with pytest.raises(ModelLoadError, match=message) as error:
        Head(FOLDER / name, {}).load(target)
    assert str(error.value).startswith(f"draft: {FOLDER / name}: config: ")


async def test_trees_of_heads_with_windows_are_refused() -> None:
    tree = DynamicTree(top_k=2, depth=2, num_draft_tokens=4)
    for name, has_window in (("speculators-eagle3", True), ("speculators-eagle3-qwen3", False)):
        speculation = Speculation(draft=FOLDER / name, shape=tree, adaptive=False)
        engine = Engine(TARGET, EngineConfig(device="cpu", kv_cache_tokens=512, speculation=speculation))
        if has_window:
            with pytest.raises(ConfigError, match="a Chain with a head whose layers have windows"):
                await engine.start()
        else:
            async with engine:
                completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
                assert len(completion.token_ids) == 4
