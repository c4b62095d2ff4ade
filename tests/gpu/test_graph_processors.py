"""Token machines and tables of biases on CUDA graphs, against their Python functions, run eagerly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import pytest
from model_zoo import make_model

from drift_sdk import (
    Chain,
    Completion,
    Engine,
    EngineConfig,
    NGram,
    Regex,
    RequestError,
    SamplingParams,
    Speculation,
    TokenBias,
    TokenMachine,
    TokenState,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DRAFTS = Speculation(draft=NGram(min_length=1), shape=Chain(3), adaptive=False)
FIELDS = {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_tokens": 4096, "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0, folder)
    return folder


def processors_of(index: int) -> tuple[TokenMachine | TokenBias, ...]:
    rng = random.Random(index)
    states = []
    for number in range(4):
        ids = tuple(rng.sample(range(3, 500), 250))
        steps = {token: rng.randrange(4) for token in rng.sample(range(500), 300)}
        states.append(TokenState(**{"allowed" if number % 2 else "forbidden": ids}, next=steps))
    bias = TokenBias({token: rng.uniform(-4, 4) for token in range(3, 500)})
    machine = TokenMachine(tuple(states))
    # The states of this one do not depend on the tokens: its requests are launched ahead.
    steady = TokenMachine(
        tuple(
            TokenState(forbidden=tuple(rng.sample(range(3, 500), 250)), otherwise=(number + 1) % 3)
            for number in range(3)
        )
    )
    return ((machine,), (bias,), (machine, bias), (steady,), (steady, bias))[index % 5]


async def run(engine: Engine, *, as_functions: bool) -> list[Completion]:
    rng = random.Random(6)
    streams = []
    for index in range(12):
        prompt = [rng.randrange(3, 500) for _ in range(rng.randint(1, 12))] * 4
        params = SamplingParams(
            max_tokens=40, ignore_eos=True, seed=index, temperature=0.7 * (index % 3 == 1)
        )
        if index % 4 == 3:
            params = params.replace(grammar=Regex("[a-z ]{200}"))
        given: list[Any] = [each.function() if as_functions else each for each in processors_of(index)]
        streams.append(engine.generate(prompt, params, logits_processors=given))
    return [await stream for stream in streams]


@pytest.mark.parametrize("speculation", [None, DRAFTS], ids=["plain", "drafts"])
def test_machines_and_tables_equal_their_functions(folder: Path, speculation: Speculation | None) -> None:
    pytest.importorskip("llguidance")

    async def main(executor: str) -> list[tuple[int, ...]]:
        config = EngineConfig(
            device="cuda",
            executor=executor,
            speculation=speculation if executor == "graph" else None,
            **FIELDS,
        )
        async with Engine(folder, config) as engine:
            found = await run(engine, as_functions=executor == "eager")
            stats = engine.stats().speculation
            if config.speculation is not None:
                assert stats is not None and stats.num_accepted > 0
            return [each.token_ids for each in found]

    assert anyio.run(main, "graph") == anyio.run(main, "eager")


def test_functions_are_refused_by_name(folder: Path) -> None:
    async def main() -> None:
        async with Engine(folder, EngineConfig(device="cuda", executor="graph", **FIELDS)) as engine:
            with pytest.raises(RequestError, match="executor 'graph' calls no Python functions"):
                engine.generate([5], logits_processors=[lambda ids, logits: None])
            found = await engine.generate([5], max_tokens=9, stop_when=lambda ids, text: len(ids) == 3)
            assert len(found.token_ids) == 3

    anyio.run(main)
