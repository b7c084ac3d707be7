"""Step labels by a language model: one question per trajectory, an answer for each of its steps (ADCA, section 5.1 of
the AgentEvolver paper).

What cannot be read is no label: a question that stays unanswered, a step that the answer leaves out, names twice in
different ways or is unsure of is abstained on, and keeps the credit of its outcome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from evolver.attributing.replay import ABSTAIN, BAD, GOOD
from evolver.llm import Chat, ChatError, Question
from evolver.prompts import prompt
from evolver.traces import broken, rules_of, steps_of, transcript
from rl.trajectory import Trajectory

LABELS = {"GOOD": GOOD, "BAD": BAD, "UNSURE": ABSTAIN}
SCHEMA = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "step": {"type": "integer"},
                    "analysis": {"type": "string"},
                    "label": {"type": "string", "enum": list(LABELS)},
                },
                "required": ["step", "analysis", "label"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["steps"],
    "additionalProperties": False,
}


class LlmJudge:
    """Labels trajectories by asking `role` of a chat client, all at once. The interface is that of ReplayJudge."""

    def __init__(self, chat: Chat, *, role: str = "step_judge", skip_flat: bool = False, shown: int = 2000):
        """`skip_flat` abstains on groups whose outcomes are all equal, without asking; `shown`: characters of one
        action or observation that the judge sees."""
        self.chat, self.role, self.skip_flat, self.shown = chat, role, skip_flat, shown
        self._counts: Counter[str] = Counter()

    def label(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """One list per trajectory, one label per step: GOOD 1, BAD -1, ABSTAIN 0. Raises RunEnds."""
        outcomes: dict[str, set[float]] = {}
        for trajectory in trajectories:
            outcomes.setdefault(trajectory.task.id, set()).add(trajectory.outcome)
        labels = [[ABSTAIN] * len(t.steps) for t in trajectories]
        asked = []
        for n, trajectory in enumerate(trajectories):
            flat = self.skip_flat and len(outcomes[trajectory.task.id]) == 1
            if trajectory.steps and not flat and not broken(trajectory):
                asked.append(n)
        for n, answer in zip(asked, self.chat.ask([self.question(trajectories[n]) for n in asked])):
            if isinstance(answer, ChatError):
                self._counts["unanswered"] += 1
            else:
                labels[n] = read_labels(answer.parsed, len(labels[n]))
        self._counts.update(trajectories=len(trajectories), skipped=len(trajectories) - len(asked))
        self._counts.update(label for row in labels for label in row)
        return labels

    def question(self, trajectory: Trajectory) -> Question:
        """What is asked about one trajectory."""
        text = prompt("step_judge")
        messages = text.messages(
            task=trajectory.task.query,
            rules=rules_of(trajectory.messages, 2 * self.shown),
            steps=transcript(steps_of(trajectory), self.shown),
            count=str(len(trajectory.steps)),
            score=f"{trajectory.outcome:.2f} of 1",
            sign="positive" if trajectory.evaluation.success or trajectory.outcome > 0.5 else "negative",
        )
        return Question(self.role, messages, SCHEMA, text.version)

    def metrics(self) -> dict[str, float]:
        """Figures since the last call: shares of labels, trajectories not asked about or left unanswered."""
        counts, self._counts = self._counts, Counter()
        steps = max(sum(counts[label] for label in LABELS.values()), 1)
        names = {"good": GOOD, "bad": BAD, "abstain": ABSTAIN}
        figures = {f"attributing/{name}_rate": counts[label] / steps for name, label in names.items()}
        return figures | {f"attributing/{n}": float(counts[n]) for n in ("trajectories", "skipped", "unanswered")}

    def close(self) -> None:
        """Nothing of its own is open."""


def read_labels(answer: dict[str, Any], count: int) -> list[int]:
    """The labels of `count` steps, numbered from 1 in an answer that fits SCHEMA."""
    said: dict[int, set[int]] = {}
    for entry in answer["steps"]:
        said.setdefault(entry["step"], set()).add(LABELS[entry["label"].upper()])
    return [next(iter(found)) if len(found := said.get(k, {ABSTAIN})) == 1 else ABSTAIN for k in range(1, count + 1)]
