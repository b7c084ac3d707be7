"""The arithmetic of the paper's relatives, on numbers made by hand, and what they remember."""

from __future__ import annotations

import dataclasses
import json
import random

import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from envs.probed import Probed, probed
from envs.toolcalls import call_text
from envs.world import Evaluation, WorldError
from evolver.config.checks.workdir import differences
from evolver.parts import Parts
from evolver.questioning import is_verified
from evolver.questioning.played import replayer, verified_task
from evolver.questioning.tasks import Rejected
from evolver.recipes import Recipe, proposals
from evolver.recipes.coevolve import CoEvolve
from evolver.recipes.evolutionary import Evolutionary
from evolver.recipes.proposals import Proposer
from evolver.recipes.reinforce_pp import ReinforcePP, penalised
from evolver.recipes.replay import ReplayBuffer, loaded, saved
from evolver.recipes.tree import Tree, advantages
from evolver.recipes.webrl import WebRL
from rl import losses
from rl.advantages import Batch
from rl.advantages.gigpo import gigpo
from rl.advantages.returns import returns, turn_rewards
from rl.advantages.turn_rloo import turn_rloo
from rl.losses.empo2 import empo2
from rl.losses.webrl import webrl
from rl.packing import pack
from rl.rewards.novelty import Novelty
from rl.samples import samples
from tests.evolver.explorers import solves
from tests.evolver.stand_ins import DUNE, pool_from, run_with, tokens_of
from tests.evolver.toy import BLUE, GREEN, LEND, LEND_15, LOST, WON, Library, tried
from tests.rl.test_samples import trajectory, turn


def resumed(recipe, **args):
    """Return a recipe that goes on from the state of this one."""
    again = type(recipe)(Parts(), **args)
    again.load_state(json.loads(json.dumps(recipe.state())))
    return again


def rollout(outcome, *observations, rewards=(), rollout=0):
    """Return a rollout of one turn more than observations, each of one token."""
    turns = [turn([1], [2]) for _ in range(len(observations) + 1)]
    for one, seen, reward in zip(turns, (*observations, "end"), rewards or [0.0] * len(turns)):
        one.observation, one.reward = [{"role": "tool", "content": seen}], reward
    made = trajectory(*turns)
    made.messages = [{"role": "user", "content": "q"}]
    made.rollout, made.evaluation = rollout, Evaluation(outcome, outcome == 1)
    return made


def test_returns_are_discounted_sums_of_what_turns_are_rewarded_with():
    batch = Batch.of([rollout(1.0, "a", "b", rewards=(0.5, 0, 0)), rollout(0.0)], 1)
    np.testing.assert_allclose(turn_rewards(batch, "outcome"), [[0, 0, 1], [0, 0, 0]])
    np.testing.assert_allclose(turn_rewards(batch, "world"), [[0.5, 0, 0], [0, 0, 0]])
    both = turn_rewards(batch, "both")
    np.testing.assert_allclose(returns(both, 0.5), [[0.75, 0.5, 1], [0, 0, 0]])


def test_gigpo_compares_turns_of_a_group_in_the_same_state():
    """Two rollouts open alike; both see "a" later, the first after one turn, the second after two.

    With discount 1/2 the returns are (1/2, 1) and (0, 0, 0). Openings: 1/2 against 0. State a: 1
    against 0. State b is one of its own.
    """
    batch = Batch.of([rollout(1.0, "a"), rollout(0.0, "b", "a")], 1)
    plain = gigpo(batch, discount=0.5, weight=2.0, norm="none")
    expected = [[0.5 + 2 * 0.25, 0.5 + 2 * 0.5, 0], [-0.5 - 2 * 0.25, -0.5, -0.5 - 2 * 0.5]]
    np.testing.assert_allclose(plain, expected, atol=1e-6)
    # The sample deviation of two numbers that differ by d is d / sqrt(2): every advantage is
    # +- 1 / sqrt(2), once for the episode and once for the turn.
    r = 1 / np.sqrt(2)
    np.testing.assert_allclose(
        gigpo(batch, discount=0.5), [[2 * r, 2 * r, 0], [-2 * r, -r, -2 * r]], atol=1e-4
    )


def test_gigpo_knows_no_state_across_groups():
    batch = Batch.of([rollout(1.0, "a"), rollout(0.0, "a")], 1)
    batch.trajectories[1].draw = 1
    assert not gigpo(Batch.of(batch.trajectories, 1)).any()


def test_turns_have_leave_one_out_baselines_of_their_own():
    """Returns (outcomes, discount 1): 1, 1, 0; the third rollout has one turn, the first three."""
    batch = Batch.of([rollout(1.0, "a", "b"), rollout(1.0, "a"), rollout(0.0)], 1)
    expected = [[1 - 0.5, 1 - 1, 0], [1 - 0.5, 1 - 1, 0], [0 - 1, 0, 0]]
    np.testing.assert_allclose(turn_rloo(batch), expected)
    rewarded = [rollout(0.0, "a", rewards=(1, 2)), rollout(0.0, "a", rewards=(0, 4))]
    found = turn_rloo(Batch.of(rewarded, 1), rewards="world", discount=0.5)
    np.testing.assert_allclose(found, [[2 - 2, 2 - 4], [2 - 2, 4 - 2]])


def test_webrls_loss_is_that_of_whole_turns():
    """Two turns, of two tokens and of one: beta (sum of log-ratios) - A, squared."""
    mask_RT = np.array([[0, 1, 1, 0, 1, 0]]) > 0
    ref_RT, advantage_RT = jnp.array([[0, -1.5, -1, 0, -1.0, 0]]), [[0, 1.0, 1, 0, -1, 0]]
    logp_RT = [[0, -1.0, -2, 0, -0.5, 0]]
    tokens = tokens_of(logp_RT, 0.0, advantage_RT, mask_RT=mask_RT, ref_logp=ref_RT)
    loss_RT, _ = losses.guarded(lambda given: webrl(given, beta=2.0), tokens)
    first, second = (2 * (0.5 - 1) - 1) ** 2, (2 * 0.5 + 1) ** 2
    np.testing.assert_allclose(loss_RT, [[0, first / 2, first / 2, 0, second, 0]])


def packed_batch():
    """Return a mini-batch of two rollouts in three samples. KL per token: rollout 0 has 1, 2 and,
    in its second sample, 4; rollout 1 has 8."""
    first = trajectory(turn([1, 2], [3, 4], 1.0), turn([9, 9], [5], 1.0))
    second = trajectory(turn([1, 2], [6], 0.0), task="b")
    parts = [samples(t) for t in (first, second)]
    batch = pack([s for part in parts for s in part], 16)
    batch.rollouts = (0, 0, 1)
    kl_n = np.array([1.0, 2, 4, 8])
    batch.old_logp_RT, batch.ref_logp_RT = batch.placed(kl_n), np.zeros_like(batch.logp_RT)
    np.testing.assert_array_equal(batch.trained(batch.placed(kl_n)), kl_n)
    return batch


def test_reinforce_pp_takes_the_kl_still_to_come_from_the_reward_of_each_token():
    value_n, kl_n = penalised(packed_batch(), 0.5)
    np.testing.assert_allclose(kl_n, [1, 2, 4, 8])
    np.testing.assert_allclose(value_n, [1 - 0.5 * 7, 1 - 0.5 * 6, 1 - 0.5 * 4, 0 - 0.5 * 8])
    batches, recipe = [packed_batch(), packed_batch()], ReinforcePP(Parts(), beta=0.5)
    assert recipe.weigh(batches) == {"reinforce_pp/kl": 3.75}
    whole_n = np.concatenate([b.trained(b.advantage_RT) for b in batches])
    np.testing.assert_allclose(whole_n[:4], (value_n - value_n.mean()) / value_n.std(), atol=1e-6)
    assert recipe.weigh([]) == {"reinforce_pp/kl": 0.0}


def test_reinforce_pp_with_a_baseline_subtracts_the_mean_of_the_group():
    for baseline, expected in (("none", [1.0, 0.0]), ("group", [0.5, -0.5])):
        played = [rollout(1.0), rollout(0.0)]
        ReinforcePP(Parts(), baseline=baseline).credit(run_with(), played, 1)
        assert [t.turns[0].advantage for t in played] == expected


def test_trees_compare_rollouts_within_and_among_them():
    """Tree 1 has rewards 1, 0 and tree 2 has 0, 0: within, +-r and 0; among all, by 1/4."""
    roots = [("t", 0, 0), ("t", 0, 0), ("t", 0, 1), ("t", 0, 1)]
    found = advantages(np.array([1.0, 0, 0, 0]), roots)
    r, sd = 1 / np.sqrt(2), 0.5  # of 1, 0 and of 1, 0, 0, 0, with n - 1
    expected = [r + 0.75 / sd, -r - 0.25 / sd, -0.25 / sd, -0.25 / sd]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    other = advantages(np.array([1.0, 0]), [("t", 0, 0), ("u", 0, 0)])
    np.testing.assert_allclose(other, 0)  # of another task


def test_a_turn_that_branches_share_trains_once_with_their_mean():
    run, recipe = run_with(), Tree(Parts(), branches=2)
    root, other = rollout(1.0, "a", "b"), rollout(0.0, rollout=1)
    jobs = recipe.jobs(run, [root, other], 0, 1)
    assert [(job.rollout, 0 < len(job.prefix) < 3) for job in jobs] == [(2, True), (3, True)]
    assert recipe.root((root.task.id, 0, 3)) == (root.task.id, 0, 0)
    branch = rollout(0.0, "a", "c", rollout=2)
    branch.turns[0].given = True
    recipe.credit(run, [root, other, branch], 1)
    first, second = root.turns[2].advantage, branch.turns[1].advantage
    assert first > 0 > second and root.turns[1].advantage == first
    assert root.turns[0].advantage == pytest.approx((first + second) / 2)


def test_a_buffer_gives_back_what_trains_after_a_resume():
    kept = rollout(1.0, "a")
    kept.turns[0].given, kept.turns[1].stripped = True, [7]
    kept.turns[1].gap = np.ones(1)
    kept.experience, kept.injected = ["e"], ["text"]
    buffer = ReplayBuffer(2)
    buffer.add([rollout(0.0), kept, rollout(1.0, rollout=3)])
    again = ReplayBuffer(2)
    again.load_state(json.loads(json.dumps(buffer.state())))
    assert again.state() == buffer.state() and [t.rollout for t in again.kept] == [0, 3]
    first, copied = again.kept[0], loaded(saved(kept))
    assert first == copied and first.turns[1].gap is None
    for a, b in zip(samples(first), samples(kept), strict=True):
        assert vars(a).keys() == vars(b).keys()
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.mask, b.mask)
    again.sample(2, 0)[0].turns.clear()
    assert all(t.turns for t in again.kept)


def test_played_actions_become_a_verified_task():
    library = probed(Library())
    assert isinstance(library, Probed)
    found = verified_task(library, LEND, [BLUE, *WON], random.Random(0))
    assert is_verified(found) and found.origin == "synthetic" and found.meta["source"] == LEND.id
    assert LEND_15 in found.reference and solves(Library(), found, found.reference)
    assert not solves(Library(), found, LOST)
    with pytest.raises(Rejected):
        verified_task(library, LEND, ["done"], random.Random(0))


def test_failures_become_tasks_of_what_they_did_reach(monkeypatch):
    """The attempt was to lend Dune; it lent Solaris, which is a task of its own."""
    failed = tried(*WON, of=DUNE)
    assert not failed.evaluation.success
    recipe, run = WebRL(Parts(), every=2), run_with(pool_from(DUNE))
    recipe.remember(run, [failed], 1)
    again = resumed(recipe, every=2)
    assert again.failed == [[DUNE.id, [*WON]]]
    monkeypatch.setattr(Recipe, "choose", lambda *_: ({}, {}))
    again.choose(run, 3)  # the first step of the second phase
    (found,) = run.tasks.pool.tasks.values()
    assert solves(Library(), found, WON)
    assert again.failed == [] and again.metrics() == {"webrl/proposed": 1}


def finished(won, *calls, id="a", rollout=0):
    """Return a rollout of a task that makes calls without arguments."""
    made = trajectory(*(turn([1], [2]) for _ in calls))
    for one, name in zip(made.turns, calls):
        one.action = call_text(name, {})
    made.task = dataclasses.replace(
        made.task, id=id, origin="synthetic", meta={"source": "s-" + id}
    )
    made.rollout, made.evaluation = rollout, Evaluation(float(won), won)
    return made


def test_coevolve_finds_weaknesses_in_what_was_known_is_undecided_or_is_rare():
    recipe = CoEvolve(Parts(), window=2, rare=0.1)
    won, lost = [finished(True, "f"), finished(True, "f")], [finished(False), finished(False)]
    mixed = [finished(True, "f"), finished(False, "f")]
    assert recipe.signal("a", lost) == "" and recipe.signal("a", mixed) == "boundary"
    recipe.remember(run_with(), won, 1)
    assert recipe.weak == {} and recipe.signal("a", lost) == "forgotten"
    for step in (2, 3):  # the window holds failures only now
        recipe.remember(run_with(), lost, step)
    assert recipe.history["a"] == [0, 0] and recipe.signal("a", lost) == ""
    assert recipe.weak == {"s-a": "forgotten"} and recipe.metrics()["coevolve/forgotten"] == 2
    usual = [finished(True, *"ab" * 10, id="b"), finished(True, "a", "c", id="b")]
    recipe.remember(run_with(), usual, 4)  # 19 of 20 pairs are a, b or b, a
    assert recipe.signal("b", [finished(False, "a", "c", id="b")]) == "forgotten"
    assert recipe.signal("c", [finished(False, "a", "c", id="c")]) == "rare"
    assert recipe.signal("c", [finished(False, "a", "b", id="c")]) == ""
    assert resumed(recipe).state() == recipe.state()


def test_coevolve_explores_where_it_found_weaknesses_and_then_forgets_them(monkeypatch):
    pool, explored = pool_from(DUNE, dataclasses.replace(LEND, id="other")), []

    class Listed:
        def explore(self, world, seeds, budget, rng):
            explored.append([seed.id for seed in seeds])
            return iter(())

    def refresh(self, run, step):
        pool.grow(Listed(), Library, 1, step)
        pool.refreshed = step if step == 3 else pool.refreshed
        return {}, {}

    monkeypatch.setattr(Recipe, "choose", refresh)
    recipe = CoEvolve(Parts())
    recipe.weak = {"other": "boundary"}
    for step in (2, 3, 4):
        recipe.choose(run_with(pool), step)
    assert explored == [["other"], ["other"], [DUNE.id, "other"]] and recipe.weak == {}


def test_children_join_the_solutions_of_two_tasks_and_are_verified(monkeypatch):
    pool = pool_from(DUNE)
    pool.grow(Proposer(lambda *_: [(DUNE, WON), (DUNE, [GREEN])], pool), Library, 4, 0)
    before = list(pool.tasks.values())
    assert len(before) == 2
    easy, hard = sorted(before, key=lambda t: t.difficulty)
    pool.record([(easy.id, True)] * 6)
    recipe = Evolutionary(Parts(), every=2, children=1, tournament=2, crossover=1.0)
    assert {recipe.parent(pool, random.Random(i), before).id for i in range(8)} == {hard.id}
    monkeypatch.setattr(Recipe, "choose", lambda *_: ({}, {}))
    recipe.choose(run_with(pool), 3)
    assert recipe.metrics() == {"evolutionary/children": 1}
    (child,) = (task for task in pool.tasks.values() if task not in before)
    assert is_verified(child) and solves(Library(), child, child.reference)
    for parent in before:
        assert not solves(Library(), child, parent.reference)
    assert not recipe.parent(pool, random.Random(0), [])


def test_empo2_masks_guided_tokens_that_the_policy_would_hardly_write():
    logp_RT = jnp.log(jnp.array([[0.5, 0.01, 0.01, 0.04]]))
    guided_RT, mask_RT = [[True, True, False, True]], [[True, True, True, False]]
    tokens = tokens_of(logp_RT, logp_RT - 0.1, guided_RT=guided_RT, mask_RT=mask_RT)
    loss_RT, stats = empo2(tokens, least=0.05)
    np.testing.assert_allclose(loss_RT[0, :3], [-np.exp(0.1), 0, -np.exp(0.1)], rtol=1e-6)
    share, on = stats["empo2/masked"]
    assert float((share * on).sum()) == 1 and float(on.sum()) == 2
    whole_RT, _ = empo2(tokens, least=0.0)
    np.testing.assert_allclose(whole_RT[0, :3], [-np.exp(0.1)] * 3, rtol=1e-6)


def test_novel_states_are_rewarded_by_the_inverse_of_their_visits():
    reward = Novelty(scale=0.3)
    batch = Batch.of([rollout(1.0, "a", "b"), rollout(0.0, "a", "a")], 1)
    # "a" and "end" are seen by both, "b" by one; a rollout counts once for each
    np.testing.assert_allclose(reward(batch), [1 + 0.3 * 2.0, 0.3 * 1.0])
    again = Novelty(scale=0.3)
    again.load_state(json.loads(json.dumps(reward.state())))
    np.testing.assert_allclose(again(Batch.of([rollout(0.0, "b")], 2)), [0.3 * (1 / 2 + 1 / 3)])


def test_a_replayer_learns_from_what_it_repeats():
    library, walker = probed(Library()), replayer()
    verified_task(library, LEND, WON, random.Random(0), walker=walker)
    known = walker.stats.state()
    verified_task(library, LEND, [GREEN, *WON], random.Random(0), walker=walker)
    assert known["roles"].keys() >= {"lend", "shelf"} and walker.stats.state() != known


def test_a_run_may_not_be_resumed_with_another_reference():
    before, config = base.get_config().to_dict(), base.get_config()
    config.loss.reference, config.loss.renew_reference = "host", 2
    (problem,) = differences(before, config, base.Config)
    assert problem.startswith("loss.renew_reference: 0 then, 2 now")


def test_proposals_that_give_no_task_are_counted_by_their_reason(monkeypatch):
    pool, broken = pool_from(DUNE), [BLUE]

    def verified(world, start, actions, rng, **options):
        if actions is broken:
            raise WorldError("down")
        return verified_task(world, start, actions, rng, **options)

    monkeypatch.setattr(proposals, "verified_task", verified)
    proposed = [(DUNE, ["nothing"]), (DUNE, [GREEN]), (DUNE, broken)]
    grown = proposals.grow(run_with(pool), lambda *_: proposed, 4, "test")
    assert list(grown) == [1]
    figures = {name: count for name, count in pool.metrics().items() if count}
    assert figures["questioning/tried"] == 3 and figures["questioning/accepted"] == 1
    assert figures["questioning/rejected/nothing to check"] == 1
    assert figures["questioning/rejected/the world broke"] == 1
