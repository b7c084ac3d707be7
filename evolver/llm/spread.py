"""Questions of the first process, answered by the language models of all processes.

What only the first process does, such as exploring, would leave the other processes' servers idle.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from evolver.llm.questions import Question, Reply
from evolver.processes import hosts
from evolver.processes.interrupt import Interrupted
from rl.seeds import seed_of

Answer = Callable[[Question], Coroutine[Any, Any, Reply]]
Waiting = dict[int, concurrent.futures.Future[Reply]]


@dataclass
class Spread:
    """Divides questions among the processes, by their content.

    roles: those for which each process has a server of its own: its engine, or the model that it
    serves. answer, loop: what answers a question in this process, and on which event loop.
    """

    roles: Collection[str]
    answer: Answer
    loop: asyncio.AbstractEventLoop

    def __post_init__(self) -> None:
        self._asked = [hosts.Stream(f"asked/{i}") for i in range(hosts.count())]
        self._answers = [hosts.Stream(f"answers/{i}") for i in range(hosts.count())]
        self._waiting: list[Waiting] = [{} for _ in self._asked]  # by the question's number
        self._lent = False

    def elsewhere(self, question: Question) -> concurrent.futures.Future[Reply] | None:
        """Return the answer of another process, None if this one is to answer. Called on the event
        loop."""
        if not self._lent or question.role not in self.roles:
            return None
        place = seed_of(repr((question.messages, question.seed))) % len(self._asked)
        if not place:
            return None
        number = self._asked[place].sent
        future = concurrent.futures.Future[Reply]()
        self._waiting[place][number] = future
        self._asked[place].put(question)
        return future

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Let the other processes, which are in `serve`, answer during the block."""
        others = range(1, len(self._asked))
        readers = [threading.Thread(target=self._read, args=(i,), daemon=True) for i in others]
        for reader in readers:
            reader.start()
        self._lent = True
        try:
            yield
        finally:
            self._lent = False
            for place, reader in zip(others, readers):
                self._asked[place].put(None)
                reader.join()

    def _read(self, place: int) -> None:
        waiting = self._waiting[place]
        while (found := self._answers[place].get()) is not None:
            number, result = found
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
                if isinstance(result, BaseException):
                    waiting.pop(number).set_exception(result)
                else:
                    waiting.pop(number).set_result(result)
        for future in waiting.values():
            future.cancel()
        waiting.clear()

    def serve(self) -> None:
        """Answer what the first process asks this one, until its block ends."""
        me = hosts.index()
        asked = self._asked[me]
        answers = self._answers[me]
        going = set[concurrent.futures.Future[Reply]]()
        while True:
            number = asked.received
            question = asked.get()
            if question is None:
                break
            future = asyncio.run_coroutine_threadsafe(self.answer(question), self.loop)
            going.add(future)
            future.add_done_callback(functools.partial(_reply, answers, number))
        for future in going:
            future.cancel()
        concurrent.futures.wait(going)
        answers.put(None)


def _reply(answers: hosts.Stream, number: int, future: concurrent.futures.Future[Reply]) -> None:
    gone = future.cancelled()  # as the run is to end, or as the first process asks no more
    answers.put((number, Interrupted() if gone else future.exception() or future.result()))
