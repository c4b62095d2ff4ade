"""Constrained decoding: compiles grammars by llguidance, and computes which tokens may come next.

Masks are exact: a token of at most `MAX_TOKEN_BYTES` bytes is allowed if and only if the grammar accepts its
bytes. llguidance can also require the tokenizer's own spelling of text that has only one continuation
("forcing"). This is switched off, because it calls back into Python for each mask, and because it would
restrict drafted tokens by a rule that does not apply to sampled ones.

Each grammar is compiled on a thread of its own, which nothing can end.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from queue import Empty, SimpleQueue
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from drift_sdk.errors import RequestError
from drift_sdk.grammars import JSON_STYLE, After, AnyGrammar, JsonSchema, Lark, Regex
from drift_sdk.text.grammar_limits import STACK_BYTES, check_lark, check_regex, check_schema, lark_tokens
from drift_sdk.text.schemas import enforceable
from drift_sdk.text.tokenizer import Tokenizer

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


# Within the bounds of grammar_limits, compiling takes up to a few seconds. After this time the request fails;
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
