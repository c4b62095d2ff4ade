"""Tokens that end a completion, from settings, tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
import tokenizers
from chat_families import FAMILIES
from model_zoo import make_model

from drift_sdk import Engine, EngineConfig, Regex, SamplingParams
from drift_sdk.startup.text_startup import completion_ends
from drift_sdk.text.chat import ChatTemplate
from drift_sdk.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
PHI3 = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{{ eos_token }}"
PARTS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
)
GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
TOOL_FIRST = "{{ raise_exception('a system message is missing') }}"


def make_tokenizer(*added: str, eos: str | None = "</s>") -> Tokenizer:
    """Ids of added tokens begin at 2; special are those with "|"."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "</s>": 1}, []))
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_tokens([tokenizers.AddedToken(token, special="|" in token) for token in added])
    return Tokenizer(raw, bos_token=None, eos_token=eos, chat_template=None, adds_bos=None)


@pytest.mark.parametrize(
    ("template", "added", "eos", "expected"),
    [
        (CHATML, ("<|im_start|>", "<|im_end|>"), "</s>", (7, 1, 3)),
        (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", (7, 3)),
        (CHATML, ("<|im_start|>",), None, (7,)),
        (CHATML.replace("|", ""), ("<im_start>", "<im_end>"), None, (7, 3)),
        (LLAMA2, (), "</s>", (7, 1)),
        (PHI3, ("<|user|>", "<|assistant|>", "<|end|>", "<|end"), "</s>", (7, 1, 4)),
        (PARTS, ("<|start|>", "<|end|>", "<|message|>"), "</s>", (7, 1)),
        (PARTS.replace("thinking", "no"), ("<|end|>", "<|return|>"), "<|return|>", (7, 3)),
        (PARTS.replace("thinking", "no"), ("<|end|>", "<|call|>"), "<|end|>", (7,)),
        (GLM, ("<|user|>", "<|assistant|>"), "</s>", (7, 1)),
        (FAMILIES["gemma4"].template, ("<|turn>", "<turn|>", "<|tool_response>"), "</s>", (7, 1, 3, 4)),
        (TOOL_FIRST, ("<|im_end|>",), "</s>", (7, 1)),
        (None, ("<|im_end|>",), "</s>", (7, 1)),
        (CHATML, ("|",) * 8 + tuple(f"<|{n}|>" for n in range(12)) + ("<|im_end|>",), "</s>", (7, 1)),
    ],
)
def test_ends_of_tokenizer_and_template(
    template: str | None, added: tuple[str, ...], eos: str | None, expected: tuple[int, ...]
) -> None:
    tokenizer = make_tokenizer(*added, eos=eos)
    chat = ChatTemplate(template, bos_token=None, eos_token=eos) if template is not None else None
    assert completion_ends((7,), tokenizer, chat, vocab_size=10) == expected


def test_the_end_of_a_message_of_several_is_no_end() -> None:
    template = ChatTemplate(FAMILIES["harmony"].template, bos_token=None, eos_token="<|return|>")
    tokenizer = make_tokenizer("<|start|>", "<|end|>", "<|message|>", "<|return|>", eos="<|return|>")
    assert completion_ends((), tokenizer, template, vocab_size=10) == (5,)


@pytest.mark.parametrize("settings", [{}, {"eos_token_id": 2}])
def test_a_folder_without_the_ends_of_its_tokenizer(settings: dict[str, Any], tmp_path: Path) -> None:
    """A grammar needs an end; without one, text under it would go on to the limit."""
    make_model(1, tmp_path)
    for file in ("config.json", "generation_config.json"):
        kept = json.loads((tmp_path / file).read_text()) | {"eos_token_id": None} | settings
        (tmp_path / file).write_text(json.dumps(kept))

    async def main() -> None:
        config = EngineConfig(device="cpu", dtype="float32", max_model_len=64, kv_cache_tokens=64)
        async with Engine(tmp_path, config) as engine:
            params = SamplingParams(max_tokens=8, grammar=Regex("ab"))
            completion = await engine.generate("x", params)
            assert (completion.text, completion.finish_reason) == ("ab", "stop")

    anyio.run(main)
