"""tokenizer.json and tokenizer_config.json: valid ones with any value in some places."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from drift_sdk.text.tokenizer import Tokenizer

FOLDER = tempfile.TemporaryDirectory()
FILE = Path(FOLDER.name) / "tokenizer.json"
VOCAB = {
    token: token_id for token_id, token in enumerate(["<s>", "</s>", "a", "b", "ab", "\u0120", "\u0120a"])
}
TEXT = "ab a<s>\u4e2d"


def _specs() -> list[dict[str, Any]]:
    merges = [("a", "b"), ("\u0120", "a")]
    byte_level = tokenizers.Tokenizer(models.BPE(vocab=VOCAB, merges=merges))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens(["<s>", "</s>"])
    byte_level.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    spaced = tokenizers.Tokenizer(models.BPE(vocab=VOCAB, merges=merges, unk_token="<s>", byte_fallback=True))
    spaced.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
    steps = [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    spaced.decoder = decoders.Sequence(steps)
    return [json.loads(raw.to_str()) for raw in (byte_level, spaced)]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [found for key, item in inner for found in _paths(item, (*path, key))]


SPECS = _specs()
PATHS = [_paths(spec) for spec in SPECS]
LIKELY = (
    *("BPE", "Unigram", "WordPiece", "WordLevel", "ByteLevel", "Metaspace", "Sequence", "Split", "Strip"),
    *("Fuse", "Replace", "Regex", "String", "Prepend", "NFC", "Precompiled", "(", "(a*)*$", "<s>", "ab", "c"),
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.just([])
    | st.just({})
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
    | st.sampled_from(LIKELY),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "pattern", "content", "vocab", "id", "a"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)
names = st.sampled_from(["bos_token", "eos_token", "add_bos_token", "chat_template"])
texts = st.sampled_from(["<s>", "</s>", "a", {"content": "<s>"}, [{"name": "default", "template": "x"}]])
configs = st.just({}) | st.dictionaries(names, texts | st.booleans() | values, max_size=2)
# Values that may replace a value, by its type.
ALIKE: dict[type, st.SearchStrategy[Any]] = {
    str: st.sampled_from(LIKELY) | st.text(max_size=3),
    int: st.integers(-1, 9) | st.sampled_from([2**31, 2**32 - 1, 2**63]),
    bool: st.booleans(),
    list: st.just([]) | st.lists(values, max_size=2),
    dict: st.just({}) | values,
    type(None): values,
}
changes = [
    st.sampled_from(paths).flatmap(lambda path, spec=spec: st.tuples(st.just(path), _alike(spec, path)))
    for spec, paths in zip(SPECS, PATHS, strict=True)
]
# Steps that make text longer, each repeated many times.
PARTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}
LONG = ["", "x", "aa", "x" * 10, "\ufdfa", "ab" * 1000]
patterns = st.sampled_from([{"Regex": "."}, {"Regex": "a*"}, {"Regex": ""}, {"String": ""}, {"String": "a"}])
pieces = st.sampled_from(
    [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "s", "type_id": 0}}]
)
steps = (
    st.fixed_dictionaries({"type": st.just("Replace"), "pattern": patterns, "content": st.sampled_from(LONG)})
    | st.fixed_dictionaries({"type": st.just("Prepend"), "prepend": st.sampled_from(LONG)})
    | st.fixed_dictionaries({"prepend": st.sampled_from(LONG)})
    | st.sampled_from(["NFC", "NFKD", "Lowercase", "ByteLevel", "Strip", "Fuse"]).map(
        lambda kind: {"type": kind, "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
    )
    | st.just({"type": "Metaspace", "replacement": "a", "prepend_scheme": "always", "split": True})
    | st.lists(pieces, max_size=3).map(
        lambda drawn: {
            "type": "TemplateProcessing",
            "single": drawn,
            "pair": drawn,
            "special_tokens": {"s": {"id": "s", "ids": [0] * 500, "tokens": ["<s>"] * 500}},
        }
    )
)


def _sequence(part: str, step: Any, times: int) -> tuple[tuple[Any, ...], Any]:
    return (part,), {"type": "Sequence", PARTS[part]: [step] * times}


sequences = st.builds(_sequence, st.sampled_from(list(PARTS)), steps, st.sampled_from([1, 2, 9, 40]))
strategy = st.integers(0, len(SPECS) - 1).flatmap(
    lambda index: st.tuples(
        st.just(index), st.lists(changes[index] | sequences, min_size=1, max_size=3), configs
    )
)


def _alike(spec: Any, path: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    for key in path:
        spec = spec[key]
    return ALIKE[type(spec)]


def _replaced(spec: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value

    place = spec
    try:
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
    except (TypeError, KeyError, IndexError):
        pass  # an earlier change removed this place
    return spec


def run(data: tuple[int, list[tuple[tuple[Any, ...], Any]], dict[str, Any]]) -> None:
    index, changes, config = data
    spec = copy.deepcopy(SPECS[index])
    for path, value in changes:
        spec = _replaced(spec, path, copy.deepcopy(value))
    FILE.write_text(json.dumps(spec))
    tokenizer = Tokenizer.from_file(FILE, config)
    ids = tokenizer.encode(TEXT)
    tokenizer.decode(ids)
    tokenizer.detokenizer().push(ids)
