"""The words of synthetic tasks: as the explorer wrote them, with values inside the descriptions, as
people ask for such things, or put into other words by a language model.

The model may be a server's or the policy itself (`llm.url`). Its wording is used only if it passes
the gate: it names every value that the verifier demands, no value that the agent has to find out,
and nothing that the request did not name. Otherwise the task keeps its words.
`questioning.attempts` adds a round trip: attempts from the query alone.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from envs.wording import asked, inlined
from envs.world import Task
from evolver.llm.answers import array, record, string, unfit_reason
from evolver.llm.prompts import prompt
from evolver.llm.questions import ChatError, Question, Reply
from evolver.metrics import Mechanism, Meter
from evolver.parts import Parts
from evolver.questioning.calls import has_digit
from evolver.questioning.tasks import answer_of
from evolver.transcripts import quoted, scripts, words
from rl.bounds import Count, Fraction

_LONGEST = 600  # characters of a query


class Words(Mechanism, Protocol):
    """Words synthetic tasks: the plug `questioning.words`.

    A class that subclasses this protocol inherits the defaults below and only has to define
    `reword`.
    """

    def reword(self, tasks: Sequence[Task], tools: str) -> list[Task]:
        """Return the tasks in their order, with the queries that they are to have. tools: a list of
        the world's tools.

        Raises RunEnds (evolver/processes/interrupt.py) if the run cannot continue.
        """
        ...


class Plain(Words):
    """Keeps the explorer's words."""

    def reword(self, tasks: Sequence[Task], tools: str) -> list[Task]:
        return list(tasks)


class Inlined(Words):
    """Puts values where the description of a tool speaks of their parameters: "Please lend Emma to
    Hana." for "Lend a book to a member: book Emma, member Hana.".

    Some tasks keep the explorer's words: a policy that hears one way of asking alone takes every
    other one for something else. No language model is asked.
    """

    def __init__(self, parts: Parts, *, share: Fraction = 0.75):
        """share: of the tasks that get other words where their descriptions allow it."""
        self.share = share
        self.meter = Meter("questioning/words")

    def reword(self, tasks: Sequence[Task], tools: str) -> list[Task]:
        return [replace(task, query=self._query(task)) for task in tasks]

    def _worded(self, task: Task, rng: random.Random) -> str:
        query = inlined(task.query, task.meta["named"])
        return f"Please {query[:1].lower()}{query[1:]}" if rng.random() < 0.5 else query

    def _query(self, task: Task) -> str:
        rng = random.Random(task.id)
        if not task.meta.get("named") or rng.random() >= self.share:
            return task.query
        query = self._worded(task, rng)
        problem = unfaithful(task, query)
        self.meter.count(problem or "reworded")
        return task.query if problem else query


class Asked(Inlined):
    """Words tasks as people ask for such things, in many forms: "Let it be 22 degrees in kitchen."
    for "Set a temperature: room kitchen, degrees 22.".

    A third of these tasks is inlined. No language model is asked.
    """

    def _worded(self, task: Task, rng: random.Random) -> str:
        if rng.random() < 1 / 3:
            return super()._worded(task, rng)
        return asked(task.query, task.meta["named"], rng)


class ByModel(Words):
    """Asks the role `writer` for several wordings of each task and takes the first that passes the
    gate."""

    roles: tuple[str, ...] = ("writer",)
    prompts = ("reword",)

    def __init__(self, parts: Parts, *, wordings: Count = 3):
        """wordings: how many to ask for per task."""
        self.chat = parts.chat
        self.max_chars = parts.max_chars
        self.wordings = wordings
        self.meter = Meter("questioning/words")

    def reword(self, tasks: Sequence[Task], tools: str) -> list[Task]:
        asked = [task for task in tasks if "named" in task.meta]
        answers = self.chat.ask([self._question(task, tools) for task in asked])
        queries = {task.id: self._chosen(task, answer) for task, answer in zip(asked, answers)}
        return [replace(task, query=queries.get(task.id, task.query)) for task in tasks]

    def _question(self, task: Task, tools: str) -> Question:
        named = "\n".join(f"- {value}" for value in task.meta["named"])
        return prompt("reword").question(
            "writer",
            record(queries=array(string(_LONGEST), self.wordings)),
            None,
            task.id,
            tools=quoted(tools[: self.max_chars]),
            query=task.query,
            named=named or "(none)",
            count=str(self.wordings),
        )

    def _chosen(self, task: Task, answer: Reply | ChatError) -> str:
        """Return the first wording that passes the gate, the task's own words if none does."""
        if isinstance(answer, ChatError):
            self.meter.count("unanswered")
            return task.query
        for wording in answer.parsed["queries"][: self.wordings]:
            query = " ".join(wording.split())
            problem = unfaithful(task, query) or unfit_reason(query, task.query)
            self.meter.count(problem or "reworded")
            if not problem:
                return query
        self.meter.count("kept")
        return task.query


def unfaithful(task: Task, query: str) -> str:
    """Return why a query does not ask for what the task's own query asks for, "" if nothing speaks
    against it."""
    if not query:
        return "empty"
    if len(query) > _LONGEST:
        return "too long"
    said = words(query)
    if any(words(str(value)) not in said for value in task.meta["named"]):
        return "a value is missing"
    if any(words(str(value)) in said for value in task.meta["hidden"]):
        return "a hidden value"
    answer = answer_of(task)
    if answer is not None and words(answer) in said:
        return "the answer"
    added = set(said.split()).difference(words(task.query).split())
    if any(map(has_digit, added)):
        return "another value"
    return "another script" if set(scripts(query)) - set(scripts(task.query)) else ""
