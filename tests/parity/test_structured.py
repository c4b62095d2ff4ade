"""Structured output of a real model: its text is JSON that the schema describes, for many schemas."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import numpy as np
import pytest

from drift_sdk import Completion, Engine, EngineConfig, JsonSchema, SamplingParams
from drift_sdk.text.grammar import GrammarConstraint

NUM_COMPLETIONS = 24


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text(length: int, **more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": length, **more}


INTEGER = {"type": "integer", "minimum": 0, "maximum": 999}
FLAG = {"type": "boolean"}
NULL = {"type": "null"}
COLOUR = {"enum": ["red", "green", "blue", "no colour"]}

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": closed(name=text(12), age=INTEGER),
    "nested": closed(owner=closed(name=text(10), address=closed(town=text(10), number=INTEGER))),
    "enum": closed(colour=COLOUR, size={"enum": ["S", "M", "L"]}),
    "mixed enum": {"enum": ["yes", "no", 1, 2.5, None, True]},
    "const": closed(kind={"const": "point"}, x=INTEGER, y=INTEGER),
    "array of integers": {"type": "array", "items": INTEGER, "minItems": 3, "maxItems": 6},
    "array of strings": closed(tags={"type": "array", "items": text(8), "minItems": 1, "maxItems": 4}),
    "array of objects": {"type": "array", "items": closed(id=INTEGER, on=FLAG), "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [text(6), INTEGER, FLAG], "items": False, "minItems": 3},
    "integer range": closed(year={"type": "integer", "minimum": 1987, "maximum": 2031}),
    "negative range": closed(celsius={"type": "integer", "minimum": -40, "exclusiveMaximum": 0}),
    "number range": closed(share={"type": "number", "minimum": 0.0, "maximum": 1.0}),
    "multiple": closed(minutes={"type": "integer", "minimum": 0, "maximum": 240, "multipleOf": 15}),
    "pattern": closed(plate=text(9, pattern="^[A-Z]{1,3}-[0-9]{2,4}$"), code=text(4, pattern="^[a-f]+$")),
    "string lengths": closed(word={"type": "string", "minLength": 3, "maxLength": 9}),
    "format": closed(day={"type": "string", "format": "date"}),
    "any of": {"anyOf": [closed(error=text(12)), closed(value=INTEGER, is_final=FLAG), NULL]},
    "nullable": closed(
        nickname={"anyOf": [text(8), NULL]}, parent={"type": ["integer", "null"], "minimum": 0}
    ),
    "refs": {
        "$ref": "#/$defs/pair",
        "$defs": {
            "pair": closed(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
            "leaf": text(7),
        },
    },
    "optional": {
        "type": "object",
        "properties": {"a": FLAG, "b": COLOUR, "c": INTEGER},
        "additionalProperties": False,
    },
}

# The number of digits after a decimal point is not limited: at temperature 1 a model may write very many.
OPEN_ENDED = {"number range"}


@pytest.mark.slow
def test_completions_match_their_schemas(
    smollm2_file: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    seconds: list[float] = []
    advance = GrammarConstraint.advance

    def timed(self: GrammarConstraint, token_ids: tuple[int, ...]) -> None:
        started_at = time.perf_counter()
        advance(self, token_ids)
        seconds.append(time.perf_counter() - started_at)

    monkeypatch.setattr(GrammarConstraint, "advance", timed)
    names = [name for name, _ in zip(itertools.cycle(SCHEMAS), range(NUM_COMPLETIONS), strict=False)]
    completions: dict[int, Completion] = {}

    async def main() -> None:
        config = EngineConfig(dtype="float32", device="cpu", max_num_seqs=32, max_model_len=256)
        async with Engine(smollm2_file, config) as engine:

            async def ask(index: int) -> None:
                grammar = JsonSchema(SCHEMAS[names[index]])
                params = SamplingParams(temperature=1.0, seed=index, max_tokens=160, grammar=grammar)
                prompt = f"Example {index} of {names[index]} JSON:\n"
                completions[index] = await engine.generate(prompt, params)

            async with anyio.create_task_group() as tasks:
                for index in range(NUM_COMPLETIONS):
                    tasks.start_soon(ask, index)

    anyio.run(main)
    num_cut = 0
    for index, name in enumerate(names):
        completion = completions[index]
        if completion.finish_reason == "length":
            num_cut += 1
            assert name in OPEN_ENDED and completion.parsed is None
            continue

        assert completion.finish_reason == "stop", name
        value = json.loads(completion.text)
        assert completion.parsed == value
        validator = jsonschema.Draft202012Validator
        validator(SCHEMAS[name], format_checker=validator.FORMAT_CHECKER).validate(value)

    assert num_cut <= 2
    num_texts = len({completion.text for completion in completions.values()})
    assert num_texts > NUM_COMPLETIONS // 2  # the seeds differ
    micros = np.quantile(np.array(seconds) * 1e6, [0.5, 0.99]).round().tolist()
    record_property("mask_us_p50_p99", micros)
    record_property("num_tokens", sum(c.usage.completion_tokens for c in completions.values()))
