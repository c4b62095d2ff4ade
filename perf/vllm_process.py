"""The process that runs vLLM for `peers.vllm`: a job as its argument, a line of times for each scenario."""

from __future__ import annotations

import random
import sys
import time

import msgspec
from msgspec import Struct
from scenario import LENGTHS, Scenario

__all__ = ["MARK", "Job", "Times"]

MARK = "decode times: "
MAX_MODEL_LEN = 34_816
PROMPT_IDS = range(10, 30_000)


class Job(Struct, frozen=True):
    """`folder`: holds the model's config.json."""

    folder: str
    scenarios: list[str]
    repeats: int


class Times(Struct, frozen=True):
    """Seconds of a decode step in each repeat, by the difference of two lengths."""

    scenario: str
    rounds_s: list[float]
    version: str
    settings: str


def main() -> None:
    import vllm

    job = msgspec.json.decode(sys.argv[1], type=Job)
    settings = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    llm = vllm.LLM(model=job.folder, **settings)
    described = ", ".join(f"{name}={value!r}" for name, value in settings.items())

    def seconds(prompts: list[dict[str, list[int]]], num_tokens: int) -> float:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        started_at = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - started_at
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {num_tokens}:
            raise RuntimeError(f"completions of {sorted(lengths)} tokens: expected {num_tokens} each")

        return taken

    short, long = LENGTHS
    for scenario in map(Scenario.parse, job.scenarios):
        numbers = random.Random(0)
        prompts = [
            {"prompt_token_ids": numbers.choices(PROMPT_IDS, k=scenario.context)}
            for _ in range(scenario.batch)
        ]
        for num_tokens in (short, long, long):
            seconds(prompts, num_tokens)

        rounds_s = []
        for _ in range(job.repeats):
            short_s = seconds(prompts, short)
            rounds_s.append((seconds(prompts, long) - short_s) / (long - short))

        times = Times(scenario.name, rounds_s, vllm.__version__, f"vllm.LLM({described})")
        print(MARK + msgspec.json.encode(times).decode(), flush=True)


if __name__ == "__main__":
    main()
