"""Gemma 4 12B, whose files have no towers for images and audio: the decoder of Gemma 4."""

from __future__ import annotations

from drift_sdk.families import gemma4
from drift_sdk.spec.family import Family
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.settings import Settings


def read_spec(settings: Settings) -> ModelSpec:
    return gemma4.read_spec(settings)


FAMILY = Family(
    model_type="gemma4_unified_text",
    architectures=("Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"),
    spec=read_spec,
    outer=("Gemma4UnifiedForConditionalGeneration",),
    defaults=gemma4.DEFAULTS,
)
