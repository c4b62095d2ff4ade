"""EngineConfig from mappings and from environment variables."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from drift_sdk import (
    Chain,
    ConfigError,
    DynamicTree,
    EngineConfig,
    NGram,
    PartialVerification,
    RequestError,
    SamplingParams,
    Speculation,
    StaticTree,
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"PATH": "/bin", "DRIFTWOOD": "1"})


def from_env(monkeypatch: pytest.MonkeyPatch, prefix: str = "DRIFT_", **variables: str) -> EngineConfig:
    with monkeypatch.context() as patch:
        for name, text in variables.items():
            patch.setitem(__import__("os").environ, name, text)
        return EngineConfig.from_env(prefix) if prefix != "DRIFT_" else EngineConfig.from_env()


def test_mapping_is_read_strictly() -> None:
    assert EngineConfig.from_dict({}) == EngineConfig()
    given = {"device": "cpu", "max_num_seqs": 4, "gpu_memory_fraction": 0.5, "local_files_only": True}
    assert EngineConfig.from_dict(given) == EngineConfig(**given)
    for wrong, said in (
        ({"a\n\ud800": 4}, r"'a\\n\\ud800'=4: unknown field, expected"),
        ({"max_num_seq": 4}, r"max_num_seq=4: unknown field \(did you mean max_num_seqs\?\)"),
        ({"max_num_seqs": "4"}, "max_num_seqs='4': expected an integer"),
        ({"local_files_only": 1}, "local_files_only=1: expected True or False"),
        ([("device", "cpu")], "settings=.*expected a mapping"),
        ("cpu", "settings='cpu': expected a mapping"),
    ):
        with pytest.raises(ConfigError, match=said):
            EngineConfig.from_dict(wrong)


@pytest.mark.parametrize(
    "given", [None, 5, "draft", b"{}", ["draft"], [("draft", "ngram")], {"draft"}, object()]
)
@pytest.mark.parametrize(
    ("read", "error", "name"),
    [
        (EngineConfig.from_dict, ConfigError, "settings"),
        (Speculation.from_dict, ConfigError, "settings"),
        (PartialVerification.from_dict, ConfigError, "settings"),
        (SamplingParams.from_dict, RequestError, "params"),
    ],
)
def test_what_is_no_mapping_is_rejected(read: Any, error: type[Exception], name: str, given: Any) -> None:
    with pytest.raises(error, match=f"^{name}=.*: expected a mapping"):
        read(given)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"draft": "org/head"}, Speculation(draft="org/head")),
        ({"draft": "ngram", "shape": 2}, Speculation(draft=NGram(), shape=Chain(2))),
        ({"draft": {"min_length": 3}}, Speculation(draft=NGram(min_length=3))),
        ({"draft": "x", "ngrams": {"min_length": 3}}, Speculation(draft="x", ngrams=NGram(min_length=3))),
        (
            {"draft": "x", "shape": {"num_draft_tokens": 5}, "adaptive": False, "required": False},
            Speculation(draft="x", shape=Chain(5), adaptive=False, required=False),
        ),
        (
            {"draft": "x", "shape": {"paths": [[0], [1], [0, 0]]}},
            Speculation(draft="x", shape=StaticTree(((0,), (1,), (0, 0)))),
        ),
        (
            {"draft": "x", "shape": {"top_k": 2, "num_draft_tokens": 5}},
            Speculation(draft="x", shape=DynamicTree(top_k=2, num_draft_tokens=5)),
        ),
    ],
)
def test_speculation_may_be_a_mapping(given: dict[str, Any], expected: Speculation) -> None:
    assert Speculation.from_dict(given) == expected
    assert EngineConfig.from_dict({"speculation": given}).speculation == expected
    assert EngineConfig.from_dict({"speculation": expected}).speculation == expected


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, 'draft=None: expected a folder, a .gguf file or a hub id, "mtp" or NGram()'),
        ({"draft": "x", "drafts": 1}, "drafts=1: unknown field"),
        ({"draft": {"length": 1}}, "length=1: unknown field"),
        ({"draft": {"min_length": 0}}, "min_length=0: expected"),
        ({"draft": "x", "ngrams": {"length": 1}}, "length=1: unknown field"),
        ({"draft": "x", "ngrams": "ngram"}, "ngrams='ngram': expected NGram"),
        ({"draft": "x", "shape": 99}, "num_draft_tokens=99: expected"),
        ({"draft": "x", "shape": {"tokens": 1}}, "tokens=1: unknown field"),
        ({"draft": "x", "shape": {"paths": [[1, 0]]}}, "paths"),
        ({"draft": "x", "shape": {"top_k": 2, "tokens": 1}}, "tokens=1: unknown field"),
        ({"draft": "x", "shape": "chain"}, "shape='chain': expected a Chain"),
        ({"draft": "x", "shape": True}, "num_draft_tokens=True: expected an integer"),
    ],
)
def test_wrong_speculation_is_rejected(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.from_dict({"speculation": given})


def test_every_field_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new field of a type that strings cannot be read as fails here."""
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "bfloat16",
        "executor": "eager",
        "load": "random",
        "weights": "int4",
        "tuning": "short",
        "kv_dtype": "fp8",
        "tool_format": "hermes",
        "reasoning_format": "think",
        "speculation": {"draft": {"min_length": 2}, "shape": 2},
    }
    samples = {bool: True, int: 16, float: 0.5, str: "text"}
    for field in msgspec.structs.fields(EngineConfig):
        kinds = [kind for kind in samples if field.name not in values and kind.__name__ in str(field.type)]
        if kinds:
            values[field.name] = samples[kinds[0]]
    assert set(values) == set(EngineConfig.__struct_fields__)
    texts = {
        f"DRIFT_{name.upper()}": json.dumps(value) if isinstance(value, dict | bool) else str(value)
        for name, value in values.items()
    }
    assert from_env(monkeypatch, **texts) == EngineConfig.from_dict(values)


def test_variables_are_read_by_the_types_of_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_env(monkeypatch) == EngineConfig()
    assert from_env(monkeypatch, DRIFT_MAX_NUM_SEQS="", DRIFT_DEVICE="") == EngineConfig()
    assert from_env(monkeypatch, DRIFT_TOKENIZER="7") == EngineConfig(tokenizer="7")
    assert from_env(monkeypatch, DRIFT_LOCAL_FILES_ONLY="FALSE", DRIFT_FAST_PROMPTS="1") == EngineConfig(
        fast_prompts=True
    )
    assert from_env(monkeypatch, DRIFT_STEP_TIMEOUT_S="1e1") == EngineConfig(step_timeout_s=10.0)
    off = from_env(monkeypatch, DRIFT_TOOL_FORMAT="none", DRIFT_SPECULATION="None", DRIFT_NUM_THREADS="none")
    assert off == EngineConfig(tool_format=None)
    mine = from_env(monkeypatch, "MY_", MY_MAX_NUM_SEQS="3", DRIFT_DEVICE="tpu")
    assert mine == EngineConfig(max_num_seqs=3)


@pytest.mark.parametrize(
    "variable, text, said",
    [
        ("DRIFT_MAX_NUM_SEQS", "many", "DRIFT_MAX_NUM_SEQS='many': expected an integer"),
        ("DRIFT_MAX_NUM_SEQS", "1.5", "expected an integer"),
        ("DRIFT_MAX_NUM_SEQS", "9" * 5000, "expected an integer"),
        ("DRIFT_MAX_NUM_SEQS", "0", "DRIFT_MAX_NUM_SEQS: max_num_seqs=0: expected an integer from 1"),
        ("DRIFT_STEP_TIMEOUT_S", "soon", "DRIFT_STEP_TIMEOUT_S='soon': expected a number"),
        ("DRIFT_STEP_TIMEOUT_S", "nan", "DRIFT_STEP_TIMEOUT_S: step_timeout_s=nan: expected a finite"),
        ("DRIFT_LOCAL_FILES_ONLY", "yes", "DRIFT_LOCAL_FILES_ONLY='yes': expected true, false, 1 or 0"),
        ("DRIFT_MAX_NUM_SEQS", "none", "DRIFT_MAX_NUM_SEQS='none': expected an integer"),
        ("DRIFT_DEVICE", "tpu", "DRIFT_DEVICE: device='tpu': expected"),
        ("DRIFT_SPECULATION", "ngram", "DRIFT_SPECULATION='ngram': expected a JSON object"),
        ("DRIFT_SPECULATION", '{"draft": "x", "shape": 99}', "DRIFT_SPECULATION: num_draft_tokens=99"),
        ("DRIFT_MAX_NUM_SEQ", "4", r"unknown variable \(did you mean DRIFT_MAX_NUM_SEQS\?\)"),
    ],
)
def test_errors_name_the_variable(
    variable: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        from_env(monkeypatch, **{variable: text})
    assert caught.value.field == variable


def test_long_value_of_an_unknown_variable_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="DRIFT_TOKEN='xxx") as caught:
        from_env(monkeypatch, DRIFT_TOKEN="x" * 100_000)
    assert len(str(caught.value)) < 2000


def test_prefix_is_not_empty() -> None:
    """Without one, every variable of the process would have to be a field."""
    with pytest.raises(ConfigError, match="prefix=''"):
        EngineConfig.from_env("")
