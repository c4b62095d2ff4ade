"""The config of a model that reads images too, whose decoder is a model that reads text alone.

vLLM 0.33 takes the config of a model of text alone, but not for its MTP layer: it replaces the model_type of
the outermost config, and then looks for the one of text. Published files have the nested config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["write_nested"]

SUFFIX = "_text"
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
}
DECODER, NESTED_DECODER = "model.", "model.language_model."


def write_nested(source: Path, folder: Path) -> None:
    """Write the nested config.json of the model in `source` into `folder`.

    Raises ValueError for a model of another architecture than those of ARCHITECTURES.
    """
    text: dict[str, Any] = json.loads((source / "config.json").read_text())
    (architecture,) = text["architectures"]
    if architecture not in ARCHITECTURES:
        allowed = " or ".join(ARCHITECTURES)
        raise ValueError(f"architecture {architecture}: expected {allowed} for an MTP layer in vLLM")

    nested = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": text["model_type"].removesuffix(SUFFIX),
        "torch_dtype": text["torch_dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {"depth": 1, "out_hidden_size": text["hidden_size"]},  # not used
    }
    quantisation = text.pop("quantization_config", None)
    if quantisation is not None:
        modules = [
            f"{NESTED_DECODER}{name.removeprefix(DECODER)}" if name.startswith(DECODER) else name
            for name in quantisation["modules_to_not_convert"]
        ]
        nested["quantization_config"] = {**quantisation, "modules_to_not_convert": modules}
    (folder / "config.json").write_text(json.dumps({**nested, "text_config": text}))
