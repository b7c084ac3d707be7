"""Metrics of a step: a flat dict of names and numbers. Values that depend on timing are named
`time/...`."""

import contextlib
import itertools
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from rl.samples import REASONS
from rl.trajectory import StopReason, Trajectory

Metrics = dict[str, Any]
Played = tuple[list[Trajectory], Metrics]  # rollouts, and metrics of them


class Meter:
    """The metrics that a mechanism counts up between two readings. Threads may share one.

    prefix: begins the name of every metric, as "navigating" in "navigating/added". names: metrics
    that are 0 if nothing was counted; those of other names are then left out.
    """

    def __init__(self, prefix: str, *names: str):
        self.prefix = prefix
        self.names = names
        self._lock = threading.Lock()
        self._clear()

    def count(self, name: str, number: float = 1) -> None:
        """Add a number to the sum that is read as `name`."""
        with self._lock:
            self._sums[name] += number

    def average(self, name: str, value: float) -> None:
        """Add a value to the mean that is read as `name`."""
        with self._lock:
            self._sums[name] += value
            self._values[name] += 1

    def read(self) -> Metrics:
        """Return the metrics since the last reading, and start again."""
        with self._lock:
            sums = dict.fromkeys(self.names, 0.0) | self._sums
            figures = {name: total / self._values.get(name, 1) for name, total in sums.items()}
            self._clear()
        return {f"{self.prefix}/{name}": figure for name, figure in figures.items()}

    def _clear(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._values: dict[str, int] = defaultdict(int)


class Mechanism(Protocol):
    """The part that all mechanisms share."""

    roles: tuple[str, ...] = ()  # chat roles that it asks
    meter: Meter = Meter("")  # of its metrics; its own if it counts any

    def metrics(self) -> Metrics:
        """Return metrics since the last call. Of several processes, those whose names end in
        `_rate` are averaged, others are summed."""
        return self.meter.read()


@contextlib.contextmanager
def timed(name: str) -> Iterator[Metrics]:
    """Yield metrics that hold the seconds of the block as time/<name> once it ends."""
    metrics = Metrics()
    began = time.monotonic()
    try:
        yield metrics
    finally:
        metrics[f"time/{name}"] = time.monotonic() - began


def rollout_metrics(
    trajectories: Sequence[Trajectory], fates: Sequence[str | None] = (), worlds: Iterable[str] = ()
) -> Metrics:
    """Return figures of a step's rollouts. Each rollout counts under one `stop/*`, so these sum to
    their number. Successes are those of rollouts that played their task from its start; branches
    have figures of their own.

    fates: why each does not train, None if it does. worlds: those by which to count, too.
    """
    stops = Counter(t.stop for t in trajectories)
    metrics: Metrics = {f"stop/{reason.value}": stops[reason] for reason in StopReason}
    whole = [t for t in trajectories if not t.branched]
    kinds = {
        "": whole,
        "/original": [t for t in whole if t.task.origin == "original"],
        "/synthetic": [t for t in whole if t.task.origin == "synthetic"],
        "/guided": [t for t in whole if t.guided],
        "/unguided": [t for t in whole if not t.guided],
    }
    if len(whole) < len(trajectories):
        kinds["/branched"] = [t for t in trajectories if t.branched]
    counts = Counter((t.task.env, fate or "trained") for t, fate in zip(trajectories, fates))
    for world in worlds:
        kinds[f"/world_{world}"] = [t for t in whole if t.task.env == world]
        for fate in ("trained", *REASONS):
            metrics[f"ledger/{fate}/world_{world}"] = counts[world, fate]
    for suffix, members in kinds.items():
        metrics[f"rollout/count{suffix}"] = len(members)
        if members:
            metrics[f"rollout/success{suffix}"] = mean(t.success for t in members)
            metrics[f"rollout/score{suffix}"] = mean(t.outcome for t in members)
    if shaped := [t.reward for t in trajectories if t.reward is not None]:
        metrics["rollout/reward"] = mean(shaped)
    every_turn = itertools.chain.from_iterable(t.turns for t in trajectories)
    turns = [turn for turn in every_turn if not turn.given]
    generated = [len(turn.completion.tokens) for turn in turns]
    return metrics | {
        "rollout/turns": mean(len(t.turns) for t in trajectories),
        "rollout/tokens": sum(generated),
        "rollout/tokens_per_turn": mean(generated),
        "rollout/restarts": sum(bool(t.restarted) for t in trajectories),
        "rollout/parse_errors": mean(bool(turn.info.get("parse_error")) for turn in turns),
    }


def faults_of(metrics: Metrics) -> Metrics:
    """Return how often something went wrong in a step, by a name for people; without what did not
    happen."""
    names = {
        "world": ("ledger/env_error", "eval/broken"),
        "restarts": ("rollout/restarts",),
        "cancelled": ("ledger/cancelled",),
        "skipped updates": ("skipped",),
        "wrong weights": ("alarm/weights",),
        "replay": ("attributing/errors",),
        "unanswered": (
            "attributing/unanswered",
            "questioning/judge/unanswered",
            "navigating/unanswered",
        ),
        "unwritten": ("llm/unwritten/cache", "llm/unwritten/ledger"),
    }
    counts = {name: sum(metrics.get(key) or 0 for key in keys) for name, keys in names.items()}
    counts["model calls"] = sum(
        value for key, value in metrics.items() if key.startswith("llm/") and "/failures/" in key
    )
    return {name: count for name, count in counts.items() if count}


def mean(values: Iterable[float]) -> float:
    """Return the mean, 0 for no values."""
    values = [float(v) for v in values]
    return math.fsum(values) / len(values) if values else 0.0
