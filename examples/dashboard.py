"""A live view of an engine in the terminal while requests are running.

python examples/dashboard.py [MODEL] [--seconds N] [--streams 8]        Ctrl-C ends the program
"""

import random
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import anyio
import command_line
from rich.align import Align
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from drift_sdk import Engine, SamplingParams

TOPICS = ["the sea", "winter", "a clock", "bread", "the moon", "a bridge", "rain", "a lighthouse"]
FORMS = ["a haiku", "three sentences", "a short story", "a limerick", "a letter"]
MARKS = {"waiting": "[dim]·", "running": "[green]●", "done": "[blue]✓", "cancelled": "[yellow]×"}
BLOCKS = " ▁▂▃▄▅▆▇█"
MIN_TOKENS = 8
REFRESH_S = 0.1
SAMPLE_S = 0.5


class Lane:
    """The state of one task, which sends a request, reads the answer and repeats."""

    def __init__(self) -> None:
        self.state = "waiting"
        self.question = ""
        self.text = ""
        self.num_tokens = 0


class Load:
    """The tasks that send requests, and their measurements."""

    def __init__(self, engine: Engine, num_lanes: int, max_tokens: int) -> None:
        self.engine = engine
        self.lanes = [Lane() for _ in range(num_lanes)]
        self.first_tokens_s: deque[float] = deque(maxlen=64)
        self._max_tokens = max_tokens

    async def run(self, lane: Lane) -> None:
        """One task: send requests and read their answers without end."""
        while True:
            lane.question = f"Write {random.choice(FORMS)} about {random.choice(TOPICS)}."
            lane.state, lane.text, lane.num_tokens = "waiting", "", 0
            params = SamplingParams(max_tokens=random.randint(MIN_TOKENS, self._max_tokens), temperature=0.8)
            patience = self._max_tokens if random.random() < 0.9 else MIN_TOKENS  # cancels some early
            async with self.engine.chat([{"role": "user", "content": lane.question}], params) as stream:
                async for chunk in stream:
                    lane.state = "running"
                    lane.text += chunk.text
                    lane.num_tokens += len(chunk.token_ids)
                    if lane.num_tokens >= patience:
                        stream.cancel()

                completion = await stream
            lane.state = "cancelled" if completion.finish_reason == "cancelled" else "done"
            self.first_tokens_s.append(completion.timing.first_token_s)
            await anyio.sleep(random.expovariate(2.0))


class Dashboard:
    """Draws the engine's statistics and the load's lanes."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._engine = load.engine
        self._started_at = self._sampled_at = time.monotonic()
        self._num_tokens = 0
        self._rates: deque[float] = deque(maxlen=200)

    def sample(self) -> None:
        """Add a point to the curve of tokens per second, twice a second."""
        now = time.monotonic()
        if now - self._sampled_at >= SAMPLE_S:
            num_tokens = self._engine.stats().num_generated_tokens
            self._rates.append((num_tokens - self._num_tokens) / (now - self._sampled_at))
            self._num_tokens, self._sampled_at = num_tokens, now

    def __rich__(self) -> RenderableType:
        return Group(self._engine_panel(), self._lanes_panel())

    def _engine_panel(self) -> Panel:
        stats = self._engine.stats()
        num_slots = stats.num_running + stats.num_free_slots
        gauges = Table.grid(padding=(0, 2), expand=True)
        gauges.add_column(style="dim", width=8)
        gauges.add_column(ratio=1)
        gauges.add_column(justify="right", width=9)
        slots = f"[bold]{stats.num_running}[/][dim] / {num_slots}"
        gauges.add_row("running", meter(stats.num_running / num_slots, "green"), slots)
        gauges.add_row("KV cache", meter(stats.kv_use, "magenta"), f"[bold]{stats.kv_use:.1%}")
        gauges.add_row()
        gauges.add_row("tokens/s", Curve(self._rates, height=3), f"[bold]{stats.tokens_per_second:.1f}")

        first = sorted(self._load.first_tokens_s)
        figures = {
            "waiting": str(stats.num_waiting),
            "finished": str(stats.num_stopped + stats.num_length_limited),
            "cancelled": str(stats.num_cancelled),
            "tokens": f"{stats.num_generated_tokens:,}",
            "step": f"{stats.step_seconds / max(stats.num_steps, 1) * 1e3:.1f} ms",
            "first token": f"{first[len(first) // 2] * 1e3:.0f} ms" if first else "-",
            "from cache": f"{stats.num_cached_tokens / max(stats.num_prompt_tokens, 1):.0%}",
        }
        numbers = Table.grid(padding=(0, 2))
        for _ in figures:
            numbers.add_column(justify="center")
        numbers.add_row(*(f"[bold]{value}" for value in figures.values()))
        numbers.add_row(*(f"[dim]{name}" for name in figures))
        model = Path(self._engine.model).name
        return Panel(
            Group(gauges, "", Align.center(numbers)),
            title=f"[bold white]drift_sdk[/] [cyan]{self._engine.executor}",
            subtitle=f"[white]{model}, {time.monotonic() - self._started_at:.0f} s",
            border_style="bright_black",
            padding=(1, 2),
        )

    def _lanes_panel(self) -> Panel:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=1)
        table.add_column(ratio=2, style="cyan")
        table.add_column(width=3, justify="right", style="dim")
        table.add_column(ratio=3)
        for lane in self._load.lanes:
            question = Text(lane.question, no_wrap=True, overflow="ellipsis")
            table.add_row(MARKS[lane.state], question, str(lane.num_tokens or ""), Tail(lane.text))

        return Panel(table, title="[bold white]streams", border_style="bright_black", padding=(0, 2))


def meter(share: float, colour: str) -> ProgressBar:
    return ProgressBar(total=1.0, completed=share, complete_style=colour, finished_style=colour)


class Curve:
    """The newest values as bars, scaled to the largest value, with a resolution of an eighth of a line."""

    def __init__(self, values: Iterable[float], height: int) -> None:
        self._values = list(values)
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        values = self._values[-options.max_width :]
        top = max(values, default=0.0) or 1.0
        eighths = [round(value / top * 8 * self._height) for value in values]
        for line in reversed(range(self._height)):
            bars = "".join(BLOCKS[min(max(value - 8 * line, 0), 8)] for value in eighths)
            yield Text(bars.rjust(options.max_width), style="green")


class Tail:
    """The end of a text, as much as fits into a line."""

    def __init__(self, text: str) -> None:
        self._text = " ".join(text.split())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._text[-options.max_width :].lstrip(), no_wrap=True, overflow="crop")


async def main(model: str, seconds: float, num_streams: int, max_tokens: int) -> None:
    async with Engine(model) as engine:
        load = Load(engine, num_streams, max_tokens)
        dashboard = Dashboard(load)
        with Live(dashboard, auto_refresh=False) as live, anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                for lane in load.lanes:
                    tasks.start_soon(load.run, lane)
                while True:
                    dashboard.sample()
                    live.refresh()
                    await anyio.sleep(REFRESH_S)


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError

    return value


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--seconds", type=positive, default=float("inf"), help="duration (default: until Ctrl-C)"
    )
    whole = command_line.whole
    parser.add_argument(
        "--streams", type=whole(1), default=8, help="requests at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens",
        type=whole(MIN_TOKENS),
        default=120,
        help="limit of an answer (default: %(default)s)",
    )
    options = parser.parse_args()
    command_line.run(main, options.model, options.seconds, options.streams, options.max_tokens)
