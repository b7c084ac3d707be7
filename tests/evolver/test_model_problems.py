"""A checkpoint's config.json that cannot be run is refused in the list of all problems, in every
mode."""

import json

import pytest

from configs import base, pretrained
from evolver import plan
from evolver.build import load_tokenizer
from evolver.config.checks.model import model_problems
from evolver.plan import facts
from tests.models.test_chat_qwen3 import SWITCHED


@pytest.fixture
def config(checkpoint):
    config = base.get_config()
    config.model.path = str(checkpoint)
    return config


@pytest.fixture
def changed(checkpoint):
    """Change values of the checkpoint's config.json."""
    path = checkpoint / "config.json"
    kept = json.loads(path.read_text())
    return lambda **values: path.write_text(json.dumps(kept | values))


@pytest.mark.parametrize("mode", ["train", "eval", "explore", "pool", "plan"])
def test_an_unsupported_model_is_named_with_the_other_problems(ends, checkpoint, changed, mode):
    changed(model_type="mixtral")
    said = ends(2, f"--config.model.path={checkpoint}", f"--mode={mode}", "--config.optim.lr=0")
    assert "2 problems" in said
    assert "model_type is 'mixtral'; supported are qwen2, qwen3, llama" in said


def test_a_sound_checkpoint_has_no_problems(config, changed):
    changed(rope_scaling={"type": "default"}, layer_types=["full_attention"])
    assert not list(model_problems(config, "train"))


def test_each_file_that_names_an_end_of_turns_must_name_one_of_the_tokenizer(checkpoint, config):
    generation = checkpoint / "generation_config.json"
    im_end = load_tokenizer(config).im_end
    generation.write_text(json.dumps({"eos_token_id": [3]}))
    [problem] = model_problems(config, "train")
    assert f"generation_config.json of {checkpoint} with 3: they do not belong" in problem
    generation.write_text(json.dumps({"eos_token_id": [im_end, 3]}))
    assert not list(model_problems(config, "train"))
    found = facts.vocabulary(config)["ends of turns"]
    assert f"<|im_end|> ({im_end})" in found and "; 3 of generation_config.json does not" in found


def test_the_plan_names_the_rows_that_are_never_sampled(config, changed):
    ids = f"{load_tokenizer(config).vocab_size:,} ids"
    assert facts.vocabulary(config)["vocabulary"] == ids
    changed(vocab_size=load_tokenizer(config).vocab_size + 7)
    found = facts.vocabulary(config)["vocabulary"]
    assert found == f"{ids}; the other 7 rows of the model are never sampled"


@pytest.mark.parametrize("value", ["on", "off"])
def test_a_thinking_switch_needs_a_template_that_has_one(checkpoint, config, value):
    config.template.thinking = value
    assert [text for text in model_problems(config, "train") if "has no thinking switch" in text]
    (checkpoint / "chat_template.jinja").write_text(SWITCHED)
    assert not list(model_problems(config, "train"))
    assert load_tokenizer(config).thinking is (value == "on")


@pytest.mark.parametrize(
    "path,command",
    [
        (pretrained.SMOL, "; `make pretrained` writes it"),
        (
            "runs/home_base/policy",
            "; `python -m experiments.imitation --config=configs/home_base.py` writes it",
        ),
        ("runs/quickstart/policy", ""),
        ("runs/nothing_base/policy", ""),
    ],
)
def test_a_policy_that_was_not_made_yet_is_named_with_its_command(
    config, path, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evolver.config.paths.ROOT", tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/home_base.py").touch()
    config.model.path = path
    assert list(model_problems(config, "eval")) == [
        f"config.model.path={path}: there is no such directory{command}"
    ]


def test_a_plan_by_itself_says_what_it_cannot_plan_for(config, changed):
    changed(model_type="mixtral")
    with pytest.raises(plan.PlanError, match="model_type is 'mixtral'"):
        plan.plan(config, "runs/x")
