"""Self-navigating by language models: extraction, validation, re-ranking and rewriting of
experience (section 4 of the AgentEvolver paper; thresholds of ReMe, arXiv 2512.10696)."""

from collections.abc import Sequence
from dataclasses import replace

from envs.world import text_of
from evolver.llm.answers import (
    INTEGER,
    NUMBER,
    UNFIT_REASONS,
    Schema,
    array,
    record,
    string,
    unfit_reason,
)
from evolver.llm.prompts import prompt
from evolver.llm.questions import ChatError, Question, Reply
from evolver.metrics import Meter
from evolver.navigating import Experience, Extractor, Refiner, new_experience
from evolver.navigating.extract import learnable_groups
from evolver.parts import Parts
from evolver.transcripts import quoted, transcript, without_experience
from rl.bounds import Fraction
from rl.trajectory import Trajectory

MOST = 2  # experiences from one task
_REASON = string(300)
_WHEN = string(400)
_CONTENT = string(800)
EXTRACTION = record(experiences=array(record(when=_WHEN, content=_CONTENT), MOST))
# characters of an action or observation that validation sees: enough to tell what was done and
# refused
ABRIDGED = 200
REFUSED = ("surplus", *UNFIT_REASONS)  # reasons to refuse an experience


class LlmExtractor(Extractor):
    """Makes experiences from the best success and the worst failure of each task, and validates
    them.

    It also learns from tasks whose attempts all failed.
    """

    roles = ("summariser",)
    prompts = ("extract", "validate")
    reads_labels = False

    def __init__(self, parts: Parts, *, valid: Fraction = 0.5):
        """valid: least score of the validation, 0 = no validation."""
        self.chat = parts.chat
        self.max_chars = parts.max_chars
        self.splits = parts.splits
        self.valid = valid
        # questions that were not answered, and experiences that were refused, by reason
        refused = [f"unfit/{problem}" for problem in REFUSED]
        self.meter = Meter("navigating", "unanswered", "invalid", "misscored", *refused)

    def extract(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Experience]:
        """Return the valid experiences. Raises ValueError for a task of another split, and
        RunEnds."""
        groups = learnable_groups(trajectories, self.splits).values()
        contrasts = [_extremes(group) for group in groups]
        questions = [
            self._question("extract", EXTRACTION, contrast, self.max_chars, most=str(MOST))
            for contrast in contrasts
        ]
        found = []
        for contrast, answer in zip(contrasts, self.chat.ask(questions)):
            if isinstance(answer, ChatError):
                self.meter.count("unanswered")
            elif experiences := self._fit(answer.parsed["experiences"], contrast, step):
                found.append((contrast, experiences))
        return self._validated(found)

    def _fit(
        self, entries: Sequence[dict[str, str]], contrast: Sequence[Trajectory], step: int
    ) -> list[Experience]:
        """Return the experiences of an answer whose text is fit for a prompt, and count the
        others."""
        self.meter.count("unfit/surplus", len(entries[MOST:]))
        task = contrast[0].task
        experiences = []
        observations = []
        for trajectory in contrast:
            observations += [text_of(turn.observation) for turn in trajectory.turns]
        for entry in entries[:MOST]:
            when = entry["when"].strip()
            content = entry["content"].strip()
            problem = unfit_reason(when, task.query, observations)
            problem = problem or unfit_reason(content, task.query, observations)
            if problem:
                self.meter.count(f"unfit/{problem}")
            else:
                experiences.append(new_experience(when, content, sources=[task.id], step=step))
        return experiences

    def _validated(
        self, found: Sequence[tuple[Sequence[Trajectory], list[Experience]]]
    ) -> list[Experience]:
        """Return the experiences that score enough; one question is about all those of a task.
        Experiences that could not be scored are left out."""
        kept = []
        if not self.valid:
            for _, experiences in found:
                kept += experiences
            return kept
        questions = []
        limit = min(self.max_chars, ABRIDGED)
        for contrast, experiences in found:
            verdict = record(number=INTEGER, reason=_REASON, score=NUMBER)
            schema = record(verdicts=array(verdict, len(experiences)))
            shown = listed(experiences)
            asked = self._question("validate", schema, contrast, limit, experiences=shown)
            questions.append(asked)
        for (_, experiences), answer in zip(found, self.chat.ask(questions)):
            if isinstance(answer, ChatError):
                self.meter.count("unanswered")
                continue
            verdicts = sorted(answer.parsed["verdicts"], key=lambda verdict: verdict["number"])
            numbers = [verdict["number"] for verdict in verdicts]
            if numbers != list(range(1, len(experiences) + 1)):  # all may be shifted
                self.meter.count("misscored", len(experiences))
                continue
            for experience, verdict in zip(experiences, verdicts):
                if not 0 <= verdict["score"] <= 1:  # on another scale most scores would pass
                    self.meter.count("misscored")
                elif verdict["score"] < self.valid:
                    self.meter.count("invalid")
                else:
                    kept.append(experience)
        return kept

    def _question(
        self, name: str, schema: Schema, contrast: Sequence[Trajectory], limit: int, **slots: str
    ) -> Question:
        attempts = []
        for number, trajectory in enumerate(contrast, 1):
            result = "success" if trajectory.success else "failure"
            attempts.append(
                f"=== ATTEMPT {number}: {result}, score {trajectory.outcome:.2f}\n"
                + transcript(without_experience(trajectory), limit)
            )
        task = contrast[0].task
        shown = "\n\n".join(attempts)
        return prompt(name).question(
            self.roles[0], schema, None, task.id, task=quoted(task.query), attempts=shown, **slots
        )


def listed(experiences: Sequence[Experience]) -> str:
    """Return experiences as a numbered list. No line of theirs can pass for another entry."""
    entries = []
    for number, experience in enumerate(experiences, 1):
        lines = f"{number}. {experience.when}\n{experience.content}".splitlines()
        entries.append("\n   ".join(lines))
    return quoted("\n".join(entries))


def _extremes(group: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the success in the fewest turns and the failure with the lowest outcome, if there are
    any."""
    solved = [t for t in group if t.success]
    failed = [t for t in group if not t.success]
    solved.sort(key=lambda t: (len(t.turns), t.rollout))
    failed.sort(key=lambda t: (t.outcome, -len(t.turns), t.rollout))
    return [*solved[:1], *failed[:1]]


class Reranker(Refiner):
    """Asks a model which of the retrieved experiences fit the task. Without an answer, the best
    candidates are used."""

    roles = ("reranker",)
    prompts = ("rerank",)
    candidates = 3
    rewrites = False

    def __init__(self, parts: Parts):
        self.chat = parts.chat
        # queries asked about, those that kept the best candidates, and experiences that were not
        # rewritten or left out
        self.meter = Meter("navigating", "refined", "unrefined", "unrewritten", "surplus")

    def refine(
        self, queries: Sequence[str], candidates: Sequence[Sequence[Experience]], top_k: int
    ) -> list[list[Experience]]:
        asked = [n for n, experiences in enumerate(candidates) if experiences]
        answers = self.chat.ask([self._question(queries[n], candidates[n], top_k) for n in asked])
        self.meter.count("refined", len(asked))
        refined: list[list[Experience]] = [[] for _ in candidates]
        for n, answer in zip(asked, answers):
            refined[n] = self._chosen(queries[n], candidates[n], answer, top_k)
        return refined

    def _question(self, query: str, candidates: Sequence[Experience], top_k: int) -> Question:
        content = _CONTENT if self.rewrites else string(0)
        return prompt(self.prompts[0]).question(
            self.roles[0],
            record(chosen=array(record(number=INTEGER, content=content), top_k)),
            task=quoted(query),
            experiences=listed(candidates),
            most=str(top_k),
        )

    def _chosen(
        self, query: str, candidates: Sequence[Experience], answer: Reply | ChatError, top_k: int
    ) -> list[Experience]:
        """Return what an answer chose from the candidates. An answer with a number that does not
        exist is ignored, because all its numbers may be shifted."""
        contents: dict[int, str] = {}
        chosen = None if isinstance(answer, ChatError) else answer.parsed["chosen"]
        for entry in chosen or ():
            contents.setdefault(entry["number"], entry["content"].strip())
        numbers = range(1, len(candidates) + 1)
        if chosen is None or not contents.keys() <= set(numbers):
            self.meter.count("unrefined")
            return list(candidates[:top_k])
        kept = list(contents.items())[:top_k]
        self.meter.count("surplus", len(chosen) - len(kept))
        return [self._worded(query, candidates[n - 1], content) for n, content in kept]

    def _worded(self, query: str, experience: Experience, content: str) -> Experience:
        """Return the experience in the words of the answer, or in its own if they are unfit."""
        if not self.rewrites:
            return experience
        if unfit_reason(content, query):
            self.meter.count("unrewritten")
            return experience
        return replace(experience, content=content)


class Rewriter(Reranker):
    """Also rewrites the chosen experiences for the task at hand."""

    prompts = ("rewrite",)
    rewrites = True
