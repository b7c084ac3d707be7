"""reasoning-gym: questions made by a generator and checked by a program, one turn each.

Needs `pip install -r requirements/reasoning.txt`. https://github.com/open-thought/reasoning-gym lists the data sets.
"""

from __future__ import annotations

import importlib
from typing import Any

from envs.world import Evaluation, Observation, StepResult, Task, World

SYSTEM = "Solve the problem. Think first, then write the answer, and nothing else, between <answer> and </answer>."
SPLITS = ("train", "dev", "test")
APART = 1_000_000  # question i of a data set is drawn with its seed + i, so seeds of splits lie this far apart


class Reasoning(World):
    """One question per episode. The seed of `reset` changes nothing.

    datasets: names of reasoning-gym's data sets; a split has the same number of questions of each (n_train, n_dev,
    n_test in all). options: arguments of a data set by its name, such as {"leg_counting": {"max_animals": 5}}. seed:
    which questions. partial: the score is the data set's own, which may credit half an answer; otherwise it is 1 for a
    right answer and 0 for others.
    """

    name = "reasoning"

    def __init__(
        self,
        datasets: tuple[str, ...] | list[str] = ("basic_arithmetic", "leg_counting", "spell_backward"),
        options: dict[str, dict[str, Any]] | None = None,
        n_train: int = 96,
        n_dev: int = 48,
        n_test: int = 96,
        seed: int = 0,
        partial: bool = False,
    ):
        self._datasets, self._options = list(datasets), options or {}
        if unknown := sorted(set(self._options) - set(self._datasets)):
            raise ValueError(f"options for {', '.join(unknown)}, which is not among the datasets")
        self._sizes = dict(zip(SPLITS, (n_train, n_dev, n_test)))
        self._seed, self._partial = seed, partial
        self._made: dict[tuple[str, str], Any] = {}
        self._entry: dict[str, Any] | None = None

    def tasks(self, split: str) -> list[Task]:
        found = []
        for name in self._datasets:
            for i, entry in enumerate(self._dataset(name, split)):
                answer = entry["answer"]
                found.append(
                    Task(
                        id=f"reasoning/{name}/{split}/{self._seed}/{i}",
                        env=self.name,
                        query=entry["question"],
                        split=split,
                        seed=i,
                        reference=[f"<answer>{answer}</answer>"] if isinstance(answer, str) else [],
                        difficulty=1,
                        meta={"dataset": name},
                    )
                )
        return found

    def reset(self, task: Task, seed: int = 0) -> Observation:
        name = task.meta.get("dataset")
        if name not in self._datasets or not 0 <= task.seed < len(dataset := self._dataset(name, task.split)):
            raise ValueError(f"no question {task.id!r} in {', '.join(self._datasets)}")
        self._checker, self._entry, self._score, self._over = dataset, dataset[task.seed], 0.0, False
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self._entry["question"]}]
        return Observation(messages)

    def step(self, action: str) -> StepResult:
        self._running()
        if not self._over:
            self._over = True
            self._score = self._check(answer_of(action))
        return StepResult([], reward=self.evaluate().score, terminated=True, info={"calls": [], "errors": 0})

    def evaluate(self) -> Evaluation:
        self._running()
        success = self._score >= 1.0
        score = self._score if self._partial else float(success)
        return Evaluation(score, success, {"progress": 1.0 if success else min(self._score, 0.99)})

    def _check(self, answer: str) -> float:
        try:
            return min(max(float(self._checker.score_answer(answer, self._entry)), 0.0), 1.0)
        except Exception:  # some of its checkers raise on an answer that is no number
            return 0.0

    def _dataset(self, name: str, split: str) -> Any:
        if split not in SPLITS:
            raise ValueError(f"reasoning has no split {split!r}; it has {', '.join(SPLITS)}")
        if (name, split) not in self._made:
            count = len(self._datasets)
            size = self._sizes[split] // count + (self._datasets.index(name) < self._sizes[split] % count)
            seed = (self._seed * len(SPLITS) + SPLITS.index(split)) * APART
            create = importlib.import_module("reasoning_gym").create_dataset
            self._made[name, split] = create(name, size=max(size, 1), seed=seed, **self._options.get(name, {}))
        return self._made[name, split]

    def _running(self) -> None:
        if self._entry is None:
            raise RuntimeError("no episode: reset the world first")


def answer_of(text: str) -> str:
    """What stands in the last <answer>...</answer>, or the whole text."""
    _, opened, rest = text.rpartition("<answer>")
    return (rest.partition("</answer>")[0] if opened else text).strip()
