"""Everything that tokens depend on besides the request, and how two engines differ in it."""

from __future__ import annotations

import pickle

import pytest
from msgspec.structs import replace

from drift_sdk import EngineConfig, SamplingParams, __version__, base_engine
from drift_sdk.base_engine import EngineKind


def kind_of(config: EngineConfig) -> EngineKind:
    return EngineKind.of(
        "m", config, executor="eager", max_model_len=64, default_params=SamplingParams(temperature=0.5)
    )


def test_kinds_differ_in_settings_but_not_in_the_device_of_the_config() -> None:
    one = kind_of(EngineConfig(device="cpu"))
    assert one.differences(kind_of(EngineConfig(device="cpu"))) == []
    assert "device" not in one.settings
    other = kind_of(EngineConfig(device="cpu", max_num_seqs=3, fast_prompts=True))
    assert one.differences(other) == ["max_num_seqs: '256' and '3'", "fast_prompts: 'False' and 'True'"]


def test_kinds_differ_in_versions_table_and_defaults() -> None:
    one = kind_of(EngineConfig(device="cpu"))
    assert one.versions["drift_sdk"] == __version__ and "torch" in one.versions
    other = replace(
        one,
        versions={**one.versions, "torch": "0.1"},
        table="other",
        default_params=SamplingParams(),
        device="NVIDIA H200",
    )
    assert [each.partition(":")[0] for each in one.differences(other)] == [
        "device",
        "torch",
        "table",
        "default_params",
    ]


def test_kind_can_be_sent_to_another_process() -> None:
    one = kind_of(EngineConfig(device="cpu"))
    assert pickle.loads(pickle.dumps(one)) == one


def test_tuned_table_is_found_by_the_name_of_the_gpu() -> None:
    assert len(base_engine.table_hash("NVIDIA H200")) == 64
    assert base_engine.table_hash("NVIDIA unknown") == ""


def test_cpu_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    monkeypatch.setattr(base_engine, "CPU_INFO", tmp_path / "cpuinfo")
    assert base_engine.device_name("cpu") == "Some CPU @ 2 GHz"
    monkeypatch.setattr(base_engine, "CPU_INFO", tmp_path / "none")
    assert base_engine.device_name("cpu")
