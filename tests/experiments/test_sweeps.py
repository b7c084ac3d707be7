"""Sweeps: every file names real keys with values that they may have, and drives a grid and W&B's
agent alike."""

from pathlib import Path

import pytest
import yaml

import run
from evolver.config import cli
from experiments import grid
from tests.configs import config_of, mistakes

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments/sweeps").glob("*.yaml"))


def words_of(sweep: dict, values: dict) -> list[str]:
    """The command of a trial, as the agent fills in its macros."""
    words = [word for word in sweep["command"] if word != "${env}"]
    place = words.index("${args}")
    words[place : place + 1] = [f"--{key}={value}" for key, value in values.items()]
    return words


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_sweep_names_real_keys_with_values_that_they_may_have(path):
    text = path.read_text()
    sweep = yaml.safe_load(text)
    assert sweep["method"] == "grid" and sweep["metric"]["name"].startswith("eval/")
    assert text.startswith("# ") and f"--sweep experiments/sweeps/{path.name}" in text
    defaults = {key: rule["values"][0] for key, rule in sweep["parameters"].items()}
    assert "config.seed" in defaults
    for key, rule in sweep["parameters"].items():
        for value in rule["values"] if key != "config.seed" else rule["values"][:1]:
            words = words_of(sweep, defaults | {key: value})
            assert words[:4] == ["python", "-m", "experiments.grid", "--trial"]
            command = cli.parse(grid.trial(words[4:], {})[1:])
            assert not command.problems
            assert not mistakes(command.config)


def test_trials_have_workdirs_of_their_own_and_may_be_offline():
    environ = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "r1"}
    words = grid.trial(["--config=c.py", "--config.seed=1"], environ)
    set_here = {"--workdir=runs/sweeps/s1/r1", "--config.log.wandb=online", "--config.log.group=s1"}
    assert set_here <= set(words) and words[1].endswith("run.py")
    assert "--config.log.wandb=offline" in grid.trial([], environ | {"WANDB_MODE": "offline"})
    own = ["--workdir=x", "--config.log.wandb=off"]
    assert grid.trial(own, {})[2:4] == own
    assert grid.trial([], {})[-1] != grid.trial([], {})[-1]


def test_a_grid_takes_the_values_of_a_sweep(tmp_path):
    sets, config = grid.read_sweep(ROOT / "experiments/sweeps/alpha.yaml")
    assert sets == {"advantage.args.alpha": [0.05, 0.1, 0.2, 0.3]}
    assert config == "configs/quickstart.py:qa"
    continuous = "parameters: {config.a: {min: 0, max: 1}}\ncommand: [--config=c]"
    for text in (continuous, "method: grid", "[", "1"):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"bad\.yaml"):
            grid.read_sweep(path)


def test_whole_floats_are_integers_where_integers_are_wanted(stderr):
    adca = ("attributing.enabled=True", "advantage.name=adca")
    floats = ("rollout.tasks=2.0", "advantage.args.alpha_steps=5.0", "advantage.args.alpha=1.0")
    config = config_of("quickstart:grpo", *adca, *floats)
    args = config.advantage.args
    found = (config.rollout.tasks, args.alpha_steps, args.alpha)
    assert found == (2, 5, 1) and [type(value) for value in found] == [int, int, float]
    words = ["--config=configs/quickstart.py", "--config.rollout.group=2.5", "--mode=plan"]
    assert run.main(["run.py", *words]) == 2
    assert "config.rollout.group must be of type int" in stderr()
