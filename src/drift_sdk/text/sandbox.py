"""A Jinja sandbox that bounds the work of compiling and rendering a template.

Chat templates come with downloaded models. They may read the attributes in `ATTRIBUTES` only, which reach
nothing but data. All that takes time or memory is charged to the budget of the render before it is done: each
pass through a body, operator, call, filter and test, by the text that it reads and that it may make. Jinja
calls the environment for most of them; `_Charges` adds filters to the syntax tree for the others. Compiling
evaluates constant expressions: the same rules apply, with a smaller budget.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from types import GeneratorType
from typing import Any

import jinja2
import jinja2.filters
from jinja2 import nodes
from jinja2.runtime import BlockReference, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 4_000_000
"""Steps of one render; reading or writing `CHARS_PER_STEP` characters is one step."""

CHARS_PER_STEP = 64
MAX_CHARS = 32 << 20  # of one string
MEMBER_CHARS = 8  # charged for a member of a container, which takes as much memory
NODE_CHARS = 4  # charged for a node of the syntax tree, which takes as long
BODY_STEPS = 8  # charged for the call of a macro, a block or a loop, which takes as long
COMPILE_SHARE = 16  # compiling has MAX_STEPS // COMPILE_SHARE steps
MAX_SOURCE_CHARS = 256 << 10
MAX_DEPTH = 500  # of nested values that are compared, hashed or written as text
MAX_CALLS = 64  # of nested macros, blocks and loops: a thread's stack may be small
MAX_BITS = 1 << 16  # of an integer
MAX_INTEGER_CHARS = 4300  # Python does not convert longer decimal numbers
MAX_PRECISION = 20  # decimal places that a number may be rounded to

ATTRIBUTES: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold center count endswith find format format_map index isalnum isalpha isascii "
        "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust "
        "lower lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit "
        "rstrip split splitlines startswith strip swapcase title upper zfill".split()
    ),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "grouper", "index", "list"}),  # two are of the groups of `groupby`
}
"""The attributes that templates may read, by the type of the object."""

SLOW_FILTERS = frozenset({"pprint", "striptags", "urlize", "wordcount", "wordwrap"})
"""The filters of Jinja that templates may not use."""

# Filters and tests that take constant time.
FREE_FILTERS = frozenset({"attr", "count", "d", "default", "first", "items", "last", "length"})
FREE_TESTS = frozenset(
    "boolean callable defined escaped false float integer iterable mapping none number sameas sequence "
    "string true undefined".split()
)
# Filters that take the members of their first argument one by one, and those that also read their text.
PASSING = frozenset("batch list map reject rejectattr select selectattr slice".split())
READING = frozenset({"groupby", "join", "max", "min", "sort", "sum", "unique"})
# Functions with a length as an integer argument.
WIDTHS = frozenset({"batch", "center", "indent", "ljust", "rjust", "slice", "tojson", "zfill"})
# Functions that compare each character of a text with each character of an argument.
SEARCHES = frozenset({"rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"})
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
WIDTH_ARGUMENT = re.compile(r"\{[^{}]*\{|%[^a-zA-Z%]*\*")  # a format's width that is an argument
NUMBER = re.compile(r"\d+")


class Budget:
    """The steps left in one compilation or render."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps: int = num_steps
        self.num_left: int = num_steps
        self.num_calls = 0  # nested calls in progress


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def budget(*, is_compiling: bool = False) -> Iterator[None]:
    """Start a new budget, shared by everything that is compiled or rendered inside the block.

    is_compiling: whether the budget is for a compilation, which has a smaller one.
    """
    token = _budget.set(Budget(MAX_STEPS // COMPILE_SHARE if is_compiling else MAX_STEPS))
    try:
        yield
    finally:
        _budget.reset(token)


def charge(num_chars: int = 0, num_steps: int = 1) -> None:
    """Charge steps, and the reading or writing of so many characters. Raises TemplateError."""
    if num_chars > MAX_CHARS:
        raise jinja2.TemplateError(f"it makes a text of more than {MAX_CHARS} characters")

    budget = _budget.get()
    budget.num_left -= num_steps + num_chars // CHARS_PER_STEP
    if budget.num_left < 0:
        raise jinja2.TemplateError(f"it takes more than {budget.num_steps} steps")


def size(value: object) -> int:
    """Characters that a value takes, without the contents of its members."""
    if isinstance(value, str):
        return len(value)

    if isinstance(value, list | tuple | dict | range):
        return MEMBER_CHARS * len(value)

    return value.bit_length() // 8 if isinstance(value, int) else 0


def text_size(value: Any, indent: int = 0) -> int:
    """Approximate number of characters of a value as text. Members count as often as they occur.

    indent: characters before a member, for each level.
    """
    if isinstance(value, str):  # the most frequent case
        return len(value)

    total, level = 0, [value]
    for depth in range(MAX_DEPTH + 1):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, int):
                total += 1 + value.bit_length() // 3
            elif value is None or isinstance(value, float | Undefined | GeneratorType):
                total += 24
            else:
                value = value._Namespace__attrs if isinstance(value, Namespace) else value
                if not isinstance(value, Collection):  # a function of Jinja
                    raise jinja2.TemplateError(f"it reads a {type(value).__name__} as text")

                value = [*value, *value.values()] if isinstance(value, dict) else value
                charge(0, 2 * len(value))
                total += (4 + indent * (depth + 1)) * len(value)
                next_level += value
        if not next_level:
            return total

        level = next_level
    raise jinja2.TemplateError(f"it nests values more than {MAX_DEPTH} levels deep")


def made(value: Any) -> Any:
    """The value, charged by its size."""
    charge(size(value))
    return value


def read(value: Any) -> Any:
    """The value, charged by its text; a list in place of an iterator."""
    value = listed(value)
    charge(text_size(value))
    return value


def listed(value: Any) -> Any:
    """The members of an iterator in a list; other values unchanged. Jinja's loops are iterators too."""
    return members(value) if isinstance(value, Iterator) and not isinstance(value, LoopContext) else value


def members(value: Any) -> Any:
    """The members of a value in a list, each charged when it is read; a value without members unchanged."""
    if not isinstance(value, Iterable):
        return value

    result = []
    for member in value:
        charge()
        result.append(member)
    return result


def charge_call(name: str, first: Any, *rest: Any) -> None:
    """Charge a function by the text of its arguments, and by more if it takes or makes more than that.

    first: the filtered value, or the object of a method.
    """
    width = sum(each for each in rest if isinstance(each, int) and each > 0) if name in WIDTHS else 0
    charge(0, width)
    num_read = 0 if name in PASSING else text_size(first, width if name == "tojson" else 0)
    sizes = [text_size(each) for each in rest]
    charge(num_read + sum(sizes))
    if name in PASSING | READING:  # an attribute's name is split at its dots and commas
        charge(0, sum(sizes) // 4)
    if name in SEARCHES:
        charge(0, num_read * max(sizes, default=0) // (8 * CHARS_PER_STEP))
    if name in ("split", "rsplit"):
        has_separator = rest and isinstance(rest[0], str) and rest[0]
        charge(0, first.count(rest[0]) if has_separator else num_read // 2)
    elif name in ("splitlines", "indent"):
        num_lines = sum(map(str(first).count, LINE_ENDS))
        charge(num_lines * (width + sum(sizes)), num_lines)
    elif name in ("title", "urlencode"):
        charge(0, num_read // 4)
    elif name == "join":
        charge(len(first) * sum(sizes))
    elif name == "unique":  # each member may be compared with all others
        charge(0, len(first) ** 2)
    elif name == "replace" and len(sizes) > 1:
        charge(sizes[1] * (1 + num_read // max(sizes[0], 1)))
    elif name == "round" and rest and not (isinstance(rest[0], int) and 0 <= rest[0] <= MAX_PRECISION):
        raise jinja2.TemplateError(f"it rounds to a precision that is not from 0 to {MAX_PRECISION}")
    elif name == "sum" and not all(isinstance(start, int | float) for start in rest[1:]):
        raise jinja2.TemplateError("it adds to a sum that does not start with a number")
    elif name in ("format", "format_map", "%"):
        if not isinstance(first, str) or WIDTH_ARGUMENT.search(first):
            raise jinja2.TemplateError("it formats with a value that is not text or a width that is computed")

        num_fields = first.count("{") + first.count("%")
        charge(num_fields * max(sizes, default=0) + sum(map(int, NUMBER.findall(first))))


def charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that charges for its arguments and its result."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment comes first
    take = members if name in PASSING | READING else listed
    parameters = signature(function)

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        passed, first, rest = args[:place], take(args[place]), map(listed, args[place + 1 :])
        args = (*passed, first, *rest)
        if kwargs:
            bound = parameters.bind(*args, **kwargs)
            bound.apply_defaults()
            charge_call(name, *list(bound.arguments.values())[place:])
        else:
            charge_call(name, first, *args[place + 1 :])
        return made(function(*args, **kwargs))

    return wrapper


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A sandbox that charges for everything a template does. Compile and render templates inside `budget`.

    filters, functions: for templates, by name, in addition to Jinja's.
    """

    intercepted_binops: frozenset[str] = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(
        self, filters: Mapping[str, Callable[..., Any]], functions: Mapping[str, Any], **options: Any
    ) -> None:
        super().__init__(**options, finalize=read)
        self.globals |= functions
        del self.globals["lipsum"]
        self.filters |= {"int": bounded_int, **filters}
        for name in SLOW_FILTERS:
            del self.filters[name]
        self.filters |= {
            name: charged(name, self.filters[name]) for name in self.filters.keys() - FREE_FILTERS
        }
        tests: dict[str, Any] = self.tests
        tests |= {name: charged(name, tests[name]) for name in tests.keys() - FREE_TESTS}
        self.filters |= HOOKS

    def _parse(self, source: str, *args: Any, **options: Any) -> nodes.Template:
        if len(source) > MAX_SOURCE_CHARS:
            found = f"{len(source)} characters"
            raise jinja2.TemplateError(f"it has {found}, expected at most {MAX_SOURCE_CHARS}")

        tree = super()._parse(source, *args, **options)
        _Charges().visit(tree)
        tree.set_environment(self)
        return tree.set_lineno(1)  # type: ignore[return-value]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Cycler | LoopContext | Namespace):
            return super().is_safe_attribute(obj, attr, value)

        return any(isinstance(obj, kind) and attr in names for kind, names in ATTRIBUTES.items())

    def getitem(self, obj: Any, argument: Any) -> Any:
        charge(text_size(argument) if isinstance(argument, tuple) else 0)  # a key is hashed
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, BlockReference | LoopContext | Macro):
            charge(sum(map(size, (*args, *kwargs.values()))), BODY_STEPS)
        else:
            method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
            name, subject = getattr(method, "__name__", ""), getattr(method, "__self__", None)
            args = tuple(map(members if name == "join" else listed, args))
            if name == "join":
                charge_call(name, *args, subject)
            else:  # methods of dicts and functions read their arguments only
                is_read = isinstance(subject, str | list | tuple)
                charge_call(name, subject if is_read else None, *args, *kwargs.values())
            if obj in (dict, Namespace) and args and not isinstance(args[0], dict):
                # Each key may be compared with all others: templates can choose numbers with equal hashes.
                charge(0, len(args[0]) ** 2)

        budget = _budget.get()
        if budget.num_calls >= MAX_CALLS:
            raise jinja2.TemplateError(f"it nests more than {MAX_CALLS} calls")

        budget.num_calls += 1
        try:
            return made(super().call(context, obj, *args, **kwargs))
        finally:
            budget.num_calls -= 1

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        charge(size(left) + size(right))
        if isinstance(left, int) and isinstance(right, int):
            num_bits = left.bit_length() + right.bit_length()
            if operator == "**":
                num_bits = left.bit_length() * max(right, 0)
            if num_bits > MAX_BITS:
                raise jinja2.TemplateError(f"it makes a number of more than {MAX_BITS} bits")
            charge(0, num_bits**2 >> 23)  # products take up to quadratic time
        elif operator == "*":
            charge(max(left, 0) * size(right) if isinstance(left, int) else 0)
            charge(max(right, 0) * size(left) if isinstance(right, int) else 0)
        elif operator == "%" and isinstance(left, str):
            charge_call(operator, left, right)
        elif operator == "-" and (isinstance(left, Set) or isinstance(right, Set)):  # views of a dict
            raise jinja2.TemplateError("it subtracts values that are not numbers")

        return super().call_binop(context, operator, left, right)


def bounded_int(value: Any, default: Any = 0, base: int = 10) -> Any:
    is_long = isinstance(value, str) and len(value) > MAX_INTEGER_CHARS
    return default if is_long else jinja2.filters.do_int(value, default, base)


@jinja2.pass_context  # so that compiling does not evaluate it
def tick(context: Any, num_chars: int) -> bool:
    """Charge one pass through a body with so many characters of text. The result is always True."""
    charge(num_chars)
    return True


HOOKS: dict[str, Callable[..., object]] = {"%tick": tick, "%read": read, "%made": made, "%members": members}
"""Filters whose names templates cannot write."""


def hook(name: str, value: nodes.Expr) -> nodes.Expr:
    is_constant = isinstance(value, nodes.Const)  # `tick_for` counts it
    return value if is_constant else nodes.Filter(value, name, [], [], None, None)


def tick_for(body: nodes.Node) -> nodes.Expr:
    """A charge for one pass through a body, by its nodes and its constant text."""
    num_chars = 0
    for node in body.find_all(nodes.Node):
        num_chars += NODE_CHARS
        if isinstance(node, nodes.TemplateData):
            num_chars += len(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            num_chars += len(node.value)
        elif isinstance(node, nodes.Dict):  # each key may be compared with all others
            num_chars += len(node.items) ** 2
    return nodes.Filter(nodes.Const(num_chars), "%tick", [], [], None, None)


class _Charges(NodeTransformer):
    """Adds charges where Jinja does not call the environment."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, nodes.For | nodes.Macro | nodes.Block | nodes.CallBlock):
            node.body.insert(0, nodes.ExprStmt(tick_for(node)))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(tick_for(node.test), node.test)
        super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.ScopedEvalContextModifier():
                raise jinja2.TemplateError("it escapes text for HTML")
            case nodes.Concat():
                node.nodes = [hook("%read", each) for each in node.nodes]
            case nodes.Compare() | nodes.Operand():
                node.expr = hook("%read", node.expr)
            case nodes.Pair():
                node.key = hook("%read", node.key)  # keys are hashed
            case nodes.Call() | nodes.Filter() | nodes.Test() if node.dyn_args is not None:
                node.dyn_args = hook("%members", node.dyn_args)
            case nodes.Getitem(arg=nodes.Slice()):
                return hook("%made", node)
        return node
