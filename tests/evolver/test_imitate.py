"""Imitation: what is wrong with its configs, which demonstrations a batch shows, what Muon does to which weights, and
the whole of it in small."""

import importlib
import itertools
import math

import jax
import numpy as np
import pytest

import run
from configs import base
from evolver import demonstrations
from evolver.config import NOT_FOR_IMITATION, flat, problems
from evolver.imitate import batches, make_optimizer, shares
from models import hf, qwen
from models.tokenizer import TokenizerError, train_bpe
from rl import optim
from rl.samples import Sample
from rl.seeds import seed_of

CONFIG = """
from configs import base

def get_config():
    config = base.get_config()
    config.steps = 3
    config.model.preset = "tiny"
    config.imitation.demonstrations = 6
    config.imitation.rows = 2
    config.learner.row = 512
    config.learner.micro = 2
    config.optim.lr = 3e-3
    return config
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The command's words for a config whose updates take a moment."""
    monkeypatch.setitem(qwen.PRESETS, "tiny", qwen.Config(1024, 32, 1, 2, 1, 16, 64))
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG)
    return ["run.py", f"--config={path}", f"--workdir={tmp_path}/run"]


def config_of(**values):
    config = base.get_config()
    config.steps, config.imitation.demonstrations = 40, 8
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in values.items()})
    return config


def said(config, tmp_path, mode="train") -> list[str]:
    return problems(config, base.get_config(), tmp_path / "run", mode)


# --- what is wrong with a config -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values,words",
    [
        ({"imitation__care": 5.0}, "imitation.care must be between 0 and 1"),
        ({"imitation__hint": 7.0}, "imitation.hint must be between 0 and 1"),
        ({"imitation__careful": 1.5}, "imitation.careful must be between 0 and 1"),
        ({"imitation__final_lr": 2.0}, "imitation.final_lr must be between 0 and 1"),
        ({"imitation__rows": 0}, "imitation.rows must be at least 1"),
        ({"imitation__muon_lr": 0.0}, "imitation.muon_lr must be greater than 0"),
        ({"imitation__vocab": 10}, "imitation.vocab=10 has no room"),
        ({"steps": 6, "optim__warmup": 20}, "optim.warmup=20 updates is longer than the whole run"),
        ({"env__name": "appworld"}, "appworld has no demonstrations to imitate; bfcl and travel have"),
        ({"env__name": "tests.tiny:Parity"}, "has no demonstrations"),
        ({"env__args": {"n_trian": 3}}, "n_trian"),
        ({"model__path": "no/such"}, "does not use config.model.path=no/such"),
        ({"lora__rank": 4, "mesh__data": 2}, "config.lora.rank=4, config.mesh.data=2"),
    ],
)
@pytest.mark.parametrize("mode", ["train", "plan"])
def test_each_mistake_of_imitation_is_named_once(tmp_path, values, words, mode):
    found = said(config_of(**values), tmp_path, mode)
    assert len(found) == 1 and words in found[0]


def test_all_mistakes_of_imitation_are_said_at_once(capsys, tiny):
    wrong = {"imitation.care": 5, "imitation.rows": 0, "imitation.vocab": 10, "optim.warmup": 20, "lora.rank": 4}
    assert run.main([*tiny, *(f"--config.{key}={value}" for key, value in wrong.items())]) == 2
    err = capsys.readouterr().err
    assert "5 problems; nothing was started" in err and all(key in err for key in wrong)


def test_what_imitation_does_not_have_is_not_checked(tmp_path):
    values = {"rollout__tasks": 10**6, "rollout__group": 1, "rollout__temperature": 0.0, "eval__split": "nonsense"}
    config = config_of(**values, learner__updates=10**7, optim__warmup=39)
    assert not said(config, tmp_path)
    config.model.path = "configs/assets/travel_base"  # evaluating the policy is as it is for any other
    assert any("eval.split=nonsense" in text for text in said(config, tmp_path, "eval"))


@pytest.mark.parametrize("name,argument", [("base_policy", None), ("bfcl_tiny", "base")])
def test_the_configs_that_imitate_are_sound(tmp_path, name, argument):
    if name == "bfcl_tiny":
        pytest.importorskip("bfcl_eval")
    config = importlib.import_module(f"configs.{name}").get_config(argument)
    assert not said(config, tmp_path)
    if name == "bfcl_tiny":
        config.imitation.hint = 0.1
        (problem,) = said(config, tmp_path)
        assert "have no hints" in problem


def test_what_imitation_does_not_use_is_off_by_default():
    known = flat(base.get_config())
    assert {name: known[name] for name in NOT_FOR_IMITATION} == NOT_FOR_IMITATION


def test_the_least_vocabulary_is_the_tokenizers(tmp_path):
    (problem,) = said(config_of(imitation__vocab=10), tmp_path)
    least, extra = int(problem.split()[-1]), demonstrations.extra_tokens("travel")
    assert train_bpe(["a"], least, extra).vocab_size == least
    with pytest.raises(TokenizerError):
        train_bpe(["a"], least - 1, extra)


# --- the whole of it -------------------------------------------------------------------------------------------------


def test_a_few_updates_without_clipping_write_a_policy(capsys, tiny, tmp_path):
    assert run.main([*tiny, "--config.optim.clip=0"]) == 0
    out = capsys.readouterr().out
    assert "2 x 6 demonstrations" in out and "imitate 3/3" in out
    shape, params = hf.load(tmp_path / "run" / "policy")
    before = qwen.init(shape, seed_of(0, "init") % 2**31)
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), params, before)
    assert shape.layers == 1 and all(0 < size < math.inf for size in jax.tree.leaves(moved))
    assert "6 careless ones" in (tmp_path / "run" / "policy" / "README.md").read_text()


def test_demonstrations_longer_than_a_row_end_the_run_with_words(capsys, tiny):
    assert run.main([*tiny, "--config.learner.row=16"]) == 1
    err = capsys.readouterr().err
    assert "none of 6 demonstrations fits config.learner.row=16: the shortest has" in err and "Traceback" not in err


def test_a_clip_of_0_is_none():
    """Adam forgets a gradient's size but for its moments: those tell what was clipped."""
    grads = {"norm": np.full(4, 1e3, np.float32)}

    def moments(clip: float) -> list[np.ndarray]:
        tx = make_optimizer(config_of(optim__clip=clip))
        _, state = tx.update(grads, tx.init(grads), grads)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]

    unclipped, far, near = moments(0.0), moments(1e9), moments(1.0)
    assert all(np.array_equal(a, b) for a, b in zip(unclipped, far, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(unclipped, near, strict=True))


@pytest.mark.parametrize("careful,expected", [(1.0, [0, 0, 0, 0]), (0.5, [0, 0, 1, 1]), (0.0, [0.5, 1, 1, 1])])
def test_the_share_of_careless_demonstrations_grows_after_the_careful_ones(careful, expected):
    assert list(itertools.islice(shares(careful, 4), 4)) == expected


# --- batches and updates ---------------------------------------------------------------------------------------------


def samples(token: int, n: int) -> list[Sample]:
    return [Sample(np.full(8, token), np.arange(8) > 0) for _ in range(n)]


def test_careless_samples_come_in_by_the_share_given():
    shares = (0.0, 0.5, 1.0)
    found = list(batches(samples(1, 5), samples(2, 7), shares, 4, 32, 0))
    careless = [np.mean(packed.tokens_RT[packed.tokens_RT > 0] == 2) for packed in found]
    assert careless[0] == 0 and careless[2] == 1 and careless[1] == pytest.approx(0.5, abs=0.1)
    assert all(packed.tokens_RT.shape[0] <= 4 for packed in found)
    again = list(batches(samples(1, 5), samples(2, 7), itertools.islice(shares, 3), 4, 32, 0))
    assert all(np.array_equal(a.tokens_RT, b.tokens_RT) for a, b in zip(found, again, strict=True))


def test_muon_moves_every_direction_of_a_matrix_alike_and_adam_the_rest():
    config = qwen.Config(32, 16, 2, 4, 2, 4, 24)
    params = qwen.init(config, 0)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    grads = jax.tree.map(lambda w: jax.random.normal(next(keys), w.shape), params)
    tx = optim.muon(learning_rate=1.0, adam_learning_rate=0.1, clip_norm=1e9)
    updates, _ = tx.update(grads, tx.init(params), params)
    for name, (inputs, outputs) in optim.MATRICES.items():
        step = np.asarray(updates["layers"][name])
        rows = np.prod([step.shape[axis] for axis in inputs])
        for matrix in step.reshape(step.shape[0], rows, -1):
            sizes = np.linalg.svd(matrix, compute_uv=False)
            assert len(inputs) + len(outputs) == step.ndim - 1 and 0.6 < np.median(sizes) <= sizes.max() < 1.4, name
    for step in (updates["embed"], updates["layers"]["q_bias"]):  # Adam's first one: by sign, whatever the size
        np.testing.assert_allclose(np.abs(step), np.abs(step).max(), rtol=1e-3)
