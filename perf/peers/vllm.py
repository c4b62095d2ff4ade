"""vLLM with random weights, in another process, which keeps its CUDA context and settings apart.

$VLLM_PATH: a folder from which vllm is imported if it is not installed with the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from drift_sdk.models.allocation import QUANTISERS
from perf.harness.experts import write_routing_weights
from perf.harness.mtp_draft import MTP, MtpDraft
from perf.harness.processes import module_command, with_paths
from perf.harness.record import DecodeRun, PrefillRun
from perf.harness.recording import free_memory
from perf.harness.scenario import Scenario
from perf.harness.shapes import Draft, Model
from perf.peers.vllm_process import ANSWERS_MARK, EXPERTS_MARK, MARK, Experts, Job, Times

__all__ = ["answers", "measure", "measure_drafts", "measure_prompts", "write_mtp_config"]

PROCESS = "perf.peers.vllm_process"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function is sent to the worker
    # NVLink multicast is not available on all hosts.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
ITEMSIZE = 2
SUFFIX = "_text"
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
}
"""Of models whose config is nested, by the architecture of their text."""
FLAT_ARCHITECTURES = "Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM"
"""Of models whose config is that of their text."""
DECODER, NESTED_DECODER = "model.", "model.language_model."


def measure(
    model: Model,
    scenarios: Sequence[Scenario],
    repeats: int,
    bandwidth_tb_s: float,
    *,
    num_gpus: int = 0,
    linear_backend: str | None = None,
) -> Iterator[DecodeRun]:
    """Measure decoding of models with random weights on the first GPU, or divided between `num_gpus`, which
    then is a field of the runs.

    Computes in bfloat16. If the model's weights are FP8, so are vLLM's, in blocks or not: by default its
    products quantise activations too, with the linear backend "marlin" only weights. The backend is part of
    the engine's name. The experts of a model's steps are counted in another process, which takes as long as a
    start of vLLM without compilation and graphs; num_experts is None if there is no count, and bytes are
    those of a spread.

    Raises RuntimeError for a model with real weights, and if vLLM is missing or fails. vLLM's messages go to
    stderr.
    """
    job = Job(
        folder=str(model.path),
        repeats=repeats,
        scenarios=[s.name for s in scenarios],
        num_gpus=max(num_gpus, 1),
        quantization=_quantization(model),
        linear_backend=linear_backend,
    )
    fields = {} if linear_backend is None else {"engine": f"vllm-{linear_backend}"}
    for times, num_experts in _decode_times(model, job):
        scenario = Scenario.parse(str(times.scenario))
        num_bytes = model.decode_bytes(scenario.batch, scenario.mean_context(), ITEMSIZE, num_experts)
        yield DecodeRun.of_rounds(
            times.seconds,
            num_bytes / job.num_gpus,
            bandwidth_tb_s,
            scenario=scenario,
            num_gpus=num_gpus or UNSET,
            **_fields(model, times) | _expert_fields(model, times, num_experts) | fields,
        )


def measure_drafts(
    model: Model,
    draft: Draft | MtpDraft,
    scenarios: Sequence[Scenario],
    repeats: int,
    bandwidth_tb_s: float,
    *,
    num_draft_tokens: int,
    acceptance_length: float,
    num_gpus: int = 0,
) -> Iterator[DecodeRun]:
    """Measure decoding with an EAGLE-3 draft of random weights, or the model's MTP layer, of simulated
    acceptance; as `measure`."""
    job = Job(
        folder=str(model.path),
        repeats=repeats,
        scenarios=[s.name for s in scenarios],
        draft=str(draft.path),
        num_draft_tokens=num_draft_tokens,
        acceptance_length=acceptance_length,
        num_gpus=max(num_gpus, 1),
    )
    for times, num_experts in _decode_times(model, job):
        scenario = Scenario.parse(str(times.scenario))
        context, rows = scenario.mean_context(), scenario.batch * (num_draft_tokens + 1)
        read_experts = model.spread_experts(rows) if num_experts is None else num_experts
        num_bytes = model.decode_bytes(scenario.batch, context, ITEMSIZE, read_experts)
        yield DecodeRun.of_rounds(
            [seconds * acceptance_length for seconds in times.seconds],
            num_bytes / job.num_gpus + draft.round_bytes(num_draft_tokens, scenario.batch, context, ITEMSIZE),
            bandwidth_tb_s,
            tokens_per_round=acceptance_length,
            scenario=scenario,
            num_draft_tokens=num_draft_tokens,
            acceptance="simulated",
            acceptance_length=acceptance_length,
            num_gpus=num_gpus or UNSET,
            **_fields(model, times) | _expert_fields(model, times, num_experts),
        )


def measure_prompts(
    model: Model, lengths: Sequence[int], repeats: int, peak_tflop_s: float
) -> Iterator[PrefillRun]:
    """Measure single prompts that are not cached, under the same conditions."""
    job = Job(
        folder=str(model.path),
        repeats=repeats,
        prompt_lengths=list(lengths),
        quantization=_quantization(model),
    )
    with _prepared(model, job) as prepared:
        for times in _process_times(prepared):
            num_tokens = int(times.scenario)
            yield PrefillRun.of_times(
                times.seconds,
                num_tokens,
                model.prefill_flops(num_tokens),
                matmul_tflop_s=peak_tflop_s,
                **_fields(model, times),
            )


def answers(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations, of `num_tokens` tokens each, by the model whose files are in `folder`.

    Raises RuntimeError if vLLM is missing or fails.
    """
    job = Job(folder=str(folder), repeats=0, answered=list(map(list, prompts)), num_answer_tokens=num_tokens)
    (line,) = _process_lines(job, ANSWERS_MARK)
    return msgspec.json.decode(line, type=list[list[int]])


def _decode_times(model: Model, job: Job) -> Iterator[tuple[Times, float | None]]:
    """Run the job in a new process; yield its times as they are reported, with the number of distinct experts
    of a layer in a step.

    Experts are counted before, in a process of their own, because a model that counts is slower.
    """
    with _prepared(model, job) as prepared:
        counts = _counted_experts(model, prepared)
        for times in _process_times(prepared):
            yield times, counts.get(str(times.scenario))


@contextmanager
def _prepared(model: Model, job: Job) -> Iterator[Job]:
    """The job with a file of the engine's routers, norms and embedding, if the model has experts, and with
    the config that vLLM's MTP layer takes."""
    if model.load != "random":
        raise RuntimeError(f"model {model.name}: the vllm peer measures random weights only")

    with tempfile.TemporaryDirectory() as folder:
        if job.draft == MTP:
            write_mtp_config(model.path, Path(folder))
            job = msgspec.structs.replace(job, folder=folder)
        if model.spec.experts is None:
            yield job
            return

        weights = Path(folder) / "routing.pt"
        write_routing_weights(model, weights)
        free_memory()
        yield msgspec.structs.replace(job, weights=str(weights))


def _counted_experts(model: Model, job: Job) -> dict[str, float | None]:
    """Distinct experts of a layer in a step, by scenario. Without those of scenarios from a process that has
    failed: what is timed does not depend on them."""
    if model.spec.experts is None:
        return {}

    counts: dict[str, float | None] = {}
    counting = msgspec.structs.replace(job, num_active=model.spec.experts.num_active)
    try:
        for line in _process_lines(counting, EXPERTS_MARK):
            found = msgspec.json.decode(line, type=Experts)
            counts[found.scenario] = found.num_experts
    except RuntimeError as error:
        print(f"model {model.name}: not all experts of vLLM's steps are counted: {error}", file=sys.stderr)
    return counts


def _process_times(job: Job) -> Iterator[Times]:
    for line in _process_lines(job, MARK):
        yield msgspec.json.decode(line, type=Times)


def _process_lines(job: Job, mark: str) -> Iterator[str]:
    """The lines that the process prints after `mark`, as they come. Others go to stderr."""
    environment = with_paths(os.environ | ENVIRONMENT, os.environ.get("VLLM_PATH"))
    command = module_command(PROCESS, msgspec.json.encode(job).decode())
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(mark):
                yield line.removeprefix(mark)
            else:
                sys.stderr.write(line)

    if process.returncode:
        raise RuntimeError(f"vLLM's process ended with exit code {process.returncode}")


def _quantization(model: Model) -> str | None:
    """How vLLM quantises the model's weights; what is quantised in files is in the config."""
    return model.weights if model.weights in QUANTISERS else None


def _fields(model: Model, times: Times) -> dict[str, Any]:
    return {
        "engine": "vllm",
        "model": model.name,
        "dtype": model.dtype_name or "bfloat16",
        "engine_version": times.version,
        "settings": times.settings,
    }


def _expert_fields(model: Model, times: Times, num_experts: float | None) -> dict[str, Any]:
    """Fields of decoding with a model with experts."""
    if model.spec.experts is None:
        return {}

    return {"num_experts": num_experts, "num_distinct_tokens": times.num_distinct_tokens}


def write_mtp_config(source: Path, folder: Path) -> None:
    """Write the config.json of the model in `source` into `folder`, as vLLM takes it for its MTP layer.

    vLLM 0.33 takes the config of a model of text alone, but not for the MTP layer of one whose published
    files have a nested config: it replaces the outermost model_type, and then looks for the one of text. The
    nested config is written then.

    Raises ValueError for a model of another architecture, and for one without an MTP layer.
    """
    text: dict[str, Any] = json.loads((source / "config.json").read_text())
    (architecture,) = text["architectures"]
    if architecture in FLAT_ARCHITECTURES:
        if not text.get("num_nextn_predict_layers"):
            raise ValueError(f"num_nextn_predict_layers of {source.name}: expected 1 for an MTP layer")

        (folder / "config.json").write_text(json.dumps(text))
        return

    if architecture not in ARCHITECTURES:
        allowed = ", ".join((*ARCHITECTURES, *FLAT_ARCHITECTURES))
        raise ValueError(f"architecture {architecture}: expected one of {allowed} for an MTP layer in vLLM")

    nested = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": text["model_type"].removesuffix(SUFFIX),
        "torch_dtype": text["torch_dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {"depth": 1, "out_hidden_size": text["hidden_size"]},  # not used
    }
    quantisation = text.pop("quantization_config", None)
    if quantisation is not None:
        modules = [
            f"{NESTED_DECODER}{name.removeprefix(DECODER)}" if name.startswith(DECODER) else name
            for name in quantisation["modules_to_not_convert"]
        ]
        nested["quantization_config"] = {**quantisation, "modules_to_not_convert": modules}
    (folder / "config.json").write_text(json.dumps({**nested, "text_config": text}))
