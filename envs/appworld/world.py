"""AppWorld as a World: a day-to-day task of a person with accounts in nine apps, solved by writing Python.

The engine is the `appworld` package's, with its own evaluation; see `make appworld` and envs/appworld/engine.py for why
it runs in a worker process under a Python of its own. Listing tasks needs no package.

Data is either AppWorld's own ("official", which a user downloads) or "mini": 48 tasks of ours over six of the apps,
built at first use. Success is AppWorld's: all tests of the task pass (task goal completion, TGC). A scenario is three
tasks; scenario goal completion (SGC) asks for all three, see `goal_completion`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from envs.appworld import prompt
from envs.world import Evaluation, Observation, StepResult, Task, World

HELP = (
    "AppWorld runs in a virtual environment of its own: `make appworld`, then env.mode=worker and"
    " env.python=.venv-appworld/bin/python"
)


class EngineLike(Protocol):
    """What the world asks of an engine: envs.appworld.engine.Engine, or a stand-in for tests."""

    def open(self, root: str, task_id: str, timeout_s: int) -> dict[str, Any]: ...
    def run(self, code: str) -> str: ...
    def completed(self) -> bool: ...
    def tests(self) -> list[tuple[str, bool]]: ...
    def apis(self, root: str) -> dict[str, dict[str, str]]: ...
    def close(self) -> None: ...


class AppWorld(World):
    """One AppWorld task at a time.

    data: "mini" or "official"; root: where official data lies ("" = $APPWORLD_ROOT), or where to build the mini data
    ("" = a cache in the project folder). action: what the prompt asks for, "code" (```python blocks) or "tool" (a call
    of `appworld`); either is understood at any time. reward: the score is "sparse" (TGC) or "dense" (progress).
    example: show a worked example in the prompt. timeout_s: seconds one piece of code may run; keep it below the
    deadline of a step. max_output: characters of an output; the rest is cut at a visible mark.

    Several instances in one process are correct but take turns: each that continues replays its task. Give every
    worker one instance (per_worker=1).
    """

    name = "appworld"
    _engine: ClassVar[EngineLike | None] = None  # one per process
    _active: ClassVar[AppWorld | None] = None  # whose task is open in it

    def __init__(
        self,
        data: str = "mini",
        root: str = "",
        action: str = "code",
        reward: str = "sparse",
        example: bool = True,
        timeout_s: int = 20,
        max_output: int = 20_000,
        engine: EngineLike | None = None,
    ):
        for value, allowed in ((data, ("mini", "official")), (action, ("code", "tool")), (reward, ("sparse", "dense"))):
            if value not in allowed:
                raise ValueError(f"AppWorld knows {' and '.join(allowed)} here, not {value!r}")
        self._data, self._root, self._action, self._reward = data, root, action, reward
        self._example, self._timeout_s, self._max_output = example, timeout_s, max_output
        self._own_engine = engine
        self._task: Task | None = None
        if engine is None and importlib.util.find_spec("appworld") is not None:
            self._warm_up()

    def tasks(self, split: str) -> list[Task]:
        """The tasks of "train", "dev" or "test_normal"; official data also has "test_challenge"."""
        if self._data == "mini":
            return _mini_tasks(split)
        return _official_tasks(self._official_root(), split)

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start the task with this id; a synthetic one names the task in whose world it plays in `meta["entry"]`, and
        its query replaces the instruction. The seed changes nothing: clock and random numbers are the task's."""
        self._task, self._seed = task, seed
        self._codes: list[str] = []
        self._actions: list[str] = []
        self._over, self._evaluation = False, None
        opened = self._open()
        messages = [
            {"role": "system", "content": prompt.system(opened, self._action, self._example)},
            {"role": "user", "content": task.query or opened["instruction"]},
        ]
        return Observation(messages, [prompt.TOOL] if self._action == "tool" else [])

    def step(self, action: str) -> StepResult:
        """`info["calls"]` has the code that ran; "errors" is 1 where there was none or it failed."""
        self._running()
        if self._over:
            return StepResult([], terminated=True, info={"calls": [], "errors": 0, "over": True})
        self._actions.append(action)
        code, role = prompt.code_of(action)
        if code is None:
            message = {"role": role, "content": prompt.NO_CODE[self._action]}
            return StepResult([message], info={"calls": [], "errors": 1, "parse_error": True})
        engine = self._mine()
        output = self._cut(_run(engine, code))
        self._codes.append(code)
        self._evaluation = None
        self._over = engine.completed()
        return StepResult(
            messages=[{"role": role, "content": f"Output:\n```\n{output}\n```\n\n"}],
            reward=self.evaluate().score if self._over else 0.0,
            terminated=self._over,
            info={
                "calls": [{"name": "appworld", "arguments": {"code": code}}],
                "errors": int(output.startswith("Execution failed.")),
                "parse_error": False,
            },
        )

    def evaluate(self) -> Evaluation:
        """`success` is AppWorld's. `progress` is the share of passed tests among those that doing nothing fails, times
        the share among the others (what must not be damaged); `tests` is the share of all tests."""
        self._running()
        if self._evaluation is None:
            self._evaluation = _score(self._mine().tests(), self._reward)
        return self._evaluation

    def snapshot(self) -> dict[str, Any]:
        self._running()
        return {"task": self._task.to_dict(), "seed": self._seed, "actions": list(self._actions)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Replays the actions: an engine's own saved state would not hold the variables of the session."""
        self.reset(Task.from_dict(snapshot["task"]), snapshot["seed"])
        for action in snapshot["actions"]:
            self.step(action)

    def profile(self) -> dict[str, Any]:
        """The apps as entities, their APIs as operations."""
        apis = self._process_engine().apis(str(self._data_root()))
        return {
            "name": self.name,
            "entities": [
                {
                    "name": app,
                    "attributes": [],
                    "operations": [{"name": name, "description": text} for name, text in found.items()],
                }
                for app, found in apis.items()
                if app not in ("api_docs", "supervisor")
            ],
            "task_preference": {"num_entities": 2, "num_operations": 3, "relation_difficulty": 3},
        }

    def close(self) -> None:
        if AppWorld._active is self:
            AppWorld._active = None
            self._process_engine().close()
        self._task = None

    # The engine of the process, and whose turn it is.

    def _running(self) -> None:
        if self._task is None:
            raise RuntimeError("no episode: reset the world first")

    def _process_engine(self) -> EngineLike:
        if self._own_engine is not None:
            return self._own_engine
        if AppWorld._engine is None:
            if importlib.util.find_spec("appworld") is None:
                raise ModuleNotFoundError(HELP, name="appworld")
            from envs.appworld.engine import Engine

            AppWorld._engine = Engine()
        return AppWorld._engine

    def _open(self) -> dict[str, Any]:
        engine = self._process_engine()
        AppWorld._active = None
        opened = engine.open(str(self._data_root()), self._task.meta.get("entry", self._task.id), self._timeout_s)
        AppWorld._active = self
        return opened

    def _mine(self) -> EngineLike:
        """The engine with this instance's task in it."""
        if AppWorld._active is not self:
            self._open()
            for code in self._codes:
                _run(self._process_engine(), code)
        return self._process_engine()

    def _warm_up(self) -> None:
        """The first task of a process takes seconds: have it behind us when the first episode asks."""
        if AppWorld._engine is None:
            tasks = self.tasks("train")
            self._process_engine().open(str(self._data_root()), tasks[0].id, self._timeout_s)
            self._process_engine().close()

    def _data_root(self) -> Path:
        if self._data == "official":
            return self._official_root()
        from envs.appworld.mini import build

        root = Path(self._root) if self._root else build.default_root()
        if self._own_engine is None:
            build.ensure(root)
        return root

    def _official_root(self) -> Path:
        root = Path(self._root or os.environ.get("APPWORLD_ROOT", "."))
        if not (root / "data" / "tasks").is_dir():
            raise ValueError(
                "AppWorld's official data is not where `root` or APPWORLD_ROOT points;"
                " `.venv-appworld/bin/appworld download data --root ROOT` puts it there"
            )
        return root

    def _cut(self, output: str) -> str:
        output = output.strip("\n")
        if len(output) <= self._max_output:
            return output
        return f"{output[: self._max_output]}\n[{len(output) - self._max_output} more characters were cut off]"


def goal_completion(success: Mapping[str, float]) -> dict[str, float]:
    """Task and scenario goal completion of {task id: success in [0, 1]}: {"tgc", "sgc"}.

    A scenario's completion is its worst task's, as in AppWorld's own evaluator; with rates over several rollouts this
    is the completion rate of the task that is solved least often.
    """
    if not success:
        raise ValueError("no tasks to average over")
    scenarios: defaultdict[str, list[float]] = defaultdict(list)
    for task, value in success.items():
        scenarios[scenario_of(task)].append(float(value))
    return {
        "tgc": sum(map(float, success.values())) / len(success),
        "sgc": sum(map(min, scenarios.values())) / len(scenarios),
    }


def scenario_of(task_id: str) -> str:
    """The scenario of a task "<scenario>_<variant>"."""
    return task_id.rsplit("_", 1)[0]


def _run(engine: EngineLike, code: str) -> str:
    try:
        code.encode()
    except UnicodeEncodeError:
        return "Execution failed. Traceback:\nThe code is not valid text."
    if "\0" in code:
        return "Execution failed. Traceback:\nThe code has a null character."
    return engine.run(code)


def _score(tests: list[tuple[str, bool]], reward: str) -> Evaluation:
    needed = [passed for label, passed in tests if label != "no_op_pass"]
    kept = [passed for label, passed in tests if label == "no_op_pass"]
    success = bool(tests) and all(needed) and all(kept)
    progress = _share(needed, 0.0) * _share(kept, 1.0)
    score = progress if reward == "dense" else float(success)
    passed = _share([passed for _, passed in tests], 0.0)
    return Evaluation(score, success, {"progress": 1.0 if success else min(progress, 0.99), "tests": passed})


def _share(passed: list[bool], default: float) -> float:
    return sum(passed) / len(passed) if passed else default


def _mini_tasks(split: str) -> list[Task]:
    from envs.appworld.mini import scenarios

    if split not in scenarios.SPLITS:
        raise ValueError(f"AppWorld's mini data has no split {split!r}; it has {', '.join(scenarios.SPLITS)}")
    return [
        Task(
            id=task.id,
            env=AppWorld.name,
            query=task.draft.instruction,
            split=split,
            reference=task.turns,
            difficulty=len(task.turns),
            meta={"data": "mini", "scenario": scenario_of(task.id), "apps": task.apps},
        )
        for task in scenarios.mini_tasks()
        if task.split == split
    ]


def _official_tasks(root: Path, split: str) -> list[Task]:
    found = sorted(path.stem for path in (root / "data" / "datasets").glob("*.txt"))
    if split not in found:
        raise ValueError(f"AppWorld's data has no split {split!r}; it has {', '.join(found)}")
    tasks = []
    for id in (root / "data" / "datasets" / f"{split}.txt").read_text(encoding="utf-8").split():
        folder = root / "data" / "tasks" / id
        specs = json.loads((folder / "specs.json").read_text(encoding="utf-8"))
        meta = {"data": "official", "scenario": scenario_of(id)}
        tasks.append(Task(id=id, env=AppWorld.name, query=specs["instruction"], split=split, meta=meta))
    return tasks
