"""The description of models: what a family of models is written with. See docs/internals/families.md."""

from drift_sdk.spec.decoder_settings import (
    attention_layers,
    read_activation,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
)
from drift_sdk.spec.experts_settings import read_experts
from drift_sdk.spec.family import Family, OriginalFiles
from drift_sdk.spec.gguf import GGUFArchitecture, GGUFChange, GGUFSettings, Tiles
from drift_sdk.spec.layer_types import read_layer_types, read_num_layers, read_window
from drift_sdk.spec.model import (
    Attention,
    ClampedGate,
    Experts,
    LayerSpec,
    Mlp,
    ModelSpec,
    Norm,
    QueryScaling,
    Router,
)
from drift_sdk.spec.names import SANDWICH, AttentionNames, ExpertNames, MlpNames, MtpNames, Names
from drift_sdk.spec.rope import Rope
from drift_sdk.spec.rope_settings import read_query_scaling, read_rope
from drift_sdk.spec.settings import Settings, read_bool, read_int, read_multiplier, read_number

__all__ = [
    "SANDWICH",
    "Attention",
    "AttentionNames",
    "ClampedGate",
    "ExpertNames",
    "Experts",
    "Family",
    "GGUFArchitecture",
    "GGUFChange",
    "GGUFSettings",
    "LayerSpec",
    "Mlp",
    "MlpNames",
    "ModelSpec",
    "MtpNames",
    "Names",
    "Norm",
    "OriginalFiles",
    "QueryScaling",
    "Rope",
    "Router",
    "Settings",
    "Tiles",
    "attention_layers",
    "read_activation",
    "read_attention",
    "read_bool",
    "read_decoder",
    "read_experts",
    "read_int",
    "read_layer_types",
    "read_mlp",
    "read_multiplier",
    "read_norm",
    "read_num_layers",
    "read_number",
    "read_query_scaling",
    "read_rope",
    "read_window",
]
