"""The critic: GAE, the fit of its head, and the states that it judges."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from envs.world import Evaluation
from evolver.config.checks.contradictions import recipe_contradictions
from evolver.parts import Parts
from evolver.recipes.critic import Critic, features, fitted, gae, states
from evolver.recipes.separate_critic import squared_error
from models import qwen
from rl import learner
from rl.forward import Forward, device_batch, token_logp
from rl.losses.actor_critic import actor_critic
from rl.packing import pack
from rl.samples import samples
from tests.evolver.runs import figures
from tests.evolver.stand_ins import outcomes, tokens_of
from tests.rl.test_samples import trajectory, turn

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
    state_nD, return_n, before_D = (draw.normal(size=size) for size in ((7, 4), 7, 4))
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
    parts = SimpleNamespace(logp=logp, state=state, layout=layout, shape=CONFIG)
    return SimpleNamespace(config=config, learner=parts, reward=outcomes)


def played():
    """Return rollouts of 2, 1, 2 and 3 turns, one with a context that was rewritten. Those of three
    turns succeed."""
    first = trajectory(turn([1, 2, 3], [4, 5]), turn([1, 2, 3, 4, 5, 6], [7]))
    second = trajectory(turn([1, 2, 3], [9, 8, 7]))
    rewritten = trajectory(turn([1, 2, 3], [4]), turn([1, 2, 9, 9], [5, 5]))
    guided = trajectory(
        turn([7, 1, 2, 3], [8], stripped=[1, 2, 3]),
        turn([7, 1, 2, 3, 8, 9], [9, 9], stripped=[1, 2, 3, 8, 9]),
        turn([7, 1, 2, 3, 8, 9, 9, 9, 4], [6], stripped=[1, 2, 3, 8, 9, 9, 9, 4]),
    )
    guided.experience = ["e"]
    rollouts = [first, second, rewritten, guided]
    for rollout in rollouts:
        rollout.evaluation = Evaluation(float(rollout is guided), rollout is guided)
    return rollouts * 3


def expected_state(params, one):
    """Return the last hidden state of a turn's prompt, by the model written plainly."""
    prompt = jnp.array([one.training_prompt])
    places, segments = jnp.arange(prompt.shape[1])[None], jnp.ones_like(prompt)
    return qwen.merge(CONFIG, params).hidden(prompt, places, segments)[0, -1]


@pytest.mark.parametrize("share", [False, True])
def test_states_are_what_the_policy_knows_before_each_turn(share):
    run, rollouts = made(share), played()
    found_nD = states(run.config, run.learner, rollouts)
    turns = [one for rollout in rollouts for one in rollout.turns]
    assert found_nD.shape == (len(turns), CONFIG.d_model)
    for state_D, one in zip(found_nD, turns):
        expected_D = expected_state(run.learner.state["params"], one)
        np.testing.assert_allclose(state_D, expected_D, atol=2e-5)


def test_the_critic_learns_what_states_are_worth_and_resumes():
    """The values of a step do not know its own outcomes."""
    run, critic, rollouts = made(), Critic(Parts(), ridge=0.01), played()
    critic.credit(run, rollouts, 1)
    assert critic.metrics() == {"critic/value": 0.0, "critic/explained": 0.0}
    again = Critic(Parts(), ridge=0.01)
    again.load_state(critic.state())
    for _ in range(2):
        again.credit(run, rollouts, 2)
    assert again.metrics()["critic/explained"] > 0.3
    turns = [one.advantage for rollout in rollouts for one in rollout.turns]
    assert abs(np.mean(turns)) < 1e-6 and abs(np.std(turns) - 1) < 1e-4


@pytest.mark.parametrize("share", [False, True])
def test_the_loss_finds_the_values_that_the_critic_gave(share):
    """In the mini-batches of an update, the value at the first token of a turn is that of its state
    under the head, and the gradient of the critic's loss is that of the model written plainly."""
    run, rollouts = made(share), played()
    critic = Critic(Parts(), ridge=0.01, decay=1.0)
    critic.credit(run, rollouts, 1)
    packed = pack(list(itertools.chain.from_iterable(map(samples, rollouts))), ROW, share=share)
    critic.weigh([packed])
    forward, params = run.learner.logp.forward, run.learner.state["params"]
    expected_n = features(states(run.config, run.learner, rollouts)) @ critic.weight_D

    def judged(params):
        batch = device_batch(packed, None, 2, 0)
        found = []
        for i in range(len(batch["tokens"])):
            rows = {name: x[i] for name, x in batch.items()}
            found.append(token_logp(forward, params, rows, head_D=packed.head_D)[2])
        return jnp.concatenate(found)[: packed.rows]

    value_n = packed.trained(np.asarray(judged(params)))
    first_n = packed.trained(packed.channels["judged"]) > 0
    np.testing.assert_allclose(value_n[first_n], expected_n, atol=1e-5)
    return_n = packed.trained(packed.channels["return"])[first_n]
    np.testing.assert_allclose(return_n, [t.evaluation.score for t in rollouts for _ in t.turns])

    def plain(params):
        error = 0.0
        for rollout in rollouts:
            for one in rollout.turns:
                value = (
                    expected_state(params, one) @ packed.head_D[:-1] / np.sqrt(CONFIG.d_model)
                    + packed.head_D[-1]
                )
                error += (value - rollout.evaluation.score) ** 2
        return error

    def whole(params):
        on_RT = packed.channels["judged"]
        return jnp.sum(on_RT * (judged(params) - packed.channels["return"]) ** 2)

    expected, found = jax.grad(plain)(params), jax.grad(whole)(params)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-3, atol=2e-3 * float(jnp.abs(a).max()) + 1e-7)


def test_the_critics_loss_is_added_at_the_first_token_of_each_turn():
    given = {"value": [[0.5, 9.0, -1.0]], "return": [[1.0, 0, 1]], "judged": [[1.0, 0, 1]]}
    channels = {name: jnp.array(values) for name, values in given.items()}
    tokens = tokens_of([[0.0, 0.0, 0.0]], **channels)
    loss_RT, stats = actor_critic(tokens, value_coef=2.0)
    np.testing.assert_allclose(loss_RT, [[-1 + 2 * 0.25, -1, -1 + 2 * 4]])
    value_RT, mask_RT = stats["critic/error"]
    assert float((value_RT * mask_RT).sum()) == 4.25 and mask_RT.sum() == 2


def test_a_loss_that_needs_values_needs_a_critic():
    config = base.get_config()
    config.loss.name = "actor_critic"
    (problem,) = recipe_contradictions(config)
    assert problem.endswith("set config.recipe.name=critic")
    config.recipe.name = "critic"
    assert not list(recipe_contradictions(config))


def test_features_have_a_length_near_one_and_a_constant():
    state_nD = np.random.default_rng(0).normal(size=(3, 400)).astype(np.float32)
    found_nD = features(state_nD)
    np.testing.assert_allclose(np.linalg.norm(found_nD[:, :-1], axis=1), 1.0, atol=0.1)
    assert (found_nD[:, -1] == 1).all()


@pytest.mark.parametrize(
    "recipe, loss, rank",
    [
        ("critic", "ppo", 0),
        ("critic", "actor_critic", 0),
        ("separate_critic", "ppo", 0),
        ("separate_critic", "ppo", 2),
    ],
)
def test_a_run_with_a_critic_resumes_bit_for_bit(recipe, loss, rank, finish):
    words = f"recipe.name={recipe} loss.name={loss} lora.rank={rank} eval.every=0"
    whole = figures(finish("whole", words))
    finish("parts", words, "steps=2")
    parts = figures(finish("parts", words))
    assert whole == parts and all("critic/value" in line for line in whole[1:])
    assert ("critic/error" in whole[-1]) == (recipe == "separate_critic" or loss == "actor_critic")


def test_a_separate_critic_trains_its_own_network_and_leaves_the_policys_alone(finish):
    """The policy's first update is the same with either critic, as both expect 0; later advantages
    depend on which network sees the states."""
    words = "loss.name=ppo eval.every=0 steps=2"
    runs = [
        figures(finish(name, f"recipe.name={name}", words))
        for name in ("critic", "separate_critic")
    ]
    shared, separate = (run[1] for run in runs)
    own = {"critic/error"}
    assert {name: separate[name] for name in separate.keys() - own} == shared
    assert separate["critic/error"] > 0
    assert runs[0][2]["critic/value"] != runs[1][2]["critic/value"]


def test_the_error_of_a_separate_critic_is_the_term_of_a_shared_one():
    draw = np.random.default_rng(0)
    channels = {name: jnp.array(draw.normal(size=(1, 3))) for name in ("value", "return")}
    judged_RT = jnp.array([[1.0, 0.0, 1.0]])
    tokens = tokens_of(*draw.normal(size=(3, 1, 3)), **channels, judged=judged_RT)
    both, one = (actor_critic(tokens, value_coef=coef)[0] for coef in (2.0, 1.0))
    np.testing.assert_allclose(squared_error(tokens)[0], both - one, rtol=1e-5, atol=1e-6)
