"""Multi-Agent Evolve (Chen et al., "Multi-Agent Evolve: LLM Self-Improve through Co-evolution",
arXiv 2510.23595): one policy proposes tasks, solves them and judges both, and trains in all three
roles.

The paper reports that Qwen2.5-3B-Instruct gains 4.54% on average over many benchmarks. A proposal
is rewarded for the quality that the judge sees in its task, for the attempts that fail at it, and
for its form; an attempt for its score by the judge; a judgement for its form. Each role has a
baseline of its own. Here the proposer acts, as in `dual_role`, so that a task has a solution. And
where the judge misses the form, it judges again, held to it by a grammar: this judgement counts,
and trains as one of good form beside the bad one, as a small policy would never find the form.

    config.recipe.name = "multi_agent"
    config.questioning.enabled = True
    config.questioning.judge.name = "naive"  # attempts are scored by the role `judge`
    config.llm.judge.url = "policy"
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from evolver.build import Run
from evolver.llm.policy import trajectory_of
from evolver.llm.prompts import prompt
from evolver.llm.questions import Reply
from evolver.metrics import Metrics
from evolver.processes import hosts
from evolver.questioning.judges import PERCENT, judgement
from evolver.recipes import Chosen, give
from evolver.recipes.dual_role import DualRole
from evolver.transcripts import quoted, tool_list
from rl.bounds import Count
from rl.trajectory import Trajectory


@dataclass(eq=False, kw_only=True)
class MultiAgent(DualRole):
    """Trains on solutions, on proposals and on judgements.

    examples, proposals, weight, query: as in `dual_role`. analysis: most characters that the judge
    writes before it rates a task.
    """

    analysis: Count = 400
    roles, prompts = ("judge",), ("rate_task",)
    trained_roles = ("judge",)  # the config is checked for it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chat, self.max_chars = self.parts.chat, self.parts.max_chars
        self.chat.keeps, self.chat.free = True, self.trained_roles
        self.schema = judgement(self.analysis, range(PERCENT + 1))
        self.quality: dict[str, float] = {}  # of the tasks of the step's proposals, by id

    def choose(self, run: Run, step: int) -> tuple[Chosen, Metrics]:
        """Return the tasks of a step, and let the judge rate those of proposals."""
        self.chat.said()  # what was asked before, such as by an explorer, is not this step's
        chosen, metrics = super().choose(run, step)
        pool = run.tasks.pool
        assert pool is not None  # the config has self-questioning
        made = [(t, pool.tasks[id]) for t, id in self.proposed if id in pool.tasks]
        rate, limit = prompt("rate_task").question, 2 * self.max_chars
        asked = [
            rate(
                "judge", self.schema, None, task.id,
                task=quoted(task.query), tools=tool_list(t.tools, limit),
            )
            for t, task in made
        ]  # fmt: skip
        mine = hosts.together(lambda: self.chat.ask(hosts.share(asked)))
        answers = hosts.gather_shares(mine)
        self.quality = {
            task.id: answer.parsed["score"] / PERCENT
            for (_, task), answer in zip(made, answers)
            if isinstance(answer, Reply)
        }
        return chosen, metrics

    def reward(self, proposal: Trajectory, id: str, solved: Sequence[float]) -> float:
        """Return the mean of quality, difficulty and form. An unanswered rating counts as 0."""
        if not id:
            return super().reward(proposal, id, solved)
        return (self.quality.get(id, 0.0) + 1 - float(np.mean(solved)) + 1) / 3

    def compare(self, reward_N: np.ndarray, group_N: np.ndarray) -> np.ndarray:
        """Return advantages over the mean of the role (Task-Relative REINFORCE++)."""
        return standardised(reward_N)

    def extra(self, run: Run, trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
        """Return the proposals, and the judgements since the step began."""
        every = itertools.chain(*hosts.gather(self.chat.said()))
        said = {one.key: one for one in every}.values()
        answers = [trajectory_of(one, run.actor.tokenizer) for one in said]
        give(answers, standardised(np.array([t.outcome for t in answers])))
        self.figures |= {
            "multi_agent/judgements": len(answers),
            "multi_agent/usable": mean(one.usable for one in said if not one.held),
            "multi_agent/quality": mean(self.quality.values()),
            "multi_agent/agreement": mean(agreements(trajectories)),
        }
        return [*super().extra(run, trajectories, step), *answers]


def standardised(reward_N: np.ndarray) -> np.ndarray:
    """Return (reward - mean) / standard deviation, 0 where all are alike."""
    return (reward_N - reward_N.mean()) / (reward_N.std() + 1e-8) if len(reward_N) else reward_N


def mean(values: Iterable[float]) -> float:
    """Return the mean of some numbers, 0 of none."""
    found = list(values)
    return float(np.mean(found)) if found else 0.0


def agreements(trajectories: Iterable[Trajectory]) -> list[float]:
    """Return 1 for each judged rollout of which the judge says what the world does, and 0 for the
    others."""
    judged = [t.evaluation for t in trajectories if "verified" in t.evaluation.components]
    return [float(e.success == (e.components["verified"] > 0)) for e in judged]
