"""Completions of tokenizers whose decoder removes the first space of a text, as those of sentencepiece do."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from drift_sdk import Engine, EngineConfig, Regex
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.results import Completion
from drift_sdk.testing import ScriptedModel
from drift_sdk.text.tokenizer import Tokenizer

PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyz:Y2", "▁abc", "▁is"]
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
EOS_TOKEN_ID = TOKENS.index("</s>")
TOKENIZER = Tokenizer.from_gguf(
    {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": [0.0] * len(TOKENS),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": EOS_TOKEN_ID,
        "tokenizer.ggml.unknown_token_id": 0,
    }
)
CONVERSATION = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Y 2"}]
CONFIG = EngineConfig(
    max_model_len=256,
    kv_cache_tokens=1024,
    chat_template=(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
)


def engine_of(*tokens: str) -> Engine:
    """An engine whose model generates these tokens."""
    ids = [*map(TOKENS.index, tokens), EOS_TOKEN_ID]
    model = ScriptedModel(lambda prompt_ids, output_ids, seed: ids[len(output_ids)], config=CONFIG)

    def open_model(report: Callable[..., object], limits: object = None) -> LoadedModel:
        loaded = model(report, limits)
        text = msgspec.structs.replace(
            loaded.text, tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_token_ids=(EOS_TOKEN_ID,)
        )
        return msgspec.structs.replace(loaded, text=text)

    return Engine("scripted", CONFIG, open_model=open_model)


def logprob_text(completion: Completion) -> str:
    """The text of its tokens but the last, which ends it."""
    assert completion.logprobs is not None
    return "".join(entry.text for entry in completion.logprobs[:-1])


@pytest.mark.parametrize("stop", [(), ("zz",)])
async def test_continued_text_keeps_its_first_space(stop: tuple[str, ...]) -> None:
    async with engine_of("▁is", "▁abc") as engine:
        stream = engine.chat(CONVERSATION, continue_final=True, stop=stop, logprobs=0)
        streamed = "".join([chunk.text async for chunk in stream])
        completion = await stream
        assert streamed == completion.text == logprob_text(completion) == " is abc"
        for sample in await engine.samples(CONVERSATION, 2, continue_final=True):
            assert sample.text == " is abc"
        assert (await engine.chat(CONVERSATION, continue_final=True, stop=" is")).text == ""


@pytest.mark.parametrize("stop", [(), ("zz",)])
async def test_text_of_a_grammar_matches_it(stop: tuple[str, ...]) -> None:
    async with engine_of("▁abc") as engine:
        stream = engine.generate("c", grammar=Regex(" abc"), stop=stop, logprobs=0)
        streamed = "".join([chunk.text async for chunk in stream])
        completion = await stream
        assert streamed == completion.text == logprob_text(completion) == " abc"
        assert (await engine.chat(CONVERSATION[:1], grammar=Regex(" abc"))).text == " abc"
        assert (await engine.generate("c", grammar=Regex(" abc"), stop=" a")).stop_reason == " a"


async def test_new_text_has_no_first_space() -> None:
    async with engine_of("▁is", "▁abc") as engine:
        assert (await engine.generate("c")).text == "is abc"
        assert (await engine.chat(CONVERSATION[:1])).text == "is abc"
        assert (await engine.generate("c", stop=" is")).text == "is abc"
