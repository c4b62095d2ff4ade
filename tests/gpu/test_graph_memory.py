"""Closed engines free their GPU memory. Run these tests alone: memory of other processes is counted too."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from model_zoo import make_model
from random_folder import make_random_folder

from drift_sdk import ConfigError, Engine, EngineConfig, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MIB = 2**20
NUM_CYCLES = 10


def in_use() -> tuple[int, int]:
    """Bytes of tensors, and bytes of the device that are not free once torch has released its cache."""
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

    anyio.run(cycle)  # allocates contexts, modules and library workspaces, which stay
    allocated, used = in_use()
    found = []
    for _ in range(NUM_CYCLES):
        anyio.run(cycle)
        found.append(in_use())

    report = [(one - allocated, round((other - used) / MIB, 1)) for one, other in found]
    assert all(one <= allocated for one, _ in found), report
    assert all(other - used <= 64 * MIB for _, other in found), report
    assert found[-1][1] - found[1][1] <= 16 * MIB, f"grows with each cycle: {report}"


def test_closed_engine_frees_its_memory(tmp_path: Path) -> None:
    """The engine has 0.6 GiB of weights, caches and graphs."""
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


def test_closed_engine_frees_memory_of_steps_that_allocate(tmp_path: Path) -> None:
    """Layers with biases allocate temporaries in the memory pool of graphs."""
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


def kv_tokens(engine: Engine) -> int:
    """Tokens of the KV cache. The graph executor's default block has 64 tokens."""
    return engine.stats().num_blocks * 64


def share_config(fraction: float, **fields: Any) -> EngineConfig:
    """A configuration whose KV cache is limited only by memory."""
    fields = {"max_num_seqs": 16, "prefill_token_budget": 512, "load": "random"} | fields
    return EngineConfig(device="cuda", executor="graph", gpu_memory_fraction=fraction, **fields)


def endless_model(folder: Path) -> Path:
    return make_random_folder(folder, "llama", max_position_embeddings=2**22)


async def generate(engine: Engine, num_tokens: int = 8) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return (await engine.generate([5, 6, 7], params)).token_ids


def used_without_collecting() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_closed_engine_leaves_its_memory_to_the_next(tmp_path: Path) -> None:
    """And to other processes: without a run of the garbage collector, and without the caller emptying torch's
    cache."""
    endless_model(tmp_path)

    async def main() -> list[tuple[int, int, int]]:
        found = []
        for _ in range(3):
            async with Engine(tmp_path, share_config(0.9)) as engine:
                await generate(engine)
                found.append((kv_tokens(engine), used_without_collecting(), 0))
            found[-1] = (*found[-1][:2], used_without_collecting())
        return found

    free, total = torch.cuda.mem_get_info()
    first, *others = anyio.run(main)
    assert first[1] > 0.8 * free, (first, free)
    assert all(abs(tokens / others[0][0] - 1) < 0.01 for tokens, _, _ in (first, *others)), (first, others)
    assert all(after - first[2] <= 64 * MIB for _, _, after in others), (first, others)
    assert first[2] - (total - free) <= 1500 * MIB  # context, modules, library workspaces


def test_engines_share_a_gpu(tmp_path: Path) -> None:
    """Two engines, started together while the caller holds tensors; each stays within its share."""
    endless_model(tmp_path)

    async def main() -> None:
        held = torch.empty(8 * 2**30, dtype=torch.uint8, device="cuda")
        free, _ = torch.cuda.mem_get_info()
        engines = [Engine(tmp_path, share_config(0.45)) for _ in range(2)]
        async with anyio.create_task_group() as group:
            for engine in engines:
                group.start_soon(engine.start)
        left, _ = torch.cuda.mem_get_info()
        assert left >= (0.55**2 - 0.02) * free
        sizes = sorted(kv_tokens(engine) for engine in engines)
        # Shares of the free memory: 0.45, and 0.45 of the remaining 0.55.
        assert 0.4 < sizes[0] / sizes[1] < 0.65, sizes
        texts = [await generate(engine, 64) for engine in engines]
        assert texts[0] == texts[1]
        for engine in engines:
            await engine.aclose()
        del held

    anyio.run(main)


def test_errors_of_what_does_not_fit_have_figures(tmp_path: Path) -> None:
    endless_model(tmp_path)

    async def start(config: EngineConfig) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            await Engine(tmp_path, config).start()
        return caught.value  # the error keeps its traceback, whose frames must not keep memory

    weights = anyio.run(start, share_config(0.001))
    assert weights.field == "gpu_memory_fraction" and "the weights take" in str(weights)
    anyio.run(start, share_config(0.02, max_model_len=2**22))
    allocated, _ = in_use()  # library workspaces
    length = anyio.run(start, share_config(0.02, max_model_len=2**22))
    assert length.field == "max_model_len" and "were free at start, this engine may use" in str(length)
    tokens = anyio.run(start, share_config(0.9, kv_cache_tokens=2**30))
    assert tokens.field == "kv_cache_tokens" and "at most" in str(tokens)
    assert in_use()[0] <= allocated
