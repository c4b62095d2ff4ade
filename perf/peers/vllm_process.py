"""The process that runs vLLM for `perf.peers.vllm`.

Its argument is a job. It prints a line of times for each scenario and each prompt length, and a line of the
answers.

vLLM's dummy weights are so small that biases decide the routing of experts, and all rows get the same ones.
Weights that are given are copied into the model on the worker after it has been captured: graphs read them
from the same memory.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from perf.harness.scenario import LENGTHS, Scenario

__all__ = ["ANSWERS_MARK", "MARK", "Job", "Times", "copying", "kernels_of"]

MARK, ANSWERS_MARK = "times: ", "answers: "
NUM_WARM_UP_PROMPTS = 2
MAX_MODEL_LEN = 34_816
"""Most tokens of a sequence of the longest scenario."""
PROMPT_IDS = range(10, 30_000)
OTHER_NAMES = {"model.embed_tokens.weight": "model.embedding.weight"}
"""vLLM's names of tensors where some of its models differ from files."""


class Job(Struct, frozen=True):
    """The measurements of a process.

    folder:          folder of the model's config.json.
    scenarios:       names of decode scenarios.
    prompt_lengths:  lengths of single prompts, in tokens.
    weights:         file of tensors by name (torch.save) to copy into the model; None: all are dummies.
    draft:           folder of an EAGLE-3 draft's config.json; None: no drafts.
    num_draft_tokens, acceptance_length:  of rounds with drafts: tokens drafted and emitted.
    num_gpus:        that the model is divided between.
    quantization:    as vLLM names it, of weights that are not quantised in the file; None: none.
    linear_backend:  kernels of matrix products; None: vLLM chooses.
    answered, num_answer_tokens:          prompts that are continued greedily, all at a time, and by how many
                                          tokens. If there are any, the folder's weights are loaded.
    """

    folder: str
    repeats: int
    scenarios: list[str] = []
    prompt_lengths: list[int] = []
    weights: str | None = None
    draft: str | None = None
    num_draft_tokens: int = 0
    acceptance_length: float = 1.0
    num_gpus: int = 1
    quantization: str | None = None
    linear_backend: str | None = None
    answered: list[list[int]] = []
    num_answer_tokens: int = 0


class Times(Struct, frozen=True):
    """Times of a scenario or prompt.

    scenario:  name of the scenario, or length of the prompt.
    seconds:   for each repeat, the time of a decode step (by the difference of two lengths) or of the prompt.
    """

    scenario: str | int
    seconds: list[float]
    version: str
    settings: str


def copying(file: str) -> Callable[[Any], list[str]]:
    """A function that copies the tensors of a file into a model and returns the names of those it lacks.

    vLLM sends it to its worker by value: it refers to nothing of this module.
    """
    others = dict(OTHER_NAMES)

    def copy(model: Any) -> list[str]:
        import torch

        parameters = dict(model.named_parameters())
        missing = []
        for name, tensor in torch.load(file, map_location="cpu", mmap=True).items():
            place = parameters.get(name, parameters.get(others.get(name, "")))
            if place is None:
                missing.append(name)
                continue

            # An embedding may have rows of padding.
            place.data[tuple(slice(size) for size in tensor.shape)].copy_(tensor)
        return missing

    return copy


def kernels_of(model: Any) -> list[str]:
    """Names of the classes of kernels that multiply by quantised weights. vLLM sends it by value, too."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    kernels = (getattr(method, "fp8_linear", None) for method in methods)
    return sorted({type(kernel).__name__ for kernel in kernels if kernel is not None})


def max_model_len(folder: Path) -> int:
    """MAX_MODEL_LEN, or what the model in `folder` allows."""
    settings = msgspec.json.decode((folder / "config.json").read_bytes())
    return min(MAX_MODEL_LEN, int(settings["max_position_embeddings"]))


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    if job.linear_backend == "marlin":
        os.environ["VLLM_TEST_FORCE_FP8_MARLIN"] = "1"  # refused otherwise where FP8 products exist

    import vllm

    settings: dict[str, Any] = {
        "load_format": "auto" if job.answered else "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": max_model_len(Path(job.folder)),
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    if job.num_gpus > 1:
        settings["tensor_parallel_size"] = job.num_gpus
        # It is compiled at the start, for minutes, and may use NVLink multicast.
        settings["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    for name in ("quantization", "linear_backend"):
        if getattr(job, name) is not None:
            settings[name] = getattr(job, name)
    if job.draft is not None:
        settings["speculative_config"] = {
            "method": "eagle3",
            "model": job.draft,
            "num_speculative_tokens": job.num_draft_tokens,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": job.acceptance_length,
        }
    llm = vllm.LLM(model=job.folder, **settings)
    if job.weights is not None:
        missing = {name for names in llm.apply_model(copying(job.weights)) for name in names}
        if missing:
            raise RuntimeError(
                f"vLLM's model lacks {sorted(missing)[:5]}: expected all tensors of {job.weights}"
            )

    described = "vllm.LLM({})".format(", ".join(f"{name}={value!r}" for name, value in settings.items()))
    if job.quantization is not None:
        kernels = {name for names in llm.apply_model(kernels_of) for name in names}
        described = f"{described}, computes with {', '.join(sorted(kernels))}"

    def answers(prompts: list[dict[str, list[int]]], num_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        if {len(tokens) for tokens in found} != {num_tokens}:
            lengths = sorted({len(tokens) for tokens in found})
            raise RuntimeError(f"completions of {lengths} tokens: expected {num_tokens} each")

        return found

    def seconds(prompts: list[dict[str, list[int]]], num_tokens: int) -> float:
        started_at = time.perf_counter()
        answers(prompts, num_tokens)
        return time.perf_counter() - started_at

    def report(scenario: str | int, times: list[float]) -> None:
        found = Times(scenario, times, vllm.__version__, described)
        print(MARK + msgspec.json.encode(found).decode(), flush=True)

    if job.answered:
        given = [{"prompt_token_ids": tokens} for tokens in job.answered]
        found = answers(given, job.num_answer_tokens)
        print(ANSWERS_MARK + msgspec.json.encode(found).decode(), flush=True)

    numbers = random.Random(0)

    def prompt(length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": numbers.choices(PROMPT_IDS, k=length)}

    short, long = LENGTHS
    for scenario in map(Scenario.parse, job.scenarios):
        prompts = [prompt(scenario.context) for _ in range(scenario.batch)]
        for num_tokens in (short, long, long):
            seconds(prompts, num_tokens)

        rounds_s = []
        for _ in range(job.repeats):
            short_s = seconds(prompts, short)
            rounds_s.append((seconds(prompts, long) - short_s) / (long - short))

        report(scenario.name, rounds_s)

    for length in job.prompt_lengths:
        times = [seconds([prompt(length)], 1) for _ in range(NUM_WARM_UP_PROMPTS + job.repeats)]
        report(length, times[NUM_WARM_UP_PROMPTS:])


if __name__ == "__main__":
    main()
