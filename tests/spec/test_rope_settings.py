"""Settings of rotations in config.json."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from drift_sdk import EngineConfig, inspect
from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.spec.rope import LinearScaling, YarnScaling

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 40_960,
}
GEMMA3 = QWEN3 | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 8.0}
MAGNITUDE = 0.1 * math.log(4) + 1  # of YARN
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}


def _nested(full: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    "config",
    [
        QWEN3 | {"rope_parameters": PLAIN, "rope_scaling": YARN},
        QWEN3 | {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN},
        QWEN3 | {"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}},
        QWEN3 | {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": YARN | {"rope_theta": 1e4}},
        QWEN3 | {"rope_parameters": LINEAR, "rope_scaling": {"type": "default"}},
        QWEN3 | {"rope_parameters": LINEAR, "rope_scaling": [LINEAR]},
        GEMMA3 | {"rope_parameters": _nested(PLAIN), "rope_scaling": LINEAR},
    ],
)
def test_rope_settings_that_contradict_each_other_are_rejected(config: dict[str, Any]) -> None:
    """transformers takes `rope_scaling` then."""
    with pytest.raises(ModelLoadError, match=r"rope_parameters=\{.*, rope_scaling=.*: expected one of them"):
        read_spec(config)


@pytest.mark.parametrize("scaling", [None, {}, YARN, YARN | {"rope_theta": 1e6, "mscale": None}])
def test_rope_settings_that_are_there_twice(scaling: dict[str, Any] | None) -> None:
    given = QWEN3 | {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": scaling}
    (rope,) = read_spec(given).ropes
    assert rope.theta == 1e6 and isinstance(rope.scaling, YarnScaling)
    theirs = transformers.Qwen3Config(**copy.deepcopy(given)).rope_parameters
    assert (theirs["rope_type"], theirs["factor"]) == ("yarn", rope.scaling.factor)


def test_rope_settings_of_gemma3_that_are_there_twice() -> None:
    full = LINEAR | {"rope_theta": 1e6}
    scaling = {"type": "linear", "factor": 8.0}
    spec = read_spec(GEMMA3 | {"rope_parameters": _nested(full), "rope_scaling": scaling})
    assert [rope.scaling for rope in spec.ropes] == [None, LinearScaling(factor=8.0)]


def test_default_rope_settings_contradict_nothing() -> None:
    """Those of gpt-oss are taken if a file has none."""
    given = QWEN3 | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "rope_parameters": PLAIN,
    }
    assert read_spec(given).ropes[0].scaling is None


@pytest.mark.parametrize(
    "context, yarn, expected",
    [
        (40_960, YARN, 131_072),  # Qwen3's card adds YaRN and nothing else
        (32_768, YARN, 131_072),  # and so does Qwen2.5's
        (131_072, YARN, 131_072),
        (200_000, YARN, 200_000),
        (40_960, {"rope_type": "yarn", "factor": 2.5}, 102_400),
        (131_072, YARN | {"factor": None}, 131_072),
        (40_960, YARN | {"factor": 1e30}, 2**31 - 1),
        (40_960, LINEAR, 40_960),
    ],
)
def test_context_with_yarn(context: int, yarn: dict[str, Any], expected: int) -> None:
    spec = read_spec(QWEN3 | {"max_position_embeddings": context, "rope_scaling": yarn})
    assert spec.max_position_embeddings == expected


def test_yarn_without_the_context_of_pretraining_equals_transformers() -> None:
    """It is `max_position_embeddings`."""
    given = QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 2.5}}
    theirs = transformers.Qwen3Config(**copy.deepcopy(given))
    assert theirs.rope_parameters["original_max_position_embeddings"] == 40_960
    rotary = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(theirs)
    (rope,) = read_spec(given).ropes
    assert torch.equal(rope.frequencies(), rotary.inv_freq) and rope.magnitude == rotary.attention_scaling


def test_window_within_the_context_that_yarn_reaches() -> None:
    switch = {"use_sliding_window": True, "sliding_window": 50_000, "max_window_layers": 1}
    assert read_spec(QWEN3 | switch).windows == (None, None)
    assert read_spec(QWEN3 | switch | {"rope_scaling": YARN}).windows == (None, 50_000)


def test_max_model_len_with_yarn(tmp_path: Path) -> None:
    """As docs/models.md says: the config of Qwen3, and what its card adds."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"rope_scaling": YARN}))
    fields: dict[str, Any] = {"device": "cpu", "load": "random", "max_num_seqs": 1}
    for max_model_len in (None, 131_072):
        info = inspect(tmp_path, EngineConfig(max_model_len=max_model_len, **fields))
        assert (info.is_supported, info.context, info.max_model_len) == (True, 131_072, 131_072)

    info = inspect(tmp_path, EngineConfig(max_model_len=131_073, **fields))
    assert "expected at most the model's context of 131072" in info.reasons[0]


@pytest.mark.parametrize(
    "extra, magnitude",
    [
        ({}, MAGNITUDE),
        ({"attn_factor": 0.8782488562869419}, 1.0),  # DeepSeek-R1-0528-Qwen3-8B
        ({"attn_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0}, (0.1 * math.log(4) + 0.5) / MAGNITUDE),
        ({"attn_factor": 0.5, "attention_factor": 1.25}, 1.25),
    ],
)
def test_magnitude_of_yarn(extra: dict[str, Any], magnitude: float) -> None:
    (rope,) = read_spec(QWEN3 | {"rope_scaling": YARN | extra}).ropes
    assert rope.magnitude == pytest.approx(magnitude)


def test_attn_factor_out_of_range() -> None:
    with pytest.raises(ModelLoadError, match="attn_factor=0 in the rope settings: expected a number from"):
        read_spec(QWEN3 | {"rope_scaling": YARN | {"attn_factor": 0}})


def test_settings_without_effect_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    yarn = YARN | {"finetuned": True, "extrapolation_factor": 0.5, "attn_factor": 1.0, "beta_fast": 32}
    for config in (
        QWEN3 | {"rope_scaling": yarn},
        GEMMA3 | {"rope_parameters": _nested(LINEAR | {"finetuned": 1}) | {"extrapolation_factor": 2}},
    ):
        caplog.clear()
        read_spec(config)
        assert caplog.messages == [
            "the config has rope settings without effect: ['extrapolation_factor', 'finetuned']"
        ]


def test_known_settings_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    read_spec(GEMMA3 | {"rope_parameters": _nested(LINEAR), "rope_scaling": LINEAR})
    read_spec(QWEN3 | {"rope_parameters": YARN | {"mscale": 1.0, "truncate": False}})
    assert caplog.messages == []
