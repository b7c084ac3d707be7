"""AppWorld as a World: everyday tasks of a person with accounts in nine apps, solved by writing
Python.

The engine and the evaluation are those of the `appworld` package, which runs in a worker process
under a separate Python (`make appworld`; envs/appworld/engine.py gives the reasons). Listing tasks
does not need the package.

The data is either "official", which users download, or "mini": 48 tasks of our own over six of the
apps, built at first use. Success is AppWorld's: all tests of the task pass (task goal completion,
TGC). A scenario consists of three tasks, and scenario goal completion (SGC) requires all three; see
`rl.evaluation`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from envs import toolcalls
from envs.appworld import functions, prompt
from envs.profile import entity, profile_of
from envs.values import Json
from envs.world import (
    Evaluation,
    Observation,
    ReplayWorld,
    StepResult,
    Task,
    Tool,
    check_split,
    message,
    opening,
)

if TYPE_CHECKING:  # the process that runs a model's code imports this module, and no engine
    from envs.appworld.engine import Engine

HELP = (
    "AppWorld needs a virtual environment of its own: run `make appworld`, then set env.mode=worker"
    " and env.python=.venv-appworld/bin/python"
)


class AppWorld(ReplayWorld):
    """One AppWorld task at a time.

    data: "mini" or "official". root: the folder of the official data ("" = $APPWORLD_ROOT), or the
    folder in which to build the mini data ("" = a cache in the project folder). action: the format
    that the prompt requests, "code" (```python blocks) or "tool" (a call of `appworld`); both are
    always accepted. reward: a "sparse" (TGC) or "dense" (progress) score. example: show a worked
    example in the prompt. timeout_s: seconds for one piece of code; keep it
    below the deadline of a step. memory_mb: address space of the process that runs the code.
    max_output: characters of an output; a note replaces the rest.

    Use one instance per worker (per_worker=1): several instances in one process work, but they
    share its only engine, and each replays its task whenever it takes over. Snapshots are replayed
    too, because the engine's own saved state lacks the variables of the session.
    """

    name = "appworld"
    _engine: ClassVar[Engine | None] = None  # one per process
    _active: ClassVar[AppWorld | None] = None  # the instance whose task is open in it

    def __init__(
        self,
        data: str = "mini",
        root: str = "",
        action: str = "code",
        reward: str = "sparse",
        example: bool = True,
        timeout_s: int = 20,
        memory_mb: int = 2048,
        max_output: int = 20_000,
        engine: Engine | None = None,
    ):
        for name, value, one, other in (
            ("data", data, "mini", "official"),
            ("action", action, "code", "tool"),
            ("reward", reward, "sparse", "dense"),
        ):
            if value not in (one, other):
                raise ValueError(f"{name} must be {one} or {other}, not {value!r}")
        self._data, self._root, self._action, self._reward = data, root, action, reward
        self._example, self._max_output = example, max_output
        self._limits = timeout_s, memory_mb
        self._own_engine = engine
        if engine is None and importlib.util.find_spec("appworld") is not None:
            self._warm_up()

    def tasks(self, split: str) -> list[Task]:
        """Return the tasks of "train", "dev" or "test_normal"; official data also has
        "test_challenge"."""
        if self._data == "mini":
            return _mini_tasks(split)
        return _official_tasks(self._official_root(), split)

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start a task. A synthetic task starts from the state of the task `meta["entry"]`, and its
        query replaces the
        instruction. The seed has no effect: clock and random numbers belong to the task."""
        self._begin(task, seed)
        self._codes: list[str] = []
        self._evaluation: Evaluation | None = None
        opened = self._open()
        self._apps = list(opened["apps"])
        self._schemas: dict[str, Tool] | None = None
        system = prompt.system(opened, self._action, self._example)
        messages = opening(system, task.query or opened["instruction"])
        return Observation(messages, [prompt.TOOL] if self._action == "tool" else [])

    def _take(self, action: str) -> StepResult:
        """Run the turn's code. `info["calls"]` holds it; "errors" is 1 if there was no code or it
        failed. "answer" is what the code completed the task with, which it may have computed; ""
        for nothing."""
        code, role = prompt.code_of(action)
        if code is None:
            said = message(role, prompt.NO_CODE[self._action])
            return StepResult([said], info={"calls": [], "errors": 1, "parse_error": True})
        engine = self._activate()
        output = self._cut(_run(engine, code))
        self._codes.append(code)
        self._evaluation = None
        self._over = engine.completed()
        info: Json = {
            "calls": [{"name": "appworld", "arguments": {"code": code}}],
            "errors": int(output.startswith("Execution failed.")),
            "parse_error": False,
        }
        if self._over:
            info["answer"] = engine.answer()
        said = message(role, f"Output:\n```\n{output}\n```\n\n")
        reward = self.evaluate().score if self._over else 0.0
        return StepResult([said], reward, terminated=self._over, info=info)

    def evaluate(self) -> Evaluation:
        """Score the episode; `success` is AppWorld's. `progress` is the share of passed tests among
        those that doing nothing fails, times the share among those that doing nothing passes;
        `tests` is the share among all."""
        self._require_episode()
        if self._evaluation is None:
            self._evaluation = _score(self._activate().tests(), self._reward)
        return self._evaluation

    def functions(self) -> list[Tool]:
        """Return the APIs of the task's apps as functions "app.api", from their public docs."""
        return list(self._functions().values())

    def call_text(self, name: str, arguments: Json) -> str:
        """Return a turn that prints `apis.<name>(...)`, in the format that the prompt requests."""
        code = functions.code(self._functions(), name, arguments)
        if self._action == "tool":
            return toolcalls.call_text("appworld", {"code": code})
        return f"```python\n{code}\n```"

    def profile(self) -> Json:
        """Return a profile with the apps as entities and their APIs as operations."""
        entities = [
            entity(app, [{**doc, "name": name, "parameters": {}} for name, doc in docs.items()])
            for app, docs in self._docs().items()
            if app not in ("api_docs", "supervisor")
        ]
        return profile_of(self.name, entities)

    def close(self) -> None:
        if AppWorld._active is self:
            AppWorld._active = None
            self._process_engine().close()
        self._task = None

    def _functions(self) -> dict[str, Tool]:
        self._require_episode()
        if self._schemas is None:
            self._schemas = functions.schemas(self._docs(), self._apps)
        return self._schemas

    def _docs(self) -> dict[str, dict[str, Json]]:
        return self._process_engine().apis(str(self._data_root()))

    # Access to the engine of the process.

    def _process_engine(self) -> Engine:
        if self._own_engine is not None:
            return self._own_engine
        if AppWorld._engine is None:
            if importlib.util.find_spec("appworld") is None:
                raise ModuleNotFoundError(HELP, name="appworld")
            from envs.appworld.engine import Engine

            AppWorld._engine = Engine()
        return AppWorld._engine

    def _open(self) -> Json:
        task = self._require_episode()
        AppWorld._active = None
        opened = self._opened(task.meta.get("entry", task.id))
        AppWorld._active = self
        return opened

    def _opened(self, task_id: str) -> Json:
        return self._process_engine().open(str(self._data_root()), task_id, *self._limits)

    def _activate(self) -> Engine:
        """Return the engine after making this instance's task the open one."""
        if AppWorld._active is not self:
            self._open()
            for code in self._codes:
                _run(self._process_engine(), code)
        return self._process_engine()

    def _warm_up(self) -> None:
        """Open and close a task, because the first one in a process takes seconds."""
        if AppWorld._engine is None:
            self._opened(self.tasks("train")[0].id)
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
                f"there is no official AppWorld data in {root} (from `root` or APPWORLD_ROOT);"
                " `.venv-appworld/bin/appworld download data --root ROOT` downloads it"
            )
        return root

    def _cut(self, output: str) -> str:
        output = output.strip("\n")
        if len(output) <= self._max_output:
            return output
        more = len(output) - self._max_output
        return f"{output[: self._max_output]}\n[{more} more characters were cut off]"


def scenario_of(task_id: str) -> str:
    """Return the scenario of a task id "<scenario>_<variant>"."""
    return task_id.rsplit("_", 1)[0]


def _run(engine: Engine, code: str) -> str:
    try:
        code.encode()
    except UnicodeEncodeError:
        return "Execution failed. Traceback:\nThe code is not valid text."
    if "\0" in code:
        return "Execution failed. Traceback:\nThe code has a null character."
    return engine.run(code)


def _score(tests: list[tuple[str, bool]], reward: str) -> Evaluation:
    goals = [passed for label, passed in tests if label != "no_op_pass"]
    invariants = [passed for label, passed in tests if label == "no_op_pass"]
    passed = _share(goals + invariants, 0.0)
    success = passed == 1.0
    progress = _share(goals, 0.0) * _share(invariants, 1.0)
    score = progress if reward == "dense" else float(success)
    components = {"progress": 1.0 if success else min(progress, 0.99), "tests": passed}
    return Evaluation(score, success, components)


def _share(passed: list[bool], default: float) -> float:
    return sum(passed) / len(passed) if passed else default


def _mini_tasks(split: str) -> list[Task]:
    from envs.appworld.mini import data

    check_split("AppWorld's mini data", split, data.SPLITS)
    return [
        Task(
            id=task.id,
            env=AppWorld.name,
            query=task.instruction,
            split=split,
            reference=task.turns,
            difficulty=len(task.turns),
            meta={"data": "mini", "scenario": scenario_of(task.id), "apps": task.apps},
        )
        for task in data.tasks()
        if task.split == split
    ]


def _official_tasks(root: Path, split: str) -> list[Task]:
    splits = sorted(path.stem for path in (root / "data" / "datasets").glob("*.txt"))
    check_split("AppWorld's data", split, splits)
    tasks = []
    for id in (root / "data" / "datasets" / f"{split}.txt").read_text(encoding="utf-8").split():
        specs = json.loads((root / "data" / "tasks" / id / "specs.json").read_bytes())
        meta = {"data": "official", "scenario": scenario_of(id)}
        tasks.append(Task(id, AppWorld.name, specs["instruction"], split, meta=meta))
    return tasks
