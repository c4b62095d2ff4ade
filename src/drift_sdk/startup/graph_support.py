"""Options of models that the graph executor does not support."""

from __future__ import annotations

from drift_sdk.models.decoder_config import DecoderConfig

__all__ = ["options_without_graphs"]


def options_without_graphs(config: DecoderConfig) -> tuple[str, ...]:
    """The options of a model that graphs lack, in words; empty if graphs can run it."""
    lacking = {
        "sliding windows": any(window is not None for window in config.windows),
        "several rotations": len(config.ropes) > 1,
        "layers without rotation": None in config.layer_ropes,
        "partial rotation": config.rotary_dim != config.head_dim,
        "attention scales": config.attention_scale != config.head_dim**-0.5,
        f"the activation {config.activation}": config.activation != "silu",
        "offset norms": config.has_offset_norms,
        "norms of outputs": config.has_post_norms,
        "embedding multipliers": config.embedding_multiplier != 1.0,
        "residual multipliers": config.residual_multiplier != 1.0,
        "divisors of logits": config.logits_divisor != 1.0,
    }
    return tuple(option for option, is_used in lacking.items() if is_used)
