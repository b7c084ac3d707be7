"""reasoning-gym: generated questions with programmatic checks, one turn each.

Needs `pip install -r requirements/reasoning.txt`. https://github.com/open-thought/reasoning-gym
lists the data sets.
"""

from typing import Any

from envs import packages
from envs.toolcalls import spoken
from envs.values import Json
from envs.world import Evaluation, Observation, StepResult, Task, TaskWorld, check_split, message

SYSTEM = (
    "Solve the problem. Think first, then write the answer, and nothing else, between <answer> and"
    " </answer>."
)
SPLITS = ("train", "dev", "test")
SEEDS = 1_000_000  # per split: reasoning-gym draws question i of a data set with seed + i


class Reasoning(TaskWorld):
    """One question per episode. The seed of `reset` has no effect.

    datasets: names of reasoning-gym's data sets, which share a split equally. n_train, n_dev,
    n_test: questions per split in all; 0 = none. options: arguments of a data set by its name, such
    as {"leg_counting": {"max_animals": 5}}.
    examples: solved questions of the same data set that precede each question as a conversation; no
    split has them.
    seed: selects the questions. partial: use the data set's own score, which may give partial
    credit, instead of 1 for a correct answer and 0 for any other.
    """

    name = "reasoning"

    def __init__(
        self,
        datasets: tuple[str, ...] | list[str] = (
            "basic_arithmetic",
            "leg_counting",
            "spell_backward",
        ),
        options: dict[str, Json] | None = None,
        n_train: int = 96,
        n_dev: int = 48,
        n_test: int = 96,
        seed: int = 0,
        partial: bool = False,
        examples: int = 0,
    ):
        self._datasets, self._options = list(datasets), options or {}
        if unknown := sorted(set(self._options) - set(self._datasets)):
            raise ValueError(f"options name {', '.join(unknown)}, which is not among the datasets")
        self._sizes = dict(zip(SPLITS, (n_train, n_dev, n_test)))
        self._seed, self._partial, self._examples = seed, partial, examples
        self._cache: dict[tuple[str, int, int], Any] = {}

    def tasks(self, split: str) -> list[Task]:
        tasks = []
        for name in self._datasets:
            for i, entry in enumerate(self._dataset(name, split)):
                answer = entry["answer"]
                tasks.append(
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
        return tasks

    def reset(self, task: Task, seed: int = 0) -> Observation:
        if task.origin == "synthetic":
            raise ValueError(
                "reasoning-gym has no synthetic tasks: an episode is one question with nothing to"
                " explore, and only"
                " the questions of its data sets can be checked; set questioning.enabled=False"
            )
        name = task.meta.get("dataset")
        if name not in self._datasets or not 0 <= task.seed < len(
            dataset := self._dataset(name, task.split)
        ):
            raise ValueError(f"no question {task.id!r} in {', '.join(self._datasets)}")
        self._task, self._checker, self._entry = task, dataset, dataset[task.seed]
        self._score, self._over = 0.0, False
        messages = [message("system", SYSTEM)]
        for entry in self._solved(name):
            messages.append(message("user", entry["question"]))
            messages.append(message("assistant", f"<answer>{entry['answer']}</answer>"))
        return Observation([*messages, message("user", self._entry["question"])])

    def step(self, action: str) -> StepResult:
        self._require_episode()
        if not self._over:
            self._over = True
            self._score = self._check(answer_of(action))
        return StepResult(
            [], reward=self.evaluate().score, terminated=True, info={"calls": [], "errors": 0}
        )

    def evaluate(self) -> Evaluation:
        self._require_episode()
        success = self._score >= 1.0
        score = self._score if self._partial else float(success)
        return Evaluation(score, success, {"progress": 1.0 if success else min(self._score, 0.99)})

    def _check(self, answer: str) -> float:
        try:
            score = float(self._checker.score_answer(answer, self._entry))
            return min(max(score, 0.0), 1.0)
        except Exception:  # some checkers raise if the answer is not a number
            return 0.0

    def _dataset(self, name: str, split: str) -> Any:
        check_split(self.name, split, SPLITS)
        size, rest = divmod(self._sizes[split], len(self._datasets))
        size += self._datasets.index(name) < rest
        seed = (self._seed * len(SPLITS) + SPLITS.index(split)) * SEEDS
        return self._questions(name, size, seed)

    def _solved(self, name: str) -> Any:
        """Return the examples of a data set: the last questions of the range of its training
        split."""
        seed = (self._seed * len(SPLITS) + 1) * SEEDS - self._examples
        return self._questions(name, self._examples, seed)

    def _questions(self, name: str, size: int, seed: int) -> Any:
        if not size:
            return []
        if (name, size, seed) not in self._cache:
            create = packages.load("reasoning_gym", "reasoning").create_dataset
            more = self._options.get(name, {})
            self._cache[name, size, seed] = create(name, size=size, seed=seed, **more)
        return self._cache[name, size, seed]


def answer_of(text: str) -> str:
    """Return the text inside the last <answer>...</answer> behind the thought of a turn, or all of
    what it says there if there is none."""
    text = spoken(text)
    _, opened, rest = text.rpartition("<answer>")
    return (rest.partition("</answer>")[0] if opened else text).strip()
