"""Judges that score synthetic tasks by asking a language model (section 3.4 of the AgentEvolver
paper).

There are three, as in the paper's ablation: Naive sees the task and the trajectory, Principle also
sees how to score, and Reference also sees the actions that solved the task when it was made.
"""

from collections.abc import Sequence

from envs.world import Evaluation
from evolver.llm.answers import Schema, record, string
from evolver.llm.prompts import prompt
from evolver.llm.questions import ChatError, Question, Reply
from evolver.metrics import Meter
from evolver.parts import Parts
from evolver.questioning import OutcomeJudge
from evolver.transcripts import exchanges_of, quoted, rules_of, shortened, tool_list, transcript
from rl.bounds import Count
from rl.trajectory import Trajectory

PERCENT = 100  # the best score that a judge can give
_SOLVED = 0.5  # of the best score; more is a success


def judgement(analysis: int, scores: Sequence[int]) -> Schema:
    """Return the schema of a judgement. A score of 1 is refused: the model may mean it on a scale
    from 0 to 1."""
    allowed = [score for score in scores if score != 1]
    return record(analysis=string(analysis), score={"type": "integer", "enum": allowed})


class Naive(OutcomeJudge):
    """Scores trajectories by asking a chat role about all of them at once."""

    roles: tuple[str, ...] = ("judge",)
    prompts: tuple[str, ...] = ("outcome_naive",)
    scores = (*range(PERCENT + 1),)

    def __init__(self, parts: Parts, *, analysis: Count = 2000):
        """analysis: most characters that the judge writes before it scores."""
        self.chat = parts.chat
        self.max_chars = parts.max_chars
        self.schema = judgement(analysis, self.scores)
        self.meter = Meter("questioning/judge", "judged", "unanswered")

    def score(self, trajectories: Sequence[Trajectory]) -> list[Evaluation | str]:
        """Return one evaluation per trajectory, or why there is none. Raises RunEnds."""
        answers = self.chat.ask([self.question(trajectory) for trajectory in trajectories])
        return [self._scored(answer) for answer in answers]

    def _scored(self, answer: Reply | ChatError) -> Evaluation | str:
        self.meter.count("judged")
        if isinstance(answer, ChatError):
            self.meter.count("unanswered")
            return str(answer)
        score = answer.parsed["score"] / PERCENT
        return Evaluation(score, score > _SOLVED, {"judged": score})

    def question(self, trajectory: Trajectory) -> Question:
        """Return the question about one trajectory."""
        return self._question(self.prompts[0], trajectory)

    def _question(self, name: str, trajectory: Trajectory, **slots: str) -> Question:
        return prompt(name).question(
            self.roles[0],
            self.schema,
            None,
            trajectory.name,
            task=quoted(trajectory.task.query),
            steps=transcript(exchanges_of(trajectory), self.max_chars),
            count=str(len(trajectory.turns)),
            tools=tool_list(trajectory.tools, 2 * self.max_chars),
            **slots,
        )


class Principle(Naive):
    """Also tells the model how to score."""

    prompts: tuple[str, ...] = ("outcome_principle",)
    scores = (*range(41), *range(60, PERCENT + 1))  # the rules leave the middle out

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
            answer = shortened(str(task.meta["answer"]), self.max_chars)
            known.append(f"The answer to the question is: {answer}")
        rules = self._rules(trajectory)
        solution = quoted("\n".join(known))
        return self._question(self.prompts[1], trajectory, rules=rules, reference=solution)
