"""Weights replaced while CUDA graphs are in use: the tokens are those of an engine with the new files."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from model_zoo import make_model
from safetensors.torch import load_file, save_file

from drift_sdk import Engine, EngineConfig, RequestError
from drift_sdk.models import weight_update

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with other numbers."""
    old = tmp_path_factory.mktemp("weights") / "old"
    make_model(1, old)
    new = old.parent / "new"
    shutil.copytree(old, new)
    for file in new.glob("*.safetensors*"):
        file.unlink()
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)
        for name, tensor in sorted(tensors_of(old).items())
    }
    save_file(tensors, new / "model.safetensors")
    return old, new


def engine_of(folder: Path, **fields: Any) -> Engine:
    options = {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_tokens": 4096, "block_size": 16} | fields
    return Engine(folder, EngineConfig(device="cuda", executor="graph", dtype="bfloat16", **options))


def prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(3, 500) for _ in range(rng.randint(1, 120))] for _ in range(8)]


async def answers(engine: Engine) -> list[tuple[int, ...]]:
    streams = [engine.generate(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts()]
    return [(await stream).token_ids for stream in streams]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("form", ["expanded", "fp8", "int4"])
def test_tokens_are_those_of_an_engine_with_the_new_files(
    folders: tuple[Path, Path], form: str, place: str
) -> None:
    async def main() -> None:
        old, new = folders
        async with engine_of(new, weights=form) as engine:
            expected = await answers(engine)
        async with engine_of(old, weights=form) as engine:
            before = await answers(engine)
            tensors = {name: tensor.to(place) for name, tensor in tensors_of(new).items()}
            with pytest.raises(RequestError, match="not finite"):
                await engine.update_weights(tensors | {"model.norm.weight": tensors["model.norm.weight"] / 0})
            assert await answers(engine) == before != expected
            running = [engine.generate(prompt, max_tokens=100, ignore_eos=True) for prompt in prompts()]
            await running[0].accepted()
            await engine.update_weights(tensors)
            assert [len((await stream).token_ids) for stream in running] == [100] * 8
            assert await answers(engine) == expected

    anyio.run(main)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("form", ["expanded", "fp8"])
def test_copies_need_no_memory(
    folders: tuple[Path, Path], form: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors in float64, whose rows are apart in memory."""
    numbers: list[int] = []
    run = weight_update.Copies.run

    def counted(self: weight_update.Copies) -> None:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        run(self)
        torch.cuda.synchronize()
        numbers.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)

    async def main() -> None:
        old, new = folders
        async with engine_of(new, weights=form) as engine:
            expected = await answers(engine)
        async with engine_of(old, weights=form) as engine:
            given = {
                name: torch.stack((tensor.to(place).double(),) * 2, dim=-1)[..., 0]
                for name, tensor in tensors_of(new).items()
            }
            monkeypatch.setattr(weight_update.Copies, "run", counted)
            await engine.update_weights(given)
            assert await answers(engine) == expected and engine.stats().weights_version == 1

    anyio.run(main)
    assert numbers == [0]
