"""Tests of the plans in docs/plans: they are up to date, and the paper's lengths fit on the paper's
devices."""

import shutil
from dataclasses import replace

import pytest

from evolver.plan.estimate import fits
from experiments import plans


@pytest.mark.parametrize("name", plans.KEPT)
def test_a_plan_is_up_to_date(name):
    reasons = plans.problems(name)
    assert not reasons, (
        f"{reasons}; `python -m experiments.plans {name}` compiles it again, `--render` only the text"
    )


@pytest.mark.parametrize("name", plans.KEPT)
def test_the_papers_lengths_are_planned_with_compiled_programs(name):
    case = replace(plans.kept_case(name), compiled=plans.read(name)["compiled"])
    assert case.config.rollout.context == 25_580 and case.config.learner.row >= 25_580
    assert {"update", "logp"} <= set(case.programs) and fits(case)


def test_a_plan_of_another_config_is_out_of_date(monkeypatch):
    for key, value, words in (
        ("learner.row", 32_768, "learner.row: "),
        ("loss.name", "gspo", "loss: 'ppo("),
    ):
        monkeypatch.setitem(plans.KEPT, "bfcl_7b", ("bfcl_7b", "a100-80g:8", {key: value}))
        assert any(line.startswith(words) for line in plans.problems("bfcl_7b"))


def test_a_text_is_rendered_from_the_kept_figures(monkeypatch, tmp_path):
    for path in plans.FOLDER.glob("bfcl_7b.*"):
        shutil.copy(path, tmp_path)
    kept = (tmp_path / "bfcl_7b.txt").read_text()
    monkeypatch.setattr(plans, "FOLDER", tmp_path)
    (tmp_path / "bfcl_7b.txt").write_text("old")
    assert plans.problems("bfcl_7b") == ["bfcl_7b.txt does not follow from the figures"]
    assert plans.main(("bfcl_7b",), render=True) == 0 and not plans.problems("bfcl_7b")
    assert (tmp_path / "bfcl_7b.txt").read_text() == kept
