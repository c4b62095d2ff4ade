"""Requests of models with latent attention have the same tokens alone and together, from the prefix cache or
from the beginning, with drafts of every kind and without."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from draft_zoo import make_draft
from family_zoo import draw_model
from hybrid_requests import VARIANTS, Case, config_of, draw_cases, run_all, run_alone, tokens_of
from model_zoo import save_tokenizer
from slow_cases import slow_after
from tolerances import bound

from drift_sdk import Chain, Completion, DynamicTree, Engine, NGram, Speculation, StaticTree

SEED = 9
NEAR_TIE = bound(16.0, inner=96, depth=1 + 3 * 2)
"""More than the rounding of logits of a model with three layers of chained products."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    draw_model(
        "glm4_moe_lite", SEED, num_hidden_layers=3, mlp_layer_types=["dense"] + ["sparse"] * 2
    ).save_pretrained(folder)
    save_tokenizer(folder, 160)
    return folder


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return draw_cases()


@pytest.fixture(scope="module")
def alone(folder: Path, cases: list[Case]) -> list[Completion]:
    return run_alone(folder, cases, NEAR_TIE)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [2, 0, 1])
def test_requests_together_equal_requests_alone(
    folder: Path, cases: list[Case], alone: list[Completion], variant: int
) -> None:
    counts: list[int] = []

    def note(engine: Engine) -> None:
        counts.append(engine.stats().num_preemptions)

    config = config_of(**VARIANTS[variant])
    found = anyio.run(lambda: run_all(folder, config, cases, num_passes=2, on_end=note))
    assert tokens_of(found) == tokens_of(alone)
    assert sum(each.usage.cached_tokens for each in found) > 0
    assert (counts[0] > 0) == (variant == 2)


SHAPES = {
    "ngram": Chain(3),
    "head": Chain(3),
    "static tree": StaticTree(((0,), (1,), (0, 0), (0, 1))),
    "dynamic tree": DynamicTree(),
}


@pytest.mark.parametrize("name", slow_after(1, ["head", "dynamic tree", "ngram", "static tree"]))
def test_drafts_do_not_change_tokens(
    folder: Path, cases: list[Case], alone: list[Completion], tmp_path: Path, name: str
) -> None:
    draft: Path | NGram = NGram(min_length=1)
    if name != "ngram":
        make_draft("reference", tmp_path, folder)
        draft = tmp_path
    speculation = Speculation(draft=draft, shape=SHAPES[name], adaptive=False)
    config = config_of(speculation=speculation, **VARIANTS[2])
    found = anyio.run(lambda: run_all(folder, config, cases, num_passes=2))
    assert tokens_of(found) == tokens_of(alone)
    assert sum(each.speculation.num_drafted for each in found if each.speculation) > 0
    assert sum(each.usage.cached_tokens for each in found) > 0
