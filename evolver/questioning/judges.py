"""Judges that score synthetic tasks by asking a language model (section 3.4 of the AgentEvolver paper).

There are three, as in the paper's ablation: Naive sees the task and the trajectory, Principle also
sees how to score, and Reference also sees the actions that solved the task when it was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from envs.world import Evaluation
from evolver.llm.client import Chat, ChatError, Question
from evolver.llm.prompts import prompt
from evolver.llm.schemas import TEXT, Schema, record
from evolver.questioning import OutcomeJudge, is_verified
from evolver.traces import exchanges_of, quoted, rules_of, shortened, tool_list, transcript
from rl.trajectory import Trajectory


def _whole(*scores: int) -> Schema:
    """Return the schema of a judgement. A score of 1 is refused: the model may mean it on a scale from 0 to 1."""
    return record(analysis=TEXT, score={"type": "integer", "enum": [score for score in scores if score != 1]})


_PRINCIPLE = (
    "6. A solution is known. Its essential steps must have been done, in whatever form: another way to the same result"
    " counts as well, and a step of the known solution that turned out not to be needed does not count against the"
    " agent.\n"
)


class Naive(OutcomeJudge):
    """Scores trajectories by asking a chat role about all of them at once."""

    roles = ("judge",)
    schema = _whole(*range(101))

    def __init__(self, chat: Chat, shown: int):
        """shown: characters of an action or observation that the judge sees."""
        self.chat, self.shown = chat, shown
        self._counts: Counter[str] = Counter()

    def score(self, trajectories: Sequence[Trajectory]) -> list[Evaluation | str]:
        """Return one evaluation per trajectory, or why there is none. Raises RunEnds."""
        results: list[Evaluation | str] = []
        for trajectory, answer in zip(trajectories, self.chat.ask([self.question(t) for t in trajectories])):
            self._counts["judged"] += 1
            if isinstance(answer, ChatError):
                self._counts["unanswered"] += 1
                results.append(str(answer))
            else:
                score = answer.parsed["score"] / 100
                if is_verified(trajectory.task):
                    self._counts["agreed"] += (score > 0.5) == trajectory.evaluation.success
                    self._counts["verified"] += 1
                results.append(Evaluation(score, score > 0.5, {"judged": score}))
        return results

    def question(self, trajectory: Trajectory) -> Question:
        """Return the question about one trajectory."""
        return self._question("outcome_naive", trajectory)

    def _question(self, name: str, trajectory: Trajectory, **slots: str) -> Question:
        text, steps = prompt(name), transcript(exchanges_of(trajectory), self.shown)
        slots |= {"task": quoted(trajectory.task.query), "steps": steps, "count": str(len(trajectory.turns))}
        slots["tools"] = tool_list(trajectory.tools, 2 * self.shown)
        return Question(self.roles[0], text.messages(**slots), self.schema, text.version)

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call. `agreed_rate` compares with the world's own evaluation, for tasks that
        the world can check."""
        counts, self._counts = self._counts, Counter()
        figures = {f"questioning/judge/{name}": float(counts[name]) for name in ("judged", "unanswered")}
        if counts["verified"]:
            figures["questioning/judge/agreed_rate"] = counts["agreed"] / counts["verified"]
        return figures


class Principle(Naive):
    """Also tells the model how to score."""

    schema = _whole(*range(41), *range(60, 101))
    sees_reference = False

    def question(self, trajectory: Trajectory) -> Question:
        task = trajectory.task
        known = [quoted(shortened(action, self.shown)) for action in task.reference] if self.sees_reference else []
        if known and task.meta.get("answer"):
            known.append(f"The answer to the question is: {shortened(str(task.meta['answer']), self.shown)}")
        solution = "\n".join(known)
        return self._question(
            "outcome_principle",
            trajectory,
            rules=rules_of(trajectory.messages, 2 * self.shown),
            principle_of_reference=_PRINCIPLE if known else "",
            reference=f"\nA SOLUTION THAT IS KNOWN TO WORK\n{solution}\n" if known else "",
        )


class Reference(Principle):
    """Also shows the model the task's reference solution, if there is one, with the expected answer."""

    sees_reference = True
