"""Models with broken files, and the defaults of generation_config."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import gguf
import msgspec
import numpy as np
import pytest
import torch
from loops import on_every_loop, run
from model_zoo import make_model
from safetensors.torch import load_file, save_file

from drift_sdk import ConfigError, Engine, EngineConfig, ModelLoadError, RequestError, SamplingParams

CONFIG = EngineConfig(dtype="float32", device="cpu", max_model_len=64)
QUERY = "model.layers.0.self_attn.q_proj.weight"
SHARD = "model-00002-of-"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("single", "sharded")}
    make_model(1, folders["single"])
    make_model(0, folders["sharded"])
    return folders


@pytest.fixture
def folder(models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a good model, for a test to break."""
    return Path(shutil.copytree(models["single"], tmp_path / "model"))


def opening_fails(model: Path | str, *needles: str, config: EngineConfig = CONFIG) -> str:
    """Check that opening the model raises a ModelLoadError that contains all of `needles`, and that no thread
    is left."""

    async def main() -> str:
        engine = Engine(model, config)
        with pytest.raises(ModelLoadError) as caught:
            await engine.start()
        await engine.aclose()
        return str(caught.value)

    message = anyio.run(main)
    for needle in needles:
        assert needle in message, message
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drift")]
    return message


def opens(
    model: Path, params: SamplingParams | None = None, config: EngineConfig = CONFIG
) -> tuple[int, ...]:
    async def main() -> tuple[int, ...]:
        async with Engine(model, config) as engine:
            completion = await engine.generate([5, 6, 7], params)
            return completion.token_ids

    return anyio.run(main)


def cut(file: Path, size: int | float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * size) if isinstance(size, float) else size])


def edit_json(file: Path, **changes: Any) -> None:
    settings = json.loads(file.read_text())
    settings.update(changes)
    file.write_text(json.dumps(settings))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("size", [0, 4, 8, 100, 0.5, -1])
def test_truncated_safetensors_are_rejected(folder: Path, size: int | float) -> None:
    cut(folder / "model.safetensors", size)
    opening_fails(folder, str(folder / "model.safetensors"))


@pytest.mark.parametrize("start", [0, 8, 40])
def test_corrupt_safetensors_header_is_rejected(folder: Path, start: int) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[start : start + 16] = b"\xff" * 16
    file.write_bytes(data)
    opening_fails(folder, str(file))


@pytest.mark.parametrize("size", [0, 0.5])
def test_truncated_shard_is_rejected(models: dict[str, Path], tmp_path: Path, size: int | float) -> None:
    folder = Path(shutil.copytree(models["sharded"], tmp_path / "model"))
    (shard,) = folder.glob(f"{SHARD}*")
    cut(shard, size)
    opening_fails(folder, str(shard))
    shard.unlink()
    opening_fails(folder, str(shard))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 7}')
    opening_fails(folder, str(folder / "model.safetensors.index.json"))


def test_missing_tensor_is_rejected(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop(QUERY))
    opening_fails(folder, str(folder), f"tensor {QUERY}", "missing")


def test_tensor_that_the_model_lacks_is_rejected(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.extra": torch.zeros(3, 4)}))
    opening_fails(folder, str(folder / "model.safetensors"), "model.layers.0.extra", "[3, 4]")


def test_tensor_of_the_wrong_shape_is_rejected(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({QUERY: tensors[QUERY][:-1].clone()}))
    opening_fails(folder, str(folder / "model.safetensors"), QUERY, "[63, 64]", "[64, 64]")


def test_config_of_other_shapes_is_rejected(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=81)
    opening_fails(folder, str(folder / "model.safetensors"), "mlp.gate_proj.weight", "[80, 64]", "[81, 64]")


def test_tensor_of_the_wrong_type_is_rejected(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({QUERY: tensors[QUERY].to(torch.int8)}))
    opening_fails(folder, str(folder / "model.safetensors"), QUERY, "int8")


def test_folder_without_a_model_is_rejected(tmp_path: Path) -> None:
    opening_fails(tmp_path, str(tmp_path), "config.json")
    opening_fails(tmp_path / "missing", str(tmp_path / "missing"))
    (tmp_path / "model.bin").write_bytes(b"x")
    opening_fails(tmp_path / "model.bin", str(tmp_path / "model.bin"))


def test_folder_without_weights_is_rejected(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    opening_fails(folder, str(folder), "model.safetensors")


@pytest.mark.parametrize("contents", ["", "{", "[]", "7", '{"model_type": "llama",}', "\udcff"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_corrupt_json_file_is_rejected(folder: Path, name: str, contents: str) -> None:
    (folder / name).write_bytes(contents.encode(errors="surrogateescape"))
    opening_fails(folder, str(folder / name))


@pytest.mark.parametrize(
    "settings",
    [
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": None, "model_type": None},
        {"architectures": 5, "model_type": []},
    ],
)
def test_unknown_architecture_is_rejected(folder: Path, settings: dict[str, Any]) -> None:
    edit_json(folder / "config.json", **settings)
    opening_fails(folder, str(folder / "config.json"), "architectures", "LlamaForCausalLM")


@pytest.mark.parametrize("value", [None, True, -1, 0, 3, 2.5, "64", [], [1], {}, {"a": 1}, 2**70, 1e400])
def test_any_value_of_a_setting_opens_or_is_rejected(folder: Path, value: Any) -> None:
    """With any value in config.json the model opens or raises a ModelLoadError."""
    file = folder / "config.json"
    given = json.loads(file.read_text())
    more = ("quantization_config", "layer_types", "max_window_layers", "sliding_window", "rope_scaling")
    has_failed = []
    for name in (*given, *more):
        file.write_text(json.dumps({**given, name: value}))

        async def main() -> None:
            async with Engine(folder, EngineConfig(dtype="float32", device="cpu")):
                pass

        try:
            anyio.run(main)
        except ModelLoadError as error:
            assert str(folder) in str(error), name
            has_failed.append(name)
    assert len(has_failed) >= 2


@pytest.mark.parametrize("contents", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_broken_tokenizer_is_rejected(folder: Path, contents: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(contents)
    opening_fails(folder, str(folder / "tokenizer.json"))


def test_truncated_tokenizer_is_rejected(folder: Path) -> None:
    cut(folder / "tokenizer.json", 0.5)
    opening_fails(folder, str(folder / "tokenizer.json"))


def test_named_chat_templates_are_chosen_by_tools_and_by_name(folder: Path) -> None:
    """Each template rejects its messages and says its name."""
    texts = {
        name: f"{{{{ raise_exception('this is {name}') }}}}{{{{ tools }}}}"
        for name in ("default", "tool_use", "rag")
    }
    named = [{"name": name, "template": text} for name, text in texts.items() if name != "rag"]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text(texts["rag"])
    messages, tools = [{"role": "user", "content": "x"}], [{"name": "look"}]

    async def main() -> None:
        for chosen, plain, with_tools in (
            (None, "default", "tool_use"),
            ("rag", "rag", "rag"),
            ("default", "default", "default"),
        ):
            async with Engine(folder, msgspec.structs.replace(CONFIG, chat_template=chosen)) as engine:
                with pytest.raises(RequestError, match=f"this is {plain}"):
                    await engine.chat(messages)
                with pytest.raises(RequestError, match=f"this is {with_tools}"):
                    await engine.chat(messages, tools=tools)
                with pytest.raises(RequestError, match=f"this is {plain}"):
                    await engine.chat(messages, tools=tools, tool_choice="none")

    anyio.run(main)
    with pytest.raises(ConfigError, match="chat_template='tols'.*which has 'default', 'tool_use', 'rag'"):
        opens(folder, config=msgspec.structs.replace(CONFIG, chat_template="tols"))
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{% for %}")
    opening_fails(folder, "chat template cannot be compiled")
    edit_json(folder / "tokenizer_config.json", chat_template=[{"name": "default"}])
    opening_fails(
        folder, "tokenizer_config.json: chat_template=", "expected text, or a list of names and texts"
    )


def test_chat_template_that_cannot_be_compiled_is_rejected(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template="{% for %}")
    opening_fails(folder, str(folder), "chat template")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xff")
    opening_fails(folder, str(folder / "chat_template.jinja"))
    config = msgspec.structs.replace(CONFIG, chat_template="{{ broken")
    opening_fails(folder, "chat_template.jinja", config=config)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(
        ConfigError, match="^chat_template='{{ broken': expected a Jinja template: chat template"
    ) as e:
        opens(folder, config=config)
    assert e.value.field == "chat_template"
    assert opens(folder, config=msgspec.structs.replace(CONFIG, chat_template="{{ messages }}"))


def write_gguf(file: Path, architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a"] * 40)
    writer.add_tensor("token_embd.weight", np.zeros((40, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_truncated_gguf_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    size = file.stat().st_size
    for keep in (0, 3, 4, 20, 100, size // 4, size - 1):
        write_gguf(file)
        cut(file, keep)
        opening_fails(file, str(file), "not a whole GGUF file")


def test_unusable_gguf_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    opening_fails(file, str(file))  # most of a model is missing
    write_gguf(file, "gpt2")
    opening_fails(file, str(file), "gpt2", "llama")
    file.write_bytes(b"GGUF" + b"\xff" * 2000)
    opening_fails(file, str(file))
    file.write_bytes(b"\x00" * 2000)
    opening_fails(file, str(file))


@pytest.mark.parametrize(
    "settings, needle",
    [
        ({"num_hidden_layers": 200_000}, "num_hidden_layers=200000: expected an integer from 1 to 1024"),
        ({"hidden_size": 2**30}, "hidden_size=1073741824"),
        ({"hidden_size": 2**24, "vocab_size": 2**24}, "has shape"),
        ({"num_hidden_layers": 1024}, "is missing"),
        ({"max_position_embeddings": 1}, "max_position_embeddings=1: expected an integer from 2"),
        ({"rope_theta": 0}, "rope_theta=0"),
    ],
)
@pytest.mark.parametrize("load", ["auto", "random"])
def test_extreme_shapes_are_rejected(folder: Path, settings: dict[str, Any], needle: str, load: str) -> None:
    """Shapes are compared with the files before any tensor is made."""
    if load == "random" and needle in ("has shape", "is missing"):
        return  # there is nothing to compare with

    file = folder / "config.json"
    given = json.loads(file.read_text())
    given.pop("rope_parameters", None)
    file.write_text(json.dumps(given | settings))
    config = EngineConfig(dtype="float32", device="cpu", load=load)
    opening_fails(folder, str(folder), needle, config=config)


def test_weights_that_are_not_finite_are_rejected(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors[QUERY].fill_(torch.nan))
    opening_fails(folder, str(folder / "model.safetensors"), QUERY, "NaN")


def test_index_that_names_a_fifo_is_rejected(models: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models["sharded"], tmp_path / "model"))
    (shard,) = folder.glob(f"{SHARD}*")
    shard.unlink()
    os.mkfifo(shard)
    opening_fails(folder, str(shard), "is a FIFO, expected a regular file")


def test_end_of_sequence_ids_outside_the_vocabulary_are_rejected(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[70_000, 2**70])
    opening_fails(folder, "eos_token_id=[70000, 1180591620717411303424]", "vocab_size=")


def test_token_id_beyond_the_model_fails_its_own_request(folder: Path) -> None:
    """Tokenizers of some models have more tokens than the model. Only a prompt that uses them is rejected."""
    added = {"id": 70_000, "content": "<added>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(added | flags)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    async def main() -> None:
        async with Engine(folder, CONFIG) as engine:
            text = engine.tokenizer.decode([5, 6, 7])
            with pytest.raises(RequestError, match=r"prompt: token 3=500: expected a token id from 0 to 499"):
                await engine.generate(f"{text}<added>")
            assert (await engine.generate([5, 6, 7], SamplingParams(max_tokens=2))).token_ids

    anyio.run(main)


@on_every_loop
def test_model_opens_after_a_broken_one(loop: str, models: dict[str, Path], folder: Path) -> None:
    """In the same process and on the same event loop. An engine whose start failed can be started again."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    data = (folder / "model.safetensors").read_bytes()

    async def main() -> None:
        async with Engine(models["single"], CONFIG) as engine:
            expected = (await engine.generate([5, 6, 7], params)).token_ids
        for _ in range(3):
            cut(folder / "model.safetensors", 0.5)
            engine = Engine(folder, CONFIG)
            with pytest.raises(ModelLoadError):
                await engine.start()
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("drift")]
            (folder / "model.safetensors").write_bytes(data)
            async with engine:
                assert (await engine.generate([5, 6, 7], params)).token_ids == expected

    run(loop, main)


def defaults_of(folder: Path, settings: dict[str, Any]) -> SamplingParams:
    (folder / "generation_config.json").write_text(json.dumps(settings))

    async def main() -> SamplingParams:
        async with Engine(folder, CONFIG) as engine:
            return engine.default_params

    return anyio.run(main)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, {}),
        ({"top_p": 0.5, "top_k": 3}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
        ),
        (
            {"repetition_penalty": 1.05, "max_new_tokens": 7},
            {"repetition_penalty": 1.05, "max_tokens": 7},
        ),
        (
            {"do_sample": True, "temperature": None, "top_k": None, "typical_p": 0.3, "num_beams": 4},
            {"temperature": 1.0},
        ),
        ({"do_sample": True, "top_k": -1}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": 0, "temperature": 0.6}, {"temperature": 0.6}),
        ({"top_k": -2, "top_p": 3}, {}),
    ],
)
def test_default_params_come_from_generation_config(
    folder: Path, settings: dict[str, Any], expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert defaults_of(folder, settings) == SamplingParams(**expected)
    assert "generation_config" not in caplog.text


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("temperature", -1.0, "from 0.0 to 100.0"),
        ("temperature", "hot", "from 0.0 to 100.0"),
        ("top_k", -2, "from 0"),
        ("top_k", 50.0, "from 0"),
        ("top_p", 0.0, "over 0.0"),
        ("min_p", 1.5, "from 0.0 to 1.0"),
        ("repetition_penalty", 3.5, "from 0.01 to 2.0"),
        ("max_new_tokens", 0, "from 1"),
    ],
)
def test_default_params_out_of_range_are_ignored(
    folder: Path, name: str, value: Any, allowed: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 7, name: value}
    expected = {"temperature": 0.5, "top_k": 7}
    if name in expected:
        expected[name] = {"temperature": 1.0, "top_k": 0}[name]
    assert defaults_of(folder, settings) == SamplingParams(**expected)
    (message,) = [message for message in caplog.messages if "generation_config" in message]
    assert f"generation_config.json: {name}={value!r} is ignored: expected " in message and allowed in message


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("do_sample", "yes", "true or false"),
        ("eos_token_id", [1, "2"], "token ids"),
        ("eos_token_id", -1, "token ids"),
    ],
)
def test_wrong_settings_of_generation_are_rejected(folder: Path, name: str, value: Any, allowed: str) -> None:
    settings = {"do_sample": True, name: value}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    opening_fails(folder, "generation_config", f"{name}={value!r}", allowed)


def test_request_without_params_gets_the_default_params(folder: Path) -> None:
    settings = {"do_sample": True, "temperature": 0.9, "top_k": 40, "max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(settings))

    async def main() -> None:
        async with Engine(folder, CONFIG) as engine:
            found = await engine.generate([5, 6, 7])
            given = SamplingParams(temperature=0.9, top_k=40, max_tokens=9, seed=found.seed)
            assert found.token_ids == (await engine.generate([5, 6, 7], given)).token_ids
            assert len(found.token_ids) <= 9
            greedy = await engine.generate([5, 6, 7], SamplingParams(max_tokens=9))
            assert greedy.token_ids != found.token_ids
            assert [c.token_ids async for c in engine.map([[5, 6, 7]], SamplingParams(max_tokens=9))] == [
                greedy.token_ids
            ]

    anyio.run(main)


def test_each_of_several_end_of_sequence_ids_ends_a_completion(folder: Path) -> None:
    """Any of them ends a completion; an id outside the vocabulary has no effect."""
    free = opens(folder, SamplingParams(max_tokens=12, ignore_eos=True))
    ends = [free[7], free[4], 70_000]
    settings = {"eos_token_id": ends}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    first = min(free.index(ends[0]), free.index(ends[1]))
    assert opens(folder, SamplingParams(max_tokens=12)) == free[: first + 1]
    assert opens(folder, SamplingParams(max_tokens=12, ignore_eos=True)) == free
    assert not set(opens(folder, SamplingParams(max_tokens=12, min_tokens=12))[:12]) & set(ends)
