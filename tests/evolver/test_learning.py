"""The updates of a step: schedules follow the steps of the run."""

from unittest import mock

import numpy as np
import pytest

from configs import base, quickstart
from evolver.config.derived import kl_coef, needs_reference
from evolver.learner import make_optimizer
from evolver.parts import Parts
from evolver.phases import learning
from evolver.recipes import Recipe
from rl import optim
from rl.losses.terms import aggregation_weights
from rl.packing import pack
from rl.samples import Sample
from tests.rl.test_learner import batch
from tests.rl.test_samples import trajectory, turn


def run_at(config, version=0, recipe=Recipe, **learner):
    """Return what stands in for a run whose engine has the weights of a version."""
    run = mock.Mock(config=config, recipe=recipe(Parts()))
    run.actor.engine.version = version
    run.learner = mock.Mock(renews=False, needs_reference=False, **learner)
    run.learner.update.weights = lambda packed: packed.mask_RT
    run.learner.alarm.check.return_value = ""
    return run


@pytest.fixture(autouse=True)
def stand_ins_have_whole_weights(monkeypatch):
    monkeypatch.setattr(learning, "whole", lambda state, layout: state)


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_decaying_schedule_ends_with_the_run_however_few_updates_were_made(monkeypatch, epochs):
    """Steps whose groups give signal for one mini-batch, or for none, make fewer updates."""
    config = quickstart.get_config()
    config.steps, config.learner.updates, config.learner.epochs = 4, 2, epochs
    monkeypatch.setattr(learning, "score", lambda *_, **__: None)
    monkeypatch.setattr(learning, "note_tokens", lambda *_: None)
    positions, seeds = [], []

    def update(state, packed, *, position, seed):
        positions.append(position)
        seeds.append(seed)
        return state, {"logp_RT": 0, "tokens": 1}

    run = run_at(config, update=update)
    for step, made in enumerate((2, 0, 1, 1), 1):
        learning.learn(run, [batch(rows=1)] * made, step)
    planned = 2 * epochs
    first, *_, last = np.split(np.array(positions), [planned, planned + epochs])
    np.testing.assert_allclose(first, np.arange(planned))
    np.testing.assert_allclose(last, 3 * planned + 2 * np.arange(epochs))
    assert len(set(seeds)) == len(seeds)


def test_the_schedule_of_a_run_is_planned_over_its_updates(monkeypatch):
    config = quickstart.get_config()
    seen = {}
    monkeypatch.setattr(optim, "schedule", lambda **given: seen.update(given) or 1.0)
    make_optimizer(config)
    assert seen["steps"] == config.steps * config.learner.updates * config.learner.epochs


def test_the_balance_is_that_of_tokens_or_of_rollouts():
    """A failure of nine tokens outweighs a success of three, unless each rollout counts alike."""
    samples = [
        Sample(np.arange(1, n + 2), np.arange(n + 1) > 0, advantage=[0.0] + [sign] * n)
        for n, sign in ((9, -1.0), (3, 1.0))
    ]
    packed = pack(samples, 16)

    def balance(aggregate):
        weight_RT = aggregation_weights(packed.mask_RT, packed.rollout_RT, aggregate=aggregate)
        learner = mock.Mock(**{"update.weights.return_value": weight_RT})
        return learning.balance(learner, packed)

    assert balance("token-mean") == pytest.approx(-0.5)
    assert balance("seq-mean-token-mean") == pytest.approx(0.0, abs=1e-6)
    assert balance("seq-mean-token-sum") == pytest.approx(-0.5)


@pytest.mark.parametrize("share", [False, True])
def test_old_log_probabilities_of_guided_tokens_alone_are_those_of_all_rows(share):
    """They take a pass over the guided samples, and no more."""
    draw, rows, samples = np.random.default_rng(0), [], []
    prompts = draw.integers(1, 99, (3, 7))
    for i in range(9):
        tokens = np.concatenate([prompts[i % 3], draw.integers(1, 99, 3 + i)])
        place = np.arange(len(tokens))
        samples.append(Sample(tokens, place > 6, logp=-place * (place > 6), guided=i % 2 == 1))

    def logp(params, packed):
        rows.append(packed.rows)
        told = packed.tokens_RT + np.roll(packed.tokens_RT, 1, axis=1) / 100
        return np.where(packed.mask_RT, told, 0).astype(np.float32)

    learner = mock.Mock(logp=logp, needs_reference=False)
    config = base.get_config()
    config.loss.fast = True
    together, apart = (pack(samples, 32, share=share) for _ in range(2))
    apart.guided_alone = pack([sample for sample in samples if sample.guided], 32, share=share)
    for packed in (together, apart):
        learning.score(config, learner, packed)
    np.testing.assert_array_equal(apart.old_logp_RT, together.old_logp_RT)
    guided_RT = apart.mask_RT & apart.guided_RT
    assert guided_RT.any() and (apart.old_logp_RT[guided_RT] > 0).all()
    unguided_RT = ~apart.guided_RT
    np.testing.assert_array_equal(apart.old_logp_RT[unguided_RT], apart.logp_RT[unguided_RT])
    assert rows[1] < rows[0]


@pytest.mark.parametrize(
    "key, value, alone",
    [("old_logp", "sampled", 2), ("old_logp", "recomputed", 0), ("fast", True, 2)],
)
def test_guided_rollouts_are_packed_apart_where_they_alone_are_scored(key, value, alone):
    config = base.get_config()
    config.loss[key], config.learner.updates = value, 1
    played = [
        trajectory(turn([1, 2], [3, 4], 1.0 - n, version=0), experience=["e"] * (n % 2))
        for n in range(4)
    ]
    (packed,), _, _ = learning.select(run_at(config), played, [], 1)
    found = packed.guided_alone
    assert (0 if found is None else found.sample_RT.max() + 1) == alone
    assert found is None or found.guided_RT[found.mask_RT].all()


def test_a_fast_run_makes_no_pass_before_an_update():
    config = base.get_config()
    assert config.loss.kl_coef and config.loss.old_logp == "recomputed" and needs_reference(config)
    config.loss.fast = True
    packed = learning.mini_batch(config, [trajectory(turn([1, 2], [3, 4], 1.0))])
    scored = mock.Mock(needs_reference=needs_reference(config))
    learning.score(config, scored, packed)
    assert not scored.logp.called and packed.old_logp_RT is None and not kl_coef(config)


def test_the_first_mini_batch_has_the_old_log_probabilities_of_its_own_update():
    """Only the others take a pass, whose figures are those of a run with a pass for each."""
    config = base.get_config()
    config.loss.kl_coef, config.learner.updates, config.learner.epochs = 0.0, 2, 2

    def learnt(recipe):
        scored, olds = [], []

        def update(state, packed, *, position, seed):
            olds.append(packed.old_logp_RT)
            told = np.where(packed.mask_RT, -1.0 - len(olds), 0).astype(np.float32)
            return state, {"logp_RT": told, "tokens": 1.0}

        def logp(params, packed):
            scored.append(packed)
            return np.where(packed.mask_RT, -2.0, 0).astype(np.float32)

        run = run_at(config, recipe=recipe, update=update, logp=logp)
        played = [[trajectory(turn([1], [n], 1.0, version=0))] for n in range(2)]
        batches = [learning.mini_batch(config, part) for part in played]
        return learning.learn(run, batches, 3), scored, olds

    class Weighing(Recipe):
        def weigh(self, batches):
            return {}

    metrics, scored, olds = learnt(Recipe)
    before, all_scored, all_olds = learnt(Weighing)
    assert len(scored) == 1 and len(all_scored) == 2
    assert np.isnan(olds[0]).sum() == 1 and not any(np.isnan(old).any() for old in olds[1:])
    np.testing.assert_array_equal(olds[1], all_olds[1])
    np.testing.assert_array_equal(np.stack(olds[2:]), np.stack(all_olds[2:]))
    name = "mismatch/fresh"
    assert metrics[name] == before[name] and metrics[name] > 0


def test_tokens_of_unknown_log_probability_have_that_of_the_policy():
    """Here a grammar held the second rollout; a guided one gives no pass of its own beside it."""
    played = [trajectory(turn([1, 2], [3, 4], 1.0 - n), task=str(n)) for n in range(3)]
    played[1].turns[0].completion.logprobs = []
    played[2].experience = ["e"]
    config = base.get_config()
    config.loss.old_logp = "sampled"
    packed = learning.mini_batch(config, played)
    assert packed.guided_alone is None
    logp = lambda params, packed: np.where(packed.mask_RT, -9, 0).astype(np.float32)
    learning.score(config, mock.Mock(logp=logp, needs_reference=False), packed)
    old = packed.trained(packed.old_logp_RT)
    np.testing.assert_allclose(old, [-0.03, -0.04, -9, -9, -9, -9], rtol=1e-6)
    learning.note_tokens(packed, packed.old_logp_RT)
    first, held, guided = (t.turns[0].gap for t in played)
    assert held is None and not first.any() and guided.any()


def test_rollouts_of_a_recipe_that_do_not_train_are_counted_and_told_by_their_reason():
    config = base.get_config()
    run, told = run_at(config, 9), {}
    run.progress.once = told.setdefault
    select = run.recipe.select
    old, flat = ([trajectory(turn([1], [2], a, v))] for a, v in ((1.0, 3), (0.0, 9)))
    fine = trajectory(turn([1], [2], 1.0, 9), task="b")
    _, _, ledger = select(run, [fine], [*old, fine], 1)
    assert ledger["ledger/extra"] == 2 and ledger["ledger/extra_trained"] == 1
    assert ledger["ledger/extra_stale"] == 1 and ledger["ledger/extra_overlong"] == 0
    select(run, [fine], [], 1)
    assert not told
    select(run, [fine], old, 2)
    assert "step 2: none of the 1 extra" in told["extra/stale"]
    assert "config.learner.max_staleness=1 allows" in told["extra/stale"]
    select(run, [fine], flat, 3)
    assert told.keys() == {"extra/stale", "extra/no_signal"}
    assert all(learning.REMEDIES[reason].format(c=config.learner) for reason in learning.REASONS)
