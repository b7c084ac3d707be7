"""Judges that score synthetic tasks by asking a language model (section 3.4 of the AgentEvolver
paper).

There are three, as in the paper's ablation: Naive sees the task and the trajectory, Principle also
sees how to score, and Reference also sees the actions that solved the task when it was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from envs.world import Evaluation
from evolver.llm.answers import Schema, record, string
from evolver.llm.prompts import prompt
from evolver.llm.questions import ChatError, Question
from evolver.parts import Parts
from evolver.questioning import OutcomeJudge, is_verified
from evolver.transcripts import exchanges_of, quoted, rules_of, shortened, tool_list, transcript
from rl.trajectory import Trajectory


def _whole(*scores: int) -> Schema:
    """Return the schema of a judgement. A score of 1 is refused: the model may mean it on a scale
    from 0 to 1."""
    return record(
        analysis=string(2000),
        score={"type": "integer", "enum": [score for score in scores if score != 1]},
    )


class Naive(OutcomeJudge):
    """Scores trajectories by asking a chat role about all of them at once."""

    roles, prompts = ("judge",), ("outcome_naive",)
    schema = _whole(*range(101))

    def __init__(self, parts: Parts):
        self.chat, self.max_chars = parts.chat, parts.max_chars
        self._counts: Counter[str] = Counter()

    def score(self, trajectories: Sequence[Trajectory]) -> list[Evaluation | str]:
        """Return one evaluation per trajectory, or why there is none. Raises RunEnds."""
        results: list[Evaluation | str] = []
        for trajectory, answer in zip(
            trajectories, self.chat.ask([self.question(t) for t in trajectories])
        ):
            self._counts["judged"] += 1
            if isinstance(answer, ChatError):
                self._counts["unanswered"] += 1
                results.append(str(answer))
            else:
                score = answer.parsed["score"] / 100
                components = {"judged": score}
                if is_verified(trajectory.task):
                    components["verified"] = float(trajectory.reached.success)
                    self._counts["agreed"] += (score > 0.5) == trajectory.reached.success
                    self._counts["verified"] += 1
                results.append(Evaluation(score, score > 0.5, components))
        return results

    def question(self, trajectory: Trajectory) -> Question:
        """Return the question about one trajectory."""
        return self._question(self.prompts[0], trajectory)

    def _question(self, name: str, trajectory: Trajectory, **slots: str) -> Question:
        text, steps = prompt(name), transcript(exchanges_of(trajectory), self.max_chars)
        slots |= {
            "task": quoted(trajectory.task.query),
            "steps": steps,
            "count": str(len(trajectory.turns)),
        }
        slots["tools"] = tool_list(trajectory.tools, 2 * self.max_chars)
        return Question(self.roles[0], text.messages(**slots), self.schema, text.version)

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call. `agreed_rate` compares with the world's own
        evaluation, for tasks that the world can check."""
        counts, self._counts = self._counts, Counter()
        figures = {
            f"questioning/judge/{name}": float(counts[name]) for name in ("judged", "unanswered")
        }
        if counts["verified"]:
            figures["questioning/judge/agreed_rate"] = counts["agreed"] / counts["verified"]
        return figures


class Principle(Naive):
    """Also tells the model how to score."""

    prompts = ("outcome_principle",)
    schema = _whole(*range(41), *range(60, 101))

    def question(self, trajectory: Trajectory) -> Question:
        return self._question(self.prompts[0], trajectory, rules=self._rules(trajectory))

    def _rules(self, trajectory: Trajectory) -> str:
        return quoted(rules_of(trajectory.messages, 2 * self.max_chars))


class Reference(Principle):
    """Also shows the model the task's reference solution, if there is one, with the expected
    answer."""

    prompts = ("outcome_principle", "outcome_reference")  # the first for a task without a reference

    def question(self, trajectory: Trajectory) -> Question:
        task = trajectory.task
        if not task.reference:
            return super().question(trajectory)
        known = [shortened(action, self.max_chars) for action in task.reference]
        if task.meta.get("answer"):
            known.append(
                f"The answer to the question is: {shortened(str(task.meta['answer']), self.max_chars)}"
            )
        solution = quoted("\n".join(known))
        return self._question(
            "outcome_reference", trajectory, rules=self._rules(trajectory), reference=solution
        )
