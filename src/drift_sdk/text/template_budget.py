"""A Jinja sandbox in which rendering takes a bounded amount of work.

Chat templates come with downloaded models. Every loop iteration, call, filter, test and operator is charged
to the render's budget, by the sizes of what goes in, before it is done; so is all text that comes out.
Constant expressions are computed when a template is compiled, under the same rules and a smaller budget.

Templates call the methods listed in `METHODS` and the environment's functions, and no others. Filters that
take more than linear time or make long lists on their way are removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.runtime import BlockReference, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Joiner, Namespace

from drift_sdk.text.template_charges import TemplateCharges
from drift_sdk.text.template_rules import FILTERS, METHODS, SLOW_FILTERS, members_of

__all__ = ["MAX_STEPS", "BudgetedEnvironment", "budget"]

MAX_STEPS = 4_000_000
"""Steps of one render; reading or writing `CHARS_PER_STEP` characters is one more."""

CHARS_PER_STEP = 64
MAX_CHARS = 32 << 20  # of one string
MACRO_CHARS = 8 * CHARS_PER_STEP  # a macro's call takes the time of so many
MEMBER_CHARS = 8  # a list takes the memory of so many for each member
COMPILE_SHARE = 16  # compiling has this part of the steps: constants become part of the code
MAX_SOURCE_CHARS = 256 << 10
MAX_DEPTH = 500  # of values in one another that are compared, hashed or written as text
MAX_CALLS = 64  # of macros, blocks and loops in one another: a thread's stack may be small

# What takes the time of its result's members, not of all the text in them, and what takes no time.
SHALLOW = frozenset(
    {
        "attr",
        "batch",
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
PRODUCTS = frozenset({"format", "indent"})
WIDTHS = frozenset({"batch", "center", "indent", "ljust", "rjust", "slice", "tojson", "zfill"})
# What compares each character of a text with each of an argument, and what reads an iterator to its end.
SEARCHES = frozenset({"rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"})
READING = frozenset({"groupby", "join", "max", "min", "sort", "sum", "unique", "urlencode"})
# What makes a list of a text's characters.
CHARACTERS = READING | {"batch", "list", "slice"}
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

WIDTH_IN_FORMAT = re.compile(r"\d{6}|\{[^{}]*\{|%[^a-zA-Z%]*\*")
NUMBER = re.compile(r"\d+")
MAX_BITS = 1 << 16
PLAIN = str | int | float | None | Undefined


class Budget:
    def __init__(self, num_steps: int) -> None:
        self.num_steps = self.num_left = num_steps
        self.num_calls = 0  # in one another, now

    def charge(self, num_steps: int) -> None:
        self.num_left -= num_steps
        if self.num_left < 0:
            raise jinja2.TemplateError(f"it takes more than {self.num_steps} steps")


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def budget(*, is_compiling: bool = False) -> Iterator[None]:
    """What is compiled or rendered inside shares one budget."""
    token = _budget.set(Budget(MAX_STEPS // COMPILE_SHARE if is_compiling else MAX_STEPS))
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
    """Characters, or the memory of a container's members in characters, without what is in them."""
    if isinstance(value, str):
        return len(value)

    if isinstance(value, list | tuple | dict | range):
        return MEMBER_CHARS * len(value)

    return value.bit_length() // 8 if isinstance(value, int) else 0


def text_size(value: object) -> int:
    """Characters of the value as text, about; a container's members count as often as they occur."""
    if isinstance(value, str):  # as a rule
        return len(value)

    total = 0
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise jinja2.TemplateError(f"it nests values more than {MAX_DEPTH} levels deep")

        next_level: list[Any] = []
        for value in level:
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, int):
                total += 1 + value.bit_length() // 3
            else:
                members = members_of(value)
                _budget.get().charge(2 * len(members))
                total += 4 * len(members) if members else 24
                next_level += members
        level, depth = next_level, depth + 1
    return total


def depth_of(value: object) -> int:
    """How many containers lie in one another, of what JSON can express."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, list | tuple | dict)]:
        depth += 1
        members = [each.values() if isinstance(each, dict) else each for each in level]
        _budget.get().charge(sum(map(len, members)))
        level = [member for each in members for member in each]
    return depth


def charge_call(name: str, values: Sequence[object]) -> None:
    """Charge for a method of a string or a filter by what it reads, and by what it may make."""
    charge(len(values) * CHARS_PER_STEP // 4)
    if name in CONSTANT:
        return

    _budget.get().charge(num_parts(name, values))
    if name in SHALLOW:
        return charge(sum(map(size, values)) + sum(widths(name, values)))

    sizes = [text_size(value) for value in values]
    total = sum(sizes)
    if name in SEARCHES:
        _budget.get().charge(sizes[0] * max(sizes[1:], default=0) // (8 * CHARS_PER_STEP))
    if name == "replace" and len(values) > 2:
        total += sizes[2] * (1 + sizes[0] // max(sizes[1], 1))
    elif name == "join":
        members = max(
            (len(value) for value in values if isinstance(value, list | tuple | dict)), default=total
        )
        total += members * max((len(value) for value in values if isinstance(value, str)), default=0)
    elif name in PRODUCTS:
        total += (total - max(sizes) + 1) * max(sizes)

    if name == "format":
        total += format_widths(values[0])

    num_lines = 1 + sum(value.count("\n") + value.count("\t") for value in values if isinstance(value, str))
    width = sum(widths(name, values))
    if name == "tojson" and width:
        num_lines += total * depth_of(values[0])
    charge(total + num_lines * width)


def widths(name: str, values: Sequence[object]) -> list[int]:
    return [value for value in values[1:] if isinstance(value, int) and value > 0] if name in WIDTHS else []


def num_parts(name: str, values: Sequence[object]) -> int:
    """Members of the lists that a method of a string or a filter makes on its way, beside its arguments."""
    if name in ("batch", "slice"):
        return sum(widths(name, values)) + sum(len(value) for value in values[:1] if isinstance(value, str))

    if name == "join":  # of a text's characters; a filter's text comes first, a method's after the delimiter
        return sum(len(value) for value in values if isinstance(value, str))

    text = values[0] if values else None
    if not isinstance(text, str):
        return 0

    if name in ("split", "rsplit"):
        separator = values[1] if len(values) > 1 else None
        return 1 + (text.count(separator) if isinstance(separator, str) and separator else len(text) // 2)

    if name in ("splitlines", "indent"):
        return 1 + sum(map(text.count, LINE_ENDS))

    if name in ("title", "urlencode"):
        return len(text) // 4

    return len(text) if name in CHARACTERS else 0


def format_widths(text: object) -> int:
    """Characters that the widths and precisions of a format may make, at most."""
    if not isinstance(text, str):
        raise jinja2.TemplateError("it formats with a value that is not text")

    if WIDTH_IN_FORMAT.search(text) is not None:
        raise jinja2.TemplateError("it formats with a width that is too large or not a constant")

    return sum(map(int, NUMBER.findall(text)))


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates are compiled and rendered inside `budget`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=charged_text)
        self.globals["range"] = charged_range
        del self.globals["lipsum"]
        self.filters |= FILTERS
        for name in SLOW_FILTERS:
            del self.filters[name]
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

    def _parse(self, source: str, *args: Any, **options: Any) -> jinja2.nodes.Template:
        if len(source) > MAX_SOURCE_CHARS:
            found = f"{len(source)} characters"
            raise jinja2.TemplateError(f"it has {found}, expected at most {MAX_SOURCE_CHARS}")

        tree = super()._parse(source, *args, **options)
        TemplateCharges().visit(tree)
        tree.set_environment(self)
        return tree.set_lineno(1)  # type: ignore[return-value]

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if obj in (tick, concatenated, charged_text, charged_slice):
            return obj(*args)

        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        subject = getattr(method, "__self__", None)
        name = getattr(method, "__name__", type(obj).__name__)
        if not self._may_call(obj, subject, name):
            raise jinja2.TemplateError(f"it calls {name}, which a chat template may not call")

        if obj in (dict, Namespace) or (isinstance(subject, str) and name == "join"):
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
        values = (*args, *kwargs.values())
        if isinstance(subject, str):
            charge_call(name, (subject, *values))
        else:
            charge(len(values) * CHARS_PER_STEP // 4 + (MACRO_CHARS if isinstance(obj, Macro) else 0))
            charge(sum(map(size, (subject, *values))))
            if subject is not None and name not in ("copy", "items", "keys", "values"):
                # Arguments are compared with members, or hashed.
                charge(sum(map(text_size, args if isinstance(subject, dict) else (subject, *args))))
            elif obj in (dict, Namespace):
                # Each key may have to be compared with all others: hashes of numbers can be foreseen.
                charge(sum(text_size(each) + size(each) ** 2 for each in args if not isinstance(each, dict)))

        budget = _budget.get()
        if budget.num_calls >= MAX_CALLS:
            raise jinja2.TemplateError(f"it nests more than {MAX_CALLS} calls")

        budget.num_calls += 1
        try:
            result = super().call(context, obj, *args, **kwargs)
        finally:
            budget.num_calls -= 1
        charge(size(result))
        return result

    def _may_call(self, obj: object, subject: object, name: str) -> bool:
        if subject is not None:
            return any(isinstance(subject, kind) and name in names for kind, names in METHODS.items())

        return isinstance(obj, BlockReference | Joiner | LoopContext | Macro | Undefined) or any(
            obj is function for function in self.globals.values()
        )

    def getitem(self, obj: Any, argument: Any) -> Any:
        charge(text_size(argument) if isinstance(argument, tuple) else 0)  # hashed, as a key
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            is_power = operator == "**"
            num_bits = (
                left.bit_length() * max(right, 0) if is_power else left.bit_length() + right.bit_length()
            )
            if num_bits > MAX_BITS:
                raise jinja2.TemplateError(f"it makes a number of more than {MAX_BITS} bits")
        elif operator == "-" and not (isinstance(left, PLAIN) and isinstance(right, PLAIN)):
            raise jinja2.TemplateError("it subtracts values that are not numbers")
        elif operator == "%" and isinstance(left, str):
            charge_call("format", (left, right))
        elif operator == "*":
            charge(max(left, 0) * size(right) if isinstance(left, int) else 0)
            charge(max(right, 0) * size(left) if isinstance(right, int) else 0)

        charge(size(left) + size(right))
        return super().call_binop(context, operator, left, right)


def charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment comes first
    places = {parameter: place for place, parameter in enumerate(signature(function).parameters)}

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if name in READING:
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
        named = sorted(kwargs, key=lambda parameter: places.get(parameter, len(places)))
        values = (*args[passed:], *(kwargs[parameter] for parameter in named))
        if name in ("join", "replace") and not all(isinstance(value, PLAIN) for value in values[1:]):
            raise jinja2.TemplateError(f"its filter {name} is given what is neither text nor a number")

        charge_call(name, values)
        if name == "unique":  # each may have to be compared with all others
            charge(sum(map(size, values)) ** 2)
        result = function(*args, **kwargs)
        charge(0 if name in CONSTANT else size(result))
        return metered(result) if isinstance(result, Iterator) else result

    return wrapper


def metered(members: Iterable[Any]) -> Iterator[Any]:
    """Charges for each member as it is read."""
    for member in members:
        charge(0)
        yield member


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
