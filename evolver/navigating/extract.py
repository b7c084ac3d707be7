"""Experience from contrast: what the successful attempts at a task did that the failed ones did
not."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from envs.toolcalls import parse
from evolver.config.plugs import attribute
from evolver.llm.answers import unfit_reason
from evolver.navigating import Experience, Extractor, new_experience
from evolver.parts import Parts
from evolver.replaying import attempt, executed_turns
from evolver.transcripts import without_experience
from rl.trajectory import Trajectory, Turn


@dataclass
class Lesson:
    """The result of comparing the attempts of one group. A `render` function words it."""

    query: str
    # tool names of the shortest success, without refused calls and turns labelled BAD
    path: list[str]
    # index in `path` where most failures left it, and the tool they called
    divergence: tuple[int, str] | None = None
    # (tool, error) that only failures ran into, the most frequent first
    errors: list[tuple[str, str]] = field(default_factory=list)


def render(lesson: Lesson) -> str:
    """Return the content of an experience in plain words."""
    parts = [f"Use {', then '.join(lesson.path)}."]
    if lesson.divergence:
        index, instead = lesson.divergence
        after = f"After {lesson.path[index - 1]}" if index else "First"
        parts.append(f"{after} use {lesson.path[index]}, not {instead}.")
    parts += [f'{tool} fails with "{error}".' for tool, error in lesson.errors[:2]]
    return " ".join(parts)


def when(query: str) -> str:
    """Return when to use an experience. The query itself describes the tasks that it is for."""
    return query


class Contrast(Extractor):
    """Makes at most one experience per task, from every task with a success.

    The search key is the task's query. The lesson comes from executed calls and their errors only:
    opening messages, which contain injected experience, are not read, and errors that repeat it are
    left out. The success is replayed, and dropped if it fails the second time.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        render: str = "evolver.navigating.extract:render",
        when: str = "evolver.navigating.extract:when",
    ):
        """render, when: "module:attribute" of the functions that turn a Lesson into the content and
        a query into `when`."""
        self._make_world = parts.make_world
        self.splits = parts.splits
        self._render = _function("render", render)
        self._when = _function("when", when)

    def extract(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Experience]:
        """Return the new experiences. Raises ValueError for a task of another split."""
        experiences = []
        for id, group in learnable_groups(trajectories, self.splits).items():
            failed = [t for t in group if not t.success]
            solved = [t for t in group if t.success]
            solved.sort(key=lambda t: (len(_useful(t)), t.rollout))
            if solved and _useful(solved[0]) and self._succeeds_again(solved[0]):
                query = solved[0].task.query
                content = self._render(_compare(solved, failed))
                if content:
                    when = self._when(query)
                    experiences.append(
                        new_experience(when, content, key=query, sources=[id], step=step)
                    )
        return experiences

    def _succeeds_again(self, trajectory: Trajectory) -> bool:
        actions = [turn.action for turn in executed_turns(trajectory)]
        with closing(self._make_world()) as world:
            return attempt(world, trajectory.task, actions).success


def _function(argument: str, name: str) -> Callable[..., str]:
    try:
        return attribute(name)
    except Exception as error:  # importing user code may raise anything
        raise ValueError(
            f"{argument}={name!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def learnable_groups(
    trajectories: Sequence[Trajectory], splits: Sequence[str]
) -> dict[str, list[Trajectory]]:
    """Return {task id: trajectories} without empty and broken ones.

    Raises ValueError for a task of another split: experience from held-out tasks must not reach
    training prompts.
    """
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        task = trajectory.task
        if task.split not in splits:
            raise ValueError(
                f"task {task.id} is of the split '{task.split}': "
                f"experience comes from {', '.join(splits)} tasks only"
            )
        if trajectory.turns and not trajectory.broken:
            groups.setdefault(task.id, []).append(trajectory)
    return groups


def _compare(solved: Sequence[Trajectory], failed: Sequence[Trajectory]) -> Lesson:
    """Return what sets the first success apart from the failures."""
    path = _tools(_useful(solved[0]))
    divergences: Counter[tuple[int, str]] = Counter()
    errors: Counter[tuple[str, str]] = Counter()
    for trajectory in failed:
        errors.update(_errors(trajectory))
        tried = _tools(executed_turns(trajectory))
        for index, (wanted, tool) in enumerate(zip(path, tried)):
            if tool != wanted:
                divergences[index, tool] += 1
                break
    for trajectory in solved:
        for error in _errors(trajectory):
            del errors[error]
    divergence = min(divergences, key=lambda key: (-divergences[key], key), default=None)
    ranked = sorted(errors, key=lambda error: (-errors[error], error))
    return Lesson(solved[0].task.query, path, divergence, ranked)


def _useful(trajectory: Trajectory) -> list[Turn]:
    """Return the turns that called tools without an error and were not labelled BAD."""
    turns = executed_turns(trajectory)
    return [t for t in turns if t.label >= 0 and not t.info.get("errors") and _tools([t])]


def _tools(turns: Sequence[Turn]) -> list[str]:
    """Return the names of the tools that turns called, in order."""
    names = []
    for turn in turns:
        names += [call.name for call in parse(turn.action).calls]
    return names


def _errors(trajectory: Trajectory) -> set[tuple[str, str]]:
    """Return (tool, first line of the answer, without ids and numbers) of every refused call.

    Errors that quote injected experience, which the policy copied into its call, are left out.
    """
    errors = set()
    exchanges = without_experience(trajectory)
    for turn, (_, observation) in zip(trajectory.turns, exchanges, strict=True):
        tools = _tools([turn])
        if turn.info.get("errors") and len(tools) == 1:
            first, *_ = observation.strip().splitlines() or [""]
            line = re.sub(r"\S*\d\S*", "...", first)[:120]
            if not unfit_reason(line):
                errors.add((tools[0], line))
    return errors
