"""Self-navigating by language models: extraction, validation, re-ranking and rewriting of experience
(section 4 of the AgentEvolver paper; thresholds of ReMe, arXiv 2512.10696)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evolver.llm.client import Chat, ChatError, Question
from evolver.llm.prompts import prompt
from evolver.llm.schemas import INTEGER, NUMBER, TEXT, array, record
from evolver.navigating import Extractor, Refiner
from evolver.navigating.experience import TAGS, Experience, new_experience
from evolver.navigating.extract import learnable_groups
from evolver.traces import COPIED, exchanges_of, quoted, scripts, transcript, unguided
from rl.bounds import Fraction
from rl.trajectory import Trajectory

EXTRACTION = record(experiences=array(record(when=TEXT, content=TEXT)))
VERDICT = record(reason=TEXT, score=NUMBER)
CHOICE = record(chosen=array(record(number=INTEGER, content=TEXT)))
MOST = 2  # experiences from one task
LONGEST = 1200  # characters of an experience; three sentences have a few hundred
UNFIT = ("surplus", "empty", "long", "marked", "foreign")  # reasons to refuse the text of a model
_REWRITE = (
    "Write each chosen one anew for this task: say what matters here, in at most three sentences, and leave out what"
    " does not apply. That text is its content."
)
_KEEP = "Leave the content of each chosen one empty: it is used as it stands."


class LlmExtractor(Extractor):
    """Makes experiences from the best success and the worst failure of each task, and validates them.

    It also learns from tasks whose attempts all failed.
    """

    roles = ("summariser",)

    def __init__(self, chat: Chat, shown: int, splits: Sequence[str], *, valid: Fraction = 0.5):
        """shown: characters of an action or observation that the model sees. splits: of the tasks that may be learnt
        from. valid: least score of the validation, 0 = no validation."""
        self.chat, self.shown, self.splits, self.valid = chat, shown, splits, valid
        self._counts: Counter[str] = Counter()

    def extract(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Experience]:
        """Return the valid experiences. Raises ValueError for a task of another split, and RunEnds."""
        groups = [_extremes(group) for group in learnable_groups(trajectories, self.splits).values()]
        drafts: list[tuple[Experience, list[Trajectory]]] = []
        for group, answer in zip(groups, self.chat.ask([self._extraction(group) for group in groups])):
            if isinstance(answer, ChatError):
                self._counts["unanswered"] += 1
                continue
            entries = answer.parsed["experiences"]
            self._counts["unfit/surplus"] += len(entries[MOST:])
            for entry in entries[:MOST]:
                when, content = entry["when"].strip(), entry["content"].strip()
                if problem := unfit(when, group[0].task.query) or unfit(content, group[0].task.query):
                    self._counts[f"unfit/{problem}"] += 1
                else:
                    drafts.append((new_experience(when, content, sources=[group[0].task.id], step=step), group))
        return self._validated(drafts) if self.valid else [experience for experience, _ in drafts]

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        names = ("unanswered", "invalid", "misscored", *(f"unfit/{problem}" for problem in UNFIT))
        return {f"navigating/{name}": float(counts[name]) for name in names}

    def _validated(self, drafts: Sequence[tuple[Experience, list[Trajectory]]]) -> list[Experience]:
        """Return the experiences that score enough. Those that could not be scored are left out."""
        kept = []
        for (experience, _), verdict in zip(drafts, self.chat.ask([self._validation(*draft) for draft in drafts])):
            if isinstance(verdict, ChatError):
                self._counts["unanswered"] += 1
            elif not 0 <= verdict.parsed["score"] <= 1:  # on another scale, where most scores would pass
                self._counts["misscored"] += 1
            elif verdict.parsed["score"] >= self.valid:
                kept.append(experience)
            else:
                self._counts["invalid"] += 1
        return kept

    def _extraction(self, group: Sequence[Trajectory]) -> Question:
        return self._question("extract", EXTRACTION, group, most=str(MOST))

    def _validation(self, experience: Experience, group: Sequence[Trajectory]) -> Question:
        return self._question("validate", VERDICT, group, when=experience.when, content=experience.content)

    def _question(self, name: str, schema: dict[str, Any], group: Sequence[Trajectory], **slots: str) -> Question:
        text = prompt(name)
        attempts = "\n\n".join(
            f"=== ATTEMPT {n}: {'success' if t.evaluation.success else 'failure'}, score {t.outcome:.2f}\n"
            + transcript(unguided(exchanges_of(t), t.injected), self.shown)
            for n, t in enumerate(group, 1)
        )
        messages = text.messages(task=quoted(group[0].task.query), attempts=attempts, **slots)
        return Question(self.roles[0], messages, schema, text.version)


def unfit(text: str, query: str) -> str:
    """Return why a model's text cannot become experience for tasks like `query`, one of UNFIT; "" if it can.

    The text is put into prompts, so it must not contain their tags, nor marks that a model copied from an attempt. Its
    language is judged by its script only.
    """
    if not text.strip():
        return "empty"
    if len(text) > LONGEST:
        return "long"
    if TAGS.search(text) or COPIED in text:
        return "marked"
    common, own = scripts(text), scripts(query)
    return "foreign" if common and own and common[0] not in own else ""


def _extremes(group: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the success in the fewest turns and the failure with the lowest outcome, if there are any."""
    solved = sorted((t for t in group if t.evaluation.success), key=lambda t: (len(t.turns), t.rollout))
    failed = sorted((t for t in group if not t.evaluation.success), key=lambda t: (t.outcome, -len(t.turns), t.rollout))
    return [*solved[:1], *failed[:1]]


class Reranker(Refiner):
    """Asks a model which of the retrieved experiences fit the task. Without an answer, the best candidates are used."""

    roles = ("reranker",)
    candidates = 3
    rewrites = False

    def __init__(self, chat: Chat):
        self.chat = chat
        self._counts: Counter[str] = Counter()

    def refine(
        self, queries: Sequence[str], candidates: Sequence[Sequence[Experience]], top_k: int
    ) -> list[list[Experience]]:
        asked = [n for n, experiences in enumerate(candidates) if experiences]
        questions = [self._question(queries[n], candidates[n], top_k) for n in asked]
        answers = dict(zip(asked, self.chat.ask(questions)))
        self._counts["refined"] += len(asked)
        return [self._chosen(queries[n], retrieved, answers.get(n), top_k) for n, retrieved in enumerate(candidates)]

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        return {f"navigating/{name}": float(counts[name]) for name in ("refined", "unrefined", "unrewritten")}

    def _question(self, query: str, candidates: Sequence[Experience], top_k: int) -> Question:
        text = prompt("refine")
        listed = "\n".join(f"{n}. {e.when}\n   {e.content}" for n, e in enumerate(candidates, 1))
        rewriting = _REWRITE if self.rewrites else _KEEP
        messages = text.messages(task=quoted(query), experiences=listed, most=str(top_k), rewriting=rewriting)
        return Question(self.roles[0], messages, CHOICE, text.version)

    def _chosen(self, query: str, candidates: Sequence[Experience], answer: Any, top_k: int) -> list[Experience]:
        """Return what an answer chose from the candidates. An answer with a number that does not exist is ignored,
        because all its numbers may be shifted."""
        chosen = [] if answer is None or isinstance(answer, ChatError) else answer.parsed["chosen"]
        refused = isinstance(answer, ChatError) or not all(1 <= e["number"] <= len(candidates) for e in chosen)
        self._counts["unrefined"] += refused
        if answer is None or refused:
            return list(candidates[:top_k])
        first = {}
        for entry in chosen:
            first.setdefault(entry["number"], entry["content"].strip())
        return [self._worded(query, candidates[n - 1], content) for n, content in list(first.items())[:top_k]]

    def _worded(self, query: str, experience: Experience, content: str) -> Experience:
        """Return the experience in the words of the answer, or in its own if they are unfit."""
        if not self.rewrites:
            return experience
        problem = unfit(content, query)
        self._counts["unrewritten"] += bool(problem)
        return experience if problem else replace(experience, content=content)


class Rewriter(Reranker):
    """Also rewrites the chosen experiences for the task at hand."""

    rewrites = True
