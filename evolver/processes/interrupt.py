"""Ctrl-C without loss: the first one ends the run at the next safe point, the second one at once.

SIGTERM does the same. So does SIGHUP, the end of a terminal or of an ssh session, but only once:
shells and the kernel both send it.
"""

import _thread
import asyncio
import concurrent.futures
import contextlib
import functools
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Self, TypeVar

from rich.file_proxy import FileProxy

from evolver.processes.streams import silence
from rl.trajectory import EndsRun

T = TypeVar("T")


class Interrupted(EndsRun):
    """The user asked the run to end; the work in progress can be abandoned."""


class RunEnds(EndsRun):
    """The run cannot continue; it ends with everything complete saved. The message tells the user
    what to change."""


class Stop:
    """Handles SIGINT, SIGTERM and SIGHUP inside a `with` block, and runs coroutines that may be
    abandoned.

    Only rollouts go through `run`, because abandoning them loses nothing but time; an update is
    never interrupted.

    background: run the event loop continuously on its own thread. Otherwise it runs on the caller's
    thread, during `run` and `finish` only.
    """

    def __init__(self, *, background: bool = False):
        self.asked = self._at_once = False
        self._cancel: Callable[[], Any] | None = None
        self._runner = asyncio.Runner()
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        if background:
            work = self.loop.run_forever
            self._thread = threading.Thread(target=work, name="rollouts", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` sets it
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self._runner.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine. Raises Interrupted if the user asks the run to end
        before that."""
        if self.asked:
            coroutine.close()
            raise Interrupted

        async def cancellable() -> T:
            task = asyncio.current_task()
            assert task
            self._cancel = functools.partial(self.loop.call_soon_threadsafe, task.cancel)
            return await coroutine

        try:
            result = self.finish(cancellable())
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            raise Interrupted from None
        finally:
            self._cancel = None
        self.check()
        return result

    def finish(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that must not be abandoned."""
        if self._thread is None:
            return self._runner.run(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that coroutines run on."""
        return self._runner.get_loop()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """End the block as soon as the user asks the run to end, whatever it waits for, and raise
        Interrupted: what it does can be abandoned."""
        self.check()
        self._at_once = True
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted from None
        finally:
            self._at_once = False

    def check(self) -> None:
        """Raise Interrupted if the user has asked the run to end. Called where stopping is safe."""
        if self.asked:
            raise Interrupted

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.asked:
            if number == signal.SIGHUP:
                return
            raise KeyboardInterrupt
        self.asked = True
        if self._at_once:
            _tell_from_handler("\nstopping")
            raise KeyboardInterrupt
        _tell_from_handler("\nstopping at the next safe point; press Ctrl-C again to stop at once")
        if self._cancel:
            self._cancel()


def tell(text: str) -> None:
    """Print to stderr, if anybody reads it: `2>&1 | tee log` ends by the same Ctrl-C as the run."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr.fileno())
    except RuntimeError:
        pass  # a signal came while something else was printed; the stream allows one at a time


def _tell_from_handler(text: str) -> None:
    """Call `tell` where no lock of the thread that the signal has interrupted is held.

    While a live display is shown, printing takes its lock. A thread that draws it may have that
    lock and wait for the one of the console, which the interrupted thread may have.
    """
    if isinstance(sys.stderr, FileProxy):
        _thread.start_new_thread(tell, (text,))  # takes no lock, as starting a Thread does
    else:
        tell(text)


def _leave_terminal() -> None:
    """Send to /dev/null what this process would write to a terminal: each write to one that is gone
    raises OSError."""
    for number in (1, 2):
        with contextlib.suppress(OSError):  # already closed
            if stat.S_ISCHR(os.fstat(number).st_mode):
                silence(number)
