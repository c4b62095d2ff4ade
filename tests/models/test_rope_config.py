"""Settings of rotations in config.json."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers

from drift_sdk.errors import ModelLoadError
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.rope import LinearScaling, YarnScaling

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
        DecoderConfig.from_hf(config)


@pytest.mark.parametrize("scaling", [None, {}, YARN, YARN | {"rope_theta": 1e6, "mscale": None}])
def test_rope_settings_that_are_there_twice(scaling: dict[str, Any] | None) -> None:
    given = QWEN3 | {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": scaling}
    (rope,) = DecoderConfig.from_hf(given).ropes
    assert rope.theta == 1e6 and isinstance(rope.scaling, YarnScaling)
    theirs = transformers.Qwen3Config(**copy.deepcopy(given)).rope_parameters
    assert (theirs["rope_type"], theirs["factor"]) == ("yarn", rope.scaling.factor)


def test_rope_settings_of_gemma3_that_are_there_twice() -> None:
    full = LINEAR | {"rope_theta": 1e6}
    scaling = {"type": "linear", "factor": 8.0}
    config = DecoderConfig.from_hf(GEMMA3 | {"rope_parameters": _nested(full), "rope_scaling": scaling})
    assert [rope.scaling for rope in config.ropes] == [None, LinearScaling(factor=8.0)]


def test_default_rope_settings_contradict_nothing() -> None:
    """Those of gpt-oss are taken if a file has none."""
    given = QWEN3 | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "rope_parameters": PLAIN,
    }
    assert DecoderConfig.from_hf(given).ropes[0].scaling is None
