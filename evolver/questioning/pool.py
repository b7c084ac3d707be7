"""The synthetic tasks of a run, how often each is solved, and the tasks of a step: originals and
synthetic ones in a given ratio (eq. 12 of the AgentEvolver paper)."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.probed import probed
from envs.world import Task, World, WorldError
from evolver.questioning.tasks import (
    GUESSABLE,
    SAME_WORDS,
    Duplicates,
    answer_kind,
    answer_of,
    constants,
    infeasibility,
    is_guessable,
    is_verified,
)
from rl.seeds import seed_of

if TYPE_CHECKING:
    from evolver.questioning import Explorer
    from evolver.questioning.words import Words


_LATEST = 1.1  # share of the time up to which rejected tasks are looked at again
_REJECTED = "rejected/"  # begins the names of counts of rejected tasks, before the reason


class TaskPool:
    """Synthetic tasks with their results. Any explorer can fill it (`grow`).

    seeds: the training tasks whose worlds are explored. tasks: {id: task}. results: {id:
    [successes, attempts]}. duplicates: detects tasks that repeat a seed or another task.
    """

    def __init__(
        self, seeds: Sequence[Task], *, overlap: float, capacity: int, tasks: Iterable[Task] = ()
    ):
        """overlap: least Jaccard similarity of two queries that counts as a repetition. capacity:
        most tasks kept. tasks: synthetic tasks to start with. Raises ValueError without seeds."""
        if not seeds:
            raise ValueError(
                "self-questioning explores the worlds of training tasks, and there are none"
            )
        self.seeds = list(seeds)
        self.overlap = overlap
        self.capacity = capacity
        self._counts: Counter[str] = Counter()  # of the exploration
        self._guessed = [0, 0]  # proposals dropped as guessable, and all, up to the last metrics
        self._constants: list[str] = []  # answers that need no call
        self._explorer_state: Any = None  # what Explorer.state() returned last
        self._findings = ""  # what Explorer.findings() returned last
        self.refreshed = 0  # the step that the tasks were last refreshed for
        self.focus: Collection[str] = ()  # ids of the seeds to explore; () = all
        self.watch: Callable[[], None] = lambda: None  # called when something was counted
        self.is_over: Callable[[], bool] = lambda: False  # what explorers ask between walks
        self.spent: Callable[[], float] = lambda: 0.0  # the share of the time that is over
        self._reset(tasks, {})

    def _reset(self, tasks: Iterable[Task], results: dict[str, list[int]]) -> None:
        self.tasks: dict[str, Task] = {}
        self.results: dict[str, list[int]] = {}
        # template -> the answers of its tasks, and the sums of their results
        self._answers: defaultdict[str, list[str]] = defaultdict(list)
        self._by_template: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        # numbers of tasks: by difficulty and kind of answer, by world, by goal with hidden calls
        self._kinds: Counter[str] = Counter()
        self._worlds: Counter[str] = Counter()
        self._rules: Counter[str] = Counter()
        self.duplicates = Duplicates(self.overlap, self.seeds)
        for task in tasks:
            self._add(task)
        for id in self.tasks:
            if id in results:
                self._add_result(id, *results[id])

    def _add(self, task: Task) -> None:
        self.tasks[task.id] = task
        self.duplicates.add(task)
        self._kinds.update((f"difficulty/{task.difficulty}", f"answers/{answer_kind(task)}"))
        self._worlds[task.env] += 1
        if calls := task.meta.get("prerequisites"):
            self._rules[f"{_template(task)} after {', '.join(calls)}"] += 1
        answer = answer_of(task)
        if answer is not None:
            self._answers[_template(task)].append(answer)

    # --- growing ----------------------------------------------------------------------------------

    def grow(
        self, explorer: Explorer, make_world: Callable[[], World], budget: int, seed: int
    ) -> list[Task]:
        """Let `explorer` propose tasks until `budget` of them are kept, or `is_over`; return those.

        Each task is kept at once, so that tasks that were paid for survive if the explorer raises.
        The pool may then have more than its capacity, until `shrink`. If the explorer ends with
        fewer tasks, because there are few starts, those with nearly the words of others are kept
        after all. Raises ValueError for a task that is not synthetic.
        """
        if self._explorer_state is not None and hasattr(explorer, "load_state"):
            explorer.load_state(self._explorer_state)
        rng = random.Random(seed_of(seed, "explore"))
        kept = list[Task]()
        alike = list[Task]()
        seeds = [seed for seed in self.seeds if seed.id in self.focus] or self.seeds
        try:
            with closing(probed(make_world())) as world, closing(probed(make_world())) as checked:
                for task in explorer.explore(world, seeds, budget, rng):
                    reason = self._rejection(checked, task)
                    if reason:
                        self.reject(reason)
                        alike += [task] * (reason == SAME_WORDS)
                    else:
                        self._add(task)
                        self.count(tried=1, accepted=1)
                        kept.append(task)
                    if len(kept) >= budget or self.is_over():
                        break
                for task in alike:
                    if len(kept) >= budget or self.spent() > _LATEST:
                        break
                    if not self._rejection(checked, task, overlap=1.0):
                        self._add(task)
                        self._counts[f"{_REJECTED}{SAME_WORDS}"] -= 1
                        self.count(accepted=1)
                        kept.append(task)
        finally:
            if hasattr(explorer, "state"):
                self._explorer_state = explorer.state()
            if hasattr(explorer, "findings"):
                self._findings = explorer.findings()
        return kept

    def count(self, **times: int) -> None:
        """Add to the counts of the exploration: walks, env_steps, tried, accepted."""
        self._counts.update(times)
        self.watch()

    def counted(self, name: str) -> int:
        """Return a count of the exploration since the last call of `metrics`."""
        return self._counts[name]

    def reject(self, reason: str, *, tried: int = 1) -> None:
        """Count a rejected proposal by reason. tried=0: exploration failed before it made a
        proposal."""
        self._counts.update({"tried": tried, f"{_REJECTED}{reason}": 1})

    def guesses(self, template: str) -> list[str]:
        """Return the answers that must not solve a new task of a template: constant ones, and those
        of its other tasks."""
        return [*self._constants, *self._answers.get(template, ())]

    def rejections(self) -> str:
        """Return a one-line summary of the proposals since the last call of `metrics`, and of what
        the explorer knows of the world."""
        counts = [(name.partition(_REJECTED)[2], n) for name, n in self._counts.most_common()]
        reasons = [f"{n} x {reason}" for reason, n in counts if reason]
        walks = self._counts["walks"]
        kept = self._counts["accepted"]
        rejected = f"rejected: {', '.join(reasons)}" if reasons else "no other was proposed"
        found = f"; {self._findings}" if self._findings else ""
        return f"{walks} walks, {kept} tasks kept, {rejected}{found}"

    def _rejection(self, world: World, task: Task, overlap: float | None = None) -> str:
        """Return why a task is rejected, or "" if it is kept. overlap: in place of the pool's."""
        if task.origin != "synthetic":
            raise ValueError(
                f"the explorer proposed the task {task.id} with origin '{task.origin}',"
                " not 'synthetic'"
            )
        reason = self.duplicates.repeats(task, overlap)
        if reason or not is_verified(task):
            return reason
        try:
            if not self._constants:
                opening = world.reset(task, task.seed)
                self._constants = constants([*opening.tools, *world.functions()])
            reason = infeasibility(world, task)
            guessable = not reason and is_guessable(world, task, self.guesses(_template(task)))
            return GUESSABLE if guessable else reason
        except WorldError:
            return "the world broke"

    def shrink(self) -> None:
        """Remove the tasks with the least learnability, among equals the oldest, until `capacity`
        are left."""
        surplus = len(self.tasks) - self.capacity
        if surplus > 0:
            self._keep_all_but(sorted(self.tasks, key=self.learnability)[:surplus])

    def remove(self, ids: Collection[str], reason: str) -> None:
        """Remove tasks, and count them as rejected."""
        self._counts.update({"accepted": -len(ids), f"{_REJECTED}{reason}": len(ids)})
        self._keep_all_but(ids)

    def _keep_all_but(self, ids: Collection[str]) -> None:
        removed = set(ids)
        kept = [task for id, task in self.tasks.items() if id not in removed]
        self._reset(kept, self.results)

    def reword(self, words: Words, ids: Collection[str], tools: str) -> None:
        """Give the tasks `ids` the queries that `words` chooses. They keep their ids and their
        places."""
        for task in words.reword([self.tasks[id] for id in ids if id in self.tasks], tools):
            self.tasks[task.id] = task
        self._reset(list(self.tasks.values()), self.results)  # `duplicates` knows the queries

    # --- choosing ---------------------------------------------------------------------------------

    def weights(self, synthetic: Sequence[Task]) -> list[float]:
        """Return the weight of each task where those are preferred that are solved sometimes.

        The chance of a template is the mean learnability of its tasks, however many it has: an
        explorer finds few tasks of the kinds that are hard to find, which are no easier to learn.
        """
        templates = [task.meta.get("template", task.id) for task in synthetic]
        times = Counter(templates)
        return [self.learnability(t.id) / times[name] for t, name in zip(synthetic, templates)]

    def record(self, results: Iterable[tuple[str, bool]]) -> None:
        """Count attempts: (task id, success). Ids that are not in the pool are ignored."""
        for id, success in results:
            if id in self.tasks:
                self._add_result(id, bool(success), 1)

    def _add_result(self, id: str, successes: int, attempts: int) -> None:
        total = self._by_template[_template(self.tasks[id])]
        for counts in (self.results.setdefault(id, [0, 0]), total):
            counts[0] += successes
            counts[1] += attempts

    def learnability(self, id: str) -> float:
        """Return 4 p (1 - p) for the estimated success rate p of a task.

        p = (successes + 2 q) / (attempts + 2), where q = (successes + 1) / (attempts + 2) over all
        tasks of the same template. The pool holds more tasks than a run can try twice, so a task's
        own results say little.
        """
        successes = attempts = 0
        if id in self.tasks:
            template = _template(self.tasks[id])
            successes, attempts = self._by_template.get(template, (0, 0))
        prior = (successes + 1) / (attempts + 2)
        successes, attempts = self.results.get(id, (0, 0))
        rate = (successes + 2 * prior) / (attempts + 2)
        return 4.0 * rate * (1.0 - rate)

    # --- metrics and state ------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return exploration counts since the last call, and statistics of the current pool."""
        counts = self._counts
        self._counts = Counter()
        guessable = counts[f"{_REJECTED}{GUESSABLE}"]
        tried = counts["tried"]
        self._guessed[0] += guessable
        self._guessed[1] += tried
        figures = dict.fromkeys(("walks", "env_steps", "tried", "accepted"), 0.0)
        figures.update(counts)
        rates = [won / tried for won, tried in self.results.values() if tried]
        figures["pool"] = len(self.tasks)
        figures["learnable_rate"] = sum(0 < rate < 1 for rate in rates) / max(len(rates), 1)
        figures["hidden_rule_rate"] = self._rules.total() / max(len(self.tasks), 1)
        figures["guessable_rate"] = guessable / max(tried, 1)
        worlds = self._worlds if len(self._worlds) > 1 else {}
        figures |= {f"pool/world_{world}": n for world, n in worlds.items()}
        figures |= self._kinds
        return {f"questioning/{name}": float(figure) for name, figure in figures.items()}

    def card(self) -> str:
        """Return a description of the tasks, in Markdown."""
        tasks = list(self.tasks.values())
        rules = self._rules
        guessable, tried = self._guessed
        rows = {
            "tasks": len(tasks),
            "start states": len({task.meta.get("source") for task in tasks}),
            "combinations of goals": len(set(map(_template, tasks))),
            "calls of the solution": _listed(Counter(task.difficulty for task in tasks)),
            "answers": _listed(Counter(map(answer_kind, tasks))),
            "need a call that the query does not name": f"{rules.total()} of {len(tasks)}",
            "dropped, because a guess solves them": f"{guessable} of {tried} proposals",
        }
        lines = ["# Invented tasks", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in rows.items()]
        lines += ["", "## Goals that need calls which their queries do not name", ""]
        lines += [f"- {rule}: {times} tasks" for rule, times in rules.most_common()] or ["none"]
        return "\n".join(lines) + "\n"

    def state(self) -> dict[str, Any]:
        """Return everything that later calls depend on, as JSON values; the explorer's state is
        part of it.

        The tasks' own dicts are in it, not copies, which nobody changes.
        """
        return {
            "tasks": [vars(task) for task in self.tasks.values()],
            "results": {id: list(pair) for id, pair in self.results.items()},
            "explorer": self._explorer_state,
            "guessed": list(self._guessed),
            "refreshed": self.refreshed,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._explorer_state = state["explorer"]
        self.refreshed = state["refreshed"]
        self._guessed = list(state["guessed"])
        self._reset([Task.from_dict(record) for record in state["tasks"]], state["results"])


def _listed(counts: Counter[Any]) -> str:
    return ", ".join(f"{name}: {counts[name]}" for name in sorted(counts))


def _template(task: Task) -> str:
    return task.meta.get("template", "")


def mixture(
    original: Sequence[Task],
    synthetic: Sequence[Task],
    *,
    step: int,
    n: int,
    share: float,
    seed: int,
    weights: Sequence[float] | None = None,
    original_weights: Sequence[float] | None = None,
) -> list[Task]:
    """Return `n` different tasks for a step, `round(share * n)` of them synthetic, determined by
    `seed` and `step`.

    Tasks come in epochs: each is drawn once before any is drawn again. With `weights` (one per
    synthetic task, not negative) or `original_weights`, those of that kind are drawn in proportion
    to them instead, without replacement. Raises ValueError if there are fewer tasks than needed or
    if `share` is outside [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is the fraction of synthetic tasks, between 0 and 1; got {share}")
    n_synthetic = round(share * n)
    kinds = (
        ("original", original, original_weights, n - n_synthetic),
        ("synthetic", synthetic, weights, n_synthetic),
    )
    for name, tasks, _, needed in kinds:
        if len(tasks) < needed:
            raise ValueError(
                f"a step of {n} tasks with share {share:g} needs {needed} {name} tasks,"
                f" there are {len(tasks)}"
            )
    chosen = []
    for name, tasks, own, needed in kinds:
        if own is None:
            drawn = _in_epochs(len(tasks), needed, step, seed_of(seed, name))
        else:
            drawn = _by_weight(np.asarray(own, float), needed, seed_of(seed, name, step))
        chosen += [tasks[i] for i in drawn]
    order = np.random.default_rng(seed_of(seed, "order", step)).permutation(len(chosen))
    return [chosen[i] for i in order]


def _by_weight(weights_N: np.ndarray, n: int, seed: int) -> list[int]:
    """Draw n indices in proportion to the weights, without replacement; weight 0 comes last.

    Uses the keys of Efraimidis and Spirakis (2006).
    """
    if weights_N.ndim != 1 or not np.all(weights_N >= 0.0):
        raise ValueError("weights must be one number per task, none negative")
    uniform_N = np.random.default_rng(seed).random(len(weights_N))
    keys_N = np.where(weights_N > 0, np.log(uniform_N) / np.maximum(weights_N, 1e-300), -np.inf)
    return [int(i) for i in np.lexsort((uniform_N, keys_N))[::-1][:n]]


def _in_epochs(size: int, n: int, step: int, seed: int) -> list[int]:
    """Return the n indices of `step` when range(size) is drawn in shuffled epochs, n per step, none
    twice in a step."""
    if n == 0:
        return []
    begin = step * n
    first = begin // size
    last = (begin + n - 1) // size
    for epoch in range(last):  # each needs the one before it, and recursion is limited
        _epoch(size, n, epoch, seed)
    epochs = (_epoch(size, n, epoch, seed) for epoch in range(first, last + 1))
    begin -= first * size
    return list(itertools.islice(itertools.chain.from_iterable(epochs), begin, begin + n))


@lru_cache(maxsize=4096)
def _epoch(size: int, n: int, epoch: int, seed: int) -> tuple[int, ...]:
    """Return a permutation of range(size).

    If a step spans two epochs, the permutation of the second starts with indices that the step has
    not drawn yet.
    """
    order = [int(i) for i in np.random.default_rng(seed_of(seed, "epoch", epoch)).permutation(size)]
    begun = (epoch * size) % n
    if epoch == 0 or begun == 0:
        return tuple(order)
    drawn = set(_epoch(size, n, epoch - 1, seed)[size - begun :])
    new = [i for i in order if i not in drawn]
    head = dict.fromkeys(itertools.islice(new, n - begun))
    return (*head, *(i for i in order if i not in head))
