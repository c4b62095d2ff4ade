"""Hugging Face transformers with a static cache and a compiled decode step, replayed from a CUDA graph."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from perf.harness.record import DecodeRun
from perf.harness.scenario import LENGTHS, Scenario
from perf.harness.shapes import Model

__all__ = ["Decoding", "cache_parameter", "measure"]

PREFILL_CHUNK = 2048
NUM_WARM_UPS = 3


def cache_parameter(model: Any) -> str:
    """The name of the cache in a model's arguments and output, which transformers 5.24 has changed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Decoding:
    """Sequences of equal length in a static cache: `prefill`, then one `step` per token.

    tokens: [batch, 1], the newest token of each sequence.

    Raises RuntimeError if the cache of this version of transformers cannot be rewound.
    """

    def __init__(self, model: Any, batch: int, context: int, max_length: int, *, compiles: bool) -> None:
        from transformers import StaticCache

        self._model = model
        self._forward = torch.compile(model.forward, fullgraph=True) if compiles else model.forward
        self._context = context
        self._cache: Any = StaticCache(config=model.config, max_cache_len=max_length)
        self._cache_argument = {cache_parameter(model): self._cache}
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        if not hasattr(self._cache.layers[0], "cumulative_length"):
            raise RuntimeError(
                "a static cache without cumulative_length: expected transformers 5.23 or a compatible version"
            )

    @torch.inference_mode()
    def prefill(self, prompts: torch.Tensor) -> None:
        """Compute prompts [batch, context] and choose the first token of each."""
        for chunk in prompts.split(PREFILL_CHUNK, dim=1):
            logits = self._model(input_ids=chunk, logits_to_keep=1, **self._cache_argument).logits
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    @torch.inference_mode()
    def step(self) -> None:
        """Generate one token for each sequence."""
        logits = self._forward(input_ids=self.tokens, **self._cache_argument).logits
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    @torch.inference_mode()
    def rewind(self) -> None:
        """Remove the generated tokens from the cache."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self._context)


def load(model: Model, device: str, dtype: torch.dtype) -> Any:
    """A model with random weights of these shapes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads((model.path / "config.json").read_text())
    config = AutoConfig.for_model(**settings)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def measure(
    model: Model, scenarios: Sequence[Scenario], repeats: int, bandwidth_tb_s: float
) -> Iterator[DecodeRun]:
    """Measure models with random weights in bfloat16 on the first GPU.

    Raises RuntimeError for a model with real weights, and without a GPU.
    """
    if model.load != "random":
        raise RuntimeError(f"model {model.name}: the transformers peer measures random weights only")

    if not torch.cuda.is_available():
        raise RuntimeError("the transformers peer replays a CUDA graph: expected a GPU")

    import transformers

    peer = load(model, "cuda", torch.bfloat16)
    for scenario in scenarios:
        torch._dynamo.reset()
        yield DecodeRun.of_rounds(
            replay_seconds(peer, scenario, repeats),
            model.decode_bytes(scenario.batch, scenario.mean_context(), torch.bfloat16.itemsize),
            bandwidth_tb_s,
            engine="transformers",
            model=model.name,
            dtype="bfloat16",
            scenario=scenario,
            engine_version=transformers.__version__,
            settings="StaticCache, sdpa, torch.compile(fullgraph=True), CUDA graph of a step",
        )


def replay_seconds(peer: Any, scenario: Scenario, repeats: int) -> list[float]:
    """Seconds of a step between the shorter and the longer length, for each repeat."""
    short, long = LENGTHS
    decoding = Decoding(
        peer, scenario.batch, scenario.context, scenario.context + long + NUM_WARM_UPS, compiles=True
    )
    prompts = torch.tensor(scenario.prompts(peer.config.vocab_size), device="cuda")
    decoding.prefill(prompts)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UPS):
            decoding.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoding.step()

    taken = []
    for _ in range(NUM_WARM_UPS + repeats):
        decoding.rewind()
        for _ in range(short):
            graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(long - short):
            graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / (long - short))

    return taken[NUM_WARM_UPS:]
