"""What is shown while the demo works: bars on a terminal, plain lines anywhere else."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from engine_plugin.demo.play import TurnResult
from engine_plugin.demo.report import seconds

OnTurn = Callable[[TurnResult], None]


class Screen(ABC):
    """Shows progress. `setup_s` collects the seconds of each set-up step, by its short name."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.setup_s: dict[str, float] = {}

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        """A set-up step while it lasts."""
        begin = time.perf_counter()
        with self._working(what):
            yield
        self.setup_s[name] = time.perf_counter() - begin
        self.console.print(f"[dim]set-up:[/dim] {what} [dim]({self.setup_s[name]:.1f} s)[/dim]")

    def note(self, text: str) -> None:
        """A line that stays. Wrapped for a terminal only: in a file a line is a line."""
        self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)

    @abstractmethod
    def _working(self, what: str) -> AbstractContextManager[object]:
        """Something that shows that `what` goes on."""

    @abstractmethod
    def playing(self, name: str, num_turns: int, style: str) -> AbstractContextManager[OnTurn]:
        """A run of so many turns while it lasts; call the given function after each turn."""


class TerminalScreen(Screen):
    """Spinners and bars."""

    def _working(self, what: str) -> AbstractContextManager[object]:
        return self.console.status(what)

    @contextmanager
    def playing(self, name: str, num_turns: int, style: str) -> Iterator[OnTurn]:
        columns = (
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30, complete_style=style, finished_style=style),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(f"[{style}]{name:<13}", total=num_turns, last="starting the engine")

            def on_turn(result: TurnResult) -> None:
                last = f"session {result.session + 1} turn {result.turn + 1}: {seconds(result.ttft_s)}"
                progress.update(task, advance=1, last=last)

            yield on_turn
            progress.update(task, total=progress.tasks[0].completed, last="")


class PlainScreen(Screen):
    """One line per event, for files and pipes."""

    @contextmanager
    def _working(self, what: str) -> Iterator[None]:
        yield

    @contextmanager
    def playing(self, name: str, num_turns: int, style: str) -> Iterator[OnTurn]:
        done = 0

        def on_turn(result: TurnResult) -> None:
            nonlocal done
            done += 1
            cached = result.cached
            self.note(
                f"{name} {done}/{num_turns}: session {result.session + 1} turn {result.turn + 1}, "
                f"{result.prompt_tokens:,} tokens (device {cached.device:,}, host {cached.host:,}, "
                f"storage {cached.storage:,}), first token {seconds(result.ttft_s)}"
            )

        yield on_turn


def screen_for(console: Console) -> Screen:
    """Bars where they can be drawn."""
    return TerminalScreen(console) if console.is_terminal else PlainScreen(console)
