"""The travel agency as a World."""

from __future__ import annotations

from typing import Any

from envs.toolcalls import parse, run_calls
from envs.travel.agency import Agency, tools_of
from envs.travel.profile import PROFILE
from envs.travel.rules import house
from envs.travel.tasks import LEVELS, split_tasks
from envs.travel.verify import verify
from envs.world import Evaluation, Observation, StepResult, Task, World

SYSTEM = "You are a travel agent."


class Travel(World):
    """A small travel agency over SQLite.

    The agent writes one or several tool calls per turn (envs/toolcalls.py); a turn without a call
    ends the episode, and its text is the answer. A call that cannot be parsed or is refused is
    answered with a line "error: ...". With `malformed="end"` a turn that cannot be parsed ends the
    episode instead. The seed of `reset` has no effect: the task's own seed selects the agency's
    data.
    """

    name = "travel"

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

        rules, rarity: the house, as `envs.travel.rules.house` takes them; None = an agency without
        house rules. level: that of all tasks; 0 = all levels.
        """
        if malformed not in ("error", "end"):
            raise ValueError(f'malformed must be "error" or "end", not {malformed!r}')
        if level not in (0, *LEVELS):
            raise ValueError(
                f"level must be one of {', '.join(map(str, LEVELS))}, or 0 for all, not {level!r}"
            )
        self._level = level
        self._sizes = {"train": n_train, "dev": n_dev, "test": n_test}
        self._seed = seed
        self.house = None if rules is None else house(rules, rarity)
        self._malformed = malformed
        self._max_calls = max_calls
        self._agency: Agency | None = None
        self._verifier: dict[str, Any] = {}
        self._answer: str | None = None
        self._over = False

    def tasks(self, split: str) -> list[Task]:
        if split not in self._sizes:
            raise ValueError(f"travel has no split {split!r}; it has {', '.join(self._sizes)}")
        tasks = split_tasks(split, self._sizes[split], self._seed, self.house, self._level)
        return [Task.from_dict(task.to_dict()) for task in tasks]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        if set(task.verifier) != {"state", "answer"}:
            raise ValueError(
                f"task {task.id}: a travel verifier has the keys state and answer, not "
                f"{sorted(task.verifier)}"
            )
        if self._agency is None:
            self._agency = Agency(task.seed, self.house)
        else:
            self._agency.reset(task.seed)
        self._verifier, self._answer, self._over = task.verifier, None, False
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.query}]
        return Observation(messages, tools_of(self.house))

    def step(self, action: str) -> StepResult:
        """Run the turn's calls. `info["calls"]` lists them in order, each with "result" and "ok"
        (False = error)."""
        agency = self._open_agency()
        if self._over:
            raise RuntimeError("the episode is over: reset the world first")
        turn = parse(action)
        messages, info = run_calls(turn, agency.call, self._max_calls)
        if not messages:
            self._answer = turn.content
        self._over = not messages or (bool(turn.errors) and self._malformed == "end")
        reward = self.evaluate().score if self._over else 0.0
        return StepResult(messages, reward=reward, terminated=self._over, info=info)

    def evaluate(self) -> Evaluation:
        return verify(self._verifier, self._open_agency().difference(), self._answer)

    def difference(self) -> list[list[Any]]:
        """Return the changes since the start as rows [table, key, column, before, after]; see
        Agency.difference."""
        return self._open_agency().difference()

    def profile(self) -> dict[str, Any]:
        return PROFILE

    def snapshot(self) -> dict[str, Any]:
        return {
            "agency": self._open_agency().snapshot(),
            "verifier": self._verifier,
            "answer": self._answer,
            "over": self._over,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        if self._agency is None:
            self._agency = Agency(snapshot["agency"]["seed"], self.house)
        self._agency.restore(snapshot["agency"])
        self._verifier, self._answer, self._over = (
            snapshot["verifier"],
            snapshot["answer"],
            snapshot["over"],
        )

    def close(self) -> None:
        if self._agency is not None:
            self._agency.close()
            self._agency = None

    def _open_agency(self) -> Agency:
        if self._agency is None:
            raise RuntimeError("no episode: reset the world first")
        return self._agency
