"""Step labels by counterfactual replay: play the episode again without a step and see what that changes.

The episode is replayed in a world of its own, from the same start, and must first reproduce the evaluation it
had; otherwise the world is not deterministic and every step is abstained on. An episode is worth (success, progress,
wanted minus unwanted changes): "progress" is that of `Evaluation.components` where a world has it, else the score, and
the changes are counted where the world has `difference()` and the task a verifier {"state": rows}.

The later steps are taken as they were, but for two things. One that uses a value (an id, a price) which the replay has
not shown could not have been taken and is left out (`evolver/traces.py`). And an id that the world gives out otherwise
when an earlier call is missing is renamed.

First, in a failed episode, the steps without which it is worth more are taken away: they did harm. Then every other
step is taken away in turn, from the last to the first:

| what is left is worth | label |
|---|---|
| less | GOOD: the step advanced the goal, or prepared or repaired something that did |
| more | BAD: it did harm |
| the same, and the step ended a success | GOOD: it was time to stop |
| the same, and the step ended a failure | BAD if nothing had done harm (too early, or a wrong answer), else abstain |
| the same, and the step produced nothing but errors | BAD |
| the same, in a success, or what is one without the harm | BAD: superfluous; of two equal look-ups it is the second |
| the same, in a failure | abstain: nothing shows whether it would have helped |

A turn that was cut by its token limit never reached the world: BAD. In a failed trajectory a step is GOOD only if it
advanced the goal, as in section 5.1 of the AgentEvolver paper. One exception: where the episode turns on a closing text
that quotes nothing it was shown (a count, a yes), what it was concluded from is unknown, and a look-up is superfluous
only if another one showed the same, else abstained on.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from envs.toolcalls import parse
from envs.world import Evaluation, Task, World
from evolver.traces import broken, opening_words, played, text_of, values_needed, words
from rl.trajectory import Trajectory

GOOD, BAD, ABSTAIN = 1, -1, 0
_WORD = re.compile(r"\w+")


class ReplayJudge:
    """Labels trajectories in a world of its own; the worlds that play live episodes are never touched."""

    def __init__(self, make_world: Callable[[], World], *, skip_flat: bool = False, max_replayed: int = 2000):
        """`skip_flat` abstains on groups whose outcomes are all equal; `max_replayed` bounds the environment steps
        spent on one trajectory, and the steps it leaves unjudged are abstained on."""
        self._make_world = make_world
        self._world: World | None = None
        self.skip_flat = skip_flat
        self.max_replayed = max_replayed
        self._counts: Counter[str] = Counter()

    def label(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """One list per trajectory, one label per step: GOOD 1, BAD -1, ABSTAIN 0."""
        groups: dict[str, list[int]] = {}
        for n, trajectory in enumerate(trajectories):
            groups.setdefault(trajectory.task.id, []).append(n)
        labels: list[list[int]] = [[] for _ in trajectories]
        for members in groups.values():
            flat = len({trajectories[n].outcome for n in members}) == 1
            episodes: list[_Episode] = []  # one, or none before the first replay
            for n in members:
                labels[n] = self._label(trajectories[n], episodes, skip=flat and self.skip_flat)
        return labels

    def metrics(self) -> dict[str, float]:
        """Figures since the last call: shares of labels, trajectories abstained on by reason, environment steps."""
        counts, self._counts = self._counts, Counter()
        steps = max(counts["good"] + counts["bad"] + counts["abstain"], 1)
        figures = {f"attributing/{name}_rate": counts[name] / steps for name in ("good", "bad", "abstain")}
        names = ("trajectories", "not_reproduced", "skipped", "errors", "over_budget", "replayed_steps")
        return figures | {f"attributing/{name}": float(counts[name]) for name in names}

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    def _label(self, trajectory: Trajectory, episodes: list[_Episode], *, skip: bool) -> list[int]:
        labels = [ABSTAIN] * len(trajectory.steps)
        self._counts["trajectories"] += 1
        if skip or broken(trajectory):
            self._counts["skipped"] += 1
        elif trajectory.steps:
            try:
                labels = self._replay(trajectory, episodes)
            except Exception as error:  # a world that breaks costs its trajectory's labels, not the run
                self._counts["errors"] += 1
                logging.warning(
                    "replay of task %s failed, no labels: %s: %s", trajectory.task.id, type(error).__name__, error
                )
                self.close()
                episodes.clear()
        for label in labels:
            self._counts["abstain" if label == ABSTAIN else "good" if label == GOOD else "bad"] += 1
        return labels

    def _replay(self, trajectory: Trajectory, episodes: list[_Episode]) -> list[int]:
        if self._world is None:
            self._world = self._make_world()
        if not episodes:
            episodes.append(_Episode(self._world, trajectory.task))
        (episode,) = episodes
        before = episode.replayed
        labels, reproduced, over_budget = _judge(trajectory, episode, self.max_replayed)
        self._counts["replayed_steps"] += episode.replayed - before
        self._counts["not_reproduced"] += not reproduced
        self._counts["over_budget"] += over_budget
        return labels


def label(trajectory: Trajectory, make_world: Callable[[], World]) -> list[int]:
    """Labels of one trajectory: GOOD 1, BAD -1, ABSTAIN 0 for each step."""
    judge = ReplayJudge(make_world)
    try:
        return judge.label([trajectory])[0]
    finally:
        judge.close()


def _judge(trajectory: Trajectory, episode: _Episode, max_replayed: int) -> tuple[list[int], bool, bool]:
    """Labels, whether the replay came to the same end, and whether the bound cut it short."""
    steps = played(trajectory)
    cut_turns = [BAD] * (len(trajectory.steps) - len(steps))
    actions = [step.action for step in steps]
    texts = [text_of(step.observation) for step in steps]
    needed = values_needed(actions, [words(text) for text in texts], episode.opening)
    moves = [_Move(*parts) for parts in zip(actions, needed, texts, strict=True)]
    limit = episode.replayed + max_replayed
    nodes = episode.walk(moves)
    if len(nodes) != len(moves) or not _same(episode.end(moves).evaluation, trajectory.evaluation):
        return [ABSTAIN] * len(trajectory.steps), False, False
    labels = _Labels(moves, nodes, episode, limit)
    return labels.give(trajectory.evaluation.success) + cut_turns, True, labels.cut


class _Labels:
    """The labels of one trajectory while they are given."""

    def __init__(self, moves: list[_Move], nodes: list[_Node], episode: _Episode, limit: int):
        self.moves, self.nodes, self.episode, self.limit = moves, nodes, episode, limit
        self.labels = [ABSTAIN] * len(moves)
        self.kept = list(range(len(moves)))
        self.value = episode.end(moves).value
        self.untraced = False  # whether the episode turns on a text that quotes nothing
        self.cut = False

    def give(self, success: bool) -> list[int]:
        harm = not success and self._take_harm_away()
        for k in reversed(self.kept[:]):
            left, without = self._without(k)
            if self.cut:
                break
            if without != self.value:
                self.labels[k] = GOOD if without < self.value else BAD
                self.untraced |= (
                    without < self.value and not self.moves[k].needed and not parse(self.moves[k].action).calls
                )
            else:
                self.labels[k] = self._superfluous(k, success, harm)
            if without > self.value or (without == self.value and self.value[0] and self.labels[k] != ABSTAIN):
                self.kept, self.value = left, without
        return self.labels

    def _take_harm_away(self) -> bool:
        """Label and remove the steps without which a failure is worth more; whether there were any."""
        found = False
        k = len(self.kept) - 1
        while k >= 0 and not self.cut:
            if k in self.kept:
                left, without = self._without(k)
                if not self.cut and without > self.value:
                    self.labels[k], self.kept, self.value, found = BAD, left, without, True
                    k = len(self.moves)
            k -= 1
        return found

    def _superfluous(self, k: int, success: bool, harm: bool) -> int:
        """The label of a step without which the episode is worth the same."""
        if self.nodes[k].ended:
            return GOOD if success else ABSTAIN if harm else BAD
        if self.nodes[k].failed:
            return BAD
        told = any(j != k and self.moves[j].shown == self.moves[k].shown for j in self.kept)
        return BAD if self.value[0] and (told or not self.untraced) else ABSTAIN

    def _without(self, k: int) -> tuple[list[int], tuple]:
        """The steps that are left without step k, and what the episode is worth then."""
        self.cut |= self.episode.replayed >= self.limit
        rest = [j for j in self.kept if j != k]
        if self.cut:
            return rest, self.value
        end = self.episode.end([self.moves[j] for j in rest])
        return [j for j, taken in zip(rest, end.taken, strict=True) if taken], end.value


def _same(a: Evaluation, b: Evaluation) -> bool:
    return (a.success, a.score, a.components) == (b.success, b.score, b.components)


@dataclass(frozen=True)
class _Move:
    """A step as it was: what was done, the values it took from earlier observations, and what it was shown."""

    action: str
    needed: tuple[str, ...]
    shown: str


@dataclass
class _Node:
    """An episode after some moves."""

    snapshot: Any  # None where the world has no snapshots
    shown: str = " "  # everything observed so far, as `words`
    ended: bool = False
    failed: bool = False  # the last move produced nothing but errors


@dataclass
class _End:
    """How an episode came out, and which of its moves could be taken."""

    evaluation: Evaluation
    changes: int
    taken: list[bool]

    @property
    def value(self) -> tuple[bool, float, int]:
        """What it is worth: success, progress, wanted minus unwanted changes."""
        progress = self.evaluation.components.get("progress", self.evaluation.score)
        return self.evaluation.success, round(progress, 9), self.changes


class _Episode:
    """Plays moves of one task, remembering how they end and a snapshot after each one walked."""

    def __init__(self, world: World, task: Task):
        self.world, self.task = world, task
        self.replayed = 0
        self.opening = opening_words(world.reset(task, task.seed))
        self._nodes: dict[tuple[_Move, ...], _Node] = {(): _Node(self._snapshot())}
        self._ends: dict[tuple[_Move, ...], _End] = {}

    def walk(self, moves: Sequence[_Move]) -> list[_Node]:
        """Take moves in order, keeping a node after each; fewer than `moves` if the episode ends before them."""
        path, nodes = tuple(moves), []
        for k in range(len(path)):
            if path[: k + 1] not in self._nodes:
                node, _ = self._play(path[:k], path[k : k + 1])
                node.snapshot = self._snapshot()
                self._nodes[path[: k + 1]] = node
            nodes.append(self._nodes[path[: k + 1]])
            if nodes[-1].ended:
                break
        return nodes

    def end(self, moves: Sequence[_Move]) -> _End:
        path = tuple(moves)
        if path not in self._ends:
            known = max(k for k in range(len(path) + 1) if path[:k] in self._nodes)
            _, taken = self._play(path[:known], path[known:])
            self._ends[path] = _End(self.world.evaluate(), self._changes(), [True] * known + taken)
        return self._ends[path]

    def _play(self, known: tuple[_Move, ...], moves: tuple[_Move, ...]) -> tuple[_Node, list[bool]]:
        """Continue from a node; says which of `moves` were taken."""
        start = self._nodes[known]
        node = _Node(None, start.shown, start.ended, start.failed)
        if start.snapshot is None:
            self.world.reset(self.task, self.task.seed)
            for move in known:
                self.world.step(move.action)
            self.replayed += len(known)
        else:
            self.world.restore(start.snapshot)
        renamed: dict[str, str] = {}
        taken = []
        for move in moves:
            taken.append(not node.ended and all(_rename(value, renamed) in node.shown for value in move.needed))
            if taken[-1]:
                result = self.world.step(_rename(move.action, renamed))
                self.replayed += 1
                text = text_of(result.messages)
                renamed |= _renaming(move.shown, text)
                node.shown += words(text)
                node.ended = result.terminated or result.truncated
                node.failed = _only_errors(result.info)
        return node, taken

    def _changes(self) -> int:
        wanted = self.task.verifier.get("state")
        if wanted is None or not hasattr(self.world, "difference"):
            return 0
        return sum(1 if row in wanted else -1 for row in self.world.difference())

    def _snapshot(self) -> Any:
        try:
            return self.world.snapshot()
        except NotImplementedError:
            return None


def _renaming(before: str, after: str) -> dict[str, str]:
    """Words with a digit that stand at the same place in two answers to one call: ids given out otherwise."""
    if before == after:
        return {}
    old, new = _WORD.findall(before), _WORD.findall(after)
    if len(old) != len(new):
        return {}
    pairs = [
        (a, b) for a, b in zip(old, new, strict=True) if a != b and not a.isdigit() and any(c.isdigit() for c in a)
    ]
    return dict(pairs) | {a.lower(): b.lower() for a, b in pairs}


def _rename(text: str, renamed: dict[str, str]) -> str:
    return _WORD.sub(lambda match: renamed.get(match.group(), match.group()), text) if renamed else text


def _only_errors(info: dict[str, Any]) -> bool:
    errors = info.get("errors", 0)
    return bool(info.get("parse_error")) or (errors > 0 and errors >= len(info.get("calls", ())))
