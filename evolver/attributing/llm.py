"""Turn labels by a language model: one question per trajectory, whose answer labels each of its
turns (ADCA, section 5.1 of the AgentEvolver paper).

The judge abstains if a question stays unanswered or its answer numbers a step that does not exist,
and on turns that the answer omits, labels in two different ways or is unsure of.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

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
from evolver.llm.answers import INTEGER, array, record, string
from evolver.llm.prompts import prompt
from evolver.llm.questions import ChatError, Question
from evolver.parts import Parts
from evolver.transcripts import exchanges_of, quoted, rules_of, tool_list, transcript
from rl.trajectory import Trajectory

VALUES = {"GOOD": GOOD, "BAD": BAD, "UNSURE": ABSTAIN}
_STEP = record(step=INTEGER, analysis=string(400), label={"enum": list(VALUES)})
_MISNUMBERED = "the judge graded a step that does not exist"
_CONTRADICTED = "the judge gave two different labels"
_OMITTED = "the judge omitted the turn"
_PROBLEMS = {_MISNUMBERED: "misnumbered", _CONTRADICTED: "contradicted", _OMITTED: "omitted"}
_REASON = 200  # characters of an analysis that are kept as the reason of a label


class LlmJudge(TurnJudge):
    """Labels trajectories by asking a chat role about all of them at once."""

    roles = ("step_judge",)
    prompts = ("step_judge",)
    concurrency = 8

    def __init__(self, parts: Parts, *, skip_flat: bool = False):
        """skip_flat: abstain, without asking, on groups whose outcomes are all equal."""
        self.chat = parts.chat
        self.max_chars = parts.max_chars
        self.skip_flat = skip_flat
        # trajectories left unanswered, and turns that an answer left without a label, by reason
        self.meter = meter_of("unanswered", *_PROBLEMS.values())

    def label(self, trajectories: Sequence[Trajectory]) -> list[list[Label]]:
        """Return one list per trajectory with one label per turn. Raises RunEnds."""
        skipped = reasons_to_skip(trajectories, self.skip_flat)
        labels = [[Label(ABSTAIN, why)] * len(t.turns) for t, why in zip(trajectories, skipped)]
        asked = [n for n, t in enumerate(trajectories) if t.turns and not skipped[n]]
        for n, answer in zip(asked, self.chat.ask([self.question(trajectories[n]) for n in asked])):
            if isinstance(answer, ChatError):
                self.meter.count("unanswered")
                labels[n] = [Label(ABSTAIN, "the judge gave no usable answer")] * len(labels[n])
                continue
            labels[n] = read_labels(answer.parsed, len(labels[n]))
            for label in labels[n]:
                if label.reason in _PROBLEMS:
                    self.meter.count(_PROBLEMS[label.reason])
        self.meter.count("skipped", len(trajectories) - len(asked))
        count_labels(self.meter, labels)
        return labels

    def question(self, trajectory: Trajectory) -> Question:
        """Return the question about one trajectory."""
        limit = self.max_chars
        won = trajectory.success or trajectory.outcome > 0.5
        return prompt("step_judge").question(
            "step_judge",
            record(steps=array(_STEP, len(trajectory.turns))),
            None,
            trajectory.name,
            task=quoted(trajectory.task.query),
            rules=quoted(rules_of(trajectory.messages, 2 * limit)),
            tools=tool_list(trajectory.tools, 2 * limit),
            steps=transcript(exchanges_of(trajectory), limit),
            count=str(len(trajectory.turns)),
            score=f"{trajectory.outcome:.2f} of 1",
            sign="positive" if won else "negative",
        )


def read_labels(answer: dict[str, Any], count: int) -> list[Label]:
    """Return the labels of `count` turns, numbered from 1 in a judge's answer.

    If it numbers a step that does not exist, all its numbers may be shifted, so it labels nothing.
    """
    labels: dict[int, Label] = {}
    for entry in answer["steps"]:
        step = entry["step"]
        value = VALUES[entry["label"].upper()]
        if not 1 <= step <= count:
            return [Label(ABSTAIN, _MISNUMBERED)] * count
        reason = textwrap.shorten(entry["analysis"], _REASON, placeholder=" ...")
        if labels.setdefault(step, Label(value, reason)).value != value:
            labels[step] = Label(ABSTAIN, _CONTRADICTED)
    return [labels.get(k, Label(ABSTAIN, _OMITTED)) for k in range(1, count + 1)]
