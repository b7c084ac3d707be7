"""Progress of a run: a live display on a terminal, plain lines in a log file."""

import contextlib
import errno
import os
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evolver.processes.streams import silence

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
        with self._unless_gone():
            self._stream.write(text)

    def flush(self) -> None:
        with self._unless_gone():
            self._stream.flush()

    @contextlib.contextmanager
    def _unless_gone(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            number = self._stream.fileno()
            if error.errno != errno.EIO or not stat.S_ISCHR(os.fstat(number).st_mode):
                raise  # a failing disk, for one
            silence(number)


class Progress:
    """Shows what the run is doing, how far it is, how well and fast it does, what failed, and how
    long it still takes.

    On a terminal a few lines are updated in place below the lines that stay: the steps with the
    time left, the present phase, the figures of the last step, and the faults so far. Elsewhere
    each step prints a line, and a step that lasts long prints one every half minute, also while a
    program compiles.

    leaving: returns True once the run was asked to end; from then on nobody needs to read the
    output.
    """

    def __init__(
        self,
        steps: int,
        *,
        stream: TextIO | None = None,
        leaving: Callable[[], bool] = lambda: False,
    ):
        file = cast(TextIO, _Stream(stream or sys.stdout))
        self.console = _Console(file=file, highlight=False, markup=False, soft_wrap=True)
        self.console.leaving = leaving
        self.live = Live(console=self.console, refresh_per_second=5, transient=True)
        self.steps = steps
        self.figures = ""
        self.faults: Counter[str] = Counter()  # of all steps
        # Steps so far. -1: what comes before training, which is step 0, is not complete. None while
        # there are no steps to count, as in an evaluation.
        self.done: int | None = None
        # When the steps of this process ended: the first one compiles, so the pace is measured from
        # its end.
        self.ends: list[float] = []
        self._said_at = time.monotonic()
        self._said = set[str]()
        self._count = ""  # of the present phase
        self._closed = threading.Event()
        self._reminder: threading.Thread | None = None

    def present(self) -> str:
        """Return the step and the phase that are going on."""
        return joined(self.step_now(), self._count)

    def phase(self, name: str, done: int = 0, of: int = 0) -> None:
        """Show the current phase, with a count if there is one."""
        count = self._count = f"{name} {done}/{of}" if of else name
        if self.console.is_terminal:
            if not self.live.is_started:
                self.live.start()
            bar = ProgressBar(of or 100, done, width=BAR, pulse=not of)
            self.live.update(self.display(count, bar), refresh=done == 0)
            return
        if time.monotonic() - self._said_at >= LOG_EVERY:
            self._say_phase()
        elif self._reminder is None:
            self._reminder = threading.Thread(target=self._remind, daemon=True)
            self._reminder.start()

    def _remind(self) -> None:
        """Print the present phase whenever nothing was printed for LOG_EVERY seconds."""
        with contextlib.suppress(OSError, ValueError):  # nobody reads it: the next step will tell
            while not self._closed.wait(1.0):
                if time.monotonic() - self._said_at >= LOG_EVERY:
                    self._say_phase()

    def _say_phase(self) -> None:
        self.say(joined(self.step_now(), self._count, self.figures, self.time_left()))

    def step_now(self) -> str:
        """Return the step that is going on: "step 3/80"; "" if there are none to count."""
        return "" if self.done is None else f"step {min(self.done + 1, self.steps)}/{self.steps}"

    def display(self, count: str, bar: ProgressBar) -> Group:
        """Return the lines of the live display, with the present phase and its bar."""
        rows = Table.grid(padding=(0, 1))
        if self.done is not None:
            steps = ProgressBar(self.steps, max(self.done, 0), width=BAR)
            rows.add_row(self.step_now(), steps, self.time_left())
        rows.add_row(count, bar)
        lines = [(self.figures, ""), (fault_counts(self.faults), "yellow")]
        texts = [Text(text, style, no_wrap=True, overflow="ellipsis") for text, style in lines]
        return Group(rows, *filter(None, texts))

    def step(self, step: int, faults: Mapping[str, float], **figures: str) -> None:
        """Print the line of a completed step; its figures stay on the live display until the next
        one.

        faults: how often something went wrong in this step, by its name; the live display shows the
        sums so far.
        """
        self.done = step
        if step:
            self.ends.append(time.monotonic())
        self.figures = joined(*(f"{k.replace('_', ' ')} {v}" for k, v in figures.items()))
        counts = {name: round(count) for name, count in faults.items()}
        self.faults.update(counts)
        head = f"step {step}/{self.steps}"
        self.say(joined(head, self.figures, fault_counts(counts), self.time_left()))

    def say(self, text: str) -> None:
        """Print text that stays."""
        self._said_at = time.monotonic()
        self.console.print(text)
        self.console.file.flush()

    def once(self, kind: str, text: str) -> None:
        """Print a text the first time its kind occurs."""
        if kind not in self._said:
            self._said.add(kind)
            self.say(text)

    def time_left(self) -> str:
        """Return the time left at the pace of the last ten steps; "" while that is unknown."""
        recent = self.ends[-11:]
        if self.done is None or self.done >= self.steps or len(recent) < 2:
            return ""
        pace = (recent[-1] - recent[0]) / (len(recent) - 1)
        return f"{clock(pace * (self.steps - self.done))} left"

    def close(self) -> None:
        """Remove the live display, and print no more reminders."""
        self._closed.set()
        self.live.stop()


def joined(*parts: str) -> str:
    """Return the parts of a line that are not empty, with dots between them."""
    return " · ".join(filter(None, parts))


def fault_counts(faults: Mapping[str, int]) -> str:
    """Return counts of faults as text: "faults: world 3, model calls 2", "" for none."""
    counts = [f"{name} {count:,}" for name, count in sorted(faults.items()) if count]
    return f"faults: {', '.join(counts)}" if counts else ""


def clock(seconds: float) -> str:
    """Return seconds as text: 90 as "1:30", 4000 as "1:06:40"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
