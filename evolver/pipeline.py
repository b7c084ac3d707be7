"""Rollouts that run during training (`rollout.async_depth`), so that the engine also generates
during updates.

The unit is the group of one task. Each iteration starts as many groups as it trains on, `depth`
steps ahead. A step trains on the groups that are due, then on other groups that are done, oldest
first. A slow group may train some steps
later: it is due, and waited for, when the bound on staleness requires it. Rollouts continue across
weight updates; every turn records the version that sampled it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rl.rollout import Job
from rl.trajectory import Trajectory

Play = Callable[[Sequence[Job]], Awaitable[list[Trajectory]]]
Grade = Callable[[list[Trajectory]], None]


@dataclass(eq=False)
class _Group:
    step: int  # the training step that it was started for
    task: asyncio.Task[list[Trajectory]]


class Pipeline:
    """Groups in flight. `launch`, `collect` and `close` run on the event loop of the rollouts.

    depth: training steps that rollouts are started ahead. bound: greatest allowed staleness, in
    weight versions between the start of a rollout and its training; at least `depth`. concurrency:
    rollouts in flight, over all
    groups. judges: groups graded at a time.
    """

    def __init__(self, *, depth: int, bound: int, concurrency: int = 64, judges: int = 1):
        if bound < depth:
            raise ValueError(
                f"rollouts started {depth} steps ahead are {depth} versions old, more than {bound}"
            )
        self.depth, self.slack = depth, bound - depth
        self.places = asyncio.Semaphore(concurrency)
        self.launched = 0  # the last step whose groups were started
        self.collected = 0.0  # time of the last `collect`, on the monotonic clock
        self._judges = ThreadPoolExecutor(judges, thread_name_prefix="judge")
        self._groups: list[_Group] = []

    @property
    def busy(self) -> bool:
        """True if any group is still in flight."""
        return any(not group.task.done() for group in self._groups)

    def ahead(self, step: int, last: int) -> range:
        """Return the steps to start now: those up to `depth` beyond `step` and up to `last` that
        were not started."""
        return range(max(step, self.launched + 1), min(step + self.depth, last) + 1)

    def launch(self, step: int, groups: Sequence[Sequence[Job]], play: Play, grade: Grade) -> None:
        """Start the groups of a step. grade: called on a thread with the trajectories of each group
        that ends."""

        async def run(jobs: Sequence[Job]) -> list[Trajectory]:
            trajectories = await play(jobs)
            await asyncio.get_running_loop().run_in_executor(self._judges, grade, trajectories)
            return trajectories

        self.launched = step
        self._groups += [_Group(step, asyncio.create_task(run(jobs))) for jobs in groups]

    async def collect(
        self, step: int, count: int, show: Callable[[int, int], None]
    ) -> tuple[list[Trajectory], int]:
        """Return the trajectories of `count` groups to train `step` on, due groups first, and the
        count of late groups.

        show: called with the number of groups done and `count`. Raises what a group raised.
        """
        count = min(count, len(self._groups))
        while True:
            done = [group for group in self._groups if group.task.done()]
            for group in done:
                group.task.result()
            due = [group for group in self._groups if group.step + self.slack <= step]
            show(min(len(done), count), count)
            if len(done) >= count and all(group.task.done() for group in due):
                break
            running = [group.task for group in self._groups if not group.task.done()]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        chosen = [*due, *(group for group in done if group not in due)][:count]
        self._groups = [group for group in self._groups if group not in chosen]
        late = sum(group.step < step for group in chosen)
        self.collected = time.monotonic()
        return [trajectory for group in chosen for trajectory in group.task.result()], late

    def figures(self) -> dict[str, Any]:
        """Return metrics: groups that have not trained yet, and how many of them are done."""
        return {
            "async/groups": len(self._groups),
            "async/done": sum(g.task.done() for g in self._groups),
        }

    async def close(self) -> None:
        """Cancel everything in flight. A resumed run starts those of later steps again, with newer
        weights."""
        for group in self._groups:
            group.task.cancel()
        await asyncio.gather(*(group.task for group in self._groups), return_exceptions=True)
        self._groups = []
        self._judges.shutdown(wait=False, cancel_futures=True)
