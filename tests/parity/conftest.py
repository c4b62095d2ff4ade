"""SmolLM2 and transformers' reference of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import pytest
import smollm2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    return smollm2.path()


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_file: Path):
    """The model (float32, the same dequantised weights) and the tokenizer of transformers."""
    folder, name = str(smollm2_file.parent), smollm2_file.name
    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the file three times, and makes the map of names for every module.
        for function in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, function, cache(getattr(gguf, function)))
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=name)
