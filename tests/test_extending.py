"""The examples of docs/extending.md: all of them are extracted, and one run trains with all of them."""

import json
import re
import sys
from pathlib import Path

import pytest

import run
from evolver import plugs
from evolver.workdir import Workdir

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs/extending.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOC, re.DOTALL))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def call(folder: Path, *words: str) -> int:
    small = {
        "steps": 2, "rollout.tasks": 2, "rollout.group": 4, "rollout.max_turns": 5, "learner.updates": 1,
        "questioning.budget": 6, "navigating.rollouts": 1, "navigating.tasks": 4, "navigating.every": 1,
        "eval.every": 0,
    }  # fmt: skip
    values = [f"--config.{name}={value}" for name, value in small.items()]
    return run.main(["run.py", f"--config={folder}/my_ideas.py", f"--workdir={folder}/run", *values, *words])


def test_there_is_an_example_of_each_kind_under_forty_lines():
    assert all(text.count("\n") < 40 for text in FILES.values())
    named = set(re.findall(r"config\.([\w.]+)\.name = \"\w+:", FILES["my_ideas.py"]))
    assert named == set(plugs.KINDS)


def test_the_table_names_what_there_is():
    for key, kind in plugs.KINDS.items():
        (row,) = [line for line in DOC.splitlines() if line.startswith(f"| `{key}` |")]
        assert set(re.findall(r"`(\w+)`", row.split("|")[3])) <= set(kind.provides), key
        assert row.split("|")[5].strip().split(", ") == list(plugs.known(key)), key
        assert kind.protocol.startswith(row.split("|")[4].strip(" `")), key


def test_all_examples_train_together(folder, capsys):
    assert call(folder) == 0, capsys.readouterr().err
    metrics = Workdir(folder / "run").metrics()
    assert metrics[0]["questioning/walks"] > 0 and metrics[0]["questioning/pool"] >= 2  # the random walk
    assert metrics[0]["navigating/pool"] > 0  # the extractor and the embedder
    assert metrics[1]["rollout/count/guided"] > 0  # the refiner
    assert "negative" in metrics[1] or "negative" in metrics[2]  # the loss
    turns = [
        turn
        for path in (folder / "run/trajectories").iterdir()
        for line in path.read_text().splitlines()
        for turn in json.loads(line)["turns"]
    ]
    assert "the world refused it" in {turn["reason"] for turn in turns}  # the judge of turns
    pool = (folder / "run/experience/experiences.jsonl").read_text()
    assert '"embedder": "letters"' in pool and " fails: " in pool


@pytest.mark.parametrize(
    "override,words",
    [
        ("advantage.args.flor=1", "there is no argument 'flor' (did you mean floor?)"),
        ("advantage.args.floor=0", "floor=0 must be > 0"),
        ("advantage.args.bonus=many", "bonus='many' must be of type float"),
        ("loss.args.down=2.0", "down=2.0 must be <= 1"),
        ("template.name=last_turns:LastTurn", "has no attribute 'LastTurn'"),
        ("questioning.explorer.name=nowhere:Walk", "No module named 'nowhere'"),
        ("attributing.judge.name=repaly", "Did you mean replay?"),
        ("attributing.enabled=False", "needs labels of turns"),
    ],
)
def test_a_plug_that_cannot_be_used_is_one_message(folder, capsys, override, words):
    assert call(folder, f"--config.{override}") == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err and "nothing was started" in err
    if ".args." in override:
        assert "The call is" in err


def test_a_plan_prints_the_calls_with_their_defaults(folder, capsys):
    assert call(folder, "--mode=plan") == 0
    out = capsys.readouterr().out
    assert "max_normalised:max_normalised(floor=0.1, bonus=0.2)" in out and "last_turns:LastTurns(keep=6)" in out


def test_another_plug_on_the_command_line_starts_from_its_own_defaults(folder, capsys):
    words = ("--config.advantage.name=adca", "--config.template.name=causal", "--mode=plan")
    assert call(folder, *words) == 0, capsys.readouterr().err
    assert "adca(alpha=0.1" in capsys.readouterr().out
