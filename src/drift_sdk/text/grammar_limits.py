"""Bounds of grammars, checked before a grammar is compiled.

llguidance compiles by native recursion, in some cases in time quadratic or worse in the size of the grammar,
and represents numbers as doubles and 64-bit integers without reporting those that do not fit. Within these
bounds it needs less stack than `STACK_BYTES`, and all numbers are represented exactly. A `ValueError` names
the bound that is exceeded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from math import gcd, isfinite
from typing import Any

from drift_sdk.text.schemas import is_number, resolve

STACK_BYTES = 64 << 20
"""Stack of the compiling thread: about twice the measured need of `MAX_PARTS` parts (up to 7 KB each)."""

MAX_BYTES = 256 << 10
MAX_PARTS = 5_000
MAX_TERMINALS = (
    1_000  # llguidance takes time quadratic in a chain of terminals that ends wrongly: 7 s for 900
)
MAX_DEPTH = 100
MAX_PROPERTIES = 1_000
MAX_COUNTED_PROPERTIES = 100  # with minProperties or maxProperties, where each property is a choice
MAX_PATTERN_PROPERTIES = 10
MAX_REPETITIONS = 1_000
MAX_CONSTRAINTS = 8
MAX_INTEGER = 2**53
MAX_DECIMALS = 15
MAX_MULTIPLE = 10_000  # of numbers that need not be integers, without its factors 2 and 5: one state each

INT64_MAX = 2**63 - 1
UINT32_MAX = 2**32 - 1
LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
UPPER_BOUNDS = ("maximum", "exclusiveMaximum")
ALTERNATIVES = ("anyOf", "oneOf")
SEQUENCES = ("properties", "required", "prefixItems", "items", "allOf", "anyOf", "oneOf")

REPETITION = re.compile(r"\\.|[?*+{]", re.DOTALL)

# Tokens of llguidance's Lark that determine where other tokens begin, and those that cause recursion. A
# string or regex without an end matches too, so that no text is searched twice.
LARK_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*(?P<quote>")?)"""
    r"""|(?P<comment>(?:\#|//)[^\n]*)"""
    r"""|/(?P<regex>(?:\\.|[^/\\])+)(?P<slash>/)?"""
    r"""|%(?P<json>json|regex|llguidance)"""
    r"""|\b(?P<terminal>_*[A-Z][A-Z0-9_]*(?:\.\d+)?(?:\[[^\n]{0,200}?\])?\s*:)"""
    r"""|(?P<part>[(\[{:])"""
    r"""|(?P<repetition>[?*+~])""",
    re.DOTALL,
)
JSON_SPACE = re.compile(r"[ \t\r\n]*")
decoder: json.JSONDecoder = json.JSONDecoder()


def check_regex(pattern: str) -> None:
    """Check a regular expression. Raises ValueError."""
    _check_size(pattern)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("pattern ends with a backslash that escapes nothing")

    _check_repetitions("pattern", pattern)


def lark_tokens(text: str) -> Iterator[tuple[re.Match[str], int, Any]]:
    """The tokens of a Lark grammar that `LARK_TOKEN` matches. Raises ValueError.

    Of each: its match, the position after it and its JSON, and the value of this JSON."""
    position = 0
    while match := LARK_TOKEN.search(text, position):
        position, value = match.end(), None
        if (match["text"] and not match["quote"]) or (match["regex"] and not match["slash"]):
            what = "a string" if match["text"] else "a regex"
            raise ValueError(f"{what} that begins at character {match.start()} is not terminated")

        if match["json"]:
            try:
                value, position = decoder.raw_decode(text, JSON_SPACE.match(text, position).end())  # type: ignore[union-attr]
            except (ValueError, RecursionError) as error:
                raise ValueError(f"%{match['json']} must be followed by JSON ({error})") from error
        yield match, position, value


def check_lark(text: str) -> None:
    """Check a Lark grammar with the schemas in it. Raises ValueError."""
    _check_size(text)
    num_parts = num_terminals = num_repetitions = 0
    for match, _, value in lark_tokens(text):
        if match["regex"]:
            num_repetitions += _check_repetitions("a regex", match["regex"])
        elif match["json"] == "json":
            check_schema(value)
        else:
            num_terminals += match["terminal"] is not None
            num_parts += match["part"] is not None or match["terminal"] is not None
            num_repetitions += match["repetition"] is not None

    _check_count("terminals", num_terminals, MAX_TERMINALS)
    _check_count("rules and groups", num_parts, MAX_PARTS)
    _check_count("repetitions", num_repetitions, MAX_PARTS)


def check_schema(schema: Any) -> None:
    """Check a JSON schema. Raises ValueError."""
    num_parts = num_patterns = num_repetitions = 0
    objects: list[dict[str, Any]] = []
    multiples: dict[Decimal, bool] = {}  # values of multipleOf, and whether only integers have them
    for value, depth in _walk(schema):
        if depth > MAX_DEPTH:
            raise ValueError(f"schema is nested deeper than {MAX_DEPTH} levels")

        num_parts += _num_parts(value)
        _check_count("parts", num_parts, MAX_PARTS)
        if isinstance(value, dict):
            objects.append(value)
            _check_keywords(value)
            num_patterns += _size_of(value.get("patternProperties")) + ("propertyNames" in value)
            num_repetitions += sum(_check_repetitions("a pattern", pattern) for pattern in _patterns(value))
            if is_number(multiple := value.get("multipleOf")):
                multiple = _decimal("multipleOf", multiple)
                is_integer = value.get("type") == "integer" and multiples.get(multiple, True)
                multiples[multiple] = is_integer

    _check_count("propertyNames and patternProperties", num_patterns, MAX_PATTERN_PROPERTIES)
    _check_count("repetitions", num_repetitions, MAX_PARTS)
    _check_size(json.dumps(schema, ensure_ascii=False))
    _check_multiples(multiples, is_merged=any("allOf" in each or "$ref" in each for each in objects))
    _check_merged_strings(schema, objects)


def _walk(schema: Any) -> Iterator[tuple[Any, int]]:
    """All objects and arrays of a schema with their depth, data included, because a $ref may refer to it."""
    stack = [(schema, 1)]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, dict | list):
            yield value, depth
            members = value.values() if isinstance(value, dict) else value
            stack += [(member, depth + 1) for member in members]


def _num_parts(value: dict[str, Any] | list[Any]) -> int:
    """An upper bound on what a value adds to the depth of llguidance's recursion."""
    if isinstance(value, list):
        return 1

    # Each property, each name in `required` and each member of a constant is a level.
    num_members = sum(_size_of(value.get(keyword)) for keyword in SEQUENCES)
    constants = [value.get("const"), *_members(value, "enum")]
    num_members += sum(len(each) for constant in constants for each, _ in _walk(constant))
    return 1 + num_members


def _check_keywords(schema: dict[str, Any]) -> None:
    """Check the numbers of one object of a schema, and how many properties it has."""
    for keyword in LOWER_BOUNDS + UPPER_BOUNDS:
        if is_number(bound := schema.get(keyword)):
            _check_bound(keyword, bound)

    for keyword in ("const", "enum"):
        for value, _ in _walk([schema.get(keyword)]):
            for member in value.values() if isinstance(value, dict) else value:
                if is_number(member):
                    _check_exact(keyword, member)

    is_counted = "minProperties" in schema or "maxProperties" in schema
    for keyword in ("properties", "required"):
        most = MAX_COUNTED_PROPERTIES if is_counted else MAX_PROPERTIES
        _check_count(keyword, _size_of(schema.get(keyword)), most)


def _patterns(schema: dict[str, Any]) -> list[str]:
    """The regular expressions of one object of a schema."""
    named = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(named if isinstance(named, dict) else ())]
    return [pattern for pattern in patterns if isinstance(pattern, str)]


def _check_bound(keyword: str, bound: float) -> None:
    # llguidance uses the largest double in int64 as upper bound instead, which excludes no integer.
    if keyword == "maximum" and bound == INT64_MAX and isinstance(bound, int):
        return

    _check_exact(keyword, bound)
    if keyword.startswith("exclusive") and abs(bound) > MAX_INTEGER:
        allowed = f"at most {MAX_INTEGER} in magnitude (2**53)"
        raise ValueError(f"{keyword}={bound}: expected {allowed}")

    decimals = -int(_decimal(keyword, bound).normalize().as_tuple().exponent)
    if decimals > MAX_DECIMALS:
        raise ValueError(f"{keyword}={bound}: expected at most {MAX_DECIMALS} digits after the decimal point")


def _check_exact(keyword: str, number: float) -> None:
    """Check that a number is exact in llguidance, which holds it as double and integers then as int64."""
    if not abs(number) <= INT64_MAX or abs(float(number)) >= 2.0**63 or float(number) != number:
        allowed = (
            f"a number from {-MAX_INTEGER} to {MAX_INTEGER} (2**53), or below 2**63 in magnitude where a "
            f"double holds it exactly (as `maximum` also {INT64_MAX})"
        )
        raise ValueError(f"{keyword}={number}: expected {allowed}")

    # llguidance divides the digits by a power of ten, each as a double.
    digits, exponent = _decimal(keyword, number).normalize().as_tuple()[1:]
    whole = float("".join(map(str, digits)))
    if int(exponent) < 0 and whole / float(f"1e{-int(exponent)}") != abs(number):
        raise ValueError(f"{keyword}={number}: expected at most 15 significant digits, and 308 decimals")


def _check_multiples(multiples: dict[Decimal, bool], *, is_merged: bool) -> None:
    """Check values of multipleOf, and those that may be merged, which llguidance multiplies as 32-bit
    integers.

    multiples: whether only integers have the value.
    """
    for multiple, is_integer in multiples.items():
        if not is_integer:
            _check_states(abs(int(multiple.scaleb(_num_decimals([multiple])))), [multiple])
    if not is_merged or len(multiples) < 2:
        return

    decimals = _num_decimals(multiples)
    scaled = [abs(int(each.scaleb(decimals))) for each in multiples]
    largest = max(scaled)
    common = 1
    for each in scaled:
        common = common * each // gcd(common, each) if each else common
        if common * largest > UINT32_MAX:
            allowed = (
                "values whose common multiples stay below 2**32 where schemas are merged by allOf or $ref"
            )
            raise ValueError(f"multipleOf={', '.join(map(str, multiples))}: expected {allowed}")

    if not all(multiples.values()):
        _check_states(common, multiples)


def _num_decimals(numbers: Iterable[Decimal]) -> int:
    """The most digits after the decimal point."""
    return max(0, *(-int(each.normalize().as_tuple().exponent) for each in numbers))


def _check_states(multiple: int, given: Iterable[Decimal]) -> None:
    """Check the states in which llguidance recognises multiples among decimal numbers: one for each rest."""
    for factor in (2, 5):
        while multiple and multiple % factor == 0:
            multiple //= factor
    if multiple > MAX_MULTIPLE:
        allowed = f"at most {MAX_MULTIPLE}, not counting factors of 2 and 5, or the type integer beside it"
        raise ValueError(f"multipleOf={', '.join(map(str, given))}: expected {allowed}")


def _check_merged_strings(schema: Any, objects: list[dict[str, Any]]) -> None:
    """Check how many patterns, formats and lengths apply to one string: they multiply llguidance's work."""
    objects = list({id(each): each for each in objects}.values())
    targets = _targets(schema, objects)
    counts = _count_constraints(objects, targets)
    counted = {id(each): _counted_properties(each, counts) for each in objects}
    checked: set[tuple[int, ...]] = set()
    for each in objects:
        _check_constraints(counts[id(each)])
        members = [
            targets.get(id(m)) if isinstance(m, dict) and "$ref" in m else m for m in _members(each, "allOf")
        ]
        # Many objects may merge the same members: each combination is checked once.
        merged = tuple(sorted(id(member) for member in [each, *members] if counted.get(id(member))))
        if merged not in checked:
            checked.add(merged)
            names: dict[str, int] = {}  # property -> constraints of all its merged definitions
            for member in merged:
                for name, number in counted[member].items():
                    names[name] = names.get(name, 0) + number
            _check_constraints(max(names.values(), default=0))


def _check_constraints(number: int) -> None:
    _check_count("patterns, formats and lengths for one string", number, MAX_CONSTRAINTS)


def _targets(schema: Any, objects: list[dict[str, Any]]) -> dict[int, Any]:
    """The part of the schema that each object's $ref refers to, by the object's id()."""
    anchors = {f"#{each['$anchor']}": each for each in objects if isinstance(each.get("$anchor"), str)}
    found: dict[str, Any] = {}
    targets: dict[int, Any] = {}
    for each in objects:
        reference = each.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            if reference not in found:
                found[reference] = anchors[reference] if reference in anchors else resolve(schema, reference)
            targets[id(each)] = found[reference]
    return targets


def _count_constraints(objects: list[dict[str, Any]], targets: dict[int, Any]) -> dict[int, int]:
    """Number of patterns, formats and lengths that each object puts on one string, by the object's id().

    Constraints of allOf and $ref add up; of anyOf and oneOf, the alternative with the most counts. When a
    count grows, the counts of the objects that use it grow too. Counts stop at MAX_CONSTRAINTS + 1, so that
    circular references end and each use takes at most that many steps.
    """
    limit = MAX_CONSTRAINTS + 1
    counts = {id(each): 0 for each in objects}
    sums = dict(counts)  # without the limit
    largest: dict[tuple[int, str], int] = {}  # of an object's alternatives
    users: dict[int, list[tuple[int, str]]] = {key: [] for key in counts}
    for each in objects:
        uses = [(member, "allOf") for member in _members(each, "allOf")] + [(targets.get(id(each)), "$ref")]
        uses += [(member, keyword) for keyword in ALTERNATIVES for member in _members(each, keyword)]
        for member, keyword in uses:
            if id(member) in users:
                users[id(member)].append((id(each), keyword))

    pending: list[int] = []

    def add(key: int, number: int) -> None:
        sums[key] += number
        if number and counts[key] < limit:
            pending.append(key)

    for each in objects:
        add(id(each), ("pattern" in each) + ("format" in each) + ("minLength" in each or "maxLength" in each))

    while pending:
        key = pending.pop()
        before, counts[key] = counts[key], min(sums[key], limit)
        for user, keyword in users[key] if counts[key] > before else ():
            if keyword not in ALTERNATIVES:
                add(user, counts[key] - before)
            elif counts[key] > (most := largest.get((user, keyword), 0)):
                largest[user, keyword] = counts[key]
                add(user, counts[key] - most)

    return counts


def _counted_properties(schema: dict[str, Any], counts: dict[int, int]) -> dict[str, int]:
    """Number of constraints of each property of an object, without properties that have none."""
    properties = schema.get("properties")
    members = properties.items() if isinstance(properties, dict) else ()
    return {name: counts[id(value)] for name, value in members if counts.get(id(value))}


def _members(schema: dict[str, Any], keyword: str) -> list[Any]:
    members = schema.get(keyword)
    return members if isinstance(members, list) else []


def _decimal(keyword: str, number: float) -> Decimal:
    """A number as it is written. Raises ValueError unless it is finite."""
    if isinstance(number, float) and not isfinite(number):
        raise ValueError(f"{keyword}={number}: expected a finite number")
    return Decimal(repr(number))


def _size_of(value: object) -> int:
    return len(value) if isinstance(value, dict | list) else 0


def _check_size(text: str) -> None:
    _check_count("bytes", len(text.encode(errors="surrogatepass")), MAX_BYTES)


def _check_repetitions(what: str, pattern: str) -> int:
    """The number of repetition operators in a regular expression. Raises ValueError if there are too many."""
    num_repetitions = sum(len(found) == 1 for found in REPETITION.findall(pattern))
    _check_count(f"repetitions in {what}", num_repetitions, MAX_REPETITIONS)
    return num_repetitions


def _check_count(what: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"{number} {what}: expected at most {most}")
