"""Self-attributing: every turn gets a label that says whether it helped (section 5 of the
AgentEvolver paper)."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from evolver.metrics import Mechanism, Meter, Metrics
from rl.trajectory import Trajectory, groups_of

GOOD = 1
BAD = -1
ABSTAIN = 0
JUDGES = {
    "replay": "evolver.attributing.replay:ReplayJudge",
    "llm": "evolver.attributing.llm:LlmJudge",
}


class Label(NamedTuple):
    """The label of one turn. A turn with ABSTAIN keeps the credit of its trajectory's outcome."""

    value: int  # GOOD, BAD or ABSTAIN
    reason: str = ""  # one short sentence, kept in the logs


class TurnJudge(Mechanism, Protocol):
    """Labels the turns of trajectories: the plug `attributing.judge`.

    A class that subclasses this protocol inherits the defaults below and only has to define
    `label`.
    """

    concurrency: int = 1  # groups that may be labelled at a time, each in a thread of its own
    # True if the judge needs outcomes to be the world's own evaluation
    reproduces_outcome: bool = False

    def label(self, trajectories: Sequence[Trajectory]) -> list[list[Label]]:
        """Return one list per trajectory with one label per turn.

        The trajectories of a task are passed together, and several tasks may be passed at once.
        Trajectories are not changed: the caller writes the labels. Abstain where nothing can be
        said, for example if `trajectory.broken`.
        """
        ...

    def metrics(self) -> Metrics:
        """Return metrics since the last call; whoever lacks it is told so before `close`."""
        return super().metrics()

    def close(self) -> None:
        """Release what the judge holds, such as worlds."""


def reasons_to_skip(trajectories: Sequence[Trajectory], skip_flat: bool) -> list[str]:
    """Return why each trajectory gets no labels, "" if it gets some. skip_flat: skip groups with
    equal outcomes."""
    groups = groups_of(trajectories) if skip_flat else {}
    flat = {key for key, group in groups.items() if len({t.outcome for t in group}) == 1}
    reasons = dict.fromkeys(flat, "the group's outcomes are equal")
    ended = "the environment ended the episode"
    return [ended if t.broken else reasons.get(t.group, "") for t in trajectories]


_RATES = {"good_rate": GOOD, "bad_rate": BAD, "abstain_rate": ABSTAIN}


def meter_of(*names: str) -> Meter:
    """Return the meter of a judge: shares of labels, trajectories, those that it skipped, and
    `names`."""
    return Meter("attributing", *_RATES, "trajectories", "skipped", *names)


def count_labels(meter: Meter, labels: Sequence[Sequence[Label]]) -> None:
    """Count trajectories and the labels of their turns."""
    meter.count("trajectories", len(labels))
    for label in itertools.chain.from_iterable(labels):
        for name, value in _RATES.items():
            meter.average(name, label.value == value)
