"""Check the tokens that engines generate from a checkpoint against float32 logits of the same files.

    python -m perf.teacher_forced --model gpt-oss-20b --peer vllm --out teacher-forced.json
    python -m perf.teacher_forced --model tiny-experts --device cpu --prompts 2 --tokens 8

A checkpoint of random weights is written, with logits far enough apart. Each engine loads it, in bfloat16 on
a GPU, and continues random prompts greedily. The eager decoder then computes in float32, from the same files,
the logits before each of these tokens, given the tokens before it. A token is right if no logit is higher
than its own by more than what bfloat16 explains. Where a router's last chosen expert leads the next one by as
little, either choice is right; such rows are tied, and counted apart.

The exit status is 1 if a row that is not tied has a wrong token, or too many of the others do.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from msgspec import UNSET, UnsetType

from drift_sdk import Engine, EngineConfig, SamplingParams
from drift_sdk.loading.source import resolve
from drift_sdk.models import channels
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from perf.harness.byte_tokenizer import NUM_SPECIAL
from perf.harness.checkpoint import write_checkpoint
from perf.harness.numbers import at_least
from perf.harness.record import Run
from perf.harness.recording import Recording, dtype_name, free_memory, parser
from perf.harness.shapes import Model, prepare
from perf.harness.table import show, title_of
from perf.peers import vllm

__all__ = ["CheckedRun", "Reference", "checked", "main"]

HEAD_GAIN = 8.0
NUM_PROMPT_TOKENS = 192
"""More than a window of gpt-oss."""
SMALL_LEAD = 0.03
"""Lead of a router's logit, in standard deviations of a row's logits, below which a row is tied."""
TOLERANCE = 0.25
"""Of a token's logit below the highest, in standard deviations of the row's logits. Errors of bfloat16 grow
with the square root of the number of layers: 0.3% a layer gives 2% of a standard deviation after 48 parts."""
MAX_WRONG_TIED = 0.1
"""Share of tied rows that may have a wrong token: another expert changes a row by more than rounding does."""


class CheckedRun(Run, kw_only=True):
    """An engine's tokens against the reference.

    num_tokens: tokens that were checked; num_tied: of them, in tied rows. num_equal: tokens of the highest
    logit; num_wrong, num_wrong_tied: tokens below it by more than the tolerance, in rows that are not tied
    and in tied ones. largest_gap: in standard deviations of a row's logits, of rows that are not tied.
    load_s: seconds until the engine was ready.
    """

    num_tokens: int
    num_tied: int
    num_equal: int
    num_wrong: int
    num_wrong_tied: int
    largest_gap: float
    load_s: float | UnsetType = UNSET

    @property
    def is_good(self) -> bool:
        return not self.num_wrong and self.num_wrong_tied <= MAX_WRONG_TIED * self.num_tied


class Reference:
    """The eager decoder in float32, with the leads of its routers."""

    def __init__(self, folder: Path, model: Model, device: str) -> None:
        source = resolve(folder)
        self._decoder = Decoder.load(model.spec, source.tensors(), device=device, dtype=torch.float32)
        self._leads: list[torch.Tensor] = []

    def rows(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [len(answer), vocab] before each token of an answer, and the least lead of a router's last
        chosen expert in each of these rows, in standard deviations; infinite without experts."""
        decoder = self._decoder
        tokens = torch.tensor([*prompt, *answer[:-1]], device=decoder.device)
        cache = decoder.empty_kv_cache(1, len(tokens))
        self._leads.clear()
        with self._watched():
            hidden, _ = decoder.forward(
                tokens, AttentionBatch([SequenceRows([0], 0, len(tokens))], cache), cache
            )
        asked = slice(len(prompt) - 1, None)
        leads = torch.stack(self._leads).amin(dim=0) if self._leads else torch.full((len(tokens),), torch.inf)
        return decoder.logits(hidden[asked]), leads[asked]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        choose = channels.choose_experts

        def watched(
            logits: torch.Tensor, num_active: int, *, is_normalised: bool
        ) -> tuple[torch.Tensor, torch.Tensor]:
            ranked = logits.sort(dim=-1, descending=True).values
            if num_active < ranked.shape[1]:
                lead = ranked[:, num_active - 1] - ranked[:, num_active]
                self._leads.append(lead / logits.std(dim=-1))
            return choose(logits, num_active, is_normalised=is_normalised)

        with mock.patch.object(channels, "choose_experts", watched):
            yield


def checked(
    reference: Reference, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> dict[str, int | float]:
    """The fields of a CheckedRun that count tokens."""
    counts = dict.fromkeys(("num_tokens", "num_tied", "num_equal", "num_wrong", "num_wrong_tied"), 0)
    largest = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits, leads = reference.rows(prompt, answer)
        own = logits.gather(1, torch.tensor(answer, device=logits.device)[:, None])[:, 0]
        # A gap that is no number, of logits that are none or all alike, shows nothing: it is infinite.
        gaps = ((logits.amax(dim=1) - own) / logits.std(dim=1)).nan_to_num(nan=torch.inf).tolist()
        for gap, lead in zip(gaps, leads.tolist(), strict=True):
            is_tied = lead < SMALL_LEAD
            counts["num_tokens"] += 1
            counts["num_tied"] += is_tied
            counts["num_equal"] += gap == 0.0
            counts["num_wrong_tied" if is_tied else "num_wrong"] += gap > TOLERANCE
            largest = largest if is_tied else max(largest, gap)
    return {**counts, "largest_gap": largest}


async def own_answers(
    folder: Path, config: EngineConfig, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[list[tuple[int, ...]], float]:
    """The engine's greedy tokens, of all prompts together, and the seconds until it was ready."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    began_at = time.perf_counter()
    async with Engine(folder, config) as engine:
        load_s = time.perf_counter() - began_at
        streams = [engine.generate(prompt, params) for prompt in prompts]
        return [(await stream).token_ids for stream in streams], load_s


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--prompts", type=at_least(1), default=16)
    made.add_argument("--tokens", type=at_least(1), default=64, help="tokens that continue each prompt")
    made.add_argument("--peer", choices=("vllm",), help="an engine to check as well")
    made.set_defaults(model="gpt-oss-20b")
    given = made.parse_args(arguments)
    recording = Recording("teacher-forced", given.device, given.out)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder))
        if model.load != "random":
            made.error(f"--model {given.model}: expected one of published shapes: random weights are written")

        write_checkpoint(model, given.device, HEAD_GAIN)
        free_memory()
        numbers = random.Random(0)
        ids = range(NUM_SPECIAL, model.spec.vocab_size)
        prompts = [numbers.choices(ids, k=NUM_PROMPT_TOKENS) for _ in range(given.prompts)]
        length = NUM_PROMPT_TOKENS + given.tokens
        dtype = dtype_name(given.dtype, given.device)
        config = EngineConfig(
            device=given.device,
            dtype=given.dtype,
            executor=given.executor,
            max_model_len=length,
            max_num_seqs=given.prompts,
            kv_cache_tokens=given.prompts * (length + 64),
        )
        found, load_s = asyncio.run(own_answers(model.path, config, prompts, given.tokens))
        free_memory()
        answered = {"drift": [list(tokens) for tokens in found]}
        if given.peer:
            answered[given.peer] = vllm.answers(model.path, prompts, given.tokens)
        reference = Reference(model.path, model, given.device)
        runs = []
        for engine, answers in answered.items():
            run = CheckedRun(
                engine=engine,
                model=model.name,
                dtype=dtype,
                scenario="teacher-forced",
                batch=given.prompts,
                context=NUM_PROMPT_TOKENS,
                load_s=load_s if engine == "drift" else UNSET,
                **checked(reference, prompts, answers),  # type: ignore[arg-type]  # names of fields
            )
            runs.append(run)
            recording.add(run)

    columns = ("engine", "tokens", "of the highest logit", "tied", "wrong", "wrong, tied", "largest gap")
    show(
        title_of(recording.results),
        columns,
        [
            (
                run.engine,
                str(run.num_tokens),
                str(run.num_equal),
                str(run.num_tied),
                str(run.num_wrong),
                str(run.num_wrong_tied),
                f"{run.largest_gap:.3f}",
            )
            for run in runs
        ],
    )
    print(f"written to {recording.path}")
    if not all(run.is_good for run in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
