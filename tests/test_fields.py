"""Public fields: both ends of each range, values just outside, and wrong types."""

from __future__ import annotations

import inspect
import math
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import anyio
import msgspec
import numpy as np
import pytest
import torch

import drift_sdk
from drift_sdk import (
    Chain,
    ConfigError,
    DriftError,
    DynamicTree,
    Engine,
    EngineConfig,
    EnginePool,
    Job,
    JsonSchema,
    Lark,
    NGram,
    PartialVerification,
    ProcessEngine,
    Regex,
    RequestError,
    Routing,
    SamplingParams,
    Speculation,
    StaticTree,
    SyncEngine,
    TokenBias,
    TokenMachine,
    TokenState,
)
from drift_sdk._fields import OTHER_NAMES, check_fields
from drift_sdk.ray import Placement
from drift_sdk.testing import EOS_TOKEN_ID, Reply, ScriptedModel, scripted_engine

INFINITY, NAN = float("inf"), float("nan")
MOST = 2**31 - 1


class Case(NamedTuple):
    """Valid and rejected values of a field; `given`: values of other fields that they need."""

    valid: tuple[Any, ...]
    rejected: tuple[Any, ...]
    given: dict[str, Any] = {}


def integer(low: int, high: int, *, optional: bool = False, **given: Any) -> Case:
    wrong = (True, False, str(low), float(low), b"1", NAN, INFINITY, (low,), 10**400)
    none = () if optional else (None,)
    return Case((low, high) + (None,) * optional, (low - 1, high + 1, *wrong, *none), given)


def number(low: float, high: float, *, optional: bool = False, is_open: bool = False) -> Case:
    lowest, below = (math.nextafter(low, INFINITY), low) if is_open else (low, math.nextafter(low, -INFINITY))
    wrong = (True, False, str(high), b"1", NAN, INFINITY, -INFINITY, (high,), 10**400, -(10**400), 1j)
    none = () if optional else (None,)
    whole = int(high)
    return Case(
        (lowest, high, whole) + (None,) * optional,
        (below, math.nextafter(high, INFINITY), *wrong, *none),
    )


def flag() -> Case:
    return Case((True, False), (0, 1, None, "true", "", (), 1.0))


def choice(*names: str, **given: Any) -> Case:
    return Case(names, ("", names[0].upper(), f" {names[0]}", None, 1, True, names, {}), given)


def text(*valid: Any, rejected: tuple[Any, ...] = ()) -> Case:
    return Case((*valid, None), ("", 7, True, 1.0, (), ("a",), b"a", *rejected))


def never(token_ids: object, text: object) -> bool:
    return False


class Awaited:
    async def __call__(self, *arguments: object) -> None:
        """A coroutine, which nothing would await."""


async def awaited(*arguments: object) -> None:
    """No function that an engine calls."""


WRONG_IDS = (True, -1, MOST + 1, "5", 5.0, None, b"5")
PARAMS = {
    "max_tokens": integer(1, MOST, optional=True),
    "min_tokens": integer(0, 17, max_tokens=17),
    "temperature": number(0.0, 100.0),
    "top_k": integer(0, MOST),
    "top_p": number(0.0, 1.0, is_open=True),
    "min_p": number(0.0, 1.0),
    "seed": integer(0, 2**63 - 1, optional=True),
    "stop": Case(
        ("a", ("a",), ("a", "b"), (), tuple("ab" * 32), "a" * 1024),
        ("", None, 7, True, ("a", ""), ("a", 7), (None,), b"a", {"a": 1}, ("a",) * 65, "\ud800", "a" * 1025),
    ),
    "stop_token_ids": Case(
        ((), (0,), (EOS_TOKEN_ID,), tuple(range(64))),
        (None, 7, "7", {7: 7}, tuple(range(65)), *((7, wrong) for wrong in WRONG_IDS)),
    ),
    "ignore_eos": flag(),
    "include_stop": flag(),
    "logprobs": integer(0, 20, optional=True),
    "prompt_logprobs": integer(0, 20, optional=True),
    "logprob_token_ids": Case(
        ((), (0,), (EOS_TOKEN_ID, 5, 5), tuple(range(128))),
        (None, 7, "7", {7: 7}, tuple(range(129)), *((7, wrong) for wrong in WRONG_IDS)),
        {"logprobs": 0},
    ),
    "prompt_states": Case(("last", "mean", "all", None), ("", "Last", "first", 1, True, ("last",), b"last")),
    "presence_penalty": number(-2.0, 2.0),
    "frequency_penalty": number(-2.0, 2.0),
    "repetition_penalty": number(0.01, 2.0),
    "logit_bias": Case(
        ({}, {0: -100.0, EOS_TOKEN_ID: 100.0}, {7: 1}),
        (
            None,
            7,
            "7",
            ((7, 1.0),),
            *({wrong: 1.0} for wrong in WRONG_IDS),
            *({7: wrong} for wrong in (True, "1", None, NAN, INFINITY, -INFINITY, 10**400)),
            {7: math.nextafter(100.0, INFINITY)},
            {7: math.nextafter(-100.0, -INFINITY)},
        ),
    ),
    "allowed_token_ids": Case(
        (None, (0,), (EOS_TOKEN_ID,), tuple(range(EOS_TOKEN_ID + 1)), (5, 5)),
        ((), 7, True, "7", {7: 7}, *((7, wrong) for wrong in WRONG_IDS)),
    ),
    "grammar": Case(
        (None, Regex("777"), Lark('start: "777"'), JsonSchema({"type": "integer"})),
        ("777", b"7", {"type": "integer"}, 7, True, (), Regex, (Regex("777"),)),
    ),
    "thinking_budget": integer(0, 2**31 - 1, optional=True),
    "logits_processors": Case(
        ((), (TokenBias({5: 1.0}),), (TokenMachine((TokenState(),)),), (TokenBias({5: 1.0}),) * 16),
        (
            None,
            7,
            "7",
            print,
            (7,),
            (None,),
            (TokenBias,),
            (TokenState(),),
            (print,) * 17,
            (awaited,),
            (Awaited(),),
        ),
    ),
    "stop_when": Case((None, never), (7, "7", True, (), (print,), int, awaited, Awaited())),
    "priority": integer(-(2**31), 2**31 - 1),
    "cache_salt": text("tenant 1", "\N{SNOWMAN}", "a" * 1024, rejected=("a" * 1025, "\ud800")),
    "num_draft_tokens": integer(0, 63, optional=True),
}
CONFIG = {
    "device": Case(
        ("auto", "cpu", "cuda", "cuda:0", "cuda:99"),
        (
            "",
            None,
            0,
            True,
            "tpu",
            "cpu:0",
            "cuda:",
            "cuda:-1",
            "cuda:100",
            "cuda:x",
            "cuda:01",
            "CPU",
            "cpu ",
        ),
    ),
    "dtype": choice("auto", "float32", "bfloat16", "float16"),
    "max_num_seqs": integer(1, 4096),
    "max_model_len": integer(2, 2**24, optional=True),
    "block_size": Case((None, 1, 2, 16, 1024), (0, -1, 3, 24, 2048, True, "16", 16.0, NAN, 10**400)),
    "kv_cache_tokens": integer(2, MOST, optional=True),
    "prefill_token_budget": integer(1, 2**20, optional=True),
    "max_queued_requests": integer(0, MOST, optional=True),
    "gpu_memory_fraction": number(0.0, 1.0, is_open=True),
    "target_latency_ms_p50": number(0.0, 1e6, optional=True, is_open=True),
    "target_latency_ms_p95": number(0.0, 1e6, optional=True, is_open=True),
    "prefer_high_throughput": flag(),
    "executor": choice("auto", "eager", "graph"),
    "strict_performance": flag(),
    "step_timeout_s": number(0.0, 1e6, optional=True, is_open=True),
    "tuning": choice("off", "short", "full"),
    "shape_log": text("file", Path("file")),
    "fast_prompts": flag(),
    "num_threads": integer(1, 1024, optional=True),
    "tensor_parallel": integer(1, 64),
    "weights": Case((None, "stored", "expanded", "fp8", "int4", "nvfp4"), ("", "FP8", "int8", 8, True, ())),
    "kv_dtype": Case((None, "fp8", "nvfp4"), ("", "FP8", "auto", "bfloat16", 8, True, ())),
    "load": choice("auto", "random"),
    "revision": text("main"),
    "cache_dir": text("folder", Path("folder")),
    "local_files_only": flag(),
    "tokenizer": text("folder", Path("folder")),
    "chat_template": text("{{ messages }}", rejected=(Path("folder"),)),
    "tool_format": Case(
        ("auto", *("json", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral"), "harmony", None),
        ("", "Hermes", "think", 7, True, ()),
    ),
    "reasoning_format": Case(
        ("auto", "think", "mistral", "granite", "harmony", None), ("", "<think>", "hermes", 7, True, ())
    ),
    "speculation": Case(
        (None, Speculation(draft="folder"), Speculation(draft=NGram())),
        ("folder", 7, True, {}, (), NGram(), Speculation),
    ),
}
ROUTING = {"affinity": number(1.0, 1e6, optional=True), "replay": flag()}
TABLES = [
    (SamplingParams, RequestError, PARAMS),
    (EngineConfig, ConfigError, CONFIG),
    (Routing, ConfigError, ROUTING),
]
FIELDS = [(*table, field) for table in TABLES for field in table[0].__struct_fields__]
ids = [f"{fields[0].__name__}.{fields[3]}" for fields in FIELDS]


@pytest.mark.parametrize("struct, error, cases", TABLES)
def test_every_field_has_a_case(struct: type, error: type, cases: dict[str, Case]) -> None:
    assert set(cases) == set(struct.__struct_fields__)


@pytest.mark.parametrize("struct, error, cases, field", FIELDS, ids=ids)
def test_field_accepts_its_range_and_rejects_the_rest(
    struct: Any, error: type, cases: dict[str, Case], field: str
) -> None:
    assert field in cases, f"{field} has no case"
    case = cases[field]
    struct(**{field: getattr(struct(), field)})
    for value in case.valid:
        kept = getattr(struct(**case.given, **{field: value}), field)
        assert kept in (value, (value,)), f"{field}={value!r} became {kept!r}"

    for value in case.rejected:
        with pytest.raises(DriftError) as caught:
            struct(**case.given, **{field: value})
        check_rejection(caught.value, error, field, value)


@pytest.mark.parametrize("error", [ConfigError, RequestError])
def test_defaults_are_checked_too(error: type[DriftError]) -> None:
    class Wrong(msgspec.Struct):
        number: Annotated[int, msgspec.Meta(ge=1)] = 0

    with pytest.raises(DriftError, match="^number=0: expected an integer of at least 1$"):
        check_fields(error, Wrong())


def test_bound_of_another_kind_than_the_checks_know_is_no_bound_in_silence() -> None:
    class Even(msgspec.Struct):
        number: Annotated[int, msgspec.Meta(multiple_of=2)] = 0

    with pytest.raises(TypeError, match="multiple_of"):
        check_fields(ConfigError, Even())


def descriptions(struct: type) -> dict[str, str]:
    """What the docstring of a Struct says of each field."""
    found: dict[str, str] = {}
    for line in (inspect.getdoc(struct) or "").splitlines():
        name, colon, text = line.partition(":")
        if colon and name in struct.__struct_fields__:
            found[name] = text
        elif line.startswith(" ") and found:
            found[[*found][-1]] += line
    return found


@pytest.mark.parametrize(
    "struct",
    [SamplingParams, EngineConfig, Routing, Placement, Speculation, Chain, StaticTree, DynamicTree, NGram]
    + [PartialVerification],
)
def test_docstring_describes_every_field_and_states_its_bounds(struct: Any) -> None:
    """But for bounds of a million and more, which are there so that numbers fit into 32 bits."""
    described = descriptions(struct)
    assert list(described) == list(struct.__struct_fields__)
    for field in msgspec.structs.fields(struct):
        for kind in (field.type, *get_args(field.type)):
            bounds = dict(kind.__metadata__[0].__rich_repr__()) if get_origin(kind) is Annotated else {}
            for bound in bounds.values():
                stated = rf"(?<![\w.,-]){re.escape(f'{bound:,.7g}')}(?![\w*]|[.,]\d)"
                assert abs(bound) >= 1e6 or re.search(stated, described[field.name]), (field.name, bound)


def check_rejection(found: Any, error: type, field: str, value: Any) -> None:
    """Check the error's class, and that it names the field, the value (or the wrong item of it) and what is
    allowed."""
    assert type(found) is error
    assert found.field == field
    assert repr(found.value) in repr(value), (found.value, value)
    assert found.allowed
    shown = repr(found.value)
    if len(shown) <= 100:
        assert str(found) == f"{field}={shown}: expected {found.allowed}"
    else:
        assert str(found).startswith(f"{field}={shown[:50]}")
        assert str(found).endswith(f"{shown[-1]}: expected {found.allowed}")
        assert len(str(found)) < 1000


def test_wrong_params_do_not_reach_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with scripted_engine("Hello!") as engine:
            submitted: list[Any] = []
            submit = engine._driver.submit
            monkeypatch.setattr(
                engine._driver, "submit", lambda request: (submitted.append(request), submit(request))
            )
            for field, case in PARAMS.items():
                for value in case.rejected:
                    with pytest.raises(RequestError):
                        engine.generate("x", SamplingParams(**case.given, **{field: value}))
                    if value != {"5": 1.0}:  # the key 5 as JSON has it
                        with pytest.raises(RequestError):
                            engine.generate("x", SamplingParams.from_dict({**case.given, field: value}))
                    with pytest.raises(RequestError, match="params"):
                        engine.chat([{"role": "user", "content": "x"}], {field: value})
            assert submitted == []
            assert engine.stats().num_running == engine.stats().num_steps == 0
            assert (await engine.generate("x")).text == "Hello!"
            assert len(submitted) == 1

    anyio.run(main)


QUESTION = [{"role": "user", "content": "x"}]


def test_valid_params_are_served() -> None:
    async def main() -> None:
        config = EngineConfig(max_model_len=64, kv_cache_tokens=1024)
        async with scripted_engine("777", config=config) as engine:
            for field, case in PARAMS.items():
                for value in case.valid:
                    params = SamplingParams(**case.given, **{field: value})
                    is_chat = field == "thinking_budget"
                    stream = engine.chat(QUESTION, params) if is_chat else engine.generate("x", params)
                    completion = await stream
                    assert completion.token_ids and "777".startswith(completion.text), (field, value)
                    assert params.seed in (None, completion.seed)

    anyio.run(main)


def test_engine_rejects_a_wrong_config_and_model() -> None:
    for wrong in ({}, "auto", SamplingParams(), 7):
        with pytest.raises(ConfigError) as caught:
            Engine("folder", wrong)
        check_rejection(caught.value, ConfigError, "config", wrong)
    for wrong in ("", None, 7, b"folder", True):
        with pytest.raises(ConfigError) as caught:
            Engine(wrong)
        check_rejection(caught.value, ConfigError, "model", wrong)


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias", "allowed_token_ids"])
def test_ids_outside_the_vocabulary_are_rejected(field: str) -> None:
    """The vocabulary is known once the model is open, so the stream raises the error."""
    outside = EOS_TOKEN_ID + 1

    async def main() -> None:
        async with scripted_engine() as engine:
            ids = {outside: 1.0} if field == "logit_bias" else (5, outside)
            with pytest.raises(RequestError) as caught:
                await engine.generate("x", SamplingParams(**{field: ids}))
            check_rejection(caught.value, RequestError, field, outside)
            assert str(EOS_TOKEN_ID) in caught.value.allowed

    anyio.run(main)


class Unprintable:
    def __repr__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "value",
    [10**10_000, "x" * 10**7, b"x" * 10**7, ["x" * 10**6] * 99, {"x" * 10**6: {}}, Unprintable()],
    ids=["digits", "text", "bytes", "list", "dict", "unprintable"],
)
def test_error_messages_stay_short(value: Any) -> None:
    """Values of any type and size, in every place that an error names."""
    names = ("max_tokens", "temperature", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "grammar")
    attempts = [lambda name=name: SamplingParams(**{name: value}) for name in names]
    attempts += [
        lambda: SamplingParams(stop=(value, "a", 7)),
        lambda: SamplingParams(allowed_token_ids=[value]),
        lambda: SamplingParams(logit_bias={7: value}),
        lambda: SamplingParams.from_dict({"unknown": value}),
        lambda: SamplingParams.from_dict({str(type(value)) * 10**5: value}),
        lambda: SamplingParams.from_dict([value]),
        lambda: EngineConfig(device=value),
        lambda: EngineConfig(dtype=value),
        lambda: EngineConfig(speculation=value),
        lambda: EngineConfig(max_num_seqs=value),
        lambda: Speculation(draft=NGram(), shape=value),
    ]
    for attempt in attempts:
        with pytest.raises(DriftError) as caught:
            attempt()
        assert len(str(caught.value)) < 2000
        assert "expected" in str(caught.value)


def test_long_messages_are_cut_in_the_middle() -> None:
    message = str(DriftError(f"start {'x' * 10**6} end"))
    assert message.startswith("start xxx") and message.endswith("xxx end")
    assert len(message) <= 4000
    assert str(DriftError("short")) == "short"


@pytest.mark.parametrize(
    "prompt",
    [[], "", [2**70], [True], [1.0], [None], ["a"], [[1]], [10**10_000], [5, -1], "a\ud800b" * 10**6],
)
def test_wrong_prompts_are_rejected(prompt: Any) -> None:
    async def main() -> None:
        async with scripted_engine("Hello!") as engine:
            with pytest.raises(RequestError) as caught:
                await engine.generate(prompt)
            assert caught.value.field == "prompt" and len(str(caught.value)) < 1000
            assert (await engine.generate("x")).text == "Hello!"

    anyio.run(main)


@pytest.mark.parametrize("prompt", [None, 7, b"abc", {1: 2}, {1}, iter([1]), np.int64(5)])
def test_value_that_is_no_prompt_is_rejected_at_the_call(prompt: Any) -> None:
    async def main() -> None:
        async with scripted_engine("Hello!") as engine:
            with pytest.raises(RequestError, match="prompt="):
                engine.generate(prompt)

    anyio.run(main)


@pytest.mark.parametrize("number", [np.int64(5), np.uint8(5), np.array(5), torch.tensor(5)])
def test_integers_of_other_libraries_are_taken(number: Any) -> None:
    bias = {number: number} if not isinstance(number, np.ndarray) else {}  # an array has no hash
    ids = {"stop_token_ids": [number], "allowed_token_ids": (number, 6), "logit_bias": bias}
    params = SamplingParams(max_tokens=number, seed=number, top_k=number, min_tokens=number, **ids)
    for name in ("max_tokens", "seed", "top_k", "min_tokens"):
        assert type(getattr(params, name)) is int and getattr(params, name) == 5
    assert (params.stop_token_ids, params.allowed_token_ids) == ((5,), (5, 6))
    assert all(type(each) is int for each in (*params.stop_token_ids, *params.allowed_token_ids))
    assert params.logit_bias in ({5: 5.0}, {})
    assert EngineConfig(max_num_seqs=number, block_size=None) == EngineConfig(max_num_seqs=5)
    assert Speculation(draft=NGram(min_length=number), shape=Chain(number)).shape.num_draft_tokens == 5


@pytest.mark.parametrize(
    "wrong",
    [np.bool_(True), np.array(True), np.float32(5.0), np.array([5]), torch.tensor(True), torch.tensor([5])],
)
def test_values_of_other_libraries_that_are_no_integers_are_rejected(wrong: Any) -> None:
    with pytest.raises(RequestError, match="^max_tokens=.*: expected an integer"):
        SamplingParams(max_tokens=wrong)
    with pytest.raises(ConfigError, match="^max_num_seqs=.*: expected an integer"):
        EngineConfig(max_num_seqs=wrong)
    with pytest.raises(RequestError, match="^stop_token_ids="):
        SamplingParams(stop_token_ids=[wrong])


def test_floats_of_numpy_are_taken() -> None:
    assert type(Routing(affinity=np.float32(1.5)).affinity) is float
    assert type(Placement(num_gpus=np.float32(0.5)).num_gpus) is float
    for number in (np.float64(0.5), np.float32(0.5), np.float16(0.5)):
        params = SamplingParams(temperature=number, logit_bias={7: number})
        assert type(params.temperature) is float and params.temperature == params.logit_bias[7] == 0.5


def test_max_tokens_bounds_min_tokens() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=MOST).min_tokens == MOST
    assert SamplingParams(min_tokens=256).max_tokens == 256
    with pytest.raises(RequestError, match="min_tokens=257: expected an integer from 0 to 256"):
        SamplingParams(min_tokens=257)


@pytest.mark.parametrize("other", ["hermes", None])
def test_harmony_is_the_format_of_both_or_of_neither(other: str | None) -> None:
    assert EngineConfig(tool_format="harmony", reasoning_format="harmony").tool_format == "harmony"
    for given, wrong in (("tool_format", "reasoning_format"), ("reasoning_format", "tool_format")):
        value = "think" if other is not None and wrong == "reasoning_format" else other
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**{given: "harmony", wrong: value})
        check_rejection(caught.value, ConfigError, wrong, value)


@pytest.mark.parametrize("dtype", ["float16"])
def test_dtype_that_the_cpu_lacks_is_rejected(dtype: str) -> None:
    assert EngineConfig(dtype=dtype, device="cuda").dtype == dtype
    with pytest.raises(ConfigError) as caught:
        EngineConfig(dtype=dtype, device="cpu")
    check_rejection(caught.value, ConfigError, "dtype", dtype)


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_stop_strings_wait_for_min_tokens(tokens_per_step: int) -> None:
    async def main() -> None:
        async with scripted_engine("abcabcabc", tokens_per_step=tokens_per_step) as engine:
            for min_tokens, stop, expected in (
                (0, "b", "a"),
                (1, "b", "a"),
                (2, "b", "abca"),
                (4, "b", "abca"),
                (5, "b", "abcabca"),
                (3, "ca", "abcab"),
                (9, "b", "abcabcabc"),
            ):
                found = await engine.generate("x", SamplingParams(min_tokens=min_tokens, stop=stop))
                assert found.text == expected, (min_tokens, stop)

    anyio.run(main)


def test_from_dict_takes_wire_input() -> None:
    wire = (
        '{"max_tokens": 5, "stop": ["a", "b"], "stop_token_ids": [1], "allowed_token_ids": [4, 5],'
        ' "logit_bias": {"5": -100, "50256": 3.5}, "seed": null, "temperature": 1}'
    )
    assert SamplingParams.from_dict(msgspec.json.decode(wire)) == SamplingParams(
        max_tokens=5,
        stop=("a", "b"),
        stop_token_ids=(1,),
        allowed_token_ids=(4, 5),
        logit_bias={5: -100.0, 50256: 3.5},
        temperature=1.0,
    )
    assert SamplingParams.from_dict({}) == SamplingParams()
    for key in ("five", "-5", "", " 5", "05", "\u0665", "9" * 5000):
        with pytest.raises(RequestError) as caught:
            SamplingParams.from_dict({"logit_bias": {key: 1.0}})
        check_rejection(caught.value, RequestError, "logit_bias", {key: 1.0})
    with pytest.raises(RequestError, match="each token id once"):
        SamplingParams.from_dict({"logit_bias": {"5": 1.0, 5: 2.0}})
    for wrong in (None, 7, "{}", [("max_tokens", 5)]):
        with pytest.raises(RequestError) as caught:
            SamplingParams.from_dict(wrong)
        check_rejection(caught.value, RequestError, "params", wrong)


@pytest.mark.parametrize("name", ["max_token", "n", "best_of", "", "Temperature", "__class__", 7])
def test_from_dict_names_an_unknown_field(name: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict({"max_tokens": 5, name: 1})
    error = caught.value
    assert (error.field, error.value) == (name, 1)
    assert all(field in error.allowed and field in str(error) for field in SamplingParams.__struct_fields__)
    assert str(error).startswith(f"{name}=1: unknown field")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("Stop", "stop"), ("x", None), ("", None)],
)
def test_unknown_field_names_the_nearest_one(name: str, nearest: str | None) -> None:
    hint = f" (did you mean {nearest}?)" if nearest is not None else ""
    for attempt in (
        lambda: SamplingParams.from_dict({name: 0.5}),
        lambda: SamplingParams().replace(**{name: 0.5}),
    ):
        with pytest.raises(RequestError) as caught:
            attempt()
        assert str(caught.value).startswith(
            f"{name}=0.5: unknown field{hint}, expected one of allowed_token_ids,"
        )
        assert caught.value.field == name


@pytest.mark.parametrize(
    ("make", "error", "name", "said"),
    [
        (
            EngineConfig,
            ConfigError,
            "max_num_seq",
            r"unknown field \(did you mean max_num_seqs\?\), expected one",
        ),
        (EngineConfig, ConfigError, "gpu_memory_utilization", r"\(here: EngineConfig\.gpu_memory_fraction, "),
        (EngineConfig, ConfigError, "max_num_batched_tokens", r"\(here: EngineConfig\.prefill_token_budget"),
        (EngineConfig, ConfigError, "kv_cache_dtype", r"\(here: EngineConfig\.kv_dtype\)"),
        (EngineConfig, ConfigError, "tensor_parallel_size", r"\(here: EngineConfig\.tensor_parallel\)"),
        (EngineConfig, ConfigError, "enforce_eager", r"\(here: EngineConfig\.executor"),
        (SamplingParams, RequestError, "n", r"\(here: samples\(prompt, n\)"),
        (SamplingParams, RequestError, "best_of", r"\(here: samples\(prompt, n\)"),
        (SamplingParams, RequestError, "max_new_tokens", r"\(here: SamplingParams\.max_tokens\)"),
        (SamplingParams, RequestError, "guided_json", r"\(here: SamplingParams\.grammar, a JsonSchema"),
        (SamplingParams, RequestError, "temprature", r"\(did you mean temperature\?\)"),
        (partial(Speculation, draft="x"), ConfigError, "ngram", r"\(did you mean ngrams\?\)"),
        (Chain, ConfigError, "num_draft_token", r"\(did you mean num_draft_tokens\?\)"),
        (PartialVerification, ConfigError, "sinks", "expected one of refresh_tokens, "),
        (Routing, ConfigError, "unknown", "unknown field, expected one of"),
        (partial(Job, key=1, prompt="a"), RequestError, "param", r"\(did you mean params\?\)"),
        (
            partial(Engine, "m"),
            ConfigError,
            "max_model_len",
            r"unknown argument \(here: EngineConfig\.max_model_len\)",
        ),
        (partial(Engine, "m"), ConfigError, "conf", r"\(did you mean config\?\), expected one of config, "),
        (
            partial(SyncEngine, "m"),
            ConfigError,
            "gpu_memory_utilization",
            r"\(here: EngineConfig\.gpu_memory",
        ),
        (partial(ProcessEngine, "m"), ConfigError, "dtype", r"\(here: EngineConfig\.dtype\)"),
        (
            partial(EnginePool.on_devices, "m", devices=["cpu"]),
            ConfigError,
            "dtype",
            r"\(here: EngineConfig\.dtype\), expected one of config, devices, ",
        ),
        (partial(drift_sdk.inspect, "m"), ConfigError, "dtype", r"\(here: EngineConfig\.dtype\)"),
        (
            partial(EnginePool, []),
            ConfigError,
            "route",
            r"\(did you mean routing\?\), expected one of replicas,",
        ),
        (partial(EnginePool, []), ConfigError, "device", r"\(here: EngineConfig\.device\)"),
        (partial(JsonSchema, {}), RequestError, "schem", r"\(did you mean schema\?\)"),
        (Regex, RequestError, "patern", r"\(did you mean pattern\?\)"),
        (Lark, RequestError, "gramar", r"\(did you mean grammar\?\)"),
        (
            partial(Speculation, draft="x"),
            ConfigError,
            "num_speculative_tokens",
            r"\(here: Speculation\.shape",
        ),
        (scripted_engine, ConfigError, "max_model_len", r"\(here: EngineConfig\.max_model_len\)"),
        (ScriptedModel, ConfigError, "step", r"\(did you mean step_s\?\)"),
        (Reply, ConfigError, "token", r"\(did you mean token_s\?\)"),
    ],
)
def test_unknown_keyword_is_named_with_what_is_written_here(
    make: Any, error: type[Exception], name: str, said: str
) -> None:
    with pytest.raises(error, match=f"^{name}=5: .*{said}") as caught:
        make(**{name: 5})
    assert (caught.value.field, caught.value.value) == (name, 5)
    assert isinstance(caught.value, TypeError)  # which Python raises for it
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)


def test_names_of_other_libraries_are_no_fields_and_what_they_name_exists() -> None:
    for name, here in OTHER_NAMES.items():
        assert name not in EngineConfig.__struct_fields__ and name not in SamplingParams.__struct_fields__
        for struct, field in re.findall(r"(EngineConfig|SamplingParams|Speculation|NGram)\.(\w+)", here):
            assert field in getattr(drift_sdk, struct).__struct_fields__


@pytest.mark.parametrize("is_exact", [False, True])
def test_removed_field_names_what_took_its_place(is_exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"exact_prefill": is_exact}
    monkeypatch.setenv("DRIFT_EXACT_PREFILL", str(is_exact))
    ways = (
        lambda: EngineConfig(**fields),
        lambda: EngineConfig.from_dict(fields),
        lambda: EngineConfig().replace(**fields),
        EngineConfig.from_env,
    )
    for way in ways:
        with pytest.raises(ConfigError, match="prompts are exact unless EngineConfig.fast_prompts"):
            way()


def test_signatures_of_constructors_are_kept() -> None:
    for struct in (EngineConfig, SamplingParams, Speculation, Chain):
        parameters = inspect.signature(struct).parameters
        assert list(parameters) == list(struct.__struct_fields__)
        assert {each.name: each.annotation for each in parameters.values()} == get_type_hints(struct)
    assert list(inspect.signature(Engine).parameters)[:2] == ["model", "config"]
    assert not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(Engine).parameters.values()
    )


def test_replace_checks_what_it_changes() -> None:
    params = SamplingParams(max_tokens=5, stop="a")
    assert params.replace() == params
    assert params.replace(stop=["b"], temperature=0.5) == SamplingParams(
        max_tokens=5, stop=("b",), temperature=0.5
    )
    with pytest.raises(RequestError, match="temperature=-1: expected"):
        params.replace(temperature=-1)
    with pytest.raises(RequestError, match="min_tokens=6: expected an integer from 0 to 5"):
        params.replace(min_tokens=6)
    config = EngineConfig(max_num_seqs=3)
    assert config.replace(dtype="float32") == EngineConfig(max_num_seqs=3, dtype="float32")
    with pytest.raises(ConfigError, match="max_num_seqs=0: expected"):
        config.replace(max_num_seqs=0)
    with pytest.raises(
        ConfigError, match=r"max_seqs=5: unknown field \(did you mean max_num_seqs\?\)"
    ) as caught:
        config.replace(max_seqs=5)
    assert (caught.value.field, caught.value.value) == ("max_seqs", 5)


def test_device_of_torch_is_rejected_with_the_string_to_give() -> None:
    for name in ("cpu", "cuda:1"):
        with pytest.raises(ConfigError) as caught:
            EngineConfig(device=torch.device(name))
        assert f': expected a string, here "{name}": "auto", "cpu", ' in str(caught.value)


@pytest.mark.parametrize("struct, error, cases, field", FIELDS, ids=ids)
def test_structs_are_immutable_hashable_and_can_be_pickled(
    struct: Any, error: type, cases: dict[str, Case], field: str
) -> None:
    made = struct()
    with pytest.raises(AttributeError):
        setattr(made, field, getattr(made, field))
    with pytest.raises(AttributeError):
        delattr(made, field)
    for value in cases[field].valid:
        made = struct(**cases[field].given, **{field: value})
        twin = struct(**cases[field].given, **{field: value})
        assert made == twin and hash(made) == hash(twin)
        assert pickle.loads(pickle.dumps(made)) == made


def test_tuples_of_subclasses_become_plain_tuples_of_plain_values() -> None:
    class Values(tuple[Any, ...]):
        def __iter__(self) -> Any:
            raise TypeError("iterates in its own way")

    class Number(int):
        def __eq__(self, other: object) -> bool:
            raise TypeError("compared in its own way")

        __hash__ = int.__hash__

    params = SamplingParams(
        stop=Values(("a",)), stop_token_ids=Values((Number(3),)), allowed_token_ids=Values((Number(4),))
    )
    assert params == SamplingParams(stop=("a",), stop_token_ids=(3,), allowed_token_ids=(4,))
    for value in (params.stop, params.stop_token_ids, params.allowed_token_ids):
        assert type(value) is tuple and type(value[0]) in (int, str)


def test_values_of_subclasses_become_values_of_the_plain_types() -> None:
    class Text(str):
        def __radd__(self, other: str) -> str:
            return "added in its own way"

    class Number(int):
        def __lt__(self, other: object) -> bool:
            raise TypeError("compared in its own way")

    params = SamplingParams(
        temperature=np.float64(0.5),
        priority=Number(1),
        stop=[Text("a"), "b"],
        stop_token_ids=[Number(3)],
        logit_bias={Number(5): np.float64(1.5)},
        grammar=Regex(Text("[ab]")),
    )
    assert params == SamplingParams(
        temperature=0.5,
        priority=1,
        stop=["a", "b"],
        stop_token_ids=[3],
        logit_bias={5: 1.5},
        grammar=Regex("[ab]"),
    )
    ((token_id, addend),) = params.logit_bias.items()
    assert isinstance(params.grammar, Regex)
    found = [params.temperature, params.priority, *params.stop, *params.stop_token_ids, token_id, addend]
    types = [float, int, str, str, int, int, float, str, str]
    assert [*map(type, [*found, params.grammar.pattern, JsonSchema(Text("{}")).schema])] == types

    config = EngineConfig(
        max_num_seqs=Number(2), gpu_memory_fraction=np.float64(0.5), chat_template=Text("a")
    )
    assert config == EngineConfig(max_num_seqs=2, gpu_memory_fraction=0.5, chat_template="a")
    settings = (config.max_num_seqs, config.gpu_memory_fraction, config.chat_template)
    assert [*map(type, settings)] == [int, float, str]

    draft, partial = NGram(min_length=Number(2)), PartialVerification(refresh_tokens=Number(9))
    tree = DynamicTree(top_k=Number(2), depth=Number(2), num_draft_tokens=Number(4))
    numbers = (draft.min_length, Chain(Number(3)).num_draft_tokens, partial.refresh_tokens)
    numbers += (tree.top_k, tree.depth, tree.num_draft_tokens)
    assert [*map(type, numbers)] == [int] * 6


def test_later_changes_of_lists_do_not_change_params() -> None:
    stops, ids, bias = ["a"], [1, 2], {5: 1.0, 3: 2.0}
    params = SamplingParams(stop=stops, stop_token_ids=ids, allowed_token_ids=ids, logit_bias=bias)
    stops.append("b")
    ids.append(3)
    bias[7] = 3.0
    assert params.stop == ("a",)
    assert params.stop_token_ids == params.allowed_token_ids == (1, 2)
    assert params.logit_bias == {3: 2.0, 5: 1.0} and list(params.logit_bias) == [3, 5]
    with pytest.raises(TypeError):
        params.logit_bias[5] = 2.0


@pytest.mark.parametrize("struct, error, cases", TABLES)
def test_fields_are_given_by_name(struct: Any, error: type, cases: dict[str, Case]) -> None:
    with pytest.raises(TypeError):
        struct(5)
    with pytest.raises(TypeError, match="unknown"):
        struct(unknown=5)


@pytest.mark.parametrize("field", ["weights", "kv_dtype", "tool_format", "reasoning_format"])
def test_range_of_an_optional_choice_has_none(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}='none': expected one of .* or None"):
        EngineConfig(**{field: "none"})
