"""Plays episodes with the current policy, shared out over all hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evolver.build import Run
from evolver.processes import hosts
from evolver.processes.interrupt import Interrupted
from rl.rollout import Job, rollouts
from rl.trajectory import Sampling, Trajectory


def sampling(config: Any, temperature: float | None = None) -> Sampling:
    """Return how the policy samples: as in training, or at another temperature."""
    c = config.rollout
    temperature = c.temperature if temperature is None else temperature
    return Sampling(max_tokens=c.max_tokens, temperature=temperature, top_p=c.top_p, top_k=c.top_k)


def forget(run: Run) -> None:
    """Drop what the engines hold of earlier requests, unless rollouts are in flight, so that later
    samples do not
    depend on it: those of a resumed run could not."""

    async def drop() -> (
        None
    ):  # on the loop of the engines, which may still be dropping a cancelled request
        for engine in run.engines:
            engine.clear_cache()

    if not (run.pipeline and run.pipeline.busy):
        run.stop.finish(drop())


def play(run: Run, jobs: Sequence[Job], phase: str) -> list[Trajectory]:
    """Play jobs with the engine's current weights. The result does not depend on earlier rollouts.

    Each host plays its share, and all get all trajectories. An interruption of one host interrupts
    all of them.
    """
    concurrency, mine = run.config.rollout.concurrency, hosts.share(jobs)

    def show(done: int, total: int, _: Trajectory) -> None:
        run.progress.phase(phase, done, total)

    run.progress.phase(phase, 0, len(mine))
    forget(run)
    try:
        played = run.stop.run(
            rollouts(mine, run.actor, run.worlds, concurrency=concurrency, progress=show)
        )
    except Interrupted:
        played = None
    parts = hosts.gather(played)
    if any(part is None for part in parts):
        raise Interrupted
    return hosts.interleaved(parts)
