"""Sweeps: every file names real keys with values that they may have, and drives a grid and W&B's
agent alike."""

from pathlib import Path

import pytest
import yaml

import run
from evolver.config import cli
from experiments import grid
from tests.configs import mistakes
from tests.tiny import config_file, tiny_policy

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments/sweeps").glob("*.yaml"))


def words_of(sweep: dict, values: dict) -> list[str]:
    """The command of a trial, as the agent fills in its macros."""
    words = []
    for word in sweep["command"]:
        words += (
            [f"--{key}={value}" for key, value in values.items()] if word == "${args}" else [word]
        )
    return [word for word in words if word != "${env}"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_sweep_names_real_keys_with_values_that_they_may_have(path):
    sweep = yaml.safe_load(path.read_text())
    assert sweep["method"] == "grid" and sweep["metric"]["name"].startswith("eval/")
    assert (
        path.read_text().startswith("# ")
        and f"--sweep experiments/sweeps/{path.name}" in path.read_text()
    )
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
    assert (
        f"--workdir={Path('runs/sweeps/s1/r1')}" in words and "--config.log.wandb=online" in words
    )
    assert "--config.log.group=s1" in words and words[1].endswith("run.py")
    assert "--config.log.wandb=offline" in grid.trial([], environ | {"WANDB_MODE": "offline"})
    assert grid.trial(["--workdir=x", "--config.log.wandb=off"], {})[2:4] == [
        "--workdir=x",
        "--config.log.wandb=off",
    ]
    assert grid.trial([], {})[-1] != grid.trial([], {})[-1]


def test_a_grid_takes_the_values_of_a_sweep(tmp_path):
    sets, config = grid.read_sweep(ROOT / "experiments/sweeps/alpha.yaml")
    assert (
        sets == {"advantage.args.alpha": [0.05, 0.1, 0.2, 0.3]}
        and config == "configs/quickstart.py:qa"
    )
    for text in (
        "parameters: {config.a: {min: 0, max: 1}}\ncommand: [--config=c]",
        "method: grid",
        "[",
        "1",
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"bad\.yaml"):
            grid.read_sweep(path)


def test_whole_floats_are_integers_where_integers_are_wanted(tmp_path, capsys):
    config = config_file(tmp_path, tiny_policy(tmp_path / "policy"))
    words = [
        "run.py",
        f"--config={config}",
        "--config.rollout.tasks=2.0",
        "--config.advantage.name=adca",
    ]
    words += [
        "--config.attributing.enabled=True",
        "--config.advantage.args.alpha_steps=5.0",
        "--config.optim.lr=1.0",
    ]
    command = cli.parse([*words, "--config.advantage.args.alpha=1.0"])
    assert not command.problems
    assert command.config.rollout.tasks == 2 and type(command.config.rollout.tasks) is int
    assert (
        type(command.config.advantage.args.alpha_steps) is int
        and type(command.config.advantage.args.alpha) is float
    )
    assert run.main([*words, "--config.rollout.group=2.5", "--mode=plan"]) == 2
    assert "config.rollout.group must be of type int" in capsys.readouterr().err
