"""The choice of the tasks of a step: the plug `sampler`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from envs.world import Task
from evolver.parts import Parts
from evolver.questioning.pool import mixture
from rl.trajectory import Trajectory

SAMPLERS = {
    "epochs": "evolver.sampling:Epochs",
    "failures": "evolver.sampling.prioritised:Failures",
    "learnability": "evolver.sampling.prioritised:Learnability",
    "quotas": "evolver.sampling.quotas:Quotas",
}


@dataclass(frozen=True)
class Draw:
    """The tasks to draw from, and how many to draw."""

    originals: Sequence[Task]
    synthetic: Sequence[Task]
    n: int  # tasks wanted
    share: float  # of them synthetic; round(share * n) are
    place: int  # the number of this draw in a sequence of draws, from 0
    seed: int  # of the sequence
    learnable: bool = False  # prefer synthetic tasks that are solved sometimes


class Sampler(Protocol):
    """Draws the tasks of a step. A subclass only has to define `draw`.

    Several sequences are drawn: the tasks of steps, those that replace groups without signal, and
    those that the first experience is made from. Each has its own seed.
    """

    def draw(self, draw: Draw, /) -> list[Task]:
        """Return `draw.n` different tasks out of the given ones, determined by the draw and by what
        was recorded."""
        ...

    def record(self, trajectories: Sequence[Trajectory]) -> None:
        """Learn from the rollouts of a step."""


class Epochs(Sampler):
    """Draws each task once before any is drawn again."""

    def __init__(self, parts: Parts):
        self.pool = parts.task_pool

    def draw(self, draw: Draw) -> list[Task]:
        """Return tasks in epochs; with `draw.learnable`, the synthetic ones by the learnability
        that their pool estimates."""
        weights = self.pool.weights(draw.synthetic) if self.pool and draw.learnable else None
        return mixed(draw, synthetic=weights)


def mixed(
    draw: Draw,
    *,
    original: Sequence[float] | None = None,
    synthetic: Sequence[float] | None = None,
) -> list[Task]:
    """Return the tasks of a draw, each kind in epochs or, with one weight per task, drawn in
    proportion to them without replacement."""
    return mixture(
        draw.originals,
        draw.synthetic,
        step=draw.place,
        n=draw.n,
        share=draw.share,
        seed=draw.seed,
        original_weights=original,
        weights=synthetic,
    )


def drawn(sampler: Sampler, draw: Draw) -> list[Task]:
    """Return what a sampler draws. Raises ValueError, with its name, unless these are `draw.n`
    different tasks out of the given ones."""
    tasks = sampler.draw(draw)
    given = {task.id for task in (*draw.originals, *draw.synthetic)}
    right = given.intersection(task.id for task in tasks)
    if not len(tasks) == len(right) == draw.n:
        raise ValueError(
            f"{type(sampler).__name__}.draw returned {len(tasks)} tasks, {len(right)} of"
            f" them different tasks that it was given; a draw needs {draw.n}"
        )
    return tasks
