"""Recipes of the documents that are more than a snippet: they are run here as they stand there."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from loops import WAIT_S
from model_zoo import make_model
from placement import engine_config
from safetensors.torch import load_file, save_file

from drift_sdk import Engine, SamplingParams

PAGES = Path(__file__).parents[1] / "docs" / "deployment"
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def snippet(subject: str) -> str:
    """The snippet about deployment that contains a text."""
    text = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    found = re.findall(r"```py(?:thon)?\n(.*?)```", text, flags=re.DOTALL)
    [one] = [each for each in found if subject in each]
    return one


def with_changes(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def story_of(lines: Any) -> tuple[str, list[str]]:
    """The text of a stream of the recipe, and its last event. A broken connection would raise."""
    *texts, event, data = [line for line in lines if line]
    return "".join(json.loads(text.removeprefix("data: ")) for text in texts), [event, data]


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
@pytest.mark.parametrize("drain_s", [WAIT_S, 0.1])
def test_open_streams_get_an_end_at_sigterm(drain_s: float, tmp_path: Path) -> None:
    """With a scripted engine in place of a model, and a free port."""
    num_words = 200 if drain_s == WAIT_S else 1000
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scripted = f"drift_sdk.testing.scripted_engine('la ' * {num_words}, step_s=0.002)"
    changes = {
        'Engine("HuggingFaceTB/SmolLM2-135M-Instruct")': scripted,
        "port=8000, drain_s=20.0": f"port={port}, drain_s={drain_s}",
    }
    program = tmp_path / "service.py"
    program.write_text("import drift_sdk.testing\n" + with_changes(snippet('"/story"'), changes))
    with subprocess.Popen([sys.executable, str(program)], stderr=subprocess.PIPE, text=True) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
            while True:
                try:
                    client.get("/openapi.json").raise_for_status()
                    break
                except httpx.ConnectError:
                    assert process.poll() is None
                    time.sleep(0.1)
            with client.stream("GET", "/story", params={"prompt": "sing"}) as response:
                lines = response.iter_lines()
                first = next(lines)
                process.send_signal(signal.SIGTERM)
                text, end = story_of([first, *lines])
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0 and "Traceback" not in err, err
    if drain_s == WAIT_S:
        assert (text, end) == ("la " * num_words, ["event: end", "data: null"])
    else:
        assert 0 < len(text) < 3 * num_words
        assert end[0] == "event: error" and "closed" in end[1]


async def test_new_weights_are_served_after_files_were_replaced(tmp_path: Path) -> None:
    folder, trained = tmp_path / "served", tmp_path / "trained"
    make_model(1, folder)
    shutil.copytree(folder, trained)
    (file,) = trained.glob("*.safetensors")
    tensors = load_file(file)
    save_file(
        {name: tensor.flip(0) if tensor.ndim == 1 else tensor * 1.5 for name, tensor in tensors.items()}, file
    )
    names: dict[str, Any] = {"Engine": Engine}
    exec(compile(snippet("def replace_weights"), "operations.md", "exec"), names)
    async with Engine(trained, engine_config(max_model_len=64, device="cpu")) as engine:
        expected = await engine.generate([5, 6, 7], GREEDY)
    async with Engine(folder, engine_config(max_model_len=64, device="cpu")) as engine:
        before = await engine.generate([5, 6, 7], GREEDY)
        assert before.token_ids != expected.token_ids
        await names["replace_weights"](engine, folder, trained)
        assert (await engine.generate([5, 6, 7], GREEDY)).token_ids == expected.token_ids
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in trained.iterdir())
