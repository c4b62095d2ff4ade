"""Checks of the fields of public Structs: msgspec's constructors check neither types nor ranges.

Each check raises the error class that it is given, naming field, value and range. For names of other
libraries, and of earlier versions of this one, errors say what takes their place here.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar, cast

from drift_sdk.errors import FieldError, short_repr

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
    "bad_words": "none; a logit_bias of -100 bars a token",
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
        allowed += f" of at most {max_length} characters, no lone surrogates"
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
    allowed = f"at most {max_items} non-empty strings of at most {max_chars} characters, no lone surrogates"
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
