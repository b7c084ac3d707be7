"""Experience from contrast: what the successful attempts of one task did that the failed ones did not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from envs.toolcalls import parse
from envs.world import World
from evolver.navigating.experience import Experience, new_experience
from evolver.traces import broken, played, text_of, without_experience
from rl.trajectory import Step, Trajectory


@dataclass
class Lesson:
    """What one group teaches. A `render` function makes the content of an experience of it."""

    query: str
    path: list[str]  # tool names of the shortest successful attempt, without steps judged BAD and calls refused
    divergence: tuple[int, str] | None = None  # the place in `path` where most failed attempts left it, and for what
    errors: list[tuple[str, str]] = field(default_factory=list)  # (tool, error) that only failed attempts hit


def render(lesson: Lesson) -> str:
    """The content of an experience in plain words, for worlds without a format of their own."""
    parts = [f"Use {', then '.join(lesson.path)}."]
    if lesson.divergence:
        place, instead = lesson.divergence
        after = f"After {lesson.path[place - 1]}" if place else "First"
        parts.append(f"{after} use {lesson.path[place]}, not {instead}.")
    parts += [f'{tool} fails with "{error}".' for tool, error in lesson.errors[:2]]
    return " ".join(parts)


def extract(
    trajectories: Sequence[Trajectory],
    *,
    step: int = 0,
    render: Callable[[Lesson], str] = render,
    when: Callable[[str], str] = str,
    contrast_only: bool = False,
    make_world: Callable[[], World] | None = None,
    splits: Sequence[str] = ("train",),
) -> list[Experience]:
    """At most one experience per task, from every task that somebody solved; `contrast_only`: and somebody failed.

    It is found by the task's query, and `when` words that for people. The lesson is rendered from actions and
    observations: opening messages, where injected experience stands, are never read, and `<EXP>` blocks that a policy
    repeats are removed. With `make_world` the successful attempt is replayed and dropped unless it succeeds again.
    Raises ValueError for a task of another split: what is learnt from held-out tasks must not reach training prompts.
    """
    found = []
    for id, group in groups_of(trajectories, splits).items():
        solved = sorted((t for t in group if t.evaluation.success), key=lambda t: (len(_useful(t)), t.rollout))
        failed = [t for t in group if not t.evaluation.success]
        if not solved or not _useful(solved[0]) or (contrast_only and not failed):
            continue
        if make_world is None or _succeeds_again(solved[0], make_world):
            query, content = solved[0].task.query, render(_contrast(solved, failed))
            if content:
                found.append(new_experience(when(query), content, key=query, sources=[id], step=step))
    return found


def groups_of(trajectories: Sequence[Trajectory], splits: Sequence[str]) -> dict[str, list[Trajectory]]:
    """What can be learnt from, by task id. Raises ValueError for a task of another split."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.task.split not in splits:
            raise ValueError(
                f"task {trajectory.task.id} is of the split '{trajectory.task.split}': "
                f"experience comes from {', '.join(splits)} tasks only"
            )
        if trajectory.steps and not broken(trajectory):
            groups.setdefault(trajectory.task.id, []).append(trajectory)
    return groups


def _contrast(solved: Sequence[Trajectory], failed: Sequence[Trajectory]) -> Lesson:
    path = [name for step in _useful(solved[0]) for name in _tools(step)]
    left = Counter()
    for trajectory in failed:
        tried = [name for step in played(trajectory) for name in _tools(step)]
        place = next((k for k, (a, b) in enumerate(zip(path, tried, strict=False)) if a != b), None)
        if place is not None:
            left[place, tried[place]] += 1
    errors = Counter(error for trajectory in failed for error in _errors(trajectory))
    for trajectory in solved:
        for error in _errors(trajectory):
            errors.pop(error, None)
    ranked = sorted(errors, key=lambda error: (-errors[error], error))
    divergence = min(left, key=lambda key: (-left[key], key)) if left else None
    return Lesson(solved[0].task.query, path, divergence, ranked)


def _useful(trajectory: Trajectory) -> list[Step]:
    return [s for s in played(trajectory) if s.label >= 0 and not s.info.get("errors") and _tools(s)]


def _tools(step: Step) -> list[str]:
    return [call.name for call in parse(without_experience(step.action)).calls]


def _errors(trajectory: Trajectory) -> set[tuple[str, str]]:
    """(tool, first line of the answer) of every step that was refused, ids and numbers left out."""
    found = set()
    for step in trajectory.steps:
        tools = _tools(step)
        if step.info.get("errors") and len(tools) == 1:
            text = without_experience(text_of(step.observation)).strip()
            line = re.sub(r"\S*\d\S*", "...", text.splitlines()[0] if text else "")
            found.add((tools[0], line[:120]))
    return found


def _succeeds_again(trajectory: Trajectory, make_world: Callable[[], World]) -> bool:
    world = make_world()
    try:
        world.reset(trajectory.task, trajectory.task.seed)
        for step in played(trajectory):
            result = world.step(step.action)
            if result.terminated or result.truncated:
                break
        return world.evaluate().success
    finally:
        world.close()
