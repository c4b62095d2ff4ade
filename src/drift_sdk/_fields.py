"""Fields of public Structs: checked as their annotations declare them, from keyword arguments and environment
variables.

msgspec's constructors check neither types nor ranges. Each check raises the error class that it is given,
naming field, value and range. Python and msgspec raise a bare TypeError for an unknown keyword argument; the
errors here are a TypeError too, and name the nearest known one. For names of other libraries, and of earlier
versions of this one, they say what takes their place here.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import re
import types
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    ParamSpec,
    SupportsIndex,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Struct

from drift_sdk.errors import ConfigKeywordError, FieldError, RequestKeywordError, short_repr

GRAMMAR = "SamplingParams.grammar, a JsonSchema, Regex or Lark"
SAMPLES = "samples(prompt, n) gives several completions of a prompt"

OTHER_NAMES = {
    # Fields that earlier versions had.
    "exact_prefill": "prompts are exact unless EngineConfig.fast_prompts",
    # Arguments of LLM and EngineArgs in vLLM, and of Llama in llama-cpp-python.
    "data_parallel_size": "EnginePool",
    "download_dir": "EngineConfig.cache_dir",
    "draft_model": "EngineConfig.speculation",
    "enable_chunked_prefill": "always so",
    "enable_prefix_caching": "always so",
    "enforce_eager": 'EngineConfig.executor, "eager"',
    "gpu_memory_utilization": "EngineConfig.gpu_memory_fraction, of the memory that is free",
    "kv_cache_dtype": "EngineConfig.kv_dtype",
    "kv_cache_memory_bytes": "EngineConfig.kv_cache_tokens, in tokens",
    "load_format": "EngineConfig.load",
    "max_context_len": "EngineConfig.max_model_len",
    "max_num_batched_tokens": "EngineConfig.prefill_token_budget, of tokens of prompts",
    "max_seq_len": "EngineConfig.max_model_len",
    "model_path": "model",
    "n_batch": "EngineConfig.prefill_token_budget",
    "n_ctx": "EngineConfig.max_model_len",
    "n_gpu_layers": "EngineConfig.device",
    "n_threads": "EngineConfig.num_threads",
    "num_gpu_blocks_override": "EngineConfig.kv_cache_tokens, in tokens",
    "num_speculative_tokens": "Speculation.shape, such as Chain(3)",
    "prompt_lookup_max": "NGram.max_length",
    "prompt_lookup_min": "NGram.min_length",
    "quantization": "EngineConfig.weights",
    "reasoning_parser": "EngineConfig.reasoning_format",
    "speculative_config": "EngineConfig.speculation",
    "speculative_model": "Speculation.draft",
    "tensor_parallel_size": "EngineConfig.tensor_parallel",
    "tool_call_parser": "EngineConfig.tool_format",
    "tp_size": "EngineConfig.tensor_parallel",
    # Parameters of a request in vLLM, llama-cpp-python, transformers and OpenAI's protocol.
    "bad_words": "SamplingParams.logits_processors, with a TokenMachine",
    "best_of": SAMPLES,
    "chat_template_kwargs": "template_args",
    "continue_final_message": "continue_final",
    "do_sample": "SamplingParams.temperature, 0 without sampling",
    "guided_choice": GRAMMAR,
    "guided_decoding": GRAMMAR,
    "guided_grammar": GRAMMAR,
    "guided_json": GRAMMAR,
    "guided_regex": GRAMMAR,
    "include_stop_str_in_output": "SamplingParams.include_stop",
    "max_completion_tokens": "SamplingParams.max_tokens",
    "max_length": "SamplingParams.max_tokens, without the prompt",
    "max_new_tokens": "SamplingParams.max_tokens",
    "max_reasoning_tokens": "SamplingParams.thinking_budget",
    "min_new_tokens": "SamplingParams.min_tokens",
    "n": SAMPLES,
    "num_return_sequences": SAMPLES,
    "prompt_token_ids": "prompt, which may be token ids",
    "prompts": "prompt; map(prompts) takes several",
    "repeat_penalty": "SamplingParams.repetition_penalty",
    "response_format": GRAMMAR,
    "sampling_params": "params",
    "stop_sequences": "SamplingParams.stop",
    "stream": "always so: iterate over the stream, or await it",
    "structured_outputs": GRAMMAR,
    "thinking_token_budget": "SamplingParams.thinking_budget",
    "timeout": "asyncio.timeout, or anyio.fail_after, around the call",
    "top_logprobs": "SamplingParams.logprobs",
}
"""Name there -> what to write here."""


MAX_NAME_CHARS = 64
"""Longest name of an unknown field that is shown in full, if all of it can be printed."""

ErrorType = type[FieldError]
ValueT = TypeVar("ValueT")
NUMBERS = (int, float)
PLAIN_TYPES = {type(None), bool, int, float, str}


def plain_value(value: object) -> object:
    """The value after `plain_scalar`, and a tuple with its items after it."""
    if not isinstance(value, tuple):
        return plain_scalar(value)

    items = tuple(tuple.__iter__(value))  # a subclass may iterate in its own way
    return items if set(map(type, items)) <= PLAIN_TYPES else tuple(map(plain_scalar, items))


def plain_scalar(value: ValueT) -> ValueT:
    """The plain int, float or str of a value of another class, such as an enum's member or a number of numpy;
    other values as they are. Other classes may compare or hash in their own way, and that may fail on the
    engine's thread."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        return value

    plain: Any = value
    if issubclass(kind, str):
        plain = str.__str__(cast("str", value))
    elif issubclass(kind, float):
        plain = float.__float__(cast("float", value))
    elif hasattr(kind, "__index__"):
        plain = plain_int(value)
    elif issubclass(kind, numbers.Real):
        plain = float(cast("float", value))
    return cast("ValueT", plain)


def plain_int(value: object) -> Any:
    """The int that a value is, of any class but bool: an IntEnum, an integer of numpy or a tensor without
    dimensions, say. Other values as they are."""
    if isinstance(value, bool):
        return value

    try:
        dtype = getattr(value, "dtype", None)
        if dtype is not None and (getattr(value, "shape", ()) != () or not is_integer_dtype(dtype)):
            return value  # a tensor of bools, or with dimensions, may have an index too

        return operator.index(cast("SupportsIndex", value))  # what has no __index__ raises TypeError
    except Exception:  # it may run any code
        return value


def is_integer_dtype(dtype: object) -> bool:
    """Whether a dtype of numpy, torch or a library like them is one of integers."""
    return re.fullmatch(r"(\w+\.)?u?int(8|16|32|64)", str(dtype)) is not None


def unknown_name(
    error: ErrorType,
    name: Any,
    value: object,
    known: Iterable[str],
    *,
    kind: str = "field",
    here: str | None = None,
) -> FieldError:
    """The error for a value under an unknown name.

    kind: of the name, for the message.
    here: what to write instead; None = as OTHER_NAMES says, or nothing.
    """
    allowed = ", ".join(sorted(known))
    is_short = isinstance(name, str) and len(name) <= MAX_NAME_CHARS and name.isprintable()
    shown = name if is_short else short_repr(name)
    hint = ""
    if is_short:
        here = here or OTHER_NAMES.get(name)
        hint = f" (here: {here})" if here is not None else nearest_name(name, known)
    message = f"{shown}={short_repr(value)}: unknown {kind}{hint}, expected one of {allowed}"
    return error(message, field=name, value=value, allowed=allowed)


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Words that suggest the most similar name; empty if none is similar."""
    import difflib  # imported here: few programs need it

    matches = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def check_bool(error: ErrorType, field: str, value: object) -> None:
    """Check for True or False."""
    if not isinstance(value, bool):
        raise error.of(field, value, "True or False")


def check_int(
    error: ErrorType,
    field: str,
    value: object,
    *,
    ge: int | None = None,
    le: int | None = None,
    optional: bool = False,
) -> None:
    """Check for an int that is not a bool, from `ge` to `le` (None = no bound); None passes if `optional`."""
    if value is None and optional:
        return

    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or (ge is not None and value < ge)
        or (le is not None and value > le)
    ):
        raise error.of(field, value, f"an integer{_range(ge, le)}{' or None' if optional else ''}")


def check_float(
    error: ErrorType,
    field: str,
    value: object,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    optional: bool = False,
) -> None:
    """Check for a finite int or float, at least `ge`, over `gt` and at most `le` (None = no bound); None
    passes if `optional`."""
    if value is None and optional:
        return

    if (
        not isinstance(value, NUMBERS)
        or isinstance(value, bool)
        or not _is_finite(value)
        or (ge is not None and value < ge)
        or (gt is not None and value <= gt)
        or (le is not None and value > le)
    ):
        bounds = (
            f" over {gt}{_range(None, le).replace(' ', ' and ', 1)}" if gt is not None else _range(ge, le)
        )
        raise error.of(field, value, f"a finite number{bounds}{' or None' if optional else ''}")


def check_choice(
    error: ErrorType, field: str, value: object, choices: Iterable[str], *, optional: bool = False
) -> None:
    """Check for one of some strings; None passes if `optional`."""
    if value is None and optional:
        return

    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        allowed = "one of " + ", ".join(map(repr, choices))
        raise error.of(field, value, allowed + (" or None" if optional else ""))


def check_str(
    error: ErrorType,
    field: str,
    value: object,
    *,
    max_length: int | None = None,
    optional: bool = False,
) -> None:
    """Check for a string that is not empty; None passes if `optional`. With `max_length`, it has at most so
    many characters and can be encoded as UTF-8."""
    if value is None and optional:
        return

    allowed = "a non-empty string"
    is_right = isinstance(value, str) and value != ""
    if max_length is not None:
        allowed += f" of at most {max_length} characters, without lone surrogates"
        is_right = isinstance(value, str) and 1 <= len(value) <= max_length and is_unicode(value)
    if not is_right:
        raise error.of(field, value, f"{allowed}{' or None' if optional else ''}")


def check_path(error: ErrorType, field: str, value: object, *, optional: bool = False) -> None:
    """Check for a path, or a string that is not empty; None passes if `optional`."""
    if value is None and optional:
        return

    if not isinstance(value, str | Path) or str(value) == "":
        allowed = "a path, a non-empty string or None" if optional else "a path or a non-empty string"
        raise error.of(field, value, allowed)


def check_str_tuple(error: ErrorType, field: str, value: object, *, max_items: int, max_chars: int) -> None:
    """Check for a tuple of strings that are not empty and can be encoded as UTF-8."""
    allowed = (
        f"at most {max_items} non-empty strings of at most {max_chars} characters, without lone surrogates"
    )
    if not isinstance(value, tuple) or len(value) > max_items:
        raise error.of(field, value, allowed)

    for item in value:
        if not isinstance(item, str) or not 1 <= len(item) <= max_chars or not is_unicode(item):
            raise error.of(field, item, allowed)


def is_unicode(text: str) -> bool:
    """Whether a string can be encoded as UTF-8: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False

    return True


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _range(ge: float | None, le: float | None) -> str:
    """The bounds in words, with a leading blank; empty if there are none."""
    if ge is not None and le is not None:
        return f" from {ge} to {le}"

    if ge is not None:
        return f" of at least {ge}"

    return f" of at most {le}" if le is not None else ""


Check = Callable[[ErrorType, str, object], None]
StructT = TypeVar("StructT", bound=Struct)
CHECKS: dict[object, Callable[..., None]] = {
    bool: check_bool,
    int: check_int,
    float: check_float,
    str: check_str,
}


def check_fields(error: ErrorType, struct: Struct) -> None:
    """Check the fields of a new Struct against their types and the bounds in a `Meta`, after `plain_value`.
    What no check follows from, such as a tuple or another Struct, the Struct checks itself."""
    for name, default, check in declared_checks(type(struct)):
        value = getattr(struct, name)
        if value is default:
            continue

        if type(value) not in PLAIN_TYPES and (plain := plain_value(value)) is not value:
            msgspec.structs.force_setattr(struct, name, plain)
            value = plain
        if check is not None:
            check(error, name, value)


@functools.cache
def declared_checks(struct: type[Struct]) -> list[tuple[str, object, Check | None]]:
    """Name, default and check of each field of a Struct. The defaults are checked here, once."""
    found = [(field.name, field.default, check_of(field.type)) for field in msgspec.structs.fields(struct)]
    for name, default, check in found:
        if check is not None and default is not msgspec.NODEFAULT:
            check(FieldError, name, default)
    return found


def check_of(hint: Any) -> Check | None:
    """The check of a field of a type; None for a type that no check follows from."""
    kinds = kinds_of(hint)
    others = [kind for kind in kinds if kind is not type(None)]
    optional: dict[str, Any] = {"optional": True} if len(others) < len(kinds) else {}
    if set(others) == {str, Path}:
        return functools.partial(check_path, **optional)

    if len(others) > 1:
        return None

    bounds: dict[str, Any] = {}
    (kind,) = others
    if get_origin(kind) is Annotated:
        kind, meta = get_args(kind)
        bounds = dict(meta.__rich_repr__())  # the bounds that are set, by name
    if get_origin(kind) is Literal:
        return functools.partial(check_choice, choices=get_args(kind), **optional)

    check = CHECKS.get(kind)
    return functools.partial(check, **bounds, **optional) if check is not None else None


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types that a union consists of, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def check_field_names(
    error: ErrorType, struct: type[Struct], values: Mapping[Any, object], *, name: str = "settings"
) -> None:
    """Raise for `values` that are no mapping, under `name`, and for the first name in them that is not a
    field of the Struct: the message names the nearest field and all fields. Also for more values than fields:
    a mapping of the caller may have no end."""
    if not isinstance(values, Mapping):
        raise error.of(name, values, "a mapping")

    known = set(struct.__struct_fields__)
    for number, field in enumerate(values):
        if field not in known or number == len(known):
            raise unknown_name(error, field, values[field], known)


def make_struct(error: ErrorType, struct: type[StructT], values: Mapping[Any, Any]) -> StructT:
    """A Struct from plain data; `error` for what is no mapping, and for an unknown field."""
    check_field_names(error, struct, values)
    return struct(**values)


def replace_fields(error: ErrorType, struct: StructT, changes: Mapping[str, object]) -> StructT:
    """A copy of a Struct with some fields changed, checked like a new one; `error` for an unknown field."""
    check_field_names(error, type(struct), changes)
    return msgspec.structs.replace(struct, **changes)


P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class CheckedFields(msgspec.StructMeta):
    """A metaclass of Structs whose constructors check the names of their arguments."""

    error: type[FieldError]

    if not TYPE_CHECKING:  # type checkers read the parameters of a constructor from the fields

        def __call__(cls, *values: Any, **fields: Any) -> Any:
            known = cls.__struct_fields__
            for name, value in fields.items():
                if name not in known:
                    raise unknown_name(type(cls).error, name, value, known)

            return super().__call__(*values, **fields)

        @property
        def __signature__(cls) -> inspect.Signature:
            """The signature with plain types: for people, docstrings state the bounds."""
            signature, kinds = super().__signature__, get_type_hints(cls)
            shown = [each.replace(annotation=kinds[each.name]) for each in signature.parameters.values()]
            return signature.replace(parameters=shown)


class ConfigFields(CheckedFields):
    """The metaclass of settings."""

    error: type[FieldError] = ConfigKeywordError


class RequestFields(CheckedFields):
    """The metaclass of prompts and parameters of requests."""

    error: type[FieldError] = RequestKeywordError


def with_config(
    config: type[msgspec.Struct], error: type[FieldError] = ConfigKeywordError
) -> Callable[[Callable[P, ResultT]], Callable[P, ResultT]]:
    """A decorator of functions and coroutine functions: `error` for unknown keyword arguments. Its message
    says if one is a field of the config."""

    def decorate(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
        known = parameters_of(function)

        @functools.wraps(function)
        def checked(*arguments: P.args, **keywords: P.kwargs) -> ResultT:
            check_keywords(error, keywords, known, config)
            return function(*arguments, **keywords)

        @functools.wraps(function)
        async def awaited(*arguments: P.args, **keywords: P.kwargs) -> Any:
            check_keywords(error, keywords, known, config)
            return await cast("Callable[P, Awaitable[object]]", function)(*arguments, **keywords)

        is_awaited = inspect.iscoroutinefunction(function)
        return cast("Callable[P, ResultT]", awaited) if is_awaited else checked

    return decorate


def is_coroutine_function(function: object) -> bool:
    """Whether calling an object makes a coroutine: a function, or an object whose class has an async
    __call__."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - not whether it can be called
    )


def check_options(
    options: Mapping[str, object],
    function: Callable[..., object],
    struct: type[msgspec.Struct],
    config: type[msgspec.Struct],
) -> None:
    """RequestKeywordError for one of the `**options` of a function that is no field of the struct. Its
    message says if it is a field of the config."""
    fields = struct.__struct_fields__
    if not all(name in fields for name in options):
        check_keywords(RequestKeywordError, options, [*parameters_of(function), *fields], config)


def check_keywords(
    error: type[FieldError], keywords: Mapping[str, object], known: list[str], config: type[msgspec.Struct]
) -> None:
    for name, value in keywords.items():
        if name not in known:
            here = f"{config.__name__}.{name}" if name in config.__struct_fields__ else None
            raise unknown_name(error, name, value, known, kind="argument", here=here)


def parameters_of(function: Callable[..., object]) -> list[str]:
    """The names of a function's keyword arguments."""
    parameters = inspect.signature(function).parameters.values()
    named = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    return [name for name in named if name not in ("self", "cls")]


FLAGS = {"true": True, "1": True, "false": False, "0": False}


def read_environment(
    error: type[FieldError], struct: type[Struct], prefix: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The values of a Struct's fields, of those that have a variable: `prefix` and the field's name in upper
    case. A variable that is empty counts as not set, and "none" is None where the field takes None.

    A number, a flag (true or false, 1 or 0) or a JSON object is read as such where the field takes one and no
    string. Raises `error`, naming the variable, for a value of another type, and for a variable with the
    prefix that belongs to no field.
    """
    hints = get_type_hints(struct)
    fields = {f"{prefix}{field.upper()}": field for field in struct.__struct_fields__}
    values: dict[str, Any] = {}
    for variable in sorted(environment):
        text = environment[variable]
        if variable in fields and text:
            values[fields[variable]] = _read(error, variable, text, hints[fields[variable]])
        elif variable.startswith(prefix) and variable not in fields:
            here = OTHER_NAMES.get(variable.removeprefix(prefix).lower())
            hint = nearest_name(variable, fields) if here is None else f" (here: {here})"
            allowed = ", ".join(sorted(fields))
            message = f"{variable}={short_repr(text)}: unknown variable{hint}, expected one of {allowed}"
            raise error(message, field=variable, value=text, allowed=allowed)

    return values


def _read(error: type[FieldError], variable: str, text: str, hint: Any) -> Any:
    """A variable's value as one of the types that the field takes."""
    kinds = kinds_of(hint)
    if type(None) in kinds and text.lower() == "none":
        return None

    if any(kind is str or get_origin(kind) is Literal for kind in kinds):
        return text

    if bool in kinds:
        return _flag(error, variable, text)

    if int in kinds:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            raise error.of(variable, text, "an integer")

        return int(text)

    if float in kinds:
        try:
            return float(text)
        except ValueError:
            raise error.of(variable, text, "a number") from None

    return _object(error, variable, text)


def _flag(error: type[FieldError], variable: str, text: str) -> bool:
    if text.lower() not in FLAGS:
        raise error.of(variable, text, "true, false, 1 or 0")

    return FLAGS[text.lower()]


def _object(error: type[FieldError], variable: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as cause:
        raise error.of(variable, text, f"a JSON object ({cause})") from cause
