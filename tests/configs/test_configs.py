"""Configs are data: every key is documented once, every variant is short and made of known keys."""

import ast
import dataclasses
import math
import pkgutil
import re
import typing
from pathlib import Path

import pytest

import run
from configs import base, meshes, relatives
from evolver.config import plugs
from evolver.config.derived import mechanisms_of
from evolver.config.keys import flat, keys_of
from evolver.config.values import described
from evolver.llm.questions import Role
from evolver.llm.roles import ROLES
from models.attention import IMPLEMENTATIONS
from models.mesh import RULES
from models.qwen import INPUTS, PRESETS, REMAT
from rl.losses import AGGREGATES
from tests.configs import config_of, mistakes

ROOT = Path(__file__).parents[2]
PARTS = ("__init__", "base", "keys", "language_models", "meshes")
# configs of imitation, which have keys of their own (tests/experiments/test_imitation.py)
IMITATION = ("imitation", "base_policy")
FILES = [
    path
    for path in sorted((ROOT / "configs").glob("*.py"))
    if path.stem not in PARTS + IMITATION and not path.stem.endswith("_base")
]
KEYS = keys_of(base.Config)
ROLE = {field.name for field in dataclasses.fields(Role)}
LLM_ROLES = [f"llm.{name}" for name in ROLES]
PAPER = ("appworld_14b", "appworld_7b", "bfcl_14b", "bfcl_7b")
ARGUMENTS = {
    "quickstart": ("grpo", "q", "qn", "qa", "all"),
    "home": ("q",),
    "pretrained": ("words", "calls"),
    "relatives": tuple(relatives.CHANGES),
}
ARGUMENTS |= dict.fromkeys(PAPER, ("original", "q", "hybrid", "qn", "qa", "all"))
VARIANTS = [p.stem for p in FILES]
for name, arguments in ARGUMENTS.items():
    VARIANTS += [f"{name}:{argument}" for argument in arguments]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_made_of_known_keys_with_sound_values(name):
    assert not mistakes(config_of(name))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_variant_is_short_and_opens_with_its_command(path):
    text = path.read_text()
    assert text.count("\n") < 120
    assert f"--config=configs/{path.name}" in ast.get_docstring(ast.parse(text))


def test_the_base_is_sound_apart_from_having_no_policy():
    assert not mistakes(base.get_config())


def test_lists_are_not_used_because_flags_cannot_override_them():
    assert not [name for name, key in KEYS.items() if isinstance(key.default, list)]


def attributes(path):
    """Every "a.b.c" of a module; names that a function gives to parts (`c = run.config.rollout`)
    are replaced by what they stand for. What `arguments(target, a.b)` passes by name is "a.b" with
    each parameter of the target, and `plugged(config, "a.b")` reads "a.b"."""
    tree = ast.parse(path.read_text())
    found = set()
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            origins |= {alias.name: node.module for alias in node.names}
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, functions))):
        names = {}
        for node in ast.walk(scope):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts)
                names |= {t.id: ast.unparse(value) for t, value in pairs if isinstance(t, ast.Name)}
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute):
                found.add(written_out(node, names))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "plugged":
                found.add(f"config.{ast.literal_eval(node.args[1])}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "arguments":
                if origins.get("arguments") == "evolver.config.keys":
                    target, group = node.args
                    owner = written_out(group, names)
                    found |= {f"{owner}.{name}" for name in parameters_of(target, origins)}
    return found


def written_out(node, names):
    head, *rest = ast.unparse(node).split(".")
    return ".".join([names.get(head, head), *rest])


def parameters_of(target, origins):
    """The parameters of a callable that a module has imported."""
    name = ast.unparse(target)
    # `from rl import optim` gives a module that nobody may have imported yet.
    called = pkgutil.resolve_name(f"{origins[name.partition('.')[0]]}.{name}")
    return list(plugs.parameters(called))


def test_every_key_is_read_by_the_code():
    sources = [*(ROOT / "evolver").rglob("*.py"), ROOT / "run.py"]
    read = "\n".join(set().union(*map(attributes, sources)))
    for name in KEYS:
        section, _, key = name.rpartition(".")
        if section == "sharding":
            continue  # passed on as a whole
        if key == "args" or name.removesuffix("name") + "args" in KEYS:
            section, _, key = section.rpartition(".")  # a plug is passed on as a whole
        if section in ("llm", *LLM_ROLES) and key in ROLE:
            continue  # passed on by name
        owner = rf"\b{section.rpartition('.')[2]}" if section else r"\b(c|config)"
        assert re.search(rf"{owner}\.{key}\b", read), f"nothing reads config.{name}"


def test_choices_are_those_of_the_code():
    for name, choices in {
        "model.preset": PRESETS, "loss.aggregate": AGGREGATES, "lora.targets": INPUTS,
    }.items():  # fmt: skip
        assert described(KEYS[name].annotation).endswith(f"one of {', '.join(choices)}")
    for name, choices in {"model.remat": REMAT, "model.attention": IMPLEMENTATIONS}.items():
        assert set(typing.get_args(KEYS[name].annotation)) == set(choices)
    assert base.get_config().sharding.to_dict() == RULES


def test_an_argument_no_config_knows_is_refused():
    for name in (*ARGUMENTS, "base"):
        with pytest.raises(ValueError, match="nonsense"):
            config_of(f"{name}:nonsense")


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_configs_have_its_values(name):
    """Section 3 of the paper and its appendix; where it is silent, the reference's defaults."""
    benchmark, size = name.split("_")
    config = config_of(name)
    value = flat(config)
    for plug in plugs.in_config(config):
        value |= {f"{plug[0]}.args.{argument}": v for argument, v in plugs.values(*plug).items()}
    expected = {
        "model.preset": size,
        "env.name": benchmark,
        "steps": 100,
        "rollout.tasks": 32,
        "rollout.group": 8,
        "rollout.temperature": 0.9,
        "rollout.max_turns": 30,
        "rollout.context": 25580,
        "rollout.max_tokens": 4096,
        "learner.updates": 4,
        "learner.epochs": 1,
        "optim.lr": 1e-6,
        "optim.schedule": "constant",
        "loss.kl_coef": 0.001,
        "loss.args.clip_low": 0.28,
        "loss.args.clip_high": 0.28,
        "loss.args.clip_high_guided": 0.6,
        "loss.aggregate": "token-mean",
        "questioning.share": 1.0,
        "questioning.budget": 500,
        "questioning.explorer.args.breadth": 3,
        "questioning.explorer.args.depth": {"appworld": 17, "bfcl": 27}[benchmark],
        "questioning.overlap": 0.8,
        "navigating.share": 0.5,
        "navigating.top_k": 5,
        "navigating.rollouts": 4,
        "navigating.tasks": 0,
        "navigating.min_similarity": 0.0,
        "navigating.embedder.name": "endpoint",
        "llm.embedder.model": "text-embedding-v4",
        "advantage.name": "adca",
        "advantage.args.alpha": 0.1,
        "advantage.args.norm": "trajectory",
        "eval.split": {"appworld": "dev", "bfcl": "val"}[benchmark],
        "eval.rollouts": 8,
        "eval.every": 10,
    }
    assert {key: value[key] for key in expected} == expected
    assert mechanisms_of(config) == ["questioning", "navigating", "attributing"]


@pytest.mark.parametrize("name", PAPER)
def test_a_plan_of_the_papers_configs_needs_neither_weights_nor_devices(name, capsys):
    assert run.main(["run.py", f"--config=configs/{name}.py", "--mode=plan"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"step_judge \(qwen-max\) +at most 25,", out)
    parameters = {"14b": "14,770,033,664", "7b": "7,615,616,512"}
    assert "25,600" in out and parameters[name.split("_")[1]] in out


@pytest.mark.parametrize("devices", sorted(meshes.MESHES))
def test_meshes_use_all_devices_and_spread_the_rows(devices):
    config = meshes.use(config_of("appworld_14b"), devices)
    assert math.prod(config.mesh.values()) == devices
    assert not mistakes(config)
    with pytest.raises(ValueError, match="there is one for 1, 8, 16, 64"):
        meshes.use(config, devices + 1)


@pytest.mark.parametrize(
    "override",
    ["rollout.temperature=0.0", "learner.updates=99", "learner.row=2", "rollout.group=1"],
)
def test_a_plan_refuses_what_training_refuses(override):
    config = config_of("quickstart:grpo", override)
    assert mistakes(config, "plan") == mistakes(config, "train") != []
    assert mistakes(config, "eval") == []
