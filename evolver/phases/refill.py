"""Phases 1 to 4 again, for groups without signal."""

from evolver import grading
from evolver.build import Run
from evolver.metrics import Metrics, Played
from evolver.phases import rollouts, tasks
from evolver.processes import hosts
from rl.seeds import seed_of
from rl.trajectory import Trajectory, groups_of


def refill(run: Run, trajectories: list[Trajectory], step: int, metrics: Metrics) -> Played:
    """Replace groups without signal by rollouts of further tasks, in at most `rollout.refill`
    rounds.

    This is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). Groups without signal stay in
    the ledger, and do not train. Returns all trajectories of the step and its metrics, with the
    judges' figures; `metrics` are those of the first round.
    """
    c, rounds = run.config.rollout, 0
    seed = seed_of(run.config.seed, "refill", step)
    while rounds < c.refill:
        groups = groups_of(trajectories)
        grading.shape(run.config, run.reward, trajectories, step)
        silent = grading.alike(run.config, run.estimator, trajectories)
        missing = c.tasks - len(groups) + len(silent)
        drawn = {id for id, _ in groups}
        more = tasks.draw(run, rounds, missing, seed, fewer=True, without=drawn) if missing else []
        if not more:
            break
        played, measured = rollouts.roll_out(run, {step: more}, step)
        trajectories, rounds = [*trajectories, *played], rounds + 1
        for name in ("time/rollout", "time/grade"):
            if name in measured:
                measured[name] += metrics.get(name, 0.0)
        metrics = metrics | measured
    if c.refill:
        silent = grading.alike(run.config, run.estimator, trajectories)
        for trajectory in trajectories:
            trajectory.replaced = trajectory.group in silent
        speed = rollouts.generated(trajectories) / metrics["time/rollout"]
        metrics = metrics | {"rollout/refills": rounds, "time/tokens_per_s": speed}
    return trajectories, metrics | hosts.merge_metrics(run.grader.metrics())
