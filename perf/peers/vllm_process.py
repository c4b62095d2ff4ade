"""The process that runs vLLM for `perf.peers.vllm`.

Its argument is a job. It prints a line of times for each scenario and each prompt length, and a line of the
answers; or a line of experts for each scenario.

With vLLM's dummy weights, sequences get the same experts. Weights that spread them are put into the model on
the worker after it has been captured: graphs read them from the same memory.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from perf.harness.scenario import LENGTHS, Scenario
from perf.peers.vllm_routing import copying, counted_passes, counting, distinct_tokens, mean_experts

__all__ = ["ANSWERS_MARK", "EXPERTS_MARK", "MARK", "Experts", "Job", "Times", "kernels_of"]

MARK, ANSWERS_MARK, EXPERTS_MARK = "times: ", "answers: ", "experts: "
NUM_WARM_UP_PROMPTS, NUM_WARM_UPS = 2, 1
"""Prompts, and rounds of a scenario after its answers, that are not recorded."""
NUM_COUNTED_TOKENS = 64
"""Tokens of each sequence while experts are counted."""
MTP = "mtp"
MAX_MODEL_LEN = 34_816
"""Most tokens of a sequence of the longest scenario."""
PROMPT_IDS = range(10, 30_000)
"""Token ids of single prompts. Scenarios have the engine's prompts."""


class Job(Struct, frozen=True):
    """The measurements of a process.

    folder:          folder of the model's config.json.
    scenarios:       names of decode scenarios.
    prompt_lengths:  lengths of single prompts, in tokens.
    weights:         file of tensors by name (torch.save) for `copying`; None: all weights are dummies.
    num_active:      experts of a row, to count those of a step of each scenario without graphs, and to time
                     nothing; 0: nothing is counted.
    draft:           folder of an EAGLE-3 draft's config.json; "mtp": the MTP layer of the model, whose config
                     is as `write_mtp_config` writes it; None: no drafts.
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
    num_active: int = 0
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
    seconds:   for each repeat, the time of a decode step of all sequences, or of the prompt.
    num_distinct_tokens:  mean number of distinct tokens of all sequences at the same place of their answers,
                          in the part that is timed; None of a prompt.
    """

    scenario: str | int
    seconds: list[float]
    version: str
    settings: str
    num_distinct_tokens: float | None = None


class Experts(Struct, frozen=True):
    """The mean number of distinct experts of a layer in a step of a scenario; None if none was counted."""

    scenario: str
    num_experts: float | None


def kernels_of(model: Any) -> list[str]:
    """Names of the classes of kernels that multiply by quantised weights. vLLM sends it by value, too."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    kernels = (getattr(method, "fp8_linear", None) for method in methods)
    return sorted({type(kernel).__name__ for kernel in kernels if kernel is not None})


def config_of(job: Job) -> dict[str, Any]:
    """The config.json of a job's model."""
    found: dict[str, Any] = msgspec.json.decode((Path(job.folder) / "config.json").read_bytes())
    return found


def text_config_of(job: Job) -> dict[str, Any]:
    """The part of it that describes the decoder."""
    config = config_of(job)
    found: dict[str, Any] = config.get("text_config", config)
    return found


def is_in_fp8(job: Job) -> bool:
    """Whether weights are FP8, by the job or by the files."""
    method = config_of(job).get("quantization_config", {}).get("quant_method")
    return "fp8" in (job.quantization, method)


def settings_of(job: Job) -> dict[str, Any]:
    """The arguments of vllm.LLM."""
    config = text_config_of(job)
    settings: dict[str, Any] = {
        "load_format": "auto" if job.answered else "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": min(MAX_MODEL_LEN, int(config["max_position_embeddings"])),
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    if "vision_config" in config_of(job):
        settings["language_model_only"] = True
    if "linear_num_value_heads" in config:
        settings["gdn_prefill_backend"] = "triton"  # the default needs FlashInfer
    if job.num_active:
        settings["enforce_eager"] = True
    compilation: dict[str, Any] = {}
    if job.scenarios and not job.num_active:
        compilation["cudagraph_capture_sizes"] = capture_sizes(job)
    if job.num_gpus > 1:
        settings["tensor_parallel_size"] = job.num_gpus
        # It is compiled at the start, for minutes, and may use NVLink multicast.
        compilation["pass_config"] = {"fuse_allreduce_rms": False}
    if compilation:
        settings["compilation_config"] = compilation
    for name in ("quantization", "linear_backend"):
        if getattr(job, name) is not None:
            settings[name] = getattr(job, name)
    if job.draft is not None:
        method = {"method": "mtp"} if job.draft == MTP else {"method": "eagle3", "model": job.draft}
        settings["speculative_config"] = {
            **method,
            "num_speculative_tokens": job.num_draft_tokens,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": job.acceptance_length,
        }
    return settings


def capture_sizes(job: Job) -> list[int]:
    """Numbers of rows whose graphs vLLM captures: those of scenarios' steps, and powers of two up to them.

    By default it captures up to 83 sizes, for minutes, of which the scenarios use these.
    """
    batches = {Scenario.parse(name).batch for name in job.scenarios}
    rows = batches | {batch * (job.num_draft_tokens + 1) for batch in batches}
    return sorted(rows | {1 << exponent for exponent in range(max(rows).bit_length())})


def given_prompts(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    """Prompts as vLLM takes them."""
    return [{"prompt_token_ids": tokens} for tokens in prompts]


def scenario_prompts(job: Job, scenario: Scenario) -> list[dict[str, list[int]]]:
    """The prompts that the engine has in a scenario."""
    return given_prompts(scenario.prompts(int(text_config_of(job)["vocab_size"])))


def write(mark: str, found: Any) -> None:
    """Print a line for the process that has started this one."""
    print(mark + msgspec.json.encode(found).decode(), flush=True)


class Running:
    """A vllm.LLM for a job, with the job's weights. description: of it and its kernels.

    Raises RuntimeError if it lacks one of the weights.
    """

    def __init__(self, job: Job) -> None:
        import vllm

        settings = settings_of(job)
        self.version = vllm.__version__
        self.numbers = itertools.count()
        self.llm = vllm.LLM(model=job.folder, **settings)
        if job.weights is not None:
            missing = {name for names in self.llm.apply_model(copying(job.weights)) for name in names}
            if missing:
                raise RuntimeError(
                    f"vLLM's model lacks {sorted(missing)[:5]}: expected all tensors of {job.weights}"
                )

        self.description = "vllm.LLM({})".format(
            ", ".join(f"{name}={value!r}" for name, value in settings.items())
        )
        if job.weights is not None:
            self.description += ", embedding, norms and routers of this engine, attention without biases"
        if is_in_fp8(job):
            kernels = {name for names in self.llm.apply_model(kernels_of) for name in names}
            self.description += f", computes with {', '.join(sorted(kernels))}"

    def answers(self, prompts: list[dict[str, list[int]]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations. Raises RuntimeError if one does not have `num_tokens` tokens."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        if {len(tokens) for tokens in found} != {num_tokens}:
            lengths = sorted({len(tokens) for tokens in found})
            raise RuntimeError(f"completions of {lengths} tokens: expected {num_tokens} each")

        return found

    def seconds(self, prompts: list[dict[str, list[int]]]) -> float:
        """The time to the first tokens."""
        started_at = time.perf_counter()
        self.answers(prompts, 1)
        return time.perf_counter() - started_at

    def round_seconds(self, prompts: list[dict[str, list[int]]], short: int, long: int) -> float:
        """The time in which all sequences get a token, between the steps after which each has `short` tokens
        and each has `long`. Steps of prompts are not in it: vLLM compiles kernels in some of them."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=long,
            min_tokens=long,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine = self.llm.llm_engine
        for prompt in prompts:
            engine.add_request(f"timed-{next(self.numbers)}", {"type": "token", **prompt}, params)

        counts: Counter[str] = Counter()
        began_at, num_before = 0.0, 0
        while engine.has_unfinished_requests():
            counts.update({each.request_id: len(each.outputs[0].token_ids) for each in engine.step()})
            if not num_before and len(counts) == len(prompts) and min(counts.values()) >= short:
                began_at, num_before = time.perf_counter(), counts.total()
        taken = time.perf_counter() - began_at
        if not num_before or counts.total() != long * len(prompts):
            raise RuntimeError(f"completions of {sorted(set(counts.values()))} tokens: expected {long} each")

        return taken * len(prompts) / (counts.total() - num_before)

    def times(self, scenario: str | int, seconds: list[float], num_distinct: float | None = None) -> Times:
        return Times(scenario, seconds, self.version, self.description, num_distinct)


def count_experts(running: Running, job: Job) -> None:
    """Write the experts of a step of each scenario."""
    running.llm.apply_model(counting(job.num_active))
    for scenario in map(Scenario.parse, job.scenarios):
        running.answers(scenario_prompts(job, scenario), NUM_COUNTED_TOKENS)
        passes = running.llm.apply_model(counted_passes())[0]
        num_rows = scenario.batch * (job.num_draft_tokens + 1)
        write(EXPERTS_MARK, Experts(scenario.name, mean_experts(passes, num_rows)))


def time_scenarios(running: Running, job: Job) -> None:
    """Write the times of a decode step of each scenario."""
    short, long = LENGTHS
    for scenario in map(Scenario.parse, job.scenarios):
        prompts = scenario_prompts(job, scenario)
        num_distinct = distinct_tokens(running.answers(prompts, long), short)
        rounds_s = [running.round_seconds(prompts, short, long) for _ in range(NUM_WARM_UPS + job.repeats)]
        write(MARK, running.times(scenario.name, rounds_s[NUM_WARM_UPS:], num_distinct))


def time_prompts(running: Running, job: Job) -> None:
    """Write the times of single prompts, each of which is a new one."""
    numbers = random.Random(0)
    for length in job.prompt_lengths:
        times = [
            running.seconds(given_prompts([numbers.choices(PROMPT_IDS, k=length)]))
            for _ in range(NUM_WARM_UP_PROMPTS + job.repeats)
        ]
        write(MARK, running.times(length, times[NUM_WARM_UP_PROMPTS:]))


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    if job.linear_backend == "marlin":
        os.environ["VLLM_TEST_FORCE_FP8_MARLIN"] = "1"  # refused otherwise where FP8 products exist

    running = Running(job)
    if job.num_active:
        count_experts(running, job)
        return

    if job.answered:
        write(ANSWERS_MARK, running.answers(given_prompts(job.answered), job.num_answer_tokens))

    time_scenarios(running, job)
    time_prompts(running, job)


if __name__ == "__main__":
    main()
