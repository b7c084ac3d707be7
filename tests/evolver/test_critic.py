"""The critic: GAE, the fit of its head, and the states that it judges."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from envs.world import Evaluation
from evolver.parts import Parts
from evolver.recipes.critic import Critic, features, fitted, gae, states
from models import qwen
from rl import learner
from rl.forward import Forward
from tests.evolver.runs import figures, go
from tests.rl.test_samples import trajectory, turn
from tests.tiny import config_file, tiny_policy

CONFIG = qwen.Config(vocab=40, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=32)
ROW = 32


def test_gae_is_the_weighted_sum_of_errors_of_the_critic():
    draw = np.random.default_rng(0)
    reward_NK, value_NK = draw.normal(size=(2, 3, 5))
    on_NK = np.arange(5) < np.array([[5], [3], [0]])
    reward_NK, value_NK = reward_NK * on_NK, value_NK * on_NK
    next_NK = np.pad(value_NK, ((0, 0), (0, 1)))[:, 1:]
    error_NK = reward_NK + 0.9 * next_NK - value_NK
    found_NK = gae(reward_NK, value_NK, on_NK, 0.9, 0.7)
    for k in range(5):
        later = sum((0.9 * 0.7) ** n * error_NK[:, k + n] for n in range(5 - k))
        np.testing.assert_allclose(found_NK[:, k], later * on_NK[:, k], atol=1e-12)
    whole_NK = gae(reward_NK, value_NK, on_NK, 1.0, 1.0)  # the return minus the value
    sums_NK = np.cumsum(reward_NK[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(whole_NK, (sums_NK - value_NK) * on_NK, atol=1e-12)


def test_the_reward_of_a_turn_that_does_not_train_belongs_to_the_one_before():
    on_NK = np.array([[True, False, True]])
    found_NK = gae(np.array([[0, 2.0, 4.0]]), np.array([[1.0, 9.0, 3.0]]), on_NK, 0.5, 1.0)
    np.testing.assert_allclose(found_NK, [[0 + 0.5 * (2 + 0.5 * 3) - 1 + 0.5 * 1, 0, 1]])


def test_the_head_is_the_ridge_solution_around_the_head_before():
    draw = np.random.default_rng(1)
    state_nD, return_n, before_D = (
        draw.normal(size=(7, 4)),
        draw.normal(size=7),
        draw.normal(size=4),
    )
    normal_DD = state_nD.T @ state_nD + 0.3 * np.eye(4)
    right_D = state_nD.T @ return_n + 0.3 * before_D
    expected_D = np.linalg.solve(normal_DD, right_D)
    np.testing.assert_allclose(fitted(before_D, state_nD, return_n, 0.3), expected_D, rtol=1e-9)


def made(share=False):
    """Return what `states` reads of a run whose rows hold two samples, two rows at a time."""
    config = base.get_config()
    config.learner.row, config.learner.share_prompts = ROW, share
    params = jax.jit(lambda: qwen.init(CONFIG, 0))()
    logp = learner.make_logp(Forward(CONFIG, micro=2))
    state, layout = {"params": params}, learner.PLAIN
    return SimpleNamespace(
        config=config, learner=SimpleNamespace(logp=logp, state=state, layout=layout, shape=CONFIG)
    )


def played():
    """Return rollouts of 2, 1, 2 and 3 turns, one with a context that was rewritten."""
    first = trajectory(turn([1, 2, 3], [4, 5]), turn([1, 2, 3, 4, 5, 6], [7]))
    second = trajectory(turn([1, 2, 3], [9, 8, 7]))
    rewritten = trajectory(turn([1, 2, 3], [4]), turn([1, 2, 9, 9], [5, 5]))
    guided = trajectory(
        turn([7, 1, 2, 3], [8], stripped=[1, 2, 3]),
        turn([7, 1, 2, 3, 8, 9], [9, 9], stripped=[1, 2, 3, 8, 9]),
        turn([7, 1, 2, 3, 8, 9, 9, 9, 4], [6], stripped=[1, 2, 3, 8, 9, 9, 9, 4]),
    )
    guided.experience = ["e"]
    return [first, second, rewritten, guided] * 3


@pytest.mark.parametrize("share", [False, True])
def test_states_are_what_the_policy_knows_before_each_turn(share):
    run, rollouts = made(share), played()
    found_nD = states(run, rollouts)
    turns = [one for rollout in rollouts for one in rollout.turns]
    assert found_nD.shape == (len(turns), CONFIG.d_model)
    for state_D, one in zip(found_nD, turns):
        prompt = jnp.array([one.training_prompt])
        places, segments = jnp.arange(prompt.shape[1])[None], jnp.ones_like(prompt)
        h_RTD = qwen.hidden(CONFIG, run.learner.state["params"], prompt, places, segments)
        np.testing.assert_allclose(state_D, h_RTD[0, -1], atol=2e-5)


def test_the_critic_learns_what_states_are_worth_and_resumes():
    """Rollouts of three turns succeed. The values of a step do not know its own outcomes."""
    run, critic = made(), Critic(Parts(), ridge=0.01)
    run.reward = lambda batch: batch.outcome_N
    rollouts = played()
    for rollout in rollouts:
        rollout.evaluation = Evaluation(float(len(rollout.turns) == 3), len(rollout.turns) == 3)
    critic.credit(run, rollouts, 1)
    assert critic.metrics()["critic/value"] == 0.0 and critic.metrics()["critic/explained"] == 0.0
    again = Critic(Parts(), ridge=0.01)
    again.load_state(critic.state())
    for _ in range(2):
        again.credit(run, rollouts, 2)
    assert again.metrics()["critic/explained"] > 0.3
    turns = [one.advantage for rollout in rollouts for one in rollout.turns]
    assert abs(np.mean(turns)) < 1e-6 and abs(np.std(turns) - 1) < 1e-4


def test_features_have_a_length_near_one_and_a_constant():
    state_nD = np.random.default_rng(0).normal(size=(3, 400)).astype(np.float32)
    found_nD = features(state_nD)
    np.testing.assert_allclose(np.linalg.norm(found_nD[:, :-1], axis=1), 1.0, atol=0.1)
    assert (found_nD[:, -1] == 1).all()


def test_a_run_with_a_critic_resumes_bit_for_bit(tmp_path):
    config = config_file(tmp_path, tiny_policy(tmp_path / "policy"))
    words = ["--config.recipe.name=critic", "--config.eval.every=0"]
    assert go(config, tmp_path / "whole", *words) == 0
    assert go(config, tmp_path / "parts", *words, "--config.steps=2") == 0
    assert go(config, tmp_path / "parts", *words) == 0
    whole, parts = figures(tmp_path / "whole"), figures(tmp_path / "parts")
    assert whole == parts and all("critic/value" in line for line in whole[1:])
