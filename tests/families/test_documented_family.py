"""The family of docs/internals/families.md: its snippets run, and it equals transformers."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoder_parity import poisoned_cache, shuffled_blocks
from model_zoo import random_model
from tolerances import assert_near

from drift_sdk import families
from drift_sdk.families import Registry, read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "families.md"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the snippets of the page define. Its family is known during the test."""
    monkeypatch.setattr(families, "REGISTRY", Registry())
    module = types.ModuleType("snippets")

    async def main() -> None:
        for number, snippet in enumerate(
            re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
        ):
            code = compile(snippet, f"families.md#{number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, module.__dict__)
            if inspect.iscoroutine(result):
                await result

    asyncio.run(main())
    return module.__dict__


def test_snippets_serve_a_model(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert len(names["completion"].token_ids) == 4
    assert names["FAMILY"] in families.families()


@pytest.mark.parametrize("has_output_bias", [False, True])
def test_documented_family_equals_transformers(
    names: dict[str, Any], has_output_bias: bool, tmp_path: Path
) -> None:
    config = transformers.SeedOssConfig(
        vocab_size=160,
        hidden_size=48,
        intermediate_size=60,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        attention_out_bias=has_output_bias,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = random_model(transformers.SeedOssForCausalLM, config, seed=3)
    model.save_pretrained(tmp_path)
    source = resolve(tmp_path)
    spec = read_spec(source.config)
    assert spec.attention.has_bias and spec.attention.has_output_bias == has_output_bias
    decoder = Decoder.load(spec, source.tensors(), device="cpu", dtype=torch.float32)
    token_ids = torch.arange(3, 60)
    cache = poisoned_cache(spec)
    batch = AttentionBatch([SequenceRows(shuffled_blocks(), 0, len(token_ids))], cache)
    with torch.inference_mode():
        logits = decoder.logits(decoder.forward(token_ids, batch, cache)[0])
        expected = model(token_ids[None]).logits[0]
    assert_near(logits, expected, inner=64, depth=4)
