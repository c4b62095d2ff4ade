"""Settings of published models of each family, and of their siblings that are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.spec.model import Mlp, ModelSpec, Norm
from drift_sdk.spec.rope import LinearScaling, LongRopeScaling, Rope

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
}


def _config(architecture: str, model_type: str, **settings: Any) -> dict[str, Any]:
    return {**SHAPE, "architectures": [architecture], "model_type": model_type, **settings}


def _read(*names: str, **settings: Any) -> ModelSpec:
    return read_spec(_config(*names, **settings))


def _layer_ropes(spec: ModelSpec) -> list[Rope | None]:
    return [layer.mixer.rope for layer in spec.layers]


MISTRAL = ("MistralForCausalLM", "mistral")
PHI3 = ("Phi3ForCausalLM", "phi3")
GEMMA3 = ("Gemma3ForCausalLM", "gemma3_text")
SMOLLM3 = ("SmolLM3ForCausalLM", "smollm3")
GRANITE = ("GraniteForCausalLM", "granite")
QWEN2 = ("Qwen2ForCausalLM", "qwen2")
LLAMA = ("LlamaForCausalLM", "llama")
LONG_ROPE = {"type": "longrope", "short_factor": [1.5] * 6, "long_factor": [4.0] * 6}


def test_mistral() -> None:
    assert _read(*MISTRAL).windows == (4096,) * 4  # transformers' default
    assert _read(*MISTRAL, sliding_window=None).windows == (None,) * 4
    spec = _read(*MISTRAL, sliding_window=64, head_dim=32, rope_theta=1e6)
    assert (spec.windows, spec.attention.head_dim) == ((64,) * 4, 32)
    assert _layer_ropes(spec) == [Rope(theta=1e6, rotary_dim=32)] * 4


def test_window_that_the_context_never_fills_has_no_effect() -> None:
    for window, expected in ((127, 127), (128, None), (262_144, None)):
        spec = _read(*MISTRAL, sliding_window=window, max_position_embeddings=128)
        assert spec.windows == (expected,) * 4


def test_windows_of_llama_are_those_that_its_config_names() -> None:
    assert _read(*LLAMA, sliding_window=64).windows == (64,) * 4
    assert _read(*LLAMA, sliding_window=64, use_sliding_window=False).windows == (None,) * 4
    types = ["full_attention", "sliding_attention"] * 2
    assert _read(*LLAMA, sliding_window=64, layer_types=types).windows == (None, 64) * 2


def test_windows_of_qwen2() -> None:
    switch = {"use_sliding_window": True, "sliding_window": 64}
    assert _read(*QWEN2, **switch).windows == (None,) * 4  # the first 28 layers have none by default
    assert _read(*QWEN2, **switch, max_window_layers=3).windows == (None,) * 3 + (64,)
    assert _read(*QWEN2, sliding_window=64, max_window_layers=0).windows == (None,) * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert _read(*QWEN2, **switch, layer_types=types, max_window_layers=3).windows == (64, None) * 2


def test_phi3() -> None:
    spec = _read(*PHI3, sliding_window=2047, rope_scaling=None, attention_bias=False)
    assert (spec.names.attention.fused, spec.names.mlp.fused) == ("qkv_proj", "gate_up_proj")
    assert spec.attention.rotary_dim == 16
    assert spec.windows == (2047,) * 4 and spec.final_norm == Norm(1e-5)
    assert _read(*PHI3).windows == (None,) * 4
    for name in ("longrope", "su"):
        rope = LONG_ROPE | {"type": name}
        spec = _read(*PHI3, partial_rotary_factor=0.75, rope_scaling=rope, tie_word_embeddings=True)
        assert (spec.attention.rotary_dim, spec.attention.head_dim) == (12, 16)
        assert spec.is_head_tied


@pytest.mark.parametrize(
    "max_model_len, factor", [(None, 4.0), (4096, 1.5), (4097, 4.0), (131_072, 4.0), (100, 1.5)]
)
def test_longest_sequence_decides_between_the_factors(max_model_len: int | None, factor: float) -> None:
    given = _config(*PHI3, partial_rotary_factor=0.75, rope_scaling=LONG_ROPE)
    spec = read_spec(given, max_model_len=max_model_len)
    scaling = spec.ropes[0].scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.factors == (factor,) * 6
    assert scaling.magnitude == spec.ropes[0].magnitude == pytest.approx((1 + 5 / 12) ** 0.5)


def test_gemma3() -> None:
    """Settings as the files of 2025 have them, and as transformers writes them since."""
    old = _config(
        *GEMMA3,
        hidden_activation="gelu_pytorch_tanh",
        head_dim=32,
        num_hidden_layers=7,
        query_pre_attn_scalar=24,
        rope_local_base_freq=10_000,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        rope_theta=1_000_000,
        sliding_window=512,
        sliding_window_pattern=6,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )
    spec = read_spec(old)
    local = Rope(theta=1e4, rotary_dim=32)
    whole = Rope(theta=1e6, rotary_dim=32, scaling=LinearScaling(factor=8.0))
    assert _layer_ropes(spec) == [local] * 5 + [whole, local]
    assert spec.ropes == (local, whole)
    assert spec.windows == (512,) * 5 + (None, 512)
    assert {layer.channel for layer in spec.layers} == {Mlp(intermediate_size=96, activation="gelu_tanh")}
    norm = Norm(1e-6, "offset")
    assert {layer.mixer.head_norm for layer in spec.layers} == {norm} == {spec.final_norm}
    assert {(layer.norm, layer.post_norm) for layer in spec.layers} == {(norm, norm)}
    assert {layer.mixer.scale for layer in spec.layers} == {24**-0.5}
    assert spec.embedding_multiplier == 8.0 and spec.is_head_tied

    names = ("rope_local_base_freq", "rope_scaling", "rope_theta", "sliding_window_pattern")
    new = {name: value for name, value in old.items() if name not in names}
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_type": "default"},
    }
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert read_spec(new | {"rope_parameters": ropes, "layer_types": types}) == spec


def test_gemma3_defaults() -> None:
    """Files leave out what equals transformers' defaults."""
    names = ("vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    given = {name: value for name, value in _config(*GEMMA3).items() if name not in names}
    spec = read_spec(given)
    attention = spec.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    assert (spec.vocab_size, spec.max_position_embeddings) == (262_208, 131_072)
    assert (attention.scale, spec.windows) == (256**-0.5, (4096,) * 4)


def test_text_part_of_a_model_with_vision() -> None:
    text = {
        name: value for name, value in _config(*GEMMA3, sliding_window=512).items() if name != "architectures"
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    assert read_spec(outer) == _read(*GEMMA3, sliding_window=512)
    with pytest.raises(ModelLoadError, match="text_config=None: expected a table"):
        read_spec(outer | {"text_config": None})
    with pytest.raises(ModelLoadError, match="quant_method='bitsandbytes'"):
        read_spec(outer | {"quantization_config": {"quant_method": "bitsandbytes"}})


def test_smollm3() -> None:
    spec, rope = _read(*SMOLLM3), Rope(theta=2e6, rotary_dim=16)
    assert _layer_ropes(spec) == [rope, rope, rope, None] and spec.is_head_tied
    assert spec.windows == (None,) * 4
    spec = _read(*SMOLLM3, no_rope_layers=[0, 1, 1, 0, 1], use_sliding_window=True, sliding_window=32)
    assert _layer_ropes(spec) == [None, rope, rope, None]
    assert spec.windows == (32, None, None, 32)
    unrotated = _read(*SMOLLM3, no_rope_layer_interval=1)
    assert (unrotated.ropes, _layer_ropes(unrotated)) == ((), [None] * 4)


def test_granite() -> None:
    spec = _read(
        *GRANITE,
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.22,
        logits_scaling=8,
        mlp_bias=True,
    )
    assert (spec.embedding_multiplier, spec.logits_divisor) == (12.0, 8.0)
    assert {layer.mixer.scale for layer in spec.layers} == {0.015625}
    assert {layer.multiplier for layer in spec.layers} == {0.22}
    assert {layer.channel for layer in spec.layers} == {Mlp(intermediate_size=96, has_bias=True)}
    assert _read(*GRANITE).attention.scale == 1.0  # transformers' default
    # Other families do not read these settings.
    llama = _read(*LLAMA, residual_multiplier=0.22, logits_scaling=8)
    assert (llama.layers[0].multiplier, llama.logits_divisor) == (1.0, 1.0)


@pytest.mark.parametrize(
    "architecture, model_type",
    [
        ("Gemma2ForCausalLM", "gemma2"),
        ("Gemma3nForConditionalGeneration", "gemma3n"),
        ("GraniteMoeForCausalLM", "granitemoe"),
        ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
        ("LlavaForConditionalGeneration", "llava"),
        ("Phi3SmallForCausalLM", "phi3small"),
        ("Phi3VForCausalLM", "phi3_v"),
        ("Phi4MMForCausalLM", "phi4mm"),
        ("PhiMoEForCausalLM", "phimoe"),
    ],
)
def test_sibling_that_is_not_implemented_is_named(architecture: str, model_type: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{architecture}.*expected one of .*MistralForCausalLM"):
        _read(architecture, model_type)


TYPES = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    "names, settings, message",
    [
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not implemented"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not implemented"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation='gelu': expected 'silu' or"),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0: expected a number from"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern=0: expected an integer from 1"),
        (GEMMA3, {"sliding_window": None}, "sliding_window=None is not in use"),
        (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "expected one set for each of"),
        (
            GEMMA3,
            {"rope_parameters": {"full_attention": {"rope_type": "xpos"}, "sliding_attention": {}}},
            "rope_type='xpos'",
        ),
        (GEMMA3, {"rope_local_base_freq": 0}, "rope_theta=0"),
        (QWEN2, {"layer_types": TYPES, "sliding_window": 64}, "sliding_window=64 is not in use"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": "2"}, "max_window_l"),
        (SMOLLM3, {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]: expected 4 or more of 0 and 1"),
        (SMOLLM3, {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        (SMOLLM3, {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0: expected an integer from 1"),
        (GRANITE, {"residual_multiplier": "1"}, "residual_multiplier='1': expected a number from"),
        (GRANITE, {"logits_scaling": 0}, "logits_scaling=0"),
        (GRANITE, {"attention_multiplier": float("nan")}, "attention_multiplier=nan"),
        (GRANITE, {"embedding_multiplier": 1e300}, "embedding_multiplier=1e"),
        (PHI3, {"partial_rotary_factor": 0.7}, "partial_rotary_factor=0.7: expected a number up to 1"),
        (PHI3, {"partial_rotary_factor": 0.0}, "partial_rotary_factor=0.0"),
        (PHI3, {"partial_rotary_factor": "x"}, "partial_rotary_factor='x'"),
        (PHI3, {"rope_scaling": LONG_ROPE}, "rope short_factor .*: expected 8 numbers"),
        (
            PHI3,
            {"partial_rotary_factor": 0.75, "rope_scaling": LONG_ROPE | {"long_factor": [0.0] * 6}},
            "rope long_factor .*: expected 6 numbers",
        ),
        (
            PHI3,
            {"partial_rotary_factor": 0.75, "rope_scaling": LONG_ROPE | {"attention_factor": -1}},
            "attention_factor=-1",
        ),
        (
            PHI3,
            {"original_max_position_embeddings": 1, "rope_scaling": LONG_ROPE},
            "embeddings=1 in the rope",
        ),
        (SMOLLM3, {"partial_rotary_factor": 0.75}, "only 1.0 is implemented for this architecture"),
    ],
)
def test_setting_that_is_not_implemented_is_named(
    names: tuple[str, str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        _read(*names, **settings)
