"""Fields of Chain, StaticTree, DynamicTree, NGram and Speculation."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from drift_sdk import (
    Chain,
    ConfigError,
    DynamicTree,
    EngineConfig,
    NGram,
    PartialVerification,
    Speculation,
    StaticTree,
)
from drift_sdk.trees import MAX_TREE_ROWS, max_batch_drafts

CASES = [
    (Chain, "num_draft_tokens", (1, 16), (0, 17, True, "3", 3.0, None)),
    (StaticTree, "paths", (((0,),), ((0,), (1,), (1, 15))), ((), None, 7, "00", {})),
    (DynamicTree, "top_k", (1, 16), (0, 17, True, "3", 3.0, None)),
    (DynamicTree, "depth", (1, 5, 16), (0, 17, True, "3", 3.0, None)),
    (DynamicTree, "num_draft_tokens", (1, 63), (0, 64, True, "3", 3.0, None)),
    (NGram, "min_length", (1, 4), (0, -1, True, "2", 2.0, None)),
    (NGram, "max_length", (2, 16), (1, 17, True, "2", 2.0, None)),
    (Speculation, "draft", ("hub/id", Path("folder"), NGram()), ("", 7, None, Chain(3))),
    (Speculation, "ngrams", (None, NGram(), NGram(min_length=3)), ("ngram", 3, True, Chain(3), NGram)),
    (Speculation, "shape", (Chain(1), StaticTree(((0,),)), DynamicTree()), (3, None, NGram(), ((0,),))),
    (
        Speculation,
        "partial_verification",
        (None, PartialVerification(), PartialVerification(refresh_tokens=4)),
        (True, 4096, {}, "lossy", PartialVerification),
    ),
    (PartialVerification, "sink_tokens", (1, 2**20), (0, 2**20 + 1, True, "3", 3.0, None)),
    (PartialVerification, "retrieved_tokens", (1, 2**20), (0, 2**20 + 1, True, "3", 3.0, None)),
    (PartialVerification, "window_tokens", (1, 2**20), (0, 2**20 + 1, True, "3", 3.0, None)),
    (PartialVerification, "refresh_tokens", (2, 128), (1, 129, True, "3", 3.0, None)),
    (Speculation, "checks", (True, False), (0, None, "no")),
    (Speculation, "adaptive", (True, False), (1, None, "yes")),
    (Speculation, "aux_layer_convention", (None, "output", "boundary"), ("outputs", 1, True)),
    (Speculation, "draft_weights", (None, "fp8", "int4"), ("", "stored", 8, True)),
    (Speculation, "required", (True, False), (0, None, "no")),
]
NEEDED = {
    (Speculation, None): {"draft": "hub/id"},
    (DynamicTree, "top_k"): {"depth": 2, "num_draft_tokens": 1},
    (DynamicTree, "depth"): {"num_draft_tokens": 1},
}


def test_every_field_of_speculation_has_a_case() -> None:
    for struct in (Chain, StaticTree, DynamicTree, NGram, PartialVerification, Speculation):
        assert {field for s, field, _, _ in CASES if s is struct} == set(struct.__struct_fields__)


@pytest.mark.parametrize(("struct", "field", "valid", "rejected"), CASES)
def test_field_accepts_its_range_and_rejects_the_rest(struct, field, valid, rejected) -> None:
    for value in valid:
        built = struct(**{**NEEDED.get((struct, None), {}), **NEEDED.get((struct, field), {}), field: value})
        assert getattr(built, field) == value
        with pytest.raises(AttributeError):
            setattr(built, field, value)
        assert msgspec.structs.replace(built) == built
    for value in rejected:
        with pytest.raises(ConfigError) as caught:
            struct(**{**NEEDED.get((struct, None), {}), **NEEDED.get((struct, field), {}), field: value})
        assert caught.value.field == field
        assert caught.value.value == value
        assert field in str(caught.value) and caught.value.allowed in str(caught.value)


@pytest.mark.parametrize("name", ["ngram", "NGram", "n-gram"])
def test_ngram_as_a_string_is_rejected_with_what_to_write(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"draft='{name}': expected NGram\(\) for n-gram drafts, or"):
        Speculation(draft=name)
    assert Speculation(draft=Path(name)).draft == Path(name)


def test_chain_offers_shorter_lengths() -> None:
    assert Chain(1).choices == (1,)
    assert Chain(3).choices == (1, 3)
    assert Chain(5).choices == (1, 3, 5)
    assert Chain(16).choices == (1, 3, 5, 8, 12, 16)


def test_dynamic_tree_limits_what_is_considered() -> None:
    with pytest.raises(ConfigError, match="depth=6: expected an integer from 1 to 5 with top_k=16"):
        DynamicTree(top_k=16, depth=6)
    with pytest.raises(ConfigError, match="num_draft_tokens=15: .* to 6 with top_k=2 and depth=2"):
        DynamicTree(top_k=2, depth=2)
    assert DynamicTree(top_k=2, depth=2, num_draft_tokens=6).choices == (1, 3, 6)


def test_trees_need_an_eagle_draft() -> None:
    for shape in (DynamicTree(), StaticTree(((0,),))):
        with pytest.raises(ConfigError, match=r"expected a Chain with NGram\(\)"):
            Speculation(draft=NGram(), shape=shape)


def test_ngrams_stand_beside_chains_of_a_draft() -> None:
    with pytest.raises(ConfigError, match=r"ngrams=NGram\(.*: expected None with draft=NGram\(\)"):
        Speculation(draft=NGram(), ngrams=NGram())
    with pytest.raises(ConfigError, match=r"shape=DynamicTree\(.*: expected a Chain with NGram\(\)"):
        Speculation(draft="head", ngrams=NGram(), shape=DynamicTree())


def test_static_tree_offers_smaller_trees() -> None:
    tree = StaticTree([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert (tree.choices, tree.num_draft_tokens, tree.depth, tree.num_candidates) == ((1, 3, 5), 5, 3, 2)
    # Of the first nodes, those with children: (0,) of three, (0,) and (0, 0) of five.
    assert [tree.num_draft_rows(number) for number in (1, 3, 5)] == [0, 1, 2]


def test_rows_of_dynamic_trees() -> None:
    tree = DynamicTree(top_k=4, depth=5)
    assert [tree.num_draft_rows(number) for number in (0, 1, 2, 3, 15)] == [0, 0, 2, 6, 16]
    assert max_batch_drafts(MAX_TREE_ROWS) == 0


PARTIAL = PartialVerification(refresh_tokens=4)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("partial_verification", {"shape": DynamicTree()}),
        ("partial_verification", {"checks": True}),
        ("refresh_tokens", {"shape": Chain(4)}),
    ],
)
def test_partial_verification_is_refused_where_rounds_have_none(field: str, settings: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        Speculation(draft="hub/id", partial_verification=PARTIAL, **settings)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"), [("tensor_parallel", 2), ("kv_dtype", "fp8"), ("block_size", 128)]
)
def test_partial_verification_is_refused_beside_settings_of_an_engine(field: str, value: object) -> None:
    speculation = Speculation(draft="hub/id", partial_verification=PARTIAL)
    EngineConfig(speculation=speculation, block_size=64)
    with pytest.raises(ConfigError, match=f"{field}=.*with partial_verification"):
        EngineConfig(speculation=speculation, **{field: value})


def test_partial_verification_from_plain_data() -> None:
    settings = {"draft": "ngram", "partial_verification": {"sink_tokens": 16, "refresh_tokens": 9}}
    found = Speculation.from_dict(settings).partial_verification
    assert found == PartialVerification(sink_tokens=16, refresh_tokens=9)
    with pytest.raises(ConfigError, match="sink_token"):
        Speculation.from_dict(settings | {"partial_verification": {"sink_token": 16}})
