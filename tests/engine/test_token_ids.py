"""Models without a tokenizer, and with one whose tokens have no fixed text: what is served and refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import anyio
import pytest
import tokenizers
from gguf_model import write_gguf
from model_zoo import make_model
from tokenizers import decoders, models

from drift_sdk import Engine, EngineConfig, Regex, RequestError, SamplingParams
from drift_sdk.loading.source import resolve

CONFIG = EngineConfig(dtype="float32", device="cpu", max_model_len=64, kv_cache_tokens=128)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(1, folder)
    return folder


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """The model without a tokenizer."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(model / name)
    return tmp_path


def test_model_without_a_tokenizer_serves_token_ids(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        async with Engine(model, CONFIG) as engine:
            expected = (await engine.generate(PROMPT, params)).token_ids
        with caplog.at_level(logging.WARNING, "drift_sdk"):
            engine = Engine(folder, CONFIG)
            await engine.start()
        assert [r.message for r in caplog.records] == [
            f"{folder} holds no tokenizer.json: requests and results are token ids alone"
        ]
        chunks = [chunk async for chunk in engine.generate(PROMPT, params)]
        assert tuple(token_id for chunk in chunks for token_id in chunk.token_ids) == expected
        assert {chunk.text for chunk in chunks} == {""}

        entry = (await engine.generate(PROMPT, params.replace(logprobs=1))).logprobs[0]
        assert (entry.token_id, entry.text, entry.top_texts) == (expected[0], "", ("",))

        stopping = params.replace(stop_token_ids=(expected[3],))
        completion = await engine.generate(PROMPT, stopping)
        assert completion.token_ids == expected[: expected.index(expected[3]) + 1]
        assert (completion.text, completion.stop_reason) == ("", expected[3])

        for stream, field, said in (
            (engine.generate("text"), "prompt", "expected token ids: .* has no tokenizer"),
            (
                engine.chat([{"role": "user", "content": "x"}]),
                "messages",
                "^messages: expected a model with",
            ),
            (engine.generate(PROMPT, params.replace(stop="x")), "stop", "expected stop_token_ids"),
            (
                engine.generate(PROMPT, params.replace(grammar=Regex("a"))),
                "grammar",
                "expected None: the model",
            ),
        ):
            with pytest.raises(RequestError, match=said) as caught:
                await stream
            assert caught.value.field == field

        assert not engine.tokenizer.has_text and engine.tokenizer.token_to_id("a") is None
        with pytest.raises(RequestError, match="expected a model with a tokenizer"):
            engine.tokenizer.decode([5])

        await engine.sleep()
        await engine.wake()
        assert (await engine.generate(PROMPT, params)).token_ids == expected
        await engine.aclose()

    anyio.run(main)


def test_chat_template_without_a_tokenizer_is_of_no_use(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"

    async def main() -> None:
        async with Engine(folder, CONFIG.replace(chat_template=template)) as engine:
            assert (await engine.generate(PROMPT, max_tokens=2)).token_ids
            with pytest.raises(RequestError, match="expected token ids: .* has no tokenizer"):
                await engine.chat([{"role": "user", "content": "x"}])

    anyio.run(main)


def test_tokenizer_of_the_config_is_required(folder: Path) -> None:
    async def main() -> None:
        with pytest.raises(Exception, match=r"tokenizer: .*tokenizer\.json: is missing"):
            await Engine(folder, CONFIG.replace(tokenizer=folder)).start()

    anyio.run(main)


def test_gguf_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    model = make_model(18, tmp_path / "m")
    for has_tokenizer in (False, True):
        (file,) = write_gguf(model, tmp_path / f"{has_tokenizer}.gguf", has_tokenizer=has_tokenizer)
        assert resolve(file).has_tokenizer == has_tokenizer


def test_tokens_that_depend_on_their_neighbours_are_served(folder: Path) -> None:
    words = {f"w{index}": index for index in range(500)}
    raw = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece()
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))

    async def main() -> None:
        async with Engine(folder, CONFIG) as engine:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            chunks = [chunk.text async for chunk in engine.generate("w5 w6 w7", params)]
            completion = await engine.generate(PROMPT, params)
            assert "".join(chunks) == completion.text
            assert completion.text == " ".join(f"w{token_id}" for token_id in completion.token_ids)

            entries = (await engine.generate(PROMPT, params.replace(logprobs=0))).logprobs
            assert " ".join(entry.text for entry in entries) == completion.text

            word = completion.text.split()[4]
            stopped = await engine.generate(PROMPT, params.replace(stop=word))
            assert stopped.text == completion.text[: completion.text.index(word)]
            with pytest.raises(RequestError, match="expected None: the text of a token depends on its neigh"):
                await engine.generate(PROMPT, params.replace(grammar=Regex("a")))

    anyio.run(main)
