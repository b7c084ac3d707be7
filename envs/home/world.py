"""The smart home as a World."""

from __future__ import annotations

from typing import Any

from envs.home.devices import HOMES, Home, tools_of
from envs.home.tasks import split_tasks
from envs.home.verify import verify
from envs.toolcalls import parse, run_calls
from envs.world import Evaluation, Observation, StepResult, Task, World

SYSTEM = "You run a smart home."
MAX_CALLS = 8  # in one turn


class SmartHome(World):
    """A home with rooms, people and devices, simulated in memory.

    The agent writes one or several tool calls per turn (envs/toolcalls.py); a turn without a call
    ends the episode, and its text is the answer. A call that cannot be parsed or is refused is
    answered with a line "error: ...". The seed of `reset` has no effect: the task's own seed
    selects the home.
    """

    name = "home"

    def __init__(
        self,
        n_train: int = 64,
        n_dev: int = 40,
        n_test: int = 80,
        seed: int = 0,
        rules: int | None = None,
        rarity: float = 0.1,
    ):
        """`seed` draws the tasks. rules, rarity: the house, as `envs.house_rules.Family.house`
        takes them; None = no house rules."""
        self._sizes, self._seed = {"train": n_train, "dev": n_dev, "test": n_test}, seed
        self.house = None if rules is None else HOMES.house(rules, rarity)
        self._home: Home | None = None
        self._verifier: dict[str, Any] = {}
        self._answer: str | None = None
        self._over = False

    def tasks(self, split: str) -> list[Task]:
        if split not in self._sizes:
            raise ValueError(f"home has no split {split!r}; it has {', '.join(self._sizes)}")
        tasks = split_tasks(split, self._sizes[split], self._seed, self.house)
        return [Task.from_dict(task.to_dict()) for task in tasks]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        if set(task.verifier) != {"changes", "answer"}:
            raise ValueError(
                f"task {task.id}: a verifier of home has the keys changes and answer, not "
                f"{sorted(task.verifier)}"
            )
        self._home = Home(task.seed, self.house)
        self._verifier, self._answer, self._over = task.verifier, None, False
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.query}]
        return Observation(messages, tools_of(self.house))

    def step(self, action: str) -> StepResult:
        """Run the turn's calls. `info["calls"]` lists them in order, each with "result" and "ok"
        (False = error)."""
        home = self._open()
        if self._over:
            raise RuntimeError("the episode is over: reset the world first")
        turn = parse(action)
        messages, info = run_calls(turn, home.call, MAX_CALLS)
        if not messages:
            self._answer, self._over = turn.content, True
        reward = self.evaluate().score if self._over else 0.0
        return StepResult(messages, reward=reward, terminated=self._over, info=info)

    def evaluate(self) -> Evaluation:
        return verify(self._verifier, self._open().changes(), self._answer)

    def snapshot(self) -> dict[str, Any]:
        home = self._open()
        state = {"seed": home.seed, "state": dict(home.state), "cleared": sorted(home.cleared)}
        return state | {"verifier": self._verifier, "answer": self._answer, "over": self._over}

    def restore(self, snapshot: dict[str, Any]) -> None:
        self._home = Home(snapshot["seed"], self.house)
        self._home.state, self._home.cleared = dict(snapshot["state"]), set(snapshot["cleared"])
        self._verifier, self._answer, self._over = (
            snapshot["verifier"],
            snapshot["answer"],
            snapshot["over"],
        )

    def _open(self) -> Home:
        if self._home is None:
            raise RuntimeError("no episode: reset the world first")
        return self._home
