"""A process that exits the interpreter while its engine is running.

python leaving_child.py WORK END [FOLDER]

WORK: step, eager (FOLDER is the model's), tokenize, grammar, loading, process, hanging_step or
      hanging_text.
END:  normal, exit (status 3), exception, interrupt, hard (os._exit with status 4).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any

from drift_sdk import BaseEngine, Engine, EngineConfig, ProcessEngine, Regex, SamplingParams
from drift_sdk.driver import loops, text_worker
from drift_sdk.driver.prompts import TextPrompt
from drift_sdk.testing import ScriptedModel, scripted_engine

ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
LARGE = EngineConfig(max_model_len=2**20, kv_cache_tokens=2**20, max_num_seqs=2)

kept: list[Any] = []
hangs = threading.Event()


def hang(*arguments: object) -> Any:
    hangs.set()
    time.sleep(3600)


async def begin(work: str) -> None:
    """Start an engine and the given work; returns when the work is in progress."""
    if work == "eager":
        config = EngineConfig(
            device="cpu", executor="eager", dtype="float32", load="random", kv_cache_tokens=512
        )
        engine: BaseEngine = Engine(sys.argv[3], config)
    elif work == "loading":
        model = ScriptedModel(endless, config=LARGE)

        def open_slowly(report: Any, limits: Any = None) -> Any:
            for _ in range(10_000):
                report("load weights", 0.5)
                time.sleep(0.01)
            return model(report)

        engine = Engine("scripted", LARGE, open_model=open_slowly)
    elif work == "process":
        model = ScriptedModel("a" * 4000, step_s=0.02)
        engine = ProcessEngine("scripted", model.config, open_model=model)
    elif work.startswith("hanging"):
        text_worker.CLOSE_TIMEOUT_S = 0.2
        loops.EXIT_TIMEOUT_S = 0.2 if work == "hanging_step" else 20.0
        engine = scripted_engine(endless, step_s=3600.0 if work == "hanging_step" else 0.0)
    else:
        engine = scripted_engine(endless, config=LARGE, step_s=0.02)
    kept.append(engine)
    if work == "loading":
        kept.append(asyncio.ensure_future(engine.start()))
        await asyncio.sleep(0.05)
        return

    await engine.start()
    if work == "hanging_text":
        TextPrompt.prepare = hang
    prompt: str | list[int] = "a" * 500_000 if work == "tokenize" else [5, 6]
    params = (
        SamplingParams(max_tokens=None, grammar=Regex("[a-z]{1,90000}")) if work == "grammar" else ENDLESS
    )
    if work == "hanging_text":
        prompt = "x"
    stream = engine.generate(prompt, params)
    kept.append(stream)
    if work in ("step", "eager", "grammar", "process"):
        await anext(stream)
    elif work == "hanging_text":
        while not hangs.is_set():  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0.001)
    else:
        await asyncio.sleep(0.05)


def endless(prompt_ids: Any, output_ids: Any, seed: int) -> int:
    return ord("a") + len(output_ids) % 26


# The loop is not closed, as in a notebook: the engine would cancel the requests of a closed loop.
loop = asyncio.new_event_loop()
loop.run_until_complete(begin(sys.argv[1]))
match sys.argv[2]:
    case "exit":
        sys.exit(3)
    case "exception":
        raise ValueError("unhandled")
    case "interrupt":
        raise KeyboardInterrupt
    case "hard":
        os._exit(4)
