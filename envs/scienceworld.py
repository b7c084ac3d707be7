"""ScienceWorld: thirty kinds of experiments in a text world, 7,207 variations (Wang et al. 2022,
arXiv:2203.07540).

Needs `pip install -r requirements/scienceworld.txt` and Java 8 or newer. Each instance with an
episode runs a Java
process of about 500 MB: use workers with per_worker=1. Listing tasks needs neither the package nor
Java.
"""

import atexit
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from envs import packages
from envs.act import ActionWorld, tool
from envs.values import Json
from envs.world import Evaluation, Observation, Task, check_split, opening

# Number of variations of each kind of task in version 1.2 of the package.
VARIATIONS = {
    "boil": 30,
    "change-the-state-of-matter-of": 30,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "find-animal": 300,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "freeze": 30,
    "grow-fruit": 126,
    "grow-plant": 126,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "lifespan-longest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "lifespan-shortest-lived": 125,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "melt": 30,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "use-thermometer": 540,
}
# The simulator's default heap grows to 3 GB; this one suffices and makes steps faster.
JAVA = "-Xmx400m -XX:+UseSerialGC"
# How the answers to an action begin that did nothing. The first asks for a number, which the next
# action has to be: any other action is taken for a wrong number and not executed.
NOT_TAKEN = ("Ambiguous request", "No known action matches", "Unknown action")

SYSTEM = """\
You carry out science tasks in a text world, one action per turn. Write the action on a line of \
its own, or call act.

Actions: look around; look at X; look in X; inventory; focus on X; wait; task; open X; close X; \
activate X;
deactivate X; connect X to Y; disconnect X; use X; use X on Y; pick up X; put down X; move X to \
Y; pour X into Y;
dunk X into Y; mix X; eat X; read X; flush X; go to X; teleport to X (if allowed). To answer or \
to choose something,
focus on it; focusing on the wrong thing fails the task. Where an action is ambiguous you are \
asked to pick a number."""


def split_variations(kind: str, split: str) -> range:
    """Return the variations of a split as the package divides them: first half train, a quarter
    dev, the rest test."""
    n = VARIATIONS[kind]
    quarter = n // 4
    ranges = {
        "train": range(2 * quarter),
        "dev": range(2 * quarter, 3 * quarter),
        "test": range(3 * quarter, n),
    }
    check_split("ScienceWorld", split, ranges)
    return ranges[split]


@dataclass
class Simulator:
    """A Java process. env: the package's interface to it. loaded: kind, variation, simplifications,
    with solution."""

    env: Any
    loaded: tuple[str, int, str, bool] | None = None


class ScienceWorld(ActionWorld):
    """One ScienceWorld variation at a time. The seed of `reset` has no effect: a variation is
    always the same.

    kinds: the kinds of VARIATIONS to list; None = all. per_kind: maximum number of variations of
    each, evenly spread; 0 = all. simplify: the package's simplifications, joined by commas; "easy"
    is all of them. max_steps: actions in an episode. The score is the simulator's, in [0, 1]; an
    action that makes it negative ends the episode with score 0.

    A synthetic task starts in the variation of its meta and shows its query as the task. The
    simulator cannot check it: without a verifier of probes (envs/probed.py) the score is 0, and a
    judge decides.

    A simulator takes seconds to start and is reset in milliseconds, so that the next instance in
    the process goes on with that of a closed one.
    """

    name = "scienceworld"
    longest = 10_000
    # At most one; a list is taken from and added to by one thread at a time.
    _idle: ClassVar[list[Simulator]] = []

    def __init__(
        self,
        kinds: list[str] | None = None,
        per_kind: int = 0,
        simplify: str = "easy",
        max_steps: int = 100,
    ):
        self._kinds = list(VARIATIONS) if kinds is None else list(kinds)
        if unknown := sorted(set(self._kinds) - set(VARIATIONS)):
            raise ValueError(
                f"ScienceWorld has no {', '.join(unknown)}; it has {', '.join(VARIATIONS)}"
            )
        super().__init__(max_steps)
        self._per_kind, self._simplify = per_kind, simplify
        self._simulator: Simulator | None = None

    @property
    def _env(self) -> Any:
        assert self._simulator
        return self._simulator.env

    def tasks(self, split: str) -> list[Task]:
        """Return the tasks. Their query names kind and variation only; `reset` shows the actual
        description."""
        tasks = []
        for kind in self._kinds:
            variations = split_variations(kind, split)
            count = min(self._per_kind or len(variations), len(variations))
            for i in range(count):
                variation = variations[i * len(variations) // count]
                query = f"{kind.replace('-', ' ')}, variation {variation}"
                meta = {"kind": kind, "variation": variation}
                tasks.append(
                    Task(
                        f"scienceworld/{kind}/{variation}", self.name, query, split=split, meta=meta
                    )
                )
        return tasks

    def reset(self, task: Task, seed: int = 0) -> Observation:
        self._load(task, gold=False)
        self._begin(task)
        self._score = 0.0
        goal = task.query if self._invented else self._env.get_task_description()
        text = f"{goal}\n\n{self._env.server.step('look around')}"
        actions = self._env.get_possible_actions()
        return Observation(opening(SYSTEM, text), [tool("Take an action.", actions)])

    def _act(self, text: str) -> tuple[str, str, float, bool]:
        # The simulator would show the task of the variation.
        if self._invented and text.lower() == "task":
            return text, self._require_episode().query, 0.0, False
        answer = self._env.server.step(text)
        before, self._score = self._score, float(self._env.server.getScore())
        if self._invented:  # reaching or failing the goal of the variation means nothing here
            return text, str(answer).strip(), 0.0, False
        terminated = bool(self._env.server.getCompleted()) or self._score < 0
        return text, str(answer).strip(), max(self._score, 0.0) - max(before, 0.0), terminated

    def _is_error(self, observation: str) -> bool:
        return observation.startswith(NOT_TAKEN)

    def evaluate(self) -> Evaluation:
        """Score the episode; `success` means the full score."""
        self._require_episode()
        score = 0.0 if self._invented else min(max(self._score, 0.0), 1.0)
        success = score > 0.999
        score = 1.0 if success else score
        return Evaluation(score, success, {"progress": score})

    def walkthrough(self, task: Json) -> list[str]:
        """Return the simulator's solution of a task (`Task.to_dict()`). Ends the running
        episode."""
        self._load(Task.from_dict(task), gold=True)
        self._task = None
        return list(self._env.get_gold_action_sequence())

    def close(self) -> None:
        kept, self._simulator, self._task = self._simulator, None, None
        if kept is not None:
            self._idle.append(kept)
            for simulator in _taken(self._idle, keep=1):
                simulator.env.close()

    def _load(self, task: Task, gold: bool) -> None:
        kind, variation = task.meta.get("kind"), task.meta.get("variation")
        if (
            kind not in VARIATIONS
            or not isinstance(variation, int)
            or not 0 <= variation < VARIATIONS[kind]
        ):
            raise ValueError(
                f"ScienceWorld has no task {task.id!r}: its meta has no valid kind and variation"
            )
        if self._simulator is None:
            self._simulator = next(_taken(self._idle), None) or _started()
        simulator, wanted = self._simulator, (kind, variation, self._simplify, gold)
        # Loading takes ten times as long as the reset, and changes nothing for the same variation.
        if simulator.loaded != wanted:
            simulator.loaded = None
            simulator.env.load(*wanted)
            simulator.loaded = wanted
        simulator.env.server.reset()


def _started() -> Simulator:
    os.environ.setdefault("JAVA_TOOL_OPTIONS", JAVA)
    return Simulator(packages.load("scienceworld", "scienceworld").ScienceWorldEnv(""))


def _taken(idle: list[Simulator], keep: int = 0) -> Iterator[Simulator]:
    """Yield simulators that are taken from the list, as long as it has more than `keep`."""
    while len(idle) > keep:
        try:
            yield idle.pop()
        except IndexError:  # another thread was faster
            return


@atexit.register
def _close_idle() -> None:
    for simulator in _taken(ScienceWorld._idle):
        simulator.env.close()
