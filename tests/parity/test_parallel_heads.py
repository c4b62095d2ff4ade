"""Requests that a head drafts for in one pass: they have the tokens that they have alone and without drafts,
and every draft equals the head's output over the whole sequence at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
import torch
from decoder_parity import load_decoder
from dflash_zoo import draw_dflash, make_dflash
from draft_pass import dflash_pass, masked_pass
from draft_zoo import make_draft
from hybrid_requests import (
    NEAR_TIE,
    VARIANTS,
    VOCAB_SIZE,
    Case,
    config_of,
    draw_cases,
    run_all,
    run_alone,
    tokens_of,
)
from hybrid_zoo import make_hybrid_model
from model_zoo import logprob_bound, make_model
from msgspec.structs import replace
from oracle_drafter import OracleDrafter
from slow_cases import slow_after
from tolerances import assert_near

from drift_sdk import (
    Chain,
    Completion,
    ConfigError,
    DynamicTree,
    Engine,
    NGram,
    Speculation,
)
from drift_sdk.execution.drafter_factory import (
    DFlashDrafterFactory,
    DrafterFactory,
    EagleDrafterFactory,
    HybridDrafterFactory,
)
from drift_sdk.execution.eager.drafters import DFlashDrafter, EagleDrafter, Span
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashConfig, DFlashDecoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.steps import ExecutorLimits
from drift_sdk.trees import Draft, DraftLimit

MODELS = {"llama": 1, "qwen3_5": 10, "gemma3": 30}
"""Seeds of models without near ties: a plain one, one with recurrent layers, and one whose embedding is
multiplied and whose layers with windows have blocks of their own."""
DFLASH_SEED, NUM_MASKS = 3, 4
HEADS = ("dflash", "peagle")


class Model(NamedTuple):
    """folder: of the model; the folders of its heads have their names. alone: what the requests are answered
    alone and without drafts."""

    folder: Path
    cases: list[Case]
    alone: list[Completion]


@pytest.fixture(scope="module", params=slow_after(1, MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, cases = tmp_path_factory.mktemp(request.param), draw_cases()
    near_tie = NEAR_TIE
    if request.param != "qwen3_5":
        make_model(MODELS[request.param], folder)
        near_tie = logprob_bound(MODELS[request.param])
    else:
        make_hybrid_model(request.param, MODELS[request.param], folder, num_hidden_layers=4)
    make_dflash(DFLASH_SEED, folder / "dflash", folder)
    make_draft("peagle", folder / "peagle", folder)
    return Model(folder, cases, run_alone(folder, cases, near_tie))


class Watching:
    """Records what a drafter computes, and proposes the tokens of an oracle in its place, or its own.

    seen: seed, number of known tokens, and outputs of the drafted rows, of each slot and round.
    """

    oracle: OracleDrafter | None = None

    def watch(self, draft: Any, target: Decoder) -> None:
        self.draft, self.target = draft, target
        self.seen: list[tuple[int, int, torch.Tensor]] = []
        self._last: torch.Tensor | None = None

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._last = hidden.clone()
        return super()._logits(hidden)  # type: ignore[misc]

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        self._last = None
        drafts = super().propose(slots, limits)  # type: ignore[misc]
        if self._last is not None:
            parts = self._last.split([len(draft.token_ids) for draft in drafts])
            for slot, part in zip(slots, parts, strict=True):
                if len(part):
                    self.seen.append((slot.sampling.seed, slot.length, part))
        return drafts if self.oracle is None else self.oracle.propose(slots, limits)


class WatchedDFlash(Watching, DFlashDrafter):
    def __init__(self, draft: DFlashDecoder, target: Decoder, limits: ExecutorLimits) -> None:
        DFlashDrafter.__init__(self, draft, limits)
        self.watch(draft, target)


class WatchedMasks(Watching, EagleDrafter):
    def __init__(self, draft: DraftDecoder, target: Decoder, limits: ExecutorLimits) -> None:
        EagleDrafter.__init__(self, draft, target, limits)
        self.watch(draft, target)


class StaleContext(WatchedDFlash):
    """Fault: keys and values of accepted drafts are left out."""

    def draft_extend(self, spans: Sequence[Span], *inputs: Any) -> None:
        short = [
            replace(span, next_token_ids=span.next_token_ids[:1]) if span.start > 60 else span
            for span in spans
        ]
        super().draft_extend(short, *inputs)


class RejectedKept(WatchedDFlash):
    """Fault: features of rejected rows in the place of accepted ones."""

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[torch.Tensor], *rest: Any) -> None:
        super().draft_extend(spans, [each.roll(-1, 0) for each in aux_hidden], *rest)


class StaleMasks(WatchedMasks):
    """Fault: keys and values of masks stay where tokens were accepted."""

    def draft_extend(self, spans: Sequence[Span], *inputs: Any) -> None:
        kept = [tensor.clone() for tensor in self._cache.tensors]
        super().draft_extend(spans, *inputs)
        if all(span.start > 0 and len(span.next_token_ids) <= 1 + NUM_MASKS for span in spans):
            for tensor, old in zip(self._cache.tensors, kept, strict=True):
                tensor.copy_(old)


WATCHED: dict[str, type[Watching]] = {"dflash": WatchedDFlash, "peagle": WatchedMasks}


class Run(NamedTuple):
    completions: list[Completion]
    drafter: Any
    num_preemptions: int


def run(
    model: Model,
    head: str,
    variant: dict[str, int],
    *,
    corruption: float | None = None,
    kind: type[Watching] | None = None,
    **options: Any,
) -> Run:
    """Run all requests twice, with a head's drafts or an oracle's; with hits in the second pass."""
    drafters: list[Any] = []
    preemptions: list[int] = []
    watched: Any = kind or WATCHED[head]

    def eager_drafter(factory: Any, target: Decoder, limits: ExecutorLimits) -> Any:
        drafters.append(watched(factory.draft, target, limits))
        if corruption is not None:
            answers = {
                case.params.seed: [*case.prompt, *one.token_ids]
                for case, one in zip(model.cases, model.alone, strict=True)
            }
            drafters[-1].oracle = OracleDrafter(answers, corruption, VOCAB_SIZE)
        return drafters[-1]

    shape = Chain(NUM_MASKS)
    given = {"draft": model.folder / head, "shape": shape, "adaptive": False} | options
    with pytest.MonkeyPatch.context() as patch:
        for factory in (DFlashDrafterFactory, EagleDrafterFactory):
            patch.setattr(factory, "eager_drafter", eager_drafter)
        found = anyio.run(
            lambda: run_all(
                model.folder,
                config_of(speculation=Speculation(**given), **variant),
                model.cases,
                num_passes=2,
                on_end=lambda engine: preemptions.append(engine.stats().num_preemptions),
            )
        )
    return Run(found, drafters[0], preemptions[0])


def assert_drafts(model: Model, drafter: Any, every: int = 5) -> None:
    """A share of the drafts that were seen equals the head's output over the whole sequence at once."""
    compute = dflash_pass if isinstance(drafter, DFlashDrafter) else masked_pass
    sequences = {
        case.params.seed: [*case.prompt, *one.token_ids]
        for case, one in zip(model.cases, model.alone, strict=True)
    }
    checked = drafter.seen[::every]
    assert len(checked) > 60
    for seed, length, outputs in checked:
        expected = compute(drafter.target, drafter.draft, sequences[seed][:length], len(outputs))
        name = f"draft behind {length} tokens of seed {seed}"
        assert_near(outputs, expected, inner=256, depth=32, name=name)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("variant", slow_after(1, VARIANTS[::-1]), ids=str)
def test_drafts_do_not_change_tokens(model: Model, variant: dict[str, int], head: str) -> None:
    """With prefix hits, chunks of prompts, preemptions, and drafts of which any number is accepted."""
    found = run(model, head, variant, corruption=0.3)
    assert tokens_of(found.completions) == tokens_of(model.alone)
    assert sorted(found.drafter.oracle.histogram) == list(range(NUM_MASKS + 1))
    stats = [each.speculation for each in found.completions if each.speculation is not None]
    num_drafted, num_accepted = (
        sum(getattr(each, name) for each in stats) for name in ("num_drafted", "num_accepted")
    )
    assert 100 < num_accepted < num_drafted - 100
    assert sum(each.usage.cached_tokens for each in found.completions) > 0
    assert (found.num_preemptions > 0) == ("kv_cache_tokens" in variant)
    assert_drafts(model, found.drafter)


@pytest.mark.parametrize("model", slow_after(1, MODELS), indirect=True)
@pytest.mark.parametrize("head", slow_after(1, HEADS))
def test_own_drafts_do_not_change_tokens(model: Model, head: str) -> None:
    """Drafts of the head itself, with numbers of them that the policy chooses, and n-grams beside it."""
    found = run(model, head, VARIANTS[0], adaptive=True, ngrams=NGram(min_length=1))
    assert tokens_of(found.completions) == tokens_of(model.alone)
    assert len({len(outputs) for _, _, outputs in found.drafter.seen}) > 1
    assert_drafts(model, found.drafter, every=2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [StaleContext, RejectedKept, StaleMasks])
def test_planted_fault_is_found(model: Model, fault: type[Watching]) -> None:
    head = "peagle" if fault is StaleMasks else "dflash"
    found = run(model, head, VARIANTS[0], corruption=0.3, kind=fault)
    assert tokens_of(found.completions) == tokens_of(model.alone)  # drafts change no tokens
    with pytest.raises(AssertionError, match="draft behind"):
        assert_drafts(model, found.drafter)


@pytest.mark.parametrize(
    ("head", "shape", "message"),
    [
        ("dflash", Chain(NUM_MASKS + 1), "a Chain of at most 4 with this head"),
        ("dflash", DynamicTree(top_k=2, depth=2, num_draft_tokens=4), "a Chain of at most 4 with this head"),
        ("peagle", DynamicTree(top_k=2, depth=2, num_draft_tokens=4), "a Chain with a P-EAGLE head"),
    ],
)
def test_shapes_that_a_head_does_not_draft_are_refused(
    tmp_path: Path, head: str, shape: Chain | DynamicTree, message: str
) -> None:
    make_model(MODELS["llama"], tmp_path)
    make: Callable[..., None] = make_dflash if head == "dflash" else make_draft
    make(DFLASH_SEED if head == "dflash" else "peagle", tmp_path / head, tmp_path)

    async def start() -> None:
        async with Engine(tmp_path, config_of(speculation=Speculation(draft=tmp_path / head, shape=shape))):
            pass

    with pytest.raises(ConfigError, match=message):
        anyio.run(start)


@pytest.mark.parametrize("ngrams", [None, NGram()], ids=str)
def test_graph_executor_refuses_wide_dflash_heads(ngrams: NGram | None, tmp_path: Path) -> None:
    make_model(MODELS["llama"], tmp_path)
    target = load_decoder(tmp_path)
    settings = draw_dflash(DFLASH_SEED, json.loads((tmp_path / "config.json").read_text()))
    for head_dim in (256, 258):
        settings["transformer_layer_config"]["head_dim"] = head_dim
        draft = DFlashDecoder.random(DFlashConfig.from_hf(settings, target.spec), target)
        factory: DrafterFactory = DFlashDrafterFactory(draft, (NUM_MASKS,))
        factory = factory if ngrams is None else HybridDrafterFactory(factory, ngrams)
        if head_dim == 256:
            factory.check_graphs()
            continue

        message = 'executor=.graph.: .*"eager": CUDA graphs do not support DFlash heads of more than 256 dim'
        with pytest.raises(ConfigError, match=message):
            factory.check_graphs()
