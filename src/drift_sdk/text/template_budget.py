"""A Jinja sandbox that bounds the work of compiling and rendering a template.

Chat templates come with downloaded models. Every loop iteration, call, filter, test and operator is charged
to the budget of the render before it is executed, by the size of its operands. All text of the result is
charged too. Compiling evaluates constant expressions: the same rules apply, with a smaller budget.

Templates can call the methods in `METHODS` and the functions of the environment only. Filters that take more
than linear time, or build long intermediate lists, are removed.
"""

from __future__ import annotations

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
from drift_sdk.text.template_rules import (
    COMPARING,
    CONSTANT,
    FILTERS,
    METHODS,
    PRODUCTS,
    READING,
    SEARCHES,
    SHALLOW,
    SLOW_FILTERS,
    format_widths,
    members_of,
    num_parts,
    widths,
)

__all__ = ["MAX_STEPS", "BudgetedEnvironment", "budget"]

MAX_STEPS = 4_000_000
"""Steps of one render; reading or writing `CHARS_PER_STEP` characters is one step."""

CHARS_PER_STEP = 64
MAX_CHARS = 32 << 20  # of one string
MACRO_CHARS = 8 * CHARS_PER_STEP  # charged for a macro's call, which takes as long
MEMBER_CHARS = 8  # charged for a member of a container, which takes as much memory
COMPILE_SHARE = 16  # compiling has MAX_STEPS // COMPILE_SHARE steps
MAX_SOURCE_CHARS = 256 << 10
MAX_DEPTH = 500  # of nested values that are compared, hashed or written as text
MAX_CALLS = 64  # of nested macros, blocks and loops: a thread's stack may be small
MAX_BITS = 1 << 16  # of an integer
PLAIN = str | int | float | None | Undefined


class Budget:
    """The steps left in one compilation or render."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = self.num_left = num_steps
        self.num_calls = 0  # nested calls in progress

    def charge(self, num_steps: int) -> None:
        self.num_left -= num_steps
        if self.num_left < 0:
            raise jinja2.TemplateError(f"it takes more than {self.num_steps} steps")


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def budget(*, is_compiling: bool = False) -> Iterator[None]:
    """Start a new budget, shared by everything that is compiled or rendered inside the block.

    is_compiling: whether the budget is that of a compilation, which is smaller.
    """
    token = _budget.set(Budget(MAX_STEPS // COMPILE_SHARE if is_compiling else MAX_STEPS))
    try:
        yield
    finally:
        _budget.reset(token)


def charge(num_chars: int) -> None:
    """Charge one step, and the reading or writing of so many characters. Raises TemplateError."""
    if num_chars > MAX_CHARS:
        raise jinja2.TemplateError(f"it makes a text of more than {MAX_CHARS} characters")

    _budget.get().charge(1 + num_chars // CHARS_PER_STEP)


def tick(num_chars: int) -> bool:
    """Charge one pass through a body with so many characters of text. The result is always True."""
    charge(num_chars)
    return True


def size(value: object) -> int:
    """Size of a value without the contents of its members.

    Characters of a text, `MEMBER_CHARS` for each member of a container, bytes of an integer; 0 for anything
    else.
    """
    if isinstance(value, str):
        return len(value)

    if isinstance(value, list | tuple | dict | range):
        return MEMBER_CHARS * len(value)

    return value.bit_length() // 8 if isinstance(value, int) else 0


def text_size(value: object) -> int:
    """Approximate number of characters of a value as text. Members count as often as they occur."""
    if isinstance(value, str):  # the most frequent case
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
    """The depth to which the lists, tuples and dicts of a value are nested."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, list | tuple | dict)]:
        depth += 1
        members = [each.values() if isinstance(each, dict) else each for each in level]
        _budget.get().charge(sum(map(len, members)))
        level = [member for each in members for member in each]
    return depth


def charge_call(name: str, values: Sequence[object]) -> None:
    """Charge a string method or filter by the size of its arguments and of the largest possible result.

    values: all arguments, the string or filtered value first.
    """
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


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that charges for everything a template does. Compile and render templates inside `budget`.

    Filters and functions are charged through hooks of Jinja's sandbox. `TemplateCharges` adds calls of
    `tick`, `concatenated`, `charged_text` and `charged_slice` where the sandbox has no hook.
    """

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
        """Charge for the filters and tests that the environment has now. Call it after adding filters."""
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
        """Called by the sandbox for every call in a template."""
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
                # The method compares its arguments with members, or hashes them.
                charge(sum(map(text_size, args if isinstance(subject, dict) else (subject, *args))))
            elif obj in (dict, Namespace):
                # Each key may be compared with all others: templates can choose numbers with equal hashes.
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
        """Whether templates may call an object. subject: the object of a method; None for a function."""
        if subject is not None:
            return any(isinstance(subject, kind) and name in names for kind, names in METHODS.items())

        return isinstance(obj, BlockReference | Joiner | LoopContext | Macro | Undefined) or any(
            obj is function for function in self.globals.values()
        )

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Called by Jinja for every subscript that is not a slice."""
        charge(text_size(argument) if isinstance(argument, tuple) else 0)  # a key is hashed
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Called by the sandbox for each of `intercepted_binops`."""
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
    """A filter or test that charges for its call and its result. name: the filter to charge for."""
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment comes first
    places = {parameter: place for place, parameter in enumerate(signature(function).parameters)}

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if name in READING:
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
        named = sorted(kwargs, key=lambda parameter: places.get(parameter, len(places)))
        values = (*args[num_passed:], *(kwargs[parameter] for parameter in named))
        if name in ("join", "replace") and not all(isinstance(value, PLAIN) for value in values[1:]):
            raise jinja2.TemplateError(f"an argument of {name} is neither text nor a number")

        charge_call(name, values)
        if name == "unique":  # each member may be compared with all others
            charge(sum(map(size, values)) ** 2)
        result = function(*args, **kwargs)
        charge(0 if name in CONSTANT else size(result))
        return metered(result) if isinstance(result, Iterator) else result

    return wrapper


def metered(members: Iterable[Any]) -> Iterator[Any]:
    """The members, each charged when it is read."""
    for member in members:
        charge(0)
        yield member


def charged_range(*args: int) -> range:
    """`range`, charged by its length."""
    numbers = range(*args)
    try:
        charge(len(numbers) * CHARS_PER_STEP)
    except OverflowError as error:
        raise jinja2.TemplateError("a range is too long") from error
    return numbers


def charged_text(value: Any) -> Any:
    """The value, charged by the size of its text."""
    charge(text_size(value))
    return value


def charged_slice(value: Any) -> Any:
    """The value, charged by its own size."""
    charge(size(value))
    return value


def concatenated(*values: Any) -> str:
    """The values joined to one text, charged by its size."""
    charge(sum(map(text_size, values)))
    return "".join(map(str, values))
