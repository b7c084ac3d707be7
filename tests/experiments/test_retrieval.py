"""The worth of retrieved experience: controls, paired figures, and going on where it was cut
off."""

import dataclasses
import itertools
from collections import defaultdict
from types import SimpleNamespace

from envs.world import Task
from evolver.navigating import Extractor, Refiner, new_experience
from evolver.processes.interrupt import Interrupted
from experiments import retrieval
from experiments.retrieval import Learnt, Retrieved
from tests.experiments.results import rows_of
from tests.tiny import Parity


class Kinds(Parity):
    """Tasks of two kinds."""

    def tasks(self, split: str) -> list[Task]:
        tasks = super().tasks(split)
        for n, task in enumerate(tasks):
            task.meta["template"] = f"kind {n % 2}"
        return tasks


class Notes(Extractor):
    """One experience from each task."""

    def extract(self, trajectories, *, step):
        tasks = {t.task.id: t.task for t in trajectories}
        return [
            new_experience(t.query, f"Note {id}.", sources=[id], key=t.query)
            for id, t in tasks.items()
        ]


class Farthest(Refiner):
    """Chooses the last of two candidates for the first task and rewrites it for the second; the
    others get none."""

    candidates = 2

    def refine(self, queries, candidates, top_k):
        chosen = [near[-1:] for near in candidates]
        rewritten = [dataclasses.replace(e, content="Other words.") for e in chosen[1]]
        return [chosen[0], rewritten, *([] for _ in chosen[2:])]


def measure(tiny, workdir, *words, embedders=("ngrams",)) -> int:
    here, navigating = "tests.experiments.test_retrieval", "--config.navigating"
    command = f"""
        --config={tiny} --workdir={workdir} --rollouts=2 --folds=2 --config.env.name={here}:Kinds
        {navigating}.enabled=True {navigating}.tasks=0 {navigating}.rollouts=1
        {navigating}.extractor.name={here}:Notes --embedders"""
    return retrieval.main([*command.split(), *embedders, *words])


def rows(text: str) -> dict[str, list[str]]:
    _, *found = rows_of(text).items()
    return dict(found)


def test_it_measures_and_goes_on_where_it_was_cut_off(tiny, tmp_path, monkeypatch, stderr):
    batches, gather, most = [], retrieval.graded_rollouts, [2]

    def some(run, jobs, phase, grader):
        if len(batches) == most[0]:
            raise Interrupted
        batches.append([(job.task.id, tuple(job.experience), job.seed) for job in jobs])
        return gather(run, jobs, phase, grader)

    monkeypatch.setattr(retrieval, "BATCH", 3)
    monkeypatch.setattr(retrieval, "graded_rollouts", some)
    assert measure(tiny, tmp_path) == 130
    assert "goes on" in stderr() and not (tmp_path / "retrieval.md").exists()
    most[0] = 99
    assert measure(tiny, tmp_path, embedders=("ngrams", "policy")) == 0
    table = rows((tmp_path / "retrieval.md").read_text())
    assert list(table) == ["ngrams", "policy", "random", "same kind"]
    assert table["same kind"][1] == "100.0" and all(row[0] == "100.0" for row in table.values())
    seeds = defaultdict(set)
    for id, shown, seed in itertools.chain(*batches):
        seeds[id, shown].add(seed)
    # the same seeds, whatever experience was shown; and each task once in a batch
    assert len({(id, *sorted(found)) for (id, _), found in seeds.items()}) == 6
    assert all(len({id for id, _, _ in jobs}) == len(jobs) / 2 for jobs in batches)
    assert measure(tiny, tmp_path, f"--config.navigating.refine.name={__name__}:Farthest") == 0
    refined = rows((tmp_path / "retrieval.md").read_text())[f"ngrams, {__name__}:Farthest"]
    assert refined[0] == "33.3"  # two of six tasks
    played = list(itertools.chain(*batches))
    assert len(played) == len(set(played))  # nothing twice
    assert {id for id, shown, _ in played if "Other words." in str(shown)} == {"train/1"}
    assert measure(tiny, tmp_path, "--config.seed=1") == 2
    assert "results with seed=0, not 1" in stderr()


def test_mistakes_are_named_before_anything_is_computed(tiny, tmp_path, stderr):
    words = ("--config.navigating.enabled=False", "--folds=1")
    assert measure(tiny, tmp_path, *words) == 2
    err = stderr()
    assert "config.navigating.enabled is False" in err and "--folds must be at least 2" in err
    assert measure(tiny, tmp_path, embedders=("ngram",)) == 2
    assert "did you mean ngrams?" in stderr()
    assert measure(tiny, tmp_path, embedders=("endpoint",)) == 2
    assert "embedder needs it" in stderr()  # the url of a server
    assert not list(tmp_path.iterdir())


def test_the_table_pairs_each_task_with_itself():
    tasks = [Task(id, "x", id, meta={"template": kind}) for id, kind in zip("abc", "kkl")]
    good, bad = (new_experience(source, "x", sources=[source]) for source in "ac")
    pairs = {
        ("a", ""): [False, True], ("a", good.id): [True, True],
        ("b", ""): [True, False], ("b", good.id): [True, None], ("b", bad.id): [False, False],
        ("c", ""): [None, None], ("c", bad.id): [True, True],
    }  # fmt: skip
    found = {
        "near": {"a": Retrieved(good, 0.9), "b": Retrieved(good, 0.7)},
        "mixed": {"a": Retrieved(good), "b": Retrieved(bad), "c": Retrieved(bad)},
        "nothing": {},
    }
    lines = rows(retrieval.table(Learnt(tasks, [good, bad], {}), found, pairs))
    *near, change = lines["near"]
    assert near == ["66.7", "100.0", "0.80", "100.0", "0.0", "50.0", "100.0"]
    assert change == "+50.0 [+50.0, +50.0]"
    # c has no sound rollouts
    assert lines["mixed"][:7] == ["100.0", "66.7", "", *["50.0"] * 4]
    assert lines["nothing"] == ["0.0", *[""] * 7]


def test_other_words_are_another_experience():
    """Rewritten for a task by two refiners, or from two candidates, it must not share rollouts."""

    class Says(Refiner):
        def __init__(self, words):
            self.words = words

        def refine(self, queries, candidates, top_k):
            return [[dataclasses.replace(near[0], content=self.words)] for near in candidates]

    note, task = new_experience("when", "Look.", sources=["b"]), Task("a", "x", "a")
    ids = []
    for words in ("Look.", "Look first.", "Look twice.", "Look first."):
        navigating = SimpleNamespace(refiner=Says(words))
        (found,) = retrieval.refined(navigating, [task], {"a": [Retrieved(note, 0.5)]}).values()
        ids.append(found.experience.id)
    assert ids[0] == note.id and ids[1] == ids[3] and len(set(ids)) == 3


def test_no_experience_of_a_fold_comes_from_its_own_tasks():
    own, other, both, nowhere = (
        new_experience(str(n), "x", sources=s) for n, s in enumerate(("a", "b", "ab", ""))
    )
    learnt = Learnt([], [own, other, both, nowhere], {"a": 0, "b": 1})
    assert learnt.outside(0) == [other]
