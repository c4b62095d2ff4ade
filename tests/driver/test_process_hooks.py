"""Pauses of the garbage collector."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from drift_sdk.driver.loops import MIN_MOVED, without_collection


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_collection_goes_on_after_the_last_block() -> None:
    with without_collection():
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), without_collection():
        raise ImportError
    assert gc.isenabled()


def test_blocks_of_threads_overlap() -> None:
    entered, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with without_collection():
            entered.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    with without_collection():
        thread.start()
        entered.wait()
    assert not gc.isenabled()
    may_end.set()
    thread.join()
    assert gc.isenabled()


def test_disabled_collector_stays_disabled() -> None:
    gc.disable()
    with without_collection(), without_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.fixture(autouse=True, scope="module")
def frozen_afterwards() -> Iterator[None]:
    """Other tests have what was imported frozen, so that their collections are short."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def thawed() -> None:
    """Nothing is frozen at the beginning of a test, and nothing is young."""
    gc.unfreeze()
    gc.collect(1)


def is_young(found: object) -> bool:
    return any(each is found for generation in (0, 1) for each in gc.get_objects(generation))


def make_many() -> list[object]:
    """Objects, so many that the end of a pause moves them, also if other threads give some up meanwhile: the
    collector counts those less."""
    return [[] for _ in range(2 * MIN_MOVED)]


def test_objects_made_in_a_block_count_as_old() -> None:
    with without_collection():
        made = make_many()
        with without_collection():
            made.append([])
        assert is_young(made[0]) and is_young(made[-1])
    assert not is_young(made[0]) and not is_young(made[-1])
    assert gc.get_freeze_count() == 0


def test_few_objects_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen objects, of which a program may have millions, would be counted one by one."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counts frozen objects"))
    gc.collect()
    with without_collection():
        made: list[object] = []
    assert is_young(made)


def test_objects_that_the_interpreter_has_frozen_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts with some."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 400)
    with without_collection():
        made = make_many()
    assert not is_young(made)


def test_garbage_of_a_block_is_collected() -> None:
    class Made:
        pass

    with without_collection():
        made = Made()
        made.itself = made  # type: ignore[attr-defined]
        found = weakref.ref(made)
        del made
    gc.collect()
    assert found() is None


def test_frozen_objects_of_the_process_stay_frozen() -> None:
    gc.freeze()
    try:
        num_frozen = gc.get_freeze_count()
        with without_collection():
            made = make_many()
        assert num_frozen - 100 < gc.get_freeze_count() <= num_frozen  # some may have been freed
        assert is_young(made)
    finally:
        gc.unfreeze()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_collects() -> None:
    """A child has no thread that would end the pause."""
    program = """
import gc, os
from drift_sdk.driver.loops import MIN_MOVED, without_collection
with without_collection():
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() else 1)
    assert not gc.isenabled()
assert gc.isenabled()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_start_of_an_engine_imports_without_collection() -> None:
    program = """
import asyncio, gc, sys
from drift_sdk import Engine, EngineConfig, ModelLoadError

seen = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "drift_sdk.startup.model_startup"):
            seen.append(gc.isenabled())

sys.meta_path.insert(0, Finder())

async def main():
    try:
        await Engine("/no/such/folder", EngineConfig(device="cpu")).start()
    except ModelLoadError:
        print("refused")

asyncio.run(main())
assert seen and not any(seen), seen
assert gc.isenabled()
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "refused"
