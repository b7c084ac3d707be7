"""Turn labels by counterfactual replay: play the episode again without a turn and compare the
results.

The episode is replayed from the same start in the judge's own world. The replay must first
reproduce the evaluation of the rollout; otherwise the world is not deterministic and the judge
abstains on every turn. The value of an episode is (success, progress, wanted minus unwanted
changes). "Progress" is the component of that name in `Evaluation.components`, or the score if there
is none. Changes are counted if the world has `difference()` and the task's verifier is {"state":
rows}.

The other turns are replayed as they were, with two exceptions. A turn that uses a value (an id, a
price) which the replay has not shown is skipped, because the agent could not have known it
(`evolver/replaying.py`). An id for which the world hands out another one, because an earlier call
is missing, is renamed.

In a failed episode, turns without which the episode is worth more are harmful and are removed
first. After that, the other turns are left out one at a time, from the last to the first, and
labelled by the value of what remains:

| value without the turn | label |
|---|---|
| lower | GOOD: the turn advanced the goal, or prepared or repaired something that did |
| higher | BAD: the turn did harm |
| equal, and the turn ended a success | GOOD: it was the right time to stop |
| equal, and the turn ended a failure | BAD if no turn did harm (a bad end), else abstain |
| equal, and the turn produced only errors | BAD |
| equal, and what remains succeeds | BAD: superfluous; of two equal look-ups, the second |
| equal, and what remains fails | abstain: nothing shows if the turn would have helped |

A turn that was cut by its token limit never reached the world and is BAD. In a failed trajectory
only turns that advanced the goal are GOOD, as in section 5.1 of the AgentEvolver paper. There is
one exception: if success depends on a closing text that quotes no observation (a count, a "yes"),
the source of the answer is unknown. A look-up is then superfluous only if another one showed the
same, and otherwise the judge abstains on it.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from envs.toolcalls import parse
from envs.world import Evaluation, Task, World, snapshot_of, text_of
from evolver.attributing import (
    ABSTAIN,
    BAD,
    GOOD,
    Label,
    TurnJudge,
    count_labels,
    meter_of,
    reasons_to_skip,
)
from evolver.parts import Parts
from evolver.replaying import (
    executed_text,
    executed_turns,
    opening_words,
    renaming,
    replay,
    values_needed,
)
from evolver.transcripts import words
from rl.bounds import Count
from rl.trajectory import Trajectory, Turn

Value = tuple[bool, float, int]  # of an episode: success, progress, wanted minus unwanted changes
_WORD = re.compile(r"\w+")
_WORTH_MORE = Label(BAD, "the episode is worth more without the turn")


class ReplayJudge(TurnJudge):
    """Labels trajectories in a world of its own; the worlds of running rollouts are never
    touched."""

    reproduces_outcome = True

    def __init__(self, parts: Parts, *, skip_flat: bool = False, max_replayed: Count = 2000):
        """skip_flat: abstain on groups whose outcomes are all equal. max_replayed: environment
        steps that may be spent on one trajectory; the judge abstains on the turns that are left."""
        self._make_world = parts.make_world
        self.skip_flat = skip_flat
        self.max_replayed = max_replayed
        self._world: World | None = None
        # trajectories without labels by reason, and replayed environment steps
        self.meter = meter_of("not_reproduced", "errors", "over_budget", "env_steps")

    def label(self, trajectories: Sequence[Trajectory]) -> list[list[Label]]:
        """Return one list per trajectory with one label per turn."""
        labels = []
        group = None
        episodes = None
        for trajectory, why in zip(trajectories, reasons_to_skip(trajectories, self.skip_flat)):
            self.meter.count("skipped", bool(why))
            row = [Label(ABSTAIN, why)] * len(trajectory.turns)
            if trajectory.turns and not why:
                try:
                    # shared by the group, so that equal beginnings are played once
                    if episodes is None or trajectory.group != group:
                        self._world = self._world or self._make_world()
                        episodes = _Episodes(self._world, trajectory.task)
                        group = trajectory.group
                    row = self._judge(trajectory, episodes)
                except Exception as error:  # only this trajectory loses its labels, the run goes on
                    self.meter.count("errors")
                    name = trajectory.task.id
                    kind = type(error).__name__
                    logging.warning(
                        "replay of task %s failed, no labels: %s: %s", name, kind, error
                    )
                    self.close()
                    episodes = None
                    row = [Label(ABSTAIN, f"the replay failed: {kind}")] * len(row)
            labels.append(row)
        count_labels(self.meter, labels)
        return labels

    def close(self) -> None:
        """Close the world of the judge; the next trajectory gets another one."""
        if self._world is not None:
            self._world.close()
            self._world = None

    def _judge(self, trajectory: Trajectory, episodes: _Episodes) -> list[Label]:
        """Return the labels of the turns of one trajectory."""
        turns = executed_turns(trajectory)
        before = episodes.steps
        texts = [text_of(turn.observation) for turn in turns]
        executed = [executed_text(turn) for turn in turns]
        needed = values_needed(executed, [words(text) for text in texts], episodes.opening)
        moves = [_Move(t.action, values, text) for t, values, text in zip(turns, needed, texts)]
        nodes = list(episodes.walk(moves))
        if len(nodes) == len(moves) and episodes.end(moves).evaluation == trajectory.reached:
            judgement = _Judgement(moves, nodes, episodes, before + self.max_replayed)
            judged = dict(zip(map(id, turns), judgement.label(trajectory.reached.success)))
            labels = [judged.get(id(turn)) or _unplayed(turn) for turn in trajectory.turns]
            self.meter.count("over_budget", judgement.over_budget)
        else:
            why = "the replay did not reproduce the outcome"
            labels = [Label(ABSTAIN, why)] * len(trajectory.turns)
            self.meter.count("not_reproduced")
        self.meter.count("env_steps", episodes.steps - before)
        return labels


def _unplayed(turn: Turn) -> Label:
    """Return the label of a turn that did not reach the world."""
    if turn.info.get("managing"):
        return Label(ABSTAIN, "the turn manages the context, which no replay needs")
    return Label(BAD, "the turn was cut by its token limit")


@dataclass
class _Judgement:
    """Labels the moves of one trajectory. limit: value of `episodes.steps` at which judging
    stops."""

    moves: list[_Move]
    nodes: list[_Node]
    episodes: _Episodes
    limit: int
    unquoted: bool = False  # True if the value depends on a closing text without a quotation
    over_budget: bool = False

    def __post_init__(self) -> None:
        self.labels = [Label(ABSTAIN, "the turn depends on one that did harm")] * len(self.moves)
        self.kept = list(range(len(self.moves)))  # moves that were not removed
        self.value = self.episodes.end(self.moves).value  # of the kept moves

    def label(self, success: bool) -> list[Label]:
        """Return the labels of all moves. success: of the trajectory."""
        harm = not success and self._remove_harm()
        for k in reversed(self.kept[:]):
            rest, value = self._without(k)
            superfluous = False
            if self.over_budget:
                self.labels[k] = Label(ABSTAIN, "the limit of replayed steps was reached")
            elif value < self.value:
                self.labels[k] = Label(GOOD, "the episode is worth less without the turn")
                self.unquoted |= not self.moves[k].needed and not parse(self.moves[k].action).calls
            elif value > self.value:
                self.labels[k] = _WORTH_MORE
            else:
                self.labels[k] = self._label_of_equal(k, success, harm)
                superfluous = self.value[0] and self.labels[k].value != ABSTAIN
            if value > self.value or superfluous:
                self.kept = rest
                self.value = value
        return self.labels

    def _remove_harm(self) -> bool:
        """Label and remove the moves without which a failure is worth more. Return True if there
        were any."""
        left = self.kept[:]
        while left and not self.over_budget:
            k = left.pop()
            rest, value = self._without(k)
            if value > self.value:
                self.labels[k] = _WORTH_MORE
                self.kept = rest
                self.value = value
                left = rest[:]  # without this move, another one may turn out to be harmful
        return len(self.kept) < len(self.moves)

    def _label_of_equal(self, k: int, success: bool, harm: bool) -> Label:
        """Return the label of a move without which the episode is worth the same."""
        if self.nodes[k].ended and success:
            return Label(GOOD, "the turn ended the episode in success")
        if self.nodes[k].ended and harm:
            return Label(ABSTAIN, "the turn ended an episode that had already failed")
        if self.nodes[k].ended:
            return Label(BAD, "the turn ended the episode before the goal was reached")
        if self.nodes[k].failed:
            return Label(BAD, "the turn produced only errors")
        if not self.value[0]:
            why = "in a failed episode, nothing shows if the turn would have helped"
            return Label(ABSTAIN, why)
        if any(j != k and self.moves[j].shown == self.moves[k].shown for j in self.kept):
            return Label(BAD, "another turn showed the same")
        if self.unquoted:
            return Label(ABSTAIN, "the answer may depend on what the turn showed")
        return Label(BAD, "the goal is reached without the turn")

    def _without(self, k: int) -> tuple[list[int], Value]:
        """Return the moves that remain without move k, and the value of the episode then: the
        value with it if the budget is spent."""
        self.over_budget |= self.episodes.steps >= self.limit
        rest = [j for j in self.kept if j != k]
        if self.over_budget:
            return rest, self.value
        end = self.episodes.end([self.moves[j] for j in rest])
        return [j for j, taken in zip(rest, end.taken, strict=True) if taken], end.value


@dataclass(frozen=True)
class _Move:
    """A recorded turn: its action, the values that it took from earlier observations, and its
    observation."""

    action: str
    needed: tuple[str, ...]
    shown: str


_Moves = tuple[_Move, ...]


@dataclass
class _Node:
    """An episode after some moves."""

    snapshot: Any  # None if the world has no snapshots
    shown: str = " "  # all observations so far, as `words`
    ended: bool = False
    failed: bool = False  # True if the last move produced only errors


@dataclass
class _End:
    """The result of playing some moves, and which of them could be taken."""

    evaluation: Evaluation
    value: Value
    taken: list[bool]


@dataclass
class _Episodes:
    """Plays sequences of moves of one task. Results, and a snapshot after each walked move, are
    kept."""

    world: World
    task: Task
    steps: int = 0  # environment steps played

    def __post_init__(self) -> None:
        self.opening = opening_words(self.world.reset(self.task, self.task.seed))
        self._nodes: dict[_Moves, _Node] = {(): _Node(snapshot_of(self.world))}
        self._ends: dict[_Moves, _End] = {}
        self._at: _Moves | None = ()  # the moves that led to where the world is

    def walk(self, moves: Sequence[_Move]) -> Iterator[_Node]:
        """Yield a node for each move, played in order; fewer nodes than moves if the episode ends
        before the last."""
        for k in range(len(moves)):
            path = tuple(moves[: k + 1])
            if path not in self._nodes:
                node, _ = self._continue(path[:k], path[k:])
                if node.ended:  # here the world knows its evaluation already
                    self._ends[path] = self._end([True] * len(path))
                node.snapshot = snapshot_of(self.world)
                self._nodes[path] = node
            yield self._nodes[path]
            if self._nodes[path].ended:
                return

    def end(self, moves: Sequence[_Move]) -> _End:
        """Return the result of playing `moves`, continued from the longest prefix that was
        walked."""
        path = tuple(moves)
        if path not in self._ends:
            known = max(k for k in range(len(path) + 1) if path[:k] in self._nodes)
            _, taken = self._continue(path[:known], path[known:])
            self._ends[path] = self._end([True] * known + taken)
        return self._ends[path]

    def _end(self, taken: list[bool]) -> _End:
        evaluation = self.world.evaluate()
        return _End(evaluation, self._value(evaluation), taken)

    def _continue(self, known: _Moves, moves: _Moves) -> tuple[_Node, list[bool]]:
        """Play `moves` after a walked prefix. Return the node without snapshot, and which moves
        were taken."""
        node = dataclasses.replace(self._nodes[known])
        at = self._at
        self._at = None
        if node.snapshot is not None:
            self.world.restore(node.snapshot)
        elif at != known:  # a world without snapshots may be slow to start again
            replay(self.world, self.task, [move.action for move in known])
            self.steps += len(known)
        renamed: dict[str, str] = {}
        taken = []
        for move in moves:
            values = [_rename(value, renamed) for value in move.needed]
            taken.append(not node.ended and all(value in node.shown for value in values))
            if taken[-1]:
                result = self.world.step(_rename(move.action, renamed))
                self.steps += 1
                text = text_of(result.messages)
                ids = renaming(_WORD.findall(move.shown), _WORD.findall(text), _are_ids)
                renamed |= ids | {old.lower(): new.lower() for old, new in ids.items()}
                node.shown += words(text)
                node.ended = result.terminated or result.truncated
                errors = result.info.get("errors", 0)
                calls = len(result.info.get("calls", ()))
                node.failed = bool(result.info.get("parse_error")) or 0 < errors >= calls
        if all(taken) and not renamed:
            self._at = known + moves
        return node, taken

    def _value(self, evaluation: Evaluation) -> Value:
        wanted = self.task.verifier.get("state")
        changes = 0
        if wanted is not None and hasattr(self.world, "difference"):
            changes = sum(1 if row in wanted else -1 for row in self.world.difference())
        progress = evaluation.components.get("progress", evaluation.score)
        return evaluation.success, round(progress, 9), changes


def _are_ids(old: str, new: str) -> bool:
    return not old.isdigit() and any(c.isdigit() for c in old)


def _rename(text: str, renamed: dict[str, str]) -> str:
    return _WORD.sub(lambda match: renamed.get(match.group(), match.group()), text)
