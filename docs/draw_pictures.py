"""Draw the pictures of the documents: a conversation and the dashboard, each of a real run, as SVG files.

python docs/draw_pictures.py [MODEL] [--seconds 15]        written to docs/images
"""

import argparse
import asyncio
import os
import re
import sys
from pathlib import Path

import anyio
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from dashboard import REFRESH_S, Dashboard, Load  # noqa: E402  # found by the line above
from smollm2 import path as smollm2_path  # noqa: E402

from drift_sdk import Engine, SamplingParams  # noqa: E402

WIDTH = 100
NUM_STREAMS = 8
QUESTIONS = ("What is the capital of France?", "Name three planets of the solar system.")


async def draw_chat(engine: Engine, path: Path) -> None:
    """Draw a conversation, with the figures of each answer."""
    console = recorder()
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        completion = await engine.chat(messages, SamplingParams(max_tokens=60))
        messages.append({"role": "assistant", "content": completion.text})
        console.print(Text(f"> {question}", style="bold cyan"))
        console.print(Text(completion.text.strip()))
        timing, num_tokens = completion.timing, completion.usage.completion_tokens
        rate = (num_tokens - 1) / max(timing.decode_s, 1e-9)
        figures = f"{num_tokens} tokens, first after {timing.first_token_s * 1e3:.0f} ms, {rate:.1f} tok/s"
        console.print(Text(f"[{figures}]\n", style="dim"))

    save(console, path, f"python examples/chat.py ({engine.executor})")


async def draw_dashboard(engine: Engine, path: Path, seconds: float) -> None:
    """Draw the dashboard after it has watched `NUM_STREAMS` streams for some seconds."""
    load = Load(engine, NUM_STREAMS, max_tokens=120)
    dashboard = Dashboard(load)
    async with anyio.create_task_group() as tasks:
        for lane in load.lanes:
            tasks.start_soon(load.run, lane)
        with anyio.move_on_after(seconds):
            while True:
                dashboard.sample()
                await anyio.sleep(REFRESH_S)

        console = recorder()
        console.print(dashboard)
        save(console, path, "python examples/dashboard.py")
        tasks.cancel_scope.cancel()


def recorder() -> Console:
    """A console that keeps what is printed."""
    return Console(record=True, width=WIDTH, force_terminal=True, file=Path(os.devnull).open("w"))


def save(console: Console, path: Path, title: str) -> None:
    """Write what was printed as an SVG that loads no fonts from elsewhere."""
    path.write_text(re.sub(r" *@font-face \{.*?\}\n", "", console.export_svg(title=title), flags=re.DOTALL))


async def main(model: str | Path, folder: Path, seconds: float) -> None:
    async with Engine(model) as engine:
        await draw_chat(engine, folder / "chat.svg")
        await draw_dashboard(engine, folder / "dashboard.svg", seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="default: SmolLM2-135M-Instruct, downloaded once")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of the dashboard's run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder to write to")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(given.model or smollm2_path(), given.out, given.seconds))
