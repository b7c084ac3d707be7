"""CoEvolve (Yang et al., "CoEvolve: Training LLM Agents via Agent-Data Mutual Evolution", arXiv
2604.15840): where rollouts show a weakness, the explorer looks for new tasks.

The paper reports 19.4, 15.6 and 18.1 points more than the base model for Qwen2.5-7B, Qwen3-4B and
Qwen3-30B-A3B, as a mean of AppWorld and BFCL. There a language model explores again and words the
new tasks; here the plug `questioning.explorer` explores the worlds in which the signals arose.

    config.recipe.name = "coevolve"
    config.questioning.every = 8  # steps from one refresh to the next
    config.questioning.refresh = 16  # most new tasks of each
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evolver.build import Run
from evolver.metrics import Metrics
from evolver.recipes import Chosen, Recipe
from evolver.replaying import calls_in
from rl.bounds import Count, Fraction
from rl.trajectory import Trajectory, groups_of

SIGNALS = ("forgotten", "boundary", "rare")


@dataclass(eq=False, kw_only=True)
class CoEvolve(Recipe):
    """Lets each refresh of the invented tasks explore the worlds of signals only.

    window: the latest draws of a task. forgotten: a task was known if at least this share of the
    rollouts of its window succeeded. rare: the share of pairs of calls below which a pair is rare.
    """

    window: Count = 4
    forgotten: Fraction = 0.5
    rare: Fraction = 0.05
    refreshes = True  # the config is checked for it

    def __post_init__(self) -> None:
        self.history: dict[str, list[float]] = {}  # task id -> success in its latest draws
        self.pairs: Counter[str] = Counter()  # "search lend": times of one call after the other
        self.weak: dict[str, str] = {}  # id of the original task -> the signal of it

    def choose(self, run: Run, step: int) -> tuple[Chosen, Metrics]:
        """Return the tasks of a step, after a refresh where one is due."""
        pool = run.tasks.pool
        if pool is None:
            return super().choose(run, step)
        pool.focus, before = list(self.weak), pool.refreshed
        chosen, metrics = super().choose(run, step)
        if pool.refreshed > before:
            self.weak = {}
        return chosen, metrics

    def remember(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> Metrics:
        for (id, _), group in groups_of([t for t in trajectories if not t.broken]).items():
            signal = self.signal(id, group)
            won = [float(t.success) for t in group]
            self.history[id] = [*self.history.get(id, ()), sum(won) / len(won)][-self.window :]
            self.pairs.update(pairs_of(group))
            for name in SIGNALS:
                key = f"coevolve/{name}"
                self.figures[key] = self.figures.get(key, 0.0) + (signal == name)
            if signal:
                self.weak[group[0].task.meta.get("source", id)] = signal
        return super().remember(run, trajectories, step)

    def signal(self, id: str, group: Sequence[Trajectory]) -> str:
        """Return which weakness a group shows, "" if none: a task that was known fails, some of its
        rollouts succeed and others fail, or one fails with a pair of calls that is rare."""
        failed = [t for t in group if not t.success]
        before, share = self.history.get(id, []), len(failed) / len(group)
        if not failed:
            return ""
        if before and sum(before) / len(before) >= self.forgotten > 1 - share:
            return "forgotten"
        if share < 1:
            return "boundary"
        few = self.rare * self.pairs.total()
        rare = any(0 < self.pairs[pair] < few for pair in pairs_of(failed))
        return "rare" if rare else ""

    def state(self) -> Any:
        return {"history": self.history, "pairs": dict(self.pairs), "weak": self.weak}

    def load_state(self, state: Any) -> None:
        self.history, self.weak = state["history"], state["weak"]
        self.pairs = Counter(state["pairs"])


def pairs_of(trajectories: Sequence[Trajectory]) -> Iterator[str]:
    """Yield the pairs of names of successive calls of rollouts."""
    for trajectory in trajectories:
        calls = calls_in(turn.action for turn in trajectory.turns)
        yield from (f"{a.name} {b.name}" for a, b in itertools.pairwise(calls))
