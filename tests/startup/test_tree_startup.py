"""Refusal of trees and of checks of speculation when an engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from draft_zoo import make_draft
from tiny_llama import tiny_llama

from drift_sdk import ConfigError, DynamicTree, EngineConfig, Speculation, StaticTree
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.startup import executor_factory
from drift_sdk.startup.model_parts import open_drafter_factory

TREE = StaticTree(((0,), (1,)))


@pytest.mark.parametrize("executor", ["auto", "graph"])
@pytest.mark.parametrize("fields", [{"shape": TREE}, {"shape": DynamicTree()}, {"checks": True}], ids=str)
def test_trees_and_checks_run_on_graphs(
    executor: str, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_factory, "_device_obstacle", lambda device: None)
    config = EngineConfig(executor=executor, speculation=Speculation(draft="folder", **fields))
    assert executor_factory.choose_executor(config, torch.device("cuda", 0)) == ("graph", None)


def test_tree_needs_as_many_candidates_as_the_draft_has_tokens(tmp_path: Path) -> None:
    settings = tiny_llama(vocab_size=160, num_hidden_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    make_draft("reference", tmp_path / "draft", tmp_path)
    target = Decoder.random(read_spec(settings), device="cpu", dtype=torch.float32)
    speculation = Speculation(draft=tmp_path / "draft", shape=StaticTree(((2,),)))
    config = EngineConfig(speculation=speculation)
    factory = open_drafter_factory(config, target, lambda stage, fraction: None)
    assert (factory.max_tree_depth, factory.draft_choices) == (1, (1,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticTree, "num_candidates", property(lambda _: 97))  # more than any tree may need
        with pytest.raises(ConfigError, match="at most 96 candidates after a token"):
            open_drafter_factory(config, target, lambda stage, fraction: None)
