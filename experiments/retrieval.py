"""Measure what retrieved experience is worth, for each embedder: paired rollouts with it and
without it.

    python -m experiments.retrieval --config=configs/quickstart.py:qn --embedders ngrams policy
    python -m experiments.retrieval --config=configs/appworld_14b.py:qn \\
        --embedders ngrams endpoint --config.model.path=/dir/of/Qwen2.5-14B-Instruct \\
        --config.llm.url=http://127.0.0.1:8000/v1

The tasks are those that a run would make its first experience from (`config.navigating.tasks`),
never held-out ones. Each is attempted, and what the attempts teach is extracted once. The tasks are
then split into folds; the pool of a fold holds the experience of the other folds. Each task gets
the nearest experience of its fold's pool, and is played with it and without it, with the same
seeds. Two controls show what the figures mean: a `random` experience of the pool, and one from a
task of the same kind (`meta["template"]` of the tasks; left out in worlds without it).

With `config.navigating.refine`, each embedder has a second row: what the refiner chooses from the
nearest experiences.

The table is printed and written to WORKDIR/retrieval.md. Rollouts are kept as they end: the same
command goes on where it was cut off, and another embedder plays only what is new.
"""

import copy
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs import base
from envs.world import Task
from evolver.build import Run, RunError
from evolver.config import plugs
from evolver.config.checks.workdir import changed
from evolver.files.lines import read_jsonl
from evolver.files.workdir import Workdir
from evolver.navigating import Experience, new_experience
from evolver.navigating.experience_pool import ExperiencePool
from evolver.navigating.guidance import Navigating
from evolver.phases import extraction, tasks
from evolver.phases.rollouts import graded_rollouts, sampling_of
from experiments import measuring
from experiments.compare import markdown, over_tasks, percent
from experiments.measuring import shuffled, write_lines
from rl.rollout import Job
from rl.seeds import seed_of

BATCH = 64  # pairs whose rollouts are played, and kept, together
# (task id, experience id or "") -> success, None = broken
Pairs = dict[tuple[str, str], list[bool | None]]
HEAD = (
    "experience", "found", "same kind", "cosine", "helps", "hurts", "without", "with", "difference",
)  # fmt: skip


class Retrieved(NamedTuple):
    """The experience that a task gets, and its cosine, nan for controls."""

    experience: Experience
    similarity: float = float("nan")


Row = dict[str, Retrieved]  # of the table: by task id


def measure(
    run: Run,
    *,
    embedders: tuple[str, ...] = ("ngrams", "policy"),
    rollouts: int = 16,
    folds: int = 4,
) -> str:
    """Return the table of the embedders and the controls. Raises RunError where nothing can be
    measured.

    embedders: names for navigating.embedder
    rollouts: of each task with, and without, each experience
    """
    navigating = run.navigating
    assert navigating is not None  # `problems` refuses a config without it
    learnt = learnt_by(run, navigating, folds)
    rows, refine = {}, run.config.navigating.refine.name
    for name in embedders:
        near = nearest(run, navigating, name, learnt)
        rows[name] = {id: found[0] for id, found in near.items()}
        if refine != "none":
            rows[f"{name}, {refine}"] = refined(navigating, learnt.tasks, near)
    rows |= controls(run, learnt)
    return table(learnt, rows, played(run, learnt.tasks, rows.values(), rollouts))


class Learnt(NamedTuple):
    """Tasks, the experience that attempts at them taught, and {task id: fold}."""

    tasks: Sequence[Task]
    experiences: Sequence[Experience]
    fold_of: dict[str, int]

    def outside(self, fold: int) -> list[Experience]:
        """Return the experience that a fold may be shown: none of it comes from a task of the
        fold."""
        found = []
        for e in self.experiences:
            own = {self.fold_of.get(source) for source in e.sources}
            if own and fold not in own:
                found.append(e)
        return found

    @property
    def kinds(self) -> dict[str, str]:
        """{task id: kind}, {} in a world whose tasks do not name one."""
        return {t.id: t.meta["template"] for t in self.tasks if t.meta.get("template")}


def learnt_by(run: Run, navigating: Navigating, folds: int) -> Learnt:
    """Return what attempts at the tasks taught, which is kept in the workdir. Raises RunError if
    there are too few tasks, or if it is nothing."""
    path = run.workdir / "experience.jsonl"
    tasks.explore(run)
    chosen = tasks.for_experience(run)
    if not path.is_file():
        attempts = extraction.first_attempts(run, navigating)
        found = navigating.extractor.extract(attempts, step=0)
        write_lines(path, [e.to_dict() for e in found])
    experiences = list(read_jsonl(path, make=lambda record: Experience(**record)))
    if len(chosen) < folds:
        raise RunError(
            f"--folds={folds} needs as many tasks, there are {len(chosen)}: "
            "raise config.navigating.tasks"
        )
    if not experiences:
        raise RunError(
            f"the policy's attempts at {len(chosen)} tasks taught nothing, "
            "so there is nothing to retrieve"
        )
    fold_n = shuffled(run, len(chosen), "retrieval", "folds") % folds
    return Learnt(chosen, experiences, dict(zip((t.id for t in chosen), fold_n)))


def nearest(
    run: Run, navigating: Navigating, name: str, learnt: Learnt
) -> dict[str, list[Retrieved]]:
    """Return {task id: the nearest experiences, as many as the refiner chooses one from}, without
    tasks for which none is near enough."""
    c, most = run.config.navigating, navigating.refiner.candidates
    args = c.embedder.args.to_dict() if name == c.embedder.name else {}
    embedder = plugs.plug("navigating.embedder", name, args)(run.parts)
    found = {}
    for fold in sorted(set(learnt.fold_of.values())):
        pool = ExperiencePool(embedder)
        pool.add(copy.deepcopy(learnt.outside(fold)))
        asked = [task for task in learnt.tasks if learnt.fold_of[task.id] == fold]
        queries = [task.query for task in asked]
        results = pool.search(queries, most, min_similarity=c.min_similarity)
        for task, near in zip(asked, results, strict=True):
            if near:
                found[task.id] = [Retrieved(*pair) for pair in near]
    return found


def refined(
    navigating: Navigating, chosen: Sequence[Task], near: dict[str, list[Retrieved]]
) -> Row:
    """Return {task id: the experience that the refiner makes of the nearest}, without tasks that it
    gives none."""
    asked = [task for task in chosen if task.id in near]
    candidates = [[r.experience for r in near[task.id]] for task in asked]
    kept = navigating.refiner.refine([task.query for task in asked], candidates, 1)
    return {task.id: taken(some[0], near[task.id]) for task, some in zip(asked, kept) if some}


def taken(e: Experience, near: Sequence[Retrieved]) -> Retrieved:
    """Return what a refiner made of one of the nearest: in other words, it is another
    experience."""
    (source,) = (r for r in near if r.experience.id == e.id)
    if e.content == source.experience.content:
        return source
    other = new_experience(e.when, e.content, sources=e.sources, key=e.key, step=e.step)
    return Retrieved(other, source.similarity)


def controls(run: Run, learnt: Learnt) -> dict[str, Row]:
    """Return {name: {task id: experience}}: any one of the pool, and one from a task of the same
    kind."""
    kinds = learnt.kinds
    any_one: Row = {}
    alike: Row = {}
    for id, fold in learnt.fold_of.items():
        others = learnt.outside(fold)
        for n in shuffled(run, len(others), "retrieval", id):
            any_one.setdefault(id, Retrieved(others[n]))
            if same_kind(id, others[n], kinds):
                alike.setdefault(id, Retrieved(others[n]))
    return {"random": any_one} | ({"same kind": alike} if kinds else {})


def same_kind(id: str, experience: Experience, kinds: dict[str, str]) -> bool:
    return any(kinds.get(source) == kinds.get(id, "") for source in experience.sources)


def played(run: Run, chosen: Sequence[Task], rows: Iterable[Row], rollouts: int) -> Pairs:
    """Return the success of the rollouts of each task without experience, and with each one that a
    row gives it.

    Rollouts of one task differ in the experience only: they have the same seeds.
    """
    path = run.workdir / f"pairs_{rollouts}.jsonl"
    lines = read_jsonl(path) if path.is_file() else ()
    pairs: Pairs = {(line["task"], line["experience"]): line["success"] for line in lines}
    wanted: dict[tuple[str, str], Experience | None] = {}
    for row in rows:
        for id, r in row.items():
            wanted |= {(id, ""): None, (id, r.experience.id): r.experience}
    by_id = {task.id: task for task in chosen}
    todo = [(by_id[pair[0]], wanted[pair]) for pair in sorted(wanted.keys() - pairs.keys())]
    done, total = 0, len(todo)
    while todo:
        # No two of one task: equal seeds at the same time are refused.
        batch = list({task.id: (task, e) for task, e in reversed(todo)}.values())[:BATCH]
        todo = [pair for pair in todo if pair not in batch]
        done += len(batch)
        pairs |= paired_rollouts(run, batch, rollouts, f"pairs {done} of {total}, rollouts")
        keys = ("task", "experience", "success")
        write_lines(path, [dict(zip(keys, (*pair, found))) for pair, found in pairs.items()])
    return pairs


def paired_rollouts(
    run: Run, batch: Sequence[tuple[Task, Experience | None]], rollouts: int, name: str
) -> Pairs:
    """Return the success of rollouts of pairs."""
    jobs = [
        Job(
            task, i, seed_of(run.config.seed, "retrieval", task.id, i), sampling_of(run.config),
            [(experience.id, experience.content)] if experience else [],
        )
        for (task, experience), i in itertools.product(batch, range(rollouts))
    ]  # fmt: skip
    outcomes = dataclasses.replace(run.grader, turns=None)
    attempts, _ = graded_rollouts(run, jobs, name, outcomes)
    key = {task.id: (task.id, experience.id if experience else "") for task, experience in batch}
    success: Pairs = {pair: [None] * rollouts for pair in key.values()}
    for t in attempts:
        success[key[t.task.id]][t.rollout] = None if t.broken else bool(t.success)
    return success


def table(learnt: Learnt, rows: dict[str, Row], pairs: Pairs) -> str:
    """Return a Markdown table; shares and success in percent, over the tasks for which something
    was found."""
    rollouts = len(next(iter(pairs.values()), []))
    lines = [HEAD, *([name, *cells(learnt, row, pairs)] for name, row in rows.items())]
    return (
        f"{len(learnt.tasks)} tasks, {len(learnt.experiences)} experiences, "
        f"{rollouts} rollouts with and {rollouts} without each.\n\n{markdown(lines)}"
    )


def cells(learnt: Learnt, row: Row, pairs: Pairs) -> Iterator[str]:
    """Yield what a row says about the tasks for which it found experience. Broken rollouts are left
    out."""
    kinds, there = learnt.kinds, [task.id in row for task in learnt.tasks]
    found = [(task.id, row[task.id].experience) for task in learnt.tasks if task.id in row]
    yield percent(there)
    yield percent([same_kind(id, shown, kinds) for id, shown in found]) if kinds else ""
    similarity_N = np.array([row[id].similarity for id, _ in found])
    yield "" if np.isnan(similarity_N).all() else f"{similarity_N.mean():.2f}"
    both = [(sound(pairs[id, ""]), sound(pairs[id, shown.id])) for id, shown in found]
    means = np.array([[np.mean(a), np.mean(b)] for a, b in both if a and b]).reshape(-1, 2)
    before_N, after_N = means.T
    for value_N in (after_N > before_N, after_N < before_N, before_N, after_N):
        yield percent(value_N)
    yield over_tasks(after_N - before_N, "+")


def sound(success: Sequence[bool | None]) -> list[bool]:
    """Return the success of the rollouts that are not broken."""
    return [value for value in success if value is not None]


# --- the command ----------------------------------------------------------------------------------


def problems(config: Any, workdir: str, *, embedders: Sequence[str], **_: Any) -> list[str]:
    """Make the config provide what the embedders need, and return what is wrong with them or with
    the workdir."""
    if not config.navigating.enabled:
        return [
            "config.navigating.enabled is False: "
            "set it to True, because experience is made as in a run"
        ]
    found = measuring.several(config, "navigating.embedder", embedders)
    return [*found, *other_settings(config, workdir)]


def other_settings(config: Any, workdir: str) -> Iterator[str]:
    """Yield why a workdir cannot be continued: its results are those of another config. Embedders,
    the refiner and the servers of language models may change."""
    record = Workdir(workdir).config("retrieval")
    before = changed(record["config"], config, base.Config) if record else {}
    for name, (then, now) in before.items():
        if not name.startswith(("llm.", "navigating.embedder.", "navigating.refine.")):
            yield (
                f"--workdir={workdir} has results with {name}={then!r}, not {now!r}: "
                "choose a new directory"
            )


def main(words: Sequence[str]) -> int:
    """Measure, and return the exit code."""
    return measuring.main(measure, problems, words, {"rollouts": 1, "folds": 2}, goes_on=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
