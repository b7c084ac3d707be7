"""Self-navigating by language models: extraction, validation, re-ranking and rewriting of
experience (section 4 of the AgentEvolver paper; thresholds of ReMe, arXiv 2512.10696)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evolver.llm.answers import UNFIT, unfit
from evolver.llm.client import ChatError, Question
from evolver.llm.prompts import prompt
from evolver.llm.schemas import INTEGER, NUMBER, Schema, array, record, string
from evolver.navigating import Extractor, Refiner
from evolver.navigating.experience import Experience, new_experience
from evolver.navigating.extract import learnable_groups
from evolver.parts import Parts
from evolver.transcripts import exchanges_of, quoted, transcript, without_experience
from rl.bounds import Fraction
from rl.trajectory import Trajectory

MOST = 2  # experiences from one task
_REASON, _WHEN, _CONTENT = string(300), string(400), string(800)
EXTRACTION = record(experiences=array(record(when=_WHEN, content=_CONTENT), MOST))
# characters of an action or observation that validation sees: enough to tell what was done and
# refused
ABRIDGED = 200
REFUSED = ("surplus", *UNFIT)  # reasons to refuse an experience


class LlmExtractor(Extractor):
    """Makes experiences from the best success and the worst failure of each task, and validates
    them.

    It also learns from tasks whose attempts all failed.
    """

    roles, prompts = ("summariser",), ("extract", "validate")
    reads_labels = False

    def __init__(self, parts: Parts, *, valid: Fraction = 0.5):
        """valid: least score of the validation, 0 = no validation."""
        self.chat, self.max_chars = parts.chat, parts.max_chars
        self.splits, self.valid = parts.splits, valid
        self._counts: Counter[str] = Counter()

    def extract(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Experience]:
        """Return the valid experiences. Raises ValueError for a task of another split, and
        RunEnds."""
        groups = [
            _extremes(group) for group in learnable_groups(trajectories, self.splits).values()
        ]
        drafts: list[tuple[list[Experience], list[Trajectory]]] = []
        for group, answer in zip(
            groups, self.chat.ask([self._extraction(group) for group in groups])
        ):
            if isinstance(answer, ChatError):
                self._counts["unanswered"] += 1
            elif experiences := self._fit(answer.parsed["experiences"], group, step):
                drafts.append((experiences, group))
        return (
            self._validated(drafts)
            if self.valid
            else [e for experiences, _ in drafts for e in experiences]
        )

    def _fit(
        self, entries: Sequence[dict[str, str]], group: Sequence[Trajectory], step: int
    ) -> list[Experience]:
        """Return the experiences of an answer whose text is fit for a prompt, and count the
        others."""
        self._counts["unfit/surplus"] += len(entries[MOST:])
        task, experiences = group[0].task, []
        observations = [
            observation for trajectory in group for _, observation in exchanges_of(trajectory)
        ]
        for entry in entries[:MOST]:
            when, content = entry["when"].strip(), entry["content"].strip()
            if problem := unfit(when, task.query, observations) or unfit(
                content, task.query, observations
            ):
                self._counts[f"unfit/{problem}"] += 1
            else:
                experiences.append(new_experience(when, content, sources=[task.id], step=step))
        return experiences

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        names = ("unanswered", "invalid", "misscored", *(f"unfit/{problem}" for problem in REFUSED))
        return {f"navigating/{name}": float(counts[name]) for name in names}

    def _validated(
        self, drafts: Sequence[tuple[list[Experience], list[Trajectory]]]
    ) -> list[Experience]:
        """Return the experiences that score enough; one question is about all those of a task.
        Experiences that could not be scored are left out."""
        kept = []
        for (experiences, _), answer in zip(
            drafts, self.chat.ask([self._validation(*draft) for draft in drafts])
        ):
            if isinstance(answer, ChatError):
                self._counts["unanswered"] += 1
                continue
            scores = {verdict["number"]: verdict["score"] for verdict in answer.parsed["verdicts"]}
            told = [verdict["number"] for verdict in answer.parsed["verdicts"]]
            numbered = sorted(told) == list(
                range(1, len(experiences) + 1)
            )  # else all its numbers may be shifted
            for number, experience in enumerate(experiences, 1):
                if not (
                    numbered and 0 <= scores[number] <= 1
                ):  # on another scale most scores would pass
                    self._counts["misscored"] += 1
                elif scores[number] >= self.valid:
                    kept.append(experience)
                else:
                    self._counts["invalid"] += 1
        return kept

    def _extraction(self, group: Sequence[Trajectory]) -> Question:
        return self._question("extract", EXTRACTION, group, self.max_chars, most=str(MOST))

    def _validation(
        self, experiences: Sequence[Experience], group: Sequence[Trajectory]
    ) -> Question:
        shown = min(self.max_chars, ABRIDGED)
        verdicts = array(record(number=INTEGER, reason=_REASON, score=NUMBER), len(experiences))
        return self._question(
            "validate", record(verdicts=verdicts), group, shown, experiences=listed(experiences)
        )

    def _question(
        self, name: str, schema: Schema, group: Sequence[Trajectory], shown: int, **slots: str
    ) -> Question:
        text = prompt(name)
        attempts = "\n\n".join(
            f"=== ATTEMPT {n}: {'success' if t.evaluation.success else 'failure'}, score {t.outcome:.2f}\n"
            + transcript(without_experience(t), shown)
            for n, t in enumerate(group, 1)
        )
        messages = text.messages(task=quoted(group[0].task.query), attempts=attempts, **slots)
        return Question(self.roles[0], messages, schema, text.version)


def listed(experiences: Sequence[Experience]) -> str:
    """Return experiences as a numbered list. No line of theirs can pass for another entry."""
    entries = [f"{n}. {e.when}\n{e.content}".splitlines() for n, e in enumerate(experiences, 1)]
    return quoted("\n".join("\n   ".join(lines) for lines in entries))


def _extremes(group: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the success in the fewest turns and the failure with the lowest outcome, if there are
    any."""
    solved = sorted(
        (t for t in group if t.evaluation.success), key=lambda t: (len(t.turns), t.rollout)
    )
    failed = sorted(
        (t for t in group if not t.evaluation.success),
        key=lambda t: (t.outcome, -len(t.turns), t.rollout),
    )
    return [*solved[:1], *failed[:1]]


class Reranker(Refiner):
    """Asks a model which of the retrieved experiences fit the task. Without an answer, the best
    candidates are used."""

    roles, prompts = ("reranker",), ("rerank",)
    candidates = 3
    rewrites = False

    def __init__(self, parts: Parts):
        self.chat = parts.chat
        self._counts: Counter[str] = Counter()

    def refine(
        self, queries: Sequence[str], candidates: Sequence[Sequence[Experience]], top_k: int
    ) -> list[list[Experience]]:
        asked = [n for n, experiences in enumerate(candidates) if experiences]
        questions = [self._question(queries[n], candidates[n], top_k) for n in asked]
        answers = dict(zip(asked, self.chat.ask(questions)))
        self._counts["refined"] += len(asked)
        return [
            self._chosen(queries[n], retrieved, answers.get(n), top_k)
            for n, retrieved in enumerate(candidates)
        ]

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        return {
            f"navigating/{name}": float(counts[name])
            for name in ("refined", "unrefined", "unrewritten", "surplus")
        }

    def _question(self, query: str, candidates: Sequence[Experience], top_k: int) -> Question:
        text = prompt(self.prompts[0])
        messages = text.messages(
            task=quoted(query), experiences=listed(candidates), most=str(top_k)
        )
        content = _CONTENT if self.rewrites else string(0)
        schema = record(chosen=array(record(number=INTEGER, content=content), top_k))
        return Question(self.roles[0], messages, schema, text.version)

    def _chosen(
        self, query: str, candidates: Sequence[Experience], answer: Any, top_k: int
    ) -> list[Experience]:
        """Return what an answer chose from the candidates. An answer with a number that does not
        exist is ignored, because all its numbers may be shifted."""
        chosen = [] if answer is None or isinstance(answer, ChatError) else answer.parsed["chosen"]
        refused = isinstance(answer, ChatError) or not all(
            1 <= e["number"] <= len(candidates) for e in chosen
        )
        self._counts["unrefined"] += refused
        if answer is None or refused:
            return list(candidates[:top_k])
        first = {}
        for entry in chosen:
            first.setdefault(entry["number"], entry["content"].strip())
        kept = list(first.items())[:top_k]
        self._counts["surplus"] += len(chosen) - len(kept)
        return [self._worded(query, candidates[n - 1], content) for n, content in kept]

    def _worded(self, query: str, experience: Experience, content: str) -> Experience:
        """Return the experience in the words of the answer, or in its own if they are unfit."""
        if not self.rewrites:
            return experience
        problem = unfit(content, query)
        self._counts["unrewritten"] += bool(problem)
        return experience if problem else replace(experience, content=content)


class Rewriter(Reranker):
    """Also rewrites the chosen experiences for the task at hand."""

    prompts, rewrites = ("rewrite",), True
