"""A closed engine leaves nothing on the GPU. To be run alone: what others use shows in the device's count."""

from __future__ import annotations

import gc
from pathlib import Path

import anyio
import pytest
import torch
from model_zoo import make_model
from random_folder import make_random_folder

from drift_sdk import Engine, EngineConfig, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MIB = 2**20
NUM_CYCLES = 10


def in_use() -> tuple[int, int]:
    """Bytes that tensors have, and bytes that the device lacks, torch's own reserve given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


def check_cycles(folder: Path, config: EngineConfig) -> None:
    async def cycle() -> None:
        async with Engine(folder, config) as engine:
            params = SamplingParams(max_tokens=8, temperature=1.0, prompt_logprobs=1)
            streams = [engine.generate([5, 6, 7 + index], params) for index in range(3)]
            for stream in streams:
                await stream
            assert in_use()[0] > 0
            cut = engine.generate([5], SamplingParams(max_tokens=None, ignore_eos=True))
            await anext(cut)
            cut.cancel()
            await cut

    anyio.run(cycle)  # contexts, modules and library workspaces are there from then on
    allocated, used = in_use()
    found = []
    for _ in range(NUM_CYCLES):
        anyio.run(cycle)
        found.append(in_use())

    report = [(one - allocated, round((other - used) / MIB, 1)) for one, other in found]
    assert all(one <= allocated for one, _ in found), report
    assert all(other - used <= 64 * MIB for _, other in found), report
    assert found[-1][1] - found[1][1] <= 16 * MIB, f"grows with each cycle: {report}"


def test_memory_comes_back(tmp_path: Path) -> None:
    """Of an engine with 0.6 GiB of weights, caches and graphs."""
    make_random_folder(tmp_path, "llama")
    config = EngineConfig(
        device="cuda",
        executor="graph",
        load="random",
        max_num_seqs=16,
        max_model_len=1024,
        kv_cache_tokens=32_768,
        prefill_token_budget=512,
    )
    check_cycles(tmp_path, config)


def test_memory_of_steps_that_allocate_comes_back(tmp_path: Path) -> None:
    """Biased layers have temporaries, which lie in the graphs' own pool."""
    make_model(5, tmp_path)
    config = EngineConfig(
        device="cuda",
        executor="graph",
        dtype="float32",
        max_num_seqs=4,
        max_model_len=256,
        kv_cache_tokens=2048,
        prefill_token_budget=32,
    )
    check_cycles(tmp_path, config)
