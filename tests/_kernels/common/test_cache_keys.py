"""Keys of kernels in Triton's cache do not depend on what a process did before."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

import pytest

from drift_sdk._kernels.common import cache_keys
from drift_sdk._kernels.common.cache_keys import prepare_cache_keys, settle_cache_key, wait_for_cache_keys

CALLS = """
import triton.language as tl
from triton.runtime.jit import JITFunction

FACTOR, OFFSET = tl.constexpr(2), tl.constexpr(3)

@JITFunction
def scaled(x):
    return x * FACTOR

@JITFunction
def moved(x):
    return scaled(x) + OFFSET

@JITFunction
def kernel(x):
    moved(x)
"""


def test_keys_do_not_depend_on_the_order_of_computing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that computes the key of a called function first finds what another process compiled."""
    (tmp_path / "functions_that_call.py").write_text(CALLS)
    monkeypatch.syspath_prepend(tmp_path)
    keys = []
    for first in ("kernel", "moved", "scaled"):
        monkeypatch.delitem(sys.modules, "functions_that_call", raising=False)
        module = importlib.import_module("functions_that_call")
        settle_cache_key(getattr(module, first))
        settle_cache_key(module.kernel)
        keys.append(module.kernel.cache_key)
    assert len(set(keys)) == 1


def test_a_wait_for_keys_lasts_until_they_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def key() -> None:
        may_end.wait(10)
        has_ended.set()

    monkeypatch.setattr(cache_keys, "triton_key", key)
    prepare_cache_keys()
    assert not has_ended.is_set()
    may_end.set()
    wait_for_cache_keys()
    assert has_ended.is_set()
