"""The kept plans still follow from the configs, and the paper's lengths fit where the paper ran."""

import json

import pytest

from experiments import plans


@pytest.mark.parametrize("name", plans.KEPT)
def test_a_kept_plan_still_holds(name):
    found = plans.problems(name)
    assert not found, f"{found}; `python -m experiments.plans {name}` compiles it again"


@pytest.mark.parametrize("name", plans.KEPT)
def test_the_papers_lengths_are_planned_with_compiled_programs(name):
    case, _ = plans.case_of(name)
    assert case.config.rollout.context == 25_580 and case.config.learner.row >= 25_580
    kept = json.loads((plans.FOLDER / f"{name}.json").read_text())
    assert {"update", "logp"} <= set(kept["compiled"]["phases"])
    _, record = plans.text_of(name, kept["compiled"])
    assert record["learner"] <= record["limit"] and record["sources"]["update"] == "compiled"
    assert record["fits"]


def test_a_plan_of_another_config_no_longer_holds(monkeypatch):
    monkeypatch.setitem(plans.KEPT, "bfcl_7b", ("bfcl_7b", "a100-80g:8", {"learner.row": 32_768}))
    assert any("learner.row" in line for line in plans.problems("bfcl_7b"))
    monkeypatch.setitem(plans.KEPT, "bfcl_7b", ("bfcl_7b", "a100-80g:8", {"optim.master": "bfloat16"}))
    assert any("optim.master" in line for line in plans.problems("bfcl_7b"))
