"""Keys of kernels in Triton's cache do not depend on what a process did before."""

from __future__ import annotations

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.runtime.cache import triton_key

from drift_sdk._kernels.launch import kernel
from drift_sdk._kernels.launch.kernel import (
    hash_installation,
    prepare_cache_keys,
    settle_cache_key,
    wait_for_cache_keys,
)

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


@pytest.mark.parametrize("last", ["hash_installation", "platform_key"])
def test_a_wait_for_keys_lasts_until_all_are_prepared(monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    may_end, ended = threading.Event(), list[str]()
    names = ("hash_installation", "platform_key")
    for name in names:

        def prepare(name: str = name) -> None:
            if name == last:
                may_end.wait(10)
            ended.append(threading.current_thread().name)

        monkeypatch.setattr(kernel, name, prepare)
    prepare_cache_keys()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait_for_cache_keys)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        may_end.set()
        waiting.result(10)
    assert ended == ["drift-cache-keys"] * 2


def test_keys_may_be_waited_for_while_they_begin_to_be_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the thread of another engine."""
    monkeypatch.setattr(kernel, "hash_installation", lambda: None)
    monkeypatch.setattr(kernel, "platform_key", lambda: None)
    start = threading.Thread.start

    def waited_for(thread: threading.Thread) -> None:
        wait_for_cache_keys()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", waited_for)
    prepare_cache_keys()
    wait_for_cache_keys()


def test_the_installation_has_the_hash_that_triton_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = triton_key.__wrapped__()
    monkeypatch.setattr(kernel, "triton_key", triton_key.__wrapped__)  # nothing kept
    sizes: list[int] = []
    read = kernel._MappedFile.read

    def counted(file: Any, size: int = -1) -> Any:
        found = read(file, size)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(kernel._MappedFile, "read", counted)
    assert hash_installation() == computed
    assert len(sizes) == 2 and sizes[0] > 2**20 and sizes[1] == 0  # read at once
    assert not hasattr(triton.runtime.cache, "open")


def test_other_files_are_opened_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads may use Triton's cache meanwhile."""
    file = tmp_path / "kernel.json"

    def key() -> str:
        module: Any = triton.runtime.cache
        with module.open(file, "w", encoding="latin-1") as opened:
            opened.write("ä")
        with module.open(file, "rb") as opened:
            return str(opened.read(1) + opened.read(), "latin-1")

    monkeypatch.setattr(kernel, "triton_key", key)
    assert hash_installation() == "ä"


def test_an_empty_library_is_read(tmp_path: Path) -> None:
    file = tmp_path / "libtriton.so"
    file.touch()
    with kernel._open(file, "rb") as opened:
        assert opened.read(2**20) == b""


def test_triton_opens_files_by_itself_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        raise OSError("no file")

    monkeypatch.setattr(kernel, "triton_key", key)
    with pytest.raises(OSError, match="no file"):
        hash_installation()
    assert not hasattr(triton.runtime.cache, "open")


def test_two_threads_may_hash_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both_hash = threading.Barrier(2, timeout=10)
    monkeypatch.setattr(kernel, "triton_key", lambda: both_hash.wait())
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(hash_installation) for _ in range(2)]:
            future.result()
    assert not hasattr(triton.runtime.cache, "open")
