"""A World of tools: its tasks, episodes and snapshots."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from envs.desk.plans import Plan, Planner, Unfit
from envs.desk.rules import House
from envs.desk.tools import Tools
from envs.desk.verify import Answers, verify
from envs.toolcalls import call_text, parse, run_calls
from envs.world import Evaluation, Observation, StepResult, Task, World

LEVELS = (1, 2, 3, 4, 5, 6)  # numbers of calls in the shortest solution


class DeskWorld(World):
    """A small world of tools. A subclass defines the attributes below.

    The agent writes one or several tool calls per turn (envs/toolcalls.py); a turn without a call
    ends the episode, and its text is the answer. A call that cannot be parsed or is refused is
    answered with a line "error: ...". With `malformed="end"` a turn that cannot be parsed ends the
    episode instead. The seed of `reset` has no effect: the task's own seed selects the data.
    """

    system: ClassVar[str]
    tools: ClassVar[type[Tools]]
    answers: ClassVar[Answers]
    planner: ClassVar[type[Planner]]
    rows: ClassVar[str] = "changes"  # the key of a verifier that holds the changes

    def __init__(
        self,
        n_train: int = 64,
        n_dev: int = 48,
        n_test: int = 96,
        seed: int = 0,
        malformed: str = "error",
        max_calls: int = 8,
        rules: int | None = None,
        rarity: float = 0.1,
        level: int = 0,
    ):
        """`seed` draws the tasks; `max_calls` is the number of calls allowed in one turn, and
        others are refused.

        rules, rarity: the house, as `envs.desk.rules.Family.house` takes them; None = no house
        rules. level: that of all tasks; 0 = all levels.
        """
        if malformed not in ("error", "end"):
            raise ValueError(f'malformed must be "error" or "end", not {malformed!r}')
        if level not in (0, *LEVELS):
            raise ValueError(
                f"level must be one of {', '.join(map(str, LEVELS))}, or 0 for all, not {level!r}"
            )
        self._sizes = {"train": n_train, "dev": n_dev, "test": n_test}
        self._seed, self._level = seed, level
        self._malformed, self._max_calls = malformed, max_calls
        self.house = None if rules is None else self.tools.family.house(rules, rarity)
        self._tools: Tools | None = None
        self._verifier: dict[str, Any] = {}
        self._answer: str | None = None
        self._over = False

    @classmethod
    def templates(cls, level: int, plain: bool = False) -> Sequence[str]:
        """Return the templates of a level, as often as they should be drawn. plain: for plain
        queries."""
        raise NotImplementedError

    @classmethod
    def own_task(cls, split: str, index: int, level: int, seed: int, house: House | None) -> Task:
        """Return the task of a split that has this index and level. `seed` draws it."""
        rng = random.Random(f"{cls.name} {split} task {index} {seed}")
        plan = cls.planner.any_plan(split, rng, rng.choice(cls.templates(level)), house)
        return cls.task_of(plan, split, house)

    @classmethod
    def task_of(cls, plan: Plan, split: str = "train", house: House | None = None) -> Task:
        """Return the task of a plan; executing its calls gives the verifier. Raises Unfit if a call
        is refused."""
        tools = cls.tools(plan.seed, house)
        for call in plan.calls:
            text, ok = tools.call(call.tool, call.arguments)
            if not ok:
                raise Unfit(f"{plan.template} in world {plan.seed}: {call}: {text}")
        verifier = {cls.rows: tools.changes(), "answer": plan.answer}
        tools.close()
        assert verifier[cls.rows] or plan.answer, f"{plan}: doing nothing succeeds"
        calls = [call_text(call.tool, call.arguments) for call in plan.calls]
        return Task(
            id=f"{cls.name}/world/{plan.seed}",
            env=cls.name,
            query=plan.query,
            split=split,
            seed=plan.seed,
            reference=[*calls, plan.answer or "done"],
            verifier=verifier,
            difficulty=plan.level,
            meta={"template": plan.template},
        )

    def tasks(self, split: str) -> list[Task]:
        if split not in self._sizes:
            raise ValueError(f"{self.name} has no split {split!r}; it has {', '.join(self._sizes)}")
        n = self._sizes[split]
        tasks = split_tasks(type(self), split, n, self._seed, self.house, self._level)
        return [Task.from_dict(task.to_dict()) for task in tasks]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        if set(task.verifier) != {self.rows, "answer"}:
            raise ValueError(
                f"task {task.id}: a verifier of {self.name} has the keys {self.rows} and answer, "
                f"not {sorted(task.verifier)}"
            )
        self.close()
        self._tools = self.tools(task.seed, self.house)
        self._verifier, self._answer, self._over = task.verifier, None, False
        messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": task.query},
        ]
        return Observation(messages, self.tools.offered(self.house))

    def step(self, action: str) -> StepResult:
        """Run the turn's calls. `info["calls"]` lists them in order, each with "result" and "ok"
        (False = error)."""
        tools = self._open()
        if self._over:
            raise RuntimeError("the episode is over: reset the world first")
        turn = parse(action)
        messages, info = run_calls(turn, tools.call, self._max_calls)
        if not messages:
            self._answer = turn.content
        self._over = not messages or (bool(turn.errors) and self._malformed == "end")
        reward = self.evaluate().score if self._over else 0.0
        return StepResult(messages, reward=reward, terminated=self._over, info=info)

    def evaluate(self) -> Evaluation:
        reached, verifier = self._open().changes(), self._verifier
        return verify(verifier[self.rows], reached, verifier["answer"], self._answer, self.answers)

    def snapshot(self) -> dict[str, Any]:
        episode = {"verifier": self._verifier, "answer": self._answer, "over": self._over}
        return self._open().snapshot() | episode

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.close()
        self._tools = self.tools.restored(snapshot, self.house)
        self._verifier, self._answer, self._over = (
            snapshot[key] for key in ("verifier", "answer", "over")
        )

    def close(self) -> None:
        if self._tools is not None:
            self._tools.close()
            self._tools = None

    def _open(self) -> Tools:
        if self._tools is None:
            raise RuntimeError("no episode: reset the world first")
        return self._tools


@functools.lru_cache(maxsize=64)
def split_tasks(
    world: type[DeskWorld], split: str, n: int, seed: int, house: House | None, level: int
) -> tuple[Task, ...]:
    """Return n tasks that cycle through the levels, or are of one `level`."""
    tasks = []
    for index in range(n):
        task = world.own_task(split, index, level or LEVELS[index % len(LEVELS)], seed, house)
        tasks.append(replace(task, id=f"{world.name}/{split}/{index:04d}"))
    return tuple(tasks)
