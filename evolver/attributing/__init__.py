"""Self-attributing: every turn gets a label that says whether it helped (section 5 of the
AgentEvolver paper)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rl.trajectory import Trajectory, groups_of

GOOD, BAD, ABSTAIN = 1, -1, 0
JUDGES = {
    "replay": "evolver.attributing.replay:ReplayJudge",
    "llm": "evolver.attributing.llm:LlmJudge",
}


class Label(NamedTuple):
    """The label of one turn. A turn with ABSTAIN keeps the credit of its trajectory's outcome."""

    value: int  # GOOD, BAD or ABSTAIN
    reason: str = ""  # one short sentence, kept in the logs


class TurnJudge(Protocol):
    """Labels the turns of trajectories: the plug `attributing.judge`.

    A class that subclasses this protocol inherits the defaults below and only has to define
    `label`.
    """

    roles: tuple[str, ...] = ()  # chat roles that the judge asks
    concurrency: int = 1  # groups that may be labelled at a time, each in a thread of its own
    reproduces_outcome: bool = (
        False  # True if the judge needs outcomes to be the world's own evaluation
    )

    def label(self, trajectories: Sequence[Trajectory]) -> list[list[Label]]:
        """Return one list per trajectory with one label per turn.

        The trajectories of a task are passed together, and several tasks may be passed at once.
        Trajectories are not
        changed: the caller writes the labels. Abstain where nothing can be said, for example if
        `trajectory.broken`.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call. Names ending in `_rate` are averaged over hosts,
        others are summed."""
        return {}

    def close(self) -> None:
        """Release what the judge holds, such as worlds."""


def reasons_to_skip(trajectories: Sequence[Trajectory], skip_flat: bool) -> list[str]:
    """Return why each trajectory gets no labels, "" if it gets some. skip_flat: skip groups with
    equal outcomes."""
    groups = groups_of(trajectories) if skip_flat else {}
    flat = {key for key, group in groups.items() if len({t.outcome for t in group}) == 1}
    return [
        "the environment ended the episode"
        if t.broken
        else "the group's outcomes are equal"
        if t.group in flat
        else ""
        for t in trajectories
    ]


def label_rates(counts: Counter) -> dict[str, float]:
    """Return the shares of GOOD, BAD and ABSTAIN as metrics. counts: turns by label value; other
    keys are ignored."""
    names = {"good": GOOD, "bad": BAD, "abstain": ABSTAIN}
    turns = max(sum(counts[value] for value in names.values()), 1)
    return {f"attributing/{name}_rate": counts[value] / turns for name, value in names.items()}
