"""Recipes in which the policy proposes its own tasks, and judges them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from configs import base
from envs.world import Evaluation
from evolver.config.checks.contradictions import recipe_contradictions
from evolver.llm.questions import CURRENT_POLICY, ChatError, Question, Reply, Said
from evolver.parts import Parts
from evolver.recipes import Recipe, dual_role
from evolver.recipes.dual_role import DualRole
from evolver.recipes.multi_agent import MultiAgent, agreements, standardised
from evolver.recipes.proposals import Proposer
from rl.trajectory import Completion, StopReason
from tests.evolver.stand_ins import DUNE, pool_from, run_with
from tests.evolver.toy import GREEN, LEND_11, LOST, RED, WON, Library, tried


@pytest.fixture
def played(monkeypatch):
    """Return a run whose proposers play what the test says, in this order, and whose steps have no
    other tasks."""
    pool = pool_from(DUNE)
    pool.grow(Proposer(lambda *_: [(DUNE, [GREEN])], pool), Library, 1, 0)
    run = run_with(pool, said=[], asked=[])
    run.config.rollout.tasks = 2

    def gather(run, jobs, phase):
        run.asked.extend(jobs)
        return [answered(job, said) for job, said in zip(jobs, run.said, strict=True)]

    def answered(job, said):
        made = tried(*said, of=job.task)
        made.rollout, made.draw = job.rollout, job.draw
        return made

    monkeypatch.setattr(dual_role, "gather_rollouts", gather)
    monkeypatch.setattr(Recipe, "choose", lambda self, run, step: ({step: [DUNE]}, {}))
    return run


def attempts(of, *outcomes):
    """Return rollouts of a task with these outcomes."""
    found = [tried(*LOST, of=DUNE) for _ in outcomes]
    for n, (t, outcome) in enumerate(zip(found, outcomes)):
        t.task, t.rollout, t.evaluation = of, n, Evaluation(outcome, outcome == 1)
        for turn in t.turns:
            turn.completion = Completion([1], [0.0], "stop", 0)
    return found


def test_what_a_proposer_did_is_a_task_and_is_worth_what_can_be_learnt_from_it(played):
    played.said = [[*WON], ["nothing"], [*WON], [*LOST]]
    recipe = DualRole(Parts(), examples=1, proposals=4, query="Not {example}")
    chosen, _ = recipe.choose(played, 1)
    (example,) = [t for t in played.tasks.pool.tasks.values() if t.difficulty == 1]
    assert played.asked[0].task.query == f"Not {example.query}"
    assert len({job.seed for job in played.asked}) == 4 and played.asked[0].draw == 1
    new, other = chosen[1]
    assert new.meta["source"] == "library/Lend Dune."
    assert new.origin == "synthetic" and other.query == "Lend Dune."
    assert [id for _, id in recipe.proposed] == [new.id, "", "", ""]  # the third repeats the first
    recipe.credit(played, attempts(new, 1.0, 0.0, 0.0, 1.0), 1)
    proposals = recipe.extra(played, [], 1)
    assert [t.outcome for t in proposals] == [0.5, -1.0, -0.5, -0.5]
    advantages = [t.turns[0].advantage for t in proposals]
    assert advantages[0] > 0 > advantages[2] == advantages[3] > advantages[1]
    reward_N = np.array([0.5, -1.0, -0.5, -0.5])
    expected = (reward_N - reward_N.mean()) / reward_N.std(ddof=1)
    np.testing.assert_allclose(advantages, expected, atol=1e-4)
    figures = recipe.metrics()
    assert figures["dual_role/tasks"] == 1 and figures["dual_role/reward"] == -0.375


@pytest.mark.parametrize("solved, expected", [((1, 1), 0.0), ((0, 0), 0.0), ((1, 0, 0, 0), 0.75)])
def test_tasks_that_all_or_no_attempts_solve_are_worth_nothing(solved, expected):
    assert DualRole(Parts()).reward(tried(*WON), "id", solved) == expected


def test_a_task_that_nobody_attempted_says_nothing_of_its_proposal(played):
    played.config.rollout.tasks = 1
    played.said = [[*WON], [GREEN]]
    recipe = DualRole(Parts(), examples=1, proposals=2)
    new = recipe.choose(played, 1)[0][1][0]
    broken = attempts(new, 1.0)
    broken[0].stop = StopReason.ENV_ERROR
    recipe.credit(played, broken, 1)
    assert [t.outcome for t in recipe.extra(played, [], 1)] == [-0.5]


class Judge:
    """A client whose judge rates each task with the next of some scores, None = not at all."""

    def __init__(self, *scores):
        self.scores, self.keeps, self.kept = list(scores), False, []

    def ask(self, questions):
        assert all("THE TASK" in q.messages[1]["content"] for q in questions)
        return [
            ChatError("cut", "no answer") if score is None else Reply("", {"score": score})
            for score, _ in zip(self.scores, questions)
        ]

    def said(self):
        kept, self.kept = self.kept, []
        return kept


def test_all_three_roles_train_and_each_has_its_own_baseline(played, monkeypatch):
    chat = Judge(40)
    recipe = MultiAgent(Parts(client=chat), examples=1, proposals=2)
    assert chat.keeps and chat.free == ("judge",)
    chat.kept = ["of the exploration"]
    played.said = [[*WON], ["nothing"]]
    chosen, _ = recipe.choose(played, 1)
    new = chosen[1][0]
    assert recipe.quality == {new.id: 0.4} and chat.kept == []
    solved = attempts(new, 1.0, 0.0, 0.0, 0.0)
    for t, truly in zip(solved, (1.0, 0.0, 1.0, 0.0)):
        t.evaluation.components["verified"] = truly
    recipe.credit(played, solved, 1)
    usable = [True, False, True, True]
    asked = Question("judge", [{"role": "user", "content": "?"}])
    # The last one is what a grammar made of the second.
    chat.kept = [
        Said(asked, Reply("{}"), good, str(n), held=n == 3) for n, good in enumerate(usable)
    ]
    monkeypatch.setattr("evolver.llm.policy.chat.opening", lambda tokenizer, messages: [1, 2])
    played.actor = SimpleNamespace(tokenizer=None)
    trained = recipe.extra(played, solved, 1)
    assert [t.outcome for t in trained[:2]] == [pytest.approx((0.4 + 0.75 + 1) / 3), -1.0]
    assert [t.turns[0].advantage for t in trained[:2]] == pytest.approx([1, -1])
    judged = [t.turns[0].advantage for t in trained[2:]]
    np.testing.assert_allclose(judged, (np.array(usable) - 0.75) / np.std(usable), atol=1e-6)
    figures = recipe.metrics()
    assert figures["multi_agent/judgements"] == 4
    assert figures["multi_agent/usable"] == pytest.approx(2 / 3)
    assert figures["multi_agent/quality"] == pytest.approx(0.4)
    assert figures["multi_agent/agreement"] == 0.75


def test_a_rating_without_an_answer_is_worth_nothing(played):
    recipe = MultiAgent(Parts(client=Judge(None)), examples=1, proposals=1)
    played.said = [[*WON]]
    new = recipe.choose(played, 1)[0][1][0]
    assert recipe.reward(tried(*WON), new.id, [1.0, 0.0]) == 0.5
    assert standardised(np.array([])).size == 0 and agreements([tried(*WON)]) == []


def test_a_task_that_left_the_pool_is_not_rated(played):
    pool, before = played.tasks.pool, set(played.tasks.pool.tasks)
    pool.shrink = lambda: pool.tasks.pop(next(id for id in pool.tasks if id not in before))
    played.said = [[*WON], [RED, LEND_11, "done"]]
    recipe = MultiAgent(Parts(client=Judge(40)), examples=1, proposals=2)
    recipe.choose(played, 1)
    (left,) = pool.tasks.keys() - before
    assert recipe.quality == {left: 0.4}


def test_the_judge_must_be_the_policy_if_it_is_to_train():
    config = base.get_config()
    config.recipe.name, config.questioning.enabled = "multi_agent", True
    (problem,) = recipe_contradictions(config)
    assert problem.endswith("set config.llm.judge.url=policy")
    config.llm.judge.url = CURRENT_POLICY
    assert not list(recipe_contradictions(config))
