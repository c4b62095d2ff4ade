"""Constrained decoding: checks and compiles grammars, and computes which tokens may come next.

Masks are exact: a token of at most `MAX_TOKEN_BYTES` bytes is allowed if and only if the grammar accepts its
bytes. llguidance can also require the tokenizer's own spelling of text that has only one continuation
("forcing"). This is switched off, because it calls back into Python for each mask, and because it would
restrict drafted tokens by a rule that does not apply to sampled ones.

llguidance compiles by native recursion, in some cases in time quadratic or worse in the size of the grammar,
and represents numbers as doubles and 64-bit integers without reporting those that do not fit. So bounds are
checked first: within them it needs less stack than `STACK_BYTES`, and all numbers are represented exactly. A
`ValueError` names the bound that is exceeded. Each grammar is compiled on a thread of its own, which nothing
can end.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from math import gcd, isfinite
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from drift_sdk.errors import RequestError
from drift_sdk.grammars import JSON_STYLE, After, AnyGrammar, JsonSchema, Lark, Regex
from drift_sdk.text.schemas import enforceable, is_number, resolve
from drift_sdk.text.tokenizer import Tokenizer

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


try:
    from llguidance import LLMatcher, LLTokenizer, regex_to_lark
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
except ImportError as error:
    # This module is imported by the first request with a grammar, which receives the error.
    allowed = 'the package llguidance: pip install "drift-engine[grammar]"'
    raise RequestError(f"grammar: needs {allowed}", field="grammar", allowed=allowed) from error


NUM_CACHED_GRAMMARS = 64
SLOW_MASK_S = 0.005
"""CPU time of a mask from which on no masks are computed after drafted tokens, see `GrammarConstraint`."""

MAX_TOKEN_BYTES = 1000
"""Longest token that a grammar may allow. llguidance panics at a vocabulary with one of more than 1,024."""

NO_FORCING = '\n%llguidance {"no_forcing": true}'

Bitmask = NDArray[np.int32]


def constrain(
    grammar: AnyGrammar,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    ignore_eos: bool = False,
) -> GrammarConstraint:
    """A constraint for one completion, at the beginning of the grammar.

    vocab_size:     number of the model's token ids.
    eos_token_ids:  ids that end the text; those from `vocab_size` on are ignored.
    ignore_eos:     allow them only where nothing else is allowed.

    Compiled grammars are cached; a model's vocabulary is read for its first grammar. Raises `RequestError`,
    with the reason, for a grammar that cannot be compiled.
    """
    kind = type(grammar).__name__
    eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
    if not eos_token_ids:
        raise failure(f"{kind} ends with an end-of-sequence token, but the model has none", grammar)

    vocabulary = vocabulary_of(tokenizer, vocab_size, eos_token_ids)
    try:
        compiled = vocabulary.compile(lark_of(grammar))
    except ValueError as error:
        raise failure(f"{kind} cannot be compiled: {error}", grammar) from error

    return GrammarConstraint(compiled.deep_copy(), vocab_size, eos_token_ids, ignore_eos=ignore_eos)


class GrammarConstraint:
    """A grammar and a completion's position in it. Implements `TokenConstraint`.

    End-of-sequence ids are allowed where the text may end; with `ignore_eos`, only where it must end. Only
    one thread at a time may use it: a text thread calls `advance`, the engine's thread calls `masks`.

    is_slow: whether the newest mask took more than `SLOW_MASK_S` seconds of CPU time, as with a grammar in
             which texts have very many parses.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int], *, ignore_eos: bool = False
    ) -> None:
        """`matcher` must not be used by others afterwards."""
        self.eos_token_ids: frozenset[int] = frozenset(eos_token_ids)
        self._matcher = matcher
        self._num_tokens = 0
        self._empty = allocate_token_bitmask(1, vocab_size)
        self._empty[:] = 0
        self.is_slow: bool = False
        self._eos = self._empty.copy() if ignore_eos else None
        if self._eos is not None:
            for token_id in eos_token_ids:
                self._eos.view(np.uint32)[0, token_id // 32] |= np.uint32(1 << token_id % 32)

        self._next = self._compute_next()

    def masks(self, draft_token_ids: Sequence[int]) -> Bitmask:
        """Masks for the next token and after each drafted token, see `TokenConstraint`.

        Rows after a drafted token that is not allowed or that ends the text are zero.
        """
        if not draft_token_ids:
            return self._next

        rows = self._empty.repeat(len(draft_token_ids) + 1, axis=0)
        rows[0] = self._next[0]
        num_consumed = 0
        for index, token_id in enumerate(draft_token_ids):
            if token_id in self.eos_token_ids or not is_allowed(rows[index], token_id):
                break

            if not self._matcher.consume_token(token_id):
                break  # the parser has reached a limit, which the next `advance` reports

            num_consumed += 1
            self._fill(rows, index + 1)

        self._matcher.rollback(num_consumed)
        return rows

    def mask_ahead(self) -> None:
        """See `TokenConstraint`: a grammar's mask depends on every token before it."""

    @property
    def can_advance_at_once(self) -> bool:
        """See `Limits`: a mask may take milliseconds."""
        return False

    def advance(self, token_ids: Sequence[int]) -> None:
        """Move on by newly generated tokens.

        Raises `RequestError` if the grammar does not accept them, or if no token may follow them.
        """
        num_consumed = self._matcher.try_consume_tokens(list(token_ids))
        self._num_tokens += num_consumed
        if num_consumed < len(token_ids):
            self._check()
            token_id = token_ids[num_consumed]
            if token_id in self.eos_token_ids:
                raise failure(f"the text ends inside it, after {self._num_tokens} tokens")

            raise failure(f"token {token_id} does not continue the text of {self._num_tokens} tokens")

        self._next = self._compute_next()

    def _compute_next(self) -> Bitmask:
        rows = self._empty.copy()  # the previous mask may still be in use
        begin_s = time.thread_time()
        self._fill(rows, 0)
        self.is_slow = time.thread_time() - begin_s > SLOW_MASK_S
        self._check()
        if not rows.any():
            raise failure(f"no token of the model continues the text of {self._num_tokens} tokens")

        return rows

    def _fill(self, rows: Bitmask, index: int) -> None:
        """Write the mask for the next token into row `index`; zero if the parser has failed."""
        fill_next_token_bitmask(self._matcher, rows, index)
        if self._matcher.is_error():
            rows[index] = 0
        elif self._eos is not None and (others := rows[index] & ~self._eos[0]).any():
            rows[index] = others

    def _check(self) -> None:
        if self._matcher.is_error():
            raise failure(f"it cannot be followed beyond {self._num_tokens} tokens: {reason(self._matcher)}")


class TokenTable:
    """A vocabulary in the form that llguidance reads.

    Special tokens have a name and no text; names of more than `MAX_TOKEN_BYTES` bytes are replaced. Ids after
    the tokenizer's last one, with which a model's vocabulary may be padded, have neither, as have tokens that
    are too long.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        token_bytes = tokenizer.token_bytes
        special_token_ids = tokenizer.special_token_ids.union(eos_token_ids)
        self.eos_token_id: int = eos_token_ids[0]
        self.special_token_ids: list[int] = sorted(i for i in special_token_ids if i < vocab_size)
        texts = (token_bytes[token_id] for token_id in range(vocab_size))
        self.tokens: list[bytes] = [text if len(text) <= MAX_TOKEN_BYTES else b"" for text in texts]
        for token_id in self.special_token_ids:
            name = tokenizer.decode([token_id], skip_special_tokens=False).encode()
            self.tokens[token_id] = name if len(name) <= MAX_TOKEN_BYTES else b"<[%d]>" % token_id

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError("llguidance tokenises text only for forcing, which is off")


class Vocabulary:
    """A model's tokens in llguidance's form, and a cache of grammars compiled for them.

    It must not keep a reference to its tokenizer: it is the value of a weak dictionary with that key.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        table = TokenTable(tokenizer, vocab_size, eos_token_ids)
        ll_tokenizer = LLTokenizer(table, eos_token=list(eos_token_ids))  # type: ignore[arg-type]  # duck-typed
        self.compile: Callable[[str], LLMatcher] = lru_cache(NUM_CACHED_GRAMMARS)(
            partial(compile_lark, ll_tokenizer)
        )


_vocabularies: WeakKeyDictionary[Tokenizer, dict[tuple[int, tuple[int, ...]], Vocabulary]]
_vocabularies = WeakKeyDictionary()
_vocabularies_lock = threading.Lock()


def renew_lock() -> None:
    """Replace the lock in a forked child, where its owner may be a thread that does not exist there."""
    global _vocabularies_lock
    _vocabularies_lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=renew_lock)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """The vocabulary for these arguments, made at the first call and kept as long as the tokenizer."""
    with _vocabularies_lock:
        vocabularies = _vocabularies.setdefault(tokenizer, {})
        vocabulary = vocabularies.get((vocab_size, eos_token_ids))
        if vocabulary is None:
            vocabulary = Vocabulary(tokenizer, vocab_size, eos_token_ids)
            vocabularies[vocab_size, eos_token_ids] = vocabulary

        return vocabulary


def lark_of(grammar: AnyGrammar) -> str:
    """A grammar in llguidance's notation, with forcing switched off.

    The setting is appended because llguidance uses the last one. Raises ValueError for a grammar that exceeds
    the bounds.
    """
    if isinstance(grammar, Lark):
        return enforceable_lark(grammar.grammar) + NO_FORCING

    return f"start: {expression_of(grammar)}{NO_FORCING}"


def expression_of(grammar: AnyGrammar) -> str:
    """A grammar as an expression of llguidance's Lark. Raises as `lark_of` does."""
    if isinstance(grammar, JsonSchema):
        check_schema(grammar.definition)
        return f"%json {json.dumps(enforceable({'x-guidance': JSON_STYLE} | grammar.definition))}"

    if isinstance(grammar, Regex):
        check_regex(grammar.pattern)
        # \s becomes a class that contains a space, which (?x) would ignore.
        pattern = regex_to_lark(grammar.pattern, "dws").replace(r"[ \t", r"[\x20\t")
        return f"/{pattern}/"

    if isinstance(grammar, Lark):
        return f"%lark {{\n{enforceable_lark(grammar.grammar)}\n}}"

    if isinstance(grammar, After):
        return f"({expression_of(grammar.first)}) ({expression_of(grammar.rest)})"

    return " | ".join(map(expression_of, grammar.grammars))


def enforceable_lark(text: str) -> str:
    """A Lark grammar with enforceable schemas in place of its own. Raises ValueError for a grammar that
    exceeds the bounds."""
    check_lark(text)
    parts, position = [], 0
    for match, end, schema in lark_tokens(text):
        if match["json"] == "json":
            parts += [text[position : match.end()], " ", json.dumps(enforceable(schema))]
            position = end
    return "".join([*parts, text[position:]])


def is_allowed(row: NDArray[np.int32], token_id: int) -> bool:
    """Whether the bit of a token is set in a row of a mask."""
    return bool(int(row[token_id // 32]) >> token_id % 32 & 1)


def failure(reason: str, grammar: AnyGrammar | None = None) -> RequestError:
    allowed = "a grammar that can be compiled and followed"
    return RequestError(f"grammar: {reason}", field="grammar", value=grammar, allowed=allowed)


# Within the bounds above, compiling takes up to a few seconds. After this time the request fails;
# the compilation continues on its thread, because native code cannot be stopped.
COMPILE_TIMEOUT_S = 20
EXIT_TIMEOUT_S = 10.0
"""Most seconds that compilations delay the exit of the interpreter."""
MAX_OVERDUE = 4
"""Most threads that compile grammars for longer, after which none is begun. They cannot be ended."""

_stack_size_lock = threading.Lock()
_compiling: dict[threading.Thread, float] = {}
"""Threads that compile grammars, some of which may have ended, and time.monotonic() when each was started."""


def begin_child() -> None:
    """Called in a forked child, where no thread of the parent exists, and any may have held the lock."""
    global _stack_size_lock
    _stack_size_lock = threading.Lock()
    _compiling.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=begin_child)


def compile_lark(ll_tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """Compile a grammar in llguidance's notation, on a new thread with a stack that is large enough.

    The stack size of other threads is the host program's choice. Raises ValueError with the reason if the
    grammar cannot be compiled in `COMPILE_TIMEOUT_S` seconds, or if `MAX_OVERDUE` others still are after
    these.
    """
    now = time.monotonic()
    for thread in list(_compiling):
        if not thread.is_alive():
            _compiling.pop(thread, None)
    if sum(now - started_at > COMPILE_TIMEOUT_S for started_at in list(_compiling.values())) >= MAX_OVERDUE:
        raise ValueError(f"{MAX_OVERDUE} others take longer than {COMPILE_TIMEOUT_S} s and have not ended")

    compiled: SimpleQueue[LLMatcher | BaseException] = SimpleQueue()

    def work() -> None:
        try:
            compiled.put(LLMatcher(ll_tokenizer, lark, log_level=0))
        except BaseException as error:  # a Rust panic is not an Exception
            compiled.put(error)

    _compiling[start_thread(work)] = now
    try:
        matcher = compiled.get(timeout=COMPILE_TIMEOUT_S)
    except Empty:
        raise ValueError(f"it takes longer than {COMPILE_TIMEOUT_S} s") from None

    if isinstance(matcher, BaseException):
        raise ValueError(f"llguidance failed: {matcher}") from matcher

    if matcher.is_error():
        raise ValueError(reason(matcher))

    return matcher


def start_thread(work: Callable[[], None]) -> threading.Thread:
    """Start and return a thread with a stack of `STACK_BYTES`.

    Python takes the stack size from a setting of the process, which is changed during this start only.
    """
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name="drift-grammar", daemon=True)
            thread.start()
            return thread
        except RuntimeError as error:
            raise ValueError(f"a thread with {STACK_BYTES >> 20} MiB of stack cannot be started") from error
        finally:
            threading.stack_size(before)


def wait_for_compilations() -> None:
    """Wait for threads that compile grammars, `EXIT_TIMEOUT_S` seconds at most: one that returns from native
    code while the interpreter is finalised would end the process (see loops.py)."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for thread in list(_compiling):
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(wait_for_compilations)


def reason(matcher: LLMatcher) -> str:
    """llguidance's error message, shortened.

    Removed are its listing of the grammar, its dump of the parser state, and the position of the schema or
    pattern in the text made by `lark_of`.
    """
    message = re.split(r"\n<state>|\n +\d+ \| ", matcher.get_error())[0]
    if message == "NoExtensionBias":  # its name for a grammar without a text
        return "no text matches it"

    if "oneOf constraints are not supported" in message:
        return (
            "a value may have several schemas of oneOf, which cannot be excluded: expected anyOf, or schemas "
            "that differ by their types, by constants, or by a property that one of them requires"
        )

    return re.sub(r"^at 1\(8\): (failed to compile JSON schema: )?", "", message).strip()
