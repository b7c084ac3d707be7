"""Rollouts that run during training (`rollout.async_depth`), so that the engine also generates
during updates.

The unit is the group of one task. Each iteration starts as many groups as it trains on, `depth`
steps ahead. A step trains on the groups that are due, then on other groups that are done, oldest
first. A slow group may train some steps later: it is due, and waited for, when the bound on
staleness requires it. Rollouts continue across weight updates; every turn records the version that
sampled it.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from evolver.metrics import Played
from rl.rollout import Job
from rl.trajectory import Trajectory

Play = Callable[[Sequence[Job]], Awaitable[list[Trajectory]]]
Grade = Callable[[list[Trajectory]], None]


class Pipeline:
    """Groups in flight. `launch`, `collect` and `close` run on the event loop of the rollouts.

    Args:
      play: plays the jobs of a group.
      grade: called on a thread with the trajectories of each group that ends.
      depth: training steps that rollouts are started ahead.
      bound: greatest allowed staleness, in weight versions between the start of a rollout and its
        training; at least `depth`.
      judges: groups graded at a time.
    """

    def __init__(self, play: Play, grade: Grade, *, depth: int, bound: int, judges: int = 1):
        self.play, self.grade = play, grade
        self.depth, self.slack = depth, bound - depth
        self.launched = 0  # the last step whose groups were started
        self._collected = 0.0  # when the groups of the last step were, on the monotonic clock
        self._judges = ThreadPoolExecutor(judges, thread_name_prefix="judge")
        # the rollouts of each group, with the training step that they were started for
        self._groups: dict[asyncio.Task[list[Trajectory]], int] = {}
        self._beside: list[asyncio.Task[list[Trajectory]]] = []  # rollouts that train nothing

    @property
    def busy(self) -> bool:
        """True if any rollout is still in flight."""
        return not all(task.done() for task in (*self._groups, *self._beside))

    def counts(self) -> tuple[int, int]:
        """Return the numbers of groups that are done but have not trained, and of all groups."""
        groups = list(self._groups)
        return sum(group.done() for group in groups), len(groups)

    def ahead(self, step: int, last: int) -> range:
        """Return the steps to start now: those up to `depth` beyond `step` and up to `last` that
        were not started."""
        return range(max(step, self.launched + 1), min(step + self.depth, last) + 1)

    def launch(self, step: int, groups: Sequence[Sequence[Job]]) -> None:
        """Start the groups of a step."""
        self.launched = step
        self._collected = self._collected or time.monotonic()
        for jobs in groups:
            self._groups[asyncio.create_task(self._play(jobs))] = step

    async def beside(
        self, work: Coroutine[Any, Any, list[Trajectory]]
    ) -> asyncio.Task[list[Trajectory]]:
        """Start rollouts that go on beside the groups, and end with them."""
        self._beside = [task for task in self._beside if not task.done()]
        self._beside.append(asyncio.create_task(work))
        return self._beside[-1]

    async def _play(self, jobs: Sequence[Job]) -> list[Trajectory]:
        trajectories = await self.play(jobs)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._judges, self.grade, trajectories)
        return trajectories

    async def collect(self, step: int, count: int, show: Callable[[int, int], None]) -> Played:
        """Return the trajectories of `count` groups to train `step` on, due groups first, and
        metrics: `time/rollout` is the time since the groups of the previous step were collected.

        show: called with the number of groups done and `count`. Raises what a group raised.
        """
        count = min(count, len(self._groups))
        due = [group for group, start in self._groups.items() if start + self.slack <= step]
        while True:
            done = [group for group in self._groups if group.done()]
            for group in done:
                group.result()
            show(min(len(done), count), count)
            if len(done) >= count and all(group.done() for group in due):
                break
            running = self._groups.keys() - done
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        chosen = [*due, *(group for group in done if group not in due)][:count]
        late = sum(self._groups.pop(group) < step for group in chosen)
        seconds, self._collected = time.monotonic() - self._collected, time.monotonic()
        metrics = {
            "time/rollout": seconds,
            "async/late": late,
            "async/groups": len(self._groups),  # those that have not trained yet
            "async/done": sum(group.done() for group in self._groups),
        }
        return list(itertools.chain(*(group.result() for group in chosen))), metrics

    async def close(self) -> None:
        """Cancel everything in flight. A resumed run starts those of later steps again, with newer
        weights."""
        tasks = [*self._groups, *self._beside]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._groups = {}
        self._judges.shutdown(wait=False, cancel_futures=True)
