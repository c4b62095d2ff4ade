"""A Jinja sandbox that bounds the work of compiling and rendering a template.

Chat templates come with downloaded models. Every loop iteration, call, filter, test and operator is charged
to the budget of the render before it is executed, by the size of its operands. All text of the result is
charged too.
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
from jinja2.visitor import NodeTransformer

__all__ = ["MAX_STEPS", "BudgetedEnvironment", "budget"]

MAX_STEPS = 4_000_000
"""Steps of one compilation or render; reading or writing `CHARS_PER_STEP` characters is one step."""

CHARS_PER_STEP = 64
MAX_CHARS = 32 << 20  # of one string
MACRO_CHARS = 8 * CHARS_PER_STEP  # charged for a macro's call, which takes as long

# Filters whose time depends on the number of members, not on the text in them.
SHALLOW = frozenset(
    {
        *("attr", "batch", "dictsort", "items", "list", "map", "reject", "rejectattr", "reverse"),
        *("select", "selectattr"),
    }
)
# Tests that compare values, and so may read all of their text.
COMPARING = frozenset(
    {
        *("in", "eq", "equalto", "==", "ne", "!="),
        *("lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="),
    }
)
# Filters that take constant time.
CONSTANT = frozenset({"count", "d", "default", "first", "last", "length"})

# Functions whose result may be as long as the product of the lengths of two arguments.
PRODUCTS = frozenset({"format", "format_map", "translate", "indent", "wordwrap"})
# Functions with a length as an integer argument.
WIDTHS = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "zfill"}
)
# Formats with a width of six digits or more, or with a width that is an argument.
WIDTH_IN_FORMAT = re.compile(r"\d{6}|\{[^{}]*\{|%[^a-zA-Z%]*\*")
MAX_BITS = 1 << 16  # of an integer


class Budget:
    """The steps left in one compilation or render."""

    def __init__(self) -> None:
        self.num_left = MAX_STEPS

    def charge(self, num_steps: int) -> None:
        self.num_left -= num_steps
        if self.num_left < 0:
            raise jinja2.TemplateError(f"it takes more than {MAX_STEPS} steps")


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def budget() -> Iterator[None]:
    """Start a new budget, shared by everything that is compiled or rendered inside the block."""
    token = _budget.set(Budget())
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

    Characters of a text, members of a container, bytes of an integer; 0 for anything else.
    """
    if isinstance(value, str | bytes | list | tuple | dict | range):
        return len(value)

    return value.bit_length() // 8 if isinstance(value, int) else 0


def text_size(value: object) -> int:
    """Approximate number of characters of a value as text. Members count as often as they occur."""
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
    """Charge a string method or filter by the size of its arguments and of the largest possible result.

    values: all arguments, the string or filtered value first.
    """
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
    """The arguments that may be lengths of the result."""
    return [value for value in values[1:] if isinstance(value, int) and value > 0] if name in WIDTHS else []


def has_width(value: object) -> bool:
    """Whether a value is a format string with a large or variable width."""
    return isinstance(value, str) and WIDTH_IN_FORMAT.search(value) is not None


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
        del self.filters["urlize"]
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

    def _parse(self, *args: Any, **options: Any) -> jinja2.nodes.Template:
        tree = super()._parse(*args, **options)
        TemplateCharges().visit(tree)
        tree.set_environment(self)
        return tree.set_lineno(1)  # type: ignore[return-value]

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Called by the sandbox for every call in a template."""
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
        """Called by the sandbox for each of `intercepted_binops`."""
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
    """A filter or test that charges for its call and its result. name: the filter to charge for."""
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment comes first

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if name == "join":
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
        charge_call(name, (*args[num_passed:], *kwargs.values()))
        result = function(*args, **kwargs)
        charge(0 if name in CONSTANT else size(result))
        return result

    return wrapper


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


def hook(name: str, *args: jinja2.nodes.Expr) -> jinja2.nodes.Call:
    """A call of an attribute of the environment, as a node of a syntax tree."""
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), list(args), [], None, None)


def tick_for(node: jinja2.nodes.Node) -> jinja2.nodes.Call:
    """A call of `tick` for a body that may be executed many times, with the size of its constant text."""
    texts = [each.data for each in node.find_all(jinja2.nodes.TemplateData)]
    texts += [each.value for each in node.find_all(jinja2.nodes.Const) if isinstance(each.value, str)]
    return hook("tick", jinja2.nodes.Const(sum(map(len, texts))))


class TemplateCharges(NodeTransformer):
    """Adds charges to a template's syntax tree where the sandbox has no hook.

    These are bodies of loops, macros and call blocks, slices, `~` and comparisons.
    """

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        self._charge_body(node)
        if node.test is not None:
            node.test = jinja2.nodes.And(hook("tick", jinja2.nodes.Const(0)), node.test)
        return node

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Macro:
        self._charge_body(node)
        return node

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.CallBlock:
        self._charge_body(node)
        return node

    def _charge_body(self, node: jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock) -> None:
        tick = tick_for(node)  # before the visit, which adds text to the body
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(tick))

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return hook("concatenated", *node.nodes)

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.expr = hook("charged_text", node.expr)
        for operand in node.ops:
            operand.expr = hook("charged_text", operand.expr)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return hook("charged_slice", node) if isinstance(node.arg, jinja2.nodes.Slice) else node
