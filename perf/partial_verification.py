"""Measure verification over a part of the KV cache against verification over all of it, and plain decoding.

python -m perf.partial_verification --scenario single-16k single-32k single-64k --num-draft-tokens 3 5
python -m perf.partial_verification --model FOLDER --draft ngram --agreement 128 --text long.txt

Speed: with --acceptance-length, acceptance is simulated, the same for both kinds of verification. Without it,
it is that of the draft. Agreement: the share of the tokens emitted with partial verification that the model
chooses over all keys and values in the same context, and the tokens before the first other one. It needs real
acceptance, so it is measured by an engine of its own. Random weights attend to everything alike, so that they
agree less than those of a trained model.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from drift_sdk import Chain, ConfigError, Engine, EngineConfig, NGram, PartialVerification, SamplingParams
from drift_sdk.measurement import RecordedEngine, recorded_engine
from perf.harness.decoding import DecodeOptions
from perf.harness.drafting import Drafting
from perf.harness.numbers import at_least, over_zero
from perf.harness.record import DecodeRun, Run
from perf.harness.recording import Recording, free_memory, parser
from perf.harness.rounds import Rounds, batch_config, measure_rounds
from perf.harness.scenario import Scenario
from perf.harness.shapes import Draft, MaskDraft, Model, prepare, prepare_drafts
from perf.harness.simulation import simulated_engine
from perf.harness.startup_process import gpu_memory_gib
from perf.harness.table import show, title_of
from perf.speculative import read_text

__all__ = ["Measuring", "PartialRun", "agreement_of", "arguments_of", "main"]

LENGTHS = (8, 136)
"""Tokens of the two generations whose difference gives the decode rate."""
PARTIAL = PartialVerification()


class PartialRun(DecodeRun, kw_only=True):
    """Decoding without drafts, with drafts verified over all keys and values, or over a part of them.

    verification:   "none" without drafts, "whole" or "partial".
    num_partial_rounds, num_refresh_rounds: rounds over a part, and refreshes, warm-ups included.
    speedup:        over plain decoding in the same run. whole_speedup: over verification of the same drafts
                    over all keys and values.
    gpu_memory_gib: memory in use on the GPU afterwards, of all processes.
    """

    verification: str
    measured_acceptance_length: float | UnsetType = UNSET
    num_partial_rounds: int | UnsetType = UNSET
    num_refresh_rounds: int | UnsetType = UNSET
    speedup: float | None = None
    whole_speedup: float | None = None
    gpu_memory_gib: float | None = None
    draft: str | None = None


class AgreementRun(Run, kw_only=True):
    """Tokens emitted with partial verification.

    agreement:  share of tokens that the model chooses over all keys and values in the same context.
    num_equal:  tokens before the first other one, of each sequence.
    num_tokens: of each sequence.
    """

    verification: str
    config: str
    agreement: float
    num_equal: tuple[int, ...]
    num_tokens: int
    draft: str | None = None


class Measuring:
    """Measurements of a model with a draft. Each engine measures all scenarios: a simulation emits its tokens
    whatever a request limits its drafts to, so that each number of drafts has engines of its own."""

    def __init__(
        self, given: argparse.Namespace, model: Model, drafting: Drafting, recording: Recording
    ) -> None:
        """drafting: of the most drafts."""
        self._given, self._model, self._drafting, self._recording = given, model, drafting, recording
        self._options = DecodeOptions(
            device=given.device,
            dtype=given.dtype,
            executor=given.executor,
            repeats=given.repeats,
            lengths=LENGTHS,
            text=read_text(model, given.text),
        )
        self._rates: dict[tuple[str, int, str], float] = {}

    async def speed(self) -> None:
        """Measure all kinds of verification."""
        for number in (0, *self._given.num_draft_tokens):
            for verification in ("whole", "partial") if number else ("none",):
                config = self.config(number, self._given.partial if verification == "partial" else None)
                async with self._engine(config) as engine:
                    for scenario in self._given.scenario:
                        await self._measure(engine, scenario, number, verification)
                free_memory()

    async def agreement(self) -> None:
        """Compare the tokens of partial verification with the model's own choices."""
        config = self.config(max(self._given.num_draft_tokens), self._given.partial)
        async with Engine(self._model.path, config) as engine:
            for scenario in self._given.scenario:
                prompts = self._options.prompts(scenario, self._model.spec.vocab_size)
                for number in self._given.num_draft_tokens:
                    found = [
                        await agreement_of(engine, prompt, number, self._given.agreement)
                        for prompt in prompts
                    ]
                    shares, equal = zip(*found, strict=True)
                    self._recording.add(
                        AgreementRun(
                            **self._fields(scenario, number, "partial"),
                            acceptance="real",
                            config=f"agreement{self._sizes}",
                            agreement=sum(shares) / len(shares),
                            num_equal=equal,
                            num_tokens=self._given.agreement,
                        )
                    )
        free_memory()

    def config(self, number: int, partial: PartialVerification | None) -> EngineConfig:
        """The configuration of an engine that drafts `number` tokens a round."""
        options = self._options
        if self._given.agreement:
            options = replace(options, lengths=(1, max(LENGTHS[1], self._given.agreement + 2)))
        plain = batch_config(self._model, self._given.scenario, options)
        if not number:
            return plain

        config = replace(self._drafting, num_draft_tokens=number).config(plain)
        assert config.speculation is not None
        return config.replace(speculation=replace(config.speculation, partial_verification=partial))

    @property
    def _sizes(self) -> str:
        """The settings of partial verification, as part of what identifies a run."""
        partial: PartialVerification = self._given.partial
        return "".join(f", {name}={getattr(partial, name)}" for name in partial.__struct_fields__)

    def _engine(self, config: EngineConfig) -> RecordedEngine:
        length = self._given.acceptance_length
        if length is None or config.speculation is None:
            return recorded_engine(self._model.path, config)

        return simulated_engine(self._model.path, config, acceptance=length)

    async def _measure(
        self, engine: RecordedEngine, scenario: Scenario, number: int, verification: str
    ) -> None:
        before = engine.stats()
        rounds = await measure_rounds(engine, scenario, self._model.spec.vocab_size, self._options)
        after = engine.stats()
        rate = self._rates[scenario.name, number, verification] = rounds.tokens_per_s(scenario.batch)
        run = self._run(scenario, number, verification, rounds)
        run.gpu_memory_gib = gpu_memory_gib(self._given.device)
        if number:
            run.measured_acceptance_length = rounds.acceptance_length
            run.speedup = rate / self._rates[scenario.name, 0, "none"]
        if verification == "partial":
            run.whole_speedup = rate / self._rates[scenario.name, number, "whole"]
            run.num_partial_rounds = after.num_partial_rounds - before.num_partial_rounds
            run.num_refresh_rounds = after.num_refresh_rounds - before.num_refresh_rounds
        self._recording.add(run)

    def _run(self, scenario: Scenario, number: int, verification: str, rounds: Rounds) -> PartialRun:
        options, fields = self._options, self._fields(scenario, number, verification)
        if number:
            fields["acceptance"] = self._drafting.acceptance
            fields["acceptance_length"] = self._given.acceptance_length
        for name in ("scenario", "batch", "context"):
            del fields[name]
        context = scenario.mean_context(options.lengths)
        return PartialRun.of_rounds(
            rounds.step_seconds,
            self._model.decode_bytes(scenario.batch, context, options.itemsize, None),
            self._recording.bandwidth_tb_s,
            tokens_per_round=rounds.tokens_per_step,
            scenario=scenario,
            config=f"verification {verification}{self._sizes if verification == 'partial' else ''}",
            **fields,
        )

    def _fields(self, scenario: Scenario, number: int, verification: str) -> dict[str, Any]:
        return {
            "engine": "drift",
            "model": self._model.name,
            "dtype": self._model.dtype_name or self._options.dtype_name,
            "scenario": scenario.name,
            "batch": scenario.batch,
            "context": scenario.context,
            "num_draft_tokens": number,
            "verification": verification,
            "draft": self._drafting.name if number else None,
        }


async def agreement_of(
    engine: Engine, prompt: Sequence[int], num_draft_tokens: int, num_tokens: int
) -> tuple[float, int]:
    """The share of greedy tokens after a prompt that are the model's choice over all keys and values in the
    same context, and how many there are before the first other one."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, num_draft_tokens=num_draft_tokens)
    completion = await engine.generate(prompt, params)
    answer = completion.token_ids
    # A prompt, and a request without drafts, is computed over all keys and values.
    scored = SamplingParams(max_tokens=1, prompt_logprobs=1, num_draft_tokens=0)
    checked = await engine.generate([*prompt, *answer], scored)
    assert checked.prompt_logprobs is not None
    entries = checked.prompt_logprobs[len(prompt) :]
    is_equal = [
        entry is not None and entry.logprob >= entry.top[0][1]
        for entry, _ in zip(entries, answer, strict=True)
    ]
    return sum(is_equal) / len(is_equal), [*is_equal, False].index(False)


def table(results: Sequence[dict[str, object]]) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows of the runs."""
    columns = ("scenario", "drafts", "verification", "tokens/s", "x plain", "x whole", "agreement", "GiB")

    def text(value: object) -> str:
        return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    names = ("tokens_per_s", "speedup", "whole_speedup", "agreement", "gpu_memory_gib")
    rows = [
        [
            str(run["scenario"]),
            str(run["num_draft_tokens"]),
            str(run["verification"]),
            *(text(run.get(name)) for name in names),
        ]
        for run in results
    ]
    return columns, rows


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options, with the settings as `partial`. Exits with an error if they do not fit
    together."""
    made = parser(__doc__)
    made.add_argument("--draft", help="a head, a model or ngram; default: a head with random weights")
    made.add_argument("--num-draft-tokens", type=at_least(1), nargs="+", default=[3, 5])
    made.add_argument(
        "--scenario",
        type=Scenario.parse,
        nargs="+",
        default=[Scenario.parse(f"single-{size}k") for size in (16, 32, 64)],
    )
    made.add_argument("--acceptance-length", type=over_zero, help="tokens a round to simulate")
    made.add_argument(
        "--agreement", type=at_least(0), default=0, help="tokens of which agreement is measured"
    )
    made.add_argument("--no-speed", action="store_true", help="measure agreement alone")
    made.add_argument("--text", type=Path, help="file to take prompts from; default: random tokens")
    for name in PartialVerification.__struct_fields__:
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(PARTIAL, name))
    given = made.parse_args(arguments)
    least, most = min(given.num_draft_tokens), max(given.num_draft_tokens)
    try:
        Chain(most)
        sizes = {name: getattr(given, name) for name in PartialVerification.__struct_fields__}
        given.partial = PartialVerification(**sizes)
    except ConfigError as error:
        made.error(str(error))
    if given.refresh_tokens <= most:
        made.error(f"--refresh-tokens {given.refresh_tokens}: expected more than {most} drafts")

    if given.acceptance_length is not None:
        if not 1 <= given.acceptance_length <= least + 1:
            made.error(f"--acceptance-length {given.acceptance_length}: expected 1 to {least + 1}")
        if given.executor == "auto":
            given.executor = "graph"
        if given.executor != "graph" or not given.device.startswith("cuda"):
            made.error("simulated acceptance needs the graph executor on a GPU")
    if given.no_speed and not given.agreement:
        made.error("--agreement 0: expected 1 or more with --no-speed")

    return given


def main(arguments: Sequence[str] | None = None) -> None:
    given = arguments_of(arguments)
    recording = Recording("partial-verification", given.device, given.out)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder) / Path(given.model).name, None, None)
        draft: Draft | MaskDraft | Model | NGram = prepare_drafts(model, given.draft, None, None)
        drafting = Drafting(
            draft=draft,
            num_draft_tokens=max(given.num_draft_tokens),
            acceptance_length=given.acceptance_length,
        )
        measuring = Measuring(given, model, drafting, recording)
        if not given.no_speed:
            asyncio.run(measuring.speed())
        if given.agreement:
            asyncio.run(measuring.agreement())
    columns, rows = table(recording.results.runs)
    show(title_of(recording.results), columns, rows)
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
