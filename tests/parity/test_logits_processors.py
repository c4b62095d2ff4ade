"""Logits processors: machines and tables equal their Python functions, with drafts and with grammars."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from model_zoo import logprob_bound, make_model
from near_ties import no_near_ties
from placement import engine_config

from drift_sdk import (
    Chain,
    Completion,
    Engine,
    EngineConfig,
    EnginePool,
    NGram,
    Regex,
    RequestError,
    SamplingParams,
    Speculation,
    SyncEngine,
    TokenBias,
    TokenMachine,
    TokenState,
)
from drift_sdk.processors import LogitsProcessor
from drift_sdk.testing import scripted_engine

MODEL = 0
VOCAB_SIZE = 500
DRAFTS = Speculation(draft=NGram(min_length=1), shape=Chain(3), adaptive=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(MODEL, folder)
    return folder


def config(**fields: Any) -> EngineConfig:
    return engine_config(**{"max_model_len": 256, "block_size": 8, "prefill_token_budget": 32, **fields})


def drawn_machine(seed: int, num_states: int = 4) -> TokenMachine:
    """A machine of which each state allows or forbids half of the tokens."""
    rng = random.Random(seed)
    states = []
    for number in range(num_states):
        ids = tuple(rng.sample(range(3, VOCAB_SIZE), 250))
        steps = {token: rng.randrange(num_states) for token in rng.sample(range(VOCAB_SIZE), 300)}
        chosen = {"allowed": ids} if number % 2 else {"forbidden": ids}
        states.append(TokenState(**chosen, next=steps, otherwise=rng.choice([None, 0, number])))
    return TokenMachine(tuple(states))


def steady_machine(seed: int, num_states: int = 3) -> TokenMachine:
    """A machine whose states follow each other, whatever the tokens are: its requests are launched ahead."""
    rng = random.Random(seed)
    states = [
        TokenState(
            forbidden=tuple(rng.sample(range(3, VOCAB_SIZE), 250)), otherwise=(number + 1) % num_states
        )
        for number in range(num_states)
    ]
    return TokenMachine(tuple(states))


def drawn_bias(seed: int) -> TokenBias:
    rng = random.Random(seed)
    return TokenBias({token: rng.uniform(-4, 4) for token in range(3, VOCAB_SIZE)})


def requests_of() -> list[tuple[list[int], SamplingParams, tuple[TokenMachine | TokenBias, ...]]]:
    """Prompts that repeat themselves, so that n-grams are drafted."""
    rng = random.Random(6)
    processors: list[tuple[TokenMachine | TokenBias, ...]] = [
        (drawn_machine(1),),
        (drawn_bias(2),),
        (drawn_machine(3), drawn_bias(4)),
        (drawn_machine(5, 2), drawn_machine(6, 3)),
        (steady_machine(7), steady_machine(8, 2)),
        (),
    ]
    found = []
    for index in range(12):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 12))] * 4
        params = SamplingParams(
            max_tokens=40,
            ignore_eos=True,
            seed=index,
            temperature=0.7 * (index % 3 == 1),
            grammar=Regex("[a-z ]{200}") if index % 4 == 3 else None,
        )
        found.append((prompt, params, processors[index % 6]))
    return found


async def run(engine: Engine, *, as_functions: bool) -> list[Completion]:
    streams = []
    for prompt, params, processors in requests_of():
        given: list[LogitsProcessor] = [each.function() if as_functions else each for each in processors]
        streams.append(engine.generate(prompt, params, logits_processors=given))
    return [await stream for stream in streams]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """The tokens with Python functions, one request at a time, without drafts."""

    async def main() -> list[tuple[int, ...]]:
        async with Engine(folder, config(max_num_seqs=1)) as engine:
            with no_near_ties(logprob_bound(MODEL)):
                return [each.token_ids for each in await run(engine, as_functions=True)]

    return anyio.run(main)


@pytest.mark.parametrize("as_functions", [False, True])
@pytest.mark.parametrize("kind", ["plain", "drafts", "preempted"])
def test_machines_and_tables_equal_their_functions(
    folder: Path, expected: list[tuple[int, ...]], kind: str, as_functions: bool
) -> None:
    fields: dict[str, Any] = {"plain": {}, "drafts": {"speculation": DRAFTS}, "preempted": {}}[kind]
    if kind == "preempted":
        fields = {"max_model_len": 104, "kv_cache_tokens": 200}

    async def main() -> None:
        async with Engine(folder, config(**fields)) as engine:
            found = await run(engine, as_functions=as_functions)
            assert [each.token_ids for each in found] == expected
            stats = engine.stats()
            assert (stats.num_preemptions > 0) == (kind == "preempted")
            has_accepted = stats.speculation is not None and stats.speculation.num_accepted > 0
            assert has_accepted == (kind == "drafts")

    anyio.run(main)


def test_each_processor_changes_tokens(folder: Path, expected: list[tuple[int, ...]]) -> None:
    async def main() -> None:
        async with Engine(folder, config(max_num_seqs=1)) as engine:
            for (prompt, params, processors), tokens in zip(requests_of(), expected, strict=True):
                plain = (await engine.generate(prompt, params)).token_ids
                assert (plain != tokens) == bool(processors)

    anyio.run(main)


def test_a_machine_follows_its_states(folder: Path) -> None:
    """After 7 comes 8 or 9, after 8 nothing but 9, and after 9 anything but 9."""
    machine = TokenMachine(
        (
            TokenState(allowed=(7,), otherwise=1),
            TokenState(allowed=(8, 9), next={8: 2, 9: 3}),
            TokenState(allowed=(9,), next={9: 3}),
            TokenState(forbidden=(9,)),
        )
    )
    with SyncEngine(folder, config(speculation=DRAFTS)) as engine:
        for seed in range(6):
            found = engine.generate(
                [5, 6],
                max_tokens=12,
                ignore_eos=True,
                temperature=9.0,
                seed=seed,
                logits_processors=[machine],
            ).result()
            first, second, *rest = found.token_ids
            assert first == 7 and second in (8, 9)
            assert rest[0] == 9 if second == 8 else rest[0] != 9
            assert 9 not in rest[1:]


def test_a_function_sees_the_tokens_so_far_and_all_logits(folder: Path) -> None:
    seen: list[tuple[int, ...]] = []

    def alternate(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        assert logits.shape == (VOCAB_SIZE,) and logits.dtype == np.float32
        seen.append(tuple(token_ids))
        found = np.full(VOCAB_SIZE, -np.inf)
        found[5 + len(token_ids) % 2] = 0.0
        return found

    with SyncEngine(folder, config()) as engine:
        found = engine.generate(
            [9, 9], max_tokens=4, ignore_eos=True, logits_processors=(alternate,)
        ).result()
        assert found.token_ids == (5, 6, 5, 6)
        assert seen == [(), (5,), (5, 6), (5, 6, 5)]


@pytest.mark.parametrize("speculation", [None, DRAFTS])
def test_a_function_that_fails_ends_its_request_alone(folder: Path, speculation: Speculation | None) -> None:
    def fail(token_ids: Sequence[int], logits: np.ndarray) -> None:
        if len(token_ids) == 3:
            raise ValueError("three tokens")

    def wrong(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return logits[:3]

    def nothing(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return np.full(VOCAB_SIZE, -np.inf, dtype=np.float32)

    def leave(token_ids: Sequence[int], logits: np.ndarray) -> None:
        raise SystemExit(3)

    def reshape(token_ids: Sequence[int], logits: np.ndarray) -> None:
        logits.shape = (1, VOCAB_SIZE)

    def shrink(token_ids: Sequence[int], logits: np.ndarray) -> None:
        logits.resize((3,), refcheck=False)

    def rotate(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return logits * 1j

    functions: list[tuple[LogitsProcessor, str]] = [
        (fail, "three tokens"),
        (leave, r"SystemExit\(3\)"),
        (wrong, r"float32 \[3\]: expected real numbers \[500\]"),
        (reshape, r"float32 \[1, 500\]"),
        (shrink, r"float32 \[3\]"),
        (rotate, r"complex64 \[500\]"),
        (nothing, "finite"),
    ]

    async def main() -> None:
        async with Engine(folder, config(speculation=speculation)) as engine:
            other = engine.generate([5, 6] * 5, max_tokens=30, ignore_eos=True)
            for function, words in functions:
                with pytest.raises(RequestError, match=words):
                    await engine.generate([5, 6] * 5, max_tokens=9, logits_processors=[function])
            assert len((await other).token_ids) == 30
            assert engine.stats().num_running == 0

    anyio.run(main)


def test_a_machine_that_leaves_no_token_ends_its_request(folder: Path) -> None:
    machine = TokenMachine((TokenState(allowed=(7,)), TokenState()))
    with SyncEngine(folder, config()) as engine:
        with pytest.raises(
            RequestError, match="logits_processors: they forbid the next token, 0: expected machines"
        ):
            both = [machine, TokenMachine((TokenState(forbidden=(7,)),))]
            engine.generate([5], max_tokens=5, logits_processors=both).result()
        assert engine.generate([5], max_tokens=2, logits_processors=[machine]).result().token_ids == (7, 7)


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("speculation", [None, DRAFTS])
def test_a_machine_that_leaves_no_token_is_named_where_a_text_ends(
    folder: Path, num_before: int, speculation: Speculation | None
) -> None:
    """Also if the token that is generated all the same ends texts, or is the last of `max_tokens`."""
    left = [TokenState(allowed=(7,), otherwise=number + 1) for number in range(num_before)]
    machine = TokenMachine((*left, TokenState(allowed=(7,), forbidden=(7,))))
    with SyncEngine(folder, config(speculation=speculation)) as engine:
        for options in (
            {"max_tokens": 9, "stop_token_ids": (0,)},
            {"max_tokens": num_before + 1, "ignore_eos": True},
        ):
            with pytest.raises(
                RequestError, match="logits_processors: they forbid the next token, 0: expected machines"
            ):
                engine.generate([7] * 20, logits_processors=[machine], **options).result()
        assert engine.stats().num_running == 0
        enough = TokenMachine((*left, TokenState(allowed=(7,))))
        found = engine.generate([7] * 20, max_tokens=num_before + 1, logits_processors=[enough]).result()
        assert found.token_ids == (7,) * (num_before + 1)


@pytest.mark.parametrize("speculation", [None, DRAFTS])
def test_a_machine_is_named_where_another_limit_leaves_no_token(
    folder: Path, speculation: Speculation | None
) -> None:
    """Beside a grammar, whose first token the machine forbids, and beside the end of reasoning."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<think>"
    fields = {"chat_template": template, "reasoning_format": "think", "speculation": speculation}
    with SyncEngine(folder, config(**fields)) as engine:
        machine = TokenMachine((TokenState(allowed=engine.tokenizer.encode("a", add_special_tokens=False)),))
        options: dict[str, Any] = {"max_tokens": 9, "logits_processors": [machine]}
        question = [{"role": "user", "content": "aaaa"}]
        for stream in (
            engine.generate("aaaa", **options, grammar=Regex("b")),
            engine.generate("aaaa", **options, grammar=Regex("a{5}b")),
            engine.chat(question, **options, thinking_budget=0),
            engine.chat(question, **options, thinking_budget=5),
        ):
            with pytest.raises(
                RequestError, match="expected machines that leave a token everywhere, also"
            ) as caught:
                stream.result()
            assert caught.value.field == "logits_processors"
        found = engine.chat(question, **options).result()
        assert found.reasoning == "a" * 9 and engine.stats().num_running == 0


def test_functions_are_warned_of_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SyncEngine(folder, config()) as engine, caplog.at_level(logging.WARNING, "drift_sdk"):
        for _ in range(3):
            engine.generate([5], max_tokens=1, logits_processors=[drawn_bias(1)]).result()
        assert not caplog.records
        for _ in range(3):
            engine.generate([5], max_tokens=1, logits_processors=[lambda ids, logits: None]).result()
        (record,) = caplog.records
        assert "Python functions run on the engine's thread" in record.message


async def test_functions_are_refused_where_nothing_calls_them(folder: Path) -> None:
    def function(token_ids: Sequence[int], logits: np.ndarray) -> None: ...

    async with scripted_engine("yes") as engine:
        with pytest.raises(RequestError, match="executor 'scripted' calls no Python functions"):
            engine.generate("a", logits_processors=[function])
        assert (await engine.generate("a", logits_processors=[TokenBias({5: 1.0})])).text == "yes"


def test_ids_outside_the_vocabulary_are_named(folder: Path) -> None:
    with SyncEngine(folder, config()) as engine:
        for index, wrong in enumerate((TokenBias({500: 1.0}), TokenMachine((TokenState(next={501: 0}),)))):
            given = [*[TokenBias({5: 1.0})] * index, wrong]
            with pytest.raises(RequestError, match=rf"logits_processors\[{index}\]=50{index}"):
                engine.generate([5], logits_processors=given).result()


class Unreadable(Mapping[Any, Any]):
    def __init__(self, items: Mapping[Any, Any]) -> None:
        self._items = items

    def __getitem__(self, key: Any) -> Any:
        raise ValueError("no such place")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def test_machines_and_tables_are_values() -> None:
    machine, bias = drawn_machine(1), drawn_bias(2)
    for each in (machine, bias):
        assert pickle.loads(pickle.dumps(each)) == each and hash(each) == hash(
            pickle.loads(pickle.dumps(each))
        )
    for make, words in (
        (lambda: TokenMachine(()), "states=.*1 to 10000 TokenStates"),
        (lambda: TokenMachine((5,)), r"states\[0\]=5: expected a TokenState"),
        (lambda: TokenMachine((TokenState(next={5: 1}),)), r"states\[0\].next\[5\]=1: .*from 0 to 0"),
        (
            lambda: TokenMachine((TokenState(otherwise=2), TokenState())),
            r"states\[0\].otherwise=2: .* 0 to 1",
        ),
        (lambda: TokenState(allowed=()), "allowed=.*1 to"),
        (lambda: TokenState(forbidden=(5, -1)), "forbidden=-1"),
        (lambda: TokenState(next={5: "a"}), "next="),
        (lambda: TokenState(otherwise=-1), "otherwise=-1"),
        (lambda: TokenBias({5: 101.0}), "biases="),
        (lambda: TokenBias({-5: 1.0}), "biases="),
        (lambda: TokenBias([5]), "biases="),
        (lambda: TokenBias(Unreadable({5: 1.0})), r"biases=.*\(ValueError\('no such place'\)\)"),
        (lambda: TokenState(next=Unreadable({5: 0})), r"next=.*\(ValueError\('no such place'\)\)"),
    ):
        with pytest.raises(RequestError, match=words):
            make()


def test_a_large_state_that_is_repeated_is_read_once() -> None:
    """Reading it for each of its places would take minutes on the caller's event loop."""
    state = TokenState(allowed=tuple(range(100_000)), next=dict.fromkeys(range(100_000), 9_999))
    assert len(TokenMachine((state,) * 10_000).token_ids) == 100_000
    with pytest.raises(
        RequestError, match=r"states\[0\]\.next\[0\]=9999: expected the number of a state, from 0 to 8"
    ):
        TokenMachine((state,) * 9)


@pytest.mark.parametrize("number", [np.int64(1), torch.tensor(1), np.uint8(1)])
def test_machines_take_numbers_of_other_libraries(number: Any) -> None:
    state = TokenState(allowed=[number], forbidden=(number,), next={number: number}, otherwise=number)
    assert state == TokenState(allowed=(1,), forbidden=(1,), next={1: 1}, otherwise=1)
    found = (*state.allowed, *state.forbidden, *state.next, *state.next.values(), state.otherwise)
    assert set(map(type, found)) == {int}


class Counted(list[Any]):
    def __len__(self) -> int:
        raise ValueError("not counted")


class Changed(tuple[Any, ...]):
    def __iter__(self) -> Iterator[Any]:
        raise ValueError("other items each time")

    def __len__(self) -> int:
        raise ValueError("not counted")


@pytest.mark.parametrize("kind", [Counted, Changed])
def test_classes_of_sequences_are_not_kept(kind: type[Any]) -> None:
    """Their methods would run on the engine's thread."""
    state, bias = TokenState(forbidden=kind([5]), allowed=kind([6])), TokenBias({5: 1.0})
    machine = TokenMachine(kind([state]))
    params = SamplingParams(
        logits_processors=kind([machine, bias]),
        stop=kind(["a"]),
        stop_token_ids=kind([5]),
        logprob_token_ids=kind([5]),
        logprobs=0,
    )
    kept = (state.allowed, state.forbidden, machine.states, params.logits_processors)
    kept += (params.stop, params.stop_token_ids, params.logprob_token_ids)
    assert kept == ((6,), (5,), (state,), (machine, bias), ("a",), (5,), (5,))
    assert set(map(type, kept)) == {tuple}
    for most, make in (
        (16, lambda: SamplingParams(logits_processors=kind([bias] * 17))),
        (64, lambda: SamplingParams(stop_token_ids=kind([5] * 65))),
        (10_000, lambda: TokenMachine(kind([state] * 10_001))),
    ):
        with pytest.raises(RequestError, match=f"expected .*{most} "):
            make()


STOPPED = "stop_when"


@pytest.mark.parametrize("speculation", [None, DRAFTS])
def test_a_text_ends_with_the_first_token_for_which_the_function_is_true(
    folder: Path, speculation: Speculation | None
) -> None:
    seen: list[tuple[list[int], str]] = []

    def stop_when(token_ids: Sequence[int], text: str) -> bool:
        seen.append((list(token_ids), text))
        return len(token_ids) >= 9 and token_ids[-1] % 3 == 0

    with SyncEngine(folder, config(speculation=speculation)) as engine:
        prompt, params = [5, 6, 7] * 6, SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0)
        plain = engine.generate(prompt, params).result()
        found = engine.generate(prompt, params, stop_when=stop_when).result()
        end = next(n for n in range(9, 60) if plain.token_ids[n - 1] % 3 == 0)
        assert found.token_ids == plain.token_ids[:end] and len(found.logprobs or ()) == end < 60
        assert (found.finish_reason, found.stop_reason) == ("stop", STOPPED)
        assert [ids for ids, _ in seen] == [list(plain.token_ids[:n]) for n in range(1, end + 1)]
        assert plain.text.startswith(found.text) and found.text.startswith(seen[-1][1])
        if speculation is not None:
            assert found.speculation is not None and found.speculation.num_accepted > 0
        later = engine.generate(prompt, params, stop_when=lambda ids, text: True, min_tokens=5).result()
        assert later.token_ids == plain.token_ids[:5]


def test_a_stop_function_that_fails_ends_its_request(folder: Path) -> None:
    def fail(token_ids: Sequence[int], text: str) -> bool:
        raise KeyError("x")

    def leave(token_ids: Sequence[int], text: str) -> bool:
        raise SystemExit(3)

    with SyncEngine(folder, config()) as engine:
        for function, words in ((fail, "KeyError"), (leave, "SystemExit")):
            with pytest.raises(RequestError, match=f"stop_when: {words}"):
                engine.generate([5], max_tokens=5, stop_when=function).result()
        assert engine.stats().num_running == 0
        assert len(engine.generate([5], max_tokens=5, ignore_eos=True).result().token_ids) == 5


@pytest.mark.parametrize("speculation", [None, DRAFTS])
def test_a_stop_function_that_changes_its_ids_changes_nothing_else(
    folder: Path, speculation: Speculation | None
) -> None:
    shown: list[tuple[int, ...]] = []

    def keep(token_ids: Sequence[int], text: str) -> bool:
        shown.append(tuple(token_ids))
        return False

    def clear(token_ids: Any, text: str) -> bool:
        shown.append(tuple(token_ids))
        token_ids.clear()
        return len(shown) == 3

    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    with SyncEngine(folder, config(speculation=speculation)) as engine:
        found = engine.generate([5, 6] * 9, stop_when=keep, **options).result()
        assert shown == [found.token_ids[:n] for n in range(1, 21)]
        shown.clear()
        short = engine.generate([5, 6] * 9, stop_when=clear, min_tokens=4, **options).result()
        assert short.token_ids == found.token_ids[:6]
        assert shown == [short.token_ids[:4], short.token_ids[4:5], short.token_ids[5:]]


WAITS: dict[str, Callable[[SyncEngine], object]] = {
    "result": lambda engine: engine.generate([7], max_tokens=1).result(),
    "embed": lambda engine: engine.embed([[7]]),
    "update": lambda engine: engine.update_weights({"model.norm.weight": torch.ones(1)}),
    "close": lambda engine: engine.close(),
    "awaited": lambda engine: anyio.run(engine._engine.embed, [[7]]),
    "paused": lambda engine: anyio.run(engine._engine.pause),
    "asleep": lambda engine: anyio.run(engine._engine.sleep),
    "replaced": lambda engine: anyio.run(engine._engine.update_weights, {}),
    "closed": lambda engine: anyio.run(engine._engine.aclose),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_function_cannot_wait_for_its_own_engine(folder: Path, name: str) -> None:
    """It would wait for itself, and all requests with it. Other engines, it may wait for."""
    with SyncEngine(folder, config()) as engine, SyncEngine(folder, config()) as other:

        def wait(token_ids: Sequence[int], given: Any) -> None:
            if name == "embed":
                assert len(other.embed([[7]])) == 1
            assert engine.stats().num_running == 1 and not engine.cancel("another")
            WAITS[name](engine)

        for options in ({"stop_when": wait}, {"logits_processors": [wait]}):
            with pytest.raises(RequestError, match="RuntimeError.* cannot wait for its own engine"):
                engine.generate([5], max_tokens=5, **options).result(timeout=60)
        assert len(engine.generate([5], max_tokens=5, ignore_eos=True).result().token_ids) == 5


def test_a_pool_calls_functions_of_its_own_process(folder: Path) -> None:
    async def main() -> None:
        async with EnginePool([Engine(folder, config()), Engine(folder, config())]) as pool:
            found = await pool.generate([5], max_tokens=9, stop_when=lambda ids, text: len(ids) == 2)
            assert len(found.token_ids) == 2
            machine = TokenMachine((TokenState(allowed=(7,)),))
            assert (await pool.generate([5], max_tokens=3, logits_processors=[machine])).token_ids == (7,) * 3

    anyio.run(main)


def test_masks_of_a_machine_have_no_bits_behind_the_vocabulary() -> None:
    from drift_sdk.text.limits import MachineLimits

    limits = MachineLimits(TokenMachine((TokenState(forbidden=(0, 33)),)), 70)
    (words,) = limits.masks(())
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits == 0).tolist() == [0, 33, *range(70, 96)]
    assert torch.from_numpy(words).dtype == torch.int32
