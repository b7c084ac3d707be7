"""The examples of docs/extending.md: all of them are extracted, and one run trains with all of
them."""

import inspect
import itertools
import re
import sys
from pathlib import Path

import pytest

from envs.source import Source
from evolver.config import plugs
from evolver.files.rollout_files import read_rollouts
from evolver.files.workdir import Workdir
from evolver.parts import Parts
from evolver.sampling import Draw
from rl.advantages import Batch
from rl.contexts import Opening
from rl.losses import Tokens
from tests.evolver.runs import go

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs/extending.md").read_text()
SHORT = ("--config.navigating.enabled=False", "--config.steps=1")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOC, re.DOTALL))


@pytest.fixture
def folder(tmp_path):
    """Write the examples into a folder. What is imported from there is forgotten afterwards."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def call(folder: Path, *words: str) -> int:
    small = {
        "steps": 2, "rollout.tasks": 2, "rollout.group": 4, "rollout.max_turns": 5, "learner.updates": 1,
        "questioning.budget": 6, "navigating.rollouts": 4, "navigating.tasks": 4, "navigating.every": 1,
        "eval.every": 0, "engine.slots": 4, "engine.prefill": 64, "rollout.context": 256,
    }  # fmt: skip
    values = [f"--config.{name}={value}" for name, value in small.items()]
    return go(folder / "my_ideas.py", folder / "run", *values, *words)


def test_there_is_an_example_of_each_kind_under_forty_lines():
    assert all(text.count("\n") < 40 for text in FILES.values())
    named = set(re.findall(r"config\.([\w.]+?)(?:\.name = |, )\"\w+:", FILES["my_ideas.py"]))
    assert named == set(plugs.KINDS)


def test_the_table_names_what_there_is():
    for key, kind in plugs.KINDS.items():
        (row,) = [line for line in DOC.splitlines() if line.startswith(f"| `{key}` |")]
        assert row.split("|")[3].strip(" `") == kind.given, key
        assert row.split("|")[5].strip().split(", ") == list(plugs.known(key)), key
        assert kind.protocol.startswith(row.split("|")[4].strip(" `")), key


@pytest.mark.parametrize("kind", [Batch, Tokens, Opening, Parts, Draw])
def test_the_document_lists_all_that_a_plug_is_given(kind):
    listed = re.search(rf"`{kind.__name__}` \(\[.*?(?:\|$|\n\n)", DOC, re.DOTALL | re.MULTILINE)[0]
    fields = set(inspect.get_annotations(kind)) - {"client"}  # it is given as `chat`
    fields |= {name for name, x in vars(kind).items() if isinstance(x, property)}
    missing = {name for name in fields if not re.search(rf"`{name}\b", listed)}
    assert not missing, listed


def test_all_examples_train_together(folder, stderr):
    assert call(folder) == 0, stderr()
    metrics = Workdir(folder / "run").metrics()
    assert metrics[0]["questioning/walks"] > 0  # the random walk
    assert metrics[0]["questioning/pool"] >= 2
    assert metrics[0]["navigating/pool"] > 0  # the extractor and the embedder
    assert metrics[1]["rollout/count/guided"] > 0  # the refiner
    assert "negative" in metrics[1] or "negative" in metrics[2]  # the loss
    paths = (folder / "run/trajectories").glob("*.jsonl.gz")
    records = itertools.chain.from_iterable(map(read_rollouts, paths))
    turns = itertools.chain.from_iterable(record["turns"] for record in records)
    assert "the world refused it" in {turn["reason"] for turn in turns}  # the judge of turns
    assert " fails: " in (folder / "run/experience/experiences.jsonl").read_text()


def test_the_recipe_also_trains_with_rollouts_of_later_steps(folder, stderr):
    assert call(folder, "--config.rollout.async_depth=1") == 0, stderr()


@pytest.mark.parametrize(
    "override,words",
    [
        ("advantage.args.flor=1", "there is no argument 'flor' (did you mean floor?)"),
        ("advantage.args.floor=0", "floor=0 must be above 0"),
        ("template.name=last_turns:LastTurn", "has no attribute 'LastTurn'"),
        ("attributing.enabled=False", "needs labels of turns"),
    ],
)
def test_a_plug_that_cannot_be_used_is_one_message(folder, stderr, override, words):
    assert call(folder, f"--config.{override}") == 2
    err = stderr()
    assert words in err and "Traceback" not in err and "nothing was started" in err
    if ".args." in override:
        assert "The call is" in err


def test_a_plan_prints_the_calls_with_their_defaults(folder, stdout):
    assert call(folder, "--mode=plan") == 0
    out = stdout()
    assert "max_normalised:max_normalised(floor=0.1, bonus=0.2)" in out
    assert "last_turns:LastTurns(keep=6)" in out


def test_another_plug_on_the_command_line_starts_from_its_own_defaults(folder, stderr, stdout):
    words = ("--config.advantage.name=adca", "--config.template.name=causal", "--mode=plan")
    assert call(folder, *words) == 0, stderr()
    assert "adca(alpha=0.1" in stdout()


def test_a_config_may_import_its_neighbour(folder, stdout):
    (folder / "second.py").write_text(
        "import my_ideas\n\n\ndef get_config(arg=None):\n    config = my_ideas.get_config()\n"
        "    config.advantage.args.floor = 0.5\n    return config\n"
    )
    assert go(folder / "second.py", folder / "run", "--mode=plan") == 0
    assert "max_normalised(floor=0.5, bonus=0.2)" in stdout()


def test_a_world_beside_the_config_is_found_by_workers(folder):
    (folder / "room.py").write_text(
        "from envs.world import Task\nfrom tests.tiny import Parity\n\n\nclass Room(Parity):\n"
        "    def tasks(self, split):\n        return [Task('beside/the/config', 'room', 'Wait.', split)]\n"
    )
    plugs.look_in(folder)
    with Source("room:Room", {}, mode="worker", workers=1) as source:
        world = source.world()
        assert [task.id for task in world.tasks("train")] == ["beside/the/config"]
        world.close()


@pytest.mark.parametrize("declared,refused", [("None", False), ("True", False), ("False", True)])
def test_an_estimator_that_cannot_read_labels_is_refused_where_labels_are_made(
    folder, stderr, declared, refused
):
    (folder / "whole.py").write_text(
        f"def whole(batch):\n    return None\n\n\nwhole.needs_labels = {declared}\n"
    )
    code = call(folder, "--config.advantage.name=whole:whole", "--mode=plan")
    assert code == (2 if refused else 0)
    assert ("ignores them" in stderr()) == refused


@pytest.mark.parametrize(
    "override,source,words",
    [
        (
            "loss",
            "def f(tokens):\n    return tokens.logp_RT\n",
            "a loss returns (loss_RT, metrics)",
        ),
        ("advantage", "def f(batch):\n    return batch.label_NK[0]\n", "broken:f returned shape"),
        (
            "attributing.judge",
            "from evolver.attributing import TurnJudge\n\n\nclass f(TurnJudge):\n"
            "    def label(self, trajectories):\n        return [[1 for _ in t.turns] for t in trajectories]\n",
            "f.label returned 1 for a turn, not a Label",
        ),
    ],
)
def test_a_plug_that_returns_the_wrong_thing_is_named(folder, override, source, words):
    (folder / "broken.py").write_text(source)
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        call(folder, f"--config.{override}.name=broken:f", *SHORT)


def test_a_template_that_breaks_ends_the_run_with_its_line(folder, stderr):
    (folder / "broken.py").write_text(
        "from rl.contexts.causal import Causal\n\n\nclass Broken(Causal):\n"
        "    def __init__(self, opening):\n        raise KeyError('turn')\n"
    )
    assert call(folder, "--config.template.name=broken:Broken", *SHORT) == 3
    err = stderr()
    assert "the context template failed in every rollout" in err and "(broken.py, line 6)" in err


def test_an_outcome_judge_that_keeps_the_worlds_evaluation_fits_a_judge_that_replays(
    folder, stderr
):
    """The property of the plug decides, not its name."""
    (folder / "own.py").write_text(
        "from evolver.questioning import Verifier\n\n\nclass Own(Verifier): ...\n"
    )
    replay = ("--config.attributing.judge.name=replay", "--mode=plan")
    assert call(folder, *replay) == 2
    assert "has to reproduce an outcome" in stderr()
    assert call(folder, *replay, "--config.questioning.judge.name=own:Own") == 0
