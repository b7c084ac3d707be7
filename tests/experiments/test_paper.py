"""The command that makes the paper's tables, with results as finished runs leave them."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from evolver.files.workdir import Workdir
from evolver.plan.case import case_of
from evolver.plan.estimate import overheads, step_seconds
from experiments import commands
from experiments.ledger import Ledger
from experiments.paper import __main__ as paper
from experiments.paper import costs, measures, tables
from experiments.paper.study import TABLES, chosen, study_of
from rl.evaluation import Scores
from tests.experiments.results import named, record_attempt, scores_of

TASKS = ["a_1", "a_2", "b_1", "c"]


def scores(rate: float, seed: int = 0, k: int = 8) -> Scores:
    success_NR = (np.random.default_rng(seed).random((len(TASKS), k)) < rate).astype(int).tolist()
    greedy = [int(rate > 0.5)] * len(TASKS)
    return scores_of(success_NR, TASKS, greedy_N=greedy, temperature=0.9)


def mean(rate: float) -> float:
    """The avg@8 of `scores` over seeds 0 and 1, in percent."""
    return 100 * np.mean([scores(rate, seed).per_task("avg@8").mean() for seed in (0, 1)])


def finish(folder, name: str, *, curve=None, final=None, code=0):
    """Write what a finished run leaves behind: {step: scores} of training, or one evaluation."""
    workdir = Workdir(folder / name)
    for step, found in (curve or {}).items():
        workdir.log_scores(step, found)
    if final:
        workdir.log_evaluation({"scores": [vars(final)]})
    record_attempt(folder, name, code, git="0123456789abcdef")


@pytest.fixture
def finished(tmp_path):
    """Figure 16 at tiny scale, seeds 0 and 1: alpha 0.1 learns sooner and ends higher than 0; one
    run failed."""
    for seed in (0, 1):
        rises = {"q": (0.1, 0.2, 0.3, 0.4), "qa": (0.1, 0.7, 0.8, 0.9)}
        rises["alpha020"] = (0.1, 0.5, 0.7, 0.8)
        for row, rates in rises.items():
            curve = {step: scores(rate, seed) for step, rate in zip((0, 4, 12, 20), rates)}
            finish(tmp_path, f"14b-appworld-{row}-{seed}", curve=curve)
    finish(tmp_path, "14b-appworld-alpha030-0", curve={0: scores(0.1)}, code=1)
    return tmp_path


def make(words: str) -> int:
    return commands.run(paper.main, words.split())


def rows_of(folder, study, table: str) -> dict[tuple[str, str], dict[str, str]]:
    """Return {(cell, measure): {column: text}}; only the first row of a cell names it."""
    rows = named(tables.Table(study, table, study.tables[table], Ledger(folder)).lines())
    return {(row["cell"], row["measure"]): row for row in rows}


def test_a_table_has_ours_beside_the_published_numbers_and_the_paired_orderings(finished):
    command = f"figure16 --scale=tiny --only-report --seeds=0,1 --workdir={finished}"
    assert make(command) == 0
    text = (finished / "tables/figure16.md").read_text()
    assert "none of its scores compares with the paper's" in text
    lines = csv.DictReader((finished / "tables/figure16.csv").open())
    (ours,) = [line for line in lines if (line["cell"], line["measure"]) == ("0.1", "avg@8")]
    assert ours.pop("ours [95%]").startswith(f"{mean(0.9):.1f} [")
    known = {"published": "59", "seeds": "2", "hours": "0.02", "revision": "0123456789ab"}
    # nothing at tiny scale compares with the paper
    assert ours.items() >= (known | {"at T=0": "100.0", "ours - published": ""}).items()
    assert chosen(["figure16"])["figure16"]["0.3"].published["early"] == 45
    below = text.partition("orderings:")[2].splitlines()
    (difference,) = [line for line in below if line.startswith("| 0.1 ")]
    assert "+4.0" in difference and difference.rstrip("| ").endswith("yes")  # 59 - 55
    assert "14b-appworld-alpha030-0 failed" in text and "seed 1 is missing" in text
    assert (finished / "tables/figure16.png").exists()
    assert "NOT THE PAPER" in (finished / "tables/figure16.svg").read_text()


def test_no_server_is_asked_for_where_nothing_is_run(tmp_path, stdout):
    cell = f"figure1 --cells=32b,appworld --workdir={tmp_path}"
    assert make(f"{cell} --only-report") == 0 and (tmp_path / "tables/figure1.md").exists()
    assert make(f"{cell} --dry-run") == 0 and "eval-32b-appworld" in stdout()


def test_full_scale_has_the_difference_to_the_published_number(finished):
    study = study_of(["figure16"], scale="full", seeds=[0, 1], cells=["0.1"])
    for seed in (0, 1):
        finish(finished, f"eval-14b-appworld-qa-in-appworld-dev-t0-{seed}", final=scores(0.0, seed))
    row = rows_of(finished, study, "figure16")["0.1", "avg@8"]
    ours, minus = (float(row[name].split()[0]) for name in ("ours [95%]", "ours - published"))
    assert minus == pytest.approx(ours - 59, abs=0.11) and row["at T=0"] == "0.0"


def test_sample_efficiency_is_measured_against_the_baselines_best(finished):
    study = study_of(["table6"], scale="tiny", seeds=[0, 1], cells=["14b,appworld,*"])
    rows = rows_of(finished, study, "table6")
    assert math.isnan(measures.goal_of([{}])) and mean(0.4) < 70
    attributing = rows["14b,appworld,attributing", "steps@.9"]
    assert attributing["ours [95%]"] == "4, 4" and attributing["published"] == "40"
    assert float(rows["", "auc"]["ours [95%]"].split()[0]) > 0


def test_best_at_k_comes_with_pass_at_k_and_scenarios_need_all_their_tasks():
    assert measures.shown({"avg@8": 1, "best@8": 2}, 8) == ["avg@8", "best@8", "pass@8"]
    one = scores(0.5)
    assert len(measures.per_task("sgc@8", one, {})) == 3
    assert len(measures.per_task("tgc@4", one, {})) == 4
    assert measures.per_task("best@16", one, {}) is None
    assert measures.per_task("avg@4", None, {}) is None
    assert measures.per_task("early", one, {0: one, 20: one}) is None


def test_latex_escapes_what_it_would_read_as_commands():
    text = tables.latex([list(tables.HEAD), ["a_b", "best@8", "50%", *[""] * 9]], "R&D 5%")
    parts = (r"a\_b", r"50\%", r"\caption{R\&D 5\%}", r"\begin{tabular}{llr}")
    assert all(part in text for part in parts) and text.count(r"\\") == 2


@pytest.mark.parametrize(
    "words,said",
    [
        ("table9", "There are table1, table2"), ("tabel2", "Did you mean table2?"),
        ("table2 --cells 14b,hybrid", "The cells are 7b,appworld,base; 7b,bfcl,base"),
        ("all --cells 14b,* 14b,appwrld,*", "none of these tables has a cell 14b,appwrld,*."),
        ("all --cells 14b,appworld,hybird", "Did you mean 14b,appworld,hybrid?"),
        ("table2 --scale=tiny -- --config.stpes=1", "did you mean steps?"),
        ("table2 --seeds=a", "--seeds=a: give whole numbers"),
        ("table2 --dry-run --target=zz", "--target=zz is not a target"),
        ("table2 --models x", "give SIZE=WHERE"),
        ("figure1 --cells 32b,* --scale=full", "give --models 32b=URL,NAME,TOKENIZER"),
        ("figure1 --cells 32b,* --scale=full --models 32b=http://h", "give URL,NAME,TOKENIZER"),
    ],
)  # fmt: skip
def test_bad_requests_list_what_there_is_and_start_nothing(words, said, tmp_path, stderr):
    assert make(words.replace(" ", f" --workdir={tmp_path}/runs ", 1)) == 2
    assert said in stderr() and not (tmp_path / "runs").exists()


def test_several_patterns_choose_the_tables_that_have_any_of_them():
    both = study_of(TABLES, scale="tiny", cells=["7b,*", "14b,*"]).tables
    assert both.keys() > study_of(TABLES, scale="tiny", cells=["7b,*"]).tables.keys()
    assert both["table4"] == [
        name for name in chosen(["table4"])["table4"] if name.startswith("14b,")
    ]
    assert study_of(TABLES, scale="tiny", cells=["naive"]).tables == {"figure12b": ["naive"]}


def test_flags_reach_every_run(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(paper.grid, "execute", lambda *_, **options: given.update(options) or {})
    flags = ["--config.engine.slots=8", "--config.log.wandb=offline"]
    assert make(f"figure12b --scale=tiny --workdir={tmp_path} -- {' '.join(flags)}") == 0
    assert given["flags"] == flags


def test_figure_14_is_ordered_by_the_scores_after_its_80_steps(finished):
    study = study_of(["figure14"], scale="tiny", seeds=[0])
    for row, rate in (("nav80", 0.9), ("unselected80", 0.1)):
        curve = {0: scores(0.1), 4: scores(1 - rate), 20: scores(rate)}
        finish(finished, f"14b-appworld-{row}-0", curve=curve)
    rows = rows_of(finished, study, "figure14")
    assert rows["0.6", "early"]["published"] == "41" and rows["", "avg@8"]["published"] == ""
    order = tables.Table(study, "figure14", study.tables["figure14"], Ledger(finished)).orderings()
    assert order[1][:4] == ["0.6", "0.28", "avg@8", ""] and order[1][-1] == "yes"


def test_steps_that_a_seed_never_reaches_have_no_mean(finished):
    study = study_of(["table6"], scale="full", seeds=[0, 1], cells=["14b,appworld,*"])
    finish(finished, "14b-appworld-qa-1", curve={step: scores(0.0, 1) for step in (0, 4, 12, 20)})
    row = rows_of(finished, study, "table6")["14b,appworld,attributing", "steps@.9"]
    assert list(row.values())[3:6] == ["4, never", "", ""]


def test_a_dry_run_lists_every_run_once_with_its_users(stdout):
    assert make("table3 --scale=tiny --cells 14b,* --dry-run --seeds=0,1") == 0
    out = stdout()
    assert out.count("| 14b-appworld-q-0 ") == 1 and "| 14b-bfcl-q-0 " in out and "runs" in out


def test_hours_follow_the_steps_and_money_the_prices(tmp_path):
    cells = ["14b,appworld,original", "14b,appworld,synthetic"]
    study = study_of(["table2"], scale="full", cells=cells)
    runs = {name: costs.cost_of(study, run, "a100-80g:8") for name, run in study.runs.items()}
    original, synthetic = runs["14b-appworld-original-0"], runs["14b-appworld-q-0"]
    assert 0.75 < original.hours / synthetic.hours < 0.85
    assert original.money == 0 and synthetic.money is None
    case = case_of(costs.paper_runs.get_config("14b,appworld,q"), "a100-80g:8")
    step, _ = costs.pace("14b", "appworld", "a100-80g:8")
    moved = overheads(case)["offload"] + overheads(case)["weight sync"]
    assert step >= step_seconds(case) + moved / case.config.steps > step_seconds(case)
    prices = tmp_path / "prices.json"
    prices.write_text('{"qwen-plus": [1, 2], "qwen3-235b-a22b-instruct-2507": [1, 2]}')
    priced = costs.cost_of(study, study.runs["14b-appworld-q-0"], "a100-80g:8", str(prices))
    assert priced.money > 1


def test_runs_of_a_study_share_the_answers_of_language_models():
    runs = study_of(["table1"], scale="full").runs.values()
    assert {run.overrides.get("llm.cache") for run in runs} == {"{folder}/llm_cache"}


def test_a_served_model_needs_no_weights_here():
    where = "http://127.0.0.1:9,qwen3-235b,/dir/of/tokenizer"
    full = {"scale": "full", "models": {"qwen3-235b-a22b": where}}
    study = study_of(["figure1"], cells=["qwen3-235b-a22b,appworld"], **full)
    run, greedy = study.runs.values()
    assert run.overrides["engine.vllm.transfer"] == "none"
    assert run.overrides["engine.vllm.model"] == "qwen3-235b"
    assert "model.path" not in run.overrides and greedy.overrides["eval.temperature"] == 0.0
    assert run.overrides["template.thinking"] == "off"
    thinking = study_of(["figure1"], cells=["qwen3-235b-a22b-thinking,appworld"], **full)
    run, _ = thinking.runs.values()
    assert run.overrides["template.thinking"] == "on" and run.config.endswith("thinking")
    tiny = study_of(["figure1"], scale="tiny", cells=["32b,*"])
    assert not tiny.runs and set(tiny.left_out.values()) == {"has no counterpart at tiny scale"}


def test_the_tables_are_those_of_the_folder():
    from configs import paper as folder

    files = {path.stem for path in Path(folder.__file__).parent.glob("*.py")}
    assert files == {*TABLES, "__init__", "cells", "runs", "policies"}
    with pytest.raises(commands.Problems):
        chosen(["cells"])
