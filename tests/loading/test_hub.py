"""Models on the hub: what is fetched, in which order, and what is reported meanwhile."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import huggingface_hub
import numpy as np
import pytest
import torch
from gguf_model import write_gguf
from hub_server import HubServer, hub_server
from model_zoo import make_model

from drift_sdk import ConfigError, Engine, EngineClosed, EngineConfig, ModelLoadError, Progress
from drift_sdk.events import Download
from drift_sdk.loading import hub as hub_module
from drift_sdk.loading.file_names import choose_gguf, split_quant
from drift_sdk.loading.source import find, resolve

SMALL = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Repositories: a model in shards, one in GGUF files, and folders of names alone."""
    root = tmp_path_factory.mktemp("models")
    make_model(0, root / "sharded")
    qwen3 = make_model(18, root / "qwen3")
    (root / "gguf").mkdir()
    write_gguf(qwen3, root / "gguf" / "m-Q8_0.gguf")
    write_gguf(qwen3, root / "gguf" / "m-Q4_K_M.gguf", max_tensors=12)
    return {name: root / name for name in ("sharded", "gguf", "qwen3")}


@pytest.fixture
def hub(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with hub_server(monkeypatch, tmp_path / "cache") as hub:
        hub.folders = {f"org/{name}": folder for name, folder in models.items()}
        yield hub


def test_config_is_judged_before_weights_are_fetched(hub: HubServer) -> None:
    def judge(source: object) -> None:
        raise ModelLoadError("not this one")

    for _ in range(2):
        with pytest.raises(ModelLoadError, match="not this one"):
            resolve("org/sharded", judge=judge)

    assert set(hub.names()) == SMALL | {"model.safetensors.index.json"}
    assert len(resolve("org/sharded").tensors().names()) > 9
    assert len(hub.names()) == 5 + 9

    hub.downloads.clear()
    resolve("org/sharded", judge=judge)  # everything is in the cache
    assert hub.downloads == []


def test_files_beside_the_model_are_not_fetched(hub: HubServer, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hub.folders["org/qwen3"], tmp_path / "copy"))
    for name in ("consolidated.safetensors", "pytorch_model.bin", "notes.md"):
        (folder / name).write_bytes(b"x")
    hub.folders["org/copy"] = folder
    resolve("org/copy")
    assert set(hub.names()) == SMALL | {"model.safetensors"}


def test_tokenizer_of_a_repository_is_fetched_without_weights(hub: HubServer) -> None:
    assert resolve("org/qwen3", role="tokenizer").tokenizer().encode("ab")
    assert set(hub.names()) == SMALL


def test_weights_that_another_program_fetched_get_their_tokenizer(hub: HubServer) -> None:
    for name in ("config.json", "model.safetensors"):
        huggingface_hub.hf_hub_download("org/qwen3", name)
    folders, hub.folders = hub.folders, {}
    assert not resolve("org/qwen3").has_tokenizer  # the hub does not help: what is there is taken
    hub.folders = folders
    hub.downloads.clear()
    assert resolve("org/qwen3", local_files_only=True).has_tokenizer is False
    assert resolve("org/qwen3").has_tokenizer
    assert set(hub.names()) == SMALL - {"config.json"}
    hub.downloads.clear()
    assert resolve("org/qwen3").has_tokenizer
    assert hub.downloads == []


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("qwen3", "config.json"),
        ("qwen3", "model.safetensors"),
        ("sharded", "model-00002-of-00009.safetensors"),
    ],
)
def test_interrupted_download_is_completed(name: str, lost: str, hub: HubServer) -> None:
    folder = resolve(f"org/{name}").path
    for file in ((folder / lost).resolve(), folder / lost):
        file.unlink()
    hub.downloads.clear()
    source = resolve(f"org/{name}")
    assert source.path == folder
    assert set(source.tensors().names()) == set(resolve(hub.folders[f"org/{name}"]).tensors().names())
    assert hub.names() == [lost]


def test_weights_of_torch_in_the_cache_do_not_stand_for_a_model(hub: HubServer, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hub.folders["org/qwen3"], tmp_path / "copy"))
    (folder / "pytorch_model.bin").write_bytes(b"x")
    hub.folders["org/copy"] = folder
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        huggingface_hub.hf_hub_download("org/copy", name)
    assert resolve("org/copy").tensors().names()


def test_download_reports_files_and_bytes(hub: HubServer) -> None:
    reports: list[tuple[str, float, Download]] = []

    def report(stage: str, fraction: float, download: Download | None = None) -> None:
        if download is not None:  # None while the hub lists its files
            reports.append((stage, fraction, download))

    found = find("org/sharded", report=report)
    small = sum((hub.folders["org/sharded"] / name).stat().st_size for name in hub.names())
    weights = sum(file.stat().st_size for file in hub.folders["org/sharded"].glob("*.safetensors"))
    assert {stage for stage, _, _ in reports} == {"find"}
    assert max(done.num_bytes_done for _, _, done in reports) == small
    assert [file.num_bytes for file in found.missing] == [
        (hub.folders["org/sharded"] / file.name).stat().st_size for file in found.missing
    ]

    reports.clear()
    found.fetch()
    assert {stage for stage, _, _ in reports} == {"download"}
    assert {(done.num_files, done.num_bytes) for _, _, done in reports} == {(9, weights)}
    assert reports[-1][1:] == (
        1.0,
        Download(num_files=9, num_files_done=9, num_bytes=weights, num_bytes_done=weights),
    )
    assert all(fraction == done.num_bytes_done / weights for _, fraction, done in reports)


def test_engine_judges_device_and_config_first(hub: HubServer) -> None:
    async def error_of(config: EngineConfig) -> Exception:
        with pytest.raises((ConfigError, ModelLoadError)) as caught:
            await Engine("org/sharded", config).start()
        return caught.value

    async def main() -> None:
        if not torch.cuda.is_available():
            for config in (EngineConfig(device="cuda"), EngineConfig(executor="graph")):
                assert isinstance(await error_of(config), ConfigError)
            assert hub.downloads == []

        error = await error_of(EngineConfig(device="cpu", max_model_len=100_000))
        assert "max_model_len=100000: expected at most the model's context of 512" in str(error)
        assert not [name for name in hub.names() if name.endswith(".safetensors")]

        progress: list[Progress] = []
        config = EngineConfig(device="cpu", max_model_len=64, kv_cache_tokens=64)
        async with Engine("org/sharded", config, on_progress=progress.append) as engine:
            assert (await engine.generate([5, 6, 7])).token_ids
        (last,) = {p.download.num_bytes for p in progress if p.stage == "download" and p.download}
        assert last == sum(file.stat().st_size for file in hub.folders["org/sharded"].glob("*.safetensors"))

    anyio.run(main)


def test_random_weights_are_not_fetched(hub: HubServer) -> None:
    async def main() -> None:
        config = EngineConfig(device="cpu", load="random", max_model_len=64, kv_cache_tokens=64)
        for name in ("org/sharded", "org/gguf:Q8_0"):
            async with Engine(name, config) as engine:
                assert (await engine.generate([5, 6, 7])).token_ids

    anyio.run(main)
    assert not [name for name in hub.names() if name.endswith(".safetensors")]


@pytest.mark.parametrize("suffix", ["tokenizer.json", ".safetensors"])
def test_closing_ends_a_download(suffix: str, hub: HubServer, tmp_path: Path) -> None:
    """Otherwise Ctrl-C would wait for the last of many gigabytes."""
    engine = Engine("org/sharded", EngineConfig(device="cpu", max_model_len=64, kv_cache_tokens=64))
    has_closed = threading.Event()

    def close(name: str) -> None:
        if name.endswith(suffix):
            engine._life_cycle.driver.close(0.0)
            has_closed.wait(60)

    hub.on_download = close

    async def main() -> None:
        with pytest.raises(EngineClosed):
            await engine.start()
        has_closed.set()
        assert not list((tmp_path / "cache").rglob("*.safetensors"))

        hub.on_download = lambda name: None
        async with engine:
            assert engine.is_open

    anyio.run(main)


@pytest.mark.parametrize("name", ["org/gguf:Q8_0", "org/gguf:q4_k_m", "org/gguf:m-Q4_K_M"])
def test_gguf_file_is_chosen_by_its_quantisation(
    name: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its header is read before it is fetched. The parts of a split file give the tensors of the whole."""
    monkeypatch.setattr(hub_module, "FIRST_BYTES", 64)  # so that a header takes several requests
    found = find(name)
    quant = "Q8_0" if name.endswith("Q8_0") else "Q4_K_M"
    sizes = {file.name: file.stat().st_size for file in hub.folders["org/gguf"].glob(f"*{quant}*")}
    assert {file.name: file.num_bytes for file in found.missing} == sizes
    assert found.source.config["model_type"] == "qwen3"
    assert found.source.tokenizer().encode("ab") == [257]
    assert set(hub.names()) == set(sizes)
    assert max(num_bytes for _, num_bytes in hub.downloads) < min(sizes.values()) / 2
    assert not list((tmp_path / "cache").rglob("*.gguf"))

    source = found.fetch()
    del found
    assert not list(tmp_path.glob("drift-gguf-*"))
    tensors, stored = source.tensors(), resolve(hub.folders["org/qwen3"]).tensors()
    assert set(tensors.names()) == set(stored.names())
    assert all(torch.equal(tensors.get(name), stored.get(name)) for name in stored.names())

    hub.downloads.clear()
    for local_files_only in (False, True):
        assert resolve(name, local_files_only=local_files_only).path == source.path
    assert hub.downloads == []


def test_gguf_names_that_lead_nowhere(hub: HubServer) -> None:
    for name, said in (
        ("org/gguf:Q5_0", "no .gguf file is named Q5_0, there are Q4_K_M, Q8_0"),
        ("org/gguf", "no config.json; name one as org/gguf:QUANT, of Q4_K_M, Q8_0"),
        ("org/qwen3:Q8_0", "it holds no .gguf file"),
        ("org/gguf:", "is not a hub id"),
        ("org/none:Q8_0", "not in the cache, and the hub answers: .*Not Found"),
    ):
        with pytest.raises(ModelLoadError, match=f"^model '{name}'.*{said}"):
            resolve(name)

    with pytest.raises(ModelLoadError, match="not in the cache, and local_files_only is set"):
        resolve("org/gguf:Q8_0", local_files_only=True)


def test_file_on_the_hub_that_is_no_gguf_file(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "m-Q8_0.gguf").write_bytes(b"text")
    hub.folders["org/bad"] = tmp_path / "bad"
    with pytest.raises(ModelLoadError, match="m-Q8_0.gguf: not a whole GGUF file: begins with b'text'"):
        resolve("org/bad:Q8_0")


@pytest.mark.parametrize(
    "name",
    [
        "{tmp}/notes-F32.gguf",
        "../../notes-F32.gguf",
        "a/../../notes-F32.gguf",
        "..\\notes-F32.gguf",
        "c:notes-F32.gguf",
        "\\notes-F32.gguf",
        "a\0-F32.gguf",
        "..",
        "",
    ],
)
def test_listing_that_leads_out_of_the_repository(name: str, hub: HubServer, tmp_path: Path) -> None:
    """Nothing is written: a copy of a header would replace a file of the user."""
    name = name.format(tmp=tmp_path)
    notes = tmp_path / "notes-F32.gguf"
    notes.write_text("mine")
    hub.others[name] = hub.folders["org/gguf"] / "m-Q8_0.gguf"
    for model in ("org/gguf:F32", "org/gguf:Q8_0", "org/sharded"):
        with pytest.raises(ModelLoadError) as caught:
            find(model)
        assert f"the hub lists {name!r}, expected a path inside the repository" in str(caught.value)
    assert notes.read_text() == "mine"
    assert hub.downloads == []


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("form", ["{}", '"{}"', 'W/"{}"', 'W/WW"{}"'])
@pytest.mark.parametrize("place", ["absolute", "above"])
def test_headers_that_lead_out_of_the_cache(
    header: str, form: str, place: str, hub: HubServer, tmp_path: Path
) -> None:
    """The hub's library names files in its cache by them."""
    name = str(tmp_path / "written") if place == "absolute" else "../../../written"
    hub.headers = {header: form.format(name)}
    with pytest.raises(ModelLoadError, match=f"the hub sends {header.lower()} .*written.*, expected"):
        resolve("org/qwen3")
    assert not list(tmp_path.rglob("*written*"))


def test_settings_stored_as_a_tensor_are_part_of_the_header(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Llama 3's factors of the rotation: the config is made of their values."""
    monkeypatch.setattr(hub_module, "FIRST_BYTES", 64)
    qwen3 = make_model(18, tmp_path / "model")
    (tmp_path / "factors").mkdir()
    factors = np.linspace(1.0, 8.0, qwen3.config.head_dim // 2, dtype=np.float32)
    write_gguf(qwen3, tmp_path / "factors" / "m-F32.gguf", tensors={"rope_freqs.weight": factors})
    hub.folders["org/factors"] = tmp_path / "factors"
    found = find("org/factors:F32")
    assert found.missing and found.source.config["rope_parameters"]["factors"] == factors.tolist()


def test_other_tensors_are_not_fetched_with_the_header(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub_module, "FIRST_BYTES", 64)
    monkeypatch.setattr(hub_module, "MAX_SETTING_BYTES", 256)
    qwen3 = make_model(18, tmp_path / "model")
    (tmp_path / "many").mkdir()
    others = {name: np.ones(4096, np.float32) for name in ("rope_other.weight", "rope_freqs.weight")}
    write_gguf(qwen3, tmp_path / "many" / "m-F32.gguf", tensors=others)
    hub.folders["org/many"] = tmp_path / "many"
    fetched = []
    fetch = hub_module.fetch_range

    def noting(url: str, start: int, num_bytes: int) -> tuple[bytes, int]:
        fetched.append(start)
        return fetch(url, start, num_bytes)

    monkeypatch.setattr(hub_module, "fetch_range", noting)
    found = find("org/many:F32")
    with pytest.raises(ModelLoadError, match="rope_freqs.weight has shape"):
        _ = found.source.config
    assert set(fetched) == {0}


NAMES = [
    *("a/model-Q4_K_M.gguf", "b/model-q8_0.gguf", "model.IQ4_XS.gguf", "UD-Q4_K_XL/m-UD-Q4_K_XL.gguf"),
    *("mmproj-F16.gguf", "m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf", "README.md"),
    *("x-Q6_K-00001-of-00002.gguf", "one-Q5_0.gguf", "two-Q5_0.gguf"),
]


def test_quantisation_is_the_end_of_a_files_name() -> None:
    assert choose_gguf(NAMES, "q4_k_m") == ("a/model-Q4_K_M.gguf",)
    assert choose_gguf(NAMES, "Q8_0") == ("b/model-q8_0.gguf",)
    assert choose_gguf(NAMES, "iq4_xs") == ("model.IQ4_XS.gguf",)
    assert choose_gguf(NAMES, "Q4_K_XL") == choose_gguf(NAMES, "UD-Q4_K_XL")
    assert choose_gguf(NAMES, "F16") == ("m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf")
    assert choose_gguf(NAMES, "two-q5_0") == ("two-Q5_0.gguf",)
    assert choose_gguf(["m_Q4_K_M.gguf"], "Q4_K_M") == ("m_Q4_K_M.gguf",)
    there = "F16, IQ4_XS, Q4_K_M, Q5_0, Q6_K, UD-Q4_K_XL, q8_0"
    for quant in ("Q4_K", "_0", "K_M", "XS"):
        with pytest.raises(ModelLoadError, match=f"named {quant}, there are {there}"):
            choose_gguf(NAMES, quant)
    with pytest.raises(ModelLoadError, match="several .gguf files are named Q5_0: one-Q5_0, two-Q5_0"):
        choose_gguf(NAMES, "Q5_0")
    with pytest.raises(ModelLoadError, match=r"x-Q6_K-00002-of-00002\.gguf is missing"):
        choose_gguf(NAMES, "Q6_K")


def test_quantisation_follows_a_colon() -> None:
    assert split_quant("org/model:Q4_K_M") == ("org/model", "Q4_K_M")
    assert split_quant("org/model") == ("org/model", None)
