"""The outcome of synthetic tasks by a language model (section 3.4 of the AgentEvolver paper).

Three judges, of growing knowledge, as in the paper's ablation: "naive" sees task and trajectory, "principle" also how
to score, "reference" also the steps that solved the task when it was made. A trajectory that cannot be judged has no
outcome: it is marked as cancelled, counts for no group and does not train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from envs.world import Evaluation
from evolver.llm import Chat, ChatError, Question
from evolver.prompts import prompt
from evolver.traces import broken, rules_of, shortened, steps_of, transcript
from rl.trajectory import StopReason, Trajectory

KINDS = ("naive", "principle", "reference")
SCHEMA = {
    "type": "object",
    "properties": {"analysis": {"type": "string"}, "score": {"type": "number"}},
    "required": ["analysis", "score"],
    "additionalProperties": False,
}
_PRINCIPLE = (
    "6. A solution is known. Its essential steps must have been done, in whatever form: another way to the same result"
    " counts as well, and a step of the known solution that turned out not to be needed does not count against the"
    " agent.\n"
)


class OutcomeJudge:
    """Scores trajectories of synthetic tasks by asking `role` of a chat client."""

    def __init__(self, chat: Chat, kind: str = "reference", *, role: str = "judge", shown: int = 2000):
        if kind not in KINDS:
            raise ValueError(f"an outcome judge is {', '.join(KINDS)}, not {kind!r}")
        self.chat, self.kind, self.role, self.shown = chat, kind, role, shown
        self._counts: Counter[str] = Counter()

    def judge(self, trajectories: Sequence[Trajectory]) -> None:
        """Write the evaluation of every trajectory whose task is synthetic. Raises RunEnds."""
        asked = [t for t in trajectories if t.task.origin == "synthetic" and not broken(t)]
        for trajectory, answer in zip(asked, self.chat.ask([self.question(t) for t in asked])):
            self._counts["judged"] += 1
            if isinstance(answer, ChatError):
                self._counts["unanswered"] += 1
                trajectory.evaluation = Evaluation(0.0, False)
                trajectory.stop, trajectory.error = StopReason.CANCELLED, f"the outcome was not judged: {answer}"
            else:
                score = min(max(float(answer.parsed["score"]), 0.0), 100.0) / 100
                self._counts["agreed"] += (score > 0.5) == trajectory.evaluation.success
                self._counts["answered"] += 1
                trajectory.evaluation = Evaluation(score, score > 0.5, {"judged": score})

    def question(self, trajectory: Trajectory) -> Question:
        """What is asked about one trajectory."""
        task, steps = trajectory.task, transcript(steps_of(trajectory), self.shown)
        values = {"task": task.query, "steps": steps, "count": str(len(trajectory.steps))}
        text = prompt("outcome_naive" if self.kind == "naive" else "outcome_principle")
        if self.kind != "naive":
            known = "\n".join(shortened(action, self.shown) for action in task.reference)
            held = self.kind == "reference" and bool(known)
            values["rules"] = rules_of(trajectory.messages, 2 * self.shown)
            values["principle_of_reference"] = _PRINCIPLE if held else ""
            values["reference"] = f"\nA SOLUTION THAT IS KNOWN TO WORK\n{known}\n" if held else ""
        return Question(self.role, text.messages(**values), SCHEMA, text.version)

    def metrics(self) -> dict[str, float]:
        """Figures since the last call. `agreed` compares with the task's own verifier, where that says anything."""
        counts, self._counts = self._counts, Counter()
        found = {f"questioning/judge/{name}": float(counts[name]) for name in ("judged", "unanswered")}
        agreed = {"questioning/judge/agreed_rate": counts["agreed"] / counts["answered"]} if counts["answered"] else {}
        return found | agreed
