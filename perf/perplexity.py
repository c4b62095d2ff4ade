"""Measure the perplexity of a model on a fixed text, in several forms of its weights and KV cache.

Forms: "expanded" (numbers of the engine's dtype), "stored" (as the file has them) and, made of the expanded
numbers, "fp8", "int4" and "nvfp4"; "fp8-kv" and "nvfp4-kv" are "expanded" with a KV cache in these formats.
Differences are those from the first form that is given.

python -m perf.perplexity --model smollm2-135m --forms expanded stored fp8 int4 nvfp4 fp8-kv nvfp4-kv
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from drift_sdk import Engine, EngineConfig, SamplingParams
from drift_sdk.loading.source import resolve
from drift_sdk.models.allocation import QUANTISERS, WeightForm
from drift_sdk.models.kv_cache import KVForm
from drift_sdk.models.weights import weight_bytes
from perf.harness.processes import ROOT
from perf.harness.record import Run
from perf.harness.recording import Recording, dtype_name, parser
from perf.harness.shapes import Model, prepare
from perf.harness.startup_process import gpu_memory_gib
from perf.harness.table import show

__all__ = ["FORMS", "TEXT", "PerplexityRun", "main", "measure"]

TEXT = ROOT / "perf" / "texts" / "tides.txt"
KV_FORMS: dict[str, KVForm] = {"fp8-kv": "fp8", "nvfp4-kv": "nvfp4"}
FORMS: tuple[str, ...] = ("expanded", "stored", *QUANTISERS, *KV_FORMS)


class PerplexityRun(Run, kw_only=True):
    """A text's perplexity: the exponential of the mean of its tokens' negative log-probabilities.

    config:           form of the weights and KV cache.
    num_tokens:       tokens of the text that are predicted: all but the first.
    max_difference:   largest absolute difference between a token's log-probability and that with the first
                      form.
    mean_difference:  the mean of these differences.
    weight_bytes:     bytes of the weights in memory, embedding and head included.
    gpu_memory_mib:   memory of the GPU that the engine takes while it is open, as the driver counts it:
                      weights, KV cache, graphs and scratch. None on a CPU.
    """

    config: str
    num_tokens: int
    perplexity: float
    max_difference: float
    mean_difference: float
    weight_bytes: int
    gpu_memory_mib: float | None = None


async def measure(
    model: Model,
    forms: Sequence[str],
    settings: EngineConfig,
    folder: Path,
    on_run: Callable[[Run], None] = lambda run: None,
) -> list[PerplexityRun]:
    """Measure all forms. settings: of the engines, but for weights and lengths. folder: for a copy of the
    model with expanded numbers, from which those of "fp8" and "int4" are made."""
    tokens = resolve(model.path).tokenizer().encode(TEXT.read_text("utf-8"))
    tokens = tokens[: model.spec.max_position_embeddings - 1]
    runs: list[PerplexityRun] = []
    first: list[float] = []
    settings = settings.replace(load=model.load, max_model_len=len(tokens) + 1, max_num_seqs=1)
    if settings.device.startswith("cuda"):
        await evaluate(model.path, settings, tokens)  # takes the memory that a process takes once
    for form in forms:
        path = model.path
        weights: WeightForm = "expanded" if form in KV_FORMS else form  # type: ignore[assignment]  # a form of weights
        if form in QUANTISERS and model.spec.quantisation is not None:
            path = expanded_copy(model, folder)
        config = settings.replace(weights=weights, kv_dtype=KV_FORMS.get(form))
        found, executor, gpu_memory_mib = await evaluate(path, config, tokens)
        first = first or found
        differences = [abs(one - other) for one, other in zip(found, first, strict=True)]
        dtype = dtype_name(settings.dtype, settings.device)
        tensors = resolve(model.path).tensors() if model.load == "auto" else None
        runs.append(
            PerplexityRun(
                engine=f"drift {executor}",
                model=model.name,
                dtype=dtype,
                scenario="perplexity",
                batch=1,
                context=len(tokens),
                config=form,
                num_tokens=len(found),
                perplexity=math.exp(-sum(found) / len(found)),
                max_difference=max(differences),
                mean_difference=sum(differences) / len(differences),
                weight_bytes=weight_bytes(model.spec, getattr(torch, dtype), weights, tensors),
                gpu_memory_mib=gpu_memory_mib,
            )
        )
        on_run(runs[-1])
    return runs


async def evaluate(
    path: str | Path, config: EngineConfig, tokens: Sequence[int]
) -> tuple[list[float], str, float | None]:
    """`token_logprobs` in a new engine, its kind of executor, and the MiB of the GPU that it takes."""
    before_gib = gpu_memory_gib(config.device)
    async with Engine(path, config) as engine:
        found = await token_logprobs(engine, tokens)
        used_gib = gpu_memory_gib(config.device)
        executor = engine.executor

    mib = None if before_gib is None or used_gib is None else (used_gib - before_gib) * 1024
    return found, executor, mib


async def token_logprobs(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """The log-probabilities of all tokens but the first, each after those before it."""
    completion = await engine.generate(tokens, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert completion.prompt_logprobs is not None
    return [entry.logprob for entry in completion.prompt_logprobs if entry is not None]


def expanded_copy(model: Model, folder: Path) -> Path:
    """A folder of the model whose weights are numbers in float32."""
    path = folder / "expanded"
    if not path.exists():
        path.mkdir(parents=True)
        source = resolve(model.path)
        tensors = source.tensors()
        numbers = {name: tensors.get(name).to(torch.float32).contiguous() for name in tensors.names()}
        save_file(numbers, path / "model.safetensors")
        config = {name: value for name, value in source.config.items() if name != "quantization_config"}
        (path / "config.json").write_text(json.dumps(config))
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.set_defaults(model="smollm2-135m")
    made.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    given = made.parse_args(arguments)
    settings = EngineConfig(device=given.device, dtype=given.dtype, executor=given.executor)
    recording = Recording("perplexity", given.device, given.out)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder) / given.model)
        asyncio.run(measure(model, given.forms, settings, Path(folder), recording.add))

    rows = [
        (
            run["config"],
            run["dtype"],
            f"{run['perplexity']:.3f}",
            f"{run['mean_difference']:.4f}",
            f"{run['max_difference']:.3f}",
            f"{run['weight_bytes'] / 2**20:.0f}",
            "" if run["gpu_memory_mib"] is None else f"{run['gpu_memory_mib']:.0f}",
        )
        for run in recording.results.runs
    ]
    columns = ("weights", "dtype", "perplexity", "mean difference", "largest", "MiB", "GPU MiB")
    show(f"{given.model}, {recording.results.runs[0]['num_tokens']} tokens", columns, rows)
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
