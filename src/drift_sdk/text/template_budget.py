"""A Jinja sandbox in which rendering takes a bounded amount of work.

Chat templates come with downloaded models. Every loop iteration, call, filter, test and operator is charged
to the render's budget, by the sizes of what goes in, before it is done; so is all text that comes out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from drift_sdk.text.template_charges import TemplateCharges

__all__ = ["MAX_STEPS", "BudgetedEnvironment", "budget"]

MAX_STEPS = 4_000_000
"""Steps of one render; reading or writing `CHARS_PER_STEP` characters is one more."""

CHARS_PER_STEP = 64
MAX_CHARS = 32 << 20  # of one string
MACRO_CHARS = 8 * CHARS_PER_STEP  # a macro's call takes the time of so many

# What takes the time of its result's members, not of all the text in them, and what takes no time.
SHALLOW = frozenset(
    {
        "attr",
        "batch",
        "dictsort",
        "items",
        "list",
        "map",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
    }
)
COMPARING = frozenset(
    {"in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan"}
)
COMPARING |= {">", "ge", ">="}
CONSTANT = frozenset({"count", "d", "default", "first", "last", "length"})

# What multiplies the length of one argument by another's, and what takes a length as a number.
PRODUCTS = frozenset({"format", "format_map", "translate", "indent", "wordwrap"})
WIDTHS = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "zfill"}
)
WIDTH_IN_FORMAT = re.compile(r"\d{6}|\{[^{}]*\{|%[^a-zA-Z%]*\*")
MAX_BITS = 1 << 16


class Budget:
    def __init__(self) -> None:
        self.num_left = MAX_STEPS

    def charge(self, num_steps: int) -> None:
        self.num_left -= num_steps
        if self.num_left < 0:
            raise jinja2.TemplateError(f"it takes more than {MAX_STEPS} steps")


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def budget() -> Iterator[None]:
    """What is compiled or rendered inside shares one budget."""
    token = _budget.set(Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def charge(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise jinja2.TemplateError(f"it makes a text of more than {MAX_CHARS} characters")

    _budget.get().charge(1 + num_chars // CHARS_PER_STEP)


def tick(num_chars: int) -> bool:
    """Charges for one pass through a body with so many characters of text."""
    charge(num_chars)
    return True


def size(value: object) -> int:
    """Characters or members, of a container without what is in them."""
    if isinstance(value, str | bytes | list | tuple | dict | range):
        return len(value)

    return value.bit_length() // 8 if isinstance(value, int) else 0


def text_size(value: object) -> int:
    """Characters of the value as text, about; a container's members count as often as they occur."""
    total = 0
    stack = [value]
    while stack:
        value = stack.pop()
        total += size(value)
        members: Iterable[Any] = ()
        if isinstance(value, dict):
            members = [*value, *value.values()]
        elif isinstance(value, list | tuple):
            members = value
        elif isinstance(value, jinja2.utils.Namespace):
            members = [value._Namespace__attrs]
        if members:
            _budget.get().charge(2 * len(members))  # type: ignore[arg-type]
            stack += members
    return total


def charge_call(name: str, values: Sequence[object]) -> None:
    """Charge for a method of a string or a filter by what it reads, and by what it may make."""
    if name in CONSTANT:
        return charge(0)

    if name in SHALLOW:
        return charge(sum(map(size, values)) + sum(widths(name, values)))

    sizes = [text_size(value) for value in values]
    total = sum(sizes)
    if name == "replace" and len(values) > 2:
        total += sizes[2] * (1 + sizes[0] // max(sizes[1], 1))
    elif name == "join":
        members = max(
            (len(value) for value in values if isinstance(value, list | tuple | dict)), default=total
        )
        total += members * max((len(value) for value in values if isinstance(value, str)), default=0)
    elif name in PRODUCTS:
        total += (total - max(sizes) + 1) * max(sizes)

    if name in ("format", "format_map") and any(map(has_width, values)):
        raise jinja2.TemplateError("it formats with a width that is too large or not a constant")

    num_lines = 1 + sum(value.count("\n") + value.count("\t") for value in values if isinstance(value, str))
    num_lines += total if name == "tojson" else 0
    charge(total + num_lines * sum(widths(name, values)))


def widths(name: str, values: Sequence[object]) -> list[int]:
    return [value for value in values[1:] if isinstance(value, int) and value > 0] if name in WIDTHS else []


def has_width(value: object) -> bool:
    return isinstance(value, str) and WIDTH_IN_FORMAT.search(value) is not None


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates are compiled and rendered inside `budget`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=charged_text)
        self.globals["range"] = charged_range
        del self.globals["lipsum"]
        del self.filters["urlize"]
        self.tick = tick
        self.concatenated = concatenated
        self.charged_text = charged_text
        self.charged_slice = charged_slice

    def charge_functions(self) -> None:
        """Have the filters and tests charged that are there by now."""
        self.filters = {name: charged(name, function) for name, function in self.filters.items()}
        tests: dict[str, Any] = dict(self.tests)
        for name, function in tests.items():
            tests[name] = charged(name if name in COMPARING else "length", function)
        self.tests = tests

    def _parse(self, *args: Any, **options: Any) -> jinja2.nodes.Template:
        tree = super()._parse(*args, **options)
        TemplateCharges().visit(tree)
        tree.set_environment(self)
        return tree.set_lineno(1)  # type: ignore[return-value]

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if obj in (tick, concatenated, charged_text, charged_slice):
            return obj(*args)

        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            name = getattr(method, "__name__", "")
            args = tuple(
                list(each) if name == "join" and isinstance(each, Iterator) else each for each in args
            )
            charge_call(name, (subject, *args, *kwargs.values()))
        else:
            is_macro = isinstance(obj, Macro)
            charge(MACRO_CHARS if is_macro else sum(map(size, (subject, *args, *kwargs.values()))))

        result = super().call(context, obj, *args, **kwargs)
        charge(size(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            is_power = operator == "**"
            num_bits = (
                left.bit_length() * max(right, 0) if is_power else left.bit_length() + right.bit_length()
            )
            if num_bits > MAX_BITS:
                raise jinja2.TemplateError(f"it makes a number of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            charge_call("format", (left, right))
        elif operator == "*":
            charge(max(left, 0) * size(right) if isinstance(left, int) else 0)
            charge(max(right, 0) * size(left) if isinstance(right, int) else 0)

        charge(size(left) + size(right))
        return super().call_binop(context, operator, left, right)


def charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment comes first

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if name == "join":
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
        charge_call(name, (*args[passed:], *kwargs.values()))
        result = function(*args, **kwargs)
        charge(0 if name in CONSTANT else size(result))
        return result

    return wrapper


def charged_range(*args: int) -> range:
    numbers = range(*args)
    try:
        charge(len(numbers) * CHARS_PER_STEP)
    except OverflowError as error:
        raise jinja2.TemplateError("a range is too long") from error
    return numbers


def charged_text(value: Any) -> Any:
    charge(text_size(value))
    return value


def charged_slice(value: Any) -> Any:
    charge(size(value))
    return value


def concatenated(*values: Any) -> str:
    charge(sum(map(text_size, values)))
    return "".join(map(str, values))
