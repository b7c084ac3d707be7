"""The updates of a step: schedules follow the steps of the run."""

import types

import numpy as np
import pytest

from configs import quickstart
from evolver.learner import make_optimizer
from evolver.phases import learning
from rl import optim
from tests.rl.test_learner import batch


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_decaying_schedule_ends_with_the_run_however_few_updates_were_made(monkeypatch, epochs):
    """Steps whose groups give signal for one mini-batch, or for none, make fewer updates."""
    config = quickstart.get_config()
    config.steps, config.learner.updates, config.learner.epochs = 4, 2, epochs
    monkeypatch.setattr(learning, "score", lambda *_: None)
    monkeypatch.setattr(learning, "note_tokens", lambda *_: None)
    positions, seeds = [], []

    def update(state, packed, *, position, seed):
        positions.append(position)
        seeds.append(seed)
        return state, {"logp_RT": 0, "tokens": 1}

    silent = types.SimpleNamespace(phase=lambda *_: None, say=lambda *_: None)
    trained = types.SimpleNamespace(
        update=update, state={}, alarm=types.SimpleNamespace(check=lambda _: ""), renews=False
    )
    engine = types.SimpleNamespace(version=0)
    run = types.SimpleNamespace(
        config=config, learner=trained, progress=silent, actor=types.SimpleNamespace(engine=engine)
    )
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
