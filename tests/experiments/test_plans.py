"""Tests of the plans in docs/plans: they are up to date, and the paper's lengths fit on the paper's
devices."""

import json

import pytest

from experiments import plans


@pytest.mark.parametrize("name", plans.KEPT)
def test_a_plan_is_up_to_date(name):
    reasons = plans.problems(name)
    assert not reasons, (
        f"{reasons}; `python -m experiments.plans {name}` compiles it again, `--render` only the text"
    )


@pytest.mark.parametrize("name", plans.KEPT)
def test_the_papers_lengths_are_planned_with_compiled_programs(name):
    case, _ = plans.case_of(name)
    assert case.config.rollout.context == 25_580 and case.config.learner.row >= 25_580
    kept = json.loads((plans.FOLDER / f"{name}.json").read_text())
    assert {"update", "logp"} <= set(kept["compiled"]["phases"])
    _, record = plans.text_of(name, kept["compiled"])
    assert record["learner"] <= record["limit"] and record["sources"]["update"] == "compiled"
    assert record["fits"]


def test_a_plan_of_another_config_is_out_of_date(monkeypatch):
    monkeypatch.setitem(plans.KEPT, "bfcl_7b", ("bfcl_7b", "a100-80g:8", {"learner.row": 32_768}))
    assert any("learner.row" in line for line in plans.problems("bfcl_7b"))
    monkeypatch.setitem(
        plans.KEPT, "bfcl_7b", ("bfcl_7b", "a100-80g:8", {"optim.master": "bfloat16"})
    )
    assert any("optim.master" in line for line in plans.problems("bfcl_7b"))
    monkeypatch.setitem(plans.KEPT, "bfcl_7b", ("bfcl_7b", "a100-80g:8", {"loss.name": "gspo"}))
    assert any(line.startswith("loss: 'ppo(") for line in plans.problems("bfcl_7b"))


def test_a_text_is_rendered_from_the_kept_figures(monkeypatch, tmp_path):
    for suffix in (".json", ".txt"):
        (tmp_path / f"bfcl_7b{suffix}").write_bytes(
            (plans.FOLDER / f"bfcl_7b{suffix}").read_bytes()
        )
    kept = (tmp_path / "bfcl_7b.txt").read_text()
    monkeypatch.setattr(plans, "FOLDER", tmp_path)
    (tmp_path / "bfcl_7b.txt").write_text("old")
    assert plans.problems("bfcl_7b") == ["bfcl_7b.txt does not follow from the figures"]
    monkeypatch.setattr("sys.argv", ["plans", "--render", "bfcl_7b"])
    assert plans.main() == 0 and not plans.problems("bfcl_7b")
    assert (tmp_path / "bfcl_7b.txt").read_text() == kept
