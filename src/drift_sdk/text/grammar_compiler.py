"""Compilation of grammars by llguidance, each on a thread of its own that nothing can end."""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from llguidance import LLMatcher, LLTokenizer

from drift_sdk.text.grammar_limits import STACK_BYTES

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
    code while the interpreter is finalised would end the process (see process_hooks.py)."""
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
