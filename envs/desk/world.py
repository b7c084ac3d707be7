"""A World of tools: its tasks, episodes and snapshots."""

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import ClassVar

from envs.desk.plans import LEVELS, Plan, Planner, Unfit
from envs.desk.rules import House
from envs.desk.tools import Tools
from envs.desk.verify import Answers, verify
from envs.toolcalls import call_text, parse, run_calls
from envs.values import Json
from envs.world import Evaluation, Observation, StepResult, Task, World, check_split, opening


@dataclass(frozen=True)
class Desk:
    """The parts of a world. rows: the key of a verifier that holds the changes."""

    name: str
    system: str  # the system message
    tools: type[Tools]
    planner: type[Planner]
    answers: Answers
    rows: str = "changes"

    def task_of(self, plan: Plan, split: str = "train", house: House | None = None) -> Task:
        """Return the task of a plan; executing its calls gives the verifier. Raises Unfit if a call
        is refused."""
        tools = self.tools(plan.seed, house)
        for call in plan.calls:
            text, ok = tools.call(call.tool, call.arguments)
            if not ok:
                raise Unfit(f"{plan.template} in world {plan.seed}: {call}: {text}")
        changes = tools.changes()
        tools.close()
        assert changes or plan.answer, f"{plan}: doing nothing succeeds"
        calls = [call_text(call.tool, call.arguments) for call in plan.calls]
        return Task(
            id=f"{self.name}/world/{plan.seed}",
            env=self.name,
            query=plan.query,
            split=split,
            seed=plan.seed,
            reference=[*calls, plan.answer or "done"],
            verifier={self.rows: changes, "answer": plan.answer},
            difficulty=plan.level,
            meta={"template": plan.template},
        )


class DeskWorld(World):
    """A small world of tools. A subclass defines `desk`.

    The agent writes one or several tool calls per turn (envs/toolcalls.py); a turn without a call
    ends the episode, and its text is the answer. A call that cannot be parsed or is refused is
    answered with a line "error: ...". With `malformed="end"` a turn that cannot be parsed ends the
    episode instead. The seed of `reset` has no effect: the task's own seed selects the data.
    """

    desk: ClassVar[Desk]

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
        self.name = self.desk.name
        self._sizes = {"train": n_train, "dev": n_dev, "test": n_test}
        self._seed, self._level = seed, level
        self._malformed, self._max_calls = malformed, max_calls
        self.house = None if rules is None else self.desk.tools.family.house(rules, rarity)
        self._tools: Tools | None = None
        self._verifier: Json = {}
        self._answer: str | None = None
        self._over = False

    def tasks(self, split: str) -> list[Task]:
        check_split(self.name, split, self._sizes)
        n = self._sizes[split]
        tasks = split_tasks(self.desk, split, n, self._seed, self.house, self._level)
        return [Task.from_dict(task.to_dict()) for task in tasks]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        desk = self.desk
        if set(task.verifier) != {desk.rows, "answer"}:
            raise ValueError(
                f"task {task.id}: a verifier of {desk.name} has the keys {desk.rows} and answer, "
                f"not {sorted(task.verifier)}"
            )
        self.close()
        self._tools = desk.tools(task.seed, self.house)
        self._verifier, self._answer, self._over = task.verifier, None, False
        return Observation(opening(desk.system, task.query), desk.tools.offered(self.house))

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
        reached, wanted = self._open().changes(), self._verifier
        return verify(
            wanted[self.desk.rows], wanted["answer"], reached, self._answer, self.desk.answers
        )

    def snapshot(self) -> Json:
        episode = {"verifier": self._verifier, "answer": self._answer, "over": self._over}
        return self._open().snapshot() | episode

    def restore(self, snapshot: Json) -> None:
        self.close()
        self._tools = self.desk.tools.restored(snapshot, self.house)
        self._verifier, self._answer = snapshot["verifier"], snapshot["answer"]
        self._over = snapshot["over"]

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
    desk: Desk, split: str, n: int, seed: int, house: House | None, level: int
) -> tuple[Task, ...]:
    """Return n tasks that cycle through the levels, or are of one `level`."""
    tasks = []
    for index in range(n):
        wanted = level or LEVELS[index % len(LEVELS)]
        for plan in desk.planner.own_plans(split, index, wanted, seed, house):
            with contextlib.suppress(Unfit):
                task = desk.task_of(plan, split, house)
                tasks.append(replace(task, id=f"{desk.name}/{split}/{index:04d}"))
                break
        else:
            raise RuntimeError(f"{desk.name}: no plan fits task {index} of {split}")
    return tuple(tasks)
