"""Self-navigating by language models: extraction, validation, and the re-ranking and rewriting of what is retrieved
(section 4 of the AgentEvolver paper; thresholds of ReMe, arXiv 2512.10696)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evolver.llm import Chat, ChatError, Question
from evolver.navigating.experience import Experience, new_experience
from evolver.navigating.extract import groups_of
from evolver.navigating.memory import Navigating
from evolver.prompts import prompt
from evolver.traces import steps_of, transcript
from rl.trajectory import Trajectory


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}
FOUND = _object(experiences={"type": "array", "items": _object(when=_TEXT, content=_TEXT, confidence=_NUMBER)})
VERDICT = _object(reason=_TEXT, score=_NUMBER)
CHOICE = _object(chosen={"type": "array", "items": _object(number={"type": "integer"}, content=_TEXT)})
_REWRITE = (
    "Write each chosen one anew for this task: say what matters here, in at most three sentences, and leave out what"
    " does not apply. That text is its content."
)
_KEEP = "Leave the content of each chosen one empty: it is used as it stands."


class LlmExtractor:
    """Experiences of trajectories: from the best success and the worst failure of each task, validated.

    It takes the place of `extract` in Navigating. A task whose attempts all failed teaches too.
    """

    def __init__(
        self,
        chat: Chat,
        *,
        role: str = "summariser",
        most: int = 2,
        valid: float = 0.5,
        shown: int = 2000,
        splits: Sequence[str] = ("train",),
    ):
        """`most`: experiences of one task; `valid`: least score of the validation, 0 = none; `shown`: characters of
        an action or observation that is shown; `splits`: see `extract`."""
        self.chat, self.role, self.most, self.valid, self.shown, self.splits = chat, role, most, valid, shown, splits
        self.counts = {"unanswered": 0, "invalid": 0}

    def __call__(self, trajectories: Sequence[Trajectory], *, step: int = 0, **_: Any) -> list[Experience]:
        """Raises ValueError for a task of another split, and RunEnds."""
        groups = [_telling(group) for group in groups_of(trajectories, self.splits).values()]
        found: list[tuple[Experience, list[Trajectory]]] = []
        for group, answer in zip(groups, self.chat.ask([self._extraction(group) for group in groups])):
            if isinstance(answer, ChatError):
                self.counts["unanswered"] += 1
                continue
            for entry in answer.parsed["experiences"][: self.most]:
                when, content = entry["when"].strip(), entry["content"].strip()
                if when and content:
                    found.append((new_experience(when, content, sources=[group[0].task.id], step=step), group))
        return self._validated(found) if self.valid else [experience for experience, _ in found]

    def _validated(self, found: Sequence[tuple[Experience, list[Trajectory]]]) -> list[Experience]:
        """Those that score enough; what could not be validated is left out."""
        kept = []
        for (experience, _), verdict in zip(found, self.chat.ask([self._validation(*pair) for pair in found])):
            if isinstance(verdict, ChatError):
                self.counts["unanswered"] += 1
            elif verdict.parsed["score"] >= self.valid:
                kept.append(experience)
            else:
                self.counts["invalid"] += 1
        return kept

    def _extraction(self, group: Sequence[Trajectory]) -> Question:
        text = prompt("extract")
        messages = text.messages(task=group[0].task.query, attempts=self._attempts(group), most=str(self.most))
        return Question(self.role, messages, FOUND, text.version)

    def _validation(self, experience: Experience, group: Sequence[Trajectory]) -> Question:
        text = prompt("validate")
        parts = {"when": experience.when, "content": experience.content, "task": group[0].task.query}
        return Question(self.role, text.messages(**parts, attempts=self._attempts(group)), VERDICT, text.version)

    def _attempts(self, group: Sequence[Trajectory]) -> str:
        return "\n\n".join(
            f"=== ATTEMPT {n}: {'success' if t.evaluation.success else 'failure'}, score {t.outcome:.2f}\n"
            + transcript(steps_of(t), self.shown)
            for n, t in enumerate(group, 1)
        )


def _telling(group: Sequence[Trajectory]) -> list[Trajectory]:
    """The success in the fewest steps and the failure with the lowest outcome, as far as there are."""
    solved = sorted((t for t in group if t.evaluation.success), key=lambda t: (len(t.steps), t.rollout))
    failed = sorted((t for t in group if not t.evaluation.success), key=lambda t: (t.outcome, -len(t.steps), t.rollout))
    return [*solved[:1], *failed[:1]]


class LlmNavigating(Navigating):
    """Navigating whose retrieved experiences are chosen, and if wanted rewritten, for the task at hand."""

    def __init__(self, *arguments: Any, chat: Chat, rewrite: bool = True, role: str = "reranker", **options: Any):
        super().__init__(*arguments, **options)
        self.chat, self.role, self.rewrite, self.wanted = chat, role, rewrite, self.k
        self.k = 3 * self.wanted  # candidates

    def retrieve_all(self, queries: Sequence[str]) -> list[list[Experience]]:
        """At most `k` experiences for each query; where the model does not answer, the most similar ones."""
        candidates = super().retrieve_all(queries)
        asked = [n for n, found in enumerate(candidates) if found]
        answers = dict(zip(asked, self.chat.ask([self._question(queries[n], candidates[n]) for n in asked])))
        self._counts["refined"] += len(asked)
        return [self._chosen(found, answers.get(n)) for n, found in enumerate(candidates)]

    def metrics(self) -> dict[str, float]:
        counts = {name: float(self._counts[name]) for name in ("refined", "unrefined")}
        return super().metrics() | {f"navigating/{name}": count for name, count in counts.items()}

    def _question(self, query: str, candidates: Sequence[Experience]) -> Question:
        text = prompt("refine")
        listed = "\n".join(f"{n}. {e.when}\n   {e.content}" for n, e in enumerate(candidates, 1))
        rewriting = _REWRITE if self.rewrite else _KEEP
        messages = text.messages(task=query, experiences=listed, most=str(self.wanted), rewriting=rewriting)
        return Question(self.role, messages, CHOICE, text.version)

    def _chosen(self, candidates: list[Experience], answer: Any) -> list[Experience]:
        if isinstance(answer, ChatError):
            self._counts["unrefined"] += 1
        if answer is None or isinstance(answer, ChatError):
            return candidates[: self.wanted]
        chosen: dict[str, Experience] = {}
        for entry in answer.parsed["chosen"]:
            if 1 <= entry["number"] <= len(candidates) and len(chosen) < self.wanted:
                experience = candidates[entry["number"] - 1]
                content = entry["content"].strip() if self.rewrite else ""
                told = Experience.from_dict(experience.to_dict() | {"content": content or experience.content})
                chosen.setdefault(experience.id, told)
        return list(chosen.values())
