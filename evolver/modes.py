"""The modes of the program that train nothing: evaluate, explore and pool."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from evolver.build import Run, RunError, open_run
from evolver.files import report
from evolver.llm.roles import for_evaluation
from evolver.metrics import Metrics
from evolver.phases import evaluation, extraction, tasks
from evolver.processes import hosts
from rl.evaluation import measures


def evaluate(config: Any, workdir: str | Path) -> None:
    """Score config.model.path on the held-out tasks.

    The scores are appended to `eval.jsonl` in the workdir and the rollouts written to
    `trajectories/eval.jsonl.gz`, those of further seeds to `eval_1.jsonl.gz` and so on.
    """
    c, policy = config.eval, config.model.path
    with open_run(for_evaluation(config), workdir, alone=False) as run:
        run.workdir.claim(config.to_dict(), "eval")
        scores = [evaluation.begun(run, keep="eval", sweep=True)()]
        for n in range(1, c.seeds):
            scores.append(evaluation.begun(run, keep=f"eval_{n}", repetition=n)())
        record = {"policy": policy, "split": c.split, **dict(measures(*scores))}
        run.workdir.log_evaluation(record | {"scores": [asdict(s) for s in scores]})
        run.progress.close()
        print(report.scores_table(scores, policy or "random policy"))


def explore(config: Any, workdir: str | Path) -> None:
    """Invent tasks and write them to `tasks.jsonl` in the workdir."""
    with open_run(config, workdir) as run:
        pool = run.tasks.pool
        if pool is None:
            raise RunError("--mode=explore needs config.questioning.enabled=True")
        run.workdir.claim(config.to_dict(), "explore")
        try:
            metrics = tasks.explore(run)
        finally:  # keep the tasks that were paid for
            run.workdir.log_tasks(pool.tasks.values(), pool.card())
        head = f"{len(pool.tasks)} synthetic tasks in {run.workdir / 'tasks.jsonl'}"
        show(run, metrics, head)


def pool(config: Any, workdir: str | Path) -> None:
    """Make an experience pool and write it to `experience/` in the workdir."""
    with open_run(config, workdir) as run:
        if run.navigating is None:
            raise RunError("--mode=pool needs config.navigating.enabled=True")
        run.workdir.claim(config.to_dict(), "pool")
        metrics = tasks.explore(run) | extraction.fill(run)
        pool, folder = run.navigating.pool, run.workdir / "experience"
        if hosts.first():
            pool.save(folder)
        show(run, metrics, f"{len(pool)} experiences in {folder}")


def show(run: Run, metrics: Metrics, head: str) -> None:
    """Print a line and the metrics below it."""
    run.progress.close()
    print(head, *(f"  {name} {value:g}" for name, value in sorted(metrics.items())), sep="\n")
