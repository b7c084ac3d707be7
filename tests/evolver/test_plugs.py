"""Plugs: a name and arguments become a bound callable, or one message that shows the signature."""

import os
import sys
from types import SimpleNamespace
from typing import Literal

import pytest

from configs import base
from evolver.attributing import TurnJudge
from evolver.config import plugs
from evolver.config.keys import flat
from rl.bounds import Count, Fraction
from rl.contexts.causal import Causal


def estimator(batch, *, scale: Fraction = 0.5, kind: Literal["a", "b"] = "a", required: int):
    return batch.outcome_N


class Judge:
    """Has no metrics() and no close()."""

    def label(self, trajectories):
        return []


class Forgetful(TurnJudge):
    def labels(self, trajectories):
        return []


class Blocking(Causal):
    def extend(self, completion, messages, tools=None): ...


def starless(batch, floor=0.1):
    return batch.outcome_N


def unannotated(batch, *, floor=0.1):
    return batch.outcome_N


class Wanting:
    def __init__(self, parts, spaceship, *, depth: Count = 1): ...


class Exploring(Wanting):
    def explore(self): ...


class Simple:
    """Needs nothing of the run."""

    def __init__(self, *, size: Count = 2):
        self.size = size

    def explore(self, world, seeds, budget, rng):
        return ()


class Moving:
    """An estimator that remembers, so it is an object."""

    def __init__(self, *, decay: Fraction = 0.5):
        self.decay = decay
        self.mean = 0.0

    def __call__(self, batch):
        self.mean += self.decay * (batch.outcome_N[0] - self.mean)
        return self.mean


class Uncalled:
    def __init__(self, batch, *, decay: Fraction = 0.5): ...


class Misplaced:
    def __init__(self, batch): ...

    def __call__(self, batch): ...


class Ungiven:
    def __call__(self): ...


HERE = "tests.evolver.test_plugs"


def problem(name, args, key="advantage"):
    (message,) = plugs.problems(key, f"{HERE}:{name}", args)
    return message


@pytest.mark.parametrize(
    "args,words",
    [
        ({"required": 1, "scal": 1.0}, "there is no argument 'scal' (did you mean scale?)"),
        ({}, "required is missing"),
        ({"required": "1"}, "required='1' must be of type int"),
        ({"required": True}, "required=True must be of type int"),
        ({"required": 1, "scale": 2.0}, "scale=2.0 must be at most 1"),
        ({"required": 1, "scale": float("nan")}, "scale=nan must be finite"),
        ({"required": 1, "kind": "c"}, "kind='c' must be 'a' or 'b'"),
    ],
)
def test_wrong_arguments_are_one_message_with_the_signature(args, words):
    message = problem("estimator", args)
    assert words in message and message.startswith("config.advantage.args: ")
    assert f"The call is {HERE}:estimator(scale=0.5, kind='a', required)" in message
    with pytest.raises(plugs.PlugError, match="The call is"):
        plugs.plug("advantage", f"{HERE}:estimator", args)


def test_all_wrong_arguments_are_reported_together():
    message = problem("estimator", {"scale": 2.0, "kind": "c", "colour": 3})
    assert all(words in message for words in ("scale", "kind", "colour", "required is missing"))


def test_a_plug_gets_its_arguments_and_one_positional_argument_unless_it_takes_none():
    bound = plugs.plug("advantage", f"{HERE}:estimator", {"required": 1})
    assert bound(SimpleNamespace(outcome_N=[3.0])) == [3.0]
    assert plugs.plug("questioning.explorer", f"{HERE}:Simple", {"size": 3})("parts").size == 3


@pytest.mark.parametrize("key", ["advantage", "loss"])
def test_a_class_whose_instances_are_called_is_made_once(key):
    made = plugs.plug(key, f"{HERE}:Moving", {"decay": 1.0})
    assert [made(SimpleNamespace(outcome_N=[x])) for x in (3.0, 5.0)] == [3.0, 5.0]
    assert made.mean == 5.0 and not plugs.problems(key, f"{HERE}:Moving", {"decay": 0.1})
    assert "decay=2.0 must be at most 1" in problem("Moving", {"decay": 2.0}, key)


@pytest.mark.parametrize(
    "key,name,words",
    [
        ("advantage", "grop", "(did you mean grpo?). Known names: grpo, rloo, dr_grpo, loop, adca"),
        ("advantage", "nowhere:f", "No module named 'nowhere'"),
        ("advantage", ":nothing", "has no attribute 'nothing'"),
        ("advantage", ":HERE", "it must be callable"),
        ("advantage", "os:getcwd", "it takes no positional argument; the run gives it Batch"),
        ("advantage", "time:time", "no signature found"),
        ("advantage", "math:pow", "y cannot be provided"),
        ("advantage", ":Uncalled", "lacks __call__(): subclass rl.advantages.Estimator"),
        ("advantage", ":Misplaced", "batch cannot be provided: an instance is made from the"),
        ("advantage", ":Ungiven", "it takes no positional argument; the run gives it Batch"),
        (
            "questioning.explorer",
            ":Wanting",
            "lacks explore(): subclass evolver.questioning.Explor",
        ),
        (
            "questioning.explorer",
            ":Exploring",
            "spaceship cannot be provided: a plug has one positional argument, Parts",
        ),
        (
            "attributing.judge",
            ":Judge",
            "lacks metrics(), close(): subclass evolver.attributing.TurnJudge",
        ),
        ("attributing.judge", ":Forgetful", "lacks label()"),
        ("template", ":Blocking", "lacks `async` before `def extend`"),
    ],
)
def test_a_plug_that_cannot_be_used_is_one_message(key, name, words):
    (message,) = plugs.problems(key, HERE + name if name.startswith(":") else name, {})
    assert words in message


def test_a_parameter_before_the_star_and_one_without_a_type_are_explained():
    assert "floor is positional: put it after `*`" in problem("starless", {"floor": 1.0})
    assert "floor='abc' must be of type float" in problem("unannotated", {"floor": "abc"})


@pytest.mark.parametrize("key", plugs.KINDS)
def test_every_known_name_can_be_used_with_its_defaults(key):
    for name in plugs.known(key):
        assert plugs.problems(key, name, {}) == []
        assert plugs.resolved(key, name, {}).startswith(f"{name}(")
    assert plugs.attribute(plugs.KINDS[key].protocol).__doc__


def test_a_default_stands_in_the_signature_only():
    """No known plug has a key of the config beside `args` that could disagree with it."""
    keys = flat(base.get_config())
    for key in plugs.KINDS:
        for name in plugs.known(key):
            for argument in plugs.values(key, name, {}):
                assert f"{key}.{argument}" not in keys, f"{key}.{argument}"


def test_modules_are_found_in_the_folders_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    (tmp_path / "my_estimator.py").write_text("def mine(batch):\n    return batch.outcome_N\n")
    assert "No module named" in plugs.problems("advantage", "my_estimator:mine", {})[0]
    plugs.look_in(tmp_path)
    assert os.environ["PYTHONPATH"] == f"/somewhere{os.pathsep}{tmp_path}"  # for worker processes
    assert plugs.problems("advantage", "my_estimator:mine", {}) == []
