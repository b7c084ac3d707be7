"""Several worlds in one run: each has a quota, a template, an advantage factor and an evaluation of
its own, and every figure is by world, too."""

import sys

import numpy as np
import pytest

from configs import base
from envs.world import Evaluation, Task
from evolver import grading
from evolver.build import make_template
from evolver.config import checks, derived
from evolver.config.checks.workdir import differences
from evolver.config.checks.world import evaluated
from evolver.config.cli import override
from evolver.files.workdir import Workdir
from evolver.llm.roles import roles_of
from evolver.metrics import rollout_metrics
from evolver.phases.tasks import trained_in
from evolver.worlds import make_source
from rl.contexts import Context, Opening
from tests.evolver.runs import figures, go, rollouts_of
from tests.rl.test_samples import trajectory, turn

PARITY = "tests.tiny:Parity"
WORLDS = {"a": {"name": PARITY}, "b": {"name": PARITY, "splits": {"dev": "train", "train": "dev"}}}


def mixed(**worlds):
    config = base.get_config()
    config.env.name = "mixture"
    config.env.args.worlds = WORLDS | worlds
    config.rollout.tasks, config.learner.updates = 6, 1
    config.model.tokenizer = "configs/assets/travel_base"
    return config


def problems(config, tmp_path, mode="train"):
    return "\n".join(checks.problems(config, base.Config, tmp_path / "run", mode))


def test_a_sound_mixture_has_no_problem(tmp_path):
    config = mixed()
    config.sampler.name = "quotas"
    config.sampler.args.weights = {"a": 2}
    config.template.worlds = {"b": {"name": "brief", "show_tools": False}}
    config.advantage.worlds, config.eval.worlds = {"b": 0.5}, {"a": 3, "b": 0}
    assert problems(config, tmp_path) == ""
    assert derived.worlds(config) == {"a": PARITY, "b": PARITY}
    config.env.mode = "worker"
    assert problems(config, tmp_path) == ""


def test_everything_that_is_wrong_with_a_mixture_is_said_at_once(tmp_path):
    config = mixed(home={"args": {"rulse": 1}}, mine={"name": "no_such:World"})
    config.env.args.worlds.a.python = "/no/such/python"
    config.sampler.name = "quotas"
    config.sampler.args.weights = {"a": -1.0, "homes": 1.0}
    config.template.worlds = {"b": {"name": "breif"}, "c": {"show_tools": False}}
    config.advantage.worlds = {"d": 1.0}
    config.eval.worlds = {"e": 2}
    said = problems(config, tmp_path)
    for words in (
        "worlds.mine.name=no_such:World", "worlds.home.name=home with", "'rulse'",
        "worlds.a.python=/no/such/python: there is no such program",
        "worlds.a.python is for config.env.mode=worker; it is inprocess",
        "config.sampler.args: weights={'a': -1.0, 'homes': 1.0} must be at least 0",
        "config.sampler.args.weights names the world 'homes' (did you mean home?); there are a, b,",
        "config.template.worlds.b.name='breif' is not known (did you mean brief?)",
        "config.template.worlds names the world 'c'",
        "config.advantage.worlds names the world 'd'",
        "config.eval.worlds names the world 'e'",
    ):  # fmt: skip
        assert words in said, words


def test_a_world_that_there_is_not_makes_no_other_world_unknown(tmp_path):
    config = mixed(hom={})
    config.advantage.worlds = {"a": 1.0}
    config.eval.worlds = {"b": 2}
    said = problems(config, tmp_path)
    assert "no world 'hom' to mix" in said and "names the world" not in said
    assert "mixture" not in said.partition("there are ")[2].partition("my_module")[0]


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("advantage", {"a": float("nan")}, "config.advantage.worlds must be finite"),
        ("advantage", {"a": -1}, "config.advantage.worlds must be at least 0"),
        ("eval", {"a": -1}, "config.eval.worlds must be at least 0"),
        ("template", {"a": {"shown": 1}}, "config.template.worlds must be without other keys"),
        ("template", {"a": {"show_tools": 1}}, "config.template.worlds must be of type bool"),
    ],
)
def test_numbers_and_keys_of_worlds_have_bounds(key, value, words, tmp_path):
    config = mixed()
    config[key].worlds = value
    assert words in problems(config, tmp_path)


def test_a_task_of_another_world_and_a_name_without_a_world_are_found(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "x", "env": "travel", "query": "q"}\n')
    config = mixed()
    config.env.tasks = str(path)
    said = problems(config, tmp_path)
    assert "tasks of travel are given, which the mixture does not have" in said
    config = base.get_config()
    config.advantage.worlds = {"home": 0.5}  # the world is travel
    said = problems(config, tmp_path)
    assert "config.advantage.worlds names the world 'home'; there are travel" in said


def test_the_command_line_reaches_what_is_said_of_one_world(tmp_path):
    config = mixed()
    words = ["env.args.worlds.a.args.size=2", "env.args.worlds.c.name=home", "eval.worlds={'b': 1}"]
    for word in words:
        assert override(config, f"--config.{word}") == ""
    given = config.env.args.worlds.to_dict()
    assert given == WORLDS | {"a": WORLDS["a"] | {"args": {"size": 2}}, "c": {"name": "home"}}
    assert config.eval.worlds.b == 1


def test_where_workers_run_may_change_when_a_run_resumes_and_what_they_play_may_not():
    before, now = mixed().to_dict(), mixed(a={"name": PARITY, "python": "other", "workers": 3})
    assert differences(before, now, base.Config) == []
    (said,) = differences(before, mixed(c={"name": PARITY}), base.Config)
    assert said.startswith("env.args.worlds:")


def test_each_world_has_the_template_that_is_said_of_it():
    config = mixed()
    config.template.args = {}
    config.template.worlds = {"a": {"name": f"{__name__}:Told", "args": {"size": 3}}}
    config.template.worlds.b = {"show_tools": False}
    config.template.name = f"{__name__}:Told"
    template = make_template(config)
    seen = {w: template(Opening(None, None, world=w)) for w in ("a", "b", "c")}
    assert {w: (t.size, t.opening.show_tools) for w, t in seen.items()} == {
        "a": (3, True), "b": (1, False), "c": (1, True),
    }  # fmt: skip
    config.template.worlds.b = {"name": "summarised_window"}
    assert roles_of(config) == ("summariser",)


class Told(Context):
    def __init__(self, opening, *, size: int = 1):
        self.opening, self.size = opening, size

    async def extend(self, completion, messages, tools=None): ...


def test_an_evaluation_takes_the_tasks_that_are_said_of_each_world():
    tasks = [Task(f"{w}{n}", w, "q") for n in range(5) for w in "abc"]
    config = base.get_config().eval
    config.tasks, config.worlds = 2, {"a": 3, "b": 0}
    counted = {w: sum(t.env == w for t in evaluated(tasks, config)) for w in "abc"}
    assert counted == {"a": 3, "b": 5, "c": 2}
    config.worlds = {}
    assert len(evaluated(tasks, config)) == 2


def rollout(world, success=True, origin="original"):
    made = trajectory(turn([1], [2]))
    made.task = Task(f"{world}1", world, "q", origin=origin)
    made.evaluation = Evaluation(float(success), success)
    return made


def test_advantages_are_scaled_by_world():
    config = base.get_config()
    config.advantage.worlds, config.advantage.synthetic = {"b": 0.5}, 0.5
    played = [rollout("a"), rollout("b"), rollout("b", origin="synthetic")]
    grading.assign(config, lambda batch: np.ones(3), played, 1)
    assert [t.turns[0].advantage for t in played] == [1, 0.5, 0.25]


def test_figures_of_rollouts_are_by_world_too():
    played = [rollout("a"), rollout("a", False), rollout("b")]
    found = rollout_metrics(played, [None, "no_signal", None], ["a", "b", "c"])
    assert (found["rollout/count/world_a"], found["rollout/count/world_c"]) == (2, 0)
    assert (found["rollout/success/world_a"], found["rollout/success/world_b"]) == (0.5, 1)
    assert (found["ledger/trained/world_a"], found["ledger/no_signal/world_a"]) == (1, 1)
    assert found["ledger/trained/world_c"] == 0
    assert not [name for name in rollout_metrics(played, [None] * 3) if "world" in name]


def test_a_card_names_each_world(tmp_path):
    (tmp_path / "README.md").write_text("Trained by Evolver: 3 steps on `travel`, `home`.")
    assert trained_in("home", str(tmp_path)) and not trained_in("bfcl", str(tmp_path))


def test_a_run_of_several_worlds_under_several_interpreters_resumes(tiny, tmp_path, capsys):
    config = tmp_path / "mixed.py"
    config.write_text(
        f"""import importlib.util
spec = importlib.util.spec_from_file_location("tiny_of_mixed", {str(tiny)!r})
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)

def get_config():
    config = tiny.get_config()
    config.env.name, config.env.mode, config.env.workers = "mixture", "worker", 1
    config.env.args.worlds = {WORLDS!r}
    config.env.args.worlds.b.python = {sys._base_executable!r}
    config.sampler.name, config.sampler.args.weights = "quotas", {{"a": 2}}
    config.template.worlds = {{"b": {{"name": "sliding_window"}}}}
    config.advantage.worlds = {{"b": 0.0}}
    config.eval.worlds, config.eval.every = {{"a": 2, "b": 1}}, 1
    return config
"""
    )
    assert go(config, tmp_path / "run", "--config.steps=1") == 0
    words = [f"--config.env.args.worlds={WORLDS}", "--config.steps=2"]  # one interpreter
    assert go(config, tmp_path / "run", *words) == 0
    assert "resuming after step 1" in capsys.readouterr().out
    for number, line in enumerate(figures(tmp_path / "run")[1:], 1):
        assert (line["rollout/count/world_a"], line["rollout/count/world_b"]) == (8, 4)
        assert line["ledger/trained/world_b"] == 0 == line["ledger/env_error"]
        assert line["ledger/trained/world_a"] == line["ledger/trained"]
        assert 0 <= line["eval/avg@2/world_a/low"] <= line["eval/avg@2/world_a"]
        records = rollouts_of(tmp_path / "run", number)
        assert {r["world"] for r in records} == {r["task"][0] for r in records} == {"a", "b"}
    assert {len(s.tasks) for s in Workdir(tmp_path / "run").scores().values()} == {3}
    summary = (tmp_path / "run/summary.md").read_text()
    assert "- environment: a, b" in summary
    for row in ("world a (2), pass@2", "world b (1)", "| fate", "|   a |   b |"):
        assert row in summary, row


def test_a_source_names_every_world_whose_workers_do_not_start():
    config = mixed(a={"name": "no_such:World"}, b={"name": "no_other:World"})
    config.env.mode, config.env.workers = "worker", 1
    with pytest.raises(Exception, match=r"(?s)a: .*no_such.*b: .*no_other"):
        make_source(config)
