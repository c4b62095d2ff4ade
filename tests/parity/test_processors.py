"""Logits rules against transformers' logits processors, alone and in the whole engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from model_zoo import logprob_bound, make_model
from near_ties import no_near_ties
from placement import engine_config
from slow_cases import slow_after
from tolerances import assert_near
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from drift_sdk import Completion, Engine, SamplingParams
from drift_sdk.execution.eager import eager_executor as eager
from drift_sdk.execution.eager.sampling import LogitsProcessors, apply_processors
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.steps import SlotAssignment, SlotSampling

VOCAB_SIZE = 500
CPU = torch.device("cpu")
NUM_TOKENS = 40
NUM_REQUESTS = 17
MODEL = 0  # index in the zoo; its bound on log-probabilities also holds for models 3 and 4


class Bits:
    """A constraint that always allows the same tokens."""

    is_slow = False

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._words = np.zeros((1, -(-vocab_size // 32)), dtype=np.uint32)
        for token_id in token_ids:
            self._words[0, token_id // 32] |= np.uint32(1 << (token_id % 32))

    def masks(self, draft_token_ids: Sequence[int]) -> Any:
        assert len(draft_token_ids) == 0
        return self._words.view(np.int32)

    def mask_ahead(self) -> Any:
        return self._words.view(np.int32)[0]


def sampling_of(**rules: Any) -> SlotSampling:
    given = {"stop_token_ids": (), "num_prompt_tokens": 1, "max_length": 1000, **rules}
    return SlotSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, **given)


def random_case(rng: random.Random, vocab_size: int) -> tuple[SlotSampling, list[int]]:
    """Sampling parameters with some of the rules, and the tokens of a sequence."""

    def some_ids(most: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(vocab_size), rng.randint(1, min(most, vocab_size))))

    num_prompt_tokens = rng.randint(1, 30)
    tokens = [rng.randrange(vocab_size) for _ in range(num_prompt_tokens + rng.randint(0, 30))]
    rules: dict[str, Any] = {}
    if rng.random() < 0.6:
        rules["repetition_penalty"] = rng.choice([0.01, 0.5, 1.1, 1.7, 2.0])
    if rng.random() < 0.6:
        rules["logit_bias"] = tuple(sorted((token_id, rng.uniform(-100, 100)) for token_id in some_ids(40)))
    if rng.random() < 0.6:
        rules["min_length"] = num_prompt_tokens + rng.randint(1, 40)
    if rng.random() < 0.4:
        rules["allowed_token_ids"] = some_ids(vocab_size)
    stops = some_ids(5) if rng.random() < 0.8 else ()
    return sampling_of(stop_token_ids=stops, num_prompt_tokens=num_prompt_tokens, **rules), tokens


def rules_of(
    sampling: SlotSampling, tokens: list[int], rng: random.Random, **more: Any
) -> LogitsProcessors | None:
    """The rules of a slot as an executor creates them: some tokens are cached, the rest is counted in
    chunks."""
    num_cached = rng.randrange(len(tokens)) if sampling.has_penalties else 0
    cached = tuple(tokens[:num_cached])
    assignment = SlotAssignment(slot=0, sampling=sampling, cached_token_ids=cached, **more)
    rules = LogitsProcessors.of(assignment, VOCAB_SIZE, CPU)
    while rules is not None and num_cached < len(tokens):
        end = min(len(tokens), num_cached + rng.randint(1, 20))
        rules.count(tokens[num_cached:end], num_cached)
        num_cached = end
    return rules


def transformers_scores(logits: torch.Tensor, sampling: SlotSampling, tokens: list[int]) -> torch.Tensor:
    """logits [1, V] after transformers' own processors, in the order of its `generate`."""
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(i,): b for i, b in sampling.logit_bias}))
    processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    min_new_tokens = sampling.min_length - sampling.num_prompt_tokens
    if sampling.stop_token_ids and min_new_tokens > 0:
        stops = list(sampling.stop_token_ids)
        processors.append(
            MinNewTokensLengthLogitsProcessor(sampling.num_prompt_tokens, min_new_tokens, stops)
        )
    if sampling.allowed_token_ids is not None:
        allowed = list(sampling.allowed_token_ids)
        processors.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1))
    return processors(torch.tensor([tokens]), logits)


def test_rules_equal_transformers_processors() -> None:
    rng = random.Random(5)
    torch.manual_seed(5)
    seen = set()
    for _ in range(60):
        cases = [random_case(rng, VOCAB_SIZE) for _ in range(8)]
        logits = torch.randn(len(cases), VOCAB_SIZE) * 6
        untouched = logits.clone()
        rules = [rules_of(*case, rng) for case in cases]
        found = apply_processors(logits, rules, [len(tokens) for _, tokens in cases])
        assert torch.equal(logits, untouched)
        for row, (sampling, tokens) in enumerate(cases):
            expected = transformers_scores(logits[row : row + 1], sampling, tokens)[0]
            if set(sampling.allowed_token_ids or (-1,)) <= set(sampling.stop_token_ids):
                continue  # min_length forbids all allowed tokens: see below

            assert torch.equal(found[row], expected), sampling
            seen.add((rules[row] is None, len(tokens) < sampling.min_length, sampling.has_penalties))
    assert len(seen) >= 5


def test_count_penalties_follow_the_formula() -> None:
    """Presence and frequency penalties, which transformers does not have. They count the output alone."""
    rng = random.Random(6)
    for _ in range(30):
        sampling, tokens = random_case(rng, VOCAB_SIZE)
        presence, frequency = rng.uniform(-2, 2), rng.uniform(-2, 2)
        sampling = sampling_of(
            num_prompt_tokens=sampling.num_prompt_tokens,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        tokens += rng.choices(tokens, k=20)
        logits = torch.randn(1, VOCAB_SIZE)
        found = apply_processors(logits, [rules_of(sampling, tokens, rng)], [len(tokens)])[0]
        output = tokens[sampling.num_prompt_tokens :]
        expected = torch.tensor(
            [-frequency * output.count(i) - presence * (i in output) for i in range(VOCAB_SIZE)]
        )
        assert_near(found - logits[0], expected, inner=1, depth=2)


def test_rows_without_rules_are_returned_as_they_are() -> None:
    logits = torch.randn(3, VOCAB_SIZE)
    assert apply_processors(logits, [None, None, None], [1, 2, 3]) is logits


def test_allowed_tokens_when_rules_contradict() -> None:
    """Allowed ids take precedence over the ban of stop ids, and a constraint over all rules."""
    rng = random.Random(7)
    for _ in range(200):
        sampling, tokens = random_case(rng, VOCAB_SIZE)
        constrained = tuple(rng.sample(range(VOCAB_SIZE), rng.choice([1, 2, 30, 400])))
        constraint = Bits(constrained, VOCAB_SIZE) if rng.random() < 0.6 else None
        if rng.random() < 0.3 and sampling.stop_token_ids:
            constrained = sampling.stop_token_ids
            constraint = Bits(constrained, VOCAB_SIZE)
        rules = rules_of(sampling, tokens, rng, constraint=constraint)
        found = apply_processors(torch.randn(1, VOCAB_SIZE), [rules], [len(tokens)])[0]

        allowed = set(sampling.allowed_token_ids or range(VOCAB_SIZE))
        kept = allowed - set(sampling.stop_token_ids if len(tokens) < sampling.min_length else ())
        if constraint is not None:
            kept &= set(constrained)
        if not kept:
            kept = allowed if constraint is None else set(constrained)
        assert set(found.isfinite().nonzero().flatten().tolist()) == kept


def test_stop_ids_are_kept_if_no_other_token_exists() -> None:
    sampling = sampling_of(stop_token_ids=(0, 1, 2, 3), min_length=5)
    rules = LogitsProcessors.of(SlotAssignment(slot=0, sampling=sampling), 4, CPU)
    logits = torch.randn(1, 4)
    assert torch.equal(apply_processors(logits, [rules], [2]), logits)


@torch.inference_mode()
def generated_by_transformers(model: Any, prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy tokens of transformers' `generate` with the rules of `params`."""
    arguments: dict[str, Any] = {}
    if params.logit_bias:
        arguments["sequence_bias"] = {(i,): bias for i, bias in params.logit_bias.items()}
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        arguments["prefix_allowed_tokens_fn"] = lambda *_: allowed
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=2,
        **arguments,
    )
    return output[0, len(prompt) :].tolist()


def logits_after(model: Any, prompt: list[int], output: Sequence[int]) -> torch.Tensor:
    """Logits [len(output), V] of transformers after the prompt and all output tokens but the last."""
    ids = torch.tensor([[*prompt, *output[:-1]]])
    return model(ids, logits_to_keep=len(output)).logits[0].float()


@torch.inference_mode()
def choices_of_transformers(
    model: Any, prompt: list[int], output: Sequence[int], params: SamplingParams
) -> list[int]:
    """Greedy choices of transformers with the rules of `params`, after the prompt and each output token: the
    output itself, if that is what `generate` returns."""
    sampling = sampling_of(
        num_prompt_tokens=len(prompt),
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple(params.logit_bias.items()),
        min_length=len(prompt) + params.min_tokens,
        allowed_token_ids=params.allowed_token_ids,
        stop_token_ids=params.stop_token_ids,
    )
    return [
        int(transformers_scores(row[None], sampling, [*prompt, *output[:index]]).argmax())
        for index, row in enumerate(logits_after(model, prompt, output))
    ]


def rule_combinations(
    rng: random.Random, plain_tokens: Sequence[int], vocab_size: int
) -> list[dict[str, Any]]:
    """Fields of SamplingParams, each set of which changes the greedy output `plain_tokens`."""
    stops = tuple(dict.fromkeys(plain_tokens[2:9]))[:4]
    bias = {i: rng.uniform(-3, 3) for i in rng.sample(range(vocab_size), 60)}
    bias |= {plain_tokens[3]: -100.0}
    allowed = tuple(rng.sample(range(vocab_size), 100))
    return [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.8, "logit_bias": bias},
        {"logit_bias": bias},
        {"min_tokens": 12, "stop_token_ids": stops},
        {"min_tokens": 12, "stop_token_ids": stops, "allowed_token_ids": stops + allowed},
        {"allowed_token_ids": allowed, "repetition_penalty": 2.0},
        {
            "repetition_penalty": 1.2,
            "min_tokens": 25,
            "stop_token_ids": stops,
            "logit_bias": bias,
            "allowed_token_ids": stops + allowed,
        },
    ]


@pytest.mark.parametrize("index", slow_after(1, [0, 20, 4, 14]))
def test_greedy_tokens_equal_transformers(index: int, tmp_path: Path) -> None:
    """Those of `generate` itself, which takes longer, for one prompt of model 4."""
    model = make_model(index, tmp_path)
    vocab_size = model.config.vocab_size
    rng = random.Random(index)
    prompts = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in (1, 9, 30, 70)]
    config = engine_config(prefill_token_budget=16, block_size=8, max_model_len=256)

    async def main() -> None:
        async with Engine(tmp_path, config) as engine:
            for prompt in prompts:
                plain = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
                plain_tokens = (await engine.generate(prompt, plain)).token_ids
                params = [
                    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, **fields)
                    for fields in rule_combinations(rng, plain_tokens, vocab_size)
                ]
                streams = [engine.generate(prompt, each) for each in params]
                for stream, each in zip(streams, params, strict=True):
                    found = await stream
                    tokens = list(found.token_ids)
                    assert tokens == choices_of_transformers(model, prompt, tokens, each), each
                    assert len(tokens) == NUM_TOKENS or tokens[-1] in each.stop_token_ids
                    assert len(tokens) > each.min_tokens
                    assert_raw_logprobs(model, prompt, found)
                    assert found.token_ids != plain_tokens
                    if index == 4 and len(prompt) == 30:
                        assert tokens == generated_by_transformers(model, prompt, each), each

    anyio.run(main)


@torch.inference_mode()
def choices_with_penalties(
    model: Any, prompt: list[int], output: Sequence[int], presence: float, frequency: float
) -> list[int]:
    """Greedy choices after the prompt and each output token, with the penalties of OpenAI's formula."""
    choices: list[int] = []
    for index, logits in enumerate(logits_after(model, prompt, output)):
        for token_id, count in Counter(output[:index]).items():
            logits[token_id] -= frequency * count + presence
        choices.append(int(logits.argmax()))
    return choices


@pytest.mark.parametrize("index", slow_after(1, [4, 13]))
def test_presence_and_frequency_penalties_in_the_engine(index: int, tmp_path: Path) -> None:
    model = make_model(index, tmp_path)
    rng = random.Random(index)
    config = engine_config(prefill_token_budget=16, block_size=8, max_model_len=256)

    async def main() -> None:
        async with Engine(tmp_path, config) as engine:
            plain = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
            for length in (1, 7, 40):
                prompt = [rng.randrange(3, model.config.vocab_size) for _ in range(length)]
                plain_tokens = (await engine.generate(prompt, plain)).token_ids
                num_changed = 0
                for presence, frequency in ((1.5, 0.0), (0.0, 0.7), (2.0, 2.0), (-2.0, 0.0), (0.0, -2.0)):
                    params = SamplingParams(
                        max_tokens=NUM_TOKENS,
                        ignore_eos=True,
                        presence_penalty=presence,
                        frequency_penalty=frequency,
                    )
                    found = (await engine.generate(prompt, params)).token_ids
                    assert len(found) == NUM_TOKENS
                    assert list(found) == choices_with_penalties(model, prompt, found, presence, frequency)
                    num_changed += found != plain_tokens
                assert num_changed >= 3

    anyio.run(main)


def test_counts_survive_preemption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with much output are preempted; later some find output tokens in the cache, others do not."""
    num_outputs, num_cached = [], []
    preempt, admit = Scheduler._preempt, Scheduler._admit

    def noting_preempt(scheduler: Scheduler, sequence: Any) -> None:
        num_outputs.append(sequence.num_output_tokens)
        preempt(scheduler, sequence)

    def noting_admit(scheduler: Scheduler, step: Any, sequence: Any) -> bool:
        is_admitted = admit(scheduler, step, sequence)
        if is_admitted and sequence.num_output_tokens:
            num_cached.append(sequence.num_planned_tokens - sequence.num_prompt_tokens)
        return is_admitted

    monkeypatch.setattr(Scheduler, "_preempt", noting_preempt)
    monkeypatch.setattr(Scheduler, "_admit", noting_admit)
    model = make_model(4, tmp_path)
    rng = random.Random(4)
    prompts = [[rng.randrange(3, model.config.vocab_size) for _ in range(5)] for _ in range(6)]
    penalties = [(1.5, 0.5), (0.0, 0.7), (2.0, 2.0), (0.0, 1.0), (1.0, 1.0), (0.0, 2.0)]
    config = engine_config(
        prefill_token_budget=8,
        block_size=4,
        max_model_len=48,
        kv_cache_tokens=72,
    )

    async def main() -> None:
        async with Engine(tmp_path, config) as engine:
            streams = [
                engine.generate(
                    prompt,
                    SamplingParams(
                        max_tokens=NUM_TOKENS,
                        ignore_eos=True,
                        presence_penalty=presence,
                        frequency_penalty=frequency,
                    ),
                )
                for prompt, (presence, frequency) in zip(prompts, penalties, strict=True)
            ]
            for stream, prompt, (presence, frequency) in zip(streams, prompts, penalties, strict=True):
                found = (await stream).token_ids
                assert len(found) == NUM_TOKENS
                assert list(found) == choices_with_penalties(model, prompt, found, presence, frequency)

    anyio.run(main)
    assert sum(num > 10 for num in num_outputs) >= 2
    assert any(num > 0 for num in num_cached) and any(num <= 0 for num in num_cached)


class Request:
    """A request with some of the rules. Prompts share prefixes."""

    def __init__(self, rng: random.Random, index: int) -> None:
        shared = [7 + (5 * i) % 300 for i in range(48)]
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 90))]
        self.prompt = shared[: rng.choice([16, 33, 48])] + own
        rules = {
            "repetition_penalty": rng.choice([1.3, 1.8, 0.7]),
            "presence_penalty": rng.choice([0.8, -1.0, 1.9]),
            "frequency_penalty": rng.choice([0.5, -0.4, 1.5]),
            "logit_bias": {i: rng.uniform(-4, 4) for i in rng.sample(range(VOCAB_SIZE), 50)},
            "allowed_token_ids": tuple(rng.sample(range(3, VOCAB_SIZE), 250)),
            "min_tokens": rng.randint(1, 20),
            "stop_token_ids": tuple(rng.sample(range(VOCAB_SIZE), 60)),
        }
        names = sorted(rules)
        if index % 4:
            names = [names[index % len(names)], *rng.sample(names, 2)]
        chosen = {name: rules[name] for name in names}
        if "stop_token_ids" not in chosen:
            chosen.pop("min_tokens", None)
        self.params = SamplingParams(
            max_tokens=rng.randint(20, 40),
            ignore_eos=True,
            seed=index,
            temperature=0.8 if index % 3 == 0 else 0.0,
            prompt_logprobs=2 if index % 5 == 0 else None,
            **chosen,
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(MODEL, folder)
    return folder


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    rng = random.Random(2027)
    return [Request(rng, index) for index in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def alone(folder: Path, requests: list[Request]) -> list[Completion]:
    async def main() -> list[Completion]:
        config = engine_config(max_num_seqs=1, max_model_len=256, prefill_token_budget=512)
        async with Engine(folder, config) as engine:
            found = []
            for each in requests:
                await engine.sleep()  # empties the prefix cache
                await engine.wake()
                with no_near_ties(logprob_bound(MODEL)):
                    found.append(await engine.generate(each.prompt, each.params))
            return found

    return anyio.run(main)


@pytest.mark.parametrize("kv_cache_tokens", slow_after(1, [320, 16_384]))
@pytest.mark.parametrize("prefill_token_budget", slow_after(1, [16, 512]))
def test_requests_together_equal_requests_alone(
    folder: Path,
    requests: list[Request],
    alone: list[Completion],
    prefill_token_budget: int,
    kv_cache_tokens: int,
) -> None:
    config = engine_config(
        max_num_seqs=9,
        max_model_len=256,
        block_size=16,
        kv_cache_tokens=kv_cache_tokens,
        prefill_token_budget=prefill_token_budget,
    )

    async def main() -> None:
        async with Engine(folder, config) as engine:
            num_cached = 0
            for _ in range(3):
                streams = [engine.generate(each.prompt, each.params) for each in requests]
                for index, (stream, expected) in enumerate(zip(streams, alone, strict=True)):
                    found = await stream
                    assert found.token_ids == expected.token_ids, f"request {index}"
                    assert found.finish_reason == expected.finish_reason
                    assert_same_logprobs(found.prompt_logprobs, expected.prompt_logprobs)
                    num_cached += found.usage.cached_tokens
            stats = engine.stats()
            assert num_cached > 0
            assert (stats.num_preemptions > 0) == (kv_cache_tokens == 320)
            assert stats.num_running == stats.num_waiting == 0

    anyio.run(main)


def assert_same_logprobs(found: Any, expected: Any) -> None:
    if expected is None:
        assert found is None
        return

    assert len(found) == len(expected) and found[0] is expected[0] is None
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one.token_id == other.token_id
        assert abs(one.logprob - other.logprob) < logprob_bound(MODEL)
        assert len(one.top) == len(other.top)
        assert all(abs(a[1] - b[1]) < logprob_bound(MODEL) for a, b in zip(one.top, other.top, strict=True))


@pytest.mark.slow
def test_each_rule_changes_tokens(folder: Path, requests: list[Request], alone: list[Completion]) -> None:
    """Otherwise the tests above would not notice a rule without effect."""
    neutral = SamplingParams()

    async def main() -> None:
        config = engine_config(max_model_len=256)
        async with Engine(folder, config) as engine:
            for name in (
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "logit_bias",
                "allowed_token_ids",
                "min_tokens",
                "stop_token_ids",
            ):
                num_changed = 0
                for each, expected in zip(requests, alone, strict=True):
                    values = {field: getattr(each.params, field) for field in neutral.__struct_fields__}
                    without = SamplingParams(**{**values, name: getattr(neutral, name)})
                    if without != each.params:
                        found = await engine.generate(each.prompt, without)
                        num_changed += found.token_ids != expected.token_ids
                assert num_changed >= 2, name

    anyio.run(main)


def assert_raw_logprobs(model: Any, prompt: list[int], completion: Completion) -> None:
    """Assert that log-probabilities are those of the model's distribution before any rule."""
    tokens = list(completion.token_ids)
    expected = reference_logprobs(model, prompt + tokens)[len(prompt) - 1 :]
    for entry, token, row in zip(completion.logprobs, tokens, expected, strict=True):
        assert entry.token_id == token and abs(entry.logprob - row[token].item()) < logprob_bound(MODEL)
        assert abs(entry.top[0][1] - row.max().item()) < logprob_bound(MODEL)


@torch.inference_mode()
def reference_logprobs(model: Any, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities [len(prompt) - 1, V] after each token of the prompt but the last."""
    return model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)


def assert_prompt_logprobs(model: Any, prompt: list[int], completion: Completion, num_top: int) -> None:
    found = completion.prompt_logprobs
    assert found is not None and len(found) == len(prompt) and found[0] is None
    expected = reference_logprobs(model, prompt)
    for position, entry in enumerate(found[1:], start=1):
        row = expected[position - 1]
        assert entry is not None and entry.token_id == prompt[position]
        assert abs(entry.logprob - row[prompt[position]].item()) < logprob_bound(MODEL)
        assert len(entry.top) == num_top
        for (token_id, logprob), best in zip(entry.top, row.topk(num_top).values.tolist(), strict=True):
            assert abs(logprob - best) < logprob_bound(MODEL) and abs(
                logprob - row[token_id].item()
            ) < logprob_bound(MODEL)


@pytest.mark.parametrize("prefill_token_budget", slow_after(1, [16, 1, 512]))
@pytest.mark.parametrize("rows", [eager.LOGITS_ROWS, 7])
def test_prompt_logprobs_equal_transformers(
    prefill_token_budget: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "LOGITS_ROWS", rows)
    model = make_model(3, tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 16, 17, 300)]
    config = engine_config(
        prefill_token_budget=prefill_token_budget,
        max_model_len=400,
        kv_cache_tokens=4096,
    )

    async def main() -> None:
        async with Engine(tmp_path, config) as engine:
            for num_top in (0, 3):
                params = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=num_top)
                plain = SamplingParams(max_tokens=3, ignore_eos=True)
                streams = [engine.generate(prompt, params) for prompt in prompts]
                others = [engine.generate(prompt, plain) for prompt in prompts]
                for prompt, stream, other in zip(prompts, streams, others, strict=True):
                    completion = await stream
                    assert completion.usage.cached_tokens == 0
                    assert_prompt_logprobs(model, prompt, completion, num_top)
                    assert (await other).prompt_logprobs is None
                    assert (await other).token_ids == completion.token_ids

    anyio.run(main)


def test_prompt_logprobs_survive_preemption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sequences are preempted during their prefill, others after their first tokens."""
    was_prefilling = []
    preempt = Scheduler._preempt

    def noting(scheduler: Scheduler, sequence: Any) -> None:
        if sequence.sampling.num_prompt_logprobs is not None:
            was_prefilling.append(sequence.num_output_tokens == 0)
        preempt(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", noting)
    model = make_model(3, tmp_path)
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (80, 30, 110, 120, 60, 90)]
    config = engine_config(
        prefill_token_budget=8,
        block_size=8,
        max_model_len=232,
        kv_cache_tokens=232,
    )

    async def main() -> None:
        async with Engine(tmp_path, config) as engine:
            params = [
                SamplingParams(max_tokens=100, ignore_eos=True, prompt_logprobs=2, priority=index)
                for index in range(len(prompts))
            ]
            streams = [engine.generate(p, each) for p, each in zip(prompts, params, strict=True)]
            for prompt, stream in zip(prompts, streams, strict=True):
                assert_prompt_logprobs(model, prompt, await stream, 2)

    anyio.run(main)
    assert set(was_prefilling) == {True, False}
