"""Compare judges with what the world says, before a run trains on their verdicts.

    python -m experiments.judging --config=configs/quickstart.py:grpo --judges llm --tasks 16 \\
        --rollouts 4 --config.llm.url=http://127.0.0.1:8000/v1 --config.llm.model=policy
    python -m experiments.judging --config=configs/quickstart.py:grpo --judges \\
        --outcomes naive principle reference ...

The policy of the config plays its training tasks, never held-out ones. `--judges` are judges of
turns. Each episode is labelled by replay (evolver/attributing/replay.py), which plays it again
without each turn, and by every judge, which is compared on the turns that replay labels. Two
controls show what a figure means: `outcome` calls every turn of a success GOOD and every other one
BAD, which is what training without labels amounts to, and `shuffled` gives each turn the label that
replay gave to another turn, drawn at random.

`--outcomes` are judges of outcomes, which are compared with the world's own evaluation of each
episode. Their controls are `failed`, which calls every episode a failure, and `shuffled`.

The tables are printed and written to WORKDIR/judging.md. WORKDIR/labels.jsonl holds every turn with
its labels, WORKDIR/outcomes.jsonl every episode with its verdicts.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.keys import use
from envs.values import Json
from evolver.attributing import ABSTAIN, BAD, GOOD, TurnJudge
from evolver.build import Run, RunError
from evolver.config import plugs
from evolver.config.checks.world import sampled
from evolver.phases.rollouts import gather_rollouts, sampling_of
from experiments import measuring
from experiments.compare import markdown, over_tasks, percent
from experiments.measuring import shuffled, write_lines
from rl.rollout import Job
from rl.seeds import seed_of
from rl.trajectory import Trajectory

TURNS, OUTCOMES = "attributing.judge", "questioning.judge"
HEAD = ("labelled", "agrees", "of the good", "of the bad", "balanced")
NAMES = {GOOD: "GOOD", BAD: "BAD", ABSTAIN: "abstains"}


def measure(
    run: Run,
    *,
    judges: Sequence[str] = ("llm",),
    outcomes: Sequence[str] = (),
    tasks: int = 16,
    rollouts: int = 4,
) -> str:
    """Return the tables of the judges and their controls, and write every verdict. Raises RunError
    without any.

    judges: of turns: names for attributing.judge
    outcomes: names for questioning.judge
    tasks: training tasks, drawn once; 0 = all
    rollouts: of each task
    """
    chosen = sampled(run.tasks.originals, tasks)
    jobs = [
        Job(task, i, seed_of(run.config.seed, "judging", task.id, i), sampling_of(run.config))
        for task, i in itertools.product(chosen, range(rollouts))
    ]
    episodes = [t for t in gather_rollouts(run, jobs, "episodes") if t.turns and not t.broken]
    if not episodes:
        raise RunError(f"none of the {len(jobs)} episodes ended without a fault of its world")
    solved = np.mean([t.success for t in episodes])
    text = f"{len(episodes)} episodes of {len(chosen)} tasks, {solved:.1%} solved"
    text += turn_table(run, judges, episodes) if judges else ".\n"
    return text + (outcome_table(run, outcomes, episodes) if outcomes else "")


def turn_table(run: Run, judges: Sequence[str], episodes: Sequence[Trajectory]) -> str:
    """Return the rest of the sentence on the episodes, and the table of judges of turns beside
    replay."""
    replay_n = labelled(run, "replay", episodes)
    if not (replay_n != ABSTAIN).any():
        raise RunError(
            "replay labels no turn of these episodes, so there is nothing to compare with"
        )
    labels = {}
    for name in judges:
        run.progress.phase(f"labels by {name}")
        labels[name] = labelled(run, name, episodes)
    turns = [len(t.turns) for t in episodes]
    labels["outcome"] = np.repeat(truth_of(episodes), turns)
    labels["shuffled"] = shuffled(run, replay_n, "judging")
    write_labels(run.workdir / "labels.jsonl", episodes, {"replay": replay_n} | labels)
    counts = ", ".join(f"{np.mean(replay_n == value):.1%} {name}" for value, name in NAMES.items())
    task_n = np.repeat([t.task.id for t in episodes], turns)
    said = f"; {len(replay_n)} turns, replay: {counts}.\n\n"
    return said + table("judge of turns", labels, replay_n, task_n)


def outcome_table(run: Run, judges: Sequence[str], episodes: Sequence[Trajectory]) -> str:
    """Return the table of judges of outcomes beside the world's own evaluation."""
    truth_n, labels = truth_of(episodes), {}
    lines = [
        {"task": t.task.id, "rollout": t.rollout, "world": t.evaluation.score} for t in episodes
    ]
    for name in judges:
        run.progress.phase(f"outcomes by {name}")
        labels[name] = np.full(len(episodes), ABSTAIN)
        for n, verdict in enumerate(made(run, OUTCOMES, name).score(episodes)):
            if isinstance(verdict, str):
                lines[n][name] = verdict
            else:
                lines[n][name] = verdict.score
                labels[name][n] = GOOD if verdict.success else BAD
    labels |= {"failed": np.full(len(episodes), BAD), "shuffled": shuffled(run, truth_n, "judging")}
    write_lines(run.workdir / "outcomes.jsonl", lines)
    task_n = np.array([t.task.id for t in episodes])
    return "\n" + table("judge of outcomes", labels, truth_n, task_n)


def truth_of(episodes: Sequence[Trajectory]) -> np.ndarray:
    """Return what the world says of each episode, GOOD or BAD."""
    return np.array([GOOD if t.success else BAD for t in episodes])


def table(
    title: str, labels: dict[str, np.ndarray], truth_n: np.ndarray, task_n: np.ndarray
) -> str:
    """Return a row for each judge and control, whose labels are compared with `truth_n`."""
    rows = [[name, *cells(label_n, truth_n, task_n)] for name, label_n in labels.items()]
    return markdown([[title, *HEAD], *rows])


def made(run: Run, key: str, name: str) -> Any:
    """Return a judge by its name, with the parts of the run."""
    return plugs.plug(key, name, {})(run.parts)


def labelled(run: Run, name: str, episodes: Sequence[Trajectory]) -> np.ndarray:
    """Return the label of every turn of the episodes, (n,) int, by the judge of that name."""
    shared = run.grader.turns if name == run.config.attributing.judge.name else None
    judge: TurnJudge = shared or made(run, TURNS, name)
    try:
        found = itertools.chain.from_iterable(judge.label(episodes))
        return np.array([label.value for label in found])
    finally:
        if judge is not shared:  # the run closes its own judge
            judge.close()


def write_labels(path: Path, episodes: Sequence[Trajectory], labels: dict[str, np.ndarray]) -> None:
    """Write a line for every turn."""
    lines: list[Json] = []
    for t in episodes:
        head = {"task": t.task.id, "rollout": t.rollout, "success": bool(t.success)}
        for n, turn in enumerate(t.turns):
            found = {name: int(label_n[len(lines)]) for name, label_n in labels.items()}
            lines.append(head | {"turn": n, "action": turn.action, "labels": found})
    write_lines(path, lines)


def cells(label_n: np.ndarray, truth_n: np.ndarray, task_n: np.ndarray) -> list[str]:
    """Return what a row says, over what the truth labels: the share that the judge labels too and,
    of these, the share with the same label (mean over tasks, with its interval), by the true label,
    and the mean of the two."""
    known = truth_n != ABSTAIN
    both = known & (label_n != ABSTAIN)
    same_n = label_n == truth_n
    tasks = dict.fromkeys(task_n[both])
    by_task = np.array([same_n[both & (task_n == task)].mean() for task in tasks])
    of_good, of_bad = (percent(same_n[both & (truth_n == value)]) for value in (GOOD, BAD))
    balanced = f"{(float(of_good) + float(of_bad)) / 2:.1f}" if of_good and of_bad else ""
    return [percent(label_n[known] != ABSTAIN), over_tasks(by_task), of_good, of_bad, balanced]


# --- the command ----------------------------------------------------------------------------------


def problems(config: Any, workdir: str, *, judges: Any, outcomes: Any, **_: Any) -> list[str]:
    """Make the config provide what the judges need, and return what is wrong with them."""
    found = measuring.several(config, TURNS, judges)
    found += measuring.several(config, OUTCOMES, outcomes)
    if not (judges or outcomes):
        found.append("--judges and --outcomes name no judge")
    if not found and judges:
        config.attributing.enabled = True
        # nothing trains here, but a run that makes labels has to read them
        use(config.advantage, "adca")
    if not found and outcomes:
        config.questioning.enabled = True
    return list(dict.fromkeys(found))


def main(words: Sequence[str]) -> int:
    """Measure, and return the exit code."""
    return measuring.main(measure, problems, words, {"tasks": 0, "rollouts": 1})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
