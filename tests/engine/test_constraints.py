"""Constrained requests in an engine: their ends, errors, other requests, preemption, and waiting for
masks."""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from loops import WAIT_S, on_every_loop, run, until
from model_zoo import make_model
from placement import engine_config
from slow_cases import slow_rows_after

from drift_sdk import (
    Completion,
    Engine,
    JsonSchema,
    Lark,
    Regex,
    RequestError,
    SamplingParams,
    TokenMachine,
    TokenState,
)
from drift_sdk.testing import EOS_TOKEN_ID, scripted_engine
from drift_sdk.text import grammar as grammar_module
from drift_sdk.text.grammar import GrammarConstraint

VOCAB_SIZE = 500
EOS = 1  # end-of-sequence id of the small models


class Person(msgspec.Struct):
    name: str
    age: int


PERSON = '{"name": "Ada", "age": 36}'
BROKEN = Regex("[")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(1, folder)
    return folder


def small(folder: Path, **options: Any) -> Engine:
    return Engine(folder, engine_config(**{"max_model_len": 256, **options}))


# A scripted model says what it says: its grammars only follow along.


@on_every_loop
@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_completion_is_parsed_into_the_type_of_its_schema(loop: str, tokens_per_step: int) -> None:
    async def main() -> None:
        async with scripted_engine(PERSON, tokens_per_step=tokens_per_step) as engine:
            stream = engine.generate("Who?", SamplingParams(grammar=JsonSchema(Person)))
            text = "".join([chunk.text async for chunk in stream])
            completion = await stream
            assert text == completion.text == PERSON
            assert completion.stop_reason == EOS_TOKEN_ID
            assert completion.parsed == Person("Ada", 36)
            assert completion.parsed is completion.parsed
            plain = JsonSchema({"type": "object"})
            assert (await engine.generate("x", SamplingParams(grammar=plain))).parsed == json.loads(PERSON)
            assert (await engine.generate("x")).parsed is None
            assert (await engine.generate("x", SamplingParams(grammar=Lark(r"start: /.*/")))).parsed is None

    run(loop, main)


def test_incomplete_text_is_not_parsed() -> None:
    may_end = threading.Event()
    may_end.set()

    def reply(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        if len(output_ids) == 4:
            assert may_end.wait(WAIT_S)
        return [*b"12345", EOS_TOKEN_ID][len(output_ids)]

    async def main() -> None:
        async with scripted_engine(reply) as engine:

            def ask(**params: Any) -> Any:
                return engine.generate("x", SamplingParams(grammar=JsonSchema(int), **params))

            assert (await ask()).parsed == 12345
            for cut in (
                await ask(max_tokens=3),
                await ask(stop="3"),
                await ask(stop="3", include_stop=True),
                await ask(stop_token_ids=(ord("3"),)),
            ):
                assert json.loads(cut.text) in (12, 123) and cut.parsed is None

            may_end.clear()
            stream = ask()
            await anext(stream)
            stream.cancel()
            may_end.set()
            assert (await stream).finish_reason == "cancelled"
            assert (await stream).parsed is None

    anyio.run(main)


@on_every_loop
def test_failing_grammar_fails_only_its_own_request(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(PERSON, step_s=0.001) as engine:
            good = [engine.generate("x", SamplingParams(grammar=JsonSchema(Person))) for _ in range(4)]
            free = [engine.generate("x") for _ in range(4)]
            broken = [engine.generate("x", SamplingParams(grammar=BROKEN)) for _ in range(3)]
            # After a few tokens the model generates a character that this grammar does not allow.
            unfit = engine.generate("x", SamplingParams(grammar=Regex(r"\{.name.: .B.*")))
            for stream in broken:
                with pytest.raises(RequestError, match="Regex cannot be compiled") as caught:
                    await stream
                assert caught.value.field == "grammar"
            with pytest.raises(RequestError, match=f"token {ord('A')} does not continue the text"):
                await unfit
            for stream in good + free:
                assert (await stream).text == PERSON
            await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
            assert engine.stats().num_free_blocks == engine.executors[0].limits.num_blocks

    run(loop, main)


def test_grammar_without_llguidance_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "drift_sdk.text.grammar")

    async def main() -> None:
        async with scripted_engine("5") as engine:
            with pytest.raises(RequestError, match=r"pip install \"drift-engine\[grammar\]\""):
                await engine.generate("x", SamplingParams(grammar=JsonSchema(int)))
            assert (await engine.generate("x")).text == "5"

    anyio.run(main)


def test_value_that_is_no_grammar_is_rejected_at_the_call() -> None:
    for given in ("[a-z]+", {"type": "object"}, Person, 5, JsonSchema):
        with pytest.raises(RequestError, match="^grammar=.*expected a JsonSchema, a Regex, a Lark or None"):
            SamplingParams(grammar=given)  # type: ignore[arg-type]


# A model with weights of no meaning says anything: whatever makes sense is the grammar's.


def test_grammar_ends_the_text(folder: Path) -> None:
    async def main() -> None:
        async with small(folder) as engine:

            async def ask(grammar: Any, **params: Any) -> Completion:
                params = {"temperature": 1.0, "seed": 7, "max_tokens": 40} | params
                return await engine.generate([5, 6], SamplingParams(grammar=grammar, **params))

            for seed in range(8):
                found = await ask(Regex("(yes|no)( indeed){0,2}"), seed=seed)
                assert re.fullmatch("(yes|no)( indeed){0,2}", found.text)
                assert found.finish_reason == "stop" and found.stop_reason == found.token_ids[-1] == EOS

            # Where the grammar lets the text end or go on, `ignore_eos` and `min_tokens` make it go on.
            longest = await ask(Regex("a{3,9}"), ignore_eos=True)
            assert (longest.text, longest.finish_reason, longest.stop_reason) == ("a" * 9, "stop", EOS)
            endless = await ask(Regex("a+"), ignore_eos=True)
            assert endless.finish_reason == "length" and len(endless.token_ids) == 40
            assert len((await ask(Regex("a*"), min_tokens=9)).token_ids) > 9
            # Where the text must end, they have no effect.
            assert (await ask(Regex("ab"), min_tokens=30)).text == "ab"
            assert (await ask(Regex("ab"), max_tokens=2)).finish_reason in ("length", "stop")
            assert (await ask(Regex("a{20}"), stop="aaa")).text == ""
            # Where the grammar allows none of the ids that the caller allows, the grammar takes precedence.
            assert (await ask(Regex("ab"), allowed_token_ids=(400,), logit_bias={5: 100.0})).text == "ab"

    anyio.run(main)


def test_all_sampling_parameters_respect_the_grammar(folder: Path) -> None:
    pattern = r"[A-Z][a-z]{2,8}, (\d{1,3}|none)\."

    async def main() -> None:
        async with small(folder) as engine:
            settings = itertools.product([0.0, 1.0, 5.0], [0, 3], [1.0, 0.3], [1.0, 1.5])
            for index, (temperature, top_k, top_p, penalty) in enumerate(settings):
                params = SamplingParams(
                    grammar=Regex(pattern),
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    repetition_penalty=penalty,
                    logprobs=2,
                    seed=index,
                )
                completion = await engine.generate([9, index + 3], params)
                assert re.fullmatch(pattern, completion.text), completion.text
                assert all(entry.logprob > float("-inf") for entry in completion.logprobs or ())

    anyio.run(main)


ITEM = {"type": "object", "properties": {"id": {"type": "integer"}, "on": {"type": "boolean"}}}
GRAMMARS = (
    Regex("[a-z]{4,30}"),
    JsonSchema({"type": "array", "items": {"enum": ["ab", "cd", 7]}, "minItems": 2, "maxItems": 8}),
    JsonSchema({**ITEM, "required": ["id", "on"], "additionalProperties": False}),
    Lark('start: "<" /[ab]{1,9}/ ">" start?'),
    None,
    None,
)


def requests() -> Iterator[tuple[list[int], SamplingParams]]:
    for index in range(24):
        prompt = [3 + (index * 7 + i * i) % 300 for i in range(5 + 11 * (index % 5))]
        yield (
            prompt,
            SamplingParams(
                grammar=GRAMMARS[index % len(GRAMMARS)],
                temperature=index % 3 * 0.7,
                seed=index,
                max_tokens=20 + index,
                priority=index % 2,
            ),
        )


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Completion]:
    async def main() -> list[Completion]:
        async with small(folder, max_num_seqs=1) as engine:
            return [await engine.generate(prompt, params) for prompt, params in requests()]

    return anyio.run(main)


@pytest.mark.parametrize(
    ("kv_cache_tokens", "budget"), slow_rows_after(1, [(288, 16), (8192, 512), (8192, 16), (288, 64)])
)
def test_batch_of_constrained_requests_equals_each_alone(
    folder: Path, alone: list[Completion], kv_cache_tokens: int, budget: int
) -> None:
    async def main() -> None:
        options = {"max_num_seqs": 10, "block_size": 16, "prefill_token_budget": budget}
        async with (
            small(folder, kv_cache_tokens=kv_cache_tokens, **options) as engine,
            small(folder, kv_cache_tokens=kv_cache_tokens, **options) as other,
        ):
            streams = [each.generate(*request) for request in requests() for each in (engine, other)]
            for index, expected in enumerate(alone):
                for stream in streams[2 * index : 2 * index + 2]:
                    found = await stream
                    assert found.token_ids == expected.token_ids, f"request {index}"
                    assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
                    assert found.parsed == expected.parsed

            for each in (engine, other):
                assert (each.stats().num_preemptions > 0) == (kv_cache_tokens == 288)
                assert each.stats().num_running == each.stats().num_waiting == 0
                assert each.stats().num_free_blocks == kv_cache_tokens // 16

    anyio.run(main)


def test_each_request_alone_satisfies_its_grammar(alone: list[Completion]) -> None:
    assert len({completion.text for completion in alone}) > 15
    for completion, (_, params) in zip(alone, requests(), strict=True):
        if completion.finish_reason == "stop" and isinstance(params.grammar, JsonSchema):
            assert completion.parsed == json.loads(completion.text)
        elif completion.finish_reason == "stop" and isinstance(params.grammar, Regex):
            assert re.fullmatch(params.grammar.pattern, completion.text)
    assert sum(completion.finish_reason == "stop" for completion in alone) > 10


class Gate:
    """While it is closed, text threads block in `advance`. If `num_until_closed` is set, it closes after so
    many further calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.num_until_closed: int | None = None
        self.num_waiting = 0
        advance = GrammarConstraint.advance

        def gated(constraint: GrammarConstraint, token_ids: tuple[int, ...]) -> None:
            if self.num_until_closed == 0:
                self.is_open.clear()
            if self.num_until_closed is not None:
                self.num_until_closed -= 1
            self.num_waiting += 1
            assert self.is_open.wait(120)
            self.num_waiting -= 1
            advance(constraint, token_ids)

        monkeypatch.setattr(GrammarConstraint, "advance", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.is_open.set()


@on_every_loop
def test_request_that_awaits_its_mask_delays_no_other_and_can_be_cancelled(
    loop: str, folder: Path, gate: Gate
) -> None:
    async def main() -> None:
        async with small(folder) as engine:
            gate.is_open.clear()
            held = engine.generate([5, 6], SamplingParams(grammar=Regex("[a-z]+"), max_tokens=100))
            first = await anext(held)
            await until(lambda: gate.num_waiting == 1)
            free = await engine.generate([7], SamplingParams(max_tokens=30, ignore_eos=True))
            assert len(free.token_ids) == 30
            assert not held._updates.has_chunk
            held.cancel()
            completion = await held
            assert (completion.text, completion.finish_reason) == (first.text, "cancelled")
            assert engine.stats().num_running == 0
            gate.is_open.set()
            again = await engine.generate([5, 6], SamplingParams(grammar=Regex("[a-z]+"), max_tokens=100))
            assert again.token_ids[0] == first.token_ids[0]
            assert len(again.token_ids) > 1

    run(loop, main)


def test_closing_while_a_request_awaits_its_mask(folder: Path, gate: Gate) -> None:
    async def main() -> None:
        async with small(folder) as engine:
            gate.is_open.clear()
            stream = engine.generate([5, 6], SamplingParams(grammar=Regex("[a-z]+"), max_tokens=100))
            await anext(stream)
            await until(lambda: gate.num_waiting == 1)
            opener = threading.Timer(0.1, gate.is_open.set)
            opener.start()
        opener.join()

    anyio.run(main)


def test_request_preempted_while_it_awaits_its_mask_continues(folder: Path, gate: Gate) -> None:
    """The request of higher priority takes the blocks of the one that awaits its mask, and ends before the
    mask is computed."""
    constrained = ([5, 6, 7], SamplingParams(grammar=Regex("(ab|cd){30}"), max_tokens=70, seed=3, priority=1))
    greedy = (list(range(20, 40)), SamplingParams(max_tokens=100, ignore_eos=True))

    async def main() -> None:
        async with small(folder, max_num_seqs=2) as engine:
            expected = await engine.generate(*constrained)

        async with small(folder, max_num_seqs=2, max_model_len=128, kv_cache_tokens=128) as engine:
            gate.num_until_closed = 25
            stream = engine.generate(*constrained)
            await until(lambda: gate.num_waiting == 1)
            await engine.generate(*greedy)
            assert engine.stats().num_preemptions == 1
            num_steps = engine.stats().num_steps
            late = await engine.generate([50], SamplingParams(max_tokens=1))
            assert len(late.token_ids) == 1
            assert engine.stats().num_steps <= num_steps + 2
            gate.is_open.set()
            assert (await stream).token_ids == expected.token_ids

    anyio.run(main)


def test_compiling_a_large_grammar_blocks_neither_loop_nor_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar is compiled on a text thread that has released the GIL: the event loop runs meanwhile, and
    another request is answered before compiling has ended."""
    num_turns = 0
    num_turns_meanwhile: list[int] = []
    is_answered = threading.Event()
    deadline = time.monotonic() + WAIT_S
    matcher = grammar_module.LLMatcher

    def watched(*args: Any, **kwargs: Any) -> Any:
        while True:  # once, if this thread and the loop's get as much time as they want
            before = num_turns
            made = matcher(*args, **kwargs)
            if num_turns - before > 10 or time.monotonic() > deadline:
                break
        num_turns_meanwhile.append(num_turns - before)
        assert is_answered.wait(WAIT_S)
        return made

    def heavy(index: int) -> JsonSchema:
        fields = {
            f"field{i}": {
                "anyOf": [
                    {"type": "string", "pattern": f"^[a-z]{{1,{20 + i}}}(x|y){{3,40}}$"},
                    {"enum": [f"value {j} of {i} in {index}" for j in range(50)]},
                    {"type": "array", "maxItems": 20, "items": {"type": "integer", "maximum": 1000 + i}},
                ]
            }
            for i in range(40)
        }
        return JsonSchema({"type": "object", "properties": fields, "required": list(fields)})

    async def main() -> None:
        async with small(folder) as engine:
            # The first grammar of an engine reads the vocabulary.
            await engine.generate([5], SamplingParams(grammar=Regex("a")))
            monkeypatch.setattr(grammar_module, "LLMatcher", watched)
            params = [SamplingParams(grammar=heavy(index), max_tokens=3) for index in range(4)]

            async def turn() -> None:
                nonlocal num_turns
                while True:
                    num_turns += 1
                    await anyio.lowlevel.checkpoint()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(turn)
                first = engine.generate([5, 6], params[0])
                await until(lambda: bool(num_turns_meanwhile))
                free = await engine.generate([7], SamplingParams(max_tokens=5, ignore_eos=True))
                is_answered.set()
                others = [engine.generate([5, 6], each) for each in params[1:]]
                completions = [await stream for stream in (first, *others)]
                tasks.cancel_scope.cancel()

            assert len(free.token_ids) == 5
            assert all(completion.text[0] == "{" for completion in completions)
            assert len(num_turns_meanwhile) == len(params)
            assert min(num_turns_meanwhile) > 10

    anyio.run(main)


ALTERNATING = TokenMachine((TokenState(forbidden=(1,), otherwise=1), TokenState(forbidden=(2,), otherwise=0)))
BRANCHING = TokenMachine((TokenState(next={ord("x"): 1}), TokenState(forbidden=(2,))))


@pytest.mark.parametrize(
    ("machines", "is_ahead"),
    [((ALTERNATING,), True), ((ALTERNATING, TokenMachine((TokenState(),))), True), ((BRANCHING,), False)],
)
def test_requests_whose_masks_are_known_take_part_in_every_step(
    machines: tuple[TokenMachine, ...], is_ahead: bool
) -> None:
    """Behind a step in flight, the next one has their rows: they do not wait for the token before."""

    async def main() -> None:
        async with scripted_engine("a" * 100, step_s=0.002) as engine:
            free = [engine.generate("x") for _ in range(3)]
            limited = [engine.generate("x", logits_processors=machines) for _ in range(3)]
            for stream in [*free, *limited]:
                assert (await stream).text == "a" * 100
            (executor,) = engine.executors
            assert (executor.num_steps < 120) == is_ahead

    anyio.run(main)


def test_a_machine_that_forbids_a_token_launched_ahead_ends_its_request_alone() -> None:
    async def main() -> None:
        async with scripted_engine("aaaaab") as engine:
            other = engine.generate("x", logits_processors=(ALTERNATING,))
            states = [TokenState(otherwise=min(number + 1, 3)) for number in range(3)]
            machine = TokenMachine((*states, TokenState(forbidden=(ord("a"),))))
            with pytest.raises(RequestError, match=f"they forbid the next token, {ord('a')}"):
                await engine.generate("x", logits_processors=(machine,))
            assert (await other).text == "aaaaab"
            await until(lambda: engine.stats().num_running == 0)

    anyio.run(main)
