"""Progress of a run: a live line on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

LOG_EVERY = 30.0  # seconds between lines in a log file while one step lasts


class Progress:
    """Shows what the run is doing, how far it is, how fast, and how long it still takes.

    On a terminal one line is updated in place below the lines that stay. Elsewhere each step prints a line, and a step
    that lasts long prints one every half minute.
    """

    def __init__(self, steps: int, *, done: int = 0, stream: TextIO | None = None):
        self.console = Console(file=stream or sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self.live = Live(Text(), console=self.console, refresh_per_second=5, transient=True)
        self.steps = steps
        self.shown, self.figures, self.line = time.monotonic(), "", ""
        self._said: set[str] = set()
        self.begin(done)

    def begin(self, done: int) -> None:
        """Start counting after `done` steps. The first step compiles, so the pace is measured from its end."""
        self.done = max(done, 0)
        self.marks: list[float] = []

    def phase(self, name: str, done: int = 0, of: int = 0) -> None:
        """Show the current phase, with a count if there is one."""
        count = f" {done}/{of}" if of else ""
        line = f"step {min(self.done + 1, self.steps)}/{self.steps} · {name}{count}{self.figures}{self.eta()}"
        if self.console.is_terminal:
            if not self.live.is_started:
                self.live.start()
            self.live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=done == 0)
        elif time.monotonic() - self.shown >= LOG_EVERY:
            self.say(line)

    def step(self, step: int, **figures: str) -> None:
        """Print the line of a completed step; its figures stay on the live line until the next one."""
        self.done = step
        self.marks += [time.monotonic()] if step else []
        self.figures = "".join(f" · {name.replace('_', ' ')} {value}" for name, value in figures.items())
        self.say(f"step {step}/{self.steps}{self.figures}{self.eta()}")

    def say(self, text: str) -> None:
        """Print text that stays."""
        self.shown = time.monotonic()
        self.console.print(text)
        self.console.file.flush()

    def once(self, kind: str, text: str) -> None:
        """Print a text the first time its kind occurs."""
        if kind not in self._said:
            self._said.add(kind)
            self.say(text)

    def eta(self) -> str:
        """Return the time left at the pace of the last ten steps; "" while that is unknown."""
        recent = self.marks[-11:]
        if len(recent) < 2 or self.done >= self.steps:
            return ""
        left = (recent[-1] - recent[0]) / (len(recent) - 1) * (self.steps - self.done)
        return f" · {clock(left)} left"

    def close(self) -> None:
        """Remove the live line."""
        self.live.stop()


def clock(seconds: float) -> str:
    """Return seconds as text: 90 as "1:30", 4000 as "1:06:40"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
