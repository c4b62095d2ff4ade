"""Fields of Chain, NGram and Speculation."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from drift_sdk import Chain, ConfigError, NGram, Speculation

CASES = [
    (Chain, "num_draft_tokens", (1, 16), (0, 17, True, "3", 3.0, None)),
    (NGram, "min_length", (1, 4), (0, -1, True, "2", 2.0, None)),
    (NGram, "max_length", (2, 16), (1, 17, True, "2", 2.0, None)),
    (Speculation, "draft", ("hub/id", Path("folder"), NGram()), ("", 7, None, Chain(3))),
    (Speculation, "shape", (Chain(1), Chain(16)), (3, None, NGram())),
    (Speculation, "adaptive", (True, False), (1, None, "yes")),
    (Speculation, "aux_layer_convention", (None, "output", "boundary"), ("outputs", 1, True)),
    (Speculation, "required", (True, False), (0, None, "no")),
]
NEEDED = {Speculation: {"draft": "hub/id"}}


def test_every_field_of_speculation_has_a_case() -> None:
    for struct in (Chain, NGram, Speculation):
        assert {field for s, field, _, _ in CASES if s is struct} == set(struct.__struct_fields__)


@pytest.mark.parametrize(("struct", "field", "valid", "rejected"), CASES)
def test_field_accepts_its_range_and_rejects_the_rest(struct, field, valid, rejected) -> None:
    for value in valid:
        built = struct(**{**NEEDED.get(struct, {}), field: value})
        assert getattr(built, field) == value
        with pytest.raises(AttributeError):
            setattr(built, field, value)
        assert msgspec.structs.replace(built) == built
    for value in rejected:
        with pytest.raises(ConfigError) as caught:
            struct(**{**NEEDED.get(struct, {}), field: value})
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
