"""Tokens of mixed requests that change with the conditions they are generated under, counted in every mode.

    python -m perf.exact_tokens --out exact-tokens.json
    python -m perf.exact_tokens --model tiny --requests 6 --longest-prompt 40 --out report.json  # on a CPU

Requests are greedy and seeded, plain and with penalties, of many lengths, some with common beginnings. Each
is generated alone first. Then all run together in each mode, and every token is compared with the one
generated alone. No token may differ. The crowd runs once more with `fast_prompts`, beside requests alone with
it: there tokens have to differ, or the requests could not tell. A mode that did not exercise its subject (no
prefix hit, no preemption, no draft accepted or none rejected) is reported as such. The exit status is 1 if a
mode of the graph executor has a difference, or if a mode did not exercise its subject.

Random weights make all tokens nearly equally likely, so the smallest change of a bit shows soon; seeded
requests sample at low temperatures, which amplify their logits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import anyio
import msgspec
from msgspec import Struct

from drift_sdk import Chain, Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation
from drift_sdk._kernels.gemm import tuning
from perf.harness import machine
from perf.harness.byte_tokenizer import NUM_SPECIAL
from perf.harness.numbers import at_least
from perf.harness.oracle import KnownAnswers, oracle_drafts
from perf.harness.shapes import Model, prepare, prepare_draft

__all__ = ["Conditions", "Mode", "ModeResult", "Report", "main", "make_cases", "modes_of"]

Case = tuple[list[int], SamplingParams]
Subject = Literal[
    "num_cached_tokens",
    "num_checkpoint_hits",
    "num_preemptions",
    "num_accepted_tokens",
    "num_rejected_tokens",
    "num_cancelled",
]
DRAFTS: tuple[Subject, ...] = ("num_accepted_tokens", "num_rejected_tokens", "num_cached_tokens")
NUM_PROMPT_TOKENS = (1, 5, 17, 64, 65, 130, 250, 400, 700)
NUM_TOKENS = (8, 24, 40)
SHARED_TOKENS = 192
"""Tokens of a common beginning: three blocks of 64."""
BLOCK_SIZE = 64
NUM_DRAFTS = 3
DRAFT_VOCAB_SIZE = 8
"""Tokens that the EAGLE-3 head proposes. Some requests favour most of them, so that random drafts are right
at times."""
CANCELLED_AFTER = 3
"""Chunks after which a request is cancelled that is there to be cancelled."""


class Mode(Struct, frozen=True, kw_only=True):
    """Conditions under which all requests run together.

    fields:     of EngineConfig. is_untuned: without a tuned table.
    subjects:   counts of a ModeResult that must not be 0 afterwards.
    repeats:    how often all requests run; from the second time on, prompts are in the prefix cache.
    is_crowded: whether further requests run beside them and are cancelled.
    has_oracle: whether drafts come from the answers, see perf.harness.oracle.
    """

    name: str
    fields: dict[str, Any]
    subjects: tuple[Subject, ...] = ()
    repeats: int = 1
    is_crowded: bool = False
    is_untuned: bool = False
    has_oracle: bool = False


class ModeResult(Struct, frozen=True, kw_only=True):
    """The differences of a mode from requests alone, and what the engine counted.

    is_exact:      False with `fast_prompts`. num_distinct: different answers among the requests alone.
    num_different: tokens that differ; num_different_requests: requests with such a token.
    not_exercised: subjects of the mode that did not occur.
    """

    mode: str
    is_exact: bool
    num_requests: int
    num_distinct: int
    num_tokens: int
    num_different: int
    num_different_requests: int
    seconds: float
    num_cached_tokens: int
    num_checkpoint_hits: int = 0
    num_preemptions: int
    num_accepted_tokens: int
    num_rejected_tokens: int
    num_cancelled: int
    not_exercised: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        return not self.not_exercised and self.is_exact == (self.num_different == 0)


class Report(Struct, frozen=True, kw_only=True):
    """All modes of a run."""

    machine: str
    commit: str
    versions: dict[str, str]
    model: str
    dtype: str
    results: list[ModeResult]


class Conditions(Struct, frozen=True, kw_only=True):
    """The model, and what the engines of all modes have in common."""

    model: Model
    fields: dict[str, Any]

    def engine(self, changes: dict[str, Any]) -> Engine:
        return Engine(self.model.path, EngineConfig(**(self.fields | changes)))


def make_cases(num_requests: int, vocab_size: int, longest_prompt: int, seed: int) -> list[Case]:
    """Requests of all kinds. A third of the prompts begin with one of three common beginnings."""
    rng = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(NUM_SPECIAL, vocab_size) for _ in range(number)]

    beginnings = [tokens(min(SHARED_TOKENS, longest_prompt)) for _ in range(3)]
    lengths = [number for number in NUM_PROMPT_TOKENS if number <= longest_prompt]
    favoured = dict.fromkeys((index * vocab_size // DRAFT_VOCAB_SIZE for index in range(1, 7)), 12.0)
    cases = []
    for index in range(num_requests):
        prompt = tokens(rng.choice(lengths))
        if index % 3 == 0:
            prompt = rng.choice(beginnings) + prompt
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 0.25, "top_p": 0.9},
            {"logit_bias": favoured},  # few likely tokens: some drafts are right
            {"temperature": 0.3, "top_k": 40, "min_p": 0.02},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.4},
            {"temperature": 0.2, "logit_bias": favoured},
        ]
        params = SamplingParams(
            max_tokens=rng.choice(NUM_TOKENS),
            ignore_eos=True,
            seed=rng.randrange(2**63),
            **kinds[index % len(kinds)],
        )
        cases.append((prompt, params))
    return cases


def modes_of(draft: Path | str, small_cache: int) -> list[Mode]:
    """The modes.

    draft: folder of an EAGLE-3 head. small_cache: tokens of a KV cache that is too small for eight requests.
    """

    def drafted(drafts: NGram | Path | str) -> dict[str, Any]:
        return {"speculation": Speculation(draft=drafts, shape=Chain(NUM_DRAFTS), adaptive=False)}

    small = {"kv_cache_tokens": small_cache, "max_num_seqs": 8}

    return [
        Mode(
            name="crowd",
            fields={},
            subjects=("num_cached_tokens", "num_cancelled"),
            repeats=2,
            is_crowded=True,
        ),
        *(Mode(name=f"budget {size}", fields={"prefill_token_budget": size}) for size in (256, 1024, 8192)),
        Mode(name="preemption", fields=small, subjects=("num_preemptions",)),
        Mode(name="n-gram drafts", fields=drafted(NGram(min_length=1)), subjects=DRAFTS, repeats=2),
        Mode(name="EAGLE-3 drafts", fields=drafted(draft), subjects=DRAFTS, repeats=2),
        Mode(name="oracle drafts", fields=drafted(NGram()), subjects=DRAFTS, repeats=2, has_oracle=True),
        *(
            Mode(
                name=f"{name} drafts, crowd, preemption, budget 256",
                fields=drafted(drafts) | small | {"prefill_token_budget": 256},
                subjects=(*DRAFTS, "num_preemptions", "num_cancelled"),
                repeats=2,
                is_crowded=True,
                has_oracle=name == "oracle",
            )
            for name, drafts in (("oracle", NGram()), ("EAGLE-3", draft))
        ),
        Mode(name="untuned", fields={"tuning": "off"}, is_untuned=True),
        Mode(name="tuned shortly", fields={"tuning": "short"}, is_untuned=True),
    ]


async def alone(conditions: Conditions, cases: Sequence[Case], is_exact: bool) -> list[tuple[int, ...]]:
    """The tokens of each request when it runs alone."""
    async with conditions.engine({"max_num_seqs": 1, "fast_prompts": not is_exact}) as engine:
        return [(await engine.generate(*case)).token_ids for case in cases]


async def run_mode(
    conditions: Conditions,
    mode: Mode,
    cases: Sequence[Case],
    expected: Sequence[tuple[int, ...]],
    is_exact: bool,
) -> ModeResult:
    """Run all requests together in a mode and compare them with those alone."""
    started_at = time.perf_counter()
    with ExitStack() as stack:
        if mode.is_untuned:
            stack.enter_context(untuned())
        if mode.has_oracle:
            stack.enter_context(oracle_drafts(known_answers(conditions.model, cases, expected)))
        async with conditions.engine(mode.fields | {"fast_prompts": not is_exact}) as engine:
            found: list[tuple[int, ...]] = []
            for _ in range(mode.repeats):
                found += await together(engine, cases, cases[::4] if mode.is_crowded else ())
            stats = engine.stats()
    wanted = [*expected] * mode.repeats
    differences = [different(one, other) for one, other in zip(found, wanted, strict=True)]
    counts: dict[Subject, int] = {
        "num_cached_tokens": stats.num_cached_tokens,
        "num_checkpoint_hits": stats.num_checkpoint_hits,
        "num_preemptions": stats.num_preemptions,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_rejected_tokens": stats.num_drafted_tokens - stats.num_accepted_tokens,
        "num_cancelled": stats.num_cancelled,
    }
    subjects = mode.subjects
    if conditions.model.spec.recurrent_layers and "num_cached_tokens" in subjects:
        subjects = (*subjects, "num_checkpoint_hits")
    return ModeResult(
        mode=mode.name,
        is_exact=is_exact,
        num_requests=len(found),
        num_distinct=len(set(expected)),
        num_tokens=sum(map(len, wanted)),
        num_different=sum(differences),
        num_different_requests=sum(number > 0 for number in differences),
        seconds=round(time.perf_counter() - started_at, 2),
        not_exercised=tuple(name for name in subjects if not counts[name]),
        **counts,
    )


def known_answers(model: Model, cases: Sequence[Case], answers: Sequence[tuple[int, ...]]) -> KnownAnswers:
    """The tokens of the requests and of their answers."""
    sequences = {}
    for (prompt, params), answer in zip(cases, answers, strict=True):
        assert params.seed is not None
        sequences[params.seed] = [*prompt, *answer]
    return KnownAnswers(sequences, model.spec.vocab_size)


async def together(engine: Engine, cases: Sequence[Case], cancelled: Sequence[Case]) -> list[tuple[int, ...]]:
    """Submit all requests at once, with others between them that are cancelled; return the tokens."""
    found: dict[int, Completion] = {}

    async def complete(index: int, case: Case) -> None:
        found[index] = await engine.generate(*case)

    async def cancel(case: Case) -> None:
        prompt, params = case
        num_chunks = 0
        async with engine.generate(prompt[::-1], params) as stream:
            async for _ in stream:
                num_chunks += 1
                if num_chunks == CANCELLED_AFTER:
                    return

    async with anyio.create_task_group() as tasks:
        for index, case in enumerate(cases):
            tasks.start_soon(complete, index, case)
            if index < len(cancelled):
                tasks.start_soon(cancel, cancelled[index])
    return [found[index].token_ids for index in range(len(cases))]


def small_draft(model: Model) -> Path | str:
    """The folder of an EAGLE-3 head with random weights that proposes few tokens."""
    path = Path(prepare_draft(model).path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"draft_vocab_size": DRAFT_VOCAB_SIZE}))
    return path


def different(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of places at which two sequences of tokens differ, missing tokens included."""
    pairs = zip(one, other, strict=False)
    return sum(a != b for a, b in pairs) + abs(len(one) - len(other))


@contextmanager
def untuned() -> Iterator[None]:
    """Engines that start inside have no tuned table, and keep what they measure in a folder of their own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(tuning, "table_for", lambda gpu: tuning.TunedTable()),
        mock.patch.dict(os.environ, XDG_CACHE_HOME=folder),
    ):
        yield


async def run(conditions: Conditions, modes: Sequence[Mode], cases: Sequence[Case]) -> Report:
    """Run all modes, printing a line for each."""
    results = []
    for is_exact in (True, False) if conditions.fields["executor"] == "graph" else (True,):
        expected = await alone(conditions, cases, is_exact)
        for mode in modes if is_exact else modes[:1]:
            result = await run_mode(conditions, mode, cases, expected, is_exact)
            results.append(result)
            print(line_of(result), flush=True)
    config = EngineConfig(**conditions.fields)
    return Report(
        machine=machine.gpu_name(config.device),
        commit=machine.commit(),
        versions=machine.versions(),
        model=conditions.model.name,
        dtype=config.dtype,
        results=results,
    )


def line_of(result: ModeResult) -> str:
    prompts = "exact" if result.is_exact else "fast"
    counts = f"{result.num_different} of {result.num_tokens} tokens differ"
    missing = f"; not exercised: {', '.join(result.not_exercised)}" if result.not_exercised else ""
    return f"{prompts} prompts, {result.mode}: {counts} ({result.num_different_requests} requests){missing}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-shapes", help="a model of perf.harness.shapes")
    parser.add_argument("--requests", type=at_least(1), default=200)
    parser.add_argument(
        "--longest-prompt", type=at_least(1), default=max(NUM_PROMPT_TOKENS), help="in tokens"
    )
    parser.add_argument("--device", default=machine.default_device())
    parser.add_argument("--modes", nargs="+", help="names of modes, default all")
    parser.add_argument("--out", type=Path, required=True, help="the report, as JSON")
    options = parser.parse_args(arguments)
    is_gpu = options.device.startswith("cuda")
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(options.model, Path(folder) / "target")
        shared = min(SHARED_TOKENS, options.longest_prompt)
        max_model_len = -(-(shared + options.longest_prompt + max(NUM_TOKENS)) // BLOCK_SIZE) * BLOCK_SIZE
        modes = modes_of(small_draft(model), small_cache=2 * max_model_len)
        names = [mode.name for mode in modes]
        if unknown := set(options.modes or ()).difference(names):
            parser.error(f"--modes: {', '.join(sorted(unknown))}: expected {', '.join(names)}")

        conditions = Conditions(
            model=model,
            fields={
                "device": options.device,
                "dtype": "bfloat16" if is_gpu else "float32",
                "executor": "graph" if is_gpu else "eager",
                "load": model.load,
                "max_num_seqs": 64,
                "max_model_len": max_model_len,
                "kv_cache_tokens": 128 * max_model_len,
            },
        )
        cases = make_cases(options.requests, model.spec.vocab_size, options.longest_prompt, seed=1)
        chosen = [mode for mode in modes if not options.modes or mode.name in options.modes]
        report = anyio.run(run, conditions, chosen, cases)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    is_promised = is_gpu  # the eager executor promises no equal bits
    return int(is_promised and not all(result.is_good for result in report.results))


if __name__ == "__main__":
    sys.exit(main())
