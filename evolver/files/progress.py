"""Progress of a run: a live display on a terminal, plain lines in a log file."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evolver.processes.interrupt import silence

LOG_EVERY = 30.0  # seconds between lines in a log file while one step lasts
BAR = 28  # characters


class _Console(Console):
    """A console that raises an ordinary error if nobody reads it, as in `python run.py | head`,
    unless `leaving` says that the run ends anyway."""

    leaving: Callable[[], bool]

    def on_broken_pipe(self) -> None:
        silence(self.file.fileno())  # for what is still to be said
        if not self.leaving():
            raise BrokenPipeError(errno.EPIPE, "nobody reads the output of the run any more")


class _Stream:
    """A stream that drops its text once its terminal is gone. The hang-up is what ends a run: a
    write may fail before the handler of the signal has run, and under `nohup` the run goes on."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        self._unless_gone(self._stream.write, text)

    def flush(self) -> None:
        self._unless_gone(self._stream.flush)

    def _unless_gone(self, call: Callable, *args: Any) -> None:
        try:
            call(*args)
        except OSError as error:
            if error.errno != errno.EIO or not stat.S_ISCHR(
                os.fstat(self._stream.fileno()).st_mode
            ):
                raise  # a failing disk, for one
            silence(self._stream.fileno())


class Progress:
    """Shows what the run is doing, how far it is, how well and fast it does, what failed, and how
    long it still takes.

    On a terminal a few lines are updated in place below the lines that stay: the steps with the
    time left, the present phase, the figures of the last step, and the faults so far. Elsewhere
    each step prints a line, and a step that lasts long prints one every half minute.

    leaving: returns True once the run was asked to end; from then on nobody needs to read the
    output.
    """

    def __init__(
        self,
        steps: int,
        *,
        done: int | None = None,
        stream: TextIO | None = None,
        leaving: Callable[[], bool] = lambda: False,
    ):
        """`done` steps are complete; None while there are none to count, as in an evaluation."""
        self.console = _Console(
            file=_Stream(stream or sys.stdout), highlight=False, markup=False, soft_wrap=True
        )
        self.console.leaving = leaving
        self.live = Live(Text(), console=self.console, refresh_per_second=5, transient=True)
        self.steps = steps
        self.shown, self.figures, self.faults = time.monotonic(), "", Counter()
        self._said: set[str] = set()
        self.begin(done)

    def begin(self, done: int | None) -> None:
        """Start counting after `done` steps; -1 = what comes before training, which is step 0, is
        not complete.

        The first step compiles, so the pace is measured from its end.
        """
        self.done = done
        self.marks: list[float] = []

    def phase(self, name: str, done: int = 0, of: int = 0) -> None:
        """Show the current phase, with a count if there is one."""
        if self.console.is_terminal:
            if not self.live.is_started:
                self.live.start()
            self.live.update(self.display(name, done, of), refresh=done == 0)
        elif time.monotonic() - self.shown >= LOG_EVERY:
            count = f" {done}/{of}" if of else ""
            before = f"{self.step_now()} · " if self.done is not None else ""
            self.say(f"{before}{name}{count}{self.figures}{self.eta()}")

    def step_now(self) -> str:
        """Return the step that is going on: "step 3/80"."""
        return f"step {min(self.done + 1, self.steps)}/{self.steps}"

    def display(self, name: str, done: int, of: int) -> Group:
        """Return the lines of the live display."""
        rows = Table.grid(padding=(0, 1))
        if self.done is not None:
            bar = ProgressBar(self.steps, max(self.done, 0), width=BAR)
            rows.add_row(self.step_now(), bar, self.eta().removeprefix(" · "))
        count, pulse = (f"{name} {done}/{of}", False) if of else (name, True)
        rows.add_row(count, ProgressBar(of or 100, done, width=BAR, pulse=pulse), "")
        lines = [Text(text, style, no_wrap=True, overflow="ellipsis") for text, style in (
            (self.figures.removeprefix(" · "), ""), (told(self.faults), "yellow")) if text]  # fmt: skip
        return Group(rows, *lines)

    def step(self, step: int, faults: Mapping[str, float] | None = None, **figures: str) -> None:
        """Print the line of a completed step; its figures stay on the live display until the next
        one.

        faults: how often something went wrong in this step, by its name; the live display shows the
        sums so far.
        """
        self.done = step
        self.marks += [time.monotonic()] if step else []
        self.figures = "".join(
            f" · {name.replace('_', ' ')} {value}" for name, value in figures.items()
        )
        counted = Counter({name: round(count) for name, count in (faults or {}).items() if count})
        self.faults.update(counted)
        wrong = f" · {told(counted)}" if counted else ""
        self.say(f"step {step}/{self.steps}{self.figures}{wrong}{self.eta()}")

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
        """Remove the live display."""
        self.live.stop()


def told(faults: Mapping[str, int]) -> str:
    """Return counts of faults as text: "faults: world 3, model calls 2", "" for none."""
    counts = ", ".join(f"{name} {count:,}" for name, count in sorted(faults.items()) if count)
    return f"faults: {counts}" if counts else ""


def clock(seconds: float) -> str:
    """Return seconds as text: 90 as "1:30", 4000 as "1:06:40"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
